"""Applies all rules to the rows of a run as they arrive, and returns each finding once.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from raydist import registry
from raydist.diagnosis._gpu import GpuErrors
from raydist.diagnosis._history import BIN_S, WARMUP_S, History, Window
from raydist.records import Finding


class Diagnosis:
    """`observe` takes the newest rows; not thread-safe. `bin_s` and `warmup_s`: see History."""

    def __init__(self, bin_s: float = BIN_S, warmup_s: float = WARMUP_S) -> None:
        self._rules: list[Callable[[Window], Finding | None]] = []
        columns: list[str] = []
        for name in registry.names("diagnosis"):
            self._rules.append(registry.load("diagnosis", name))
            columns += import_module(f"raydist.diagnosis.{name}").COLUMNS
        self._history = History(columns, bin_s, warmup_s)
        self._gpus = GpuErrors()
        self._reported: set[tuple[int, str, int | None, str]] = set()
        self._attempt = -1

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
        """The new findings: once per attempt for each rule, rank and kind; GPU errors each time they occur."""
        rows = list(rows)
        yield from self._gpus.observe(rows)
        self._attempt = max([self._attempt, *(row["attempt"] for row in rows if row["kind"] == "rank")])
        self._history.add(rows)
        for window in self._history.windows():
            for check in self._rules:
                finding = check(window)
                if finding is None:
                    continue
                key = self._attempt, finding.rule, finding.rank, str(finding.figures.get("kind", ""))
                if key not in self._reported:
                    self._reported.add(key)
                    yield finding
