"""A sweep's cells in TensorBoard's tab HPARAMS: a row a cell, for `tensorboard --logdir SWEEP`.

Runs in: the sweep's driver. Must not import torch or TensorFlow: the messages are those of the tensorboard package, whose own
functions for them (tensorboard.plugins.hparams.summary) load TensorFlow.

TensorBoard calls each folder with event files a run. So a cell's row is one more file beside its curves, in
runs/CELL/tensorboard: a row in a folder of its own would be listed as a second run of the cell. The file is written whole, and is
the same whoever writes it: a driver that follows one that was killed may write it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from raydist.observe.exporters.tensorboard import next_stamp
from raydist.observe.sweep_results import Facts, Row
from raydist.run.directory import TENSORBOARD, RunDir

_STATUS = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
"""What the tab calls it; it has no word for a cell that a scheduler stopped, which the column `status` tells."""
_END = ".row"
"""Of the file's name, which sets it apart from the curves' files."""


class Rows:
    """Written through the sweep's storage. Raises StorageError."""

    def __init__(self, facts: Facts) -> None:
        self._folder = facts.folder

    def has(self, cell: str) -> bool:
        """Whether its file is there."""
        return any(name.endswith(_END) for name in self._folder.run(cell).storage.files(TENSORBOARD))

    def write(self, row: Row) -> None:
        """Parameters and status as what was set, the rest as what came of it."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        start = plugin_data_pb2.SessionStartInfo(group_name=row.cell, start_time_secs=row.started)
        for name, value in {**row.parameters, "status": row.status}.items():
            _set(start.hparams[name], value)
        status = api_pb2.Status.Value(_STATUS.get(row.status, "STATUS_UNKNOWN"))
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=row.at)
        told = {
            metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=start),
            metadata.SESSION_END_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_end_info=end),
        }
        values = [
            summary_pb2.Summary.Value(
                tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
            )
            for tag, data in told.items()
        ]
        values += [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        events = [
            event_pb2.Event(wall_time=row.at, file_version="brain.Event:2"),
            event_pb2.Event(wall_time=row.at, step=row.step, summary=summary_pb2.Summary(value=values)),
        ]
        run = self._folder.run(row.cell)
        run.storage.write(_name(run, row), _framed(events))


def _name(run: RunDir, row: Row) -> str:
    """After the curves' files, for TensorBoard reads files by name and does not come back to one."""
    curves = [name for name in run.storage.files(TENSORBOARD) if not name.endswith(_END)]
    return f"{TENSORBOARD}/events.out.tfevents.{next_stamp(curves, row.at):010d}.raydist{_END}"


def _set(field: Any, value: Any) -> None:
    """A value as TensorBoard has it: a flag, a number, else text. What is not set stays unset."""
    if isinstance(value, bool):
        field.bool_value = value
    elif isinstance(value, int | float):
        field.number_value = value
    elif value is not None:
        field.string_value = value if isinstance(value, str) else json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _framed(events: list[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    sink = BytesIO()
    writer = RecordWriter(sink)
    for event in events:
        writer.write(event.SerializeToString())
    return sink.getvalue()
