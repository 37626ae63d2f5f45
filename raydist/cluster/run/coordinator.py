"""Tells the agents of all ranks when to start an attempt and when to end it, and the driver how it ended.

Runs in: one zero-CPU actor, owned by the driver and on its node. Never imports torch; imports ray in `start_coordinator` only.

    driver:     open(group) . begin(attempt, size) . result(attempt) . cancel ......... leave
    agents:     next ........ train, as rank r ..... ended(report) | late, look, seen | kill .. leave     beat, every second
    controller:                                      fallen(agent)

An attempt has the first `size` agents of its group that live. It is over once every rank has said how its process ended, or its
agent is lost: Ray says that it is dead, or it has been silent for `LOST_S`. Who was lost is told to leave if it is heard again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raydist.cluster.run.hang_detection import RankView, judge
from raydist.cluster.run.root_cause import RankError, is_echo

CAUSE_S = 2.0
"""How long to wait for the cause when all that is known is that peers were lost. Whoever caused it ends in that time, or hangs."""
SIGHT_S = 8.0
"""How long agents have to look at their ranks: 3 s, and the way to storage for what they have seen."""
BEAT_S = 1.0
LOST_S = 8.0
LOST_AFTER_A_FAILURE_S = 4.0
"""An agent is lost once it has been silent for so long; sooner where peers have lost a connection already."""


@dataclass(slots=True)
class _Agent:
    """One agent of the group. `offer`: node (its id), placement_group, local_rank, and the host and port where ranks could meet."""

    offer: Mapping[str, Any]
    beat: float
    lost: dict[str, Any] | None = None
    """Why it is no longer one of us: the fields of RankError."""


class Coordinator:
    """See the module. Every method is a coroutine of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._group = self._size = 0
        self._agents: dict[int, _Agent] = {}
        self._order: dict[str, Any] = {"number": 0, "do": "wait"}
        self._attempt = 0
        self._team: dict[int, dict[str, str]] = {}
        """Agent -> the environment of its rank in the present attempt, as torchrun would set it."""
        self._reports: dict[int, dict[str, Any]] = {}
        self._sights: dict[int, dict[str, Any]] = {}
        self._told: set[int] = set()
        """Agents that have taken the order to train."""
        self._late = False

    # --- from the driver

    async def open(self, group: int, size: int) -> None:
        """From now on `group`, of `size` agents, is the one that is listened to. Numbers ascend."""
        self._group, self._size = group, size
        self._agents, self._team, self._reports = {}, {}, {}
        await self._command("wait")

    async def gathered(self) -> None:
        """Returns once every agent of the group is there."""
        await self._until(lambda: len(self._agents) == self._size)

    async def places(self, size: int) -> dict[int, str]:
        """Where each rank of an attempt of `size` would be: the id of its node."""
        return {rank: self._agents[number].offer["node"] for rank, number in enumerate(self._living()[:size])}

    async def begin(self, attempt: int, job: Mapping[str, Any], size: int, monitor: Any = None) -> None:
        """Starts an attempt of `size` ranks; `job` is what they are given. With fewer living agents it has failed already.

        Attempts are counted over all runs of the group, upwards: what is said of an earlier one is not heard. `monitor`: the run's,
        an actor's handle, to which the agents pass on what their ranks tell.
        """
        chosen = self._living()[:size]
        self._attempt, self._reports, self._team = attempt, {}, _environments(chosen, self._agents)
        self._told = set()
        if len(chosen) < size:
            self._team = {}
            why = next(agent.lost for agent in self._agents.values() if agent.lost is not None)
            self._reports = {0: {"lost": {**why, "rank": None, "at": time.time()}, "at": time.time(), "silent_s": 0.0}}
            return
        first = self._agents[chosen[0]].offer
        meet = {"MASTER_ADDR": first["host"], "MASTER_PORT": str(first["port"])}
        await self._command("train", attempt=attempt, job=dict(job), env=meet, monitor=monitor)

    async def result(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Once it is over: every rank's report. The first failure ends it for all, as soon as its cause may be known.

        So does a rank that is late, if one is to blame: its report then says `hung`.
        """
        assert attempt == self._attempt
        watch = asyncio.create_task(self._watch())
        try:
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
                    if self._raised():
                        # Perhaps on rank 0 as well, whose last records are then on their way.
                        await self._until(lambda: 0 in self._reports, CAUSE_S)
                await self._kill()
                await self._until(self._over)
        finally:
            watch.cancel()
        if hung:  # the others ended because they were told to: no cause of anything
            return {rank: report for rank, report in self._reports.items() if "outcome" in report} | hung
        return self._reports

    async def cancel(self) -> None:
        """Ends the present attempt at once, and none of its agents: its ranks are killed. Nothing, if it is over."""
        if not self._over():
            await self._kill()

    async def _kill(self) -> None:
        """Not before every agent has heard that there is something to kill: only the newest order is heard."""
        attempt = self._attempt
        await self._until(
            lambda: all(a in self._told or int(e["RANK"]) in self._reports for a, e in self._team.items())
        )
        if attempt == self._attempt:
            await self._command("kill", attempt=attempt)

    async def _look(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Asks all agents what they see of their ranks. The report of the one to blame, if there is one."""
        self._sights = {}
        await self._command("look", attempt=attempt)
        await self._until(lambda: self._failed() or len(self._sights) == len(self._team), SIGHT_S)
        if self._failed() or not self._sights:
            return {}
        verdict = judge({rank: RankView(**sight) for rank, sight in self._sights.items()})
        if verdict.rank is None:
            return {}
        silent = self._sights[verdict.rank]["seconds"]
        return {verdict.rank: {"hung": verdict.why, "at": time.time(), "silent_s": silent}}

    async def reports(self) -> dict[int, dict[str, Any]]:
        """Those of the present attempt so far."""
        return self._reports

    async def nodes(self) -> list[tuple[str, bool]]:
        """(node id, whether it lives) of each agent of the group but those that were retired."""
        listed = (a for _, a in sorted(self._agents.items()) if not (a.lost and a.lost["type_name"] == "Retired"))
        return [(agent.offer["node"], agent.lost is None) for agent in listed]

    async def placement_group(self) -> str | None:
        """The id of the one that holds the group's resources; None before an agent has come."""
        return next((agent.offer.get("placement_group") for agent in self._agents.values()), None)

    async def retire(self, nodes: Iterable[str]) -> None:
        """The agents of those nodes are to leave. Not while an attempt runs."""
        gone = set(nodes)
        for agent in self._agents.values():
            if agent.offer["node"] in gone and agent.lost is None:
                error = RankError(None, "Retired", "its node is left", kind="node_died")
                agent.lost = _plain(error)
        await self._notify()

    async def leave(self) -> None:
        """Ends the group."""
        await self._command("leave")

    # --- from the agents

    async def next(self, group: int, agent: int, seen: int, offer: Mapping[str, Any]) -> dict[str, Any]:
        """The first order after number `seen`: do wait, train, kill, look or leave. "train" has the rank's environment, `env`; who
        has no part in it waits.
        """
        if group == self._group:
            known = self._agents.get(agent)
            self._agents[agent] = _Agent(offer, time.monotonic(), known.lost if known else None)
            await self._notify()
        await self._until(lambda: not self._ours(group, agent) or self._order["number"] > seen)
        if not self._ours(group, agent):
            return {"number": seen, "do": "leave"}
        if self._order["do"] not in ("train", "kill", "look"):
            return self._order
        if agent not in self._team:
            return {"number": self._order["number"], "do": "wait"}
        if self._order["do"] == "train":
            self._told.add(agent)
            await self._notify()
            return {**self._order, "env": {**self._order["env"], **self._team[agent]}}
        return self._order

    async def beat(self, group: int, agent: int) -> bool:
        """The agent lives. Whether it is still one of the group."""
        if self._ours(group, agent) and agent in self._agents:
            self._agents[agent].beat = time.monotonic()
        return self._ours(group, agent)

    async def ended(self, group: int, rank: int, attempt: int, report: dict[str, Any]) -> None:
        """How a rank's process ended: `outcome`, `error` (the fields of RankFailed) or `died` (pid, node_ip, how, starved).

        And `at`, Unix time, and `silent_s`, seconds since it last showed that it gets on.
        """
        if (group, attempt) == (self._group, self._attempt):
            self._reports.setdefault(rank, report)
            await self._notify()

    async def late(self, group: int, attempt: int) -> None:
        """A rank has been in one phase for too long."""
        if (group, attempt) == (self._group, self._attempt):
            self._late = True
            await self._notify()

    async def seen(self, group: int, rank: int, attempt: int, sight: dict[str, Any]) -> None:
        """The answer to "look": the fields of `raydist.cluster.run.hang_detection.RankView`."""
        if (group, attempt) == (self._group, self._attempt):
            self._sights[rank] = sight
            await self._notify()

    # --- from Ray Train's controller

    async def fallen(self, group: int, agent: int, error: dict[str, Any]) -> None:
        """Ray says that an agent is dead: the fields of RankError."""
        if group == self._group:
            self._lose(agent, error)
            await self._notify()

    # --- inside

    def _ours(self, group: int, agent: int) -> bool:
        return group == self._group and (agent not in self._agents or self._agents[agent].lost is None)

    def _living(self) -> list[int]:
        return [number for number, agent in sorted(self._agents.items()) if agent.lost is None]

    def _lose(self, number: int, error: dict[str, Any]) -> None:
        """That agent is no more, and so is its rank, if it has one."""
        agent = self._agents.setdefault(number, _Agent({"node": ""}, time.monotonic()))
        agent.lost = agent.lost or error
        if number in self._team:
            rank, at = int(self._team[number]["RANK"]), time.time()
            report = {"lost": {**error, "rank": rank, "at": at}, "node": agent.offer["node"], "at": at}
            self._reports.setdefault(rank, {**report, "silent_s": time.monotonic() - agent.beat})

    async def _watch(self) -> None:
        """Loses the agents of the present attempt that are silent."""
        while True:
            await asyncio.sleep(BEAT_S / 2)
            limit = LOST_AFTER_A_FAILURE_S if self._failed() else LOST_S
            for number in self._team:
                agent = self._agents[number]
                silent = time.monotonic() - agent.beat
                if agent.lost is None and silent > limit:
                    where = f"node {agent.offer['node'][:8]} ({agent.offer['host']})"
                    message = f"{where} has not been heard of for {silent:.0f} s"
                    self._lose(number, _plain(RankError(None, "NodeLost", message, kind="node_died")))
            await self._notify()

    def _over(self) -> bool:
        return len(self._reports) >= len(self._team)

    def _raised(self) -> bool:
        """Whether a rank has ended with an exception of its own."""
        errors = [rank_error(rank, report) for rank, report in self._reports.items() if "error" in report]
        return any(error is not None and not is_echo(error) for error in errors)

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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(true), timeout_s)


def _environments(chosen: list[int], agents: Mapping[int, _Agent]) -> dict[int, dict[str, str]]:
    """Of each chosen agent's rank. LOCAL_RANK stays the agent's own, which numbers the devices that Ray gave to its node."""
    nodes = list(dict.fromkeys(agents[number].offer["node"] for number in chosen))
    there = [agents[number].offer["node"] for number in chosen]
    return {
        number: {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(chosen)),
            "LOCAL_RANK": str(agents[number].offer["local_rank"]),
            "LOCAL_WORLD_SIZE": str(there.count(there[rank])),
            "NODE_RANK": str(nodes.index(there[rank])),
        }
        for rank, number in enumerate(chosen)
    }


def _plain(error: RankError) -> dict[str, Any]:
    return {"type_name": error.type_name, "message": error.message, "kind": error.kind}


def rank_error(rank: int, report: Mapping[str, Any]) -> RankError | None:
    """What a rank's process ended with; None if it ended well."""
    if "outcome" in report:
        return None
    if "error" in report:
        error = report["error"]
        return RankError(**{**error, "bases": tuple(error["bases"])})
    if "hung" in report:
        return RankError(rank, "RankHung", report["hung"], at=report["at"], kind="worker_hung")
    if "lost" in report:
        return RankError(**report["lost"])
    died = report["died"]
    if died["starved"]:
        return RankError(rank, "OutOfMemory", died["starved"], at=report["at"], kind="out_of_memory")
    message = f"process {died['pid']} on {died['node_ip']} ended without a word ({died['how']})"
    return RankError(rank, "WorkerDied", message, at=report["at"], kind="worker_died")


def start_coordinator() -> Any:
    """The run's coordinator as an actor: zero CPUs, on this process's node, gone with this process. Returns its handle at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(Coordinator).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here).remote()
