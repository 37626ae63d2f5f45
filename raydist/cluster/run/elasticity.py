"""The workers of a run: their group, how many ranks train, which nodes are left out, when the run leaves a node or grows.

Runs in: the driver. RestartLoop calls it, in the attempts thread; Supervisor calls `abort` and `cancel`, in the main thread. It
calls WorkerGroupSlot for groups, MonitorClient to record events and to send the ranks a "stop", and StopRequest while it waits.
Imports ray in functions only; never torch. What to do when workers are missing is a decision of recovery.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from raydist.cluster import nodes
from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.recovery import Proceed, Stop, Wait, resize
from raydist.cluster.run.stop_request import StopRequest
from raydist.cluster.run.worker_group import Group
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.spec import JobSpec

_LOOK_S = 1.0
_START_S = 120.0
"""How long a run's first workers may wait for their resources."""
_GROWING_LOOKS = 3
"""The run grows when it has found room for more workers this many times in a row."""
_FORGIVE_S = 10.0
"""How long after its loss, at the earliest, a lost node is asked again."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The run ends, because its workers have no room beside those of others."""

    because: str


class Elasticity:
    """Of one run, over all its attempts. `kind`: the resources of a worker. `private`: a private Ray has one node, which stays."""

    def __init__(
        self,
        spec: JobSpec,
        kind: WorkerKind,
        run_name: str,
        slot: WorkerGroupSlot,
        monitor: MonitorClient,
        stop_request: StopRequest,
        *,
        private: bool,
    ) -> None:
        self._cluster, self._policy, self._kind, self._run_name = spec.cluster, spec.recovery, kind, run_name
        self._parallel = spec.parallel
        self._slot, self._monitor, self._stop_request, self._private = slot, monitor, stop_request, private
        self._group: Group | None = None
        self._assigned = False  # its workers are where no tensor group straddles nodes
        self.workers = 0
        """Ranks of the present attempt."""
        self._avoid: dict[str, float] = {}  # lost node -> when it was lost
        self._pings = nodes.Pings()
        self._excluded: set[str] = set()  # nodes on which ranks died repeatedly
        self._leaving: set[str] = set()
        self._grow, self._growing, self._looked = False, 0, 0.0

    def begin(self) -> None:
        """Before the first attempt: leaves out the nodes that do not answer."""
        if not self._private:
            self.lost(nodes.unreachable())

    def gather(self) -> Group | Stop | NoRoom | None:
        """The group of the next attempt; `workers` is then its number of ranks. Stop if there are too few workers, NoRoom if the
        slot may start no workers, None if the user has asked the run to stop.
        """
        cluster, begun = self._cluster, time.monotonic()
        growing = self._asked_to_grow()
        if self._group is None:
            self._group = self._slot.take(self._kind, self._parallel.together)
        while True:
            room = self.room()
            if self._group is None or growing:
                workers = min(max(room, cluster.least), cluster.most)
                chosen: Proceed | Wait | Stop = Proceed(workers, True, f"there is room for {workers} workers")
            else:
                waited = time.monotonic() - begun
                living = self._parallel.whole(self._group.living)
                chosen = resize(cluster.least, cluster.most, living, room, waited, self._policy)
            match chosen:
                case Wait():
                    if self._stop_request.wait(_LOOK_S):
                        return None
                case Stop():
                    return chosen
                case Proceed(_, True, _) if not self._slot.may_start():
                    return NoRoom("the cluster has no free resources for this run's workers")
                case Proceed(workers, new_group, because):
                    if workers != self.workers and self.workers:
                        self._monitor.say("decision", action="resize", workers=workers, because=because)
                    self.workers = workers
                    if new_group:
                        self._group = self._replaced(workers + min(cluster.spares, max(room - workers, 0)))
                        waits = room < workers or not self._assigned
                        if waits and not self._private and not self._wait_for_room(workers, room):
                            return None
                    assert self._group is not None
                    return self._group

    def look(self) -> None:
        """During an attempt: asks the ranks to end it after a checkpoint, if a node is drained or there is room for more
        workers.
        """
        if self._private or time.monotonic() - self._looked < _LOOK_S or self._leaving or self._grow:
            return
        self._looked = time.monotonic()
        assert self._group is not None
        self._leaving = nodes.drained() & self._group.on.keys()
        if self._leaving:
            names = ", ".join(sorted(node[:8] for node in self._leaving))
            self._end_attempt("leave", f"node {names} is being drained")
        elif self.workers < self._cluster.most:
            room = min(self.room(), self._cluster.most)
            self._growing = self._growing + 1 if room > self.workers else 0
            if self._growing >= _GROWING_LOOKS:
                self._grow = True
                self._end_attempt("grow", f"there is room for {room} workers")

    def room(self, without: str | None = None) -> int:
        """Workers for which the cluster has room, the run's own included: of whole replicas of the model, whose tensor groups are
        each on one node. A lost node counts again once it answers; the node `without` does not count.
        """
        old = [node for node, at in self._avoid.items() if time.monotonic() - at > _FORGIVE_S]
        for node in self._pings.answering(old):
            del self._avoid[node]
        ours = self._group.held if self._group is not None else {}
        avoid = {*self._unfit, *([without] if without else [])}
        return self._parallel.whole(nodes.room(nodes.look(), self._kind.each, ours, avoid, self._parallel.together))

    @property
    def gone(self) -> set[str]:
        """Nodes that were lost and have not answered since."""
        return {*self._avoid}

    def lost(self, gone: Iterable[str]) -> None:
        """These nodes do not answer."""
        self._avoid |= dict.fromkeys(gone, time.monotonic())

    def exclude(self, node: str) -> None:
        """Leaves this node out for the rest of the command: its ranks died repeatedly. Not during an attempt."""
        assert self._group is not None
        self._excluded.add(node)
        self._group.retire([node])

    def leave(self) -> None:
        """After an attempt: retires the agents on the nodes that are drained, if that was why it ended."""
        assert self._group is not None
        self._group.retire(self._leaving)

    def close(self, keep: bool) -> None:
        """The run is over. `keep`: its group stays for the next one."""
        if self._group is not None:
            self._slot.leave(self._group, keep)

    def cancel(self) -> None:
        """Ends the present attempt, if there is one, and keeps the group. From any thread."""
        if (group := self._group) is not None:
            group.cancel()

    def abort(self) -> None:
        """Ends the present group, if there is one, and its attempt. From any thread."""
        if (group := self._group) is not None:
            group.abort()

    # --- inside

    def _replaced(self, size: int) -> Group:
        """A new group of `size` agents, in place of the present one. Ray places them, unless tensor groups must not straddle nodes
        and there is room for all."""
        old, together = self._group, self._parallel.together
        places: list[str] = []
        if together > 1 and not self._private:
            # Before the old group ends: Ray takes a while to count its resources as free.
            held = old.held if old is not None else {}
            places = nodes.assigned(nodes.look(), self._kind.each, held, self._unfit, together, size)
        self._assigned = together == 1 or bool(places)
        if old is not None:
            old.end()
        return self._slot.start(
            size,
            self._kind,
            run_name=self._run_name,
            avoid=self._unfit,
            places=places,
            start_timeout_s=_START_S if old is None else self._policy.wait_for_nodes,
        )

    def _wait_for_room(self, workers: int, room: int) -> bool:
        """Waits until the new group, for which there was no room, has started or failed. False: the user has asked the run to stop.

        Ray never places a group on the nodes that it was started without. When one of these answers again, and there is then room,
        a new group is started. So it is when there is room for whole tensor groups, of which Ray knows nothing; a group whose
        tensor groups straddle nodes waits for that, as long as for nodes.
        """
        assert self._group is not None
        if room < workers:
            self._monitor.note(f"there is room for {room} of {workers} workers now: the run waits for more")
        avoided, until = self._unfit, time.monotonic() + self._policy.wait_for_nodes
        while not (settled := self._group.settled(_LOOK_S)) or (self._straddles() and time.monotonic() < until):
            if self._stop_request.wait(_LOOK_S if settled else 0.0):
                return False
            room = self.room()
            back = avoided - self._unfit
            if (back or not self._assigned) and room >= workers:
                if back:
                    names = ", ".join(sorted(node[:8] for node in back))
                    self._monitor.note(f"node {names} answers again, and there is room for {workers} workers with it")
                self._group, avoided = self._replaced(workers), self._unfit
        return True

    def _straddles(self) -> bool:
        assert self._group is not None
        return not self._assigned and self._group.straddles(self._parallel.together)

    @property
    def _unfit(self) -> set[str]:
        """Ids of the nodes that are lost or excluded, or that the job may not use."""
        return {*self._avoid, *self._excluded, *nodes.unusable(self._cluster.resources)}

    def _end_attempt(self, action: str, because: str) -> None:
        self._monitor.say("decision", action=action, because=f"{because}: one checkpoint, then a new attempt")
        self._stop_request.want("resize", True)
        self._monitor.command(self._stop_request.command)

    def _asked_to_grow(self) -> bool:
        """Whether the last attempt ended to grow. Withdraws the "stop" for the next attempt, unless the user has asked for one."""
        grow = self._grow
        if self._leaving or grow:
            self._leaving, self._grow, self._growing = set(), False, 0
            self._stop_request.want("resize", False)
            self._monitor.command(self._stop_request.command)
        return grow
