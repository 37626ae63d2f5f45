"""The input of a rank (the job), its connection to the monitor, and the outcome of an attempt.

Runs in: each train worker. Neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydist.run.directory import RunDir
from raydist.spec import JobSpec

if TYPE_CHECKING:
    from raydist.worker.checkpoint.memory_manager import MemoryStoreJob
    from raydist.worker.metrics.reporter import Push


@dataclass(frozen=True, slots=True)
class MonitorChannel:
    """The connection of rank 0 to the monitor: `push` sends records, `durable` waits until they are durable."""

    push: Push
    durable: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a run. `until`: end after that step, with a checkpoint, as paused. `memory_store`: None disables snapshots.
    `faults`: faults to inject, as plain values. `agent(what, **data)`: calls the rank's agent, for faults; None: it has none.
    """

    spec: JobSpec
    run: RunDir
    dataset: str
    attempt: int = 1
    until: int | None = None
    allow_spec_change: bool = False
    faults: Sequence[Mapping[str, Any]] = ()
    memory_store: MemoryStoreJob | None = None
    agent: Callable[..., object] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: status finished, paused or interrupted, after step `step`."""

    status: str
    step: int
    loss: float | None
    eval_loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the driver."""
        return {"status": self.status, "step": self.step, "loss": self.loss, "eval_loss": self.eval_loss}
