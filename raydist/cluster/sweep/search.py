"""The trials that a search chooses, one after another. Each is written to the sweep's log before it trains.

Runs in: the driver, in the thread of Ray Tune; `note` in any thread. Imports neither ray nor torch nor optuna.

Its state comes from the log only: the points that were added, and how their trials ended. A restarted driver replays the same
events, and so calls the sampler with the same arguments (raydist/cluster/sweep/sampler.py).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from raydist.cluster.sweep.sampler import PointResult
from raydist.errors import RaydistError, SpecError, StorageError, TrainingStopped, UserError
from raydist.records import Event
from raydist.run.sweep_directory import CellNote, SweepLog
from raydist.spec.sweep import Cell, Point, Sweep, note
from raydist.spec.sweep.models import SearchSpec

_ENDS = ("finished", "stopped", "paused", "failed")
_PATIENCE_S = 5.0
"""Longest single wait of Ray Tune's thread for a trial to end."""
_NEEDS = {"optuna": ("optuna",), "bayes": ("optuna", "scipy")}

Ask = Callable[[Sequence[PointResult]], "Future[Point | None]"]
"""`Sampler.ask` in another process."""


def require(search: SearchSpec) -> None:
    """Raises UserError if packages that the search needs are not installed."""
    if missing := [name for name in _NEEDS[search.name or ""] if find_spec(name) is None]:
        raise UserError(
            f"search.name: {search.name} needs {' and '.join(missing)}, which are not installed here",
            'pip install "raydist[optuna]"',
        )


class History:
    """The results of the points, from the sweep's events. `metric`: the objective's."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self.notes: list[CellNote] = []
        """The notes of the added trials, in order."""
        self._ended: dict[str, PointResult] = {}
        """Trial -> how it ended, without its point."""

    def note(self, event: Event) -> None:
        """Applies one event; ignores unrelated kinds."""
        data = event.data
        match event.kind:
            case "added":
                self.notes.append(CellNote.from_dict(data["note"]))
            case "finished" | "stopped":
                figures = data.get("figures") or {}
                value = figures.get(self._metric)
                known = value if value is not None and math.isfinite(value) else None
                self._ended[data["cell"]] = PointResult({}, event.kind, known, int(figures.get("tokens") or 0))
            case "failed" if data.get("final"):
                self._ended[data["cell"]] = PointResult({}, "failed")

    def ended(self) -> set[str]:
        """Ids of the trials that have ended for good."""
        return set(self._ended)

    def results(self, seeds: int) -> list[PointResult]:
        """Every point in order, for the sampler. A point is done when its trials of all `seeds` are."""
        trials: dict[int, list[CellNote]] = {}
        for added in self.notes:
            trials.setdefault(added.point, []).append(added)
        return [self._point(trials[number], seeds) for number in sorted(trials)]

    def _point(self, trials: Sequence[CellNote], seeds: int) -> PointResult:
        point = dict(trials[0].parameters)
        ended = [self._ended[trial.id] for trial in trials if trial.id in self._ended]
        if len(ended) < seeds:
            return PointResult(point)
        # If one seed was stopped, the point counts as stopped: the scheduler has judged it.
        for state in ("stopped", "finished"):
            those = [one for one in ended if one.state == state]
            values = [one.value for one in those if one.value is not None]
            if values:
                mean = math.fsum(values) / len(values)
                return dataclasses.replace(those[0], point=point, value=mean, tokens=max(one.tokens for one in those))
            if those and state == "stopped":
                return PointResult(point, "stopped")
        return PointResult(point, "failed")


class Search:
    """`cells`: the trials from the events of earlier drivers. Call `begin` once, then `next` until it is `over`.

    Raises SpecError if those trials no longer belong to the sweep.
    """

    def __init__(self, sweep: Sweep, events: Iterable[Event]) -> None:
        self._sweep, self._seeds = sweep, sweep.spec.array.seeds
        self._history, self._changed = History(sweep.spec.objective.metric), threading.Condition()
        self._leaving: set[str] = set()
        """Trials that were asked to stop and have not ended yet."""
        for event in events:
            self._history.note(event)
        self.scouts = [trial for trial in sweep.scouts() if not trial.problems]
        """Valid trials at the ends of the search space."""
        self._points = {n.point: dict(n.parameters) for n in self._history.notes}
        self._most = sweep.most(self._points.values())
        self.cells, self._lacking = self._known()
        self._next = max(self._points, default=-1) + 1
        self._before = self._added = len(self._history.notes)
        self._answer: Future[Point | None] | None = None
        self._ready: list[Cell] = []
        """Trials that were added but not yet returned by `next`."""
        self._exhausted = False

    def _known(self) -> tuple[list[Cell], list[tuple[int, int]]]:
        """The existing trials, and the missing seeds as (point, number of the seed).

        Seeds are missing if a driver was killed between two events, or if the file now has more seeds. Points beyond
        array.samples are ignored.
        """
        places = {n.id: n.index for n in self._history.notes}
        samples = self._sweep.spec.array.samples or 0
        trials, lacking = [], []
        for number, point in self._points.items():
            made = [self._sweep.cell(point, 0, number, repeat) for repeat in range(self._seeds)]
            if not any(trial.id in places for trial in made):
                was = next(n.id for n in self._history.notes if n.point == number)
                raise SpecError(
                    f"{self._sweep.source}: trial {was} was chosen with other settings: it would now be {made[0].id}",
                    "restore array.seeds and train.seed, or give the sweep another name",
                )
            if number < samples:
                trials += [dataclasses.replace(trial, index=places[trial.id]) for trial in made if trial.id in places]
                lacking += [(number, repeat) for repeat, trial in enumerate(made) if trial.id not in places]
        return sorted(trials, key=lambda trial: trial.index), lacking

    @property
    def like(self) -> str | None:
        """The id of a trial with the same workers as all trials to come; None if they differ."""
        first, *others = self.scouts
        return first.id if all(other.job.cluster == first.job.cluster for other in others) else None

    @property
    def left(self) -> int:
        """Maximum number of trials still to come."""
        points = 0 if self._exhausted else max(0, self._most - self._next)
        return len(self._ready) + len(self._lacking) + points * self._seeds

    @property
    def count(self) -> int:
        """Trials in all: the existing ones, and the maximum still to come."""
        return len(self.cells) + self._added - self._before + self.left - len(self._ready)

    @property
    def over(self) -> bool:
        """Whether no trial is still to come."""
        return not self.left

    @property
    def because(self) -> str:
        """Why there are fewer points than array.samples; empty if there are not."""
        samples = self._sweep.spec.array.samples or 0
        if not self.over or self._next >= samples:
            return ""
        return f"search: the search space has only {self._next} points, all were tried; array.samples is {samples}"

    def note(self, event: Event) -> None:
        """One more event of the log. Thread-safe."""
        with self._changed:
            self._history.note(event)
            if event.kind in _ENDS:
                self._leaving.discard(event.data["cell"])
                self._changed.notify_all()

    def released(self, trial: str) -> None:
        """The trial is about to end. No point is chosen before the log has its end: its result counts, and it still has workers."""
        with self._changed:
            if trial not in self._history.ended():
                self._leaving.add(trial)

    def begin(
        self, log: SweepLog, ask: Ask, keep: Callable[[Cell], None], over: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """Starts the search. `keep` gets each trial before `next` returns it; `over`: gets those that are invalid, as failed."""
        self._log, self._ask, self._keep, self._over = log, ask, keep, over
        with self._changed:
            ended = self._history.ended()
        for trial in self.cells:
            if trial.problems and trial.id not in ended:  # its driver was killed between two events
                self._refuse(trial)

    def next(self, wait: bool) -> str | None:
        """The id of the next trial; None if there is none any more, or, without `wait`, if it is not chosen yet.

        Raises TrainingStopped if the sampler has failed.
        """
        while not self.over:
            if self._ready:
                try:
                    self._log.flush()  # the trial must be in the log before it trains
                except StorageError:
                    return None  # the log keeps the event and retries
                trial = self._ready.pop(0)
                if trial.spec is not None:
                    return trial.id
                continue
            if self._lacking:
                number, repeat = self._lacking.pop(0)
                self._add(self._points[number], number, (repeat,))
                continue
            if not self._choose(wait):
                return None
        return None

    def _choose(self, wait: bool) -> bool:
        """Whether the choice is made: a point was added, or no point is left."""
        if self._answer is None:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._leaving, _PATIENCE_S if wait else 0):
                    return False
                results = self._history.results(self._seeds)
            self._answer = self._ask(results)
        if not wait and not self._answer.done():
            return False
        answer, self._answer = self._answer, None
        try:
            point = answer.result()
        except RaydistError:
            raise
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[-1]
            raise TrainingStopped(
                f"sweep {self._sweep.name}: its sampler has failed: {type(error).__name__}: {line}",
                "run the same command again to continue",
            ) from error
        if point is None:
            self._exhausted = True
            return True
        number, self._next = self._next, self._next + 1
        self._points[number] = dict(point)
        self._add(point, number, range(self._seeds))
        return True

    def _add(self, point: Point, number: int, repeats: Iterable[int]) -> None:
        for trial in self._made(point, number, repeats):
            self._ready.append(trial)
            if trial.spec is not None:
                self._keep(trial)
                self._log.event("added", trial.id, note=note(trial).to_dict())
                continue
            invalid = CellNote(trial.index, trial.id, trial.point, dict(trial.parameters), trial.seed)
            self._log.event("added", trial.id, note=invalid.to_dict())
            self._refuse(trial)

    def _refuse(self, trial: Cell) -> None:
        self._log.event("failed", trial.id, cause="; ".join(trial.problems), final=True)
        self._over(trial.id, "failed")

    def _made(self, point: Point, number: int, repeats: Iterable[int]) -> Iterator[Cell]:
        for repeat in repeats:
            yield self._sweep.cell(point, self._added, number, repeat)
            self._added += 1


def asker(handle: Any) -> Ask:
    """`ask` for `Search.begin`: calls the actor of `start_sampler`."""

    def ask(results: Sequence[PointResult]) -> Future[Point | None]:
        answer: Future[Point | None] = handle.ask.remote(list(results)).future()
        return answer

    return ask
