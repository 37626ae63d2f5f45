"""Values that must be equal bit for bit between runs, after a restart or on another machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raydist.launch.replay import tensors
from raydist.run.directory import RunDir

EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples_hash")
"""The columns of a step's record that must be equal. Seconds and attempts differ between runs."""


def exact(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """The columns EXACT of each record."""
    return [[row[name] for name in EXACT] for row in rows]


def weights(run: RunDir, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint as bytes: model and optimizer state, without random states."""
    return {name: whole.tobytes() for name, whole in tensors(run, step)}
