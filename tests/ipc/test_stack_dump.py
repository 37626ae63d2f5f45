"""What an agent sees of real ranks that call different collectives: the verdict has both collectives, and both lines."""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raydist.diagnosis._hang import RankView, judge
from raydist.diagnosis._window import Window
from raydist.diagnosis.stopped import check
from raydist.ipc.stack_dump import Witness, answer, waits, where
from raydist.records import Event
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters

GROUPS = ("gradients", "metrics")


def trains(group: Any) -> None:
    dist.all_reduce(torch.ones(4, 2), group=group)  # rank 0 is here


def evaluates(group: Any) -> None:
    dist.broadcast(torch.ones(3), 0, group=group)  # rank 1 is here


def asymmetric(rank: Rank) -> dict[str, Any]:
    """Rank 0 waits in one group, rank 1 in another, until a thread of each makes the other's call. The fields of its view."""
    gradients, metrics = (dist.new_group(backend="gloo", group_desc=name) for name in GROUPS)
    stacks, (ours, theirs) = os.memfd_create("stacks"), socket.socketpair()
    answer(stacks, theirs)
    log = CollectiveCounters(rank.device)
    log.install()
    main, found = threading.get_ident(), dict[str, Any]()

    def look() -> None:
        witness = Witness(os.getpid(), stacks, ours)
        while not found.get("waits"):
            dump, collectives = witness.stacks(), witness.collectives()
            assert collectives is not None
            own = [one for one in collectives if one[0].endswith(GROUPS)]
            found.update(waits=waits(dump, main), where=where(dump, main), collectives=own)
        dist.barrier(group=rank.control)  # both ranks have looked
        evaluates(metrics) if rank.first else trains(gradients)

    for group in (gradients, metrics):
        dist.barrier(group=group)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        trains(gradients) if rank.first else evaluates(metrics)
        looking.join()
    finally:
        log.close()
        faulthandler.unregister(12)  # SIGUSR2
        for end in (ours, theirs):
            end.close()
        os.close(stacks)
    return found


def line(text: str) -> str:
    """The place of a line of this file, by its comment."""
    lines = Path(__file__).read_text().splitlines()
    at = next(i for i, one in enumerate(lines) if one.endswith(f"# {text}"))
    function = lines[at - 1].removeprefix("def ").partition("(")[0]
    return f"{__file__}:{at + 1} in {function}"


def test_both_ranks_and_both_collectives_are_named(ranks: Any) -> None:
    """The finding has operation, number, shapes and line of the rank that went elsewhere, and of the one that waits for it."""
    seen = {i: RankView("S", 7, "update", 11.0, **found) for i, found in enumerate(ranks.run(asymmetric, 2))}
    verdict = judge(seen)
    assert verdict.rank == 1
    elsewhere, waiting = verdict.sides
    assert (elsewhere["rank"], elsewhere["where"], elsewhere["number"]) == (1, line("rank 1 is here"), 2)
    assert (elsewhere["collective"], elsewhere["group"].split()[-1]) == ("gloo:broadcast of [[3]]", "metrics")
    assert (waiting["rank"], waiting["where"], waiting["number"]) == (0, line("rank 0 is here"), 2)
    assert (waiting["collective"], waiting["group"].split()[-1]) == ("gloo:all_reduce of [[4, 2]]", "gradients")
    assert verdict.why.endswith(f", gloo:all_reduce of [[4, 2]], at {waiting['where']}")
    data = {
        "attempt": 1,
        "rank": 1,
        "cause": f"RankHung: {verdict.why}",
        "fault": "worker_hung",
        "sides": verdict.sides,
    }
    (finding,) = check(Window(fresh=[Event("failure", 1.0, data)]))
    values = {one["figure"]: one["value"] for one in finding.evidence}
    assert values["line of rank 0"] == waiting["where"]
    assert values["line of rank 1"] == elsewhere["where"]
    assert values["collective of rank 0"] == f"gloo:all_reduce of [[4, 2]], number 2 of group {waiting['group']}"
    assert values["collective of rank 1"] == f"gloo:broadcast of [[3]], number 2 of group {elsewhere['group']}"
    assert finding.cause.startswith("ranks call different numbers of collectives")
