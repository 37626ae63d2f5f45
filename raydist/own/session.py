"""A session: the parts of raydist's training loop around the user's own one.

The passes and the update are in training.py, the samples in samples.py. Random numbers are seeded for each micro-batch, and sums
over the ranks have one order, so a run that was killed goes on with the same bits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

from raydist.data.batches import Cursor, StepBatch, samples_hash, share
from raydist.data.order import IntArray
from raydist.errors import SpecChanged, UsageError, UserError
from raydist.own.arguments import check_splits, job_of, plain_module, trained_by
from raydist.own.host import host
from raydist.own.loader import Part, Reader, check, read_ahead, to_device
from raydist.own.samples import STREAM, samples_of
from raydist.own.state import ValueState
from raydist.own.training import CHANGED, Training
from raydist.records import StepRecord
from raydist.run.directory import default_storage
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.attempt import Job, Outcome
from raydist.worker.build import check_same
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.precision import Precision
from raydist.worker.step_hooks import Bad

SCHEDULER = "scheduler"
"""The extra state of a checkpoint that has the scheduler's."""

_open: Session | None = None


def session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    steps: int,
    batch: int | None = None,
    micro_batch: int | None = None,
    name: str = "own",
    storage: str | None = None,
    every: int = 100,
    clip: float = 0.0,
    seed: int = 0,
    strategy: str = "ddp",
    scheduler: LRScheduler | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    timeout_s: float = 600.0,
) -> Session:
    """A run of `steps` updates, which goes on from its newest checkpoint if it has one. Use it in a `with` statement.

    `dataset`: with `__len__` and `__getitem__`, or a DataLoader of such a one, whose batch size, collate_fn and processes are used;
    or with `__iter__`, `state_dict` and `load_state_dict`. It is the same on every rank; each sample is in one batch of an epoch,
    whatever the number of ranks. `batch`: samples of an update over all ranks (default: the loader's batch size);
    `micro_batch`: at most so many at once on a rank (default: all of its part). `name`, `storage`: of the run's folder; `every`:
    steps between checkpoints; `clip`: largest norm of the gradient (0: no limit). `strategy`: ddp, zero1, zero2, zero3, or your
    own, with `without_example` in its PLAN.
    `scheduler`: of `optimizer`; the session calls its `step` after each update. `timeout_s`: limit of each collective. Raises
    UserError for arguments that cannot be trained with.
    """
    if micro_batch is not None and micro_batch < 1:
        raise UserError(
            f"micro_batch: {micro_batch} is less than 1", "give the most samples that a rank computes at once"
        )
    loader = dataset if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None else None
    if loader is not None:
        check(loader)
        dataset, batch, collate = loader.dataset, batch or loader.batch_size, collate or loader.collate_fn
    if batch is None:
        raise UserError(
            "batch: is not given",
            "give the samples of an update, over all ranks; or a DataLoader as dataset, which has a batch size",
        )
    spec = job_of(name, steps, batch, every, clip, seed, timeout_s, strategy)
    return Session(
        model, optimizer, dataset, scheduler, spec, micro_batch or batch, storage or default_storage(),
        collate or default_collate, loader,
    )  # fmt: skip


class Session:
    """Made by `session`. Iterating gives this rank's micro-batches, on its device.

    `model`: the model, on its device; `number`: the step that is being computed, from 1, or the last one;
    `losses`: the mean loss of each step that this process has made; `rank`: this process's. `counts`: whether the micro-batch is
    this rank's; if not, the rank had no sample left, computes along with the others, and its loss is left out of all sums.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        scheduler: LRScheduler | None,
        spec: JobSpec,
        micro_batch: int,
        storage: str,
        collate: Callable[[list[Any]], Any],
        loader: DataLoader[Any] | None,
    ) -> None:
        self.model, self._optimizer, self._loader = model, optimizer, loader
        self._module = plain_module(model)
        self._spec, self._micro_batch, self._storage = spec, micro_batch, storage
        self._trained = trained_by(self._module, optimizer)
        check_splits(spec.parallel.strategy, model, self._trained, optimizer)
        self._samples = samples_of(dataset, spec.train.global_batch, spec.train.seed)
        self._reader = Reader(self._samples.source, collate, spec.train.seed)
        self._fingerprint = self._samples.fingerprint
        self._scheduler = scheduler
        if scheduler is not None:
            if scheduler.optimizer is not optimizer:
                raise UserError("scheduler: it is of another optimizer", "make it of the one that the session gets")
            self._fingerprint += f" with {type(scheduler).__name__}"
        self._total = int(spec.train.steps or 0)
        self._at = Progress()
        self._checkpoints: CheckpointManager | None = None
        self._training: Training | None = None
        self.counts = True
        self._backward = self._stepped = False
        self._last = self._stops = self._told = False
        self.number = 0
        self.losses: list[float] = []

    def __enter__(self) -> Session:
        """Starts the process group, moves the model, and loads the newest checkpoint. Every rank."""
        global _open
        if _open is not None:
            raise UsageError("a session is open in this process already", "leave its `with` block first")
        if self._training is not None:
            raise UsageError("the session has ended", "make another one")
        self._host = host()
        self._saves = False
        _open = self
        try:
            job = self._host.open(self._spec, self._storage, self._fingerprint)
            self._spec, self._attempt = job.spec, job.attempt
            self.rank, self._reporter = self._host.rank, self._host.reporter
            self._build(job)
        except BaseException:
            self._close("stopped")
            raise
        return self

    def _build(self, job: Job) -> None:
        spec, rank = self._spec, self.rank
        check_same(self._module, rank)
        around = self._host.around_backward
        training = self._training = Training(self._module, self._optimizer, self._trained, spec, rank, around)
        self._host.built(self._module, training.shards, self._optimizer)

        def divide(ids: Any, of_rank: int, world: int) -> Any:
            return share(ids, of_rank, world, self._micro_batch)

        checked = spec, training.mesh, job.run, self._attempt, self._module, self._reporter, divide
        self._bad_steps = BadStepCheck(*checked)
        self._checkpoints = CheckpointManager(
            job,
            rank,
            self._reporter,
            self._at,
            TrainState(self._module, self._optimizer, training.shards, training.frozen),
            precision=Precision(spec.precision, rank.device),
            bad_steps=self._bad_steps,
            noise=None,
            fingerprint=self._fingerprint,
            total=self._total,
            steps_per_epoch=self._samples.steps_per_epoch,
            parameters=training.parameters,
            mesh=training.mesh,
        )
        if self._samples.state is not None:
            self._checkpoints.register(STREAM, self._samples.state)
        if self._scheduler is not None:
            self._checkpoints.register(SCHEDULER, ValueState(self._scheduler, "scheduler"))
        try:
            if self._checkpoints.resume():
                training.loaded()
        except SpecChanged as error:
            raise SpecChanged(error.message, "give the session the arguments of before, or another name") from error
        self._host.loaded()
        self._checkpoints.open()
        self._saves = True
        self.number = self._at.step
        if self.number >= self._total and rank.first:
            print(f"run {job.run.name} is finished: {self.number} steps, in {job.run.uri}", file=sys.stderr)

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches of the steps that are left."""
        training = self._distributed()
        spec, rank, first, heartbeat = self._spec, self.rank, self._at.step, self._host.heartbeat
        ahead = None
        if self._loader is not None and self._loader.num_workers:
            ahead = read_ahead(self._reader, self._parts(), self._loader)
        while self._at.step < self._total and not self._stops:
            self.number = self._at.step + 1
            heartbeat.step(self.number)
            begun = time.perf_counter()
            ids, after = self._samples.next(self._at.cursor)
            if self._at.step == first and self._samples.state is not None:
                self._samples.state.check_same(rank)
            self._step = _Step(ids, after, begun, time.perf_counter() - begun)
            mine = self._divide(ids)
            for index, (part, self.counts) in enumerate(mine):
                if index:
                    heartbeat.enter("data")
                began = time.perf_counter()
                batch = self._reader[self.number, part] if ahead is None else next(ahead)
                made = to_device(batch, rank.device)
                distributed.seed_all(spec.train.seed, "own", self.number, int(part[0]))
                self._last, self._backward, self._stepped = index == len(mine) - 1, False, False
                training.begin(self.number)
                self._step.read += time.perf_counter() - began
                heartbeat.enter("forward")
                yield made
                if not (self._backward and self._stepped):
                    missed = "step" if self._backward else "backward"
                    raise UsageError(
                        f"step {self.number}: rank {rank.rank} has not called {missed}() for a batch",
                        "call backward() and then step() once for each batch",
                    )

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Adds the gradient of `loss`, the mean over a micro-batch, times its `weight`: its samples or tokens. A
        collective: gradients are summed over the ranks meanwhile. Raises GraphMismatch if the first loss leaves out parameters."""
        training = self._distributed()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"backward: the loss is not a scalar: {shape}", "give its mean over the batch")
        weight = float(weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(
                f"backward: weight: {weight} is not a finite number of at least 0", "give a number of samples or tokens"
            )
        if self._backward:
            raise UsageError("backward() was called twice for one batch", "add the losses, and call it once")
        self._host.heartbeat.enter("backward")
        training.backward(loss, weight if self.counts else 0.0, self._last)
        self._backward = True

    def step(self) -> bool:
        """Ends a micro-batch. After the last one of a step it sums over the ranks, clips, updates, records, saves a checkpoint if
        one is due, and returns True: a collective. Raises NonFinite, on every rank and before the update."""
        if not self._backward or self._stepped:
            raise UsageError(
                "step() was called without a backward() before it", "call backward() and then step() for each batch"
            )
        self._stepped = True
        if self._last:
            self._update()
        return self._last

    # --- inside

    def _divide(self, ids: IntArray) -> list[tuple[IntArray, bool]]:
        """This rank's micro-batches of a global batch, and whether they are its own: a rank that has no sample left computes some
        of another one."""
        mine = share(ids, self.rank.rank, self.rank.world_size, self._micro_batch)
        return [(part, True) if len(part) else (ids[: self._micro_batch], False) for part in mine]

    def _parts(self) -> Iterator[Part]:
        """The micro-batches of the steps that are left, of a dataset with a length."""
        at = self._at.cursor
        for step in range(self._at.step + 1, self._total + 1):
            ids, at = self._samples.next(at)
            for part, _ in self._divide(ids):
                yield step, part

    def _update(self) -> None:
        at, step, training = self._at, self._step, self._distributed()
        checkpoints, heartbeat = self._manager(), self._host.heartbeat
        sums = training.reduce(self._host.asks(checkpoints.requested))
        hashed = samples_hash(step.ids)
        if isinstance(sums, Bad):
            self._bad_steps.leaves_out(sums.step, StepBatch(at.cursor, step.after, step.ids, hashed, [], 0))
            self._bad_steps.leave_out(sums)
            raise AssertionError("a session has recovery.on_nan: stop")
        if training.changed and not self._told and self._reporter:
            self._reporter.say("note", text=CHANGED)
            self._told = True
        self._host.before_update()
        heartbeat.enter("save")  # it may wait until a copy of the state is complete
        checkpoints.before_update()
        heartbeat.enter("update")
        lr = float(self._optimizer.param_groups[0]["lr"])
        training.update(sums)
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(sums.loss)
        elif self._scheduler is not None:
            self._scheduler.step()
        if self._samples.state is not None:
            self._samples.state.drop()
        at.step, at.cursor, at.loss = at.step + 1, step.after, sums.loss
        self.losses.append(sums.loss)
        seconds = time.perf_counter() - step.begun
        if self._reporter:
            self._reporter.step(
                StepRecord(
                    step=at.step,
                    loss=sums.loss,
                    lr=lr,
                    grad_norm=sums.norm,
                    tokens=round(sums.weight),
                    seconds=seconds,
                    data_seconds=step.read,
                    world_size=self.rank.world_size,
                    attempt=self._attempt,
                    samples_hash=hashed,
                    samples=len(step.ids),
                )
            )
        heartbeat.stepped(seconds - step.read)
        first = self._host.first_step(at.step)
        checkpoints.stepped(seconds, first)
        if first:
            checkpoints.prepare()
        ending = at.step == self._total
        due = checkpoints.due(at.step, ending)
        stops, asked = sums.asks
        self._stops, copies = stops > 0, self._host.copies(checkpoints.vote(due))
        heartbeat.enter("save")
        if due or asked:
            self._save(ending)
        elif copies:
            self._save(ending, to_memory=True)
        heartbeat.step(at.step + 1)  # the script's code after a step has no time limit: it may evaluate

    def _save(self, ending: bool, to_memory: bool = False) -> None:
        if self._samples.state is not None:
            self._samples.state.check_same(self.rank)
        if to_memory:
            self._manager().snapshot()
        else:
            self._manager().save(ending)

    def _manager(self) -> CheckpointManager:
        assert self._checkpoints is not None, "within `with`"
        return self._checkpoints

    def _distributed(self) -> Training:
        if self._training is None:
            raise UsageError("the session is not open", "use it in a `with` statement: `with rd.session(...) as s`")
        return self._training

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Saves what is not saved, and leaves the group. Every rank."""
        status = "stopped"
        try:
            if error is None:
                self._host.heartbeat.enter("end")
                training = self._distributed()
                if self._at.step < self._total:
                    training.meet(leaves=True)  # names the ranks that leave alone
                training.end()
                if 0 < self._at.step < self._total:
                    self._save(True)
                self._manager().finish()
                ends = "interrupted" if self._stops else "paused"
                status = "finished" if self._at.step == self._total else ends
        finally:
            self._close(status)
        if error is None:
            self._host.leave()

    def _close(self, status: str) -> None:
        global _open
        _open = None
        if self._training is not None:
            self._training.close()
        if self._checkpoints is not None and self._saves:
            self._checkpoints.close()
        self._host.close(Outcome(status, self._at.step, self._at.loss, None))


@dataclass(slots=True)
class _Step:
    """The step that is being computed: its samples, the cursor after them, when it began, and the seconds of reading them."""

    ids: IntArray
    after: Cursor
    begun: float
    read: float
