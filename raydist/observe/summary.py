"""The current state of a run: a few metrics computed from its newest records and events. Pure: no I/O, no clock.

Runs in: the run's monitor. Must not import ray or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 50
"""Number of steps in the moving averages."""


def rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Over the given steps: tokens_per_second, seconds_per_step, and data_share (time waiting for data / total time; 0 to 1).

    Computed from sums, so that each step counts by its duration. None if the total time is zero.
    """
    seconds = sum(row["seconds"] for row in rows)
    if not rows or seconds <= 0:
        return {"tokens_per_second": None, "seconds_per_step": None, "data_share": None}
    return {
        "tokens_per_second": sum(row["tokens"] for row in rows) / seconds,
        "seconds_per_step": seconds / len(rows),
        "data_share": sum(row["data_seconds"] for row in rows) / seconds,
    }


class LiveView:
    """Takes records and events in order; `snapshot` returns the view. Bounded memory."""

    def __init__(self) -> None:
        self.attempt = 0
        self.world_size = 0
        self.step = 0
        self.workers: list[dict[str, Any]] = []
        self._record: dict[str, Any] | None = None
        self._window: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._first: int | None = None
        self._evals: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._checkpoint: dict[str, Any] | None = None
        self._counts = {"attempts": 0, "failures": 0, "checkpoints": 0, "evals": 0}
        self._flops: tuple[float, float] | None = None
        self._stages: list[tuple[str, float]] = []

    def begin_attempt(self, number: int, world_size: int, resume_step: int) -> None:
        """Starts a new attempt: its rates start empty, and its workers are not known yet."""
        self.attempt, self.world_size, self.workers = number, world_size, []
        self._void(resume_step)
        self._counts["attempts"] += 1
        self._window.clear()
        self._first = None
        self._stages = []

    def stage(self, attempt: int, name: str, at: float) -> None:
        """A stage before the attempt's first step begins, at that Unix time."""
        if attempt == self.attempt:
            self._stages.append((name, at))

    def capacity(self, flops_per_token: float, peak_flops: float) -> None:
        """For MFU: the model's FLOPs per token, and the total peak FLOP/s of all workers' devices."""
        self._flops = (flops_per_token, peak_flops)

    def records(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Steps, as StepRecord dicts. Steps of an earlier attempt are ignored."""
        for row in rows:
            if row["attempt"] < self.attempt:
                continue
            if row["attempt"] > self.attempt:
                # begin_attempt was not called: this monitor replaces one that was killed.
                self.begin_attempt(row["attempt"], row["world_size"], row["step"] - 1)
            self._record, self.step = dict(row), row["step"]
            # An attempt's first step warms up caches and buffers: it is left out of the rates, unless it is the only one.
            if self._first is None:
                self._first = row["step"]
            elif len(self._window) == 1 and self._window[0]["step"] == self._first:
                self._window.clear()
            self._window.append(self._record)

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """An event, by its kind and data. Raises KeyError if required data is missing."""
        if kind == "eval":
            self._evals.append({**data, "loss": data["loss"], "step": data["step"]})
            self._counts["evals"] += 1
        elif kind == "checkpoint_saved":
            self._checkpoint = {**data, "step": data["step"]}
            self._counts["checkpoints"] += 1
        elif kind == "failure":
            self._counts["failures"] += 1
        elif kind == "resumed":
            self._void(data["step"])
        elif kind == "workers":
            self.workers = [dict(worker) for worker in data["workers"]]

    def _void(self, step: int) -> None:
        """The run resumes from `step`: later steps will be trained again."""
        self.step = step
        if self._record and self._record["step"] > step:
            self._record = None
        while self._evals and self._evals[-1]["step"] > step:
            self._evals.pop()

    def snapshot(self) -> dict[str, Any]:
        """attempt, world_size, workers, step, record, stages, eval, eval_loss, checkpoint, the rates, mfu, and counts."""
        now = rates(self._window)
        newest = self._evals[-1] if self._evals else None
        mfu = None
        if self._flops and now["tokens_per_second"] is not None:
            mfu = now["tokens_per_second"] * self._flops[0] / self._flops[1]
        return {
            "attempt": self.attempt,
            "world_size": self.world_size,
            "workers": list(self.workers),
            "step": self.step,
            "record": self._record,
            "stages": list(self._stages),
            "eval": newest,
            "eval_loss": newest["loss"] if newest else None,
            "checkpoint": self._checkpoint,
            **now,
            "mfu": mfu,
            **self._counts,
        }
