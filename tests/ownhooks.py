"""Hooks of tests/worker/test_run_hooks.py, on the ranks."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from raydist.errors import StorageError
from raydist.worker.hooks import BaseHook, HookFacts


class Recorder:
    """Appends each call to a file of its rank, and draws random numbers. Not a BaseHook."""

    def __init__(self, facts: HookFacts) -> None:
        self._path = f"{facts.options['folder']}/{facts.rank}.jsonl"
        self._write("made", facts.step, facts.world_size)

    def _write(self, *what: Any) -> None:
        random.random(), np.random.rand(), torch.rand(3)
        with open(self._path, "a") as file:
            file.write(json.dumps(what) + "\n")

    def on_start(self) -> None:
        self._write("start")

    def on_step(self, record: Any) -> None:
        self._write("step", record.step, record.loss)

    def on_eval(self, step: int, loss: float) -> None:
        self._write("eval", step, loss)

    def on_checkpoint(self, step: int) -> None:
        self._write("checkpoint", step)

    def on_failure(self, error: BaseException) -> None:
        self._write("failure", str(error))

    def on_end(self, outcome: Any) -> None:
        self._write("end", outcome.status, outcome.step)


class Raises(BaseHook):
    """Raises in each step."""

    def on_step(self, record: Any) -> None:
        raise ValueError(f"no loss should be {record.step}")


class Refused(BaseHook):
    """Meets an error of raydist's own in each evaluation, and another one when it hears of a failure."""

    def on_eval(self, step: int, loss: float) -> None:
        raise StorageError("the disk is full")

    def on_failure(self, error: BaseException) -> None:
        raise KeyError("second")


class Changes(BaseHook):
    """Adds the least to one weight, in a way that autograd does not see."""

    def __init__(self, facts: HookFacts) -> None:
        self._model = facts.model

    def on_eval(self, step: int, loss: float) -> None:
        weight = next(self._model.parameters()).data
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight.view(-1)[0] += 1e-7


class ChangesAndRaises(Changes):
    """The error does not hide the change."""

    def on_eval(self, step: int, loss: float) -> None:
        super().on_eval(step, loss)
        raise ValueError("a bug")


class LeavesGradient(Changes):
    """To which the next backward pass would add."""

    def on_eval(self, step: int, loss: float) -> None:
        next(self._model.parameters()).sum().backward()


class Freezes(Changes):
    """The optimizer would not train it any more."""

    def on_eval(self, step: int, loss: float) -> None:
        next(self._model.parameters()).requires_grad_(False)


class Evaluates(Changes):
    """Forgets to set the model back, which would train without dropout."""

    def on_eval(self, step: int, loss: float) -> None:
        self._model.eval()
