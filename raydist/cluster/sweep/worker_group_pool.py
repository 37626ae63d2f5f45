"""The pool of worker-group slots of a sweep: as many as the cluster has room for. A trial needs a slot to start.

Runs in: the driver, in the trials' threads. Imports ray in functions only; never torch.

A slot occupies resources while a trial has it, or while it has idle workers. If a node is lost, there is room for fewer slots:
idle workers are ended, and a trial that has lost its workers waits here until others end.
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
"""How often a waiting trial checks whether nodes have returned."""


class WorkerGroupPool:
    """`size` slots. The trial that has waited longest gets the next free one, if possible one with idle workers that it can use.

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
        """Slots that there was room for at the last check."""
        self._waiting: list[object] = []
        """Those that wait for a slot, in order."""
        self._changed = threading.Condition()
        self._closed = False

    def warm(self, plan: Plan) -> None:
        """Starts workers for a trial to come, in a slot without workers, and a monitor. Returns at once."""
        threading.Thread(target=self._warm, args=(plan,), name="raydist-warm", daemon=True).start()

    def _warm(self, plan: Plan) -> None:
        slot = self.get(plan)
        if slot is not None:
            try:
                slot.prepare_next()
                slot.leave(slot.start(plan.workers, kind(plan), run_name=plan.id, start_timeout_s=_START_S))
            finally:
                self.put(slot)

    def get(self, plan: Plan, given_up: Callable[[], bool] = lambda: False) -> WorkerGroupSlot | None:
        """Waits for a free slot, and for room for its workers. None if the pool is closed, or if `given_up()`.

        Call `wake` when `given_up` may have changed.
        """
        mine = object()
        with self._changed:
            self._waiting.append(mine)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or given_up() or (self._waiting[0] is mine and self._choose(plan)), _LOOK_S
                    )
                    if self._closed or given_up():
                        return None
                    if self._waiting[0] is mine and (slot := self._choose(plan)) is not None:
                        self._free.remove(slot)
                        return slot
                    short = self._waiting[0] is mine and self._fits < len(self._all)
                if short:
                    self._look()
        finally:
            with self._changed:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def wake(self) -> None:
        """Makes those that wait in `get` check `given_up` again."""
        with self._changed:
            self._changed.notify_all()

    def _choose(self, plan: Plan) -> WorkerGroupSlot | None:
        """The best free slot for that trial; None if there is none."""
        fit = [slot for slot in self._free if slot.fits(plan.workers, kind(plan))]
        if fit:
            # The one with the fewest workers; of these the one returned last: its caches are the warmest.
            return min(reversed(fit), key=lambda slot: slot.size)
        new = self._taken < self._fits  # room for new workers; else they replace idle ones
        return next((slot for slot in self._free if slot.waiting is not new), None)

    @property
    def _taken(self) -> int:
        """Slots that have workers or are in use."""
        return len(self._all) - sum(not slot.waiting for slot in self._free)

    def put(self, slot: WorkerGroupSlot) -> None:
        """Returns a slot, for the next trial."""
        with self._changed:
            self._free.append(slot)
            self._trim()
            self._changed.notify_all()

    def _may_start(self) -> bool:
        """Whether there is room for new workers in a slot that is in use."""
        self._look()
        with self._changed:
            return self._taken <= self._fits

    def _look(self) -> None:
        """Updates how many slots the cluster has room for; unchanged if Ray does not answer (`HeadMonitor` handles that)."""
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
        """Ends idle workers if there is room for fewer slots. Their slots are in use until the workers are gone."""
        idle = [slot for slot in self._free if slot.waiting]
        for slot in idle[: max(0, self._taken - self._fits)]:
            self._free.remove(slot)
            threading.Thread(target=self._end_idle, args=(slot,), name="raydist-slot", daemon=True).start()

    def _end_idle(self, slot: WorkerGroupSlot) -> None:
        try:
            slot.end()
        finally:
            self.put(slot)

    def close(self) -> None:
        """No trial gets a slot any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Waits for all slots to be returned, then ends all workers."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self._all))
        threads = [threading.Thread(target=slot.end, name="raydist-slot", daemon=True) for slot in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def kind(plan: Plan) -> WorkerKind:
    """The kind of the workers of that trial."""
    return worker_kind(plan.job, plan.request.gpus)
