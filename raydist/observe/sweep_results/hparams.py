"""Exports a sweep's trials to TensorBoard's HPARAMS tab: one row per trial, for `tensorboard --logdir SWEEP`.

Runs in: the sweep's driver. Must not import torch or TensorFlow: it uses the messages of the tensorboard package, but not its
functions for them (tensorboard.plugins.hparams.summary), which load TensorFlow.

TensorBoard treats each folder with event files as a run. So a trial's row is one more file next to its curves, in
runs/CELL/tensorboard: in a folder of its own it would be listed as a second run. The file is written as a whole, and every driver
writes the same content: if a driver is killed, the next one may write it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raydist.observe.exporters.tensorboard import next_stamp
from raydist.observe.sweep_results import Facts, Row
from raydist.observe.tensorboard_records import framed
from raydist.run.directory import TENSORBOARD, RunDir

_STATUS = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
"""TensorBoard's status; it has none for a trial that a scheduler stopped, which the column `status` shows."""
_END = ".row"
"""Suffix of the row's file, to distinguish it from the curves' files."""


class Rows:
    """Written through the sweep's storage. Raises StorageError."""

    def __init__(self, facts: Facts) -> None:
        self._folder = facts.folder

    def has(self, cell: str) -> bool:
        """Whether its file exists."""
        return any(name.endswith(_END) for name in self._folder.run(cell).storage.files(TENSORBOARD))

    def write(self, row: Row) -> None:
        """Parameters and status as hyperparameters, the other values as metrics."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        start = plugin_data_pb2.SessionStartInfo(group_name=row.cell, start_time_secs=row.started)
        for name, value in {**row.parameters, "status": row.status}.items():
            _set(start.hparams[name], value)
        status = api_pb2.Status.Value(_STATUS.get(row.status, "STATUS_UNKNOWN"))
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=row.at)
        facts = {
            metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=start),
            metadata.SESSION_END_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_end_info=end),
        }
        values = [
            summary_pb2.Summary.Value(
                tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
            )
            for tag, data in facts.items()
        ]
        values += [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        events = [
            event_pb2.Event(wall_time=row.at, file_version="brain.Event:2"),
            event_pb2.Event(wall_time=row.at, step=row.step, summary=summary_pb2.Summary(value=values)),
        ]
        run = self._folder.run(row.cell)
        run.storage.write(_name(run, row), b"".join(framed(event.SerializeToString()) for event in events))


def _name(run: RunDir, row: Row) -> str:
    """Sorts after the curves' files, because TensorBoard reads files in order of name and never returns to an earlier one."""
    curves = [name for name in run.storage.files(TENSORBOARD) if not name.endswith(_END)]
    return f"{TENSORBOARD}/events.out.tfevents.{next_stamp(curves, row.at):010d}.raydist{_END}"


def _set(field: Any, value: Any) -> None:
    """Sets a value with TensorBoard's type: bool, number, else text. None stays unset."""
    if isinstance(value, bool):
        field.bool_value = value
    elif isinstance(value, int | float):
        field.number_value = value
    elif value is not None:
        field.string_value = value if isinstance(value, str) else json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
