"""Sends the agents of all ranks the orders to start and end an attempt, and returns to the driver how it ended.

Runs in: one zero-CPU actor, owned by the driver and on its node. Called by Group (worker_group.py), by the agents (launch/agent.py)
and by Ray Train's controller (ray_train_adapter.py). Imports neither torch nor ray.

    driver:     open(group) . begin(attempt, size) . result(attempt), silent(attempt) . cancel ... leave
    agents:     next ........ train, as rank r ..... ended(report) | late, look, seen | kill .. leave     beat, every `beat_s`
                (those of one node in one message: many; of many nodes, by control connections)
    controller:                                      agent_died(agent)

An attempt has the first `size` living agents of its group. It is over when for every rank the agent has reported how its process
ended, or the agent is lost: Ray reports its death, or it has sent no beat for `LOST_S`. A lost agent that calls again gets "leave".

A group has up to 10,000 agents, so a message of one agent must not take work in proportion to their number: it wakes no other
agent's call, and what the reports say of the attempt is kept up to date, not searched again (tests/cluster/test_scale.py). Messages
are what takes longest: a rank that ends by itself gets no order, and the driver gets no reports that the root cause explains.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raydist.cluster.run.agents import Agent, first_lost, gone, not_killed
from raydist.cluster.run.root_cause import Reports, by_this_clock, hung
from raydist.ipc import RENDEZVOUS_SECRET
from raydist.launch.control_connection import ControlServer
from raydist.launch.rendezvous import new_secret, rank_variables

CAUSE_S = 2.0
"""How long to wait for the cause when ranks have only reported lost peers. The rank that caused it ends in that time, or hangs."""
VIEW_S = 8.0
"""How long the agents may take to look at their ranks: 3 s, and the time to write the stacks to storage."""
_OF_AGENTS = frozenset({"next", "beat", "ended", "late", "seen"})
KILL_S = 60.0  # how long a rank may take to end after SIGKILL, which frees its memory
_ECHO_S, _ECHO_RANK_S = 0.1, 20e-6
_ECHOES = 50
"""As long as one of so many ranks reports the loss of a peer in each interval, others probably will; plus the messages' time."""
BEAT_S, BEATS = 1.0, 250
"""Seconds between two beats of a node, or more, so that all nodes send at most so many a second: they take 0.1 to 0.2 of a core."""
LOST_S = 8.0
LOST_AFTER_A_FAILURE_S = 4.0
"""An agent is lost after this long without a beat; sooner when ranks have lost a connection already. Beats that are further apart
add twice the difference, as one may be left out (launch/agent.py), or wait in a relay that is stopped (launch/relay.py)."""
_SILENT = "NodeLost"  # type_name of an agent that sent no beat
_LARGE, _MANY = 1000, 32
"""Agents from which on garbage is collected less often, and of which three quarters are not lost with one node."""


class Coordinator:
    """See the module. All methods are coroutines of one event loop. `host`: where it listens (control_connection.py), or ""."""

    def __init__(self, host: str = "") -> None:
        self._control = ControlServer(host, self.many)
        self._waiting: list[asyncio.Future[None]] = []  # the driver's calls; an agent's one waits for its own news
        self._group = self._size = 0
        self._agents: dict[int, Agent] = {}
        self._order: dict[str, Any] = {"number": 0, "do": "wait"}
        self._train = self._order  # the newest one to train
        self._attempt, self._monitor, self._begun = 0, None, 0.0
        self._nodes: set[str] = set()  # with agents of the group, or of the attempt
        self._clear({})
        self._views: dict[int, dict[str, Any]] = {}
        self._late = False

    # --- from the driver

    async def open(self, group: int, size: int) -> None:
        """`group`, of `size` agents, is now the present one; calls of others are ignored. Group numbers ascend."""
        old, self._agents, self._nodes = self._agents, {}, set()
        self._group, self._size = group, size
        if size >= _LARGE:  # a full collection takes 0.1 s with 10,000 agents, and several came in each failure
            gc.set_threshold(50_000, 20, 50)
        self._clear({})
        for agent in old.values():
            agent.wake()
        await self._command("wait")

    async def gathered(self) -> None:
        """Returns when every agent of the group has called `next`."""
        await self._until(lambda: len(self._agents) == self._size)

    async def places(self, size: int) -> dict[int, str]:
        """Rank -> the id of its node, for an attempt of `size` ranks that begins now."""
        return {rank: self._agents[number].offer["node"] for rank, number in enumerate(self._living()[:size])}

    async def begin(self, attempt: int, job: Mapping[str, Any], size: int, monitor: Any = None) -> None:
        """Starts an attempt of `size` ranks with the input `job`. With fewer living agents the attempt has failed.
        Attempt numbers ascend over all runs of the group: reports of an earlier attempt are ignored. `monitor`: the actor handle
        of the run's monitor, to which the agents forward the records of their ranks.
        """
        chosen = self._living()[:size]
        self._attempt, self._monitor, self._begun = attempt, monitor, time.monotonic()
        if len(chosen) < size:
            self._clear({})
            why = first_lost(self._agents.values())
            self._report(0, {"lost": {**why, "rank": None, "at": time.time()}, "at": time.time(), "silent_s": 0.0})
            return
        self._clear(dict(zip(chosen, rank_variables([self._agents[n].offer for n in chosen]), strict=True)))
        self._nodes = {self._agents[n].offer["node"] for n in chosen}
        first = self._agents[chosen[0]].offer
        meet = {"MASTER_ADDR": first["host"], "MASTER_PORT": str(first["port"]), RENDEZVOUS_SECRET: new_secret()}
        await self._command("train", attempt=attempt, job=json.dumps(job), env=meet)

    async def result(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Returns the reports when the attempt is over. The first failure ends it for all ranks, as soon as the cause is known.

        A rank that hangs ends it too: that rank's report then has `hung`.
        """
        assert attempt == self._attempt
        watch = asyncio.create_task(self._watch())
        try:
            late: dict[int, dict[str, Any]] = {}
            while not late:
                self._late = False
                await self._until(lambda: self._over() or self._reports.failed or self._late)
                if self._over() or self._reports.failed:
                    break
                late = await self._look(attempt)
            if not self._over():
                if not late:
                    await self._until(lambda: self._over() or self._reports.cause_known, CAUSE_S)
                    if self._reports.raised:
                        # Rank 0 may have raised as well, and may still be sending its last records.
                        await self._until(lambda: 0 in self._reports.ended, CAUSE_S)
                    await self._echoes()
                await self._kill()
        finally:
            watch.cancel()
        if late:  # the other ranks were killed: their reports are no cause
            return {rank: report for rank, report in self._reports.kept.items() if "outcome" in report} | late
        return self._reports.kept

    async def silent(self, attempt: int, known: set[str]) -> set[str] | None:
        """The nodes of that attempt whose agents are lost, or may soon be, once they are not those `known`; None: it is over."""
        await self._until(lambda: attempt != self._attempt or self._over() or self._silent_on != known)
        return None if attempt != self._attempt or self._over() else self._silent_on

    async def cancel(self) -> None:
        """Kills the ranks of the present attempt, and no agent. Does nothing if it is over."""
        if not self._over():
            await self._kill()

    async def _echoes(self) -> None:
        """Waits as long as ranks report the loss of a peer: they need no order to be killed. Few ranks are not worth the time.

        While a node was silent, ranks that lose a connection to it have reported that.
        """
        some = len(self._ranks) // _ECHOES
        silent = [n for n in self._ranks if (lost := self._agents[n].lost) and lost["type_name"] == _SILENT]
        before = len(silent) or -some
        while some and not self._over() and len(self._reports.ended) >= before + some:
            before = len(self._reports.ended)
            await self._until(self._over, _ECHO_S + _ECHO_RANK_S * len(self._ranks))

    async def _kill(self) -> None:
        """First waits until every agent has its order to train: an agent receives only the newest order, and this one. Returns when
        the attempt is over; an agent whose rank has not ended by then is lost.
        """
        attempt = self._attempt
        await self._until(lambda: attempt != self._attempt or not self._without_order, KILL_S)
        if attempt != self._attempt:
            return
        await self._command("kill", attempt=attempt)
        await self._until(lambda: attempt != self._attempt or self._over(), KILL_S)
        if attempt == self._attempt:
            for rank, number in self._agent_of.items():
                if rank not in self._reports.ended:
                    self._lose(number, not_killed(self._agents[number], rank, KILL_S))
            self._notify()

    async def _look(self, attempt: int) -> dict[int, dict[str, Any]]:
        """Asks all agents for a view of their ranks. The report of the rank to blame, if there is one."""
        self._views = {}
        await self._command("look", attempt=attempt)
        await self._until(lambda: self._reports.failed or len(self._views) == len(self._ranks), VIEW_S)
        if self._reports.failed or not self._views:
            return {}
        return hung(self._views, {"at": time.time(), "seen": time.monotonic()})

    async def reports(self) -> dict[int, dict[str, Any]]:
        """The reports of the present attempt so far: see `Reports.kept`."""
        return self._reports.kept

    async def nodes(self) -> list[tuple[str, bool]]:
        """(node id, whether it lives) of each agent of the group, without the retired ones."""
        listed = (a for _, a in sorted(self._agents.items()) if not (a.lost and a.lost["type_name"] == "Retired"))
        return [(agent.offer["node"], agent.lost is None) for agent in listed]

    async def placement_group(self) -> str | None:
        """The id of the group's placement group; None before the first agent has called `next`."""
        return next((agent.offer.get("placement_group") for agent in self._agents.values()), None)

    async def retire(self, nodes: Collection[str]) -> None:
        """Ends the agents on those nodes. Not during an attempt."""
        for agent in self._agents.values():
            if agent.offer["node"] in nodes and agent.lost is None:
                agent.lost = gone("Retired", "its node is no longer used")
                agent.wake()
        self._notify()

    async def leave(self) -> None:
        """Ends the group."""
        await self._command("leave")

    # --- from the agents

    async def next(self, group: int, agent: int, seen: int, offer: Mapping[str, Any]) -> dict[str, Any]:
        """The first order after number `seen`. Its `do` is wait, train, kill, look or leave. "train" has the rank's environment,
        `env`, and the seconds since the attempt began, `waited_s`; an agent without a rank in the attempt gets "wait".
        """
        return (await self._orders({0: (group, agent, seen, offer)}, wait=True))[0]

    async def beat(self, group: int, agent: int) -> float:
        """A sign of life. Returns the seconds until the next one; 0: the agent no longer belongs to the group."""
        if not self._ours(group, agent):
            return 0.0
        if agent in self._agents:
            self._agents[agent].beat = time.monotonic()
        return self._beat_s

    async def monitor(self, group: int, attempt: int) -> Any:
        """The actor handle of that attempt's monitor; None if another has begun. Not in the orders: it takes long to pickle."""
        return self._monitor if (group, attempt) == (self._group, self._attempt) else None

    async def many(self, calls: Sequence[Sequence[Any]], connection: str | None = None) -> dict[int, Any]:
        """Calls of the agents of one node, [method, arguments ...]. Returns the answers of those that are done, by their place,
        once there is one; the others are to be made again. `connection`: through Ray, see `ControlServer.through_ray`.
        """
        assert all(method in _OF_AGENTS for method, *_ in calls), calls
        if connection is not None:
            return await self._control.through_ray(calls, connection, offer=len(self._nodes) > BEATS)
        others = {place: call for place, call in enumerate(calls) if call[0] != "next"}
        answers = {place: await getattr(self, method)(*given) for place, (method, *given) in others.items()}
        asked = {place: given for place, (method, *given) in enumerate(calls) if method == "next"}
        return answers | await self._orders(asked, wait=not answers)

    async def ended(self, group: int, rank: int, attempt: int, report: dict[str, Any]) -> None:
        """How a rank's process ended. `report` has `outcome`, `error` (the fields of RankFailed) or `died` (pid, node_ip, how,
        starved). Also `at`, Unix time, and `silent_s`, seconds since its last progress.
        """
        if (group, attempt) == (self._group, self._attempt) and rank in self._agent_of:
            self._agents[self._agent_of[rank]].beat = time.monotonic()
            self._report(rank, by_this_clock(report, time.time()))
            self._notify()

    async def late(self, group: int, attempt: int) -> None:
        """A rank has been in one phase for longer than allowed."""
        if (group, attempt) == (self._group, self._attempt):
            self._late = True
            self._notify()

    async def seen(self, group: int, rank: int, attempt: int, view: dict[str, Any]) -> None:
        """The answer to "look": the fields of `raydist.diagnosis._hang.RankView`."""
        if (group, attempt) == (self._group, self._attempt):
            self._views[rank] = view
            self._notify()

    # --- from Ray Train's controller

    async def agent_died(self, group: int, agent: int, error: dict[str, Any]) -> None:
        """Ray reports that an agent is dead. `error`: the fields of RankError."""
        if group == self._group:
            self._lose(agent, error)
            self._notify()

    # --- inside

    async def _orders(self, asked: Mapping[int, Sequence[Any]], wait: bool) -> dict[int, dict[str, Any]]:
        """The answers to those calls of `next` that have one; `wait`: when there is one."""
        for group, agent, _, offer in asked.values():
            if group == self._group:
                known = self._agents.setdefault(agent, Agent(offer, 0.0))
                known.offer, known.beat = offer, time.monotonic()
                self._nodes.add(offer["node"])
        self._notify()
        orders: dict[int, dict[str, Any]] = {}
        while asked:
            orders = {
                place: order
                for place, (group, agent, seen, _) in asked.items()
                if (order := self._new_order(group, agent, seen)) is not None
            }
            if orders or not wait:
                break
            news = asyncio.Event()
            for _, agent, *_ in asked.values():
                self._agents[agent].waiting.append(news)
            await news.wait()
        self._notify()
        return orders

    def _new_order(self, group: int, agent: int, seen: int) -> dict[str, Any] | None:
        if not self._ours(group, agent):
            return {"number": seen, "do": "leave"}
        order = self._order
        if order["number"] <= seen or (not seen and order["do"] == "wait"):  # who waits needs no order to do so
            return None
        if order["do"] not in ("train", "kill", "look"):
            return order
        if agent not in self._ranks:
            return {"number": order["number"], "do": "wait"}
        if seen < self._train["number"]:  # the answer to its last call was lost, and its rank must start to end
            order = self._train
        if order["do"] == "train":
            self._without_order.discard(agent)
            return {**order, "env": {**order["env"], **self._ranks[agent]}, "waited_s": time.monotonic() - self._begun}
        over = order["do"] == "kill" and int(self._ranks[agent]["RANK"]) in self._reports.ended
        return None if over else order

    @property
    def _beat_s(self) -> float:
        return BEAT_S * max(math.ceil(len(self._nodes) / BEATS), 1)

    def _ours(self, group: int, agent: int) -> bool:
        return group == self._group and (agent not in self._agents or self._agents[agent].lost is None)

    def _living(self) -> list[int]:
        return [number for number, agent in sorted(self._agents.items()) if agent.lost is None]

    def _clear(self, ranks: dict[int, dict[str, str]]) -> None:
        """What is known of an attempt before its first report."""
        self._ranks = ranks  # agent -> the environment of its rank in the present attempt, as torchrun sets it
        self._agent_of = {int(env["RANK"]): number for number, env in ranks.items()}
        self._reports = Reports()
        self._silent_on: set[str] = set()  # nodes
        self._without_order = set(ranks)  # agents that have neither received the order to train nor reported

    def _report(self, rank: int, report: dict[str, Any]) -> None:
        self._reports.add(rank, {**report, "seen": time.monotonic()})
        self._without_order.discard(self._agent_of.get(rank, -1))

    def _lose(self, number: int, error: dict[str, Any]) -> None:
        """Marks that agent as lost, and its rank, if it has one, as failed."""
        agent = self._agents.setdefault(number, Agent({"node": ""}, time.monotonic()))
        agent.lost = agent.lost or error
        agent.wake()
        if number in self._ranks:
            rank, at = int(self._ranks[number]["RANK"]), time.time()
            report = {"lost": {**error, "rank": rank, "at": at}, "node": agent.offer["node"], "at": at}
            self._report(rank, {**report, "silent_s": time.monotonic() - agent.beat})
            self._silent_on.add(agent.offer["node"])

    async def _watch(self) -> None:
        """Marks the agents of the present attempt that send no beat as lost. The time in which this process did not run does not
        count, nor that in which beats wait in its queue: with many agents, a quarter of them are then late at once.
        """
        looked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S / 2)
            now = time.monotonic()
            missed, looked = max(now - looked - BEAT_S, 0.0), now
            limit = LOST_AFTER_A_FAILURE_S if self._reports.failed else LOST_S
            limit += 2 * (self._beat_s - BEAT_S)
            living = [(number, agent) for number in self._ranks if (agent := self._agents[number]).lost is None]
            for _, agent in living:
                agent.beat += missed
            silent = sorted(now - agent.beat for _, agent in living)
            queue = max(silent[len(silent) // 4] - self._beat_s, 0.0) if len(silent) >= _MANY else 0.0
            limit += min(queue, limit)
            quiet = [agent for _, agent in living if now - agent.beat > limit / 2]
            lost = [agent for number in self._ranks if (agent := self._agents[number]).lost is not None]
            self._silent_on = {agent.offer["node"] for agent in quiet + lost}
            for number, agent in living:
                if now - agent.beat > limit:
                    where = f"node {agent.offer['node'][:8]} ({agent.offer['host']})"
                    message = f"{where} has not answered for {now - agent.beat:.0f} s"
                    self._lose(number, gone(_SILENT, message))
            self._notify()

    def _over(self) -> bool:
        return len(self._reports.ended) >= len(self._ranks)

    async def _command(self, do: str, **what: Any) -> None:
        self._order = {"number": self._order["number"] + 1, "do": do, **what}
        self._train = self._order if do == "train" else self._train
        for agent in self._agents.values():
            agent.wake()
        self._notify()

    def _notify(self) -> None:
        """Wakes the driver's calls. No coroutine: an agent's call that is cancelled has either done nothing or is done."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not call.done():
                call.set_result(None)

    async def _until(self, true: Callable[[], bool], timeout_s: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not true():
                    woken = asyncio.get_running_loop().create_future()
                    self._waiting.append(woken)
                    await woken
