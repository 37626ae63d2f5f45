"""Starts and ends the node monitors of a run: one on each node that has ranks, kept over the attempts.

Runs in: the driver. RestartLoop calls it; it calls NodeMonitor and Aggregator (raydist/observe). Imports ray in functions only;
never torch. Training never waits for a node monitor, and works without one.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from raydist.cluster.nodes import listed
from raydist.observe.aggregator import NODES, Aggregator
from raydist.observe.node_monitor import NodeMonitor
from raydist.run.directory import RunDir

_NOTE_S = 60.0
_CLOSE_S = 3.0
_NAMED = 3


class NodeMonitors:
    """All node monitors of a run. No method raises. `private`: all is on this host, and no actor is needed.

    `monitor`: the actor handle of the run's monitor, which gets their rows. `env`: the ranks' environment. A thread calls `note`
    with what cannot be monitored.
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
        self._monitors: dict[str, tuple[str, Any]] = {}
        """Address -> Ray's id of the node, and its node monitor. A lost node that comes back has another id."""
        self._numbers: dict[str, int] = {}
        """Address -> a number, in the order in which the run has used the nodes."""
        self._aggregators: dict[int, tuple[str, Any]] = {}
        """Group of nodes -> Ray's id of the node where its aggregator was started, and the aggregator."""
        self._leaving: dict[str, threading.Thread] = {}
        """Address -> the thread that ends, or has ended, the last node monitor there."""
        self._noted: set[str] = set()
        self._note_threads: list[threading.Thread] = []
        self._closed = False

    def watch(self, nodes: Iterable[str]) -> None:
        """Monitors these nodes, by Ray's ids, and no others. Returns at once; after up to 3 s if the run has just left one of
        them.
        """
        try:
            self._start(set(nodes))
        except Exception as error:
            self._note(f"nodes are not monitored: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The run is over. A node monitor that does not answer within 3 s is killed."""
        self._closed = True
        self._leave(set(self._monitors), set(self._aggregators))
        for ending in self._leaving.values():
            ending.join()
        for thread in self._note_threads:
            thread.join(_CLOSE_S)  # the monitors that it asked are gone; no thread may use Ray while it shuts down

    # --- inside

    def _start(self, nodes: set[str]) -> None:
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in listed() if node["Alive"]}
        there = nodes & alive.keys()
        # An aggregator of a lost node has been restarted by Ray on another node.
        groups = {group for group, (node, _) in self._aggregators.items() if node in alive and node not in there}
        self._leave(
            {a for a, (node, _) in self._monitors.items() if node not in there or self._group(a) in groups}, groups
        )
        local = self._run.storage.local
        folder = tempfile.gettempdir() if local is None else str(local)
        new = {}
        for node in there:
            address = alive[node]
            if address in self._monitors:
                continue  # two nodes of Ray on one host need only one node monitor
            if address in self._leaving:
                self._leaving[address].join()  # the old one still removes its files
            self._numbers.setdefault(address, len(self._numbers))
            make = NodeMonitor if self._private else _on(node)
            receiver = self._receiver(self._group(address), node)
            new[address] = make(self._run.uri, address, receiver, self._interval_s, folder, self._env)
            self._monitors[address] = node, new[address]
        if new:
            thread = threading.Thread(target=self._report_notes, args=(new,), name="raydist-node-monitors", daemon=True)
            self._note_threads.append(thread)
            thread.start()

    def _leave(self, addresses: set[str], groups: set[int]) -> None:
        """Ends the node monitors at these addresses, soon, and the aggregators of these groups, before it returns."""
        if not addresses and not groups:
            return
        monitors = [self._monitors.pop(address) for address in addresses]
        aggregators = [self._aggregators.pop(group) for group in groups]
        ending = threading.Thread(
            target=self._end, args=(monitors, aggregators), name="raydist-node-monitors", daemon=True
        )
        ending.start()
        self._leaving |= dict.fromkeys(addresses, ending)
        if aggregators:
            ending.join()  # the next one continues the same segments

    def _end(self, monitors: Sequence[tuple[str, Any]], aggregators: Sequence[tuple[str, Any]]) -> None:
        """Each with Ray's id of its node. The node monitors first, because they send their last rows to the aggregators."""
        try:
            if self._private:
                for _, monitor in monitors:
                    monitor.close()
            else:
                self._kill(monitors, aggregators)
        except Exception as error:
            self._note(f"nodes that the run has left may still be monitored: {type(error).__name__}: {error}")

    def _kill(self, *kinds: Sequence[tuple[str, Any]]) -> None:
        import ray

        alive = {node["NodeID"] for node in listed() if node["Alive"]}
        for those in kinds:
            closing = [actor.close.remote() for node, actor in those if node in alive]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for those in kinds:
            for _, actor in those:
                ray.kill(actor)

    def _group(self, address: str) -> int:
        return self._numbers[address] // NODES

    def _receiver(self, group: int, node: str) -> Any:
        """Where the node monitors of a group of nodes send their rows: for the first group the run's monitor, else an
        aggregator.
        """
        if group == 0:
            return _plain(self._monitor, self._private)
        if group not in self._aggregators:
            make = _on(node, Aggregator, stays=False)
            self._aggregators[group] = node, make(self._run.full_uri, group, _plain(self._monitor, self._private))
        return _plain(self._aggregators[group][1], self._private)

    def _report_notes(self, monitors: Mapping[str, Any]) -> None:
        """Reports what the new node monitors cannot monitor: each note once, with its nodes."""
        found: dict[str, list[str]] = defaultdict(list)
        for node, note in self._notes(monitors):
            if note is not None:
                found[note].append(node)
        for note, nodes in found.items():
            if note not in self._noted and not self._closed:
                self._noted.add(note)
                more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
                self._note(f"{', '.join(sorted(nodes)[:_NAMED])}{more}: {note}")

    def _notes(self, monitors: Mapping[str, Any]) -> Iterable[tuple[str, str | None]]:
        if self._private:
            return [(node, monitor.note()) for node, monitor in monitors.items()]
        import ray
        from ray.exceptions import RayError

        asked = {monitor.note.remote(): node for node, monitor in monitors.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_NOTE_S)
        answers = []
        for ref in done:
            try:
                answers.append((asked[ref], ray.get(ref)))
            except RayError:  # killed, or its node is gone
                continue
        return answers


def _plain(actor: Any, private: bool) -> Any:
    """An actor's handle; for another actor pickled: with a handle as argument Ray warns of restarts (ray #53727)."""
    if private:
        return actor
    from ray import cloudpickle

    return cloudpickle.dumps(actor)


def _on(node: str, what: type = NodeMonitor, stays: bool = True) -> Callable[..., Any]:
    """Starts such an actor on that node; it ends with this process. Ray restarts it if it is killed: on another node, unless
    `stays`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=not stays)
    # Two calls at once: note() waits, and close() must not wait for it.
    actor = ray.remote(what).options(num_cpus=0, max_restarts=-1, max_concurrency=2, scheduling_strategy=there)
    return cast(Callable[..., Any], actor.remote)
