"""The slots on which the cells of a sweep train: as many as the cluster has room for, and no cell begins without one.

Runs in: the driver, from the threads of cells. Imports ray in functions only; never torch.

A slot takes its part of the cluster as long as it is out, or has workers that wait. Where a node is lost, there is room for fewer:
workers that wait are let go, and a cell that has lost its own comes back here, and waits until others leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.run.request import worker_kind
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.cluster.session import Session
from raydist.cluster.sweep.trial import Plan
from raydist.observe.warm_monitors import WarmMonitors

_START_S = 120.0
_LOOK_S = 5.0
"""How often a cell that waits looks whether nodes have come back."""


class WorkerGroupPool:
    """`size` slots. One that is free goes to a cell, of those that wait the first; rather one whose workers are of its kind.

    `monitors`: see `WorkerGroupSlot`. `room()`: how many slots the cluster has room for now; None: always for all.
    """

    def __init__(
        self,
        session: Session,
        size: int,
        monitors: WarmMonitors | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        self._session, self._room = session, room
        self._all = [WorkerGroupSlot(session, monitors, self._may_start) for _ in range(size)]
        self._free = list(self._all)
        self._fits = size
        """SlotPool that there was room for when that was last looked at."""
        self._line: list[object] = []
        """Who waits for a slot, the first one first."""
        self._changed = threading.Condition()
        self._closed = False

    def warm(self, plan: Plan) -> None:
        """Starts workers for a cell that is to come, in a slot that has none yet, and a monitor. Returns at once."""
        threading.Thread(target=self._warm, args=(plan,), name="raydist-warm", daemon=True).start()

    def _warm(self, plan: Plan) -> None:
        slot = self.get(plan)
        if slot is not None:
            try:
                slot.foresee()
                slot.leave(slot.start(plan.workers, kind(plan), run_name=plan.id, start_timeout_s=_START_S))
            finally:
                self.put(slot)

    def get(self, plan: Plan, given_up: Callable[[], bool] = lambda: False) -> WorkerGroupSlot | None:
        """A slot that nobody has, as soon as there is one, and room for it; None once the pool is closed, or it is `given_up`, of
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
                    if self._line[0] is mine and (slot := self._choose(plan)) is not None:
                        self._free.remove(slot)
                        return slot
                    short = self._line[0] is mine and self._fits < len(self._all)
                if short:
                    self._look()
        finally:
            with self._changed:
                self._line.remove(mine)
                self._changed.notify_all()

    def wake(self) -> None:
        """Who waits for a slot looks whether it has given up."""
        with self._changed:
            self._changed.notify_all()

    def _choose(self, plan: Plan) -> WorkerGroupSlot | None:
        """Of the slots that are free; None if none may be had."""
        fit = [slot for slot in self._free if slot.fits(plan.workers, kind(plan))]
        if fit:
            # With no more workers than need be, which others may need; of these the one that came back last: it is the warmest.
            return min(reversed(fit), key=lambda slot: slot.size)
        anew = self._taken < self._fits  # else in place of workers that wait
        return next((slot for slot in self._free if slot.waiting is not anew), None)

    @property
    def _taken(self) -> int:
        """SlotPool that have workers, or are out to have some."""
        return len(self._all) - sum(not slot.waiting for slot in self._free)

    def put(self, slot: WorkerGroupSlot) -> None:
        """Back, for the next cell."""
        with self._changed:
            self._free.append(slot)
            self._trim()
            self._changed.notify_all()

    def _may_start(self) -> bool:
        """Whether there is room for new workers of a slot that is out."""
        self._look()
        with self._changed:
            return self._taken <= self._fits

    def _look(self) -> None:
        """Asks the cluster how many slots it has room for. If it does not answer, what was known is kept; `HeadMonitor` minds
        it."""
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
        """Has workers that wait let go, where there is room for fewer. Until they are gone their slots are out."""
        idle = [slot for slot in self._free if slot.waiting]
        for slot in idle[: max(0, self._taken - self._fits)]:
            self._free.remove(slot)
            threading.Thread(target=self._let_go, args=(slot,), name="raydist-slot", daemon=True).start()

    def _let_go(self, slot: WorkerGroupSlot) -> None:
        try:
            slot.end()
        finally:
            self.put(slot)

    def close(self) -> None:
        """No cell gets one any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Lets all workers go. No cell trains any more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self._all))
        threads = [threading.Thread(target=slot.end, name="raydist-slot", daemon=True) for slot in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def kind(plan: Plan) -> WorkerKind:
    """What a worker of that cell is."""
    return worker_kind(plan.job, plan.request.gpus)
