"""A run's curves for TensorBoard, in RUN/tensorboard: train/loss, train/lr, ..., eval/loss, and histograms.

Runs in: the run's monitor. Must not import torch or TensorFlow: the protocol buffers and the framing are those of the
tensorboard package, whose EventFileWriter is not used because it loads TensorFlow wherever that is installed.

Each attempt writes files of its own, later in name than all before, and opens with a session-start event at its first
step: that is how TensorBoard is told to drop the points that the attempt trains again.
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

from raydist.errors import StorageError
from raydist.observe.exporters import BaseExporter, Facts, only
from raydist.run.directory import TENSORBOARD, RunDir

_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
_ROLL_BYTES = 1 << 20
_KEPT_FILES = 32
_UPLOAD_EVERY_S = 15.0
_TAGS = ("loss", "lr", "grad_norm", "seconds", "data_seconds", "grad_noise_scale")


def next_stamp(names: Iterable[str], at: float) -> int:
    """The time, in Unix seconds, for the name of a new event file beside those: `at`, but later than theirs.

    TensorBoard reads files by name, and the name begins with a time: never an earlier one than those that are there.
    """
    found = (_FILE.match(name.rsplit("/", 1)[-1]) for name in names)
    return max(max((int(match[1]) for match in found if match), default=0) + 1, int(at))


class Exporter(BaseExporter):
    """All but `flush` and `close` only buffer; those raise StorageError, and keep what was not written. A file ends at 1 MiB
    and the next begins, so that on an object store, where a file cannot grow, each upload is small.
    """

    def __init__(self, facts: Facts) -> None:
        run = self._run = facts.run
        self._numbers = itertools.count(next_stamp(run.storage.files(TENSORBOARD), time.time()))
        self._name = ""
        self._buffer = BytesIO()
        self._head = 0
        self._stored = 0
        self._uploaded_at = 0.0
        self._done: list[tuple[str, bytes]] = []
        self._open()

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """It has no options."""
        only(options, ())
        return {}

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """What was written of steps past `resume_step` is void. `at`, here and below: Unix time of the points."""
        from tensorboard.compat.proto import event_pb2

        if self._buffer.tell() > self._head:
            self._roll()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=at, step=resume_step + 1, session_log=start))

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """A point a step on each train curve. Dicts with the fields of StepRecord."""
        for record in rows:
            values = {f"train/{tag}": record[tag] for tag in _TAGS if record.get(tag) is not None}
            if record["seconds"] > 0:
                values["train/tokens_per_second"] = record["tokens"] / record["seconds"]
            self.scalars(record["step"], values, at)

    def event(self, event: Mapping[str, Any]) -> None:
        """The loss of an `eval`, and histograms."""
        if event["kind"] == "eval":
            self.scalars(int(event["step"]), {"eval/loss": float(event["loss"])}, event["at"])
        elif event["kind"] == "histograms":
            for what in ("weights", "gradients"):
                for name, histogram in event[what].items():
                    self._histogram(int(event["step"]), f"{what}/{name}", histogram, event["at"])

    def scalars(self, step: int, values: Mapping[str, float], at: float) -> None:
        """A point on each of some curves."""
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
        """Brings what was given to storage. On an object store, unless `now`, only every 15 s."""
        due = now or time.monotonic() - self._uploaded_at >= _UPLOAD_EVERY_S
        if self._run.storage.local is None and not due:
            return
        while self._done:
            self._store(*self._done[0])
            self._done.pop(0)
            self._stored = 0
        if self._buffer.tell() > self._stored:
            self._store(self._name, self._buffer.getvalue())
            self._stored = self._buffer.tell()
        self._uploaded_at = time.monotonic()

    def close(self) -> None:
        """The last flush."""
        self.flush(now=True)

    def _open(self) -> None:
        from tensorboard.compat.proto import event_pb2

        stamp = next(self._numbers)
        self._name = f"{TENSORBOARD}/events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._buffer = BytesIO()
        self._frame(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._head = self._buffer.tell()

    def _roll(self) -> None:
        self._done.append((self._name, self._buffer.getvalue()))
        # While storage refuses writes, the curves (not the records) lose their oldest part; [0] may be half stored.
        del self._done[1:-_KEPT_FILES]
        self._open()

    def _add(self, event: Any) -> None:
        self._frame(event.SerializeToString())
        if self._buffer.tell() >= _ROLL_BYTES:
            self._roll()

    def _frame(self, data: bytes) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._buffer).write(data)

    def _store(self, name: str, data: bytes) -> None:
        """Locally the file grows by what is new, since TensorBoard follows an open file; elsewhere it is sent whole."""
        storage = self._run.storage
        if storage.local is None:
            storage.write(name, data)
            return
        path = storage.local / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.truncate(self._stored)
                file.write(data[self._stored :])
        except OSError as error:
            raise StorageError(f"cannot write {path}: {os.strerror(error.errno or 0)}", "") from error
