"""How a run spent its time, from the start of its first attempt to its end: parts that add up to the whole.

Runs anywhere. Pure: no I/O, no clock. docs/how-to/report.md has the definitions.

    attempt 1     start-up | trained                        | lost
    attempt 2                                                 starts, repeats | trained             | the end

Each moment belongs to one span. In a span that trained steps, the steps' own seconds (records of rank 0) count as good; the
ranks' telemetry divides them into parts. Time without a record or a reading is `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydist.records import Event
from raydist.report.telemetry_reader import Readings
from raydist.run.log import Segment

PARTS = ("compute", "exposed", "data", "eval", "checkpoint", "recovery", "startup", "other", "unknown")
"""In the order of display."""
_GOOD = ("compute", "exposed", "data")

What = Literal["startup", "recovery", "trained", "paused"]


@dataclass(frozen=True, slots=True)
class Span:
    """From Unix time `start` to `end`. `steps`: the first and the last new step that was trained in it, if any."""

    what: What
    attempt: int
    start: float
    end: float
    steps: tuple[int, int] | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Attempt:
    number: int
    begun: float
    after: What
    """The kind of the time until its first new step: start-up, or recovery from the end of the previous attempt."""
    events: list[Event]
    over: float
    """When it was over: the start of the next attempt, or the end of the run."""
    idle: float
    """From here until `over` the run had no driver: it was paused."""


def spans(events: Sequence[Event], segments: Sequence[Segment], now: float) -> list[Span]:
    """The run's time in order, without gaps. `now`: the end of the known time of a run that has not ended. [] without attempts."""
    trained = _trained(segments)
    attempts = _attempts(events, now)
    found: list[Span] = []
    newest = 0
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=False):
        rows = trained.get(attempt.number)
        first = next((e for e in attempt.events if e.kind == "first_step"), None)
        live = min(attempt.idle, attempt.over)
        if first is None or rows is None:
            found.append(Span(attempt.after, attempt.number, attempt.begun, live))
        else:
            newest = max(newest, first.data["step"] - 1 + first.data["repeated_steps"])
            found += _training_spans(attempt, following, rows, first.at, newest, live)
        if attempt.over > live:
            found.append(Span("paused", attempt.number, live, attempt.over))
        newest = max(newest, int(rows["step"][-1]) if rows is not None else 0)
    return [span for span in found if span.seconds > 0]


def _training_spans(
    attempt: _Attempt,
    following: _Attempt | None,
    rows: Mapping[str, NDArray[Any]],
    first_done: float,
    newest: int,
    live: float,
) -> list[Span]:
    """The spans of an attempt that trained. `newest`: the last step that an earlier attempt trained."""
    step, seconds = rows["step"], rows["seconds"]
    new = step > newest
    if not new.any():
        return [Span(attempt.after, attempt.number, attempt.begun, live)]
    began = _done(rows, first_done, attempt.events, int(step[new][0])) - float(seconds[new][0])
    began = min(max(began, attempt.begun), live)
    ended = live
    failed = next((e.at for e in attempt.events if e.kind == "failure"), None)
    lost = failed is not None or (following is not None and live == attempt.over)
    if lost:
        ended = _done(rows, first_done, attempt.events, int(step[-1]))
        # The next attempt's stages contain the time since which the failed rank made no progress.
        up = next((e for e in following.events if e.kind == "first_step"), None) if following else None
        if up is not None and "detect" in up.data["stages"]:
            ended = max(ended, up.at - up.data["seconds"])
        ended = max(began, min(ended, live if failed is None else failed))
    spans = [
        Span(attempt.after, attempt.number, attempt.begun, began),
        Span("trained", attempt.number, began, ended, (int(step[new][0]), int(step[-1]))),
    ]
    if lost:
        spans.append(Span(following.after if following else "recovery", attempt.number, ended, live))
    return spans


def _done(rows: Mapping[str, NDArray[Any]], first_done: float, events: Sequence[Event], step: int) -> float:
    """Unix time at which `step` was done, from the seconds of the steps after the first one and from evaluations in between."""
    at, last = first_done, int(rows["step"][0])
    took = np.cumsum(rows["seconds"])

    def since(other: int) -> float:
        i, j = np.searchsorted(rows["step"], (other, step), side="right") - 1
        return float(took[max(j, 0)] - took[max(i, 0)])

    found = at + since(last)
    for event in events:
        if event.kind == "eval" and last <= event.data["step"] < step:
            found = max(found, event.at + since(event.data["step"]))
    return found


def _attempts(events: Sequence[Event], now: float) -> list[_Attempt]:
    starts = [i for i, event in enumerate(events) if event.kind == "attempt_started"]
    found: list[_Attempt] = []
    after: What = "startup"
    for start, stop in zip(starts, [*starts[1:], len(events)], strict=False):
        own = list(events[start:stop])
        last = stop == len(events)
        ended = next((e for e in own if e.kind == "ended"), None)
        over = events[stop].at if not last else ended.at if ended else max(now, own[-1].at)
        # A run that was paused, or that finished and was extended later, was not meant to train in between.
        rests = ended is not None and ended.data["status"] not in ("stopped", "lost")
        idle = ended.at if ended is not None and rests else over
        number = own[0].data["attempt"]
        found.append(_Attempt(number, own[0].at, after, own, over, idle))
        failed = any(e.kind == "failure" for e in own)
        planned = any(e.kind == "decision" and e.data["action"] in ("leave", "grow") for e in own)
        after = "startup" if rests or (planned and not failed) else "recovery"
    return found


def _trained(segments: Sequence[Segment]) -> dict[int, dict[str, NDArray[Any]]]:
    """Attempt -> its own steps, including those that a later attempt trained again."""
    by_attempt: dict[int, list[pa.Table]] = {}
    for segment in segments:
        if segment.rows.num_rows:
            by_attempt.setdefault(segment.attempt, []).append(segment.rows)
    names = ("step", "seconds", "data_seconds")
    return {
        number: {name: pa.concat_tables(tables)[name].to_numpy() for name in names}
        for number, tables in by_attempt.items()
    }


def divided(
    spans: Sequence[Span], events: Sequence[Event], segments: Sequence[Segment], readings: Readings
) -> dict[str, float]:
    """Seconds of each of PARTS. They add up to the seconds of all spans except the paused ones."""
    trained = _trained(segments)
    found = dict.fromkeys(PARTS, 0.0)
    for span in spans:
        if span.what == "trained":
            stalls = sum(
                e.data["stall_seconds"]
                for e in events
                if e.kind == "checkpoint_saved" and span.start <= e.at <= span.end
            )
            for name, seconds in _parts(span, trained[span.attempt], stalls, readings).items():
                found[name] += seconds
        elif span.what != "paused":
            found[span.what] += span.seconds
    return found


def goodput(parts: Mapping[str, float]) -> float | None:
    """Share of the time in which new steps were trained, including its undivided part; None if there is no time."""
    whole = sum(parts.values())
    return sum(parts[name] for name in (*_GOOD, "unknown")) / whole if whole > 0 else None


def _parts(span: Span, rows: Mapping[str, NDArray[Any]], stalls: float, readings: Readings) -> dict[str, float]:
    assert span.steps is not None
    first, last = span.steps
    inside = (rows["step"] >= first) & (rows["step"] <= last)
    whole = min(float(rows["seconds"][inside].sum()), span.seconds)
    rest = span.seconds - whole
    read = readings.grown(span.attempt, int(rows["step"][0]), first, last)
    if read is None:
        data = min(float(rows["data_seconds"][inside].sum()), whole)
        stalls = min(stalls, rest)
        return {"data": data, "checkpoint": stalls, "unknown": whole - data, "other": rest - stalls}
    until = int(read["until"])
    known = min(float(rows["seconds"][inside & (rows["step"] <= until)].sum()), whole)
    spent = sum(read[name] for name in _GOOD)
    found = {name: known * read[name] / spent if spent else 0.0 for name in _GOOD}
    found["unknown"] = whole - (known if spent else 0.0)
    between = read["eval"] + read["save"]
    factor = min(1.0, rest / between) if between else 0.0
    found["eval"], found["checkpoint"] = factor * read["eval"], factor * read["save"]
    found["other"] = rest - found["eval"] - found["checkpoint"]
    return found
