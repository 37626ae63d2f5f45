"""A sweep, from its first cell to its last: what `raydist sweep` does once everything about it has been checked.

Runs in: the driver. The main thread draws, minds signals and limits; Ray Tune has a thread, and so has every cell that trains.
Imports ray in functions only; never torch.
"""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from raydist.cluster.run.supervisor import handling
from raydist.cluster.session import Session
from raydist.cluster.sweep import schedulers
from raydist.cluster.sweep.budget import HOUR, Spent, before, reached
from raydist.cluster.sweep.report_queue import start_report_queue
from raydist.cluster.sweep.sampler import start_sampler
from raydist.cluster.sweep.search import Search, asker
from raydist.cluster.sweep.trial import Live, Plan
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import RaydistError, StorageError, TrainingStopped
from raydist.observe.warm_monitors import WarmMonitors
from raydist.records import Event
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.run.sweep_state import DONE, fold
from raydist.spec.sweep import Axis, Cell, SweepSpec

_REFRESH_S = 0.5
_TUNE_S = 30.0
"""How long Ray Tune may take to end once the last cell has."""


class View(Protocol):
    """What shows a sweep to the user: `raydist.report.sweeplive.SweepConsole`."""

    def update(self, live: Sequence[Live], counts: Mapping[str, int], spent: Spent) -> None:
        """The cells that train, how many there are of each status, and what it has cost."""
        ...

    def note(self, text: str) -> None:
        """A word to the user."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sweep ended: finished (every cell is finished, stopped or failed), paused by a limit, or interrupted by a signal."""

    status: str
    because: str = ""
    signal: int | None = None


class SweepRun:
    """Use once: `SweepRun(...).run()`.

    `cells`: id -> parameters of all cells, in order; `plan` makes one of them ready to train, see `TrialRunner`; `tokens`: those
    of the longest cell. `at_once`: how many train at a time, `room`: see `WorkerGroupPool`. `search` chooses the cells after
    those; `keep` is given each. `lost` and `asked`: see `DriverLease.lost` and `asked_to_stop`. `heard`: see `SweepLog`.
    """

    def __init__(
        self,
        spec: SweepSpec,
        axes: Sequence[Axis],
        folder: SweepDir,
        cells: Mapping[str, Mapping[str, Any]],
        plan: Callable[[str, Mapping[str, Any]], Plan],
        session: Session,
        view: View,
        *,
        tokens: int,
        at_once: int,
        room: Callable[[], int] | None = None,
        search: Search | None = None,
        keep: Callable[[Cell], None] = lambda cell: None,
        lost: Callable[[], BaseException | None] = lambda: None,
        asked: Callable[[], str | None] = lambda: None,
        heard: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._spec, self._axes, self._folder, self._cells, self._plan = spec, axes, folder, cells, plan
        self._session, self._view, self._tokens = session, view, tokens
        self._at_once, self._room = at_once, room
        self._search, self._keep, self._lost, self._asked, self._heard = search, keep, lost, asked, heard
        self._signals: list[int] = []
        self._error: BaseException | None = None
        self._gone = False

    def run(self) -> Ended:
        """Trains until every cell is done, a limit is reached, or somebody interrupts. Call it in the main thread.

        The first SIGINT or SIGTERM asks all cells for a checkpoint and a clean end, the second ends them at once. Raises what Ray
        Tune raises, and `lost()`.
        """

        # First what a thread of the session imports just now: two that import halves of Ray each would both be left with a half.
        import raydist.cluster.run.ray_train_adapter  # noqa: F401
        from raydist.cluster.sweep import ray_tune

        events = self._folder.events()
        states = fold(events)
        known = {cell: states[cell].status for cell in self._cells if cell in states}
        self._done: dict[str, str] = {cell: status for cell, status in known.items() if status in DONE}
        waiting = [cell for cell in self._cells if cell not in self._done]
        spent = before(events)
        search = self._search
        to_come = search.left if search is not None else 0
        if not waiting and not to_come:
            return Ended("finished")
        log = SweepLog(self._folder, self._heard, *([search.note] if search is not None else []))
        log.event("began", driver=self._session.node_ip, cells=len(self._cells) + to_come)
        log.flush()
        if search is not None:
            sampler = start_sampler(self._axes, self._spec.search, self._spec.objective.better)
            search.begin(log, asker(sampler), self._keep, self._over)
            waiting = [cell for cell in waiting if cell not in self._done]
        self._left = len(waiting) + to_come
        monitors = WarmMonitors(self._session.temp_dir / f"monitors-{self._session.job_id}", lambda: self._left > 0)
        pool = WorkerGroupPool(self._session, min(self._at_once, self._left), monitors, self._room)
        report_queue = start_report_queue()
        limits = self._spec.limits
        trial_runner = TrialRunner(
            self._session,
            pool,
            log,
            self._plan,
            report_queue.post,
            report_queue.forget,
            states,
            metric=self._spec.objective.metric,
            allowed=limits.failures_per_cell,
            over=self._over,
        )
        first = waiting[: self._at_once]
        if search is not None and search.like is not None:
            first += [search.like] * (min(self._at_once, self._left) - len(first))
        for cell in first:
            with suppress(RaydistError):  # of a cell that cannot train it is said when it is its turn
                pool.warm(self._plan(cell, {}))  # while Ray Tune starts
        scratch = self._session.temp_dir / f"tune-{self._session.job_id}"
        queue = ray_tune.CellQueue(waiting, self._at_once, self._session.node_ip, search)
        rule = schedulers.make(self._spec, self._axes, self._tokens, self._cells.__getitem__)
        decisions = ray_tune.Decisions(rule, self._spec.objective.better, trial_runner, log, queue)

        def decide() -> None:
            try:
                decisions.replay(events)
                ray_tune.fit(queue, decisions, trial_runner, scratch)
            except RaydistError as error:
                self._error = error
            except BaseException as error:
                line = (str(error).strip().splitlines() or [""])[-1]
                self._error = TrainingStopped(
                    f"sweep {self._folder.name}: Ray Tune has failed: {type(error).__name__}: {line}",
                    f"the same command goes on; logs: {self._folder.uri}/logs",
                )
                self._error.__cause__ = error
            if self._error is not None:
                trial_runner.close("Ray Tune has failed")

        thread = threading.Thread(target=decide, name="ray_tune", daemon=True)
        # What was imported stays, and a full collection of garbage need not go through it, in the middle of a decision.
        gc.collect()
        gc.freeze()
        self._began, self._before = time.monotonic(), spent
        ended = Ended("finished")
        try:
            with handling(self._on_signal):
                thread.start()
                ended = self._watch(thread, trial_runner, log, queue)
                if not self._gone:
                    trial_runner.join()
                    thread.join(_TUNE_S)
                self._show(trial_runner, log)
        except BaseException:
            trial_runner.close("the sweep's driver has failed", at_once=True)
            trial_runner.join()
            raise
        finally:
            if not self._gone:  # else nobody answers
                pool.end()
                monitors.end()
            log.event("ended", status=ended.status, cause=ended.because)
            log.flush()
            shutil.rmtree(scratch, ignore_errors=True)
        if self._error is not None:
            raise self._error
        if search is not None and search.because:
            self._view.note(search.because)
        return ended

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)  # only noted: a handler runs between any two lines of the main thread

    def _watch(self, thread: threading.Thread, trial_runner: TrialRunner, log: SweepLog, queue: Any) -> Ended:
        """Until no cell trains any more."""
        ended, acted = Ended("finished"), 0
        while thread.is_alive():
            thread.join(_REFRESH_S)
            if not self._signals and (who := self._asked()) is not None:
                self._view.note(f"`raydist stop`, {who}, asks this sweep to end")
                self._signals.append(signal.SIGINT)
            if len(self._signals) > acted:
                acted = len(self._signals)
                again = " (again to end at once)" if acted == 1 else ""
                self._view.note(f"stopping: a checkpoint of every cell that trains, then a clean end{again}")
                ended = Ended("interrupted", "interrupted", self._signals[0])
                trial_runner.close("interrupted", at_once=acted > 1)
            why = reached(self._spec.limits, self._spent(trial_runner)) if not trial_runner.closed else None
            if why is not None:
                self._view.note(f"{why}: a checkpoint of every cell that trains; the others wait")
                ended = Ended("paused", why)
                trial_runner.close(why)
            if self._error is None and (lost := self._lost()) is not None:
                self._error = lost  # and not a word more into a folder that is another driver's
                trial_runner.close("another driver has taken over", at_once=True)
            if self._error is None and (gone := trial_runner.gone) is not None:
                self._gone = True
                self._error = TrainingStopped(
                    f"sweep {self._folder.name}: {gone}", "its cells are as of their last checkpoints"
                )
                trial_runner.close(gone, at_once=True)
                return Ended("paused", gone)
            if trial_runner.closed:
                queue.set_finished()
                if not trial_runner.live():
                    break
            self._show(trial_runner, log)
        return ended

    def _over(self, cell: str, status: str) -> None:
        if status in DONE:
            self._done[cell] = status

    def _cells_in_all(self) -> int:
        """Those that are known, and at most so many of a search: which may find that there are no more points."""
        return self._search.count if self._search is not None else len(self._cells)

    def _spent(self, trial_runner: TrialRunner) -> Spent:
        return self._before + Spent((time.monotonic() - self._began) / HOUR, *trial_runner.used())

    def _show(self, trial_runner: TrialRunner, log: SweepLog) -> None:
        with suppress(StorageError):  # what storage refuses is kept, and tried again
            log.flush()
        live = trial_runner.live()
        counts = Counter(self._done.values())
        self._left = self._cells_in_all() - len(self._done) - len(live)
        counts |= {"running": len(live), "waiting": self._left}
        self._view.update(live, counts, self._spent(trial_runner))
