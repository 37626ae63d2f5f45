"""The ranks of a run side by side: their memory over time, and their slowness over the steps.

Runs anywhere. Pure.
"""

from __future__ import annotations

import math

import numpy as np

from raydist.report import text
from raydist.report.heatmap_data import Grid
from raydist.report.html import charts
from raydist.report.html.charts import Across, Form, Mark
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import missing, table
from raydist.report.run_metrics import Report

_MEMORY = {
    "gpu_process_bytes": "memory that the rank's process uses on its GPU, from NVML",
    "reserved_bytes": "memory reserved by torch's allocator on the rank's device",
    "rss_bytes": "resident memory of the rank's process",
}
_SHARES = {
    "compute": (
        "Compute",
        "share in forward, backward and update, without exposed communication",
        "A rank that computes more than the others is waited for.",
    ),
    "exposed": (
        "Exposed communication",
        "share in collectives, not overlapped with compute",
        "Waiting for a slower rank is part of it.",
    ),
    "data": (
        "Data",
        "share in waiting for a batch",
        "Empty cells have no readings: the ranks start, or recover.",
    ),
}
"""Title, what a value is, and how to read it."""
_NARROW = 0.75
"""The memory scale begins at this share of its maximum or lower, so that a small change does not look large."""
_SPREAD = math.log2(2.0)
"""Ends of the scale of slowness: half and twice the median."""
_LISTED = 64
_MARKS = 50
"""Maximum number of incidents in a map: the critical ones, and the newest of the others."""
_MIB = float(1 << 20)


def memory(report: Report) -> Markup | list[Markup | None]:
    """The heat map rank x time, and the figures of each rank."""
    facts = report.facts
    if report.memory is None:
        return missing(
            facts["not_read"]
            or "No reading of a rank contains its memory: its process runs in another container than the agent."
        )
    column, grid = report.memory[0], report.memory[1].grouped()
    grid = Grid(grid.edges, grid.values / _MIB, grid.rows, grid.group)
    low, high = float(np.nanmin(grid.values)), float(np.nanmax(grid.values))
    low = min(low, _NARROW * high)
    chart = _over_time(
        report,
        "Memory",
        grid,
        _MEMORY[column],
        (low, high),
        "mib",
        "memory of each rank over time; the table below has its minimum, median and maximum",
    )
    words = f"Each cell shows the maximum of its readings.{_shared(grid)} Empty cells have no reading."
    rows = sorted(facts["memory"]["ranks"], key=lambda row: row["most"], reverse=True)
    named = table(
        ("rank>", "host", "least>", "median>", "most>"),
        [
            (row["rank"], row["host"], *(text.size(row[name]) for name in ("least", "median", "most")))
            for row in rows[:_LISTED]
        ],
    )
    title = "each rank" if len(rows) <= _LISTED else f"the {_LISTED} ranks with the most"
    return [chart, tag("p", words, class_="note"), tag("details", tag("summary", title), named)]


def slowness(report: Report) -> Markup | list[Markup | None]:
    """The heat map rank x step, and the ranks that were slow for some time."""
    facts = report.facts
    if facts["not_read"]:
        return missing(facts["not_read"])
    if report.slowness is None:
        return missing("Slowness needs at least two ranks, and several readings of them.")
    grid = report.slowness.grouped()
    with np.errstate(divide="ignore"):
        values = np.log2(grid.values)
    values[~np.isfinite(values)] = np.nan
    last = float(grid.edges[-1])
    ends = zip(grid.edges[:-1], grid.edges[1:], strict=True)
    columns = [f"steps {int(a) + 1:,} to {max(int(b), int(a) + 1):,}" for a, b in ends]
    chart = charts.heat(
        "Slowness",
        charts.Grid(values, grid.rows, columns, (-_SPREAD, _SPREAD), "power", "middle"),
        Across("step", ends=(0.0, last)),
        unit="rank by step: compute time relative to the median rank",
        y_name="rank",
        about="compute time of each rank per step, relative to the median of all ranks in the same steps",
    )
    slow = [one["what"] for one in facts["slow"]]
    more = [f"and {len(slow) - _LISTED} more"] if len(slow) > _LISTED else []
    found = "; ".join(slow[:_LISTED] + more) if slow else "No rank was found to be slow (`raydist doctor`)"
    words = (
        "The other ranks wait in collectives for the orange ranks; waiting does not count as computing. "
        f"For an even number of ranks, the median is the lower of the two in the middle.{_shared(grid)}"
    )
    return [
        chart,
        tag("p", tag("b", "Slow: ") if slow else None, found, ".", class_="note"),
        tag("p", words, class_="note"),
    ]


def shares(report: Report) -> list[list[Markup]]:
    """The heat maps rank x time of compute, exposed communication and data; none without readings."""
    made = []
    for name, one in (report.shares or {}).items():
        grid, (title, about, words) = one.grouped(), _SHARES[name]
        chart = _over_time(report, title, grid, about, (0.0, 1.0), "percent", f"{title} of each rank over time")
        made.append([chart, tag("p", f"{words}{_shared(grid)}", class_="note")])
    return made


def _over_time(
    report: Report, title: str, grid: Grid, about: str, limits: tuple[float, float], form: Form, described: str
) -> Markup:
    """A heat map rank x time with the attempts and the incidents. `about`: what a value is; `described`: for screen readers."""
    seen: set[int] = set()
    marks = []
    for attempt, at in [(span.attempt, span.start) for span in report.spans if span.what in ("startup", "recovery")]:
        if attempt not in seen and attempt != report.spans[0].attempt:
            marks.append(Mark(at - report.spans[0].start, f"attempt {attempt}"))
        seen.add(attempt)
    happened = [(one["severity"] == "critical", one["at"], one["kind"]) for one in report.facts["incidents"]]
    for critical, at, kind in sorted(happened)[-_MARKS:]:
        marks.append(Mark(at - report.spans[0].start, kind, "bad" if critical else "plain"))
    ends = zip(grid.edges[:-1], grid.edges[1:], strict=True)
    columns = [f"{charts.clock(a)} to {charts.clock(b)}" for a, b in ends]
    return charts.heat(
        title,
        charts.Grid(grid.values, grid.rows, columns, limits, form),
        Across("since the first attempt's start", "clock", "time", (0.0, float(grid.edges[-1]))),
        unit=f"rank by time: {about}",
        y_name="rank",
        about=described,
        marks=marks,
    )


def _shared(grid: Grid) -> str:
    return "" if grid.group == 1 else f" Each row has {grid.group} ranks, and shows their highest value."
