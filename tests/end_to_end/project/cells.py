"""Models for a sweep's cells: a small GPT that works, is killed once, has a bug, runs out of memory, or waits for a file.

`model.options` has `marks`, a folder in which each process creates a file, with its own pid and its parent's.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import faulty
import torch
from torch import nn

from raydist.spec import ModelSpec
from raydist.worker.model import gpt

_SEQUENCES, _STEP = 8, 4
"""The sequences of a step, and its forward passes."""


def _build(model: ModelSpec, vocab_size: int, kind: str, **options: object) -> nn.Module:
    marks = Path(model.options["marks"])
    (marks / f"{kind}-{os.getpid()}-below-{os.getppid()}").touch()
    faults = faulty.Faults({"marks": str(marks), **options})
    return faulty.Faulty(gpt.build(faulty.plain(model), vocab_size), faults, micro_batch=2)


def sound(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Trains without a fault."""
    return _build(model, vocab_size, "sound")


def dying(model: ModelSpec, vocab_size: int) -> nn.Module:
    """SIGKILL in its eighth step, once."""
    return _build(model, vocab_size, "dying", kill=[[0, "step", 8 * _STEP]])


def waiting(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Waits in the eighth step of each of its processes until the file `go` is in `marks`."""
    return _build(model, vocab_size, "waiting", hold=8 * _STEP)


def unhurried(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Takes most of a second for each step, which has _STEP passes."""
    made = _build(model, vocab_size, "unhurried")

    def sleeping(*_: object) -> None:
        if made.training:
            time.sleep(0.2)

    made.register_forward_pre_hook(sleeping)
    return made


def later(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Trains without a fault in the sweep's first process, and waits as `waiting` in all others."""
    first = not list(Path(model.options["marks"]).glob("later-*"))
    return _build(model, vocab_size, "later", **({} if first else {"hold": 8 * _STEP}))


def broken(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Raises in its second step."""
    made = _build(model, vocab_size, "broken")

    def raising(*_: object) -> None:
        if made.training and made.faults.seen["step"] > _STEP:  # type: ignore[union-attr]
            raise KeyError("a bug in the user's model")

    made.register_forward_pre_hook(raising)
    return made


def hungry(model: ModelSpec, vocab_size: int) -> nn.Module:
    """Runs out of memory with more than one sequence; its first three processes raise in their second step."""
    made, marks = _build(model, vocab_size, "hungry"), Path(model.options["marks"])
    passes = itertools.count(1)

    def limited(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if not made.training:
            return
        if len(inputs[0]) > 1:
            raise MemoryError("two sequences are too many")
        if next(passes) == _SEQUENCES + 2 and len(list(marks.glob("raised-*"))) < 3:
            (marks / f"raised-{os.getpid()}").touch()
            raise KeyError("a bug in the user's model")

    made.register_forward_pre_hook(limited)
    return made
