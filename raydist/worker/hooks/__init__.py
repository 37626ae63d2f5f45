"""Code of the user's own that a run calls at its start, steps, evaluations, checkpoints and end: the contract of a hook.

Runs in: each train worker that `hooks[].ranks` names, in the thread that trains. Torch, never ray.

A hook's file (or the user's `package.module:attribute`) has a class `Hook`: a `BaseHook`, or a class with some of its methods. It
is made once in each attempt of the run, after the state is loaded. Training waits for each call, so a hook must be quick: what may
take long belongs in a thread of its own, or in an exporter (raydist/observe/exporters).

A hook reads, and changes nothing: raydist compares a checksum of the weights and gradients, and the modules' modes, before and
after each call, and a hook that has changed them ends the run, whatever `on_error` says. So a backward pass of its own must leave
no gradient: torch.autograd.grad does not. Random numbers that a hook draws change nothing, because
passes are seeded by their step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from raydist.records import StepRecord
from raydist.run.directory import RunDir
from raydist.spec import JobSpec

if TYPE_CHECKING:
    from raydist.worker.attempt import Outcome


@dataclass(frozen=True, slots=True)
class HookFacts:
    """What a hook gets. `model`: the module as this rank has it, whole or a part, by `parallel`; `step`: steps that were trained
    before this attempt; `options`: those of the job, unchecked if the file has no `Options`.
    """

    run: RunDir
    spec: JobSpec
    options: Mapping[str, Any]
    rank: int
    world_size: int
    attempt: int
    step: int
    model: nn.Module


class BaseHook:
    """A hook that does nothing: a subclass overrides the methods that it needs. `step`s count from 1."""

    def __init__(self, facts: HookFacts) -> None:
        """Made before `on_start`."""

    def on_start(self) -> None:
        """Before the first step of the attempt."""

    def on_step(self, record: StepRecord) -> None:
        """After each step, whose update may have been left out. The fields that only rank 0 knows are None on others."""

    def on_eval(self, step: int, loss: float) -> None:
        """After an evaluation. `loss`: the mean over the tokens of the held-out text, in nats."""

    def on_checkpoint(self, step: int) -> None:
        """The checkpoint of that step is committed, perhaps some steps ago. On rank 0 only."""

    def on_failure(self, error: BaseException) -> None:
        """This rank ends the attempt with that error. Not called on ranks that are killed, or that others' failures end."""

    def on_end(self, outcome: Outcome) -> None:
        """The attempt has ended without an error: the run is finished, paused or interrupted."""
