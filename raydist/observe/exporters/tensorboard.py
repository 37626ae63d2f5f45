"""Writes a run's curves for TensorBoard to RUN/tensorboard: train/loss, train/lr, ..., eval/loss, and histograms.

Runs in: the run's monitor. Must not import torch or TensorFlow: it uses the protocol buffers of the tensorboard package, but not
its EventFileWriter, which loads TensorFlow if that is installed.

Each attempt writes its own files, which sort after all earlier ones, and begins with a session-start event at its first step.
TensorBoard then drops the points of steps that the attempt trains again.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

from raydist.observe.exporters import BaseExporter, Facts, curves
from raydist.observe.tensorboard_records import framed
from raydist.run.directory import TENSORBOARD
from raydist.spec.parts import Part
from raydist.storage import opener, refused

_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
_ROLL_BYTES = 1 << 20
_KEPT_FILES = 32
_UPLOAD_EVERY_S = 15.0


class Options(Part):
    """It has none."""


def next_stamp(names: Iterable[str], at: float) -> int:
    """The time, in Unix seconds, for the name of a new event file next to the files in `names`: `at`, or later if needed.

    TensorBoard reads files in order of their names, and a name begins with a time: it must be later than all existing ones.
    """
    found = (_FILE.match(name.rsplit("/", 1)[-1]) for name in names)
    return max(max((int(match[1]) for match in found if match), default=0) + 1, int(at))


class Exporter(BaseExporter):
    """Other methods only buffer; `flush` and `close` raise StorageError, and keep unwritten data. A new file begins after 1 MiB,
    so that uploads stay small on an object store, where a file cannot grow.
    """

    def __init__(self, facts: Facts) -> None:
        run = self._run = facts.run
        self._numbers = itertools.count(next_stamp(run.storage.files(TENSORBOARD), time.time()))
        self._name = ""
        self._buffer = BytesIO()
        """The open file; of a local one only what is not stored, which a flush appends."""
        self._before = 0
        """Bytes of the open file that are stored, and no longer in the buffer."""
        self._head = 0
        self._new = False
        self._uploaded_at = 0.0
        self._done: list[tuple[str, int, bytes]] = []
        self._open()

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Points of steps after `resume_step` are void. `at`, here and below: Unix time of the points."""
        from tensorboard.compat.proto import event_pb2

        if self._size() > self._head:
            self._roll()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=at, step=resume_step + 1, session_log=start))

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """One point per step on each train curve. `rows`: StepRecords as dicts."""
        for record in rows:
            self.scalars(record["step"], curves(record), at)

    def event(self, event: Mapping[str, Any]) -> None:
        """The loss of an `eval`; histograms, and the sizes of layers' outputs."""
        if event["kind"] == "eval":
            self.scalars(int(event["step"]), {"eval/loss": float(event["loss"])}, event["at"])
        elif event["kind"] == "histograms":
            for what in ("weights", "gradients"):
                for name, histogram in event[what].items():
                    self._histogram(int(event["step"]), f"{what}/{name}", histogram, event["at"])
            sizes = {f"activations/{name}": size for name, size in event.get("activations", {}).items()}
            if sizes:
                self.scalars(int(event["step"]), sizes, event["at"])

    def scalars(self, step: int, values: Mapping[str, float], at: float) -> None:
        """One point on each of these curves."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        points = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(event_pb2.Event(wall_time=at, step=step, summary=summary_pb2.Summary(value=points)))

    def _histogram(self, step: int, tag: str, histogram: Mapping[str, Any], at: float) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        edges, counts = histogram["edges"], histogram["counts"]
        if not counts:
            return
        made = summary_pb2.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=histogram["sum"],
            sum_squares=histogram["sum_squares"],
            bucket_limit=edges[1:],
            bucket=counts,
        )
        value = summary_pb2.Summary.Value(tag=tag, histo=made)
        self._add(event_pb2.Event(wall_time=at, step=step, summary=summary_pb2.Summary(value=[value])))

    def flush(self, *, now: bool = False) -> None:
        """Writes buffered data to storage. On an object store only every 15 s, unless `now`."""
        due = now or time.monotonic() - self._uploaded_at >= _UPLOAD_EVERY_S
        if self._run.storage.local is None and not due:
            return
        while self._done:
            self._store(*self._done[0])
            self._done.pop(0)
        if self._new:
            self._store(self._name, self._before, self._buffer.getvalue())
            self._new = False
            if self._run.storage.local is not None:
                self._before, self._buffer = self._size(), BytesIO()
        self._uploaded_at = time.monotonic()

    def close(self) -> None:
        """The last flush."""
        self.flush(now=True)

    def _open(self) -> None:
        from tensorboard.compat.proto import event_pb2

        stamp = next(self._numbers)
        self._name = f"{TENSORBOARD}/events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._buffer, self._before = BytesIO(), 0
        self._frame(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._head = self._size()

    def _roll(self) -> None:
        self._done.append((self._name, self._before, self._buffer.getvalue()))
        # While storage refuses writes, the oldest curve files (not the records) are dropped; [0] may be half stored.
        del self._done[1:-_KEPT_FILES]
        self._open()

    def _add(self, event: Any) -> None:
        self._frame(event.SerializeToString())
        if self._size() >= _ROLL_BYTES:
            self._roll()

    def _frame(self, data: bytes) -> None:
        self._buffer.write(framed(data))
        self._new = True

    def _size(self) -> int:
        """Bytes of the open file."""
        return self._before + self._buffer.tell()

    def _store(self, name: str, before: int, data: bytes) -> None:
        """A local file is appended to, since TensorBoard follows open files; an object is uploaded as a whole."""
        storage = self._run.storage
        if storage.local is None:
            storage.write(name, data)
            return
        try:
            with open(storage.appendable(name), "ab", opener=opener) as file:
                file.truncate(before)
                file.write(data)
        except OSError as error:
            raise refused("write", storage.path(name), error) from error
