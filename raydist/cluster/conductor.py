"""Tells the agents of all ranks when to start an attempt and when to end it, and the driver how it ended.

Runs in: one zero-CPU actor, owned by the driver and on its node. Never imports torch; imports ray in `start_conductor` only.

    driver: open(group) . begin(attempt) . result(attempt) ....................... leave
    agents: next ......... train ......... ended(report) | late, look, seen | kill .. leave

An attempt is over once every rank has said how its process ended. Calls of an earlier group are answered with "leave".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from raydist.cluster.hangs import Sight, judge
from raydist.cluster.recovery import RankError, is_echo

CAUSE_S = 2.0
"""How long to wait for the cause when all that is known is that peers were lost. Whoever caused it ends in that time, or hangs."""
SIGHT_S = 8.0
"""How long agents have to look at their ranks: 3 s, and the way to storage for what they have seen."""


class Conductor:
    """See the module. Every method is a coroutine of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._group = self._world = 0
        self._offers: dict[int, Mapping[str, Any]] = {}
        self._order: dict[str, Any] = {"number": 0, "do": "wait"}
        self._attempt = 0
        self._reports: dict[int, dict[str, Any]] = {}
        self._sights: dict[int, dict[str, Any]] = {}
        self._late = False

    # --- from the driver

    async def open(self, group: int, world: int) -> None:
        """From now on `group`, of `world` ranks, is the one that is listened to. Numbers ascend."""
        self._group, self._world = group, world
        self._offers, self._reports = {}, {}
        await self._command("wait")

    async def places(self) -> dict[int, dict[str, Any]]:
        """Where each rank is, once every rank's agent is there: its offer."""
        await self._until(lambda: len(self._offers) == self._world)
        return {rank: dict(offer) for rank, offer in self._offers.items()}

    async def begin(self, attempt: int, job: Mapping[str, Any]) -> None:
        """Starts an attempt as soon as every rank's agent is there; `job` is what their ranks are given."""
        await self._until(lambda: len(self._offers) == self._world)
        self._attempt, self._reports = attempt, {}
        await self._command("train", attempt=attempt, job=dict(job), **self._offers[0])

    async def result(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Once it is over: every rank's report. The first failure ends it for all, as soon as its cause may be known.

        So does a rank that is late, if one is to blame: its report then says `hung`.
        """
        assert attempt == self._attempt
        hung: dict[int, dict[str, Any]] = {}
        while not hung:
            self._late = False
            await self._until(lambda: self._over() or self._failed() or self._late)
            if self._over() or self._failed():
                break
            hung = await self._look(attempt)
        if not self._over():
            if not hung:
                await self._until(lambda: self._over() or self._failed(but_echoes=True), CAUSE_S)
            await self._command("kill", attempt=attempt)
            await self._until(self._over)
        return self._reports | hung

    async def _look(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Asks all agents what they see of their ranks. The report of the one to blame, if there is one."""
        self._sights = {}
        await self._command("look", attempt=attempt)
        await self._until(lambda: self._failed() or len(self._sights) == self._world, SIGHT_S)
        if self._failed() or not self._sights:
            return {}
        verdict = judge({rank: Sight(**sight) for rank, sight in self._sights.items()})
        if verdict.rank is None:
            return {}
        silent = self._sights[verdict.rank]["seconds"]
        return {verdict.rank: {"hung": verdict.why, "at": time.time(), "silent_s": silent}}

    async def reports(self) -> dict[int, dict[str, Any]]:
        """Those of the present attempt so far."""
        return self._reports

    async def leave(self) -> None:
        """Ends the group."""
        await self._command("leave")

    # --- from the agents

    async def next(self, group: int, rank: int, seen: int, offer: Mapping[str, Any]) -> dict[str, Any]:
        """The first order after number `seen`: do wait, train, kill or leave. `offer`: its node, host and port."""
        if group == self._group:
            self._offers[rank] = offer
            await self._notify()
        await self._until(lambda: group != self._group or self._order["number"] > seen)
        return self._order if group == self._group else {"number": seen, "do": "leave"}

    async def ended(self, group: int, rank: int, attempt: int, report: dict[str, Any]) -> None:
        """How a rank's process ended: `outcome`, `error` (the fields of RankFailed) or `died` (pid, node_ip, how, starved).

        And `at`, Unix time, and `silent_s`, seconds since it last showed that it gets on.
        """
        if (group, attempt) == (self._group, self._attempt):
            self._reports[rank] = report
            await self._notify()

    async def late(self, group: int, attempt: int) -> None:
        """A rank has been in one phase for too long."""
        if (group, attempt) == (self._group, self._attempt):
            self._late = True
            await self._notify()

    async def seen(self, group: int, rank: int, attempt: int, sight: dict[str, Any]) -> None:
        """The answer to "look": the fields of `raydist.cluster.hangs.Sight`."""
        if (group, attempt) == (self._group, self._attempt):
            self._sights[rank] = sight
            await self._notify()

    # --- inside

    def _over(self) -> bool:
        return len(self._reports) == self._world

    def _failed(self, but_echoes: bool = False) -> bool:
        errors = [error for rank, report in self._reports.items() if (error := rank_error(rank, report)) is not None]
        return any(not (but_echoes and is_echo(error)) for error in errors)

    async def _command(self, do: str, **what: Any) -> None:
        self._order = {"number": self._order["number"] + 1, "do": do, **what}
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, true: Callable[[], bool], timeout_s: float | None = None) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(true), timeout_s)
            except TimeoutError:
                return


def rank_error(rank: int, report: Mapping[str, Any]) -> RankError | None:
    """What a rank's process ended with; None if it ended well."""
    if "outcome" in report:
        return None
    if "error" in report:
        error = report["error"]
        return RankError(**{**error, "bases": tuple(error["bases"])})
    if "hung" in report:
        return RankError(rank, "RankHung", report["hung"], at=report["at"], kind="worker_hung")
    died = report["died"]
    if died["starved"]:
        return RankError(rank, "OutOfMemory", died["starved"], at=report["at"], kind="out_of_memory")
    message = f"process {died['pid']} on {died['node_ip']} ended without a word ({died['how']})"
    return RankError(rank, "WorkerDied", message, at=report["at"], kind="worker_died")


def start_conductor() -> Any:
    """The run's conductor as an actor: zero CPUs, on this process's node, gone with this process. Returns its handle at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(Conductor).options(num_cpus=0, scheduling_strategy=here).remote()
