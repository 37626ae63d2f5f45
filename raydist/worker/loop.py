"""The training loop, from an empty process group to the last checkpoint; says who takes part in what.

Runs in: each train worker. Torch, never ray: what it needs of the outside comes as `MonitorChannel`, a few plain callables.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.data.batches import Batches, Loader, Stall, StepBatch
from raydist.data.dataset import TokenDataset
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event, StepRecord
from raydist.redact import redact
from raydist.worker import build, distributed, model_transforms, precision
from raydist.worker.attempt import Job, MonitorChannel, Outcome
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.checks.gradients import GradientCheck
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.dataloader import Feed
from raydist.worker.distributed import Rank
from raydist.worker.metrics import memory
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.metrics.histograms import Histograms
from raydist.worker.metrics.memory import MemoryMeter
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.metrics.startup_timing import Startup
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.metrics.trace import Tracer
from raydist.worker.optim.schedule import lr_at, peak_lr
from raydist.worker.parallel import ParallelStrategy, ParamShard
from raydist.worker.precision import Precision
from raydist.worker.step import MESSAGES, TrainStep, evaluate, loss_sum

if TYPE_CHECKING:
    from raydist.worker.faults.injector import Injector


def _to_stderr(event: Event) -> None:
    print(f"raydist: {event.kind}: {redact(event.data)}", file=sys.stderr, flush=True)


def train(
    job: Job,
    rank: Rank,
    channel: MonitorChannel | None,
    heartbeat: Heartbeat | None = None,
    startup: Startup | None = None,
    tell: Callable[[Event], None] = _to_stderr,
) -> Outcome:
    """Trains from the newest good checkpoint, or from the start, to the end. Called by every rank; `channel` by rank 0.

    `heartbeat` is told what this rank is doing, `startup` how far it has come before its first step. `tell`: how a rank without a
    channel says what it alone knows; it must not block.

    Raises what stops the run: NonFinite, LossSpike, GraphMismatch, SavesFailed, Fenced, SuspectHardware, CheckpointError,
    DataError, or the model's own exception; and Rollback, which ends the attempt.
    """
    reporter = Reporter(channel.push, channel.durable) if channel is not None else None
    try:
        workers = _gather(distributed.describe(rank), rank)
        if reporter:
            reporter.say("workers", workers=workers)
            reporter.say("note", text="; ".join(rank.notes))
        tell = reporter.event if reporter else tell
        heartbeat = heartbeat or Heartbeat()
        memory.keep_history(job.run, rank, job.attempt, job.spec.observe.memory_history)
        with Telemetry(job.run.uri, rank, job.attempt, heartbeat, job.spec.observe.interval_s, tell) as telemetry:
            return _Run(job, rank, reporter, heartbeat, startup or Startup(), tell, telemetry).train()
    except torch.OutOfMemoryError:
        tell(Event("note", time.time(), {"text": memory.after_oom(rank.rank, job.spec.observe.memory_history)}))
        raise
    finally:
        if reporter:
            reporter.close()


def _injector(job: Job, rank: Rank) -> Injector:
    """What spoils the run where it was asked to."""
    from raydist.worker.faults.injector import Injector

    return Injector(job.faults, job.run, rank, job.attempt)


class _Run:
    """The parts of one attempt, put together in the order of data flow."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        reporter: Reporter | None,
        heartbeat: Heartbeat,
        startup: Startup,
        tell: Callable[[Event], None],
        telemetry: Telemetry,
    ) -> None:
        spec, self._tell = job.spec, tell
        self.job, self.spec, self.rank, self.reporter = job, spec, rank, reporter
        self.injector = _injector(job, rank) if job.faults else None
        phases = heartbeat
        heartbeat = self.injector.watch(heartbeat) if self.injector else heartbeat
        self.heartbeat, self.startup = heartbeat, startup
        # Data: every rank opens it; nothing is sent.
        dataset = TokenDataset(job.dataset)
        self.feed = Feed(spec, rank, dataset)
        self.batches = Batches(len(self.feed.windows), spec.train.global_batch, spec.train.seed, dataset.fingerprint)
        self.total = spec.train.total(self.batches.steps_per_epoch)
        self.eval_set = self.feed.eval_set() if spec.eval.every else []
        # Model, strategy, optimizer: the same on every rank, from the same seed.
        if spec.train.deterministic:
            distributed.be_deterministic()
        precision.refuse(spec.precision, rank.device)
        self.precision = Precision(spec.precision, rank.device)
        settled = build.settled(spec, rank, job.run, dataset.vocab_size, self._example, self._note)
        self.strategy = cast(ParallelStrategy, registry.load("parallel", spec.parallel.strategy)(settled, rank))
        model = build.build_model(spec, dataset.vocab_size, self.strategy.takes_meta)
        if note := build.make_trainable(model):
            self._note(note)
        build.check_same(model, rank)  # every rank: hashes are compared
        if self.injector:
            self.injector.attach(model)
        capacity = build.capacity(spec, rank, model)
        if reporter and capacity:
            reporter.say("capacity", **capacity)
        if rank.world_size == 1 and spec.parallel.strategy != "ddp":
            self._note(f"parallel.strategy: {spec.parallel.strategy} on one worker: nothing is split")
        self.strategy.wrap(model, self._example)
        model_transforms.prepare(model, spec.train)
        shards = self.strategy.shards()
        self.optimizer = build.build_optimizer(spec, rank, self.strategy, shards)
        distributed.seed_all(spec.train.seed, "dropout", rank.rank)
        self.peak_lr = peak_lr(spec.optim, spec.train.global_batch)
        self.tracer = Tracer(job.run, rank, job.attempt, phases, tell, self._messages)
        self.bad_steps = BadStepCheck(spec, rank, job.run, job.attempt, model, reporter)
        self.noise = self._noise()
        # State: from the newest good checkpoint, which all ranks agree on.
        self.at = Progress()
        self.checkpoints = CheckpointManager(
            job,
            rank,
            reporter,
            self.at,
            TrainState(model, self.optimizer, shards),
            precision=self.precision,
            bad_steps=self.bad_steps,
            noise=self.noise,
            fingerprint=dataset.fingerprint,
            total=self.total,
            steps_per_epoch=self.batches.steps_per_epoch,
        )
        startup.done("build")
        if self.checkpoints.resume():
            self.strategy.updated()
        startup.done("load")
        self.checkpoints.open()
        self.last = min(self.total, job.until or self.total)
        self.watch = self.checkpoints.watch = self._drift_watch(model, shards) if spec.train.check_replicas else None
        self.memory = MemoryMeter(rank.device, model, shards, self.optimizer)
        telemetry.memory = self.memory.read
        every = spec.train.check_gradients
        self.gradients = GradientCheck(rank, shards, every, reporter) if every else None
        every, say = spec.observe.histograms, reporter.say if reporter else None
        self.histograms = Histograms(rank, shards, every, say) if every else None
        self.train_step = TrainStep(
            rank,
            self.strategy,
            self.optimizer,
            self.precision,
            full_tokens=spec.train.global_batch * spec.model.context,
            clip=spec.optim.clip,
            before_update=self._before_update,
            judge=self.bad_steps,
            watch=self.watch,
            gradients=self.gradients,
            noise=self.noise,
            heartbeat=heartbeat,
            telemetry=telemetry,
        )

    def train(self) -> Outcome:
        """The loop. Each line that has `rank` in its comment is a collective: every rank comes by."""
        at = self.at
        first, stop = at.step + 1, False
        loader = Loader(
            self.feed.windows,
            self.batches,
            at.cursor,
            rank=self.rank.rank,
            world=self.rank.world_size,
            micro_batch=self.spec.train.micro_batch,
            pack=self.spec.data.pack,
            prefetch=self.spec.data.prefetch,
            steps=max(self.last - at.step, 0),
            transform=self.injector.data(self.batches, self.feed.to_torch) if self.injector else self.feed.to_torch,
            timeout_s=self.spec.recovery.data_patience,
            on_stall=self._stalled,
        )
        try:
            with loader:
                begun = before = time.perf_counter()
                unusual = True  # besides the step: its caches warm up
                self.heartbeat.step(at.step + 1)
                for batch in loader:  # every rank, its own slice of the same global batch
                    at.step += 1
                    ending = at.step == self.last
                    lr = lr_at(at.step, self.total, self.spec.optim.schedule, self.peak_lr)
                    train = partial(  # every rank: gradients and loss are summed
                        self.train_step,
                        at.step,
                        [self.feed.to_device(m) for m in batch.micro_batches],
                        batch.tokens,
                        lr,
                        want_stop=bool(self.reporter and self.reporter.command == "stop"),
                        vote=self.checkpoints.vote(self._due(self.spec.checkpoint.every, ending)),
                        trace=self.tracer.asks(self.reporter.traces) if self.reporter else (0, 0),
                        samples=len(batch.ids),
                    )
                    report = self.bad_steps.step(at.step, batch, train)  # every rank; not what the ledger leaves out
                    at.cursor, stop = batch.after, report.stop
                    at.loss = report.loss if math.isfinite(report.loss) else at.loss
                    ended = time.perf_counter()
                    self.heartbeat.stepped(ended - begun - batch.wait_seconds)
                    self._record(batch, lr, report.loss, report.grad_norm, report.tokens, ended - begun)
                    found = self.noise.verdict(at.step) if self.noise else None
                    if found and self.reporter:
                        self.reporter.event(found.event(time.time()))
                    self.checkpoints.stepped(ended - before, unusual)
                    before, unusual = ended, False
                    if at.step == first:
                        self.startup.done("first_step")
                        if self.reporter:
                            told = self.startup.told(first - 1)
                            self.reporter.say("first_step", attempt=self.job.attempt, step=first, **told)
                        self.checkpoints.prepare()  # every rank: memory for copies
                        unusual = True
                        # What torch and the model have made by now stays: a full collection walks through it for 0.2 s.
                        gc.collect()
                        gc.freeze()
                    if self.eval_set and self._due(self.spec.eval.every, at.step == self.total):
                        self._evaluate()  # every rank: losses are summed
                        unusual = True
                    if self._due(self.spec.checkpoint.every, stop or ending):
                        self.heartbeat.enter("save")
                        self.checkpoints.save(stop or ending)  # every rank writes its part; rank 0 commits, last
                        unusual = True
                    elif report.votes == 1.0:
                        self.heartbeat.enter("save")
                        self.checkpoints.snapshot()  # every rank: to memory
                    self.tracer.step(at.step + 1, report.trace, ends=stop or ending)  # every rank, the same steps
                    begun = time.perf_counter()
                    self.heartbeat.step(at.step + 1)
                    if stop:
                        break
            self.heartbeat.enter("end")
            if self.gradients:
                self.gradients.close()
            self.checkpoints.finish()  # every rank
        finally:
            self.tracer.close()
            self.checkpoints.close()
            self.train_step.hooks.close()
        status = "finished" if at.step >= self.total else "interrupted" if stop else "paused"
        return Outcome(status, at.step, at.loss, at.eval_loss)

    def _note(self, text: str) -> None:
        """A word to the user; rank 0's."""
        if self.reporter:
            self.reporter.say("note", text=text)

    def _messages(self) -> list[tuple[str, int, str]]:
        """What ranks send in a step, as far as it is known by name."""
        return [*MESSAGES, *getattr(self.strategy, "messages", list)()]

    def _stalled(self, stall: Stall) -> None:
        """Says that the loader gives no batch, while that goes on: on rank 0 as an event, on others by `tell`."""
        data = {
            "step": self.at.step + 1,
            "rank": self.rank.rank,
            "seconds": round(stall.seconds, 3),
            "files": self.feed.windows.files(stall.ids),
            "where": stall.at,
            "restarts": stall.restarts,
            "final": stall.final,
        }
        self._tell(Event("data_stalled", time.time(), data))

    def _due(self, every: int | None, ending: bool) -> bool:
        return ending or (every is not None and self.at.step % every == 0)

    def _record(self, batch: StepBatch, lr: float, loss: float, norm: float, tokens: int, seconds: float) -> None:
        if self.reporter:  # rank 0: what it reports is the same on every rank
            self.reporter.step(
                StepRecord(
                    step=self.at.step,
                    loss=loss,
                    lr=lr,
                    grad_norm=norm,
                    tokens=tokens,
                    seconds=seconds,
                    data_seconds=batch.wait_seconds,
                    world_size=self.rank.world_size,
                    attempt=self.job.attempt,
                    samples_hash=batch.samples_hash,
                    grad_noise_scale=self.noise.scale if self.noise else None,
                )
            )

    def _evaluate(self) -> None:
        self.at.eval_loss, tokens = evaluate(self.rank, self.strategy, self.precision, self.eval_set, self.heartbeat)
        self.at.evaluated = self.at.step
        best = self.at.best_eval is None or self.at.eval_loss < self.at.best_eval
        self.at.best_eval = self.at.eval_loss if best else self.at.best_eval
        if self.reporter:
            self.reporter.say("eval", step=self.at.step, loss=self.at.eval_loss, tokens=tokens, best=best)

    def _noise(self) -> GradientNoise | None:
        every = self.spec.observe.grad_noise
        if every is None:
            return None
        batch, factor = self.spec.train.global_batch, self.strategy.loss_factor
        return GradientNoise(self.rank, self.strategy.module, factor, every=every, batch=batch, total=self.total)

    def _drift_watch(self, model: nn.Module, shards: Mapping[str, ParamShard]) -> ReplicaCheck | None:
        """None where no two ranks hold the same."""
        every, saved = self.spec.train.check_replicas or 1, self.spec.checkpoint.every
        made = ReplicaCheck(
            self.rank,
            self.job.run,
            self.job.attempt,
            model,
            self.optimizer,
            shards,
            due=lambda step: step % every == 0 or step == self.last or (saved is not None and step % saved == 0),
            before_write=self._before_mending,
            reporter=self.reporter,
        )
        if made.compares:
            return made
        where = f"parallel.strategy: {self.spec.parallel.strategy} on {self.rank.world_size} workers"
        self._note(
            f"train.check_replicas: {every}: no two ranks hold the same weights with {where}, so there is nothing to compare"
        )
        return None

    def _before_mending(self) -> None:
        self.heartbeat.enter("save")  # no deadline of a step: the state may be large, and storage slow
        self.checkpoints.before_update()

    def _before_update(self) -> None:
        self.memory.before_update()
        if self.histograms:  # every rank: counts are summed
            self.histograms.look(self.at.step, self.train_step.hooks.pending_factor)
        self.checkpoints.before_update()

    def _example(self, module: nn.Module, samples: int = 1) -> torch.Tensor:
        """The loss of the first sample, so many times: what a strategy needs to see the graph."""
        with self.precision.autocast():
            return loss_sum(module, self.feed.example(samples))


def _gather(mine: dict[str, Any], rank: Rank) -> list[dict[str, Any]]:
    """Every rank's value, on every rank."""
    every: list[dict[str, Any]] = [mine] * rank.world_size
    if rank.world_size > 1:
        dist.all_gather_object(every, mine, group=rank.control)
    return every
