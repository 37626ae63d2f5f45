"""The losses of a sweep's best cells over the tokens they have trained.

Runs anywhere. Must not import torch or ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydist.report.summary import evals
from raydist.report.sweep.conclusions import named
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps


@dataclass(frozen=True)
class Curve:
    """`losses` [N] at `tokens` [N], ascending: of held-out text, or of training if there was no evaluation."""

    name: str
    tokens: NDArray[np.float64]
    losses: NDArray[np.float64]


def curves(summary: Mapping[str, Any], most: int) -> list[Curve]:
    """The curves of the first cells of the `most` best points of `results.tell` whose runs exist. Raises StorageError."""
    sign = 1 if summary["objective"]["mode"] == "min" else -1
    known = sorted(
        (row for row in summary["points"] if row["objective"] is not None), key=lambda row: sign * row["objective"]
    )
    found = []
    for row in known[:most]:
        run = RunDir(row["runs"][0])
        if run.exists():
            found.append(_curve(named(row["parameters"]), run))
    return found


def _curve(name: str, run: RunDir) -> Curve:
    rows = read_steps(run, ("tokens", "loss"))
    steps, seen = np.asarray(rows["step"]), np.cumsum(np.asarray(rows["tokens"], dtype=np.float64))
    held_out = {
        step: loss for step, loss in evals(read_events(run)).items() if step <= (steps[-1] if len(steps) else 0)
    }
    if not held_out:
        return Curve(name, seen, np.asarray(rows["loss"], dtype=np.float64))
    at = np.searchsorted(steps, sorted(held_out))
    return Curve(name, seen[at], np.array([held_out[step] for step in sorted(held_out)], dtype=np.float64))
