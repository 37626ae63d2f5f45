"""The records of a run: one row per step in metrics/*.parquet, and events.jsonl; the format and the readers.

Runs anywhere: in a user's shell, without a cluster. Must not import ray or torch. The writer is run/log_writer.py.

Steps are written to segments, `attempt-0001-000000.parquet`: the last number counts over all drivers and attempts of the
run, so that no writer changes a segment of an earlier one, and segments are ordered by their number. Each segment
has `after_step`: **rows of earlier segments after that step are void**. With this rule a restart replaces
rows, and readers need only the segments. docs/reference/records.md describes the interface.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydist.errors import StorageError
from raydist.parsing import DAMAGED, LINE_BYTES, parse_json
from raydist.records import LISTS, Event, StepRecord
from raydist.redact import redact
from raydist.run import event_fields
from raydist.run.directory import EVENTS, METRICS, RunDir

SCHEMA_VERSION = 1
FIELDS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "optimizer step, counted from 1: after step s, s updates have been applied"),
    "loss": (pa.float64(), "mean over the tokens of the global batch, in nats"),
    "lr": (pa.float64(), "learning rate of the update"),
    "grad_norm": (pa.float64(), "global norm of the gradient before clipping"),
    "tokens": (pa.int64(), "tokens of the global batch that are counted in the loss"),
    "seconds": (pa.float64(), "the whole step"),
    "data_seconds": (pa.float64(), "part of `seconds` spent waiting for data"),
    "world_size": (pa.int64(), "ranks that trained it"),
    "attempt": (pa.int64(), "attempt that trained it"),
    "samples_hash": (pa.string(), "xxh64, in hex, of the global batch's sample ids, in order"),
    "grad_noise_scale": (pa.float64(), "gradient noise scale so far, in sequences; null if unknown"),
    "expert_imbalance": (
        pa.float64(),
        "tokens of the fullest expert of a layer over the mean, for the worst layer; null without experts",
    ),
    "exchanged_bytes": (pa.int64(), "bytes that all ranks sent to others' experts and back; null without experts"),
    "residual_norm": (pa.float64(), "norm of what error feedback keeps of rank 0's gradients; null without it"),
    "compression_error": (
        pa.float64(),
        "norm of what compression lost on rank 0 over that of what it was given; null without compression",
    ),
    "sent_bytes": (pa.int64(), "bytes that rank 0 sent for sums of compressed gradients; null without compression"),
    "saved_bytes": (
        pa.int64(),
        "bytes that a ring would have sent for them in fp32, less these; null without compression",
    ),
    "local_step": (pa.bool_(), "whether no outer step started or arrived after it; null without comm.every"),
    "sync_seconds": (pa.float64(), "seconds that rank 0 waited for the last outer step; null before one"),
    "sync_bytes": (pa.int64(), "bytes that rank 0 sent for the last outer step; null before one"),
    "samples": (pa.int64(), "samples of the global batch that were trained; null in runs of earlier versions"),
    "expert_loads": (
        pa.list_(pa.list_(pa.int32())),
        "tokens of each expert, a list for each layer; null without experts",
    ),
    "expert_bias": (
        pa.list_(pa.list_(pa.float32())),
        "biases with which the routers chose for these tokens; null if no router has one",
    ),
}
"""The columns of a segment: the fields of records.StepRecord, in order."""
NULLABLE = frozenset(each.name for each in fields(StepRecord) if each.default is None)
"""Columns that may be missing in a record, or in a segment of an earlier version."""
SINGLE = tuple(name for name in FIELDS if name not in LISTS)
"""Columns with one value a step: what readers need that do not look at experts."""

SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in FIELDS.items()],
    metadata={"raydist.schema_version": str(SCHEMA_VERSION)},
)

_SEGMENT = re.compile(r"attempt-(\d+)-(\d+)\.parquet")
HEAD = b"raydist.segment"
"""The key of a segment's own metadata."""


@dataclass(frozen=True)
class Segment:
    """One file of metrics/: its rows, ascending by step, continue after `after_step` of the earlier segments.

    For the first segment of an attempt that is its resume step.
    """

    number: int
    attempt: int
    after_step: int
    rows: pa.Table


def read_segments(run: RunDir, columns: Iterable[str] = FIELDS, newest: int = 0) -> list[Segment]:
    """All segments, in the order of writing. Safe while the run is being written: returns a complete prefix of the flushed rows.

    `columns`: of their rows; local files are read for these alone. `newest`: the last so many segments; 0: all. Raises
    StorageError with the name of a file that is not a valid segment.
    """
    found = []
    schema = pa.schema([SCHEMA.field(name) for name in columns], SCHEMA.metadata)
    # Listed first: a later segment exists only once the earlier ones are complete, so none of them is read half full.
    for number, name in segment_names(run)[-newest:]:
        try:
            # One open handle, or one GET, sees one version even if a flush replaces the file.
            # In this thread: a pool's thread may release the last reference to bytes of a GET, which belong to Python, after the
            # interpreter has exited; the process would then abort after all its work is done.
            local = run.storage.local is not None
            with run.storage.open(name) if local else pa.BufferReader(run.storage.read(name)) as source:
                file = pq.ParquetFile(source, pre_buffer=False)
                table = file.read([name for name in schema.names if name in file.schema_arrow.names], use_threads=False)
            head = parse_json(table.schema.metadata[HEAD])
            for lacking in NULLABLE.intersection(schema.names).difference(table.column_names):
                table = table.append_column(SCHEMA.field(lacking), pa.nulls(len(table), SCHEMA.field(lacking).type))
            rows = table.select(schema.names).cast(schema)
            if any(rows[column].null_count for column in schema.names if column not in NULLABLE):
                raise ValueError("a value is missing")
            found.append(Segment(number, int(head["attempt"]), int(head["after_step"]), rows))
        except StorageError:
            raise
        except (*DAMAGED, pa.ArrowException, OSError) as error:  # OSError: a damaged page
            raise StorageError(
                f"cannot read {run.uri}/{name}: {error}", "move the file away to continue without its steps"
            ) from error
    return found


def merge(segments: list[Segment]) -> pa.Table:
    """The valid rows: one per step, ascending. Rows voided by a restart are left out."""
    kept: list[pa.Table] = []
    limit = math.inf
    for segment in reversed(segments):
        # Rows are ascending within a segment: those up to the limit come first.
        count = bisect.bisect_right(segment.rows["step"], limit, key=lambda step: step.as_py())
        kept.append(segment.rows.slice(0, count))
        limit = min(limit, segment.after_step)
    schema = segments[0].rows.schema if segments else SCHEMA
    return pa.concat_tables([pa.Table.from_batches([], schema), *reversed(kept)]).combine_chunks()


def read_steps(run: RunDir, columns: Iterable[str] = FIELDS) -> pa.Table:
    """One row per step, ascending, with these columns and `step`. For a step trained twice, the newest attempt's row.

    Works while the run is being written. Raises StorageError.
    """
    names = list(dict.fromkeys(("step", *columns)))
    return merge(read_segments(run, names)).select(names)


def newest_loads(run: RunDir) -> tuple[int, list[list[int]]] | None:
    """The newest step whose experts' loads were recorded, and these; None: not in the two newest segments. Raises StorageError."""
    for segment in reversed(read_segments(run, ("step", "expert_loads"), newest=2)):
        rows = segment.rows.filter(segment.rows["expert_loads"].is_valid())
        if rows.num_rows:
            return rows["step"][-1].as_py(), rows["expert_loads"][-1].as_py()
    return None


def read_events(run: RunDir) -> list[Event]:
    """The events, in the order of writing; [] if there are none. A partial last line is left out: it is being written.

    Raises StorageError with the number of another damaged line.
    """
    try:
        return events_in(run.storage.read(EVENTS), f"{run.uri}/{EVENTS}")
    except FileNotFoundError:
        return []


def events_in(data: bytes, where: str) -> list[Event]:
    """The events of a file, without a partial last line. Raises StorageError with the number of another damaged line."""
    events = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            event = Event.from_dict(parse_json(line, LINE_BYTES))
            event_fields.check(event.kind, event.at, event.data)
            events.append(event)
        except DAMAGED as error:
            raise StorageError(f"{where}: line {number} is not an event: {error}", "remove that line") from error
    return events


def last_attempt(run: RunDir) -> int:
    """The highest attempt number so far, 0 for a new run: a driver that continues a run counts from it.

    Includes attempts that died before their first step.
    """
    names = (_SEGMENT.fullmatch(name.rsplit("/", 1)[-1]) for _, name in segment_names(run))
    return max([run.lineage().newest, *(int(match[1]) for match in names if match)])


def plain(value: Any) -> Any:
    """`value` for strict JSON: NaN and infinities, which JSON does not have, become None; tuples lists; keys strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, without secrets."""
    return json.dumps(plain(redact(value)), allow_nan=False).encode() + b"\n"


def segment_names(run: RunDir) -> list[tuple[int, str]]:
    """(number, name) of each segment, in order."""
    names = run.storage.files(METRICS)
    found = ((_SEGMENT.fullmatch(name.rsplit("/", 1)[-1]), name) for name in names)
    return sorted((int(match[2]), name) for match, name in found if match)
