"""Tokens of each expert at the newest steps, for the rules that look at them.

Runs anywhere: plain python, numpy and pyarrow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydist.records import Event

KEPT = 40
SPACING = 10
"""Least steps between two records that are kept: those of adjacent steps are much alike."""
SEGMENTS = 64
"""Newest segments of a run that has ended, whose loads are replayed: up to 64 M numbers."""


class Loads:
    """The newest KEPT records; those of steps that a restart voided are left out."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, list[Sequence[int]]]] = deque(maxlen=KEPT)
        self._names: list[str] = []

    def step(self, row: Mapping[str, Any]) -> None:
        """A row of the steps' table, in the order of writing. Its `expert_loads` may be a value of pyarrow."""
        self._keep(row["step"], row.get("expert_loads"))

    def event(self, event: Event) -> None:
        """The layers' names; or the loads, of a run of an earlier version."""
        if event.kind == "experts":
            self._names = list(event.data["layers"])
        elif event.kind == "expert_loads":
            self._names = list(event.data["layers"])
            self._keep(event.data["step"], [layer["loads"] for layer in event.data["layers"].values()])

    def newest(self, count: int) -> dict[str, NDArray[np.int64]]:
        """Layer -> its loads [N, E] at the newest `count` records, oldest first; all have the same N."""
        kept = [loads for _, loads in self._kept][-count:]
        if not kept or {tuple(map(len, loads)) for loads in kept} != {tuple(map(len, kept[-1]))}:
            return {}  # the model has changed
        names = self._names if len(self._names) == len(kept[-1]) else [f"layer {i}" for i in range(len(kept[-1]))]
        return {name: np.array([loads[i] for loads in kept]) for i, name in enumerate(names)}

    def _keep(self, step: int, loads: list[Sequence[int]] | pa.Scalar | None) -> None:
        while self._kept and self._kept[-1][0] >= step:
            self._kept.pop()
        if loads is not None and (not self._kept or step - self._kept[-1][0] >= SPACING):
            self._kept.append((step, loads.as_py() if isinstance(loads, pa.Scalar) else loads))
