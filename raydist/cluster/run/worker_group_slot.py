"""What a run has and may leave to the next one: a coordinator, and a group of workers that waits below it; and its monitor.

Runs in: the driver, one thread at a time. Never imports torch; imports ray in functions only. A run that follows on another's
workers has its first step about a second after it begins: no placement, no new process, no import of torch (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raydist.cluster.run.coordinator import start_coordinator
from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.run.worker_group import Group
from raydist.cluster.session import Session
from raydist.observe.run_monitor import start_monitor
from raydist.observe.warm_monitors import WarmMonitors


class WorkerGroupSlot:
    """One group of workers at most. Made at once; its actor and its workers start when they are asked for.

    `monitors`: where its runs have theirs from. `may_start()`: whether there is room for a new group of workers, beside those of
    others; a run that has none then ends, as interrupted.
    """

    def __init__(
        self, session: Session, monitors: WarmMonitors | None = None, may_start: Callable[[], bool] = lambda: True
    ) -> None:
        self._session, self._monitors, self.may_start = session, monitors, may_start
        self._coordinator: object | None = None
        self._idle: Group | None = None

    def ready(self) -> None:
        """Starts what it can without knowing of which kind the workers are to be. Returns at once."""
        if self._coordinator is None:
            self._coordinator = start_coordinator()

    def monitor(self, run_uri: str, exporters: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> Any:
        """The monitor of a run that begins: its actor's handle."""
        if self._monitors is not None:
            return self._monitors.get(run_uri, exporters, spec)
        return start_monitor(run_uri, exporters=exporters, spec=spec)

    def foresee(self) -> None:
        """The run is on its way: starts what the next one would have to wait for. Returns at once; call it as often as you like."""
        if self._monitors is not None:
            self._monitors.prepare()

    def start(
        self,
        size: int,
        kind: WorkerKind,
        *,
        run_name: str,
        avoid: Collection[str] = (),
        start_timeout_s: float,
    ) -> Group:
        """A new group: see `Group`. One that waits is ended first."""
        self.end()
        self.ready()
        return Group(
            session=self._session,
            coordinator=self._coordinator,
            run_name=run_name,
            size=size,
            kind=kind,
            avoid=avoid,
            start_timeout_s=start_timeout_s,
        )

    def take(self, kind: WorkerKind) -> Group | None:
        """The group that waits, if its workers are of that kind and all there. Any other is ended."""
        group, self._idle = self._idle, None
        if group is not None and (group.kind != kind or not group.whole):
            group.end()
            return None
        return group

    @property
    def waiting(self) -> bool:
        """Whether it has workers, who wait for a run."""
        return self._idle is not None

    @property
    def size(self) -> int:
        """Workers that wait."""
        return self._idle.size if self._idle is not None else 0

    def fits(self, size: int, kind: WorkerKind) -> bool:
        """Whether a run of so many workers of that kind would find them waiting."""
        group = self._idle
        return group is not None and group.kind == kind and group.size >= size and group.whole

    def leave(self, group: Group, keep: bool = True) -> None:
        """A run is over: its group waits for the next one, if it may and is whole."""
        if keep and group.whole:
            self._idle = group
        else:
            group.end()

    def end(self) -> None:
        """Lets the group that waits go; returns once Ray has its resources back."""
        if self._idle is not None:
            self._idle.end()
            self._idle = None
