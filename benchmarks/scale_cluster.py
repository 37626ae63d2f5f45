"""The simulated cluster of benchmarks/scale.py: what the driver sees in place of Ray's nodes and Ray Train's `fit`.

Runs in: the driver. Never imports torch.

What is simulated, and nothing else: what Ray says of the cluster's nodes (`ray.nodes`, free and reserved resources), Ray Train's
`fit`, which starts the agents (`run_attempt`), and what runs on a node (scale_nodes.py).
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ray
from scale_nodes import PER_NODE

from raydist.cluster import nodes, ray_private
from raydist.cluster.run import coordinator, memory_checkpoints, worker_group, worker_group_slot
from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.fit import AttemptResult
from raydist.cluster.run.root_cause import Failure


class CoordinatorOfSlowNodes(Coordinator):
    """The real one, but agents may be silent for longer: the simulated ones share a few cores."""

    def __init__(self, lost_s: float, host: str) -> None:
        coordinator.LOST_S = coordinator.LOST_AFTER_A_FAILURE_S = lost_s
        super().__init__(host)


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
    """`count` nodes of 8 GPUs, on these actors. `lost_s`: how long they may be silent. `control`: on which address the
    coordinator listens; "": on none. `dead`: nodes that Ray knows to be dead; `gone`: that do not answer.
    """

    count: int
    hosts: Sequence[Any]
    lost_s: float
    control: str = "127.0.0.1"
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
        """Ends what waits for its agents, as a call of Ray must not outlive the session, and closes its sockets."""
        self.call("abort")
        self.call("over")
        self.call("close")
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
        return actor.remote(self.lost_s, self.control)

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
