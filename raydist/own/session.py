"""A session: the parts of raydist's training loop around the user's own one.

Every rank holds the whole model. Gradients are added up over a rank's micro-batches first, then over the ranks, in an order that
depends on nothing else; random numbers are seeded for each micro-batch. So a run that was killed goes on with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from raydist.data.batches import Batches, samples_hash, share
from raydist.errors import NonFinite, SpecChanged, TrainingStopped, UsageError, UserError
from raydist.own.arguments import job_of, trained_by
from raydist.own.host import host
from raydist.records import StepRecord
from raydist.run.directory import default_storage
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.attempt import Job, Outcome
from raydist.worker.build import check_same
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.lora import frozen_shards
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._grad_norm import grad_norm
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision

_BUCKET = 25 * 2**20
"""Bytes of gradients that are summed in one collective."""

_open: Session | None = None


def session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    steps: int,
    batch: int,
    micro_batch: int | None = None,
    name: str = "own",
    storage: str | None = None,
    every: int = 100,
    clip: float = 0.0,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
    timeout_s: float = 600.0,
) -> Session:
    """A run of `steps` updates, which goes on from its newest checkpoint if it has one. Use it in a `with` statement.

    `dataset`: anything with a length and `__getitem__`; each sample is in one batch of an epoch, whatever the number of ranks.
    `batch`: samples of an update over all ranks; `micro_batch`: at most so many at once on a rank (default: all of its part).
    `name`, `storage`: of the run's folder; `every`: steps between checkpoints; `clip`: largest norm of the gradient (0: no limit);
    `timeout_s`: limit of each collective. Raises UserError for arguments that cannot be trained with.
    """
    if micro_batch is not None and micro_batch < 1:
        raise UserError(
            f"micro_batch: {micro_batch} is less than 1", "give the most samples that a rank computes at once"
        )
    spec = job_of(name, steps, batch, every, clip, seed, timeout_s)
    return Session(model, optimizer, dataset, spec, micro_batch or batch, storage or default_storage(), collate)


class Session:
    """Made by `session`. Iterating gives this rank's micro-batches, on its device.

    `model`: the model, on its device; `number`: the step that is being computed, from 1, or the last one;
    `losses`: the mean loss of each step that this process has made; `rank`: this process's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        spec: JobSpec,
        micro_batch: int,
        storage: str,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"dataset: {type(dataset).__name__} has no length or no __getitem__",
                "give a dataset with __len__ and __getitem__: others cannot be continued where a killed run ended",
            )
        self.model, self._optimizer, self._dataset, self._collate = model, optimizer, dataset, collate
        self._spec, self._micro_batch, self._storage = spec, micro_batch, storage
        self._trained = trained_by(model, optimizer)
        self._fingerprint = f"own/{len(dataset)}"
        self._batches = Batches(len(dataset), spec.train.global_batch, spec.train.seed, self._fingerprint)
        self._total = int(spec.train.steps or 0)
        self._at = Progress()
        self._losses: list[tuple[Tensor, float]] = []  # of the step so far, with their weights
        self._backward = self._stepped = False
        self._last = self._stops = False
        self.number = 0
        self.losses: list[float] = []

    def __enter__(self) -> Session:
        """Starts the process group, moves the model, and loads the newest checkpoint. Every rank."""
        global _open
        if _open is not None:
            raise UsageError("a session is open in this process already", "leave its `with` block first")
        self._host = host()
        self._checkpoints: CheckpointManager | None = None
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
        self.model.to(rank.device)
        check_same(self.model, rank)
        shards = {name: ParamShard(p) for name, p in self._trained.items()}
        frozen = frozen_shards(self.model)
        parameters = gather_parameters(shards, rank, {name: shard.local for name, shard in frozen.items()})
        mesh = Mesh(rank)
        self._host.built(self.model, shards, self._optimizer)

        def divide(ids: Any, of_rank: int, world: int) -> Any:
            return share(ids, of_rank, world, self._micro_batch)

        self._checkpoints = CheckpointManager(
            job,
            rank,
            self._reporter,
            self._at,
            TrainState(self.model, self._optimizer, shards, frozen),
            precision=Precision(spec.precision, rank.device),
            bad_steps=BadStepCheck(spec, mesh, job.run, self._attempt, self.model, self._reporter, divide),
            noise=None,
            fingerprint=self._fingerprint,
            total=self._total,
            steps_per_epoch=self._batches.steps_per_epoch,
            parameters=parameters,
            mesh=mesh,
        )
        try:
            self._checkpoints.resume()
        except SpecChanged as error:
            raise SpecChanged(error.message, "give the session the arguments of before, or another name") from error
        self._host.loaded()
        self._checkpoints.open()
        self._saves = True
        self.number = self._at.step

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches of the steps that are left."""
        spec, rank, heartbeat = self._spec, self.rank, self._host.heartbeat
        while self._at.step < self._total and not self._stops:
            self.number = self._at.step + 1
            heartbeat.step(self.number)
            self._begun = time.perf_counter()
            self._ids = self._batches.ids(self._at.cursor)
            mine = [part for part in share(self._ids, rank.rank, rank.world_size, self._micro_batch) if len(part)]
            for index, ids in enumerate(mine):
                if index:
                    heartbeat.enter("data")
                made = self._collate([self._dataset[int(i)] for i in ids])
                distributed.seed_all(spec.train.seed, "own", self.number, int(ids[0]))
                self._last, self._backward, self._stepped = index == len(mine) - 1, False, False
                heartbeat.enter("forward")
                yield tree_map(self._to_device, made)
                if not (self._backward and self._stepped):
                    missed = "step" if self._backward else "backward"
                    raise UsageError(
                        f"step {self.number}: rank {rank.rank} has not called {missed}() for a batch",
                        "call backward() and then step() once for each batch",
                    )
            if not mine:  # fewer samples than ranks: it takes part in the sums
                self._update()

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Adds the gradient of `loss`, the mean over a micro-batch, times its `weight`: its samples or tokens. Not a collective."""
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
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._losses.append((loss.detach(), weight))  # not read here: the host would wait for the device
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

    def _to_device(self, value: Any) -> Any:
        return value.to(self.rank.device) if isinstance(value, Tensor) else value

    def _sums(self, leaves: bool) -> list[float]:
        """[loss, weight, whether each rank leaves, whether each parameter has a gradient], summed over the ranks."""
        rank = self.rank
        left = [float(leaves and r == rank.rank) for r in range(rank.world_size)]
        used = [float(p.grad is not None) for p in self._trained.values()]
        loss, weight = sum(float(one) * w for one, w in self._losses), sum(w for _, w in self._losses)
        sums = torch.tensor([loss, weight, *left, *used], dtype=torch.float64)
        if rank.world_size > 1:
            dist.all_reduce(sums, group=rank.control)
        found: list[float] = sums.tolist()
        gone = [r for r in range(rank.world_size) if found[2 + r]]
        if gone and len(gone) < rank.world_size:
            raise TrainingStopped(
                f"step {self._at.step + 1}: rank {', '.join(map(str, gone))} left its loop, and the others did not",
                "end the loop on the same step on every rank",
            )
        return found

    def _update(self) -> None:
        world, device, at = self.rank.world_size, self.rank.device, self._at
        found = self._sums(leaves=False)
        weight = found[1]
        if not weight:
            raise UserError(f"step {self.number}: the weights of all batches are 0", "give samples or tokens as weight")
        loss = found[0] / weight
        used = [p for p, ranks in zip(self._trained.values(), found[2 + world :], strict=True) if ranks]
        grads = []
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            grads.append(p.grad)
        if world > 1:
            for bucket in _buckets(grads):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                dist.all_reduce(flat)
                for grad, total in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
                    grad.copy_(total.view_as(grad))
        norm = float(grad_norm(((grad, 1) for grad in grads), None, device)) / weight
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(
                f"step {self.number}: loss {loss}, gradient norm {norm}; the update was not applied",
                "lower the learning rate, or clip the gradient (clip=1.0)",
            )
        factor, clip = 1.0 / weight, self._spec.optim.clip
        if clip and norm > clip:
            factor *= clip / (norm + 1e-6)
        for grad in grads:
            grad.mul_(factor)
        checkpoints = self._manager()
        self._host.before_update()
        self._host.heartbeat.enter("save")  # it may wait until a copy of the state is complete
        checkpoints.before_update()
        self._host.heartbeat.enter("update")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if world > 1:  # running statistics: rank 0's, as DDP has it
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        self._losses.clear()
        at.step, at.cursor, at.loss = at.step + 1, self._batches.after(at.cursor), loss
        self.losses.append(loss)
        ended = time.perf_counter()
        if self._reporter:
            self._reporter.step(
                StepRecord(
                    step=at.step,
                    loss=loss,
                    lr=float(self._optimizer.param_groups[0]["lr"]),
                    grad_norm=norm,
                    tokens=round(weight),
                    seconds=ended - self._begun,
                    data_seconds=0.0,
                    world_size=world,
                    attempt=self._attempt,
                    samples_hash=samples_hash(self._ids),
                )
            )
        self._host.heartbeat.stepped(ended - self._begun)
        first = self._host.first_step(at.step)
        checkpoints.stepped(ended - self._begun, first)
        if first:
            checkpoints.prepare()
        ending = at.step == self._total
        due = checkpoints.due(at.step, ending)
        self._stops, copies = self._host.agree(checkpoints.vote(due))
        self._host.heartbeat.enter("save")
        if due:
            checkpoints.save(ending)
        elif copies:
            checkpoints.snapshot()
        self._host.heartbeat.step(at.step + 1)  # the script's code after a step has no time limit: it may evaluate

    def _manager(self) -> CheckpointManager:
        if self._checkpoints is None:
            raise UsageError("the session is not open", "use it in a `with` statement")
        return self._checkpoints

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Saves what is not saved, and leaves the group. Every rank."""
        status = "stopped"
        try:
            if error is None:
                self._host.heartbeat.enter("end")
                if self._at.step < self._total:
                    self._sums(leaves=True)  # names the ranks that leave alone
                    self._optimizer.zero_grad(set_to_none=True)
                    if self._at.step:
                        self._manager().save(True)
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
        if self._checkpoints is not None and self._saves:
            self._checkpoints.close()
        self._host.close(Outcome(status, self._at.step, self._at.loss, None))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, at most _BUCKET bytes together, or one."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > _BUCKET or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        yield bucket
