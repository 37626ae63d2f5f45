"""Ranks prove to each other that the same driver started them; whoever lacks the attempt's secret is refused."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from raydist.errors import RankRefused
from raydist.ipc import RENDEZVOUS_SECRET
from raydist.launch.rendezvous import hold_port, new_secret, port_of
from raydist.worker.comm import rendezvous
from raydist.worker.distributed import Rank
from tests import needs
from tests.sockets import taken

TIMEOUT = timedelta(seconds=60)


def come(rank: Rank, port: int, secrets: list[str], planted: str) -> tuple[bool, int]:
    """Meets at that port, and proves itself on the control group. `planted`: what rank 0's host had in rank 1's place before."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), RENDEZVOUS_SECRET: secrets[rank.rank]}
    rendezvous.GRACE_S = 2.0
    secret = rendezvous.take_secret()
    if rank.rank == 1 and planted:
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        stranger.set("raydist/hello/1", planted)
        stranger.set("raydist/complete", planted)
    store = rendezvous.meet(rank.rank, rank.world_size, TIMEOUT, secret)
    assert rank.control is not None
    dist.barrier(rank.control)
    rendezvous.prove(rank.control, secret)
    elsewhere = socket.socket().connect_ex(("127.0.0.2", port))
    dist.barrier(rank.control)
    store.set("done", "")  # rank 0's store lives until here
    return RENDEZVOUS_SECRET in os.environ, elsewhere


def answer(rank: Rank, secrets: list[str]) -> str:
    """Who this rank refuses, although all are connected already."""
    try:
        rendezvous.prove(rank.control, secrets[rank.rank].encode())  # type: ignore[arg-type]
    except RankRefused as error:
        return error.message.split(" did")[0]
    return ""


@pytest.mark.parametrize("planted", ["", "0" * 64])
def test_ranks_that_know_the_secret_meet(ranks: Any, planted: str) -> None:
    """Also if a stranger wrote into the store first. The store listens on one address, and no child inherits the secret."""
    with hold_port("127.0.0.1") as held:
        results = ranks.run(come, 3, port_of(held), [new_secret()] * 3, planted)
    assert results == [(False, 111)] * 3


def test_a_rank_comes_when_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the pauses of torch's store, which are ten times as long. What is wrong with an address is the store's to say."""
    waits: list[float] = []
    with hold_port("127.0.0.1") as held, socket.socket(fileno=rendezvous._listener("127.0.0.1", port_of(held))) as own:

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 20:
                own.listen()

        monkeypatch.setattr("time.sleep", sleep)
        rendezvous.await_listener("127.0.0.1", port_of(held), 2, 240.0)
    assert len(waits) == 20
    assert max(waits) <= 0.05
    rendezvous.await_listener("no such host", 1, 2, 240.0)
    assert len(waits) == 20


def test_who_does_not_know_it_is_refused(ranks: Any) -> None:
    """Rank 0 names the rank whose hello is not signed with the attempt's secret; no rank goes on."""
    secret = new_secret()
    with hold_port("127.0.0.1") as held:
        results = ranks.run(come, 2, port_of(held), [secret, new_secret()], "")
    assert isinstance(results[0], RankRefused), results
    assert "rank 1 did not prove" in results[0].message
    assert isinstance(results[1], Exception)


def test_who_takes_a_connection_is_refused_by_every_rank(ranks: Any) -> None:
    """Each pair of ranks is checked over its own connection: who got into the group otherwise cannot answer."""
    secret = new_secret()
    assert ranks.run(answer, 3, [secret, secret, new_secret()]) == ["rank 2", "rank 2", "rank 0"]
    assert ranks.run(answer, 3, [secret] * 3) == [""] * 3


def test_another_user_does_not_take_a_port_that_is_held(ranks: Any) -> None:
    """Neither while the agent alone holds it, nor while rank 0 has bound it and does not listen yet: this user's rank 0 gets it. A
    port that nobody holds is taken in each of these ways."""
    needs.require("second user")
    with hold_port("127.0.0.1") as held:
        port = port_of(held)
        assert taken("127.0.0.1", port) == ""
        with socket.socket(fileno=rendezvous._listener("127.0.0.1", port)):
            assert taken("127.0.0.1", port) == ""
        assert ranks.run(come, 2, port, [new_secret()] * 2, "") == [(False, 111)] * 2
    with hold_port("127.0.0.1") as given_back:
        port = port_of(given_back)
    assert len(taken("127.0.0.1", port).splitlines()) == 8
