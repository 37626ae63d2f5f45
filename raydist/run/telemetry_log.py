"""Stores the rows of raydist.run.telemetry_schema in RUN/samples/*.parquet; the writer and the reader.

Runs anywhere: the writer in the run's monitor, the reader in a user's shell. Must not import ray or torch.

    samples/raw-000000012.parquet              rows as received; the newest file is replaced at each flush
    samples/thin-000000000-000000011.parquet   one row per minute and subject, replaces raw 0 to 11
    samples/raw-000000012.3.parquet            of writer 3, with its own numbers: a large run has several writers

Raw rows are thinned after an hour, so that a long run needs about 60 times less space. The thin file is complete before the raw
files are deleted: a raw file that a thin file covers is not read. The writer keeps only the open segment in memory.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydist.errors import StorageError
from raydist.printable import printable
from raydist.run import parquet
from raydist.run.directory import SAMPLES, RunDir
from raydist.run.telemetry_schema import COLUMNS, SCHEMA, WHO, is_total

SEGMENT_ROWS = 20_000
SEGMENT_S = 60.0
"""A segment is complete after this many rows, or this many seconds after its first row."""
RAW_S = 3600.0
"""Rows older than this are thinned."""
THIN_S = 60.0
"""Seconds per thin row."""
_AT_ONCE = 64
"""Maximum number of raw segments thinned at once, which limits memory."""
_BUFFERED = 200_000
"""Rows kept while storage refuses them; then the oldest are dropped."""

_NAME = re.compile(r"(raw|thin)-(\d+)(?:-(\d+))?(?:\.(\d+))?\.parquet")
_SUBJECT = ("kind", "host", "node", "gpu", "rank", "attempt")


class TelemetryLog:
    """Writer number `writer`; there is only one with that number at a time. `add` only buffers, and is thread-safe.

    Raises StorageError if storage cannot be listed.
    """

    def __init__(self, run: RunDir, writer: int = 0) -> None:
        self._run, self._writer = run, writer
        self._next = 1 + max((s.last for s in _listed(run) if s.writer == writer), default=-1)
        self._lock = threading.Lock()
        self._rows: list[Mapping[str, Any]] = []
        self._given = self._dropped = 0
        """Number of rows so far, and of those dropped."""
        self._stored = 0
        self._since = 0.0
        self._thinned_at = 0.0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows with columns of raydist.run.telemetry_schema; missing columns are null."""
        with self._lock:
            held = len(self._rows)
            self._since = self._since if held else time.monotonic()
            self._rows += rows
            self._given += len(self._rows) - held
            over = max(0, len(self._rows) - _BUFFERED)
            self._dropped += over
            del self._rows[:over]

    def flush(self) -> None:
        """Returns once everything passed before is durable. Raises StorageError; unwritten rows are kept. Not thread-safe."""
        with self._lock:
            rows, given, dropped = list(self._rows), self._given, self._dropped
            sealed = len(rows) >= SEGMENT_ROWS or time.monotonic() - self._since >= SEGMENT_S
        if rows and given != self._stored:
            parquet.store(self._run.storage, _Segment("raw", self._writer, self._next, self._next).path, table(rows))
            self._stored = given
        if rows and sealed:
            with self._lock:
                del self._rows[: max(0, len(rows) - (self._dropped - dropped))]
                self._since = time.monotonic()
            self._next += 1
        if time.monotonic() - self._thinned_at >= SEGMENT_S:
            self._thinned_at = time.monotonic()
            thin(self._run, before=time.time() - RAW_S, below=self._next, writer=self._writer)


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table. Raises TypeError or ArrowInvalid for a value of the wrong type."""
    return pa.Table.from_pylist([dict(row) for row in rows], SCHEMA)


def thin(run: RunDir, before: float, below: int, writer: int = 0) -> None:
    """Merges that writer's raw segments that end before that Unix time, with numbers less than `below`, into one thin segment; a
    limited number at a time.

    A thin row has, for its minute and subject, the last value of counters, the maximum of peaks, and the mean of other numbers.
    """
    listed = [segment for segment in _listed(run) if segment.writer == writer]
    covered = _covered(listed)
    raw = sorted((segment for segment in listed if segment.kind == "raw"), key=lambda segment: segment.first)
    done = [segment for segment in raw if segment in covered]
    parts: list[pa.Table] = []
    numbers: list[int] = []
    for segment in raw[: _AT_ONCE + len(done)]:
        if segment in covered:
            continue
        part = _read(run, segment) if segment.first < below else None
        if part is None or (part.num_rows and pc.max(part["at"]).as_py() >= before):
            break
        if numbers and segment.first != numbers[-1] + 1:
            break  # a thin file must cover a whole range
        parts.append(part)
        numbers.append(segment.first)
        done.append(segment)
    if parts:
        thinned = _thinned(pa.concat_tables(parts))
        parquet.store(run.storage, _Segment("thin", writer, numbers[0], numbers[-1]).path, thinned)
    for segment in done:
        run.storage.delete(segment.path)


def read_samples(run: RunDir, columns: Sequence[str] | None = None, since: float | None = None) -> pa.Table:
    """All rows, in order of time; `columns`: only these; `since`: only rows from that Unix time on, and reads no more files than
    needed. Works while the run is being written. Raises StorageError.
    """
    listed = _listed(run)
    covered = _covered(listed)
    wanted = list(columns) if columns is not None else list(COLUMNS)
    asked = list(dict.fromkeys([*wanted, "at"]))
    parts = [pa.schema([SCHEMA.field(name) for name in asked]).empty_table()]
    finished: set[int] = set()  # writers whose remaining segments are older than `since`
    for segment in sorted(listed, key=lambda segment: segment.first, reverse=True):
        if segment in covered or segment.writer in finished:
            continue
        part = _read(run, segment, asked)
        if part is None:
            continue
        if since is not None:
            if part.num_rows and pc.min(part["at"]).as_py() < since:
                finished.add(segment.writer)
            part = part.filter(pc.greater_equal(part["at"], since))
        parts.append(part)
    return pa.concat_tables(parts).sort_by("at").select(wanted)


def parts(run: RunDir, columns: Sequence[str]) -> Iterator[pa.Table]:
    """All rows, one segment at a time, each writer's in the order of writing: for callers that do not need all at once. Raises
    StorageError.
    """
    listed = _listed(run)
    covered = _covered(listed)
    for segment in sorted(listed, key=lambda segment: (segment.first, segment.writer)):
        part = _read(run, segment, columns) if segment not in covered else None
        if part is not None:
            yield part


def _thinned(rows: pa.Table) -> pa.Table:
    minute = pc.floor(pc.divide(rows["at"], THIN_S))
    keyed = rows.sort_by("at").append_column("minute", minute)
    rest = [name for name in COLUMNS if name not in _SUBJECT]
    how = {name: _aggregation(name) for name in rest}
    grouped = keyed.group_by(["minute", *_SUBJECT], use_threads=False).aggregate([(n, how[n]) for n in rest])
    made = {name: grouped[name] for name in _SUBJECT} | {name: grouped[f"{name}_{how[name]}"] for name in rest}
    columns = []
    for field in SCHEMA:
        column = made[field.name]
        if pa.types.is_integer(field.type) and pa.types.is_floating(column.type):
            column = pc.round(column)
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA).sort_by("at")


def _aggregation(name: str) -> str:
    if name in WHO or is_total(name) or name.startswith("peak_"):
        return "max"
    return "mean" if COLUMNS[name][0] != pa.string() else "max"


@dataclass(frozen=True, slots=True)
class _Segment:
    """A file. `kind`: raw or thin; `first` to `last`: the numbers of the raw segments whose rows it contains."""

    kind: str
    writer: int
    first: int
    last: int

    @property
    def file(self) -> str:
        numbers = f"{self.first:09d}" + (f"-{self.last:09d}" if self.kind == "thin" else "")
        return f"{self.kind}-{numbers}{f'.{self.writer}' if self.writer else ''}.parquet"

    @property
    def path(self) -> str:
        return f"{SAMPLES}/{self.file}"


def _printable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with texts, such as names of hosts, that a terminal may show."""
    if not pa.types.is_string(column.type) or all(
        text is None or text.isprintable() for text in column.unique().to_pylist()
    ):
        return column
    return pa.array(printable(column.to_pylist()), column.type)


def _listed(run: RunDir) -> list[_Segment]:
    found = []
    for name in run.storage.files(SAMPLES):
        if match := _NAME.fullmatch(name.rsplit("/", 1)[-1]):
            kind, first, last, writer = match.groups()
            found.append(_Segment(kind, int(writer or 0), int(first), int(last or first)))
    return found


def _covered(segments: Iterable[_Segment]) -> set[_Segment]:
    """The raw segments that a thin one covers, whether they still exist or not."""
    thin = [segment for segment in segments if segment.kind == "thin"]
    return {_Segment("raw", s.writer, number, number) for s in thin for number in range(s.first, s.last + 1)}


def _read(run: RunDir, segment: _Segment, columns: Sequence[str] | None = None) -> pa.Table | None:
    """One segment; None if it has just been thinned."""
    wanted = list(columns) if columns is not None else list(COLUMNS)
    try:
        # In this thread, as in raydist.run.log: a pool's thread may run longer than the interpreter.
        file = pq.ParquetFile(pa.BufferReader(run.storage.read(segment.path)), pre_buffer=False)
        there = [column for column in wanted if column in file.schema_arrow.names]
        found = file.read(there, use_threads=False)
        schema = pa.schema([SCHEMA.field(column) for column in wanted])
        arrays = [found[f.name].cast(f.type) if f.name in there else pa.nulls(found.num_rows, f.type) for f in schema]
        return pa.Table.from_arrays([_printable(array) for array in arrays], schema=schema)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:  # pyarrow raises OSError for a damaged page
        raise StorageError(
            f"cannot read {run.uri}/{segment.path}: {error}", "move the file away to continue without its rows"
        ) from error
