"""The data of `raydist show` and `raydist runs`, from the run folders alone: without a cluster, during and after training.

Runs anywhere. Must not import torch or ray. docs/reference/records.md is the interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow as pa

from raydist.checkpoint import manifest
from raydist.errors import StorageError
from raydist.faults import read_notes
from raydist.observe.summary import WINDOW, rates
from raydist.records import Event
from raydist.run.directory import SPEC, RunDir, default_storage
from raydist.run.log import FIELDS, SINGLE, Segment, merge, newest_loads, plain, read_events, read_segments, read_steps
from raydist.run.status import read_state
from raydist.storage import Storage

T = TypeVar("T")
_REQUESTS = 32
"""Of `runs` to remote storage at the same time."""


def show(run: RunDir) -> dict[str, Any]:
    """{"run", "path", "status", "steps", "loss", "eval_loss", "tokens_per_second", "attempts", "checkpoints", "faults", "workers"}.

    Plain data for strict JSON. Unknown values are None: no step or eval yet, or the bytes of a checkpoint with a damaged manifest.
    Raises StorageError.
    """
    return summarize(run, read_state(run), read_events(run), read_segments(run, SINGLE))


def summarize(run: RunDir, state: Mapping[str, Any], events: list[Event], segments: list[Segment]) -> dict[str, Any]:
    """The same of what was read already. Reads checkpoints and faults. Raises StorageError."""
    rows, held_out = merge(segments), evals(events)
    status = _status(state, events)
    return {
        "run": run.name,
        "path": run.uri,
        "status": status,
        "steps": rows["step"][-1].as_py() if rows.num_rows else 0,
        "loss": plain(rows["loss"][-1].as_py()) if rows.num_rows else None,
        "eval_loss": held_out[max(held_out)] if held_out else None,
        "tokens_per_second": _pace(rows),
        "attempts": _attempts(segments, events, status),
        "checkpoints": [{key: row[key] for key in ("step", "bytes", "best")} for row in manifest.summary(run)],
        "faults": [
            {k: note[k] for k in ("fault", "rank", "step", "attempt", "at")} for note in read_notes(run).values()
        ],
        "workers": plain(state.get("workers", [])) if status == "running" else [],
    }


def runs(storage: str | None = None) -> list[dict[str, Any]]:
    """The runs in a folder or at a URI, by name: {"run", "path", "status", "steps", "loss", "eval_loss", "tokens_per_second"}.

    Reads one small file per run; if its driver was killed, the file is as old as its last heartbeat (2 s). A run
    whose files cannot be read is "damaged", with the reason on stderr. Raises StorageError.
    """
    home = Storage(storage or default_storage())
    return [row for row in of_each(home, lambda name: _row(home, name)) if row is not None]


def of_each(home: Storage, read: Callable[[str], T]) -> list[T]:
    """What `read` returns for the name of each folder that may be a run or a sweep, in order."""
    names = [name for name in home.folders() if not name.startswith(".")]
    if home.local is not None:
        return [read(name) for name in names]
    with ThreadPoolExecutor(_REQUESTS) as pool:  # each request to an object store takes tens of milliseconds
        return list(pool.map(read, names))


def _row(home: Storage, name: str) -> dict[str, Any] | None:
    """Of `runs`; None if no run was started in that folder."""
    if home.size(f"{name}/{SPEC}") is None:
        return None
    run = RunDir(home.at(name))
    try:
        return row(run, read_state(run))
    except StorageError as error:  # one run's file must not hide the others
        print(f"raydist: {error}", file=sys.stderr)
        return row(run, {"status": "damaged", "step": None})


def row(run: RunDir, state: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `runs`. `state`: of `read_state`. Raises StorageError."""
    if "step" not in state:
        # Trained without a monitor (launch.standalone): read its records.
        facts = show(run)
        state = {**facts, "step": facts["steps"]}
    figures = {key: state.get(key) for key in ("loss", "eval_loss", "tokens_per_second")}
    return {"run": run.name, "path": run.uri, "status": state["status"], "steps": state["step"], **figures}


def steps(run: RunDir, columns: Iterable[str] = FIELDS) -> Iterator[dict[str, Any]]:
    """One dict per step with the fields of StepRecord, ascending. For strict JSON, NaN and infinities are None."""
    for batch in read_steps(run, columns).to_batches(max_chunksize=4096):
        yield from (plain(row) for row in batch.to_pylist())


def _status(state: Mapping[str, Any], events: list[Event]) -> str:
    if "heartbeat_at" not in state and events and events[-1].kind == "ended":
        return str(events[-1].data["status"])
    return str(state["status"])


def _pace(rows: pa.Table) -> float | None:
    """Tokens/s of the newest attempt's last steps. Its first step is a warm-up, and counts only if it is the only one."""
    if not rows.num_rows:
        return None
    newest = rows.slice(max(0, rows.num_rows - WINDOW - 1)).to_pylist()
    newest = [row for row in newest if row["attempt"] == newest[-1]["attempt"]]
    return rates(newest[1:] or newest)["tokens_per_second"]


def evals(events: Sequence[Event]) -> dict[int, float]:
    """Eval loss by step, ascending, without those after the step that a later attempt resumed from."""
    kept: dict[int, float] = {}
    for event in events:
        if event.kind in ("attempt_started", "resumed"):
            start = event.data["resume_step" if event.kind == "attempt_started" else "step"]
            kept = {step: loss for step, loss in kept.items() if step <= start}
        elif event.kind == "eval" and event.data.get("loss") is not None:
            kept[event.data["step"]] = event.data["loss"]
    return kept


def expert_loads(run: RunDir, events: Sequence[Event]) -> dict[str, Any] | None:
    """The newest step with experts' loads, and those of each layer; None without (`observe.expert_loads`)."""
    newest_event = next((event for event in reversed(events) if event.kind in ("experts", "expert_loads")), None)
    if newest_event is not None and newest_event.kind == "expert_loads":  # of an earlier version
        layers = {name: layer["loads"] for name, layer in newest_event.data["layers"].items()}
        return {"step": newest_event.data["step"], "layers": layers}
    newest = newest_loads(run) if newest_event is not None else None
    if newest_event is None or newest is None:
        return None
    return {"step": newest[0], "layers": dict(zip(newest_event.data["layers"], newest[1], strict=False))}


def _attempts(segments: list[Segment], events: list[Event], status: str) -> list[dict[str, Any]]:
    """By number. `first_step` and `last_step`: what the attempt trained, even if a later one trained it again."""
    found: dict[int, dict[str, Any]] = {}

    def attempt(number: int) -> dict[str, Any]:
        keys = ("world_size", "first_step", "last_step", "startup", "cause")
        return found.setdefault(number, {"number": number, **dict.fromkeys(keys)})

    for segment in segments:
        about = attempt(segment.attempt)
        if segment.rows.num_rows:
            about["world_size"] = segment.rows["world_size"][0].as_py()
            about["first_step"] = about["first_step"] or segment.rows["step"][0].as_py()
            about["last_step"] = segment.rows["step"][-1].as_py()
    current = None
    for event in events:
        if event.kind == "attempt_started":
            if current is not None and current["cause"] is None:
                current["cause"] = "its driver exited without reporting an error"
            current = attempt(event.data["attempt"])
            current["world_size"] = event.data["world_size"]
        elif event.kind == "first_step":
            startup = {key: event.data[key] for key in ("seconds", "stages", "repeated_steps")}
            attempt(event.data["attempt"])["startup"] = startup
        elif event.kind == "failure":
            rank = event.data.get("rank")
            cause = event.data["cause"]
            attempt(event.data["attempt"])["cause"] = cause if rank is None else f"rank {rank}: {cause}"
        elif event.kind == "ended" and current is not None:
            ended = event.data["status"]
            current["cause"] = current["cause"] or (None if ended == "finished" else event.data.get("cause") or ended)
    if status == "lost" and current is not None and current["cause"] is None:
        current["cause"] = "its driver exited without reporting an error"
    return [found[number] for number in sorted(found)]
