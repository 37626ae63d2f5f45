"""With whom a run trains: its group of workers, how many of them, who is left out, and when it leaves a node or grows.

Runs in: the driver, in the thread that runs the attempts. Imports ray in functions only; never torch. What to do when workers are
missing is a decision of recovery.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raydist.cluster import nodes
from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.run.recovery import Stop, Team, Wait, resize
from raydist.cluster.run.worker_group import Group
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.spec import JobSpec

_LOOK_S = 1.0
_START_S = 120.0
"""How long a run's first workers may take to find their resources."""
_GROWING_LOOKS = 3
"""Room for more workers must be seen so often in a row before the run makes use of it."""
_FORGIVE_S = 10.0
"""A lost node is asked whether it answers again after that long at the earliest."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a run gives way to others."""

    because: str


class Membership:
    """Of one run, over its attempts. `kind`: what a worker is; `private`: all is on this host, and no node comes or goes.

    `say(kind, **data)` tells an event. `end_attempt(True)` asks the present attempt to end after a checkpoint; False: the next one
    is asked for nothing. `wait(seconds)`: whether the user has asked the run to end meanwhile.
    """

    def __init__(
        self,
        spec: JobSpec,
        kind: WorkerKind,
        run_name: str,
        slot: WorkerGroupSlot,
        *,
        private: bool,
        say: Callable[..., None],
        end_attempt: Callable[[bool], None],
        wait: Callable[[float], bool],
    ) -> None:
        self._cluster, self._policy, self._kind, self._run_name = spec.cluster, spec.recovery, kind, run_name
        self._slot, self._private, self._say, self._end_attempt, self._wait = slot, private, say, end_attempt, wait
        self.group: Group | None = None
        self.team = 0
        """How many ranks the attempt has."""
        self._avoid: dict[str, float] = {}  # lost node -> when it was lost, or last asked
        self._excluded: set[str] = set()  # nodes on which ranks died again and again
        self._leaving: set[str] = set()
        self._grow, self._growing, self._looked = False, 0, 0.0

    def begin(self) -> None:
        """Before the first attempt: leaves out who does not answer."""
        if not self._private:
            self.lost(nodes.unreachable())

    def gather(self) -> Group | Stop | NoRoom | None:
        """The group of the next attempt, and in `team` how many ranks it is to have; Stop if there are too few, NoRoom where its
        slot may start none, None if the user has asked the run to end.
        """
        cluster, begun = self._cluster, time.monotonic()
        growing = self._asked_to_grow()
        if self.group is None:
            self.group = self._slot.take(self._kind)
        while True:
            room = self.room()
            if self.group is None or growing:
                workers = min(max(room, cluster.least), cluster.most)
                chosen: Team | Wait | Stop = Team(workers, True, f"there is room for {workers} workers")
            else:
                waited = time.monotonic() - begun
                chosen = resize(cluster.least, cluster.most, self.group.living, room, waited, self._policy)
            match chosen:
                case Wait():
                    if self._wait(_LOOK_S):
                        return None
                case Stop():
                    return chosen
                case Team(_, True, _) if not self._slot.may_start():
                    return NoRoom("there is no room for its workers beside those of others")
                case Team(workers, anew, because):
                    if workers != self.team and self.team:
                        self._say("decision", action="resize", workers=workers, because=because)
                    self.team = workers
                    if anew:
                        self.group = self._replaced(workers + min(cluster.spares, max(room - workers, 0)))
                        if room < workers and not self._private and not self._awaited(workers, room):
                            return None
                    assert self.group is not None
                    return self.group

    def look(self) -> None:
        """While an attempt runs: asks it to end, after a checkpoint, if a node is taken away or there is room for more workers."""
        if self._private or time.monotonic() - self._looked < _LOOK_S or self._leaving or self._grow:
            return
        self._looked = time.monotonic()
        assert self.group is not None
        self._leaving = nodes.drained() & self.group.on.keys()
        if self._leaving:
            names = ", ".join(sorted(node[:8] for node in self._leaving))
            self._yield("leave", f"node {names} is being taken away")
        elif self.team < self._cluster.most:
            room = min(self.room(), self._cluster.most)
            self._growing = self._growing + 1 if room > self.team else 0
            if self._growing >= _GROWING_LOOKS:
                self._grow = True
                self._yield("grow", f"there is room for {room} workers")

    def room(self, without: str | None = None) -> int:
        """Workers that the cluster can hold, ours with them. A lost node counts again once it answers; `without` does not count."""
        old = [node for node, at in self._avoid.items() if time.monotonic() - at > _FORGIVE_S]
        back = nodes.answering(old)
        for node in old:
            self._avoid[node] = time.monotonic()
            if node in back:
                del self._avoid[node]
        ours = self.group.held if self.group is not None else {}
        return nodes.room(nodes.look(), self._each, ours, {*self._unfit, *([without] if without else [])})

    def lost(self, gone: Iterable[str]) -> None:
        """Those nodes do not answer."""
        self._avoid |= dict.fromkeys(gone, time.monotonic())

    def exclude(self, node: str) -> None:
        """Its ranks died again and again: the rest of the command does without it. Not while an attempt runs."""
        assert self.group is not None
        self._excluded.add(node)
        self.group.retire([node])

    def leave(self) -> None:
        """The attempt has ended because nodes are taken away, if it has: their agents leave."""
        assert self.group is not None
        self.group.retire(self._leaving)

    def close(self, keep: bool) -> None:
        """The run is over; where `keep`, its group waits for the next one."""
        if self.group is not None:
            self._slot.leave(self.group, keep)

    # --- inside

    def _replaced(self, size: int) -> Group:
        """A new group of so many agents, in place of the present one."""
        old = self.group
        if old is not None:
            old.end()
        return self._slot.start(
            size,
            self._kind,
            run_name=self._run_name,
            avoid=self._unfit,
            start_timeout_s=_START_S if old is None else self._policy.wait_for_nodes,
        )

    def _awaited(self, workers: int, room: int) -> bool:
        """Waits until the group, for which there was no room, has come or is given up. False: the user has asked the run to end.

        It is not placed where it was told not to be. So once there is room with a node that answers again, it is asked for anew.
        """
        assert self.group is not None
        self._say("note", text=f"there is room for {room} of {workers} workers now: it waits for more")
        avoided = self._unfit
        while not self.group.come(_LOOK_S):
            if self._wait(0.0):
                return False
            room = self.room()
            back = avoided - self._unfit
            if back and room >= workers:
                names = ", ".join(sorted(node[:8] for node in back))
                self._say("note", text=f"node {names} answers again, and there is room for {workers} workers with it")
                self.group, avoided = self._replaced(workers), self._unfit
        return True

    @property
    def _each(self) -> dict[str, float]:
        return {"CPU": self._kind.cpus, "GPU": self._kind.gpus}

    @property
    def _unfit(self) -> set[str]:
        """Ids of the nodes that are lost or were left."""
        return {*self._avoid, *self._excluded}

    def _yield(self, action: str, because: str) -> None:
        self._say("decision", action=action, because=f"{because}: one checkpoint, and on from there")
        self._end_attempt(True)

    def _asked_to_grow(self) -> bool:
        """Whether the attempt before ended to grow. The next one is asked for nothing yet, but what the user's signals ask for."""
        grow = self._grow
        if self._leaving or grow:
            self._leaving, self._grow, self._growing = set(), False, 0
            self._end_attempt(False)
        return grow
