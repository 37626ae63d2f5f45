"""Examines a run from its folder alone: replays its telemetry, steps and events through the rules, as its monitor sees them.

Runs anywhere: plain python, numpy and pyarrow. While the run trains, and after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from raydist.diagnosis._engine import SEVERITIES, Diagnosis, DiagnosticRule
from raydist.diagnosis._loads import SEGMENTS
from raydist.diagnosis._losses import BEFORE
from raydist.diagnosis._window import BIN_S, RECENT
from raydist.records import Event, Finding
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import SINGLE, Segment, read_events, read_segments
from raydist.run.telemetry_log import read_samples
from raydist.run.telemetry_schema import COLUMNS, WHO

MOST_ROWS = 2_000_000
"""Of telemetry that are replayed, the newest: about a minute of work."""
CHUNKS = 2000
"""Of a run without telemetry."""


@dataclass(slots=True)
class Found:
    """A finding, when it was found, and when it was over; None: it lasts, or it is of a moment."""

    finding: Finding
    since: float
    until: float | None = None

    def danger(self, end: float) -> tuple[int, float]:
        """For ordering, the largest first: severity, then the time that it has cost."""
        seconds = max((self.until or end) - self.since, 0.0)
        return SEVERITIES.index(self.finding.severity), seconds * (self.finding.lost or 0.0)


@dataclass(slots=True)
class Examination:
    """`found`: the worst first. `looked`: what was looked at, in words; `blind`: what cannot be checked, and why."""

    found: list[Found] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)


def examine(run: RunDir) -> Examination:
    """All findings of a run so far. Raises StorageError."""
    spec = _spec(run)
    diagnosis = Diagnosis(spec=spec)
    events = [event for event in read_events(run) if event.kind != "histograms"]
    segments = read_segments(run, SINGLE)
    known = read_segments(run, ("expert_loads",), newest=SEGMENTS)
    loads = {each.number: column for each in known if (column := each.rows["expert_loads"]).null_count < len(column)}
    rows, left_out = _rows(run, diagnosis.rules)
    found: dict[Any, Found] = {}
    past: list[Found] = []
    end = max([rows[-1]["at"] if rows else 0.0, *(event.at for event in events)], default=0.0)
    for at, own, steps, happened in _chunks(rows, segments, loads, events):
        for finding in diagnosis.observe(own, steps, happened):
            _note(found, past, finding, at)
    # What the run's monitor has reported, and a replay cannot see: telemetry that was lost or thinned, findings of own code.
    for event in events:
        if event.kind == "finding":
            _add_told(found, past, Finding.from_dict(event.data), event.at)
    every = [*past, *found.values()]
    made = Examination(sorted(every, key=lambda one: one.danger(end), reverse=True))
    _describe(made, diagnosis, rows, segments, events, left_out, spec)
    return made


def _note(found: dict[Any, Found], past: list[Found], finding: Finding, at: float) -> None:
    key = finding.key
    if finding.state == "over":
        if key in found:
            one = found.pop(key)
            one.until = at
            past.append(one)
    elif key in found:
        found[key].finding = finding
    else:
        found[key] = Found(finding, at)


def _add_told(found: dict[Any, Found], past: list[Found], finding: Finding, at: float) -> None:
    """Unless the replay has found it, too."""
    known = [one for one in [*past, *found.values()] if one.finding.key == finding.key]
    if not known and finding.state != "over":
        found[finding.key] = Found(finding, at)
    elif finding.state == "over" and finding.key in found and found[finding.key].since < at:
        _note(found, past, finding, at)


def _spec(run: RunDir) -> Mapping[str, Any]:
    """The resolved job as plain data; {} if it cannot be read: rules then judge without its settings."""
    try:
        found = yaml.safe_load(run.storage.read(SPEC))
    except (FileNotFoundError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _rows(run: RunDir, rules: Sequence[DiagnosticRule]) -> tuple[list[dict[str, Any]], float | None]:
    """The rows that the rules need, by time, and the time before which rows were left out, if any."""
    asked = {name for rule in rules for name in (*rule.columns, *rule.long)}
    more = ("gpu_xid_count", "gpu_xid", "gpu_ecc_errors")
    shares = tuple(n for n in COLUMNS if n.endswith(("_exposed_seconds",)))
    phases = tuple(f"{phase}_seconds" for phase in ("data", "forward", "backward", "update", "eval", "save"))
    columns = [*WHO, *sorted({*asked, *more, *shares, *phases})]
    table = read_samples(run, columns)
    left_out = None
    if table.num_rows > MOST_ROWS:
        table = table.slice(table.num_rows - MOST_ROWS)
        left_out = float(pc.min(table["at"]).as_py())
    return table.to_pylist(), left_out


def _step_times(
    segments: Sequence[Segment], loads: Mapping[int, pa.ChunkedArray], events: Sequence[Event]
) -> list[tuple[float, dict[str, Any]]]:
    """(Unix time of its end, row) of each step in the order of writing, those that a restart voided too: from the seconds of the
    steps, and from the events that name a step. `loads`: by a segment's number the experts' loads of its rows."""
    begun = {event.data["attempt"]: event.at for event in events if event.kind == "first_step"}
    started = {event.data["attempt"]: event.at for event in events if event.kind == "attempt_started"}
    at_step: dict[int, float] = {}
    for event in events:
        if event.kind in ("eval", "checkpoint_saved") and "step" in event.data:
            at_step[event.data["step"]] = event.at
    found: list[tuple[float, dict[str, Any]]] = []
    now, attempt = 0.0, -1
    for segment in segments:
        of_experts = loads.get(segment.number, ())
        for index, row in enumerate(segment.rows.to_pylist()):
            if index < len(of_experts) and of_experts[index].is_valid:
                row["expert_loads"] = of_experts[index]
            if row["attempt"] != attempt:
                attempt = row["attempt"]
                now = max(now, begun.get(attempt, started.get(attempt, now)))
            else:
                now += row["seconds"] or 0.0
            if at_step.get(row["step"], 0.0) - now < 3600:  # of this attempt
                now = max(now, at_step.get(row["step"], 0.0))
            found.append((now, row))
    return found


def _chunks(
    rows: list[dict[str, Any]],
    segments: Sequence[Segment],
    loads: Mapping[int, pa.ChunkedArray],
    events: Sequence[Event],
) -> Iterator[tuple[float, list[Any], list[Any], list[Event]]]:
    """(time, rows, steps, events) as a monitor gets them: every BIN_S where there are rows, else in at most CHUNKS parts."""
    steps = _step_times(segments, loads, events)
    times = [row["at"] for row in rows] or [at for at, _ in steps] + [event.at for event in events]
    if not times:
        return
    width = BIN_S if rows else max(BIN_S, (max(times) - min(times)) / CHUNKS)
    edges = np.unique(np.floor(np.asarray(times) / width)) * width + width
    edges[-1] = np.inf

    def cut(values: Sequence[float]) -> Any:
        return np.searchsorted(np.maximum.accumulate(values) if len(values) else [], edges, side="left")

    of_rows, of_steps = cut([row["at"] for row in rows]), cut([at for at, _ in steps])
    of_events = cut([event.at for event in events])
    a = b = c = 0
    for edge, i, j, k in zip(edges, of_rows, of_steps, of_events, strict=True):
        at = float(edge) if np.isfinite(edge) else max([*times, *(event.at for event in events)])
        yield at, rows[a:i], [row for _, row in steps[b:j]], list(events[c:k])
        a, b, c = i, j, k


def _describe(
    made: Examination,
    diagnosis: Diagnosis,
    rows: Sequence[Mapping[str, Any]],
    segments: Sequence[Segment],
    events: Sequence[Event],
    left_out: float | None,
    spec: Mapping[str, Any],
) -> None:
    """What was looked at, and what cannot be checked."""
    steps = sum(segment.rows.num_rows for segment in segments)
    attempts = sum(event.kind == "attempt_started" for event in events)
    made.looked.append(f"{_some(steps, 'step')} of {_some(attempts, 'attempt')}, and {_some(len(events), 'event')}")
    ranks = {(row["rank"], row["attempt"]) for row in rows if row["kind"] == "rank"}
    if rows:
        count = {kind: len({_subject(row) for row in rows if row["kind"] == kind}) for kind in ("node", "gpu")}
        seconds = rows[-1]["at"] - rows[0]["at"]
        many = len({rank for rank, _ in ranks})
        who = f"{_some(many, 'rank')}, {_some(count['node'], 'node')} and {_some(count['gpu'], 'GPU')}"
        made.looked.append(f"{_some(len(rows), 'reading')} of {who} over {seconds:,.0f} s")
    made.looked.append(f"{len(diagnosis.rules)} rules: {', '.join(rule.name for rule in diagnosis.rules)}")
    made.looked.append("errors that the GPU driver reports (XID, ECC)")
    needs = [rule.name for rule in diagnosis.rules if rule.columns or rule.long]
    if not spec:
        made.blind.append("spec.yaml cannot be read: rules judge without the job's settings")
    if not ranks:
        why = (
            "observe.interval_s is null"
            if (spec.get("observe") or {}).get("interval_s", 1) is None
            else "none was recorded"
        )
        made.blind.append(f"no telemetry of ranks ({why}), so not: {', '.join(needs)}")
    else:
        known = {name for name in COLUMNS if any(row.get(name) is not None for row in rows)}
        kernel = ("run_delay_seconds", "throttled_seconds", "gc_seconds", "stopped_count", "link_queue_bytes")
        gone = [name for name in kernel if name not in known]
        if gone:
            made.blind.append(
                f"{', '.join(gone)} are not recorded: the run is of an earlier version, or its kernel or container has none "
                "(no quota, no peer on another host); causes are judged by the rest"
            )
        if not any(row["kind"] == "gpu" for row in rows):
            made.blind.append(
                "no GPUs, so not: gpu_throttled, gpu_ecc_retries, gpu_shared, pcie_narrow, nvlink_narrow, fragmentation"
            )
        long = _longest(rows)
        if long < 2 * RECENT * BIN_S + 9:
            made.blind.append(
                f"{long:.0f} s of telemetry in an attempt are too short to compare ranks; it takes about 30 s"
            )
        if long < 34 * 60:
            made.blind.append("leak: it takes 34 minutes")
        if len({rank for rank, _ in ranks}) < 2:
            made.blind.append("one rank has no peers, so not: a slow rank or a slow link")
    if steps <= 2 * BEFORE:
        made.blind.append(f"{steps} steps are too few to judge the loss; it takes {2 * BEFORE + 1}")
    if (spec.get("observe") or {}).get("histograms"):
        made.blind.append(
            "layer_gradients and layer_activations are judged while a run trains: histograms are not kept; what was reported "
            "then is listed"
        )
    if left_out is not None:
        made.blind.append(
            f"telemetry before Unix time {left_out:.0f} is not replayed: only the newest {MOST_ROWS:,} readings are"
        )
    for rule, problem in diagnosis.problems.items():
        made.blind.append(f"{rule} has failed: {problem}")


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _subject(row: Mapping[str, Any]) -> Any:
    return row["node"], row.get("gpu") if row["kind"] == "gpu" else None


def _longest(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of telemetry of a rank in one attempt, at most."""
    first: dict[Any, float] = {}
    longest = 0.0
    for row in rows:
        if row["kind"] == "rank":
            begun = first.setdefault((row["rank"], row["attempt"]), row["at"])
            longest = max(longest, row["at"] - begun)
    return longest
