"""A user's own package: a small GPT that kills its rank at a given place, once.

`model.options`: {"kill": [[rank, where, n], ...], "hold": n or null, "marks": folder}. `where` is "step" (this process's n-th
forward pass of a whole micro-batch) or "fsync" (its n-th fsync of a file of a checkpoint). Each kill happens once, because it
leaves a file in `marks`. In its `hold`-th forward pass a rank waits for a file: `go` for all ranks, `go-HOST-PID` for its own
process.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydist.spec import ModelSpec
from raydist.worker.model import gpt


class Faults:
    """The kills of this rank, and how often it has passed each place."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.marks = Path(options["marks"])
        rank = int(os.environ["RANK"])
        self.due = [(where, n, f"{r}-{where}-{n}") for r, where, n in options.get("kill", []) if r == rank]
        self.seen = {"step": 0, "fsync": 0}
        self.hold = options.get("hold")

    def passed(self, where: str) -> None:
        """Counts one more pass of the place; kills this process if a kill is due."""
        self.seen[where] += 1
        free = [self.marks / name for name in ("go", f"go-{socket.gethostname()}-{os.getpid()}")]
        while where == "step" and self.seen[where] == self.hold and not any(mark.exists() for mark in free):
            time.sleep(0.02)  # another process creates the file
        for place, n, name in self.due:
            mark = self.marks / name
            if place == where and n == self.seen[where] and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Faulty(nn.Module):
    """The GPT, which counts each training forward of a whole micro-batch."""

    def __init__(self, inner: nn.Module, faults: Faults, micro_batch: int) -> None:
        super().__init__()
        self.inner, self.micro_batch = inner, micro_batch
        self.tensor_rules = {f"inner.{pattern}": kind for pattern, kind in gpt.GPT.tensor_rules.items()}
        self.faults = faults

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """tokens_BT -> logits_BTV."""
        if self.training and len(tokens_BT) == self.micro_batch:
            self.faults.passed("step")
        return self.inner(tokens_BT)  # type: ignore[no-any-return]


def plain(model: ModelSpec) -> ModelSpec:
    """The model section without this module's options."""
    return model.model_copy(update={"options": {}})


def check_tensor(model: ModelSpec, ranks: int) -> None:
    """Any number of ranks may split it."""


def build(model: ModelSpec, vocab_size: int) -> nn.Module:
    """The model of `model.name: faulty:build`."""
    print(f"the model of rank {os.environ['RANK']}")
    faults = Faults(model.options)
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            faults.passed("fsync")
        fsync(descriptor)

    os.fsync = counted
    return Faulty(gpt.build(plain(model), vocab_size), faults, micro_batch=int(model.options["micro_batch"]))


def unloadable(model: ModelSpec, vocab_size: int) -> nn.Module:
    """A build that raises, because the weights that it loads do not fit its modules."""
    made = nn.Linear(model.width, vocab_size, bias=False)
    made.load_state_dict({})
    return made


def broken(model: ModelSpec, vocab_size: int) -> nn.Module:
    """A model whose forward raises on rank 1, in every attempt."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt.build(plain(model), vocab_size)
            self.calls = 0

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            """Raises in the third training forward on rank 1."""
            self.calls += self.training
            if os.environ["RANK"] == "1" and self.calls == 5:
                raise KeyError("a bug in the user's model")
            return self.inner(tokens_BT)  # type: ignore[no-any-return]

    return Broken()
