"""A sweep on storage: its trials, and their events. It is a folder next to the runs.

Runs anywhere. Must not import ray or torch.

    SWEEP/sweep.yaml            the resolved sweep: a file that `raydist sweep` accepts
          base.yaml             the resolved job from which its trials are made
          cells.jsonl           one line per trial, in order
          events/000001.jsonl   events of the trials, one per line; each driver begins a new file
          drivers/              the sweep's driver (raydist/run/lease.py)
          runs/CELL_ID/         an ordinary run folder (raydist/run/directory.py)
          results.parquet       `raydist sweep results`: one row per point
          report.html           `raydist sweep report`

A driver that is killed leaves at most a partial last line, in a file to which no other driver appends: readers skip it.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from raydist.errors import StorageError
from raydist.parsing import DAMAGED, LINE_BYTES, parse_json
from raydist.printable import printable
from raydist.records import Event
from raydist.run.directory import SWEEP_CELLS, Folder, RunDir, check_name, elsewhere, existing, is_place, not_found
from raydist.run.log import events_in, json_line
from raydist.run.storage_choice import choose
from raydist.storage import Storage

SWEEP, BASE, CELLS, EVENTS, RUNS, RESULTS = (
    "sweep.yaml", "base.yaml", SWEEP_CELLS, "events", "runs", "results.parquet",
)  # fmt: skip
SEGMENT_LINES = 1000
"""Maximum lines of a file in events/: an object store cannot append, so each flush uploads the open file again."""
_SEGMENT = re.compile(r"(\d+)\.jsonl")
_ID = re.compile(r"[^/\0]{1,200}")


@dataclass(frozen=True, slots=True)
class CellNote:
    """A trial as in cells.jsonl. Trials of the same `point` differ only in their seed."""

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
        """A plain dict, for a line of JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CellNote:
        """The inverse of `to_dict`; keys of later versions are dropped."""
        raw = printable(dict(raw))
        known = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        for name in ("index", "point", "seed", "workers", "steps", "tokens"):
            if (value := known.get(name)) is not None:
                known[name] = int(value)
        if not isinstance(known["id"], str) or not _ID.fullmatch(known["id"]):
            raise ValueError(f"its id is {known['id']!r:.40}")
        for name in ("parameters", "adjusted"):
            known[name] = {**known.get(name, {})}
        return cls(**{**known, "notes": tuple(map(str, raw.get("notes", ())))})


class SweepDir(Folder):
    """The folder of one sweep."""

    def exists(self) -> bool:
        """Whether a sweep was started here."""
        return self.storage.size(CELLS) is not None

    def run(self, cell: str) -> RunDir:
        """The run folder of a trial."""
        return RunDir(self.storage.at(f"{RUNS}/{cell}"))

    def write(self, sweep: str, base: str, cells: Iterable[CellNote]) -> None:
        """Writes the sweep and its base as YAML, and its trials last, which makes the sweep exist. Raises StorageError."""
        self.storage.write(SWEEP, sweep.encode())
        self.storage.write(BASE, base.encode())
        self.storage.write(CELLS, b"".join(json_line(cell.to_dict()) for cell in cells))

    def cells(self, events: Iterable[Event] | None = None) -> list[CellNote]:
        """The trials in order: those from the start, and those added by a search. Raises StorageError.

        `events`: the sweep's events, if the caller has them.
        """
        found = []
        for number, line in enumerate(self.storage.read(CELLS).splitlines(), start=1):
            with self._reading(f"{CELLS}: line {number}"):
                found.append(CellNote.from_dict(parse_json(line, LINE_BYTES)))
        for event in self.events() if events is None else events:
            if event.kind == "added":
                with self._reading(f"{EVENTS}: an event `added`"):
                    found.append(CellNote.from_dict(event.data["note"]))
        return found

    @contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        try:
            yield
        except DAMAGED as error:
            raise StorageError(
                f"{self.uri}/{where} is not a cell: {error}", "start the sweep under another name"
            ) from error

    def events(self) -> list[Event]:
        """The events, in the order of writing. Raises StorageError with the number of a damaged line."""
        return [
            event for _, name in self._segments() for event in events_in(self.storage.read(name), f"{self.uri}/{name}")
        ]

    def _segments(self) -> list[tuple[int, str]]:
        found = ((_SEGMENT.fullmatch(PurePosixPath(name).name), name) for name in self.storage.files(EVENTS))
        return sorted((int(match[1]), name) for match, name in found if match)


class SweepLog:
    """The writer of a sweep's events; one driver at a time (raydist/run/lease.py), and each creates its own.

    `event` only buffers, and is thread-safe; `flush` makes everything before it durable. Each function in `listeners` is called
    with every event in the order of the file, and must not log events itself. Kinds and their data, each with the id of its `cell`:

    queued; started: `workers`, `gpus` (total), `tokens` at which it resumes, `micro_batch` (with data.batching `max_tokens`) if
    it differs from the spec's; finished, stopped (by the scheduler: `because`) and paused (by the user or a limit: `because`):
    with `figures`, from `raydist.report.sweep.figures.measure`; failed: `cause`, `final`; retried: `because`, and the same size
    if it has changed; exploited: `source`, the trial whose checkpoint it continues, `step`, `tokens`, `changes` (field ->
    [before, after]); report: `tokens`, `step` and `value`, the objective reported to its scheduler; added: `note`, a CellNote.
    Without a cell: began, with `driver` and `cells`; ended, with `status` and `cause`.
    """

    def __init__(self, sweep: SweepDir, *listeners: Callable[[Event], None]) -> None:
        self._storage, self._listeners = sweep.storage, listeners
        self._number = max((number for number, _ in sweep._segments()), default=0) + 1
        self._stored: list[bytes] = []
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        """Guards the buffer; never held during storage I/O."""
        self._io = threading.Lock()
        """Only one flush at a time."""

    def event(self, kind: str, cell: str | None = None, **data: Any) -> Event:
        """Records an event, with the time of this call."""
        about = {} if cell is None else {"cell": cell}
        event = Event(kind, time.time(), {**about, **data})
        line = json_line(event.to_dict())
        with self._lock:
            self._waiting.append(line)
            for listener in self._listeners:
                listener(event)
        return event

    def flush(self) -> None:
        """Returns once everything passed before is durable. Raises StorageError; unwritten data is kept."""
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
        else:
            self._storage.append(name, b"".join(lines), sync=True)


def resolve_sweep(name: str, storage: str | None = None) -> SweepDir:
    """The sweep that a user names: a sweep folder's path or URI, or a name under `storage`. Raises RunNotFound."""
    choice = choose(storage)
    home = Storage(choice.uri)
    given = "/" in name or "://" in name
    sweep = SweepDir(name if given else home.at(check_name(name)))
    if sweep.exists():
        return sweep
    known = existing(home, name, lambda folder: SweepDir(home.at(folder)).exists())
    hint = elsewhere(choice) if known else f"no sweep was found in {home.uri}; {elsewhere(choice)}"
    raise not_found("sweep", name, [sweep.uri if given else f"{sweep.uri} ({choice.because})"], known, hint)


def resolve_any(name: str, storage: str | None = None) -> RunDir | SweepDir:
    """The run or sweep that a user names: a folder's path or URI, or a name under `storage`. Raises RunNotFound."""
    choice = choose(storage)
    looked = []
    if is_place(name):
        looked.append(RunDir(name).uri)
        if (found := _run_or_sweep(Storage(name))) is not None:
            return found
    if "://" in name or name.startswith(("/", ".", "~")):
        raise not_found("run or sweep", name, looked, [], "give a folder's path or URI, or a name with --storage")
    home = Storage(choice.uri)
    if (found := _run_or_sweep(home.at(name))) is not None:
        return found
    known = existing(home, name, lambda folder: _run_or_sweep(home.at(folder)) is not None)
    raise not_found(
        "run or sweep", name, [*looked, f"{home.at(name).uri} ({choice.because})"], known, elsewhere(choice)
    )


def _run_or_sweep(storage: Storage) -> RunDir | SweepDir | None:
    return next((folder for folder in (RunDir(storage), SweepDir(storage)) if folder.exists()), None)


def sweep_of(run: RunDir) -> SweepDir | None:
    """The sweep of which that run is a trial; None if it is not one."""
    runs = Folder(run.home)
    place = runs.full_uri.partition("?")[0].rpartition("/")[0]
    if runs.name != RUNS or not place or place.endswith(":/"):
        return None
    sweep = SweepDir(runs.storage.above())
    return sweep if sweep.exists() else None
