"""A group of Ray Train workers: one agent a rank, and spares, below which attempt after attempt can run, of one run or several.

Runs in: the driver, in the thread that runs the attempts; the group's own `fit()` waits in another. Never imports torch.

A rank's process that dies costs no worker: its agent starts the next one. A lost node costs its agents: the others, and the spares,
can run the next attempt. An agent that dies on a node that has others costs the group.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from raydist.cluster import nodes
from raydist.cluster.run.coordinator import rank_error
from raydist.cluster.run.fit import Attempt, AttemptResult, WorkerKind, run_attempt
from raydist.cluster.run.root_cause import Failure, is_echo, root_cause
from raydist.cluster.session import Session

_LOOK_S = 0.5
_LEAVE_S = 10.0
_groups = itertools.count(1)


class Group:
    """Started as soon as it is made. `size` workers of that kind, on none of the nodes in `avoid`.

    `start_timeout_s`: how long to wait for the workers' resources.
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
        start_timeout_s: float,
    ) -> None:
        import ray

        self._coordinator = coordinator
        self.kind = kind
        """What a worker is: a run that asks for the same can have the group of another."""
        self.size = size
        self._handle: Attempt | None = None
        self._serial = 0
        self._nodes: list[tuple[str, bool]] | None = None
        self._placement_group: str | None = None
        self.gone: set[str] = set()
        """Of the nodes on which the last attempt lost agents those that do not answer; on others it was the agent alone."""
        self._aborted = False
        number = next(_groups)
        ray.get(coordinator.open.remote(number, size))
        self._gathered = coordinator.gathered.remote()
        self._result: AttemptResult | None = None

        def started(handle: Attempt) -> None:
            self._handle = handle
            if self._aborted:
                handle.abort()

        def fit() -> None:
            self._result = run_attempt(
                "raydist.launch.agent:agent",
                {"coordinator": coordinator, "group": number},
                session=session,
                run_name=run_name,
                workers=size,
                kind=kind,
                on_started=started,
                avoid=avoid,
                start_timeout_s=start_timeout_s,
                minded=(coordinator, number),
            )

        self._thread = threading.Thread(target=fit, name="raydist-group", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether Ray Train has it still."""
        return self._thread.is_alive()

    @property
    def living(self) -> int:
        """Agents for the next attempt: none if the group has ended, or lost an agent on a node that still has others; all, as long
        as they have not come.
        """
        if not self.alive or self.on.keys() & self.lost:
            return 0
        return self.size if self._nodes is None else sum(self.on.values())

    @property
    def on(self) -> dict[str, int]:
        """Node id -> living agents there; as of the end of the last attempt."""
        return Counter(node for node, lives in self._nodes or () if lives)

    @property
    def held(self) -> dict[str, int]:
        """Node id -> workers whose resources are reserved there. Some have no agent: Ray moves what was reserved on a lost node."""
        return nodes.reserved(self._placement_group) if self.alive and self._placement_group else {}

    @property
    def lost(self) -> set[str]:
        """Ids of the nodes on which agents were lost."""
        return {node for node, lives in self._nodes or () if not lives}

    @property
    def whole(self) -> bool:
        """Whether all its agents are there for another attempt: none was lost or retired."""
        return not self._aborted and self.living == self.size

    def come(self, wait_s: float = 0.0) -> bool:
        """Whether its agents are all there, or are no longer to come. Waits for that, so long at most."""
        import ray

        return not self.alive or bool(ray.wait([self._gathered], timeout=wait_s)[0])

    def places(self, size: int, look: Callable[[], None] = lambda: None) -> dict[int, str]:
        """Rank -> Ray's id of its node, once all agents are there; {} if the group has ended. `look()`: see `attempt`."""
        try:
            self._wait(self._gathered, look)
            self._placement_group = self._wait(self._coordinator.placement_group.remote(), look)
            return dict(self._wait(self._coordinator.places.remote(size), look))
        except _GroupEnded:
            return {}

    def attempt(
        self, job: Mapping[str, Any], size: int, monitor: Any, look: Callable[[], None] = lambda: None
    ) -> AttemptResult:
        """One attempt: from the ranks' start until all of them have ended. `job` is plain. Never raises for a failed one.

        `monitor`: the run's, to which the ranks' agents push. `look()` is called now and then.
        """
        self._serial += 1
        try:
            self._wait(self._gathered, look)
            self._nodes = self._wait(self._coordinator.nodes.remote(), look)
            self._placement_group = self._wait(self._coordinator.placement_group.remote(), look)
            places = self._wait(self._coordinator.places.remote(size), look)
            self._wait(self._coordinator.begin.remote(self._serial, dict(job), size, monitor), look)
            reports = self._wait(self._coordinator.result.remote(self._serial), look)
            self._nodes = self._wait(self._coordinator.nodes.remote(), look)
        except _GroupEnded:
            return self._lost()
        self.gone = nodes.unreachable(self.lost)
        failure = _cause(
            {rank: _of_node(report) if report.get("node") in self.gone else report for rank, report in reports.items()}
        )
        if failure is None:
            return AttemptResult(None, reports[0]["outcome"])
        first = min((r for r in reports.values() if "outcome" not in r), key=lambda r: r["at"])
        node = None if failure.rank is None else places.get(failure.rank)
        return AttemptResult(replace(failure, node=node), seen=first["at"], silent_s=first["silent_s"])

    def retire(self, leaving: Collection[str]) -> None:
        """The agents on those nodes leave. Not while an attempt runs."""
        import ray

        ray.get(self._coordinator.retire.remote(list(leaving)))
        self._nodes = [entry for entry in self._nodes or () if entry[0] not in leaving]

    def cancel(self) -> None:
        """Ends the present attempt, which has then failed, but not the group. From any thread."""
        self._coordinator.cancel.remote()

    def abort(self) -> None:
        """Ends the group at once, and with it the present attempt, of the kind "aborted". From any thread."""
        self._aborted = True
        if self._handle is not None:
            self._handle.abort()

    def end(self) -> None:
        """Lets all agents go; returns once Ray has their resources back. Those that do not go are ended."""
        if self.alive and not self.lost and self.come():
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

    def _lost(self) -> AttemptResult:
        """The group has ended in the middle of an attempt. A rank's own error explains that better than its worker's end."""
        import ray

        assert self._result is not None
        self.gone = nodes.unreachable(
            {node for node, _ in self._nodes or ()}
        )  # all agents have ended: no telling which were lost
        known = _cause(ray.get(self._coordinator.reports.remote()), but_echoes=True)
        ended = self._result.failure or Failure("controller_died", None, "the workers left in the middle of an attempt")
        return AttemptResult(ended if known is None or ended.kind == "aborted" else known, seen=time.time())


class _GroupEnded(Exception):
    """Ray Train's `fit` has returned."""


def _of_node(report: Mapping[str, Any]) -> dict[str, Any]:
    """The same report of a lost agent, whose node is gone."""
    lost = report["lost"]
    message = f"node {report['node'][:8]} is gone: {lost['message']}"
    return {**report, "lost": {**lost, "type_name": "NodeDied", "message": message, "kind": "node_died"}}


def _cause(reports: Mapping[int, Mapping[str, Any]], but_echoes: bool = False) -> Failure | None:
    errors = [error for rank, report in sorted(reports.items()) if (error := rank_error(rank, report)) is not None]
    if but_echoes:
        errors = [error for error in errors if not is_echo(error)]
    return root_cause(errors) if errors else None
