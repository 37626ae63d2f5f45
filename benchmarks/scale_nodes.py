"""The simulated agents and memory stores of benchmarks/scale.py, which keep the protocol of the real ones.

Runs in: Ray actors, each of which stands for some of the nodes of scale_cluster.py. Never imports torch. All messages between these
and the coordinator, the monitor and the driver are real ones, of Ray or over control connections. The calls of a node's
agents are one message, as its relay (launch/relay.py) makes them one; the relay's own work is left out, since each node has its own
processor for it.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.checkpoint.memory_layout import Shard
from raydist.cluster.run import coordinator
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Inventory
from raydist.launch.control_connection import ControlClient
from raydist.records import StepRecord

PER_NODE = 8
STEP = 20
"""Of the snapshot that the nodes have in memory, times the number of the attempt that has taken it."""
LOST_PEER = "[connection.cc:640] Connection closed by peer [10.0.0.1]:1234"
TRACEBACK = 'Traceback (most recent call last):\n  File "raydist/worker/loop.py", line 100, in step\n    sync()\n' * 12


WINDOW_S = 0.02
"""How long a relay waits for the calls of the node's other agents."""


@dataclass(slots=True, eq=False)
class Agent:
    """One fake agent. `rank`: of the attempt that it trains, None: it trains none. `seen`: its newest order."""

    number: int
    offer: Mapping[str, Any]
    rank: int | None = None
    attempt: int = 0
    seen: int = 0


@dataclass(slots=True)
class Node:
    """One fake node. `control`: its relay's side of the connection to the coordinator. `cut`: its network is cut. `told`: when it
    sent its last message that was no beat.
    """

    name: str
    control: ControlClient
    agents: list[Agent] = field(default_factory=list)
    cut: bool = False
    told: float = 0.0


@dataclass(slots=True)
class Orders:
    """The orders to train of one attempt: how many, when the first and the last came, and the job, as JSON."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    job: str = ""


@dataclass(slots=True)
class Kept:
    """What a node's memory store knows: the ranks and the world size that it was told; the last attempt that its node trained, its
    world size, and the first of the node's ranks in it.
    """

    told: Any = None
    trained: tuple[int, int, int] | None = None


class Host:
    """The fake agents and memory stores of some nodes: an asyncio actor."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.kept: dict[str, Kept] = {}
        self.left, self.closed = asyncio.Event(), asyncio.Event()
        self.gone: set[str] = set()
        self.orders: dict[int, Orders] = {}
        self.joined = 0.0
        self.messages: Counter[str] = Counter()
        self.bytes: dict[str, int] = {}
        self.waits: list[float] = []

    async def begin(self, handle: Any, group: int, members: Sequence[tuple[int, str, int]]) -> None:
        """Ray Train has started these agents: (number, node, local rank)."""
        self.group, self.coordinator = group, handle
        self.nodes = {name: Node(name, ControlClient(self._by_ray)) for _, name, _ in members}
        for number, name, local in members:
            offer = {"node": name, "local_rank": local, "host": "10.0.0.1", "port": 1, "placement_group": "p"}
            self.nodes[name].agents.append(Agent(number, offer))
        self.left.clear()
        self.joined = time.time()
        self.running = {asyncio.create_task(self._follow(node)) for node in self.nodes.values()}
        self.running.update(asyncio.create_task(self._beat(node)) for node in self.nodes.values())

    async def over(self) -> None:
        """Returns when all agents have left."""
        while any(not node.cut for node in self.nodes.values()) and not self.left.is_set():
            await asyncio.sleep(0.1)

    async def abort(self) -> None:
        """Ray Train ends all agents."""
        for task in self.running:
            task.cancel()
        self.left.set()

    async def die(self, ranks: Sequence[int], echoes: bool) -> float:
        """The processes of these ranks are killed; `echoes`: all others lose a connection, and raise. When that was."""
        dead, ended = set(ranks), []
        for node in self._training():
            reports = {
                agent: died("SIGKILL") if agent.rank in dead else lost_peer(agent.rank)
                for agent in node.agents
                if agent.rank is not None and (echoes or agent.rank in dead)
            }
            ended.append(self._ended(node, reports))
        now = time.time()
        await asyncio.gather(*ended)
        return now

    async def cut(self, gone: Sequence[str]) -> float:
        """The network of these nodes is cut: nothing of them arrives any more. When that was."""
        self.gone.update(gone)
        for name in self.gone & self.nodes.keys():
            self.nodes[name].cut = True
        return time.time()

    async def finish(self) -> None:
        """All ranks have trained their last step."""
        outcome = {"outcome": {"status": "finished", "step": STEP + 1}}
        await asyncio.gather(*(self._ended(node, dict.fromkeys(node.agents, outcome)) for node in self._training()))

    async def seen(self) -> dict[str, Any]:
        """What this host has seen and sent, and the longest wait for the answer to a beat since the last call."""
        found = {
            "joined": self.joined,
            "orders": {n: (o.count, o.first, o.last, o.job) for n, o in self.orders.items()},
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "longest_beat_s": max(self.waits, default=0.0),
        }
        self.waits.clear()
        return found

    async def close(self) -> None:
        """The run is over: all calls of memory stores end, as none may outlive the session."""
        self.closed.set()

    async def store(self, node: str, method: str, *given: Any) -> Any:
        """A call of a node's memory store."""
        kept = self.kept.setdefault(node, Kept())
        self._count(f"memory store: {method}", given)
        if method == "closed" or node in self.gone:
            await self.closed.wait()
        if method in ("link", "inventory") and given:
            _, buddy, ranks, world = given
            if buddy is not None and kept.told != (ranks, world):
                buddy.copy.remote(ranks)
            kept.told = ranks, world
        if method == "inventory":
            return Inventory() if kept.trained is None else files(*kept.trained)
        if method == "fetch":
            return []
        return None

    # --- inside

    def _many(self, node: Node, calls: Sequence[Any]) -> Any:
        self.messages["messages"] += 1
        return node.control.many(calls)

    def _by_ray(self, calls: Sequence[Any], connection: str) -> Any:
        self.messages["messages by Ray"] += 1
        return self.coordinator.many.remote(calls, connection)

    def _count(self, method: str, given: Any, calls: int = 1) -> None:
        self.messages[method] += calls
        if method not in self.bytes:
            self.bytes[method] = len(pickle.dumps(given))

    def _training(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.cut and node.agents[0].rank is not None]

    async def _beat(self, node: Node) -> None:
        calls = [["beat", self.group, agent.number] for agent in node.agents]
        beat_s, phase = coordinator.BEAT_S, random.random() * 1000
        while True:
            await asyncio.sleep(beat_s - (time.monotonic() + phase) % beat_s)
            if node.cut:
                return
            asked = time.monotonic()
            if asked - node.told < (beat_s - coordinator.BEAT_S) / 2:
                continue
            answer = await self._many(node, calls)
            self.waits.append(time.monotonic() - asked)
            self.messages["beat"] += len(calls)
            self.bytes["beats of a node"] = len(pickle.dumps(calls)) + len(pickle.dumps(answer))
            beat_s = answer[0] or beat_s

    async def _follow(self, node: Node) -> None:
        while True:
            node.told = time.monotonic()
            calls = [["next", self.group, agent.number, agent.seen, agent.offer] for agent in node.agents]
            answers = await self._many(node, calls)
            if node.cut:
                return
            self.messages["next"] += len(answers)
            killed: dict[Agent, Mapping[str, Any]] = {}
            for place, order in answers.items():
                agent = node.agents[place]
                agent.seen = order["number"]
                if order["do"] == "leave":
                    self.left.set()
                    return
                if order["do"] == "train":
                    self._train(agent, order)
                    if agent.rank == 0:
                        self.bytes["next"] = len(pickle.dumps(calls[place][2:])) + len(pickle.dumps(order))
                elif order["do"] == "kill" and agent.rank is not None:
                    killed[agent] = died("SIGKILL")
            await self._ended(node, killed)
            await asyncio.sleep(WINDOW_S)

    def _train(self, agent: Agent, order: Mapping[str, Any]) -> None:
        agent.rank, agent.attempt = int(order["env"]["RANK"]), order["attempt"]
        trained = agent.attempt, int(order["env"]["WORLD_SIZE"]), agent.rank - agent.rank % PER_NODE
        self.kept.setdefault(agent.offer["node"], Kept()).trained = trained
        found = self.orders.setdefault(agent.attempt, Orders(first=time.time()))
        found.count, found.last, found.job = found.count + 1, time.time(), order["job"]
        if agent.rank == 0:
            self.running.add(asyncio.create_task(self._records(agent, order)))

    async def _records(self, agent: Agent, order: Mapping[str, Any]) -> None:
        """Rank 0 sends the list of all ranks, and a step every second."""
        attempt, world = agent.attempt, int(order["env"]["WORLD_SIZE"])
        workers = [{"rank": r, "host": f"h{r // PER_NODE}", "node_ip": "10.0.0.1", "pid": 1} for r in range(world)]
        events = [{"v": 1, "kind": "workers", "at": time.time(), "workers": workers}]
        step, monitor = STEP, await self.coordinator.monitor.remote(self.group, attempt)
        while agent.rank == 0 and agent.attempt == attempt:
            step += 1
            record = StepRecord(step, 1.0, 1e-3, 1.0, 1, 1.0, 0.0, world, attempt, "0").to_dict()
            await monitor.push.remote([record], events)
            self._count("push", ([record], events))
            events = []
            await asyncio.sleep(1.0)

    async def _ended(self, node: Node, reports: Mapping[Agent, Mapping[str, Any]]) -> None:
        if not reports:
            return
        node.told = time.monotonic()
        at = {"at": time.time(), "silent_s": 0.1}
        calls = [
            ["ended", self.group, agent.rank, agent.attempt, {**report, **at}] for agent, report in reports.items()
        ]
        self._count("ended", calls[0][2:], len(calls))
        for agent in reports:
            agent.rank = None
        await self._many(node, calls)


def died(how: str) -> dict[str, Any]:
    """The report of a rank whose process was killed."""
    return {"died": {"pid": 7, "node_ip": "10.0.0.1", "how": how, "starved": ""}}


def lost_peer(rank: int) -> dict[str, Any]:
    """The report of a rank that has lost a connection."""
    facts = {"rank": rank, "type_name": "RuntimeError", "message": LOST_PEER, "traceback": TRACEBACK, "stage": ""}
    return {"error": {**facts, "at": time.time(), "bases": ["RuntimeError"]}}


def shard(rank: int, world: int) -> str:
    """The name of a rank's shard of the snapshot."""
    return Shard(rank, world, 1, f"{rank:032x}").name


def snapshot(attempt: int, world: int) -> Copy:
    """The manifest of an attempt's snapshot: one file of each rank, which only that rank reads, but the first, which all read."""
    names = {shard(rank, world): 1 for rank in range(world)}
    return Copy(STEP * attempt, attempt, f"MANIFEST-{attempt:04d}.json", world, names, frozenset([shard(0, world)]))


def files(attempt: int, world: int, first: int) -> Inventory:
    """What a node has of an attempt's snapshot: the files of its ranks and of the node before it in the ring."""
    own, buddy = (
        {(STEP * attempt, shard((start + rank) % world, world)): 1 for rank in range(PER_NODE)}
        for start in (first, first - PER_NODE)
    )
    return Inventory(own, [snapshot(attempt, world)] if first in (0, PER_NODE) else [], buddy)
