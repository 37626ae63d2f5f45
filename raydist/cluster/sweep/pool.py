"""The crews on which the cells of a sweep train: as many as the cluster has room for, and no cell begins without one.

Runs in: the driver, from the threads of cells. Imports ray in functions only; never torch.

A crew takes its part of the cluster as long as it is out, or has workers that wait. Where a node is lost, there is room for fewer:
workers that wait are let go, and a cell that has lost its own comes back here, and waits until others leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from raydist.cluster.crew import Crew
from raydist.cluster.request import worker_kind
from raydist.cluster.session import Session
from raydist.cluster.sweep.cell import Plan
from raydist.cluster.trainer import WorkerKind
from raydist.observe.standby import Monitors

_START_S = 120.0
_LOOK_S = 5.0
"""How often a cell that waits looks whether nodes have come back."""


class Pool:
    """`size` crews. One that is free goes to a cell, of those that wait the first; rather one whose workers are of its kind.

    `monitors`: see `Crew`. `room()`: how many crews the cluster has room for now; None: always for all.
    """

    def __init__(
        self,
        session: Session,
        size: int,
        monitors: Monitors | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        self._session, self._room = session, room
        self._all = [Crew(session, monitors, self._may_start) for _ in range(size)]
        self._free = list(self._all)
        self._fits = size
        """Crews that there was room for when that was last looked at."""
        self._line: list[object] = []
        """Who waits for a crew, the first one first."""
        self._changed = threading.Condition()
        self._closed = False

    def warm(self, plan: Plan) -> None:
        """Starts workers for a cell that is to come, in a crew that has none yet, and a monitor. Returns at once."""
        threading.Thread(target=self._warm, args=(plan,), name="raydist-warm", daemon=True).start()

    def _warm(self, plan: Plan) -> None:
        crew = self.get(plan)
        if crew is not None:
            try:
                crew.foresee()
                crew.leave(crew.start(plan.workers, kind(plan), run_name=plan.id, start_timeout_s=_START_S))
            finally:
                self.put(crew)

    def get(self, plan: Plan, given_up: Callable[[], bool] = lambda: False) -> Crew | None:
        """A crew that nobody has, as soon as there is one, and room for it; None once the pool is closed, or it is `given_up`, of
        which `wake` has to be told.
        """
        mine = object()
        with self._changed:
            self._line.append(mine)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or given_up() or (self._line[0] is mine and self._choose(plan)), _LOOK_S
                    )
                    if self._closed or given_up():
                        return None
                    if self._line[0] is mine and (crew := self._choose(plan)) is not None:
                        self._free.remove(crew)
                        return crew
                    short = self._line[0] is mine and self._fits < len(self._all)
                if short:
                    self._look()
        finally:
            with self._changed:
                self._line.remove(mine)
                self._changed.notify_all()

    def wake(self) -> None:
        """Who waits for a crew looks whether it has given up."""
        with self._changed:
            self._changed.notify_all()

    def _choose(self, plan: Plan) -> Crew | None:
        """Of the crews that are free; None if none may be had."""
        fit = [crew for crew in self._free if crew.fits(plan.workers, kind(plan))]
        if fit:
            # With no more workers than need be, which others may need; of these the one that came back last: it is the warmest.
            return min(reversed(fit), key=lambda crew: crew.size)
        anew = self._taken < self._fits  # else in place of workers that wait
        return next((crew for crew in self._free if crew.waiting is not anew), None)

    @property
    def _taken(self) -> int:
        """Crews that have workers, or are out to have some."""
        return len(self._all) - sum(not crew.waiting for crew in self._free)

    def put(self, crew: Crew) -> None:
        """Back, for the next cell."""
        with self._changed:
            self._free.append(crew)
            self._trim()
            self._changed.notify_all()

    def _may_start(self) -> bool:
        """Whether there is room for new workers of a crew that is out."""
        self._look()
        with self._changed:
            return self._taken <= self._fits

    def _look(self) -> None:
        """Asks the cluster how many crews it has room for. If it does not answer, what was known is kept; `HeadWatch` minds it."""
        if self._room is None:
            return
        from ray.exceptions import RayError

        try:
            fits = min(self._room(), len(self._all))
        except RayError:
            return
        with self._changed:
            self._fits = fits
            self._trim()
            self._changed.notify_all()

    def _trim(self) -> None:
        """Has workers that wait let go, where there is room for fewer. Until they are gone their crews are out."""
        idle = [crew for crew in self._free if crew.waiting]
        for crew in idle[: max(0, self._taken - self._fits)]:
            self._free.remove(crew)
            threading.Thread(target=self._let_go, args=(crew,), name="raydist-crew", daemon=True).start()

    def _let_go(self, crew: Crew) -> None:
        try:
            crew.end()
        finally:
            self.put(crew)

    def close(self) -> None:
        """No cell gets one any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Lets all workers go. No cell trains any more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self._all))
        threads = [threading.Thread(target=crew.end, name="raydist-crew", daemon=True) for crew in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def kind(plan: Plan) -> WorkerKind:
    """What a worker of that cell is."""
    return worker_kind(plan.job, plan.request.gpus)
