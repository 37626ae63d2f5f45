"""The rows of raydist.samples on storage: RUN/samples/*.parquet; the writer and the reader.

Runs anywhere: the writer in the run's monitor, the reader in a user's shell. Must not import ray or torch.

    samples/raw-000000012.parquet              as they came; the newest one is replaced at each flush
    samples/thin-000000000-000000011.parquet   a row a minute and subject, in the place of raw 0 to 11

Raw rows become thin ones an hour later, so that a long run takes 60 times less than it said. The thin file is whole before the raw
ones go: a raw one that a thin one stands for is not read. The writer holds the open segment in memory, and nothing older.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydist.errors import StorageError
from raydist.rundir import SAMPLES, RunDir
from raydist.samples import COLUMNS, SCHEMA, WHO

SEGMENT_ROWS = 20_000
SEGMENT_S = 60.0
"""A segment is sealed at so many rows, or so many seconds after its first one."""
RAW_S = 3600.0
"""Rows older than this are thinned."""
THIN_S = 60.0
"""A thin row stands for so many seconds."""
_AT_ONCE = 64
"""Raw segments that are thinned in one go, at most: that bounds what is read into memory."""
_BUFFERED = 200_000
"""Rows that are kept while storage refuses them; then the oldest go."""

_NAME = re.compile(r"(raw|thin)-(\d+)(?:-(\d+))?\.parquet")
_SUBJECT = ("kind", "host", "node", "gpu", "rank", "attempt")


def is_counter(name: str) -> bool:
    """Whether a column only grows."""
    return " total " in f" {COLUMNS[name][1]}"


class SampleLog:
    """The writer; one for each driver, and one driver at a time. `add` only buffers, and may be called from any thread.

    Raises StorageError where storage cannot be listed.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next = 1 + max((last for _, _, last, _ in _listed(run)), default=-1)
        self._lock = threading.Lock()
        self._rows: list[Mapping[str, Any]] = []
        self._given = self._dropped = 0
        """Rows so far, and those of them that there was no room for."""
        self._stored = 0
        self._since = 0.0
        self._thinned_at = 0.0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of columns of raydist.samples; a column that a row lacks is null there."""
        with self._lock:
            held = len(self._rows)
            self._since = self._since if held else time.monotonic()
            self._rows += rows
            self._given += len(self._rows) - held
            over = max(0, len(self._rows) - _BUFFERED)
            self._dropped += over
            del self._rows[:over]

    def flush(self) -> None:
        """Returns once all that was given before is durable. Raises StorageError; what was not written is kept. One at a time."""
        with self._lock:
            rows, given, dropped = list(self._rows), self._given, self._dropped
            sealed = len(rows) >= SEGMENT_ROWS or time.monotonic() - self._since >= SEGMENT_S
        if rows and given != self._stored:
            _write(self._run, f"raw-{self._next:09d}.parquet", table(rows))
            self._stored = given
        if rows and sealed:
            with self._lock:
                del self._rows[: max(0, len(rows) - (self._dropped - dropped))]
                self._since = time.monotonic()
            self._next += 1
        if time.monotonic() - self._thinned_at >= SEGMENT_S:
            self._thinned_at = time.monotonic()
            thin(self._run, before=time.time() - RAW_S, below=self._next)


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as Arrow has them. TypeError or ArrowInvalid for a value that its column cannot hold."""
    return pa.Table.from_pylist([dict(row) for row in rows], SCHEMA)


def thin(run: RunDir, before: float, below: int) -> None:
    """Makes raw segments that end before that Unix time, of numbers under `below`, into one thin one; some of them at a time.

    Of a minute and subject a thin row has: of what counts the last, of what is a peak the highest, of other numbers the mean.
    """
    names = _listed(run)
    covered = {n for kind, first, last, _ in names if kind == "thin" for n in range(first, last + 1)}
    raw = sorted((first, name) for kind, first, _, name in names if kind == "raw")
    done = [name for number, name in raw if number in covered]
    parts: list[pa.Table] = []
    numbers: list[int] = []
    for number, name in raw[: _AT_ONCE + len(done)]:
        if number in covered:
            continue
        part = _read(run, name) if number < below else None
        if part is None or (part.num_rows and pc.max(part["at"]).as_py() >= before):
            break
        if numbers and number != numbers[-1] + 1:
            break  # a file that stands for a range stands for all of it
        parts.append(part)
        numbers.append(number)
        done.append(name)
    if parts:
        _write(run, f"thin-{numbers[0]:09d}-{numbers[-1]:09d}.parquet", _thinned(pa.concat_tables(parts)))
    for name in done:
        run.storage.delete(name)


def read_samples(run: RunDir, columns: Sequence[str] | None = None, since: float | None = None) -> pa.Table:
    """All rows, in the order of their time; `columns`: only these; `since`: only those from that Unix time on, and no more is read
    than it takes. Works while the run is being written. Raises StorageError.
    """
    names = _listed(run)
    covered = {n for kind, first, last, _ in names if kind == "thin" for n in range(first, last + 1)}
    chosen = [(first, name) for kind, first, _, name in names if kind == "thin" or first not in covered]
    wanted = list(columns) if columns is not None else list(COLUMNS)
    asked = list(dict.fromkeys([*wanted, "at"]))
    parts = [pa.schema([SCHEMA.field(name) for name in asked]).empty_table()]
    for _, name in sorted(chosen, reverse=True):
        part = _read(run, name, asked)
        if part is None:
            continue
        if since is not None:
            older = part.num_rows and pc.min(part["at"]).as_py() < since
            parts.append(part.filter(pc.greater_equal(part["at"], since)))
            if older:
                break
        else:
            parts.append(part)
    return pa.concat_tables(parts).sort_by("at").select(wanted)


def parts(run: RunDir, columns: Sequence[str]) -> Iterator[pa.Table]:
    """All rows, a segment at a time, in the order of writing: for who need not have them all at once. Raises StorageError."""
    names = _listed(run)
    covered = {n for kind, first, last, _ in names if kind == "thin" for n in range(first, last + 1)}
    for _, name in sorted((first, name) for kind, first, _, name in names if kind == "thin" or first not in covered):
        part = _read(run, name, columns)
        if part is not None:
            yield part


def _thinned(rows: pa.Table) -> pa.Table:
    minute = pc.floor(pc.divide(rows["at"], THIN_S))
    keyed = rows.sort_by("at").append_column("minute", minute)
    rest = [name for name in COLUMNS if name not in _SUBJECT]
    how = {name: _how(name) for name in rest}
    grouped = keyed.group_by(["minute", *_SUBJECT], use_threads=False).aggregate([(n, how[n]) for n in rest])
    made = {name: grouped[name] for name in _SUBJECT} | {name: grouped[f"{name}_{how[name]}"] for name in rest}
    columns = []
    for field in SCHEMA:
        column = made[field.name]
        if pa.types.is_integer(field.type) and pa.types.is_floating(column.type):
            column = pc.round(column)
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA).sort_by("at")


def _how(name: str) -> str:
    if name in WHO or is_counter(name) or name.startswith("peak_"):
        return "max"
    return "mean" if COLUMNS[name][0] != pa.string() else "max"


def _listed(run: RunDir) -> list[tuple[str, int, int, str]]:
    """(raw or thin, first number, last number, name) of each segment."""
    found = []
    for name in run.storage.files(SAMPLES):
        if match := _NAME.fullmatch(name.rsplit("/", 1)[-1]):
            found.append((match[1], int(match[2]), int(match[3] or match[2]), name))
    return found


def _write(run: RunDir, name: str, rows: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    data = memoryview(sink.getvalue())
    with run.storage.create(f"{SAMPLES}/{name}") as file:
        while data:
            data = data[file.write(data) or len(data) :]


def _read(run: RunDir, name: str, columns: Sequence[str] | None = None) -> pa.Table | None:
    """One segment; None if it has just been thinned."""
    wanted = list(columns) if columns is not None else list(COLUMNS)
    try:
        # In this thread, as in raydist.runlog: a pool's thread may outlive the interpreter.
        file = pq.ParquetFile(pa.BufferReader(run.storage.read(name)), pre_buffer=False)
        there = [column for column in wanted if column in file.schema_arrow.names]
        found = file.read(there, use_threads=False)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, KeyError) as error:
        raise StorageError(
            f"cannot read {run.uri}/{name}: {error}", "move the file away to go on without its rows"
        ) from error
    schema = pa.schema([SCHEMA.field(column) for column in wanted])
    arrays = [found[f.name].cast(f.type) if f.name in there else pa.nulls(found.num_rows, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
