"""What a run wrote down: one row a step in metrics/*.parquet, events.jsonl, and state.json; the writer and the readers.

Runs anywhere: the writer in the run's monitor, the readers in a user's shell, with no cluster. Must not import ray or torch.

Steps go to segments, `attempt-0001-000000.parquet`: the last number counts up over all drivers and attempts of the
run, so that no writer ever touches a segment of an earlier one, and the order of the numbers is the order of writing. Each segment
carries `after_step`: **rows of earlier segments past that step are void**. That one rule makes a restart replace
rows, and it needs nothing but the segments. docs/records.md is the interface.
"""

from __future__ import annotations

import array
import bisect
import itertools
import json
import math
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from raydist.errors import StorageError
from raydist.records import EXPORTED_ONLY, Event
from raydist.redact import redact
from raydist.run import parquet
from raydist.run.directory import EVENTS, METRICS, RunDir

SCHEMA_VERSION = 1
SEGMENT_ROWS = 10_000
"""Rows of a sealed segment; the open one, rewritten at each flush, is smaller."""

FIELDS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "optimizer step, counted from 1: after step s, s updates have been applied"),
    "loss": (pa.float64(), "mean over the tokens of the global batch, in nats"),
    "lr": (pa.float64(), "learning rate of the update"),
    "grad_norm": (pa.float64(), "global norm of the gradient before clipping"),
    "tokens": (pa.int64(), "tokens of the global batch that count in the loss"),
    "seconds": (pa.float64(), "the whole step"),
    "data_seconds": (pa.float64(), "part of `seconds` spent waiting for data"),
    "world_size": (pa.int64(), "ranks that trained it"),
    "attempt": (pa.int64(), "attempt that trained it"),
    "samples_hash": (pa.string(), "xxh64, in hex, of the global batch's sample ids, in order"),
    "grad_noise_scale": (pa.float64(), "gradient noise scale so far, in sequences; null where it is not known"),
}
"""The columns of a segment: those of records.StepRecord, in its order."""
NULLABLE = frozenset({"grad_noise_scale"})
"""Those that a record, or a segment of an earlier version, may be without."""

SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in FIELDS.items()],
    metadata={"raydist.schema_version": str(SCHEMA_VERSION)},
)

_CASTS: dict[str, Callable[[Any], Any]] = {
    name: operator.index if kind == pa.int64() else float if kind == pa.float64() else str
    for name, (kind, _) in FIELDS.items()
    if name not in NULLABLE
}
_HEARD = 10_000
_SEGMENT = re.compile(r"attempt-(\d+)-(\d+)\.parquet")
_HEAD = b"raydist.segment"


@dataclass
class _Open:
    """A segment that is not yet wholly on storage. `version` counts its changes, `stored` is the one on storage."""

    number: int
    attempt: int
    after_step: int
    rows: int = 0
    version: int = 1
    stored: int = 0
    parts: list[pa.RecordBatch] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{METRICS}/attempt-{self.attempt:04d}-{self.number:06d}.parquet"

    def encode(self, parts: list[pa.RecordBatch]) -> memoryview:
        head = json.dumps({"attempt": self.attempt, "after_step": self.after_step})
        table = pa.Table.from_batches(parts, SCHEMA)
        table = table.replace_schema_metadata({**(SCHEMA.metadata or {}), _HEAD: head.encode()})
        return parquet.encode(table)


class RunLog:
    """The writer of one run's steps and events; one for each driver, and one driver at a time.

    `attempt`, `steps` and `event` only buffer, and may be called from any thread; `flush` makes all that they were given
    durable. What is on storage leaves the memory with its segment: 90 bytes a step until then.
    Raises StorageError where storage cannot be listed.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        numbers = [number for number, _ in _segment_names(run)]
        self._next = max(numbers, default=-1) + 1
        self._attempt = -1
        self._last = 0
        self._segments: list[_Open] = []
        self._events: list[bytes] = []
        self._heard: dict[bytes, None] = {}
        """The newest lines, as hashes, in order."""
        self._told = self._mend_events()
        self._lock = threading.Lock()
        """Guards the buffers; never held while storage works."""
        self._io = threading.Lock()
        """One flush at a time."""

    def attempt(self, number: int, resume_step: int) -> None:
        """Attempt `number` goes on from `resume_step`: rows after that step are void, and steps of lower attempts are refused.

        Told again before its first step, with another step, the later word holds; told again after it, nothing changes.
        """
        with self._lock:
            if number != self._attempt or not self._segments[-1].rows:
                self._begin(number, resume_step)

    def steps(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows, in the order they were trained; returns those that were new. KeyError or TypeError for no StepRecord.

        An attempt not heard of begins with its first step. A step that this attempt sent before is dropped (a push was sent
        again), and so are those of an attempt before the present one (they come late, from a worker that was given up).
        """
        # Cast before anything changes: a bad record is refused whole, and leaves what was given before as it was.
        rows = [_row(record) for record in records]
        new: list[dict[str, Any]] = []
        with self._lock:
            begun = 0
            for row in rows:
                if row["attempt"] < self._attempt:
                    continue
                empty = not self._segments or (not self._segments[-1].rows and begun == len(new))
                if row["attempt"] > self._attempt or (empty and row["step"] <= self._last):
                    self._add(new[begun:])
                    begun = len(new)
                    self._begin(row["attempt"], row["step"] - 1)
                elif row["step"] <= self._last:
                    continue
                elif self._segments[-1].rows + len(new) - begun >= SEGMENT_ROWS:
                    self._add(new[begun:])
                    begun = len(new)
                    self._begin(row["attempt"], self._last)
                new.append(row)
                self._last = row["step"]
            self._add(new[begun:])
        return new

    def event(self, event: Event) -> None:
        """One line of events.jsonl; none for those kinds that only exporters get, nor for one that it has `heard`."""
        if event.kind in EXPORTED_ONLY:
            return
        line = _line(event)
        with self._lock:
            if self._hear(line):
                self._events.append(line)

    def heard(self, event: Event) -> bool:
        """Whether it was told before, as far as that is remembered; who had no answer tells it once more."""
        return event.kind not in EXPORTED_ONLY and xxhash.xxh3_128_digest(_line(event)) in self._heard

    def recall(self, events: Iterable[Event]) -> None:
        """What an earlier writer was told, some of which it may have stored: the others are written. Raises StorageError."""
        lines = [_line(event) for event in events if event.kind not in EXPORTED_ONLY]
        try:
            stored = set(self._run.storage.read(EVENTS).splitlines(keepends=True)) if lines else set()
        except FileNotFoundError:
            stored = set()
        with self._lock:
            self._events += [line for line in lines if self._hear(line) and line not in stored]

    def flush(self) -> None:
        """Returns once all that was given before is durable. Raises StorageError; what was not written is kept."""
        with self._io:
            self._flush_events()
            with self._lock:
                work = [(s, s.version, list(s.parts)) for s in self._segments if s.stored != s.version]
            for segment, version, parts in work:
                with self._run.storage.create(segment.name) as sink:
                    rest = segment.encode(parts)
                    while rest:
                        rest = rest[sink.write(rest) or len(rest) :]
                with self._lock:
                    segment.stored = version
                    # Many small batches become one: the next flush of the open segment encodes faster.
                    whole = pa.Table.from_batches(parts, SCHEMA).combine_chunks().to_batches()
                    segment.parts[: len(parts)] = whole
            with self._lock:
                self._segments = [s for s in self._segments[:-1] if s.stored != s.version] + self._segments[-1:]

    def close(self) -> None:
        """The last flush."""
        self.flush()

    def _hear(self, line: bytes) -> bool:
        """Whether it is new; from now on it is not."""
        key = xxhash.xxh3_128_digest(line)
        if key in self._heard:
            return False
        self._heard[key] = None
        if len(self._heard) > _HEARD:
            del self._heard[next(iter(self._heard))]
        return True

    def _begin(self, number: int, after_step: int) -> None:
        present = self._segments[-1] if self._segments else None
        if present and not present.rows and present.attempt == number:
            # Still empty: the same segment, with the newer word on where it goes on.
            present.after_step, present.version = after_step, present.version + 1
        else:
            self._segments.append(_Open(self._next, number, after_step))
            self._next += 1
        self._attempt, self._last = number, after_step

    def _add(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        columns = [_column([row[name] for row in rows], kind) for name, (kind, _) in FIELDS.items()]
        segment = self._segments[-1]
        segment.parts.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        segment.rows += len(rows)
        segment.version += 1

    def _mend_events(self) -> bytes:
        """Cuts off the line that an earlier driver, killed while it wrote, left torn. Gives what a URI's next write starts with."""
        storage = self._run.storage
        try:
            told = storage.read(EVENTS)
        except FileNotFoundError:
            return b""
        whole = told[: told.rfind(b"\n") + 1]
        if storage.local is None:
            return whole
        if len(whole) < len(told):
            try:
                os.truncate(storage.local / EVENTS, len(whole))
            except OSError as error:
                raise _refused(self._run, EVENTS, error) from error
        return b""

    def _flush_events(self) -> None:
        with self._lock:
            count, data = len(self._events), b"".join(self._events)
        if not count:
            return
        if self._run.storage.local is not None:
            self._append(data)
        else:
            # An object store cannot append; events are few, so the whole file goes again.
            self._run.storage.write(EVENTS, self._told + data)
            self._told += data
        with self._lock:
            del self._events[:count]

    def _append(self, data: bytes) -> None:
        assert self._run.storage.local is not None
        path = self._run.storage.local / EVENTS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    # A full disk took a part: without this the retry would follow a torn line.
                    os.ftruncate(file.fileno(), size)
                    raise
        except OSError as error:
            raise _refused(self._run, EVENTS, error) from error


@dataclass(frozen=True)
class Segment:
    """One file of metrics/ as read: its rows, ascending by step, follow step `after_step` of what was written before.

    For the first segment of an attempt that is the step it resumed from.
    """

    number: int
    attempt: int
    after_step: int
    rows: pa.Table


def read_segments(run: RunDir) -> list[Segment]:
    """Every segment, in the order of writing. Safe while the run is being written: a whole prefix of what was flushed.

    Raises StorageError, naming the file, where one cannot be read as a segment.
    """
    found = []
    # Listed first: a later segment exists only once the ones before it are sealed, so none of them can be read half full.
    for number, name in _segment_names(run):
        try:
            # One read of the whole file: an open handle, or one GET, sees one version though a flush replaces it.
            # In this thread: a pool's thread may let go of the last reference to these bytes, which are Python's, when the
            # interpreter is gone already; the process then aborts after all its work is done.
            table = pq.ParquetFile(pa.BufferReader(run.storage.read(name)), pre_buffer=False).read(use_threads=False)
            head = json.loads(table.schema.metadata[_HEAD])
            for name in NULLABLE.difference(table.column_names):
                table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
            rows = table.select(list(FIELDS)).cast(SCHEMA)
            found.append(Segment(number, int(head["attempt"]), int(head["after_step"]), rows))
        except (pa.ArrowException, KeyError, TypeError, FileNotFoundError) as error:
            raise StorageError(
                f"cannot read {run.uri}/{name}: {error}", "move the file away to go on without its steps"
            ) from error
    return found


def merge(segments: list[Segment]) -> pa.Table:
    """The rows that count: one a step, ascending. Those that a restart made void are left out."""
    kept: list[pa.Table] = []
    limit = math.inf
    for segment in reversed(segments):
        # Ascending within a segment: those up to the limit are the first ones.
        count = bisect.bisect_right(segment.rows["step"], limit, key=lambda step: step.as_py())
        kept.append(segment.rows.slice(0, count))
        limit = min(limit, segment.after_step)
    return pa.concat_tables([pa.Table.from_batches([], SCHEMA), *reversed(kept)]).combine_chunks()


def read_steps(run: RunDir) -> pa.Table:
    """One row a step, ascending, with the columns of SCHEMA. Of a step trained twice, the newest attempt's row.

    Works while the run is being written. Raises StorageError.
    """
    return merge(read_segments(run))


def read_events(run: RunDir) -> list[Event]:
    """What happened, in the order it was written; [] where nothing did. A torn last line is left out: it is being written.

    Raises StorageError, naming the line, where another line is damaged.
    """
    try:
        data = run.storage.read(EVENTS)
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    events = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            events.append(Event.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{run.uri}/{EVENTS}: line {number} is no event: {error}", "remove that line") from error
    return events


def last_attempt(run: RunDir) -> int:
    """The highest attempt number so far, 0 for a new run: a driver that goes on with a run counts on from it.

    One that began and died before its first step counts too.
    """
    names = (_SEGMENT.fullmatch(name.rsplit("/", 1)[-1]) for _, name in _segment_names(run))
    return max([run.lineage().newest, *(int(match[1]) for match in names if match)])


def plain(value: Any) -> Any:
    """`value` as strict JSON has it: NaN and infinities, which JSON lacks, become None; tuples lists; keys strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _line(event: Event) -> bytes:
    return json.dumps(plain(redact(event.to_dict())), allow_nan=False).encode() + b"\n"


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a row, each value of its column's type."""
    row = {name: cast(record[name]) for name, cast in _CASTS.items()}
    return row | {name: None if record.get(name) is None else float(record[name]) for name in NULLABLE}


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """As `pa.array(values, kind)`, which imports pandas where that is installed: 0.2 s and 40 MB of a light process."""
    if kind == pa.string():
        texts = [value.encode() for value in values]
        ends = array.array("i", itertools.accumulate(map(len, texts), initial=0))
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    there = None
    if None in values:
        there = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little").tobytes())
        values = [value or 0 for value in values]
    data = array.array("q" if kind == pa.int64() else "d", values)
    return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(data)])


def _segment_names(run: RunDir) -> list[tuple[int, str]]:
    names = run.storage.files(METRICS)
    found = ((_SEGMENT.fullmatch(name.rsplit("/", 1)[-1]), name) for name in names)
    return sorted((int(match[2]), name) for match, name in found if match)


def _refused(run: RunDir, name: str, error: OSError) -> StorageError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"cannot write {run.uri}/{name}: {reason}", "")
