"""Faulty exporters for the tests of raydist.observe.exporter_threads: `tests.observe.strange:Raises`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.observe.exporters import BaseExporter, Facts

SEEN: list[str] = []
"""The calls that `PointResult` has received, over all tests of a process."""
LET_GO = threading.Event()
"""While it is not set, `Hangs` blocks."""


class PointResult(BaseExporter):
    def attempt(self, number: int, resume_step: int, at: float) -> None:
        SEEN.append(f"attempt {number} from {resume_step}")

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        SEEN.extend(f"step {row['step']}" for row in rows)

    def event(self, event: Mapping[str, Any]) -> None:
        SEEN.append(str(event["kind"]))

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        SEEN.extend(f"sample {row['rank']}" for row in rows)

    def flush(self) -> None:
        SEEN.append("flush")

    def close(self) -> None:
        SEEN.append("close")


class Hangs(BaseExporter):
    """Blocks in flush until LET_GO is set."""

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        SEEN.extend(f"step {row['step']}" for row in rows)

    def flush(self) -> None:
        LET_GO.wait(240)


class Raises(BaseExporter):
    """Raises in the first constructor call, in every `samples`, and in the first `flush` of each instance."""

    made = 0

    def __init__(self, facts: Facts) -> None:
        Raises.made += 1
        if Raises.made == 1:
            raise ConnectionError("the other side is away\nand more lines")
        self._flushed = False

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        SEEN.extend(f"step {row['step']}" for row in rows)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        raise ValueError("no samples, please")

    def flush(self) -> None:
        if not self._flushed:
            self._flushed = True
            raise ConnectionError("away again")
        SEEN.append("flush")
