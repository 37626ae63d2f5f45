"""Rules that find problems in a running job from its telemetry: one rule per file, found by its name.

Runs anywhere: plain python and numpy. docs/extending.md explains how to add a rule.

A rule's file has

    COLUMNS: tuple[str, ...]                      # the columns of ranks' rows (raydist.run.telemetry_schema) that it needs
    def check(window: Window) -> Finding | None   # the worst problem in the window, or None

It is called with windows of 32 minutes, 64, 128 and so on, up to 11 days (`History`). A rule is pure: it uses the window only.
Its work is bounded by ranks x BINS numbers. A false finding is worse than a late one.
"""

from __future__ import annotations

from raydist.diagnosis._findings import Diagnosis
from raydist.diagnosis._history import BINS, History, Window

__all__ = ["BINS", "Diagnosis", "History", "Window"]
