"""The ranks of a run side by side: their memory over time, and how slow each was over the steps.

Runs anywhere. Pure.
"""

from __future__ import annotations

import math

import numpy as np

from raydist.report import text
from raydist.report.heatmap_data import SLOW, Grid
from raydist.report.html import axes, heatmap
from raydist.report.html.lines import Mark
from raydist.report.html.page import missing, table
from raydist.report.html.svg import Markup, tag
from raydist.report.run_metrics import Report

_MEMORY = {
    "gpu_process_bytes": "what the rank's process has in use on its GPU, by NVML",
    "reserved_bytes": "what torch's allocator holds on the rank's device",
    "rss_bytes": "resident memory of the rank's process",
}
_NARROW = 0.75
"""The scale of memory begins at no more than this share of its most: a small change is no large one."""
_SPREAD = math.log2(2.0)
"""Ends of the scale of slowness: half as slow, and twice."""
_LISTED = 64


def memory(report: Report) -> Markup | list[Markup | None]:
    """The heat map rank x time, and the figures of each rank."""
    told = report.told
    if report.memory is None:
        return missing(
            told["not_read"]
            or "No reading of a rank has its memory: its process is in another container than the agent."
        )
    column, grid = report.memory[0], report.memory[1].grouped()
    low, high = float(np.nanmin(grid.values)), float(np.nanmax(grid.values))
    low = min(low, _NARROW * high)
    begins = [(a.attempt, a.start) for a in report.spans if a.what in ("startup", "recovery")]
    seen: set[int] = set()
    marks = []
    for attempt, at in begins:
        if attempt not in seen and attempt != report.spans[0].attempt:
            marks.append(Mark(at - report.spans[0].start, f"attempt {attempt}"))
        seen.add(attempt)
    chart = heatmap.chart(
        "Memory",
        grid.values,
        unit=f"rank by time: {_MEMORY[column]}",
        limits=(low, high),
        edges=(0.0, float(grid.edges[-1])),
        x_ticks=axes.time_ticks(0.0, float(grid.edges[-1])),
        x_form=axes.clock,
        x_name="since the first attempt's start",
        rows=grid.rows,
        y_name="rank",
        columns=[f"{axes.clock(a)} to {axes.clock(b)}" for a, b in zip(grid.edges[:-1], grid.edges[1:], strict=True)],
        form=text.size,
        legend=[(low, text.size(low)), (high, text.size(high))],
        about="memory of each rank over time; the table below has its least, median and most",
        marks=marks,
    )
    words = f"Each cell is the most that was read in it.{_shared(grid)} Empty: nothing was read there."
    rows = sorted(told["memory"]["ranks"], key=lambda row: row["most"], reverse=True)
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
    """The strip rank x step, and who was slow for a while."""
    told = report.told
    if told["not_read"]:
        return missing(told["not_read"])
    if report.slowness is None:
        return missing("There is nobody to compare with: it takes two ranks, and some readings of them.")
    grid = report.slowness.grouped()
    with np.errstate(divide="ignore"):
        values = np.log2(grid.values)
    values[~np.isfinite(values)] = np.nan
    last = float(grid.edges[-1])
    chart = heatmap.chart(
        "Slowness",
        values,
        unit="rank by step: time of computing over the median rank's",
        scale="middle",
        limits=(-_SPREAD, _SPREAD),
        edges=(0.0, last),
        x_ticks=axes.whole_ticks(0.0, last),
        x_form=axes.short,
        x_name="step",
        rows=grid.rows,
        y_name="rank",
        columns=[
            f"steps {int(a) + 1:,} to {max(int(b), int(a) + 1):,}"
            for a, b in zip(grid.edges[:-1], grid.edges[1:], strict=True)
        ],
        form=lambda value: f"{2**value:.2f} ×",
        legend=[(-_SPREAD, "0.5"), (0.0, "1"), (_SPREAD, "2")],
        about="how long each rank computes for a step, against the median of all ranks in the same steps",
    )
    slow = [
        f"rank {one['rank']}: {one['factor']:.2f} times the median in steps {one['first_step']:,} to {one['last_step']:,}"
        for one in told["slow"]
    ]
    found = "; ".join(slow) if slow else f"No rank computed for {SLOW:g} times as long as the median, for any while"
    words = (
        "Orange ranks hold up the others, which wait for them in collectives; waiting does not count as computing. "
        f"Where the number of ranks is even, the median is the lower one of the two in the middle.{_shared(grid)}"
    )
    return [
        chart,
        tag("p", tag("b", "Slow: ") if slow else None, found, ".", class_="note"),
        tag("p", words, class_="note"),
    ]


def _shared(grid: Grid) -> str:
    return "" if grid.group == 1 else f" Each row has {grid.group} ranks, and shows the highest of them."
