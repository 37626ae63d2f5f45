"""The cells that a search chooses: one after another, each written to the sweep's log before anything trains on it.

Runs in: the driver, its methods in the thread of Ray Tune; `note` in any. Imports neither ray nor torch nor optuna.

All that it knows is the log: the points that were added, and how their cells ended. A driver that is started again folds the same
events, and so asks the sampler the same question (raydist/cluster/sweep/sampler.py).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from raydist.cluster.sweep.sampler import Told
from raydist.errors import RaydistError, SpecError, StorageError, TrainingStopped, UserError
from raydist.records import Event
from raydist.run.sweep_directory import CellNote, SweepLog
from raydist.spec.sweep import Cell, Point, Sweep, note
from raydist.spec.sweep.models import SearchSpec

_ENDS = ("finished", "stopped", "paused", "failed")
_PATIENCE_S = 5.0
"""How long the thread of Ray Tune waits at once for a cell to end."""
_NEEDS = {"optuna": ("optuna",), "bayes": ("optuna", "scipy")}

Ask = Callable[[Sequence[Told]], "Future[Point | None]"]
"""`Sampler.ask`, somewhere else."""


def require(search: SearchSpec) -> None:
    """Raises UserError where the search's packages are not installed."""
    if missing := [name for name in _NEEDS[search.name or ""] if find_spec(name) is None]:
        raise UserError(
            f"search.name: {search.name} needs {' and '.join(missing)}, which the driver has not",
            'pip install "raydist[optuna]"',
        )


class History:
    """What has become of the points, folded from the sweep's events. `metric`: the objective's."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self.notes: list[CellNote] = []
        """Those of the cells that were added, in order."""
        self._ended: dict[str, Told] = {}
        """Cell -> how it ended, without its point."""

    def note(self, event: Event) -> None:
        """One more event; those of other kinds say nothing."""
        data = event.data
        match event.kind:
            case "added":
                self.notes.append(CellNote.from_dict(data["note"]))
            case "finished" | "stopped":
                figures = data.get("figures") or {}
                value = figures.get(self._metric)
                known = value if value is not None and math.isfinite(value) else None
                self._ended[data["cell"]] = Told({}, event.kind, known, int(figures.get("tokens") or 0))
            case "failed" if data.get("final"):
                self._ended[data["cell"]] = Told({}, "failed")

    def ended(self) -> set[str]:
        """Cells of which nothing comes any more."""
        return set(self._ended)

    def told(self, seeds: int) -> list[Told]:
        """Every point in order, for the sampler. One is over once its cells of all `seeds` are."""
        cells: dict[int, list[CellNote]] = {}
        for added in self.notes:
            cells.setdefault(added.point, []).append(added)
        return [self._point(cells[number], seeds) for number in sorted(cells)]

    def _point(self, cells: Sequence[CellNote], seeds: int) -> Told:
        point = dict(cells[0].parameters)
        ended = [self._ended[cell.id] for cell in cells if cell.id in self._ended]
        if len(ended) < seeds:
            return Told(point)
        # A point of which a seed was stopped has been judged; what its others came to says less than that.
        for state in ("stopped", "finished"):
            those = [one for one in ended if one.state == state]
            values = [one.value for one in those if one.value is not None]
            if values:
                mean = math.fsum(values) / len(values)
                return dataclasses.replace(those[0], point=point, value=mean, tokens=max(one.tokens for one in those))
            if those and state == "stopped":
                return Told(point, "stopped")
        return Told(point, "failed")


class Search:
    """`cells` are those that the events of drivers before have; then `begin` once, and `next` until it is `over`.

    Raises SpecError where those cells are not the sweep's any more.
    """

    def __init__(self, sweep: Sweep, events: Iterable[Event]) -> None:
        self._sweep, self._seeds = sweep, sweep.spec.array.seeds
        self._history, self._changed = History(sweep.spec.objective.metric), threading.Condition()
        self._leaving: set[str] = set()
        """Cells that have been told to stop, and have not ended yet."""
        for event in events:
            self._history.note(event)
        self.scouts = [cell for cell in sweep.scouts() if not cell.problems]
        """Valid cells from the ends of the space."""
        self._points = {n.point: dict(n.parameters) for n in self._history.notes}
        self._most = sweep.most(self._points.values())
        self.cells, self._lacking = self._known()
        self._next = max(self._points, default=-1) + 1
        self._before = self._added = len(self._history.notes)
        self._answer: Future[Point | None] | None = None
        self._ready: list[Cell] = []
        """Cells that were added, and not handed out."""
        self._exhausted = False

    def _known(self) -> tuple[list[Cell], list[tuple[int, int]]]:
        """The cells there are, and the seeds (point, which of its seeds) that a point lacks: of a driver killed between two lines,
        or since the file has more seeds. Points beyond array.samples are left alone.
        """
        places = {n.id: n.index for n in self._history.notes}
        samples = self._sweep.spec.array.samples or 0
        cells, lacking = [], []
        for number, point in self._points.items():
            made = [self._sweep.cell(point, 0, number, repeat) for repeat in range(self._seeds)]
            if not any(cell.id in places for cell in made):
                was = next(n.id for n in self._history.notes if n.point == number)
                raise SpecError(
                    f"{self._sweep.source}: cell {was} was chosen when the sweep was started otherwise: it would be {made[0].id}",
                    "go on with array.seeds and train.seed as they were, or give the sweep another name",
                )
            if number < samples:
                cells += [dataclasses.replace(cell, index=places[cell.id]) for cell in made if cell.id in places]
                lacking += [(number, repeat) for repeat, cell in enumerate(made) if cell.id not in places]
        return sorted(cells, key=lambda cell: cell.index), lacking

    @property
    def like(self) -> str | None:
        """The id of a cell whose workers are as those of all that come; None where they differ."""
        first, *others = self.scouts
        return first.id if all(other.job.cluster == first.job.cluster for other in others) else None

    @property
    def left(self) -> int:
        """Cells at most that are still to come."""
        points = 0 if self._exhausted else max(0, self._most - self._next)
        return len(self._ready) + len(self._lacking) + points * self._seeds

    @property
    def count(self) -> int:
        """Cells in all: those that there are, and at most so many that are still to come."""
        return len(self.cells) + self._added - self._before + self.left - len(self._ready)

    @property
    def over(self) -> bool:
        """Whether no cell comes any more."""
        return not self.left

    @property
    def because(self) -> str:
        """Why there are fewer points than the file asks for; empty if there are not."""
        samples = self._sweep.spec.array.samples or 0
        if not self.over or self._next >= samples:
            return ""
        return f"search: all {self._next} points that there are have been tried, array.samples is {samples}"

    def note(self, event: Event) -> None:
        """What the log is given."""
        with self._changed:
            self._history.note(event)
            if event.kind in _ENDS:
                self._leaving.discard(event.data["cell"])
                self._changed.notify_all()

    def released(self, cell: str) -> None:
        """Nothing more is decided about that cell. No point is chosen before the log has how it ended: nor could it train, for the
        cell still has its workers.
        """
        with self._changed:
            if cell not in self._history.ended():
                self._leaving.add(cell)

    def begin(
        self, log: SweepLog, ask: Ask, keep: Callable[[Cell], None], over: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """From now on cells come. `keep` is given each before it is handed out; `over`: one that is no job has ended, as failed."""
        self._log, self._ask, self._keep, self._over = log, ask, keep, over
        with self._changed:
            ended = self._history.ended()
        for cell in self.cells:
            if cell.problems and cell.id not in ended:  # its driver was killed between two lines
                self._refuse(cell)

    def next(self, wait: bool) -> str | None:
        """The id of the next cell; None while it is being chosen, if not `wait`, and when there is none any more.

        Raises TrainingStopped where the sampler has failed.
        """
        while not self.over:
            if self._ready:
                try:
                    self._log.flush()  # not before that may anything train on it
                except StorageError:
                    return None  # it is kept, and tried again
                cell = self._ready.pop(0)
                if cell.spec is not None:
                    return cell.id
                continue
            if self._lacking:
                number, repeat = self._lacking.pop(0)
                self._add(self._points[number], number, (repeat,))
                continue
            if not self._choose(wait):
                return None
        return None

    def _choose(self, wait: bool) -> bool:
        """Whether the next point has been chosen, or there is none."""
        if self._answer is None:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._leaving, _PATIENCE_S if wait else 0):
                    return False
                told = self._history.told(self._seeds)
            self._answer = self._ask(told)
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
                "the same command goes on",
            ) from error
        if point is None:
            self._exhausted = True
            return True
        number, self._next = self._next, self._next + 1
        self._points[number] = dict(point)
        self._add(point, number, range(self._seeds))
        return True

    def _add(self, point: Point, number: int, repeats: Iterable[int]) -> None:
        for cell in self._made(point, number, repeats):
            self._ready.append(cell)
            if cell.spec is not None:
                self._keep(cell)
                self._log.event("added", cell.id, note=note(cell).to_dict())
                continue
            told = CellNote(cell.index, cell.id, cell.point, dict(cell.parameters), cell.seed)
            self._log.event("added", cell.id, note=told.to_dict())
            self._refuse(cell)

    def _refuse(self, cell: Cell) -> None:
        self._log.event("failed", cell.id, cause="; ".join(cell.problems), final=True)
        self._over(cell.id, "failed")

    def _made(self, point: Point, number: int, repeats: Iterable[int]) -> Iterator[Cell]:
        for repeat in repeats:
            yield self._sweep.cell(point, self._added, number, repeat)
            self._added += 1


def asker(handle: Any) -> Ask:
    """`Search.begin`'s `ask`, of the actor that `start_sampler` has made."""

    def ask(told: Sequence[Told]) -> Future[Point | None]:
        answer: Future[Point | None] = handle.ask.remote(list(told)).future()
        return answer

    return ask
