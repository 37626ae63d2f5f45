"""Handles a step with bad numbers: stops the run, skips the step, or goes back; and skips recorded batches in later attempts.

Runs in: each train worker. Torch, never ray. Every rank has one, and all decide the same: loss and norm are equal on all ranks.

    ledger has the batch ------------------------------> skipped: no forward pass, no update
    loss or gradient not finite, or a spike --on_nan--> stop       NonFinite or LossSpike
                                                        skip       an entry in the ledger; the next step
                                                        rollback   an entry in the ledger; Rollback, and a restart
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raydist.data import skipped_batches
from raydist.data.batches import Divide, StepBatch
from raydist.data.skipped_batches import Entry
from raydist.errors import LossSpike, NonFinite, Rollback, StorageError, TrainingStopped
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.step_hooks import Bad, Step, StepHook

IDS = 4096
"""An event lists at most so many sample ids."""


class BadStepCheck(StepHook):
    """A hook of every step. The loop calls `leaves_out` first, which also names the batch that the step is about to compute."""

    def __init__(
        self,
        spec: JobSpec,
        mesh: Mesh,
        run: RunDir,
        attempt: int,
        model: nn.Module,
        reporter: Reporter | None,
        divide: Divide,
    ) -> None:
        self._policy, self._mesh, self._run, self._divide = spec.recovery, mesh, run, divide
        self._rank = mesh.rank
        self._attempt, self._model, self._reporter = attempt, model, reporter
        self._losses: deque[float] = deque(maxlen=self._policy.spike.window)
        self._entries: list[Entry] = []
        self._batch: StepBatch | None = None
        weights = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = [b for n, b in model.state_dict(keep_vars=True).items() if n not in weights]
        self._before: list[torch.Tensor] = []

    def resume(self, plain: Mapping[str, Any]) -> None:
        """Loads the ledger, and this check's part of a checkpoint's plain state ({} without one). Every rank. StorageError."""
        saved = plain.get("guard", {"losses": [], "left_out": []})
        self._losses.extend(saved["losses"])
        mine: dict[str, Any] = {}
        if self._rank.first:
            try:
                mine = {"entries": [entry.to_dict() for entry in skipped_batches.read(self._run)]}
            except StorageError as error:  # sent to all ranks, which wait for rank 0
                mine = {"error": [error.message, error.hint]}
        sent = gather_json(mine, self._rank.control)[0]
        if "error" in sent:
            raise StorageError(*sent["error"])
        self._entries = skipped_batches.union(
            *(map(Entry.from_dict, raw) for raw in (sent["entries"], saved["left_out"]))
        )

    def state(self, step: int) -> dict[str, Any]:
        """For the plain state of the checkpoint of `step`."""
        losses = list(self._losses) if self._policy.spike.factor is not None else []
        return {"guard": {"losses": losses, "left_out": [e.to_dict() for e in self._entries if e.step <= step]}}

    def leaves_out(self, step: int, batch: StepBatch) -> bool:
        """Whether the ledger has this batch, so that `step` must compute nothing."""
        for entry in self._entries:
            if entry.step == step and entry.names(batch.cursor, batch.samples_hash):
                return True
        self._batch = batch
        return False

    def begin(self, step: Step) -> None:
        """Copies the buffers: a forward pass with bad numbers may write them there."""
        self._before = [b.clone() for b in self._buffers] if self._policy.on_nan == "skip" else []

    def find_bad(self, step: Step) -> Bad | None:
        """A loss that is a spike against the median of the last ones."""
        factor = self._policy.spike.factor
        if factor is None or len(self._losses) < self._policy.spike.window:
            return None
        median = statistics.median(self._losses)
        if step.loss <= factor * median:
            return None
        cause = f"step {step.number}: a loss of {step.loss:.4g}; the median of the losses before it is {median:.4g}"
        return Bad(step.number, step.loss, cause, median=median)

    def updated(self, step: Step) -> None:
        """The loss of an applied step is one of those that the next ones are compared with."""
        self._losses.append(step.loss)

    def leave_out(self, bad: Bad) -> bool:
        """True if the step is left out, once that is durable. Every rank, with the same `bad` but for its text.

        Raises NonFinite or LossSpike if the run ends, Rollback if the attempt ends, StorageError if the ledger cannot be written.
        """
        assert self._batch is not None, "leaves_out() comes first"
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
        failure: list[str] = []
        if self._rank.first:
            try:
                if action != "stop":
                    skipped_batches.write(self._run, entry)
            except StorageError as error:
                failure = [error.message, error.hint]
            if self._reporter and action != "skip":
                self._reporter.flush()
        # No rank continues or ends before rank 0 has written the entry.
        if sent := gather_json(failure, self._rank.control)[0]:
            raise StorageError(*sent)
        if action == "stop":
            error_type: type[TrainingStopped] = NonFinite if bad.median is None else LossSpike
            raise error_type(f"{cause}; the update was not applied{limit and f' ({limit})'}", bad.hint)
        self._entries = skipped_batches.union(self._entries, [entry])
        if action == "rollback":
            raise Rollback(
                f"{cause}; the update was not applied, and the run goes back to before it",
                "the next attempt leaves that batch out: see ledger/ in the run's folder",
            )
        for buffer, value in zip(self._buffers, self._before, strict=True):
            buffer.copy_(value)
        return True

    def _action(self, step: int) -> tuple[str, str]:
        """(stop, skip or rollback; the limit that made it a stop)."""
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
        """Names weights that are not finite on any rank: no later step can be good; "" if there are none."""
        local = (
            (plain_name(n), p.to_local() if hasattr(p, "to_local") else p) for n, p in self._model.named_parameters()
        )
        mine = [name for name, p in local if not torch.isfinite(p.detach()).all()][:5]
        names = sorted({name for of_rank in gather_json(mine, self._rank.control) for name in of_rank})
        return f"the weights themselves are not finite: {', '.join(names[:5])}" if names else ""

    def _say(self, bad: Bad, action: str) -> None:
        if self._reporter is None:
            return
        assert self._batch is not None
        batch = self._batch
        parts, ids = self._mesh.data_size, batch.ids.tolist()
        if len(ids) > IDS:
            places = [(self._mesh.coordinate(f["rank"])[1], f["micro_batch"]) for f in bad.ranks if "micro_batch" in f]
            found = (batch.ids[self._divide(batch.ids, part, parts)[at]] for part, at in places)
            ids = [i for micro_batch in found for i in micro_batch.tolist()][:IDS]
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
