"""A group of Ray Train workers: one agent per rank, and spare agents. It runs one attempt after another, of one run or of several.

Runs in: the driver, in the attempts thread; the group's own `run_attempt()` waits in another. Elasticity and RestartLoop call
it; it calls the coordinator. Never imports torch.

When a rank's process dies, its agent starts the next one. When a node is lost, its agents are lost: the others, and the spare ones,
can run the next attempt. When an agent dies on a node that still has other agents, the group can run no further attempt.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raydist.cluster import nodes
from raydist.cluster.run.agents import NOT_KILLED
from raydist.cluster.run.fit import AbortHandle, AttemptResult, WorkerKind, run_attempt
from raydist.cluster.run.root_cause import Failure, is_echo, rank_error, root_cause
from raydist.cluster.session import Session

_LOOK_S = 0.5
_LEAVE_S = 10.0
_groups = itertools.count(1)


class Group:
    """The constructor starts `size` workers of that kind, on none of the nodes in `avoid`.

    `places`: the id of each worker's node; empty: Ray chooses. `start_timeout_s`: how long the workers may wait for their
    resources.
    """

    def __init__(
        self,
        *,
        session: Session,
        coordinator: Any,
        run_name: str,
        size: int,
        kind: WorkerKind,
        avoid: Collection[str] = (),
        places: Sequence[str] = (),
        start_timeout_s: float,
    ) -> None:
        import ray

        self._coordinator = coordinator
        self.kind = kind
        """The resources of a worker: another run can use the group if it needs the same."""
        self.size = size
        self._serial = 0
        self._nodes: list[tuple[str, bool]] | None = None
        self._placement_group: str | None = None
        self._asked: set[str] = set()
        """Nodes that lost agents, and of which it is known whether they answer."""
        self.gone: set[str] = set()
        """Nodes that lost agents in the last attempt and do not answer. On the other nodes only the agent died."""
        number = next(_groups)
        ray.get(coordinator.open.remote(number, size))
        self._gathered = coordinator.gathered.remote()
        self._abort = AbortHandle()
        self._result: AttemptResult | BaseException | None = None
        folder = os.getcwd()

        def fit() -> None:
            try:
                self._result = run_attempt(
                    "raydist.launch.agent:agent",
                    {"coordinator": coordinator, "group": number, "env": dict(kind.env), "folder": folder},
                    session=session,
                    run_name=run_name,
                    workers=size,
                    kind=kind,
                    abort=self._abort,
                    avoid=avoid,
                    places=places,
                    start_timeout_s=start_timeout_s,
                    coordinator=(coordinator, number),
                )
            except BaseException as error:
                self._result = error
            # Ray ends the controller's actor with its last handle, and the frames of an error that was caught keep one.
            gc.collect()

        self._thread = threading.Thread(target=fit, name="raydist-group", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether Ray Train still runs the group."""
        return self._thread.is_alive()

    @property
    def living(self) -> int:
        """Agents for the next attempt. 0 if the group has ended, or has lost an agent on a node that still has others, or before
        that agent had said where it is; `size`, as long as the agents are starting.
        """
        if not self.alive or self.on.keys() & self.lost or ("", False) in (self._nodes or ()):
            return 0
        return self.size if self._nodes is None else sum(self.on.values())

    @property
    def on(self) -> dict[str, int]:
        """Node id -> living agents there, at the end of the last attempt."""
        return Counter(node for node, lives in self._nodes or () if lives)

    @property
    def held(self) -> dict[str, int]:
        """Node id -> workers whose resources are reserved there. Some have no agent: Ray moves the reservations of a lost node."""
        return nodes.reserved(self._placement_group) if self.alive and self._placement_group else {}

    @property
    def lost(self) -> set[str]:
        """Ids of the nodes on which agents were lost."""
        return {node for node, lives in self._nodes or () if node and not lives}

    @property
    def whole(self) -> bool:
        """Whether another attempt can use all its agents: none was lost or retired."""
        return not self._abort.aborted and self.living == self.size

    def settled(self, wait_s: float = 0.0) -> bool:
        """Waits at most that long until all agents have started, or the group has ended. Whether that is so."""
        import ray

        return not self.alive or bool(ray.wait([self._gathered], timeout=wait_s)[0])

    def places(self, size: int, look: Callable[[], None] = lambda: None) -> dict[int, str]:
        """Waits until all agents have started. Rank -> Ray's id of its node; {} if the group has ended. `look()`: see `attempt`."""
        try:
            self._wait(self._gathered, look)
            self._placement_group = self._wait(self._coordinator.placement_group.remote(), look)
            return dict(self._wait(self._coordinator.places.remote(size), look))
        except _GroupEnded:
            return {}

    def straddles(self, together: int) -> bool:
        """Whether so many consecutive ranks, which must be on one node, are not: ranks are numbered node by node. Waits until all
        agents have started."""
        return together > 1 and any(n % together for n in Counter(self.places(self.size).values()).values())

    def attempt(
        self, job: Mapping[str, Any], size: int, monitor: Any, look: Callable[[], None] = lambda: None
    ) -> AttemptResult:
        """Runs one attempt, from the start of its ranks until all of them have ended. `job`: plain data. Never raises for an
        attempt that failed.

        `monitor`: the actor handle of the run's monitor, to which the agents push records. `look()` is called about every 0.5 s.
        """
        self._serial += 1
        try:
            self._wait(self._gathered, look)
            self._nodes = self._wait(self._coordinator.nodes.remote(), look)
            self._placement_group = self._wait(self._coordinator.placement_group.remote(), look)
            places = self._wait(self._coordinator.places.remote(size), look)
            self._wait(self._coordinator.begin.remote(self._serial, dict(job), size, monitor), look)
            result = self._coordinator.result.remote(self._serial)
            unreachable = self._unreachable(look)
            reports = self._wait(result, look)
            self._nodes = self._wait(self._coordinator.nodes.remote(), look)
        except _GroupEnded:
            return self._ended()
        self.gone = self.lost & unreachable
        self.gone |= nodes.unreachable(self.lost - self.gone - self._asked)
        self._asked |= self.lost
        failure = _cause(
            {rank: _of_node(report) if report.get("node") in self.gone else report for rank, report in reports.items()}
        )
        if failure is None:
            return AttemptResult(None, reports[0]["outcome"])
        first = min((r for r in reports.values() if "outcome" not in r), key=lambda r: r["at"])
        node = None if failure.rank is None else places.get(failure.rank)
        # By this process's clock, as all times that the driver notes: the coordinator is on this host.
        seen = time.time() - max(time.monotonic() - first["seen"], 0.0)
        lost = [report["lost"] for report in reports.values() if "lost" in report]
        note = next((error["message"] for error in lost if error["type_name"] == NOT_KILLED), "")
        return AttemptResult(replace(failure, node=node), seen=seen, silent_s=first["silent_s"], note=note)

    def retire(self, leaving: Collection[str]) -> None:
        """Ends the agents on those nodes. Not during an attempt."""
        import ray

        ray.get(self._coordinator.retire.remote(list(leaving)))
        self._nodes = [entry for entry in self._nodes or () if entry[0] not in leaving]

    def cancel(self) -> None:
        """Ends the present attempt, which then has failed, and keeps the group. From any thread."""
        self._coordinator.cancel.remote()

    def abort(self) -> None:
        """Ends the group at once; the present attempt fails with kind "aborted". From any thread."""
        self._abort.abort()

    def end(self) -> None:
        """Asks all agents to exit, and aborts the group if they do not. Returns when Ray has their resources back."""
        if self.alive and not self.lost and self.settled():
            self._coordinator.leave.remote()
            self._thread.join(_LEAVE_S)
        if self.alive:
            self.abort()
        self._thread.join(_LEAVE_S)

    def _wait(self, ref: Any, look: Callable[[], None]) -> Any:
        import ray

        while True:
            done, _ = ray.wait([ref], timeout=_LOOK_S)
            if done:
                return ray.get(ref)
            if not self.alive:
                raise _GroupEnded
            look()

    def _unreachable(self, look: Callable[[], None]) -> set[str]:
        """While the attempt runs, asks nodes that are silent whether they answer. When it is over: those that do not, and are still
        silent. That takes a second, in which they may be lost, and the ranks of others are killed.
        """
        asked: dict[str, Future[set[str]]] = {}
        with ThreadPoolExecutor(4, "raydist-silent-nodes") as side:
            while (silent := self._wait(self._coordinator.silent.remote(self._serial, {*asked}), look)) is not None:
                asked = {node: answer for node, answer in asked.items() if node in silent}
                if new := silent - asked.keys():
                    asked |= dict.fromkeys(new, side.submit(nodes.unreachable, new))
            return {node for node, answer in asked.items() if node in answer.result()}

    def _ended(self) -> AttemptResult:
        """The group has ended during an attempt. If a rank reported an error of its own, that is the cause."""
        import ray

        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        # All agents have ended, so nothing shows which of them were lost.
        self.gone = nodes.unreachable({node for node, _ in self._nodes or () if node})
        known = _cause(ray.get(self._coordinator.reports.remote()), but_echoes=True)
        ended = self._result.failure or Failure("controller_died", None, "the workers exited during an attempt")
        return AttemptResult(ended if known is None or ended.kind == "aborted" else known, seen=time.time())


class _GroupEnded(Exception):
    """Ray Train's `fit` has returned."""


def _of_node(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a lost agent, changed to: its node is lost."""
    lost = report["lost"]
    message = f"node {report['node'][:8]} is gone: {lost['message']}"
    return {**report, "lost": {**lost, "type_name": "NodeDied", "message": message, "kind": "node_died"}}


def _cause(reports: Mapping[int, Mapping[str, Any]], but_echoes: bool = False) -> Failure | None:
    """The root cause of the ranks' reports; None if none failed. `but_echoes`: without errors that follow from a lost peer."""
    found = [
        (error, report) for rank, report in sorted(reports.items()) if (error := rank_error(rank, report)) is not None
    ]
    if but_echoes:
        found = [(error, report) for error, report in found if not is_echo(error)]
    if not found:
        return None
    ranks = sum(report.get("ranks", 1) for _, report in found)
    return replace(root_cause([error for error, _ in found]), echoes=ranks - 1)
