"""What is wrong with a run that nobody has noticed yet: one rule a file, found by its name.

Runs anywhere: plain python and numpy. docs/extending.md says how to add one.

A rule's file has

    COLUMNS: tuple[str, ...]                      # columns of raydist.run.telemetry_schema, of rows of ranks, that it wants to see
    def check(window: Window) -> Finding | None   # the worst that it sees there, or None

and is called with windows of 32 minutes, 64, 128 and so on, up to 11 days (`History`). A rule is pure: what it needs to know is in
the window. Its work is bounded by ranks x BINS numbers. A false finding is worse than a late one.
"""

from __future__ import annotations

from raydist.diagnosis._findings import Diagnosis
from raydist.diagnosis._history import BINS, History, Window

__all__ = ["BINS", "Diagnosis", "History", "Window"]
