"""One sweep on storage: its cells, and what happened to them. Beside the runs, as a folder of its own.

Runs anywhere. Must not import ray or torch.

    SWEEP/sweep.yaml            the sweep, resolved: a file that `raydist sweep` takes
          base.yaml             the job that its cells are made of, resolved
          cells.jsonl           a line a cell, in order
          events/000001.jsonl   what happened to cells, a line each; 000001 counts up, and each driver begins a new one
          drivers/              who drives the sweep (raydist/run/lease.py)
          runs/CELL_ID/         an ordinary run folder (raydist/run/directory.py)
          results.parquet       `raydist sweep results`: a row a point
          report.html           `raydist sweep report`

A driver that is killed leaves a torn last line at most, in a segment to which nobody adds any more: readers leave it out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from raydist.errors import StorageError
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import SWEEP_CELLS, Folder, RunDir, check_name, elsewhere, not_found
from raydist.run.log import plain
from raydist.run.storage_choice import choose
from raydist.storage import Storage

SWEEP, BASE, CELLS, EVENTS, RUNS, RESULTS = (
    "sweep.yaml", "base.yaml", SWEEP_CELLS, "events", "runs", "results.parquet",
)  # fmt: skip
SEGMENT_LINES = 1000
"""Of events/: on an object store, which cannot append, each flush sends the open segment again."""
_SEGMENT = re.compile(r"(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class CellNote:
    """A cell as cells.jsonl has it. Cells of one `point` differ in their seed alone."""

    index: int
    id: str
    point: int
    parameters: Mapping[str, Any]
    """Field of the job -> value."""
    seed: int
    steps: int | None = None
    """None for a job in epochs."""
    tokens: int | None = None
    workers: int = 1
    adjusted: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain, for a line of JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CellNote:
        """The inverse of `to_dict`; keys of later versions are dropped."""
        known = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        return cls(**{**known, "notes": tuple(raw.get("notes", ()))})


class SweepDir(Folder):
    """The folder of one sweep."""

    def exists(self) -> bool:
        """Whether a sweep was ever started here."""
        return self.storage.size(CELLS) is not None

    def run(self, cell: str) -> RunDir:
        """The run folder of a cell."""
        return RunDir(self.storage.at(f"{RUNS}/{cell}"))

    def write(self, sweep: str, base: str, cells: Iterable[CellNote]) -> None:
        """The sweep and its base as YAML, and its cells, which make it exist, last. Raises StorageError."""
        self.storage.write(SWEEP, sweep.encode())
        self.storage.write(BASE, base.encode())
        self.storage.write(CELLS, "".join(_line(cell.to_dict()) for cell in cells).encode())

    def cells(self, events: Iterable[Event] | None = None) -> list[CellNote]:
        """The cells in order: those there were at the start, and those that a search added. Raises StorageError.

        `events`: those of the sweep, if they are known already.
        """
        found = [CellNote.from_dict(json.loads(line)) for line in self.storage.read(CELLS).splitlines()]
        added = [
            CellNote.from_dict(e.data["note"])
            for e in (self.events() if events is None else events)
            if e.kind == "added"
        ]
        return found + added

    def events(self) -> list[Event]:
        """What happened, in the order it was written. Raises StorageError, naming the line, where one is damaged."""
        found = []
        for _, name in self._segments():
            for number, line in enumerate(self.storage.read(name).split(b"\n")[:-1], start=1):
                try:
                    found.append(Event.from_dict(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise StorageError(
                        f"{self.uri}/{name}: line {number} is no event: {error}", "remove that line"
                    ) from error
        return found

    def _segments(self) -> list[tuple[int, str]]:
        found = ((_SEGMENT.fullmatch(PurePosixPath(name).name), name) for name in self.storage.files(EVENTS))
        return sorted((int(match[1]), name) for match, name in found if match)


class SweepLog:
    """The writer of a sweep's events; one driver at a time (raydist/run/lease.py), and each makes its own.

    `event` only buffers, and may be called from any thread; `flush` makes durable what was given before. Each of `heard` is called
    with every event in the order of the file, and logs nothing itself. Kinds and their data, each with the id of its `cell`:

    queued; started: `workers`, `gpus` (of all of them together), `tokens` it goes on from, `micro_batch` where it is not the
    spec's; finished, stopped (by the scheduler: `because`) and paused (by the user or a limit: `because`): with `figures`, those
    of `raydist.report.sweep.figures.measure`; failed: `cause`, `final`; retried: `because`, `micro_batch` where that changed;
    exploited: `source`, the cell whose checkpoint it goes on from, `step`, `tokens`, `changes` (field -> [before, after]); report:
    `tokens`, `step` and `value`, the objective that its scheduler was told; added: `note`, a CellNote.
    Without a cell: began, with `driver` and `cells`; ended, with `status` and `cause`.
    """

    def __init__(self, sweep: SweepDir, *heard: Callable[[Event], None]) -> None:
        self._storage, self._heard = sweep.storage, heard
        self._number = max((number for number, _ in sweep._segments()), default=0) + 1
        self._stored: list[bytes] = []
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        """Guards the buffer; never held while storage works."""
        self._io = threading.Lock()
        """One flush at a time."""

    def event(self, kind: str, cell: str | None = None, **data: Any) -> Event:
        """Notes it, with the time of this call."""
        about = {} if cell is None else {"cell": cell}
        event = Event(kind, time.time(), {**about, **data})
        line = _line(event.to_dict()).encode()
        with self._lock:
            self._waiting.append(line)
            for hears in self._heard:
                hears(event)
        return event

    def flush(self) -> None:
        """Returns once all that was given before is durable. Raises StorageError; what was not written is kept."""
        with self._io:
            while True:
                with self._lock:
                    lines = self._waiting[: SEGMENT_LINES - len(self._stored)]
                if not lines:
                    return
                self._write(f"{EVENTS}/{self._number:06d}.jsonl", lines)
                with self._lock:
                    del self._waiting[: len(lines)]
                self._stored += lines
                if len(self._stored) >= SEGMENT_LINES:
                    self._number, self._stored = self._number + 1, []

    def _write(self, name: str, lines: list[bytes]) -> None:
        if self._storage.local is None or not self._stored:
            self._storage.write(name, b"".join([*self._stored, *lines]))
            return
        path = self._storage.local / name
        try:
            with open(path, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    rest = memoryview(b"".join(lines))
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), size)  # a full disk took a part: the retry must not follow a torn line
                    raise
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(f"cannot write {path}: {reason}", "") from error


def resolve_sweep(name: str, storage: str | None = None) -> SweepDir:
    """NAME as a user gives it: a sweep folder's path or URI, or a name under `storage`. Raises RunNotFound."""
    choice = choose(storage)
    home = Storage(choice.uri)
    given = "/" in name or "://" in name
    sweep = SweepDir(name if given else home.at(check_name(name)))
    if sweep.exists():
        return sweep
    known = [folder for folder in home.folders() if SweepDir(home.at(folder)).exists()]
    hint = elsewhere(choice) if known else f"no sweep was ever started in {home.uri}; {elsewhere(choice)}"
    raise not_found("sweep", name, [sweep.uri if given else f"{sweep.uri} ({choice.because})"], known, hint)


def resolve_any(name: str, storage: str | None = None) -> RunDir | SweepDir:
    """NAME as a user gives it, of a run or of a sweep: a folder's path or URI, or a name under `storage`. Raises RunNotFound."""
    choice = choose(storage)
    looked = []
    if "/" in name or "://" in name or Path(name).is_dir():
        looked.append(RunDir(name).uri)
        if (found := _run_or_sweep(Storage(name))) is not None:
            return found
    if "://" in name or name.startswith(("/", ".", "~")):
        raise not_found("run or sweep", name, looked, [], "give a folder's path or URI, or a name with --storage")
    home = Storage(choice.uri)
    if (found := _run_or_sweep(home.at(name))) is not None:
        return found
    known = [n for n in home.folders() if not n.startswith(".") and _run_or_sweep(home.at(n)) is not None]
    raise not_found(
        "run or sweep", name, [*looked, f"{home.at(name).uri} ({choice.because})"], known, elsewhere(choice)
    )


def _run_or_sweep(storage: Storage) -> RunDir | SweepDir | None:
    return next((folder for folder in (RunDir(storage), SweepDir(storage)) if folder.exists()), None)


def sweep_of(run: RunDir) -> SweepDir | None:
    """The sweep of which that run is a cell, if it is one."""
    place, mark, rest = run.full_uri.partition("?")
    above, _, runs = place.rpartition("/")[0].rpartition("/")
    if runs != RUNS or not above or above.endswith(":/"):
        return None
    sweep = SweepDir(f"{above}{mark}{rest}")
    return sweep if sweep.exists() else None


def _line(value: dict[str, Any]) -> str:
    return json.dumps(plain(redact(value)), allow_nan=False) + "\n"
