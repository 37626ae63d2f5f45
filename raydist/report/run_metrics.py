"""The contents of `raydist report`, from the run's folder alone, during and after training: figures, and the data of the charts.

Runs anywhere. Must not import torch or ray. docs/how-to/report.md has the fields.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from raydist import __version__
from raydist.checkpoint import manifest
from raydist.parsing import parse_yaml
from raydist.records import Event
from raydist.report import doctor, goodput, heatmap_data, incidents, summary
from raydist.report.goodput import Span
from raydist.report.gradients_sent import sent
from raydist.report.heatmap_data import Grid
from raydist.report.telemetry_reader import COLUMNS, COMM, Readings, gather
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import SINGLE, Segment, merge, read_events, read_segments
from raydist.run.status import read_state
from raydist.run.telemetry_log import parts
from raydist.run.telemetry_schema import OPS


@dataclass(frozen=True)
class Report:
    """`facts`: plain data for strict JSON. The rest is data for charts: one row per step, evaluations by step, (step, kind, whether
    critical) of the incidents, and grids."""

    facts: dict[str, Any]
    spec: str
    steps: pa.Table
    evals: Mapping[int, float]
    moments: Sequence[tuple[float, str, bool]]
    spans: Sequence[Span]
    memory: tuple[str, Grid] | None
    slowness: Grid | None
    shares: Mapping[str, Grid] | None


def report(run: RunDir) -> Report:
    """Reads the run's folder. Raises StorageError."""
    made = time.time()
    state, events, segments = read_state(run), read_events(run), read_segments(run, SINGLE)
    about = summary.summarize(run, state, events, segments)
    steps = merge(segments)
    text = _spec(run)
    spec = _parsed(text)
    spans = goodput.spans(events, segments, state.get("heartbeat_at") or (events[-1].at if events else made))
    start, end = (spans[0].start, spans[-1].end) if spans else (made, made)
    ranks = int(max(steps["world_size"].to_numpy(), default=0))
    readings = gather(parts(run, COLUMNS), end - start, ranks)
    slowness = heatmap_data.slowness(readings, about["steps"])
    divided = goodput.divided(spans, events, segments, readings)
    pace, capacity = about["tokens_per_second"], next((e.data for e in reversed(events) if e.kind == "capacity"), None)
    memory = heatmap_data.memory(readings, start, end)
    happened = incidents.found(events, _trained(segments))
    facts = {
        "run": about["run"],
        "path": about["path"],
        "status": about["status"],
        "made_at": made,
        "steps": about["steps"],
        "total_steps": _get(spec, "train", "steps"),
        "global_batch": _get(spec, "train", "global_batch"),
        "loss": about["loss"],
        "eval_loss": about["eval_loss"],
        "tokens_per_second": pace,
        "samples_per_second": _samples_per_second(pace, steps),
        "mfu": pace * capacity["flops_per_token"] / capacity["peak_flops"] if pace and capacity else None,
        "world_size": about["attempts"][-1]["world_size"] if about["attempts"] else None,
        "versions": _versions(run, events),
        "started_at": start if spans else None,
        "ended_at": end if spans else None,
        "wall_seconds": sum(divided.values()),
        "paused_seconds": sum(span.seconds for span in spans if span.what == "paused"),
        "goodput": goodput.goodput(divided),
        "parts": divided,
        "attempts": about["attempts"],
        "memory": {"column": memory[0], "ranks": _memory(readings, memory[0])} if memory else None,
        "communication": _communication(readings),
        "gradients": sent(steps, events),
        "experts": summary.expert_loads(run, events),
        "slow": doctor.slow_ranks(events),
        "incidents": happened,
        "not_read": None if readings.tracks else _why(spec, about["status"]),
    }
    return Report(
        facts,
        text,
        steps,
        _evals(events, about["steps"]),
        _moments(happened, readings),
        spans,
        memory,
        slowness,
        heatmap_data.shares(readings, start, end),
    )


def _spec(run: RunDir) -> str:
    try:
        return run.storage.read(SPEC).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _parsed(text: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        return None  # it is shown unparsed, and values from it are unknown


def _samples_per_second(pace: float | None, steps: pa.Table) -> float | None:
    """With as many tokens a sample as in the last 50 steps; None if records do not have their samples."""
    last = steps.slice(max(len(steps) - 50, 0))
    tokens, samples = (
        sum(last[name].to_pylist()) if not last[name].null_count else 0 for name in ("tokens", "samples")
    )
    return pace * samples / tokens if pace and tokens and samples else None


def _get(spec: Any, *keys: str) -> Any:
    for key in keys:
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    return spec


def _why(spec: Any, status: str) -> str:
    """Why a run has no readings of its ranks, and how to get them in the next one."""
    if isinstance(_get(spec, "observe"), Mapping) and _get(spec, "observe", "interval_s") is None:
        return "This run was not monitored: its spec has observe.interval_s: null. Set observe.interval_s: 1.0 for the next one."
    if status == "running":
        return "There is no reading of a rank yet: create the report again in a few seconds."
    return "The run ended before the first reading of a rank: ranks are read every observe.interval_s seconds."


def _versions(run: RunDir, events: Sequence[Event]) -> dict[str, str]:
    """Versions from the ranks and from the newest checkpoint; `report`: the raydist that writes this page."""
    found = {"report": __version__}
    workers: list[dict[str, Any]] = next((e.data["workers"] for e in reversed(events) if e.kind == "workers"), [])
    for name in ("python", "torch"):
        if workers and name in workers[0]:
            found[name] = str(workers[0][name])
    newest = manifest.read_newest(run)
    return {**found, **(newest.versions if newest else {}), **found}  # first what a reader looks for


def _evals(events: Sequence[Event], last: int) -> dict[int, float]:
    return {step: loss for step, loss in summary.evals(events).items() if step <= last}


def _moments(happened: Sequence[Mapping[str, Any]], readings: Readings) -> list[tuple[float, str, bool]]:
    """Of incidents with a step, or at a time when their attempt's ranks had readings; a failure is after its step."""
    found = []
    for one in happened:
        step, critical = one["step"], one["severity"] == "critical"
        if step is None and (tracks := readings.of(one["attempt"])):
            step = float(np.interp(one["at"], tracks[0].at, tracks[0].step))
        if step:
            found.append((step + 0.5 * critical, one["kind"], critical))
    return found


def _trained(segments: Sequence[Segment]) -> dict[int, int]:
    return {s.attempt: s.rows["step"][-1].as_py() for s in segments if s.rows.num_rows}


def _memory(readings: Readings, column: str) -> list[dict[str, Any]]:
    """Minimum, median and maximum of each rank, in bytes."""
    found = []
    for rank in sorted({track.rank for track in readings.tracks}):
        values = np.concatenate([t.values[column] for t in readings.tracks if t.rank == rank])
        values = values[np.isfinite(values)]
        if len(values):
            figures = {"least": values.min(), "median": np.median(values), "most": values.max()}
            host = next(t.host for t in reversed(readings.tracks) if t.rank == rank)
            found.append({"rank": rank, "host": host, **{name: int(value) for name, value in figures.items()}})
    return found


def _communication(readings: Readings) -> list[dict[str, Any]]:
    """For each kind of collective, means over ranks of the totals of all attempts.

    Keys: op, count, bytes, seconds, exposed_seconds, algbw and busbw (bytes/s), exposed_share (of the ranks' time), and
    most_exposed: the rank that waited longest, and its seconds.
    """
    columns = [f"{op}_{name}" for op in OPS for name in COMM]
    totals: dict[int, dict[str, float]] = {}
    for track in readings.tracks:
        own = totals.setdefault(track.rank, dict.fromkeys([*columns, "time"], 0.0))
        for name in columns:
            known = track.values[name][np.isfinite(track.values[name])]
            own[name] += float(known[-1]) if len(known) else 0.0
        own["time"] += sum(float(track.counter(name)[-1]) for name in ("compute", "exposed", "data", "eval", "save"))
    found = []
    for op in OPS:
        if not any(own[f"{op}_count"] for own in totals.values()):
            continue
        mean = {name: float(np.mean([own[f"{op}_{name}"] for own in totals.values()])) for name in COMM}
        spent = float(np.mean([own["time"] for own in totals.values()]))
        worst = max(totals, key=lambda rank: totals[rank][f"{op}_exposed_seconds"])
        found.append(
            {
                "op": op,
                **{name: mean[name] for name in ("count", "bytes", "seconds", "exposed_seconds")},
                "algbw": mean["bytes"] / mean["seconds"] if mean["seconds"] else None,
                "busbw": mean["wire_bytes"] / mean["seconds"] if mean["seconds"] else None,
                "exposed_share": mean["exposed_seconds"] / spent if spent else None,
                "most_exposed": {"rank": worst, "seconds": totals[worst][f"{op}_exposed_seconds"]},
            }
        )
    return found
