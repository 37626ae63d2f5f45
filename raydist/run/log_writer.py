"""The writer of a run's records, in the format of raydist/run/log.py.

Runs in: the run's monitor, and rank 0 of a standalone run. Must not import ray or torch.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from raydist.errors import StorageError
from raydist.records import EXPORTED_ONLY, Event, numbers
from raydist.run import parquet
from raydist.run.directory import EVENTS, METRICS, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import FIELDS, HEAD, NULLABLE, SCHEMA, json_line, segment_names
from raydist.run.status import last_word, write_state
from raydist.storage import refused

SEGMENT_ROWS = 10_000
"""Rows of a complete segment; the open segment, rewritten at each flush, is smaller."""
SEGMENT_NUMBERS = 1 << 20
"""Loads and biases of experts after which a segment is complete, too: the open one then stays below 4 MiB."""
COMBINED_BYTES = 1 << 16
"""A batch of that size is not combined with later ones."""

_CODES = {pa.int64(): "q", pa.float64(): "d", pa.int32(): "i", pa.float32(): "f"}


def _lists(code: str) -> Callable[[Any], list[list[Any]]]:
    """A cast of lists of numbers. Raises TypeError or OverflowError for one that the format does not have."""
    return lambda layers: [array.array(code, layer).tolist() for layer in layers]


_CAST_TO: dict[pa.DataType, Callable[[Any], Any]] = {
    pa.int64(): operator.index,
    pa.float64(): float,
    pa.bool_(): bool,
    FIELDS["expert_loads"][0]: _lists("i"),
    FIELDS["expert_bias"][0]: _lists("f"),
}
_CASTS: dict[str, Callable[[Any], Any]] = {name: _CAST_TO.get(kind, str) for name, (kind, _) in FIELDS.items()}
_SEEN = 10_000


@dataclass
class _OpenSegment:
    """A segment that is not completely on storage. `version` counts its changes; `stored` is the version on storage."""

    number: int
    attempt: int
    after_step: int
    rows: int = 0
    numbers: int = 0
    version: int = 1
    stored: int = 0
    parts: list[pa.RecordBatch] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{METRICS}/attempt-{self.attempt:04d}-{self.number:06d}.parquet"

    def table(self, parts: list[pa.RecordBatch]) -> pa.Table:
        head = json.dumps({"attempt": self.attempt, "after_step": self.after_step})
        table = pa.Table.from_batches(parts, SCHEMA)
        return table.replace_schema_metadata({**(SCHEMA.metadata or {}), HEAD: head.encode()})


class RunLog:
    """The writer of one run's steps and events; one per driver, and one driver at a time.

    `attempt`, `steps` and `event` only buffer, and are thread-safe; `flush` makes everything that was passed before
    durable. A stored segment is removed from memory; until then it needs 90 bytes per step, and 4 for
    each load and bias of an expert.
    Raises StorageError if storage cannot be listed.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        numbers = [number for number, _ in segment_names(run)]
        self._next = max(numbers, default=-1) + 1
        self._attempt = -1
        self._last = 0
        self._segments: list[_OpenSegment] = []
        self._events: list[bytes] = []
        self._seen: dict[bytes, None] = {}
        """Hashes of the newest lines, in order."""
        self._stored_events = self._repair_events()
        self._lock = threading.Lock()
        """Guards the buffers; never held during storage I/O."""
        self._io = threading.Lock()
        """Only one flush at a time."""

    def attempt(self, number: int, resume_step: int) -> None:
        """Attempt `number` resumes from `resume_step`: rows after that step are void, and steps of lower attempts are ignored.

        If it is called again with another step, the last call before the attempt's first step counts; later calls do nothing.
        """
        with self._lock:
            if number != self._attempt or not self._segments[-1].rows:
                self._begin(number, resume_step)

    def steps(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Adds rows, in the order of training; returns the new ones. Raises KeyError, TypeError or OverflowError for a bad one.

        An unknown attempt begins with its first step. Steps that this attempt has already sent are dropped (a repeated push), as
        are steps of earlier attempts (sent late by a worker of an abandoned attempt).
        """
        # Convert before any change: an invalid record then changes nothing.
        rows = [_row(record) for record in records]
        new: list[dict[str, Any]] = []
        with self._lock:
            begun = large = 0
            for row in rows:
                if row["attempt"] < self._attempt:
                    continue
                empty = not self._segments or (not self._segments[-1].rows and begun == len(new))
                if row["attempt"] > self._attempt or (empty and row["step"] <= self._last):
                    self._add(new[begun:])
                    begun, large = len(new), 0
                    self._begin(row["attempt"], row["step"] - 1)
                elif row["step"] <= self._last:
                    continue
                elif self._full(len(new) - begun, large):
                    self._add(new[begun:])
                    begun, large = len(new), 0
                    self._begin(row["attempt"], self._last)
                new.append(row)
                large += numbers(row)
                self._last = row["step"]
            self._add(new[begun:])
        return new

    def event(self, event: Event) -> None:
        """Adds one line to events.jsonl, except for kinds that are only exported, and for duplicates (`is_duplicate`)."""
        if event.kind in EXPORTED_ONLY:
            return
        line = json_line(event.to_dict())
        with self._lock:
            if self._remember(line):
                self._events.append(line)

    def is_duplicate(self, event: Event) -> bool:
        """Whether this event was received before, as far as remembered; a sender without an answer sends it again."""
        return event.kind not in EXPORTED_ONLY and xxhash.xxh3_128_digest(json_line(event.to_dict())) in self._seen

    def recall(self, events: Iterable[Event]) -> None:
        """Takes over events that an earlier writer received: writes those that it has not stored. Raises StorageError."""
        lines = [json_line(event.to_dict()) for event in events if event.kind not in EXPORTED_ONLY]
        try:
            stored = set(self._run.storage.read(EVENTS).splitlines(keepends=True)) if lines else set()
        except FileNotFoundError:
            stored = set()
        with self._lock:
            self._events += [line for line in lines if self._remember(line) and line not in stored]

    def flush(self) -> None:
        """Returns once everything passed before is durable. Raises StorageError; unwritten data is kept."""
        with self._io:
            self._flush_events()
            with self._lock:
                work = [(s, s.version, list(s.parts)) for s in self._segments if s.stored != s.version]
            for segment, version, parts in work:
                parquet.store(self._run.storage, segment.name, segment.table(parts))
                with self._lock:
                    segment.stored = version
                    # Combine small batches, so that the next flush of the open segment encodes faster. Only these: Arrow keeps
                    # the pages of a copy for the thread that made it, and each of a monitor's eight would keep a segment's.
                    first = next((i for i, part in enumerate(parts) if part.nbytes < COMBINED_BYTES), len(parts))
                    combined = pa.Table.from_batches(parts[first:], SCHEMA).combine_chunks().to_batches()
                    segment.parts[first : len(parts)] = combined
            with self._lock:
                self._segments = [s for s in self._segments[:-1] if s.stored != s.version] + self._segments[-1:]

    def close(self) -> None:
        """The last flush."""
        self.flush()

    def _remember(self, line: bytes) -> bool:
        """Remembers a line; returns whether it is new."""
        key = xxhash.xxh3_128_digest(line)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        return True

    def _begin(self, number: int, after_step: int) -> None:
        present = self._segments[-1] if self._segments else None
        if present and not present.rows and present.attempt == number:
            # Still empty: keep the segment, with the newer resume step.
            present.after_step, present.version = after_step, present.version + 1
        else:
            self._segments.append(_OpenSegment(self._next, number, after_step))
            self._next += 1
        self._attempt, self._last = number, after_step

    def _full(self, rows: int, more: int) -> bool:
        """Whether the open segment is complete with so many further rows, and numbers of experts in them."""
        present = self._segments[-1]
        return present.rows + rows >= SEGMENT_ROWS or present.numbers + more >= SEGMENT_NUMBERS

    def _add(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        columns = [_column([row[name] for row in rows], kind) for name, (kind, _) in FIELDS.items()]
        segment = self._segments[-1]
        segment.parts.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        segment.rows += len(rows)
        segment.numbers += sum(map(numbers, rows))
        segment.version += 1

    def _repair_events(self) -> bytes:
        """Removes a partial last line that a killed driver has left. On an object store: returns the content for the next write."""
        storage = self._run.storage
        try:
            data = storage.read(EVENTS)
        except FileNotFoundError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        if storage.local is None:
            return whole
        if len(whole) < len(data):
            try:
                os.truncate(storage.local / EVENTS, len(whole))
            except OSError as error:
                raise refused("write", f"{self._run.uri}/{EVENTS}", error) from error
        return b""

    def _flush_events(self) -> None:
        with self._lock:
            count, data = len(self._events), b"".join(self._events)
        if not count:
            return
        if self._run.storage.local is not None:
            self._run.storage.append(EVENTS, data, sync=True)
        else:
            # An object store cannot append; events are few, so the whole file is written again.
            self._run.storage.write(EVENTS, self._stored_events + data)
            self._stored_events += data
        with self._lock:
            del self._events[:count]


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a row; each value has its column's type."""
    return {
        name: None if name in NULLABLE and record.get(name) is None else cast(record[name])
        for name, cast in _CASTS.items()
    }


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Like `pa.array(values, kind)`, which imports pandas if that is installed: 0.2 s, and 40 MB in a small process."""
    if kind == pa.string():
        texts = [value.encode() for value in values]
        ends = array.array("i", itertools.accumulate(map(len, texts), initial=0))
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    there = None
    if None in values:
        there = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little").tobytes())
        values = [value or (() if pa.types.is_list(kind) else 0) for value in values]
    if pa.types.is_list(kind):
        ends = array.array("i", itertools.accumulate(map(len, values), initial=0))
        inside = _column([*itertools.chain.from_iterable(values)], kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(ends)], children=[inside])
    if kind == pa.bool_():
        bits = np.packbits([bool(value) for value in values], bitorder="little").tobytes()
        return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(bits)])
    data = array.array(_CODES[kind], values)
    return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(data)])


def write_end(run: RunDir, status: str, cause: str) -> None:
    """The end of a run whose monitor cannot write it: its state, and on local storage the event `ended`. The monitor's own events
    are in its journal, which the next start reads. Does what storage allows, and raises nothing.
    """
    now = time.time()
    with contextlib.suppress(StorageError):
        state, driver = last_word(run) or {}, this_process()
        known = state.get("driver", {})
        if all(known.get(name) == driver[name] for name in ("host", "pid", "pids")):
            driver = known  # the journal's
        write_state(run, {**state, "driver": driver, "status": status, "heartbeat_at": now})
    if run.storage.local is not None:
        data = {"status": status, "step": run.newest_step(), **({"cause": cause} if cause else {})}
        with contextlib.suppress(StorageError):
            run.storage.append(EVENTS, json_line(Event("ended", now, data).to_dict()))
