"""The desk hands on every report of a cell once, in order, and keeps nothing of a cell that is over."""

from __future__ import annotations

import asyncio

from raydist.cluster.sweep.desk import Desk


def test_reports_in_order() -> None:
    """Who comes first waits for the report; cells do not mix; after the last report a cell can begin anew."""

    async def test() -> None:
        desk = Desk()
        waiting = asyncio.create_task(desk.take("a"))
        await asyncio.sleep(0)
        await desk.post("b", {"n": 9, "done": False})
        assert not waiting.done()
        for n in (1, 2, 3):
            await desk.post("a", {"n": n, "done": n == 3})
        assert [(await waiting)["n"], (await desk.take("a"))["n"], (await desk.take("a"))["n"]] == [1, 2, 3]
        assert (await desk.take("b"))["n"] == 9
        await desk.post("a", {"n": 4, "done": False})
        await desk.forget("a")
        again = asyncio.create_task(desk.take("a"))
        await asyncio.sleep(0)
        await desk.post("a", {"n": 5, "done": True})
        assert (await again)["n"] == 5
        assert set(desk._reports) == {"b"}

    asyncio.run(asyncio.wait_for(test(), 20))
