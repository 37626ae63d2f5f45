"""The report queue delivers every report of a trial once, in order, and keeps nothing of a trial that has ended."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from raydist.cluster.sweep.report_queue import ReportQueue


def report(n: int, done: bool = False) -> dict[str, Any]:
    """A report that differs from those with another `n`."""
    return {"n": n, "done": done}


def test_reports_in_order() -> None:
    """A taker that is early waits for the report; trials are separate; after its last report a trial can start again."""

    async def test() -> None:
        report_queue = ReportQueue()
        waiting = asyncio.create_task(report_queue.take("a"))
        await asyncio.sleep(0)
        await report_queue.post("b", 0, report(9))
        assert not waiting.done()
        for n in (0, 1, 2):
            await report_queue.post("a", n, report(n, done=n == 2))
        assert [(await waiting)["n"], (await report_queue.take("a"))["n"], (await report_queue.take("a"))["n"]] == [
            0,
            1,
            2,
        ]
        assert (await report_queue.take("b"))["n"] == 9
        assert set(report_queue._queues) == {"b"}
        await report_queue.post("a", 0, report(3, done=True))
        assert (await report_queue.take("a"))["n"] == 3

    asyncio.run(asyncio.wait_for(test(), 240))


def test_an_actor_that_was_killed_takes_no_report() -> None:
    """Its call may still wait when the actor that Ray started in its place makes one: that one gets the next report."""

    async def test() -> None:
        report_queue = ReportQueue()
        killed = asyncio.create_task(report_queue.take("a"))
        await asyncio.sleep(0)
        following = asyncio.create_task(report_queue.take("a"))
        await asyncio.sleep(0)
        await report_queue.post("a", 0, report(0, done=True))
        assert (await following)["n"] == 0
        assert killed.cancelled()
        assert report_queue._queues == {}

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_reports_that_overtake_each_other(order: tuple[int, ...]) -> None:
    """In whatever order Ray runs the calls, reports are taken in the order they were posted; forgotten ones are dropped."""

    async def test() -> None:
        report_queue = ReportQueue()
        for n in order:
            await report_queue.post("a", n, report(n))
        assert [(await report_queue.take("a"))["n"] for _ in order] == [0, 1, 2, 3]
        for n in order[:2]:
            await report_queue.post("a", 4 + n, report(4 + n))
        await report_queue.forget("a", 8)
        for n in (*order[2:], 4):
            await report_queue.post("a", 4 + n, report(4 + n))
        assert (await report_queue.take("a"))["n"] == 8
        assert not report_queue._queues["a"]._early

    asyncio.run(asyncio.wait_for(test(), 240))
