"""What is done about a step whose numbers are bad: stop, leave it out, or go back; and what is left out ever after.

Runs in: each train worker. Torch, never ray. Every rank has one, and all decide alike: the loss and the norm are the same on all.

    ledger has the batch ------------------------------> passed over: no forward pass, no update
    loss or gradient not finite, or a spike --on_nan--> stop       NonFinite or LossSpike
                                                        skip       an entry in the ledger; the next step
                                                        rollback   an entry in the ledger; Rollback, and a restart

After a step that is left out the random states are drawn anew from (seed, step, rank), so that all that follows is the same
whether the batch was computed first or passed over by a later attempt.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from raydist.data import skipped_batches
from raydist.data.batches import StepBatch, share
from raydist.data.skipped_batches import Entry
from raydist.errors import LossSpike, NonFinite, Rollback, StorageError, TrainingStopped
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.distributed import Rank
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.step import Bad, StepReport

T = TypeVar("T")

IDS = 4096
"""Most sample ids that an event lists."""


class BadStepCheck:
    """Around every step: `step`, which gives its report. `bad` and `spike` are for TrainStep."""

    def __init__(
        self, spec: JobSpec, rank: Rank, run: RunDir, attempt: int, model: nn.Module, reporter: Reporter | None
    ) -> None:
        self._spec, self._policy, self._rank, self._run = spec, spec.recovery, rank, run
        self._attempt, self._model, self._reporter = attempt, model, reporter
        self._losses: deque[float] = deque(maxlen=self._policy.spike.window)
        self._entries: list[Entry] = []
        self._batch: StepBatch | None = None
        weights = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = [b for n, b in model.state_dict(keep_vars=True).items() if n not in weights]

    def resume(self, plain: Mapping[str, Any]) -> None:
        """Takes up the ledger, and what a checkpoint's plain state has of this; {} without one. Every rank; raises StorageError."""
        saved = plain.get("guard", {"losses": [], "left_out": []})
        self._losses.extend(saved["losses"])
        mine: list[Entry] | StorageError = []
        if self._rank.first:
            try:
                mine = skipped_batches.read(self._run)
            except StorageError as error:  # told to all ranks, who wait for this one's word
                mine = error
        read = self._every(mine)[0]
        if isinstance(read, StorageError):
            raise read
        self._entries = skipped_batches.union(read, map(Entry.from_dict, saved["left_out"]))

    def state(self, step: int) -> dict[str, Any]:
        """For the plain state of the checkpoint of `step`."""
        losses = list(self._losses) if self._policy.spike.factor is not None else []
        return {"guard": {"losses": losses, "left_out": [e.to_dict() for e in self._entries if e.step <= step]}}

    def step(self, step: int, batch: StepBatch, train: Callable[[], StepReport]) -> StepReport:
        """`train()`'s report; of a batch that the ledger leaves out one without loss or tokens."""
        for entry in self._entries:
            if entry.step == step and entry.names(batch.cursor, batch.samples_hash):
                self._draw_anew(step)
                return StepReport(float("nan"), float("nan"), 0, stop=False, skipped=True)
        self._batch = batch
        before = [b.clone() for b in self._buffers] if self._policy.on_nan == "skip" else []
        report = train()
        if report.bad is not None:
            for buffer, value in zip(self._buffers, before, strict=True):
                buffer.copy_(value)  # the forward pass has put its bad numbers there
            self._draw_anew(step)
        elif not report.skipped:
            self._losses.append(report.loss)
        return report

    def spike(self, loss: float) -> float | None:
        """The median of the last losses if `loss` is a spike against it, else None."""
        factor = self._policy.spike.factor
        if factor is None or len(self._losses) < self._policy.spike.window:
            return None
        median = statistics.median(self._losses)
        return median if loss > factor * median else None

    def bad(self, bad: Bad) -> None:
        """Returns if the step is to be left out, once that is durable. Every rank, with the same `bad` but for its text.

        Raises NonFinite or LossSpike where the run ends, Rollback where the attempt does, StorageError where the ledger cannot
        be written.
        """
        assert self._batch is not None, "step() comes first"
        action, limit = self._action(bad.step)
        if action == "skip":
            limit = self._weights_problem()
            action = "stop" if limit else action
        self._say(bad, action)
        cause = bad.cause
        entry = Entry(
            step=bad.step,
            epoch=self._batch.cursor.epoch,
            offset=self._batch.cursor.offset,
            samples=len(self._batch.ids),
            samples_hash=self._batch.samples_hash,
            action=action,
            cause=cause,
            attempt=self._attempt,
        )
        failure: StorageError | None = None
        if self._rank.first:
            try:
                if action != "stop":
                    skipped_batches.write(self._run, entry)
            except StorageError as error:
                failure = error
            if self._reporter and action != "skip":
                self._reporter.flush()
        # Nobody goes on, or ends, before rank 0 has written it down.
        failure = self._every(failure)[0]
        if failure is not None:
            raise failure
        if action == "stop":
            error_type: type[TrainingStopped] = NonFinite if bad.median is None else LossSpike
            raise error_type(f"{cause}; the update was not applied{limit and f' ({limit})'}", bad.hint)
        self._entries = skipped_batches.union(self._entries, [entry])
        if action == "rollback":
            raise Rollback(
                f"{cause}; the update was not applied, and the run goes back to before it",
                "the next attempt leaves that batch out: see ledger/ in the run's folder",
            )

    def _action(self, step: int) -> tuple[str, str]:
        """(stop, skip or rollback; which limit made it a stop)."""
        asked = self._policy.on_nan
        if asked == "skip":
            left_out = {e.step for e in self._entries}
            row = next(
                n
                for n in range(self._policy.max_skips + 1)
                if step - 1 - n not in left_out or n == self._policy.max_skips
            )
            if row == self._policy.max_skips:
                return "stop", f"the {row} steps before it were left out already; recovery.max_skips is {row}"
        if asked == "rollback":
            done = sum(e.action == "rollback" for e in self._entries)
            if done >= self._policy.max_rollbacks:
                return (
                    "stop",
                    f"the run was rolled back {done} times; recovery.max_rollbacks is {self._policy.max_rollbacks}",
                )
        return asked, ""

    def _weights_problem(self) -> str:
        """Which weights are themselves not finite, on any rank: no step is of use any more; "" if none is."""
        local = (
            (plain_name(n), p.to_local() if hasattr(p, "to_local") else p) for n, p in self._model.named_parameters()
        )
        mine = [name for name, p in local if not torch.isfinite(p.detach()).all()][:5]
        names = sorted({name for of_rank in self._every(mine) for name in of_rank})
        return f"the weights themselves are not finite: {', '.join(names[:5])}" if names else ""

    def _say(self, bad: Bad, action: str) -> None:
        if self._reporter is None:
            return
        assert self._batch is not None
        batch = self._batch
        micro_batch, world = self._spec.train.micro_batch, self._rank.world_size
        ids = batch.ids.tolist()
        if len(ids) > IDS:
            guilty = [(f["rank"], f["micro_batch"]) for f in bad.ranks if "micro_batch" in f]
            ids = [i for rank, at in guilty for i in share(batch.ids, rank, world, micro_batch)[at].tolist()][:IDS]
        where = {
            "epoch": batch.cursor.epoch,
            "offset": batch.cursor.offset,
            "samples": len(batch.ids),
            "samples_hash": batch.samples_hash,
            "ids": ids,
        }
        if bad.median is None:
            self._reporter.say(
                "non_finite",
                step=bad.step,
                action=action,
                loss=bad.loss,
                ranks=list(bad.ranks),
                cause=bad.cause,
                **where,
            )
        else:
            self._reporter.say("loss_spike", step=bad.step, action=action, loss=bad.loss, median=bad.median, **where)

    def _draw_anew(self, step: int) -> None:
        distributed.seed_all(self._spec.train.seed, "left out", self._rank.rank, self._rank.world_size, step)

    def _every(self, mine: T) -> list[T]:
        every: list[T] = [mine] * self._rank.world_size
        if self._rank.world_size > 1:
            dist.all_gather_object(every, mine, group=self._rank.control)
        return every
