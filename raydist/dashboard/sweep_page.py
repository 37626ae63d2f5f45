"""The live page of a sweep: the parts of its report, with links to the pages of its runs; while it runs, its cost and its end.

Runs anywhere. Reads the sweep's folder; must not import torch or ray.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from raydist.dashboard.document import Parts, parts
from raydist.report import text
from raydist.report.html import sweep as pages
from raydist.report.html.elements import Child, Markup, tag
from raydist.report.html.page import section, table
from raydist.report.sweep import remaining
from raydist.report.sweep.curves import curves
from raydist.report.sweep.results import tell
from raydist.run.sweep_directory import SweepDir


def page(sweep: SweepDir, storage: int) -> Parts:
    """The parts of the page. `storage`: its number in addresses. Raises StorageError, and UsageError if no cell has reported the
    objective."""
    summary = tell(sweep)

    def link(cell: str) -> Child:
        return tag("a", cell, href=f"/cell/{storage}/{quote(sweep.name, safe='')}/{quote(cell, safe='')}")

    counts = summary["counts"]
    words = ", ".join(f"{n:,} {status}" for status, n in counts.items())
    ended = not counts.keys() & {"running", "waiting"}
    made = pages.parts(summary, curves(summary, pages.MOST), link)
    now = time.time()
    if not ended and (left := remaining.tell(sweep, now)) is not None:
        made = {
            "head": made.pop("head"),
            "remaining": section("Cost and end", _forecast(summary, left, now), id="remaining"),
            **made,
        }
    return parts(f"{summary['sweep']}: {words}", made, ended=ended)


def _forecast(summary: dict[str, Any], left: remaining.Remaining, now: float) -> list[Markup]:
    """What the cells have used, and what they will."""
    totals = summary["totals"]
    gpu_hours = totals["gpu_hours"] or 0.0
    rows = [("GPU-hours", f"{gpu_hours:.3g}", f"{left.gpu_hours:.3g}", f"{gpu_hours + left.gpu_hours:.3g}")]
    if left.cost is not None:
        cost = totals["cost"] or 0.0
        rows.append(("cost", f"{cost:.3g}", f"{left.cost:.3g}", f"{cost + left.cost:.3g}"))
    end = datetime.fromtimestamp(now + left.seconds, UTC)
    cells = f"{left.cells:,} cell{'s have' if left.cells > 1 else ' has'} not ended"
    least = " at the latest" if left.most else ""
    why = " A search, a scheduler or a limit may end it sooner." if left.most else ""
    words = f"{cells}: about {text.span(left.seconds)} to go, until {end:%Y-%m-%d %H:%M} UTC{least}.{why}"
    shown = [tag("p", words)]
    return [*shown, table(("", "so far>", "to come>", "in all>"), rows)] if gpu_hours or left.gpu_hours else shown
