"""The conductor, without Ray: orders, reports, and when an attempt is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from raydist.cluster import conductor
from raydist.cluster.conductor import Conductor, rank_error

OUTCOME = {"outcome": {"status": "finished"}, "at": 1.0}
DIED = {"died": {"pid": 7, "node_ip": "10.0.0.1", "how": "SIGKILL", "starved": ""}, "at": 2.0}


def error(message: str) -> dict[str, Any]:
    """A report of an exception."""
    facts = {
        "rank": 0,
        "type_name": "RuntimeError",
        "message": message,
        "traceback": "",
        "at": 1.0,
        "bases": ["RuntimeError"],
    }
    return {"error": facts, "at": 1.0}


async def ready(group: int = 1, world: int = 2) -> tuple[Conductor, list[asyncio.Task[Any]]]:
    """A conductor whose agents wait for their first order."""
    made = Conductor()
    await made.open(group, world)
    return made, [
        asyncio.create_task(made.next(group, rank, 1, {"host": f"h{rank}", "port": rank})) for rank in range(world)
    ]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_an_attempt_that_ends_well() -> None:
    """It begins once all agents are there, at rank 0's address, and is over once all have reported."""

    async def test() -> None:
        made = Conductor()
        await made.open(1, 2)
        begun = asyncio.create_task(made.begin(5, {"a": 1}))
        first = asyncio.create_task(made.next(1, 0, 1, {"host": "h0", "port": 10}))
        await asyncio.sleep(0)
        assert not begun.done()
        second = await made.next(1, 1, 1, {"host": "h1", "port": 11})
        assert (
            second
            == await first
            == {"number": 2, "do": "train", "attempt": 5, "job": {"a": 1}, "host": "h0", "port": 10}
        )
        result = asyncio.create_task(made.result(5))
        await made.ended(1, 0, 5, OUTCOME)
        await asyncio.sleep(0)
        assert not result.done()
        await made.ended(1, 1, 5, OUTCOME)
        assert await result == {0: OUTCOME, 1: OUTCOME}
        await made.leave()
        assert (await made.next(1, 0, 2, {}))["do"] == "leave"

    run(test())


def test_a_death_ends_the_others_at_once() -> None:
    """Rank 1 died: rank 0, which may not even know, is to be killed; over once it has been."""

    async def test() -> None:
        made, waiting = await ready()
        await made.begin(1, {})
        for order in asyncio.as_completed(waiting):
            assert (await order)["do"] == "train"
        result = asyncio.create_task(made.result(1))
        killed = asyncio.create_task(made.next(1, 0, 2, {}))
        await made.ended(1, 1, 1, DIED)
        assert (await killed)["do"] == "kill"
        assert not result.done()
        await made.ended(1, 0, 1, error("Connection closed by peer"))
        assert set(await result) == {0, 1}

    run(test())


def test_lost_peers_are_no_cause_to_stop_looking(monkeypatch: Any) -> None:
    """Rank 0 lost a peer: the others have time to say why; then, or when that is up, all are killed."""

    async def test() -> None:
        for late in (False, True):
            monkeypatch.setattr(conductor, "CAUSE_S", 0.05 if late else 1000.0)
            made, _ = await ready(world=3)
            await made.begin(1, {})
            result = asyncio.create_task(made.result(1))
            killed = asyncio.create_task(made.next(1, 2, 2, {}))
            await made.ended(1, 0, 1, error("Connection closed by peer"))
            if not late:
                await asyncio.sleep(0.1)
                assert not killed.done()
                await made.ended(1, 1, 1, DIED)
            assert (await killed)["do"] == "kill"
            await made.ended(1, 1, 1, DIED)
            await made.ended(1, 2, 1, DIED)
            assert set(await result) == {0, 1, 2}

    run(test())


def test_who_is_late_is_not_heard() -> None:
    """Reports of an earlier attempt or group count for nothing; agents of an earlier group are sent away."""

    async def test() -> None:
        made, waiting = await ready(group=1)
        await made.begin(1, {})
        await made.open(2, 2)
        assert (await made.next(1, 0, 2, {}))["do"] == "leave"
        news = [asyncio.create_task(made.next(2, rank, 3, {"host": "h", "port": 1})) for rank in range(2)]
        await made.begin(2, {})
        assert (await news[0])["attempt"] == 2
        await made.ended(1, 0, 2, DIED)
        await made.ended(2, 0, 1, DIED)
        assert await made.reports() == {}
        for task in waiting:
            assert (await task)["do"] in ("train", "leave")

    run(test())


def test_reports_as_errors() -> None:
    """What recovery makes its decisions on."""
    assert rank_error(0, OUTCOME) is None
    died = rank_error(1, DIED)
    assert died is not None
    assert (died.rank, died.kind, died.at) == (1, "worker_died", 2.0)
    assert died.cause == "WorkerDied: process 7 on 10.0.0.1 ended without a word (SIGKILL)"
    raised = rank_error(0, error("no"))
    assert raised is not None
    assert (raised.kind, raised.cause, raised.bases) == ("user_error", "RuntimeError: no", ("RuntimeError",))
