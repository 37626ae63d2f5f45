"""What a run may leave to the next one: a coordinator and an idle group of workers. Also where a run gets its monitor from.

Runs in: the driver, one thread at a time. Supervisor, Elasticity and a sweep's WorkerGroupPool call it; it makes Groups. Never
imports torch; imports ray in functions only. A run that uses the workers of an earlier one reaches its first step after about a
second: nothing is placed, no process is started, torch is not imported (docs/adr/0010).

A slot and a Group are two classes because they live for different times: one run may use several groups, one after the other (a
node is lost, the run grows), and a slot serves many runs. WorkerGroupPool also counts slots that have no group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.run.worker_group import Group
from raydist.cluster.session import Session
from raydist.observe.monitor_actor import start_monitor
from raydist.observe.warm_monitors import WarmMonitors


class WorkerGroupSlot:
    """At most one idle group of workers. The constructor starts nothing.

    `monitors`: monitors that are already running, for the slot's runs. `may_start()`: whether there is room for a new group of
    workers beside those of other slots; if not, a run that needs one ends as interrupted.
    """

    def __init__(
        self, session: Session, monitors: WarmMonitors | None = None, may_start: Callable[[], bool] = lambda: True
    ) -> None:
        self._session, self._monitors, self.may_start = session, monitors, may_start
        self._coordinator: object | None = None
        self._idle: Group | None = None

    def ready(self) -> None:
        """Starts the coordinator, if it does not run: that needs no knowledge of the workers. Returns at once."""
        if self._coordinator is None:
            self._coordinator = start_coordinator()

    def monitor(self, run_uri: str, exporters: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> Any:
        """The actor handle of a new run's monitor."""
        if self._monitors is not None:
            return self._monitors.get(run_uri, exporters, spec)
        return start_monitor(run_uri, exporters=exporters, spec=spec)

    def prepare_next(self) -> None:
        """The run trains: starts a monitor for the next run. Returns at once. It may be called any number of times."""
        if self._monitors is not None:
            self._monitors.prepare()

    def start(
        self,
        size: int,
        kind: WorkerKind,
        *,
        run_name: str,
        avoid: Collection[str] = (),
        places: Sequence[str] = (),
        start_timeout_s: float,
    ) -> Group:
        """A new group: see `Group`. Ends the idle one first."""
        self.end()
        self.ready()
        return Group(
            session=self._session,
            coordinator=self._coordinator,
            run_name=run_name,
            size=size,
            kind=kind,
            avoid=avoid,
            places=places,
            start_timeout_s=start_timeout_s,
        )

    def take(self, kind: WorkerKind, together: int = 1) -> Group | None:
        """The idle group, if its workers are of that kind, all alive, and on each node a multiple of `together`. Any other idle
        group is ended."""
        group, self._idle = self._idle, None
        if group is not None and (group.kind != kind or not group.whole or group.straddles(together)):
            group.end()
            return None
        return group

    @property
    def waiting(self) -> bool:
        """Whether it has an idle group."""
        return self._idle is not None

    @property
    def size(self) -> int:
        """The number of idle workers."""
        return self._idle.size if self._idle is not None else 0

    def fits(self, size: int, kind: WorkerKind) -> bool:
        """Whether the idle group is enough for a run with `size` workers of that kind."""
        group = self._idle
        return group is not None and group.kind == kind and group.size >= size and group.whole

    def leave(self, group: Group, keep: bool = True) -> None:
        """A run is over: its group becomes the idle one, if `keep` and all its agents are alive. Otherwise it is ended."""
        if keep and group.whole:
            self._idle = group
        else:
            group.end()

    def end(self) -> None:
        """Ends the idle group. Returns when Ray has its resources back."""
        if self._idle is not None:
            self._idle.end()
            self._idle = None


def start_coordinator() -> Any:
    """Starts a coordinator as an actor: zero CPUs, on this process's node; it ends with this process. Returns its handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = ray.remote(Coordinator).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
    return actor.remote(ray.util.get_node_ip_address())
