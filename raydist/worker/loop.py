"""The training loop, from the process group to the last checkpoint. Comments name the ranks that take part in each line.

Runs in: each train worker. Torch, never ray: the loop reaches the monitor through the plain callables of `MonitorChannel`.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raydist.data.batches import Loader, Stall, StepBatch
from raydist.data.dataset import TokenDataset
from raydist.data.samples import full_tokens
from raydist.extension_plans import strategy_plan
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event, StepRecord
from raydist.redact import redact
from raydist.worker import base_weights, build, distributed, model_transforms, precision, pretrained
from raydist.worker.attempt import Job, MonitorChannel, Outcome
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.checks.gradients import GradientCheck
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.comm.compression.reducer import reducers_of
from raydist.worker.comm.compression.state import NAME as COMPRESSION
from raydist.worker.comm.compression.state import Compression
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.dataloader import Feed
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.forward_seeds import ForwardSeeds
from raydist.worker.lora import frozen_shards
from raydist.worker.loss import build as build_loss
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.metrics import memory
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.metrics.histograms import Histograms
from raydist.worker.metrics.memory import MemoryMeter
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.metrics.startup_timing import Startup
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.metrics.trace import Tracer
from raydist.worker.optim.schedule import lr_at, peak_lr
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import parts_of
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import split_layers
from raydist.worker.parameter_table import ParameterTable, gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import LEFT_OUT, MESSAGES, TrainStep, evaluate
from raydist.worker.step_hooks import BeforeUpdate, StepHook

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
    """Trains from the newest good checkpoint, or from the start, to the end. Called by every rank; only rank 0 has a `channel`.

    `heartbeat` gets the phase of this rank, `startup` its progress before the first step. `tell`: sends the events of a rank
    without a channel; it must not block.

    Raises the error that stops the run: NonFinite, LossSpike, GraphMismatch, SavesFailed, Fenced, SuspectHardware, CheckpointError,
    DataError, or the model's own exception; and Rollback, which ends the attempt.
    """
    reporter = Reporter(channel.push, channel.durable) if channel is not None else None
    try:
        workers = gather_json(distributed.describe(rank), rank.control)
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
    """Injects the faults of the job."""
    from raydist.worker.faults.injector import Injector

    return Injector(job.faults, job.run, rank, job.attempt)


class _Run:
    """The parts of one attempt, in the order of the data flow."""

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
        self.mesh = Mesh.of(spec, rank)  # every rank, if a replica has several
        self.feed = Feed(spec, self.mesh, dataset)
        self.batches = self.feed.batches
        for line in self.feed.notes():
            self._note(line)
        self.total = spec.train.total(self.batches.steps_per_epoch)
        self.eval_set = self.feed.eval_set() if spec.eval.every else []
        # Model, strategy, optimizer: the same on every rank, from the same seed.
        if spec.train.deterministic:
            distributed.be_deterministic()
        precision.refuse(spec.precision, rank.device)
        self.precision = Precision(spec.precision, rank.device)
        self.loss = build_loss(spec)
        settled = build.settled(spec, rank, job.run, dataset.vocab_size, self._example, self._note)
        self.strategy = build.build_strategy(settled, self.mesh)
        model = build.build_model(spec, dataset.vocab_size, self.strategy.takes_meta)
        if note := build.make_trainable(model):
            self._note(note)
        build.check_same(model, rank)  # every rank: hashes are compared
        if self.injector:
            self.injector.attach(model)
        capacity = build.capacity(spec, rank, model)
        if reporter and capacity:
            reporter.say("capacity", **capacity)
        if self.mesh.of_state.data_size == 1 and (plan := strategy_plan(spec.parallel.strategy)) and plan.sharded:
            self._note(f"parallel.strategy: {spec.parallel.strategy} with one replica of the model: nothing is split")
        self.split = split_layers(model, self.mesh, spec.parallel.exchange)
        if isinstance(self.strategy, Pipeline):
            model = self.strategy.cut(model)
            if reporter:
                reporter.say("pipeline", **build.pipeline_schedule(spec, self.mesh, self.strategy.cuts))
        self.strategy.wrap(model, self._example)
        for part in parts_of(model):
            model_transforms.prepare(part, spec.train, self.feed.shapes)
        seeds = ForwardSeeds(parts_of(model), spec.train.seed, rank.device, by_block=spec.train.compile is not True)
        shards = self.split.shards(self.strategy.shards()) if self.split else self.strategy.shards()
        frozen = frozen_shards(model)
        if self.split:
            self.split.place(frozen)
        likes = {name: shard.local if shard.like is None else shard.like for name, shard in frozen.items()}
        has_base = spec.model.lora is not None
        parameters = gather_parameters(
            shards, rank, likes, has_base
        )  # every rank: names, shapes and holders of all ranks
        self.optimizer = build.build_optimizer(spec, rank, self.strategy, shards, self.split)
        self.peak_lr = peak_lr(spec.optim, spec.train.global_batch)
        self.tracer = Tracer(job.run, rank, job.attempt, phases, tell, self._messages, spec.comm.compresses)
        self.bad_steps = BadStepCheck(spec, self.mesh, job.run, job.attempt, model, reporter, self.feed.divide)
        self.noise = self._noise()
        # State: from the newest good checkpoint, the same on all ranks.
        self.at = Progress()
        self.checkpoints = CheckpointManager(
            job,
            rank,
            reporter,
            self.at,
            TrainState(model, self.optimizer, shards, frozen, frozenset(parameters.base)),
            precision=self.precision,
            bad_steps=self.bad_steps,
            noise=self.noise,
            fingerprint=dataset.fingerprint,
            total=self.total,
            steps_per_epoch=self.batches.steps_per_epoch,
            parameters=parameters,
            mesh=self.mesh,
            base=self._base(parameters) if has_base else None,
        )
        self.compression = self._compression()  # every rank: what would be sent is compared
        if self.compression:
            self.checkpoints.register(COMPRESSION, self.compression)
        startup.done("build")
        if has_base:  # checkpoints do not hold it
            self._load_pretrained(model, {**shards, **frozen}, dataset.vocab_size)
        if self.checkpoints.resume():
            self.strategy.updated()
        elif spec.init_from is not None:
            self.checkpoints.start_from(spec.init_from)
            self.strategy.updated()
        elif spec.model.hf is not None and not has_base:
            self._load_pretrained(model, shards, dataset.vocab_size)
            self.strategy.updated()
        startup.done("load")
        self.checkpoints.open()
        self.last = min(self.total, job.until or self.total)
        self.replica_check = self._replica_check(model, parameters) if spec.train.check_replicas else None
        meter = MemoryMeter(rank.device, model, shards, self.optimizer)
        telemetry.memory = meter.read
        every = spec.train.check_gradients
        self.gradients = GradientCheck(rank, parameters, every, reporter) if every else None
        every, say = spec.observe.histograms, reporter.say if reporter else None
        experts = ExpertLoads(parts_of(model), rank, spec.observe.expert_loads, say)
        self.experts = experts if experts.counts else None
        histograms = Histograms(rank, parameters, every, say) if every else None
        hooks: list[StepHook | None] = [
            telemetry,
            seeds,
            self.compression,
            self.experts,
            self.noise,
            self.gradients,
            self.bad_steps,
            self.replica_check,
            BeforeUpdate(meter.before_update),
            histograms,
            BeforeUpdate(self.checkpoints.before_update),  # last: waits until no copy of the state is in progress
        ]
        self.train_step = TrainStep(
            self.mesh,
            self.strategy,
            self.optimizer,
            self.precision,
            parameters=parameters,
            split=self.split,
            full_tokens=full_tokens(self.batches, self.feed.samples),
            clip=spec.optim.clip,
            hooks=[hook for hook in hooks if hook is not None],
            heartbeat=heartbeat,
            loss=self.loss,
        )

    def train(self) -> Outcome:
        """The loop. A line with `every rank` in its comment is a collective."""
        at = self.at
        first, stop = at.step + 1, False
        loader = Loader(
            self.feed.samples,
            self.batches,
            at.cursor,
            rank=self.mesh.data_rank,
            world=self.mesh.data_size,
            divide=self.feed.divide,
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
                unusual = True  # this step takes longer than others: caches warm up
                self.heartbeat.step(at.step + 1)
                for batch in loader:  # every rank, its own slice of the same global batch
                    at.step += 1
                    ending = at.step == self.last
                    lr = lr_at(at.step, self.total, self.spec.optim.schedule, self.peak_lr)
                    if self.bad_steps.leaves_out(at.step, batch):
                        report = LEFT_OUT
                    else:
                        report = self.train_step(  # every rank: gradients and loss are summed
                            at.step,
                            [self.feed.to_device(m) for m in batch.micro_batches],
                            batch.tokens,
                            lr,
                            want_stop=bool(self.reporter and self.reporter.command == "stop"),
                            vote=self.checkpoints.vote(self._checkpoint_due(at.step, ending)),
                            trace=self.tracer.requested(self.reporter.traces) if self.reporter else (0, 0),
                            samples=len(batch.ids),
                        )
                    at.cursor, stop = batch.after, report.stop
                    at.loss = report.loss if math.isfinite(report.loss) else at.loss
                    ended = time.perf_counter()
                    self.heartbeat.stepped(ended - begun - batch.wait_seconds)
                    self._record(batch, lr, report.loss, report.grad_norm, report.tokens, ended - begun)
                    self.checkpoints.stepped(ended - before, unusual)
                    before, unusual = ended, False
                    if at.step == first:
                        self.startup.done("first_step")
                        if self.reporter:
                            data = self.startup.first_step_data(first - 1)
                            self.reporter.say("first_step", attempt=self.job.attempt, step=first, **data)
                        self.checkpoints.prepare()  # every rank: memory for copies
                        unusual = True
                        # The objects of torch and the model stay: without `freeze` a full collection scans them for 0.2 s.
                        gc.collect()
                        gc.freeze()
                    if self.eval_set and _due(at.step, self.spec.eval.every, at.step == self.total):
                        self._evaluate()  # every rank: losses are summed
                        unusual = True
                    if self._checkpoint_due(at.step, stop or ending):
                        self._before_copy()
                        self.checkpoints.save(stop or ending)  # every rank writes its part; rank 0 commits, last
                        unusual = True
                    elif report.votes == 1.0:
                        self._before_copy()
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
            self.train_step.optimizer_hooks.close()
        status = "finished" if at.step >= self.total else "interrupted" if stop else "paused"
        return Outcome(status, at.step, at.loss, at.eval_loss)

    def _note(self, text: str) -> None:
        """A note for the user, from rank 0."""
        if self.reporter:
            self.reporter.say("note", text=text)

    def _base(self, parameters: ParameterTable) -> dict[str, Any]:
        """The weights that adapters are for, as checkpoints name them. Every rank: it reads its share of the files."""
        hf = str(self.spec.model.hf)
        found = base_weights.fingerprint(Path(hf), self.rank)
        return {"hf": hf, "fingerprint": found, "frozen": list(parameters.base)}

    def _load_pretrained(self, model: nn.Module, shards: Mapping[str, ParamShard], vocab_size: int) -> None:
        read = pretrained.load(self.spec.model, model, shards, vocab_size)
        self._note(f"model.hf: rank 0 read {read / 2**20:,.0f} MiB of {self.spec.model.hf}")

    def _messages(self) -> list[tuple[str, int, str]]:
        """The collectives of a step that have a name: (kind, elements, name)."""
        loads = [self.experts.message] if self.experts else []
        return [*MESSAGES, *loads, *getattr(self.strategy, "messages", list)()]

    def _stalled(self, stall: Stall) -> None:
        """Reports that the loader gives no batch, while the stall lasts: on rank 0 as an event, on others through `tell`."""
        data = {
            "step": self.at.step + 1,
            "rank": self.rank.rank,
            "seconds": round(stall.seconds, 3),
            "files": self.feed.samples.files(stall.ids),
            "where": stall.at,
            "restarts": stall.restarts,
            "final": stall.final,
        }
        self._tell(Event("data_stalled", time.time(), data))

    def _checkpoint_due(self, step: int, ending: bool) -> bool:
        return _due(step, self.spec.checkpoint.every, ending)

    def _record(self, batch: StepBatch, lr: float, loss: float, norm: float, tokens: int, seconds: float) -> None:
        if self.reporter:  # rank 0: the values are the same on every rank, but for those of compression
            sent = self.compression.last if self.compression else None
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
                    expert_imbalance=self.experts.imbalance if self.experts else None,
                    exchanged_bytes=self.experts.exchanged if self.experts else None,
                    residual_norm=sent.residual_norm if sent else None,
                    compression_error=sent.compression_error if sent else None,
                    sent_bytes=sent.sent_bytes if sent else None,
                    saved_bytes=sent.saved_bytes if sent else None,
                )
            )

    def _evaluate(self) -> None:
        self.at.eval_loss, tokens = evaluate(
            self.mesh, self.strategy, self.precision, self.eval_set, self.heartbeat, self.loss
        )
        self.at.evaluated = self.at.step
        best = self.at.best_eval is None or self.at.eval_loss < self.at.best_eval
        self.at.best_eval = self.at.eval_loss if best else self.at.best_eval
        if self.reporter:
            self.reporter.say("eval", step=self.at.step, loss=self.at.eval_loss, tokens=tokens, best=best)

    def _compression(self) -> Compression | None:
        """None if no gradients are compressed on any rank."""
        reducers = reducers_of(self.strategy)
        if not self.spec.comm.compresses or not any(gather_json(len(reducers), self.rank.control)):
            if self.spec.comm.compresses:
                self._note(
                    f"comm.compress: {self.spec.comm.compress}: there is one replica of the state, and nothing is sent"
                )
            return None
        return Compression(reducers, self.precision, self.rank)

    def _noise(self) -> GradientNoise | None:
        every = self.spec.observe.grad_noise
        if every is None:
            return None
        for axis, why in (
            ("expert", "a gradient of an expert has several ranks' samples"),
            ("context", "a rank's gradient has parts of samples"),
        ):
            if getattr(self.mesh, axis) > 1:
                self._note(f"observe.grad_noise: not measured with parallel.{axis}: {why}")
                return None
        module, factor = self.strategy.module, self.strategy.loss_factor
        return GradientNoise(self.mesh, module, factor, self.split, every=every)

    def _replica_check(self, model: nn.Module, parameters: ParameterTable) -> ReplicaCheck | None:
        """None if no two ranks hold the same weights."""
        every = self.spec.train.check_replicas or 1
        made = ReplicaCheck(
            self.rank,
            self.job.run,
            self.job.attempt,
            model,
            self.optimizer,
            parameters,
            split=self.split,
            due=lambda step: _due(step, every, self._checkpoint_due(step, step == self.last)),
            before_write=self._before_repair,
            reporter=self.reporter,
        )
        if made.compares:
            return made
        where = f"parallel.strategy: {self.spec.parallel.strategy} on {self.rank.world_size} workers"
        self._note(
            f"train.check_replicas: {every}: no two ranks hold the same weights with {where}, so there is nothing to compare"
        )
        return None

    def _before_repair(self) -> None:
        self.heartbeat.enter("save")  # not limited by the deadline of a step: the state may be large, and storage slow
        self.checkpoints.before_update()

    def _before_copy(self) -> None:
        self.heartbeat.enter("save")
        if self.replica_check:
            self.replica_check.before_save(self.at.step)  # every rank: hashes are compared

    def _example(self, module: nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
        """The loss of the first sample, `samples` times, with which a strategy checks the graph. See `Example`."""
        batch = self.feed.example(samples)
        with self.precision.autocast():
            return call_model(module, batch).float().sum() if part else self.loss(module, batch)


def _due(step: int, every: int | None, ending: bool) -> bool:
    return ending or (every is not None and step % every == 0)
