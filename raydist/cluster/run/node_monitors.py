"""The agents that watch a run's nodes: started where it has ranks, kept over its attempts, gone from where it has none any more.

Runs in: the driver. Imports ray in functions only; never torch. What an agent is: raydist/observe/node_monitor.py.

Training never waits for any of this, and goes on as before where none of it works.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from raydist.observe.aggregator import NODES, Aggregator
from raydist.observe.node_monitor import NodeMonitor
from raydist.run.directory import RunDir

_NOTE_S = 60.0
_CLOSE_S = 3.0
_NAMED = 3


class NodeMonitors:
    """All agents of a run. Nothing of it raises. `private`: all is on this host, and no actor is needed.

    `monitor`: what the agents send their rows to; `env`: the ranks' environment. `note` is told, by a thread, what is not watched.
    """

    def __init__(
        self,
        run: RunDir,
        monitor: Any,
        interval_s: float,
        *,
        private: bool,
        env: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        self._run, self._monitor, self._interval_s = run, monitor, interval_s
        self._private, self._env, self._note = private, dict(env), note
        self._agents: dict[str, tuple[str, Any]] = {}
        """Address -> Ray's id of the node, and its agent: one that was lost comes back with another id."""
        self._numbers: dict[str, int] = {}
        """Address -> which of the run's nodes this was to be watched."""
        self._aggregators: dict[int, tuple[str, Any]] = {}
        """Group of nodes -> Ray's id of the node where its aggregator was started, and the aggregator."""
        self._leaving: dict[str, threading.Thread] = {}
        """Address -> what ends, or has ended, the last agent there."""
        self._noted: set[str] = set()
        self._hearing: list[threading.Thread] = []
        self._closed = False

    def watch(self, nodes: Iterable[str]) -> None:
        """From now on these nodes and no others, by Ray's ids. Returns at once, but in 3 s where it has just left one of them."""
        try:
            self._start(set(nodes))
        except Exception as error:
            self._note(f"nodes are not watched: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The run is over. An agent that does not answer in 3 s is ended all the same."""
        self._closed = True
        self._leave(set(self._agents), set(self._aggregators))
        for ending in self._leaving.values():
            ending.join()
        for thread in self._hearing:
            thread.join(_CLOSE_S)  # whom it has asked is gone; it must not use Ray while that is shut down

    # --- inside

    def _start(self, nodes: set[str]) -> None:
        import ray

        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        there = nodes & alive.keys()
        # On a node that was lost a aggregator is not any more: it has come back elsewhere.
        groups = {group for group, (node, _) in self._aggregators.items() if node in alive and node not in there}
        self._leave(
            {a for a, (node, _) in self._agents.items() if node not in there or self._group(a) in groups}, groups
        )
        local = self._run.storage.local
        folder = tempfile.gettempdir() if local is None else str(local)
        new = {}
        for node in there:
            address = alive[node]
            if address in self._agents:
                continue  # on two of Ray's nodes on one host an agent sees the same
            if address in self._leaving:
                self._leaving[address].join()  # it clears the board
            self._numbers.setdefault(address, len(self._numbers))
            make = NodeMonitor if self._private else _on(node)
            teller = self._teller(self._group(address), node)
            new[address] = make(self._run.uri, address, teller, self._interval_s, folder, self._env)
            self._agents[address] = node, new[address]
        if new:
            self._hearing.append(threading.Thread(target=self._hear, args=(new,), name="raydist-agents", daemon=True))
            self._hearing[-1].start()

    def _leave(self, addresses: set[str], groups: set[int]) -> None:
        """Ends the agents at these addresses, soon, and the aggregators of these groups, before it returns."""
        if not addresses and not groups:
            return
        agents = [self._agents.pop(address) for address in addresses]
        aggregators = [self._aggregators.pop(group) for group in groups]
        ending = threading.Thread(target=self._end, args=(agents, aggregators), name="raydist-agents", daemon=True)
        ending.start()
        self._leaving |= dict.fromkeys(addresses, ending)
        if aggregators:
            ending.join()  # the next one goes on with the same segments

    def _end(self, agents: Sequence[tuple[str, Any]], aggregators: Sequence[tuple[str, Any]]) -> None:
        """Each with Ray's id of its node. The agents first, for they tell the aggregators."""
        try:
            if self._private:
                for _, agent in agents:
                    agent.close()
            else:
                self._killed(agents, aggregators)
        except Exception as error:
            self._note(f"nodes are watched that the run has left: {type(error).__name__}: {error}")

    def _killed(self, *kinds: Sequence[tuple[str, Any]]) -> None:
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for those in kinds:
            closing = [actor.close.remote() for node, actor in those if node in alive]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for those in kinds:
            for _, actor in those:
                ray.kill(actor)

    def _group(self, address: str) -> int:
        return self._numbers[address] // NODES

    def _teller(self, group: int, node: str) -> Any:
        """Whom the agents of a group of nodes tell their rows: of the first one the monitor, of the others a aggregator."""
        if group == 0:
            return _plain(self._monitor, self._private)
        if group not in self._aggregators:
            make = _on(node, Aggregator, stays=False)
            self._aggregators[group] = node, make(self._run.full_uri, group, _plain(self._monitor, self._private))
        return _plain(self._aggregators[group][1], self._private)

    def _hear(self, agents: Mapping[str, Any]) -> None:
        """Tells what the new ones cannot watch: each thing once, with the nodes that say so."""
        said: dict[str, list[str]] = defaultdict(list)
        for node, note in self._notes(agents):
            if note is not None:
                said[note].append(node)
        for note, nodes in said.items():
            if note not in self._noted and not self._closed:
                self._noted.add(note)
                more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
                self._note(f"{', '.join(sorted(nodes)[:_NAMED])}{more}: {note}")

    def _notes(self, agents: Mapping[str, Any]) -> Iterable[tuple[str, str | None]]:
        if self._private:
            return [(node, agent.note()) for node, agent in agents.items()]
        import ray
        from ray.exceptions import RayError

        asked = {agent.note.remote(): node for node, agent in agents.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_NOTE_S)
        told = []
        for ref in done:
            try:
                told.append((asked[ref], ray.get(ref)))
            except RayError:  # killed, or its node is gone
                continue
        return told


def _plain(actor: Any, private: bool) -> Any:
    """An actor's handle; for another actor as bytes: of handles Ray says that they might be gone at a restart (ray #53727)."""
    if private:
        return actor
    from ray import cloudpickle

    return cloudpickle.dumps(actor)


def _on(node: str, what: type = NodeMonitor, stays: bool = True) -> Callable[..., Any]:
    """Makes an agent on that node; gone with this process. Comes back by itself if it is killed; elsewhere, unless it `stays`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=not stays)
    # note() waits, close() must not.
    actor = ray.remote(what).options(num_cpus=0, max_restarts=-1, max_concurrency=2, scheduling_strategy=there)
    return cast(Callable[..., Any], actor.remote)
