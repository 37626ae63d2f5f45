"""The live page of a sweep: the parts of its report, with links to the pages of its runs.

Runs anywhere. Reads the sweep's folder; must not import torch or ray.
"""

from __future__ import annotations

from urllib.parse import quote

from raydist.dashboard.document import Parts, parts
from raydist.report.html import sweep as pages
from raydist.report.html.svg import Child, tag
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
    return parts(f"{summary['sweep']}: {words}", pages.parts(summary, curves(summary, pages.MOST), link), ended=ended)
