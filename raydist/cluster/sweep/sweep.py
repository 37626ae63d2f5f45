"""Runs a sweep from its first trial to its last; `raydist sweep` calls it after all checks.

Runs in: the driver. The main thread updates the display and checks signals and limits; Ray Tune has a thread, and each running
trial has one. Imports ray in functions only; never torch.
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
from raydist.cluster.sweep.budget import HOUR, before, reached
from raydist.cluster.sweep.report_queue import start_report_queue
from raydist.cluster.sweep.sampler import start_sampler
from raydist.cluster.sweep.search import Search, asker
from raydist.cluster.sweep.trial import Plan
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import RaydistError, StorageError, TrainingStopped
from raydist.observe.warm_monitors import WarmMonitors
from raydist.records import Event
from raydist.report.sweep.standing import Live, Spent
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.run.sweep_state import DONE, fold
from raydist.spec.sweep import Axis, Cell, SweepSpec

_REFRESH_S = 0.5
_TUNE_S = 30.0
"""Timeout for Ray Tune to end after the last trial."""


class View(Protocol):
    """Shows a sweep to the user: `raydist.report.sweeplive.SweepConsole`."""

    def update(self, live: Sequence[Live], counts: Mapping[str, int], spent: Spent) -> None:
        """The running trials, the number of trials of each status, and the hours spent."""

    def note(self, text: str) -> None:
        """Prints a line."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sweep ended: finished (every trial is finished, stopped or failed), paused by a limit, or interrupted by a signal."""

    status: str
    because: str = ""
    signal: int | None = None


class SweepRun:
    """Use once: `SweepRun(...).run()`.

    `trials`: id -> parameters of all trials, in order; `plan` prepares one of them, see `TrialRunner`; `tokens`: of the longest
    trial. `at_once`: how many train at a time; `room`: see `WorkerGroupPool`. `search` chooses more trials after those; `keep`
    gets each of them. `lost` and `asked`: see `DriverLease.lost` and `asked_to_stop`. `on_event`: see `SweepLog`.
    """

    def __init__(
        self,
        spec: SweepSpec,
        axes: Sequence[Axis],
        folder: SweepDir,
        trials: Mapping[str, Mapping[str, Any]],
        plan: Callable[[str, Mapping[str, Any]], Plan],
        session: Session,
        view: View,
        *,
        tokens: int,
        at_once: int,
        room: Callable[[], int] | None = None,
        search: Search | None = None,
        keep: Callable[[Cell], None] = lambda trial: None,
        lost: Callable[[], BaseException | None] = lambda: None,
        asked: Callable[[], str | None] = lambda: None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._spec, self._axes, self._folder, self._trials, self._plan = spec, axes, folder, trials, plan
        self._session, self._view, self._tokens = session, view, tokens
        self._at_once, self._room = at_once, room
        self._search, self._keep, self._lost, self._asked, self._on_event = search, keep, lost, asked, on_event
        self._signals: list[int] = []
        self._error: BaseException | None = None
        self._gone = self._taken = False

    def run(self) -> Ended:
        """Trains until every trial is done, a limit is reached, or a signal interrupts it. Call it in the main thread.

        At the first SIGINT, SIGTERM or SIGHUP all trials save a checkpoint and end cleanly, at the second they end at once. Raises
        TrainingStopped if Ray Tune or the cluster fails, and the error of `lost()`.
        """

        # First the module that a thread of the session is importing: Ray breaks if two threads import parts of it at the same time.
        import raydist.cluster.run.ray_train_adapter  # noqa: F401
        from raydist.cluster.sweep import ray_tune

        events = self._folder.events()
        states = fold(events)
        known = {trial: states[trial].status for trial in self._trials if trial in states}
        self._done: dict[str, str] = {trial: status for trial, status in known.items() if status in DONE}
        waiting = [trial for trial in self._trials if trial not in self._done]
        spent = before(events)
        search = self._search
        to_come = search.left if search is not None else 0
        if not waiting and not to_come:
            return Ended("finished")
        log = SweepLog(self._folder, self._on_event, *([search.note] if search is not None else []))
        log.event("began", driver=self._session.node_ip, cells=len(self._trials) + to_come)
        log.flush()
        if search is not None:
            sampler = start_sampler(self._axes, self._spec.search, self._spec.objective.better)
            search.begin(log, asker(sampler), self._keep, self._over)
            waiting = [trial for trial in waiting if trial not in self._done]
        self._left = len(waiting) + to_come
        monitors = WarmMonitors(self._session.temp_dir, lambda: self._left > 0)
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
        for trial in first:
            with suppress(RaydistError):  # a trial that cannot train is reported when it starts
                pool.warm(self._plan(trial, {}))  # while Ray Tune starts
        scratch = self._session.temp_dir / f"tune-{self._session.job_id}"
        queue = ray_tune.TrialQueue(waiting, self._at_once, self._session.node_ip, search)
        rule = schedulers.make(self._spec, self._axes, self._tokens, self._trials.__getitem__)
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
                    f"run the same command again to continue; logs: {self._folder.uri}/logs",
                )
                self._error.__cause__ = error
            if self._error is not None:
                trial_runner.close("Ray Tune has failed")

        thread = threading.Thread(target=decide, name="ray_tune", daemon=True)
        # Imported modules stay in memory: full garbage collections, which delay decisions, need not scan them.
        gc.collect()
        gc.freeze()
        self._began, self._before = time.monotonic(), spent
        ended = Ended("paused", "the sweep's driver has failed")
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
            if not self._gone:  # else the cluster does not answer
                pool.end()
                monitors.end()
            self._log_end(log, ended)
            shutil.rmtree(scratch, ignore_errors=True)
        if self._error is not None:
            raise self._error
        if search is not None and search.because:
            self._view.note(search.because)
        return ended

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)  # only recorded: a handler may run between any two lines of the main thread

    def _watch(self, thread: threading.Thread, trial_runner: TrialRunner, log: SweepLog, queue: Any) -> Ended:
        """Returns when no trial is running."""
        ended, acted = Ended("finished"), 0
        while thread.is_alive():
            thread.join(_REFRESH_S)
            if not self._signals and (requester := self._asked()) is not None:
                self._view.note(f"stop requested by {requester}")
                self._signals.append(signal.SIGINT)
            if len(self._signals) > acted:
                acted = len(self._signals)
                again = " (again to end at once)" if acted == 1 else ""
                self._view.note(f"stopping: every running trial saves a checkpoint and ends{again}")
                ended = Ended("interrupted", "interrupted", self._signals[0])
                trial_runner.close("interrupted", at_once=acted > 1)
            why = reached(self._spec.limits, self._spent(trial_runner)) if not trial_runner.closed else None
            if why is not None:
                self._view.note(f"{why}: every running trial saves a checkpoint and pauses; the others wait")
                ended = Ended("paused", why)
                trial_runner.close(why)
            if self._error is None and (lost := self._lost()) is not None:
                self._error, self._taken = lost, True  # another driver owns the folder now: write nothing more
                trial_runner.close("another driver has taken over", at_once=True)
            if self._error is None and (gone := trial_runner.gone) is not None:
                self._gone = True
                self._error = TrainingStopped(
                    f"sweep {self._folder.name}: {gone}",
                    "run the same command again to continue from the last checkpoints",
                )
                trial_runner.close(gone, at_once=True)
                return Ended("paused", gone)
            if trial_runner.closed:
                queue.set_finished()
                if not trial_runner.live():
                    break
            self._show(trial_runner, log)
        return ended

    def _log_end(self, log: SweepLog, ended: Ended) -> None:
        """Records how the sweep ended, unless its folder is another driver's."""
        if self._error is not None:
            ended = Ended("paused", str(self._error).partition("\n")[0])
        if not self._taken:
            log.event("ended", status=ended.status, cause=ended.because)
            log.flush()

    def _over(self, trial: str, status: str) -> None:
        if status in DONE:
            self._done[trial] = status

    def _trial_count(self) -> int:
        """All trials. With a search, the maximum: it may run out of points."""
        return self._search.count if self._search is not None else len(self._trials)

    def _spent(self, trial_runner: TrialRunner) -> Spent:
        return self._before + Spent((time.monotonic() - self._began) / HOUR, *trial_runner.used())

    def _show(self, trial_runner: TrialRunner, log: SweepLog) -> None:
        with suppress(StorageError):  # the log keeps the events and retries
            log.flush()
        live = trial_runner.live()
        counts = Counter(self._done.values())
        self._left = self._trial_count() - len(self._done) - len(live)
        counts |= {"running": len(live), "waiting": self._left}
        self._view.update(live, counts, self._spent(trial_runner))
