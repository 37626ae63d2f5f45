"""The simulated nodes of benchmarks/scale.py: fake agents and memory stores, which keep the protocol of the real ones.

Runs in: `Host` in Ray actors, which stand for the nodes; `Cluster` in the driver. Never imports torch.

What is simulated, and nothing else: what Ray says of the cluster's nodes (`ray.nodes`, free and reserved resources), Ray Train's
`fit`, which starts the agents (`run_attempt`), and what runs on a node: the agents with their ranks, and the memory stores. All
messages between these and the coordinator, the monitor and the driver are real ones, of Ray.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ray

from raydist.checkpoint.memory_layout import Shard
from raydist.cluster import nodes, ray_private
from raydist.cluster.run import coordinator, memory_checkpoints, worker_group, worker_group_slot
from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.fit import AttemptResult
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Inventory
from raydist.cluster.run.root_cause import Failure
from raydist.launch.relay import MergedCalls
from raydist.records import StepRecord

PER_NODE = 8
STEP = 20
"""Of the snapshot that the nodes have in memory."""
LOST_PEER = "[connection.cc:640] Connection closed by peer [10.0.0.1]:1234"
TRACEBACK = 'Traceback (most recent call last):\n  File "raydist/worker/loop.py", line 100, in step\n    sync()\n' * 12


@dataclass(slots=True)
class Agent:
    """One fake agent. `rank`: of the attempt that it trains, None: it trains none. `cut`: its node's network is cut."""

    number: int
    node: str
    local_rank: int
    rank: int | None = None
    attempt: int = 0
    cut: bool = False


@dataclass(slots=True)
class Orders:
    """The orders to train of one attempt: how many, when the first and the last came, and the `incident` in the job."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    incident: dict[str, Any] | None = None


@dataclass(slots=True)
class Kept:
    """What a node's memory store has: the ranks of the node, of the node whose buddy it is, and the ranks' world size."""

    ranks: Sequence[int] = ()
    buddy: Sequence[int] = ()
    world: int = 0


class CoordinatorOfSlowNodes(Coordinator):
    """The real one, but agents may be silent for longer: the simulated ones share a few cores."""

    def __init__(self, lost_s: float) -> None:
        coordinator.LOST_S = coordinator.LOST_AFTER_A_FAILURE_S = lost_s
        super().__init__()


class Host:
    """The fake agents and memory stores of some nodes: an asyncio actor."""

    def __init__(self, beat_s: float) -> None:
        self.beat_s = beat_s
        self.agents: dict[int, Agent] = {}
        self.kept: dict[str, Kept] = {}
        self.left = asyncio.Event()
        self.orders: dict[int, Orders] = {}
        self.joined = 0.0
        self.messages: Counter[str] = Counter()
        self.bytes: dict[str, int] = {}
        self.waits: list[float] = []

    async def begin(self, handle: Any, group: int, members: Sequence[tuple[int, str, int]]) -> None:
        """Ray Train has started these agents: (number, node, local rank)."""
        self.group, self.coordinator = group, handle
        self.links = {node: MergedCalls(self._many) for _, node, _ in members}
        self.agents = {number: Agent(number, node, local) for number, node, local in members}
        self.left.clear()
        self.joined = time.time()
        self.running = {asyncio.create_task(self._follow(agent)) for agent in self.agents.values()}
        there: dict[str, list[Agent]] = {}
        for agent in self.agents.values():
            there.setdefault(agent.node, []).append(agent)
        self.running.update(asyncio.create_task(self._beat(agents)) for agents in there.values())

    async def over(self) -> None:
        """Returns when all agents have left."""
        while any(not agent.cut for agent in self.agents.values()) and not self.left.is_set():
            await asyncio.sleep(0.1)

    async def abort(self) -> None:
        """Ray Train ends all agents."""
        for task in self.running:
            task.cancel()
        self.left.set()

    async def die(self, ranks: Sequence[int], echoes: bool) -> float:
        """The processes of these ranks are killed; `echoes`: all others lose a connection, and raise. When that was."""
        now, dead, tasks = time.time(), set(ranks), []
        for agent in self.agents.values():
            if agent.rank is None or agent.cut:
                continue
            if agent.rank in dead:
                tasks.append(self._ended(agent, died("SIGKILL")))
            elif echoes:
                tasks.append(self._ended(agent, lost_peer(agent.rank)))
        await asyncio.gather(*tasks)
        return now

    async def cut(self, gone: Sequence[str]) -> float:
        """The network of these nodes is cut: nothing of them arrives any more. When that was."""
        for agent in self.agents.values():
            agent.cut = agent.cut or agent.node in gone
        return time.time()

    async def finish(self) -> None:
        """All ranks have trained their last step."""
        outcome = {"outcome": {"status": "finished", "step": STEP + 1}}
        await asyncio.gather(
            *(self._ended(a, outcome) for a in self.agents.values() if a.rank is not None and not a.cut)
        )

    async def seen(self) -> dict[str, Any]:
        """What this host has seen and sent since the last call."""
        found = {
            "joined": self.joined,
            "orders": {n: (o.count, o.first, o.last, o.incident) for n, o in self.orders.items()},
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "longest_beat_s": max(self.waits, default=0.0),
        }
        self.messages.clear()
        self.waits.clear()
        return found

    async def store(self, node: str, method: str, *given: Any) -> Any:
        """A call of a node's memory store."""
        kept = self.kept.setdefault(node, Kept())
        self._count(f"memory store: {method}", given, None)
        if method == "link":
            _, buddy, ranks, world = given
            if buddy is not None and (tuple(ranks), world) != (kept.ranks, kept.world):
                buddy.copy.remote(ranks)
            kept.ranks, kept.world = tuple(ranks), world
        elif method == "copy":
            kept.buddy = tuple(given[0])
        elif method == "inventory":
            names = [shard(rank, kept.world) for rank in (*kept.ranks, *kept.buddy)]
            return Inventory({(STEP, name): 1 for name in names}, [snapshot(kept.world)] if 0 in kept.ranks else [])
        elif method == "fetch":
            return []
        return None

    # --- inside

    def _many(self, calls: Sequence[Any]) -> Any:
        self.messages["messages"] += 1
        return self.coordinator.many.remote(calls)

    async def _call(self, agent: Agent, method: str, *given: Any) -> Any:
        answer = await self.links[agent.node].call(method, self.group, *given)
        self._count(method, given, answer)
        return answer

    def _count(self, method: str, given: Any, answer: Any) -> None:
        self.messages[method] += 1
        if method not in self.bytes or (answer and self.messages[method] < 3):
            self.bytes[method] = len(pickle.dumps(given)) + len(pickle.dumps(answer))

    async def _beat(self, agents: Sequence[Agent]) -> None:
        """The beats of a node, which its relay merges: without the simulated agents' calls of the relay, to save their time."""
        await asyncio.sleep(random.random() * self.beat_s)
        calls = [["beat", self.group, agent.number] for agent in agents]
        while not agents[0].cut:
            asked = time.monotonic()
            answer = await self._many(calls)
            self.waits.append(time.monotonic() - asked)
            self.messages["beat"] += len(calls)
            self.bytes["beats of a node"] = len(pickle.dumps(calls)) + len(pickle.dumps(answer))
            await asyncio.sleep(self.beat_s)

    async def _follow(self, agent: Agent) -> None:
        seen = 0
        offer = {
            "node": agent.node,
            "local_rank": agent.local_rank,
            "host": "10.0.0.1",
            "port": 1,
            "placement_group": "p",
        }
        while True:
            order = await self._call(agent, "next", agent.number, seen, offer)
            if agent.cut:
                return
            seen = order["number"]
            if order["do"] == "leave":
                self.left.set()
                return
            if order["do"] == "train":
                self._train(agent, order)
            elif order["do"] == "kill" and agent.rank is not None:
                await self._ended(agent, died("SIGKILL"))

    def _train(self, agent: Agent, order: Mapping[str, Any]) -> None:
        agent.rank, agent.attempt = int(order["env"]["RANK"]), order["attempt"]
        found = self.orders.setdefault(agent.attempt, Orders(first=time.time()))
        found.count, found.last, found.incident = found.count + 1, time.time(), order["job"]["incident"]
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
            self._count("push", ([record], events), None)
            events = []
            await asyncio.sleep(1.0)

    async def _ended(self, agent: Agent, report: Mapping[str, Any]) -> None:
        rank, agent.rank = agent.rank, None
        await self._call(agent, "ended", rank, agent.attempt, {**report, "at": time.time(), "silent_s": 0.1})


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


def snapshot(world: int) -> Copy:
    """The manifest of the snapshot: one file of each rank, which only that rank reads, but the first, which all read."""
    files = {shard(rank, world): 1 for rank in range(world)}
    return Copy(STEP, 1, "MANIFEST-0001.json", world, files, frozenset([shard(0, world)]))


@dataclass(frozen=True)
class Store:
    """The handle of a node's memory store: of the actor that has it, and the node."""

    host: Any
    node: str

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self.host, self.node, method)


@dataclass(frozen=True)
class _Method:
    host: Any
    node: str
    name: str

    def remote(self, *given: Any) -> Any:
        """A real call of Ray, to the actor that has the node."""
        return self.host.store.remote(self.node, self.name, *given)


@dataclass
class Cluster:
    """`count` nodes of 8 GPUs, on these actors. `lost_s`: how long they may be silent. `dead`: nodes that Ray knows to be dead;
    `gone`: that do not answer.
    """

    count: int
    hosts: Sequence[Any]
    lost_s: float
    gone: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    reserved: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.names = [f"{n:056x}" for n in range(1, self.count + 1)]
        self.at = {name: self.hosts[n % len(self.hosts)] for n, name in enumerate(self.names)}
        self._listens = socket.create_server(("127.0.0.1", 0), backlog=4096)
        threading.Thread(target=self._accept, daemon=True).start()
        # Its queue is full: it drops the packets of all who would connect, as a cut network does.
        self._drops = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._waiting = [socket.socket() for _ in range(4)]
        for waiting in self._waiting:
            waiting.setblocking(False)
            waiting.connect_ex(self._drops.getsockname())

    def _accept(self) -> None:
        while True:
            try:
                self._listens.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Closes its sockets."""
        for each in (self._listens, self._drops, *self._waiting):
            each.close()

    def nodes(self) -> list[dict[str, Any]]:
        """In place of `ray.nodes`."""
        to = {True: self._drops.getsockname()[1], False: self._listens.getsockname()[1]}
        return [
            {
                "NodeID": name,
                "Alive": name not in self.dead,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": to[name in self.gone],
                "Labels": {},
                "Resources": {"CPU": 64.0, "GPU": float(PER_NODE)},
            }
            for name in self.names
        ]

    def free(self) -> dict[str, dict[str, float]]:
        """In place of Ray's free resources of each node."""
        return {name: {"CPU": 64.0, "GPU": float(PER_NODE - self.reserved[name])} for name in self.names}

    def bundles(self, placement_group: str) -> Counter[str]:
        """In place of Ray's list of what the workers' placement group has reserved on each node."""
        return self.reserved

    def start_coordinator(self) -> Any:
        """The coordinator, with a limit for silent agents."""
        actor = ray.remote(CoordinatorOfSlowNodes).options(num_cpus=0, max_concurrency=100_000)
        return actor.remote(self.lost_s)

    def run_attempt(self, train_fn: str, config: Mapping[str, Any], **given: Any) -> AttemptResult:
        """In place of Ray Train's `fit`: starts the agents, and returns when all have left."""
        usable = [n for n in self.names if n not in self.dead and n not in given["avoid"]]
        places = [(node, local) for node in usable for local in range(PER_NODE)][: given["workers"]]
        members: dict[Any, list[tuple[int, str, int]]] = {host: [] for host in self.hosts}
        for number, (node, local) in enumerate(places):
            members[self.at[node]].append((number, node, local))
        self.reserved = Counter(node for node, _ in places)
        ray.get([h.begin.remote(config["coordinator"], config["group"], m) for h, m in members.items()])
        given["abort"].started(_Controller(self.hosts))
        ray.get([host.over.remote() for host in self.hosts])
        self.reserved = Counter()
        return AttemptResult(Failure("aborted", None, "aborted on request") if given["abort"].aborted else None)

    def call(self, method: str, *given: Any) -> list[Any]:
        """The answers of all hosts."""
        return list(ray.get([getattr(host, method).remote(*given) for host in self.hosts]))

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """Within the block the driver's code sees these nodes."""
        kill: Callable[..., None] = ray.kill
        replaced = [
            mock.patch.object(ray, "nodes", self.nodes),
            mock.patch.object(ray, "kill", lambda actor: None if isinstance(actor, Store) else kill(actor)),
            mock.patch.object(ray_private, "available_resources_per_node", self.free),
            mock.patch.object(nodes, "reserved", self.bundles),
            mock.patch.object(worker_group, "run_attempt", self.run_attempt),
            mock.patch.object(worker_group_slot, "start_coordinator", self.start_coordinator),
            mock.patch.object(memory_checkpoints, "start_actor", lambda folder, node: Store(self.at[node], node)),
        ]
        for each in replaced:
            each.start()
        try:
            yield
        finally:
            for each in replaced:
                each.stop()


class _Controller:
    """The handle of Ray Train's controller."""

    def __init__(self, hosts: Sequence[Any]) -> None:
        self.abort = self
        self._hosts = hosts

    def remote(self) -> Any:
        """Ends all agents."""
        return next(host.abort.remote() for host in self._hosts)
