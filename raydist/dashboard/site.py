"""The pages by their addresses, read from the storages, and kept while they are new.

Runs in: the dashboard's threads. Names in an address lead only to runs and sweeps that stand in a storage.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raydist.dashboard import list_page, run_page, stamps, sweep_page
from raydist.dashboard.cache import Live, Made, Shelf
from raydist.dashboard.document import Parts, problem
from raydist.dashboard.kept_files import KeptFiles, KeptStorage
from raydist.dashboard.run_page import Other, Seen
from raydist.dashboard.views import RunView
from raydist.errors import RaydistError, RunNotFound, StorageError
from raydist.parsing import quoted
from raydist.run.directory import LONGEST_NAME, SPEC, RunDir
from raydist.run.log import SINGLE, read_steps
from raydist.run.sweep_directory import RUNS, SweepDir
from raydist.storage import Storage

_RUNS, _PAGES = 32, 256
"""Runs and drawn pages that are kept in memory."""


@dataclass(frozen=True)
class Place:
    """A run in a storage: its name, or SWEEP/runs/CELL."""

    storage: int
    name: str


class Site:
    """All pages of these storages. `acts`: runs' pages have buttons of actions."""

    def __init__(self, homes: Sequence[Storage], acts: bool = False) -> None:
        kept = KeptFiles()
        self.homes, self._acts = [KeptStorage(home, kept) for home in homes], acts
        self._runs, self._steps, self._pages = Shelf(_RUNS), Shelf(_RUNS), Shelf(_PAGES)
        self._examined = Shelf(_RUNS)
        self._examining: set[Place] = set()
        self._one = threading.Lock()
        """One run is examined at a time."""

    def run(self, storage: int, name: str) -> Place:
        """The run of that name. Raises RunNotFound if there is none."""
        return self._checked(storage, _single(name), RunDir)

    def cell(self, storage: int, sweep: str, cell: str) -> Place:
        """The run of a sweep's cell. Raises RunNotFound if it has not begun."""
        home = self.sweep(storage, sweep)
        if "/" in cell:
            raise RunNotFound(f"no cell {quoted(cell)!r} is here")
        return self._checked(
            storage, f"{home.name}/{RUNS}/{cell}", RunDir, f"run of cell {quoted(cell)!r} (it may not have begun)"
        )

    def sweep(self, storage: int, name: str) -> Place:
        """The sweep of that name. Raises RunNotFound if there is none."""
        return self._checked(storage, _single(name), SweepDir)

    def list(self) -> Live[Parts]:
        """The list of all runs and sweeps."""

        def stamp() -> list[list[dict[str, Any]] | str]:
            return [_rows(home) for home in self.homes]

        def make(rows: Any) -> Parts:
            return list_page.page(self.homes, rows)

        return self._page("list", stamp, make, lambda error: problem("Runs and sweeps", str(error)))

    def run_page(self, place: Place, view: RunView) -> Live[Parts]:
        """The page of a run in that view."""
        run = RunDir(self.homes[place.storage].at(place.name))
        data = self._seen(place, run)

        def other(name: str) -> Other:
            beside = self.run(place.storage, name)
            spec = self.homes[place.storage].read(f"{name}/{SPEC}")
            return Other(self.steps(beside).get().value, spec.decode(errors="replace"))

        def stamp() -> object:
            beside = [self.steps(self.run(place.storage, name)).get().version for name in view.beside]
            found = self._findings(place, run) if _ended(data.get().value) else None
            return data.get().version, beside, found.version if found else 0

        def make(_: Any) -> Parts:
            seen = data.get().value
            found = self._findings(place, run) if _ended(seen) else None
            others = {name: other(name) for name in view.beside}
            return run_page.page(run, seen, found.value if found else None, view, others, self._acts)

        return self._page((place, view), stamp, make, lambda error: run_page.broken(run.name, str(error), view))

    def sweep_page(self, place: Place) -> Live[Parts]:
        """The page of a sweep."""
        sweep = SweepDir(self.homes[place.storage].at(place.name))
        return self._page(
            ("sweep", place),
            lambda: stamps.of_sweep(sweep),
            lambda _: sweep_page.page(sweep, place.storage),
            lambda error: problem(sweep.name, str(error)),
        )

    def folder(self, place: Place) -> RunDir:
        """The run."""
        return RunDir(self.homes[place.storage].at(place.name))

    def steps(self, place: Place) -> Live[pa.Table]:
        """The steps of a run, with one value in a column."""
        run = RunDir(self.homes[place.storage].at(place.name))
        return self._steps.live(place, lambda: Live(lambda: stamps.of_run(run), lambda *_: read_steps(run, SINGLE)))

    def _seen(self, place: Place, run: RunDir) -> Live[Seen]:
        return self._runs.live(place, lambda: Live(lambda: stamps.of_run(run), lambda *_: run_page.read(run)))

    def _findings(self, place: Place, run: RunDir) -> Made[dict[str, Any]] | None:
        """What the doctor found last; it looks again in a thread of its own, which may take long."""
        live = self._examined.live(place, lambda: Live(lambda: stamps.of_run(run), lambda *_: run_page.examined(run)))

        def look() -> None:
            with self._one:
                try:
                    live.get(patient=True)
                except RaydistError as error:
                    print(f"raydist: {error}", file=sys.stderr)
                finally:
                    self._examining.discard(place)

        if live.fresh is None and place not in self._examining:
            self._examining.add(place)
            threading.Thread(target=look, name=f"doctor of {place.name}", daemon=True).start()
        return live.known

    def _page(
        self,
        key: Hashable,
        stamp: Callable[[], object],
        make: Callable[[Any], Parts],
        broken: Callable[[RaydistError], Parts],
    ) -> Live[Parts]:
        """A page that says what is wrong as long as storage, or the view, has an error. `make` is given the stamp."""

        def tried() -> object:
            try:
                return stamp()
            except RaydistError as error:
                return str(error)

        def load(older: Parts | None, stamp: Any) -> Parts:
            try:
                made = make(stamp)
            except RaydistError as error:
                made = broken(error)
            return made.after(older)

        return self._pages.live(key, lambda: Live(tried, load))

    def _checked(self, storage: int, name: str, kind: type[RunDir] | type[SweepDir], words: str = "") -> Place:
        what = words or f"{'run' if kind is RunDir else 'sweep'} {quoted(name)!r}"
        parts = name.split("/")
        if storage >= len(self.homes) or any(not part or part.startswith(".") or "\0" in part for part in parts):
            raise RunNotFound(f"no {what} is here")
        home = self.homes[storage]
        folder = kind(home.at(name))
        inside = home.local is None or (home.local / name).resolve().is_relative_to(home.local.resolve())
        if len(name) > LONGEST_NAME or not inside or not folder.exists():
            raise RunNotFound(f"no {what} in {home.uri}")
        return Place(storage, name)


def _ended(seen: Seen) -> bool:
    return bool(seen.report.facts["status"] != "running")


def _rows(home: Storage) -> list[dict[str, Any]] | str:
    """Of the list, which are also its stamp: that a run is lost is in no file. An error of one storage does not hide the others."""
    try:
        return list_page.rows(home)
    except StorageError as error:
        return str(error)


def _single(name: str) -> str:
    """Raises RunNotFound for a name of several folders."""
    if "/" in name:
        raise RunNotFound(f"no {quoted(name)!r} is here")
    return name
