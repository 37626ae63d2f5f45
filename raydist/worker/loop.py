"""The training loop, from an empty process group to the last checkpoint; says who takes part in what.

Runs in: each train worker. Torch, never ray: what it needs of the outside comes as `Door`, a few plain callables.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.data.batches import Batches, Cursor, Loader, Stall, StepBatch
from raydist.data.dataset import TokenDataset
from raydist.records import Event, StepRecord
from raydist.redact import redact
from raydist.rundir import RunDir, resume_attempt, step_folder
from raydist.spec import JobSpec, spec_hash
from raydist.worker import build, compute, memory, offload, optim, precision, setup
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint import vault as vaults
from raydist.worker.checkpoint.replicas import Replicas
from raydist.worker.checkpoint.save import RETRY_S, Saver
from raydist.worker.checkpoint.vault import Vault, VaultJob
from raydist.worker.drift import DriftWatch
from raydist.worker.feed import Feed
from raydist.worker.gradients import GradientCheck
from raydist.worker.guard import Guard
from raydist.worker.histograms import Histograms
from raydist.worker.memory import MemoryMeter
from raydist.worker.noise import GradientNoise
from raydist.worker.parallel import ParallelStrategy, ParamShard
from raydist.worker.precision import Precision
from raydist.worker.probe import Probe
from raydist.worker.reporter import Push, Reporter
from raydist.worker.schedule import lr_at
from raydist.worker.setup import Rank
from raydist.worker.startup import Startup
from raydist.worker.state import TrainState
from raydist.worker.step import MESSAGES, TrainStep, evaluate, loss_sum
from raydist.worker.telemetry import Telemetry
from raydist.worker.trace import Tracer

if TYPE_CHECKING:
    from raydist.worker.injector import Injector


@dataclass(frozen=True, slots=True)
class Door:
    """How rank 0 reaches the outside: where records go, and how to wait until they are durable."""

    push: Push
    durable: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one run. `until`: end after that step, with a checkpoint, as paused. `vault`: None takes no snapshots.
    `faults`: those to inject, plain.
    """

    spec: JobSpec
    run: RunDir
    dataset: str
    attempt: int = 1
    until: int | None = None
    allow_spec_change: bool = False
    faults: Sequence[Mapping[str, Any]] = ()
    vault: VaultJob | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: status finished, paused or interrupted, after step `step`."""

    status: str
    step: int
    loss: float | None
    eval_loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, to cross to the driver."""
        return {"status": self.status, "step": self.step, "loss": self.loss, "eval_loss": self.eval_loss}


def _to_stderr(event: Event) -> None:
    print(f"raydist: {event.kind}: {redact(event.data)}", file=sys.stderr, flush=True)


def train(
    job: Job,
    rank: Rank,
    door: Door | None,
    probe: Probe | None = None,
    startup: Startup | None = None,
    tell: Callable[[Event], None] = _to_stderr,
) -> Outcome:
    """Trains from the newest good checkpoint, or from the start, to the end. Called by every rank; `door` by rank 0.

    `probe` is told what this rank is doing, `startup` how far it has come before its first step. `tell`: how a rank without a
    door says what it alone knows; it must not block.

    Raises what stops the run: NonFinite, LossSpike, GraphMismatch, SavesFailed, Fenced, SuspectHardware, CheckpointError,
    DataError, or the model's own exception; and Rollback, which ends the attempt.
    """
    reporter = Reporter(door.push, door.durable) if door is not None else None
    try:
        workers = _gather(setup.describe(rank), rank)
        if reporter:
            reporter.say("workers", workers=workers)
            reporter.say("note", text="; ".join(rank.notes))
        tell = reporter.event if reporter else tell
        probe = probe or Probe()
        memory.keep_history(job.run, rank, job.attempt, job.spec.observe.memory_history)
        with Telemetry(job.run.uri, rank, job.attempt, probe, job.spec.observe.interval_s, tell) as telemetry:
            return _Run(job, rank, reporter, probe, startup or Startup(), tell, telemetry).train()
    except torch.OutOfMemoryError:
        tell(Event("note", time.time(), {"text": memory.after_oom(rank.rank, job.spec.observe.memory_history)}))
        raise
    finally:
        if reporter:
            reporter.close()


def _injector(job: Job, rank: Rank) -> Injector:
    """What spoils the run where it was asked to."""
    from raydist.worker.injector import Injector

    return Injector(job.faults, job.run, rank, job.attempt)


class _Run:
    """The parts of one attempt, put together in the order of data flow."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        reporter: Reporter | None,
        probe: Probe,
        startup: Startup,
        tell: Callable[[Event], None],
        telemetry: Telemetry,
    ) -> None:
        spec, self._tell = job.spec, tell
        self.job, self.spec, self.rank, self.reporter = job, spec, rank, reporter
        self.injector = _injector(job, rank) if job.faults else None
        phases = probe
        probe = self.injector.watch(probe) if self.injector else probe
        self.probe, self.startup = probe, startup
        # Data: every rank opens it; nothing is sent.
        dataset = TokenDataset(job.dataset)
        self.feed = Feed(spec, rank, dataset)
        self.batches = Batches(len(self.feed.windows), spec.train.global_batch, spec.train.seed, dataset.fingerprint)
        self.total = spec.train.total(self.batches.steps_per_epoch)
        self.eval_set = self.feed.eval_set() if spec.eval.every else []
        # Model, strategy, optimizer: the same on every rank, from the same seed.
        if spec.train.deterministic:
            setup.be_deterministic()
        precision.refuse(spec.precision, rank.device)
        self.precision = Precision(spec.precision, rank.device)
        settled = build.settled(spec, rank, job.run, dataset.vocab_size, self._example, self._note)
        self.strategy = cast(ParallelStrategy, registry.load("parallel", spec.parallel.strategy)(settled, rank))
        model = build.build_model(spec, dataset.vocab_size, self.strategy.takes_meta)
        if self.injector:
            self.injector.attach(model)
        capacity = build.capacity(spec, rank, model)
        if reporter and capacity:
            reporter.say("capacity", **capacity)
        if rank.world_size == 1 and spec.parallel.strategy != "ddp":
            self._note(f"parallel.strategy: {spec.parallel.strategy} on one worker: nothing is split")
        self.strategy.wrap(model, self._example)
        compute.prepare(model, spec.train)
        shards = self.strategy.shards()
        self.optimizer = build.build_optimizer(spec, rank, self.strategy, shards)
        setup.seed_all(spec.train.seed, "dropout", rank.rank)
        self.peak_lr = optim.peak_lr(spec.optim, spec.train.global_batch)
        # State: from the newest good checkpoint, which all ranks agree on.
        self.step, self.cursor = 0, Cursor()
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.best_eval: float | None = None
        self.evaluated = 0
        self.state = TrainState(model, self.optimizer, shards)
        self.numbers = spec.numbers(dataset.fingerprint)
        self.tracer = Tracer(job.run, rank, job.attempt, phases, tell, self._messages)
        self.guard = Guard(spec, rank, job.run, job.attempt, model, reporter)
        self.noise = self._noise()
        startup.done("build")
        self._resume()
        startup.done("load")
        self.replicas = (
            Replicas(
                job.run,
                spec.checkpoint.replicas,
                keep=spec.checkpoint.keep,
                attempt=job.attempt,
                verify_every=spec.checkpoint.verify_every,
                on_event=reporter.event,
            )
            if reporter
            else None
        )
        common: dict[str, Any] = {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "group": rank.control,
            "attempt": job.attempt,
            "spec_hash": spec_hash(spec),
            "numbers": self.numbers,
        }
        self.saver = Saver(
            job.run,
            asynchronous=spec.checkpoint.asynchronous,
            keep=spec.checkpoint.keep,
            on_event=self._saved,
            before_commit=reporter.flush if reporter else None,
            max_failures=spec.checkpoint.max_failures,
            timeout_s=spec.checkpoint.timeout_s,
            **common,
        )
        self.vault: Vault | None = None
        if job.vault is not None and spec.snapshot_every is not None:
            told = reporter.told if reporter else None  # a restart from memory must find the records up to there
            tell = reporter.event if reporter else lambda event: None
            self.vault = Vault(
                job.vault, spec.snapshot_every, resumed=self.step, before_commit=told, on_event=tell, **common
            )
        self.last = min(self.total, job.until or self.total)
        self.watch = self._drift_watch(model, shards) if spec.train.check_replicas else None
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
            judge=self.guard,
            watch=self.watch,
            gradients=self.gradients,
            noise=self.noise,
            probe=probe,
            telemetry=telemetry,
        )

    def train(self) -> Outcome:
        """The loop. Each line that has `rank` in its comment is a collective: every rank comes by."""
        first, stop, saving = self.step + 1, False, False
        loader = Loader(
            self.feed.windows,
            self.batches,
            self.cursor,
            rank=self.rank.rank,
            world=self.rank.world_size,
            micro_batch=self.spec.train.micro_batch,
            pack=self.spec.data.pack,
            prefetch=self.spec.data.prefetch,
            steps=max(self.last - self.step, 0),
            transform=self.injector.data(self.batches, self.feed.to_torch) if self.injector else self.feed.to_torch,
            timeout_s=self.spec.recovery.data_patience,
            on_stall=self._stalled,
        )
        try:
            with loader:
                begun = before = time.perf_counter()
                unusual = True  # besides the step: its caches warm up
                self.probe.step(self.step + 1)
                for batch in loader:  # every rank, its own slice of the same global batch
                    self.step += 1
                    ending = self.step == self.last
                    lr = lr_at(self.step, self.total, self.spec.optim.schedule, self.peak_lr)
                    train = partial(  # every rank: gradients and loss are summed
                        self.train_step,
                        self.step,
                        [self.feed.to_device(m) for m in batch.micro_batches],
                        batch.tokens,
                        lr,
                        want_stop=bool(self.reporter and self.reporter.command == "stop"),
                        vote=self.vault.vote(self.step, self._due(self.spec.checkpoint.every, ending))
                        if self.vault
                        else 0.0,
                        trace=self.tracer.asks(self.reporter.traces) if self.reporter else (0, 0),
                        samples=len(batch.ids),
                    )
                    report = self.guard.step(self.step, batch, train)  # every rank; not what the ledger leaves out
                    self.cursor, stop = batch.after, report.stop
                    self.loss = report.loss if math.isfinite(report.loss) else self.loss
                    ended = time.perf_counter()
                    self.probe.stepped(ended - begun - batch.wait_seconds)
                    self._record(batch, lr, report.loss, report.grad_norm, report.tokens, ended - begun)
                    found = self.noise.verdict(self.step) if self.noise else None
                    if found and self.reporter:
                        self.reporter.event(found.event(time.time()))
                    if self.vault:
                        self.vault.stepped(ended - before, unusual or self.saver.busy)
                        before, unusual = ended, False
                    if self.step == first:
                        self.startup.done("first_step")
                        if self.reporter:
                            told = self.startup.told(first - 1)
                            self.reporter.say("first_step", attempt=self.job.attempt, step=first, **told)
                        state = self.state.capture()[:2]
                        self.saver.prepare(*state)  # memory for the copies, beside the next step
                        if self.vault:
                            self.vault.prepare(*state)  # every rank: there is memory on all nodes, or none takes any
                        unusual = True
                        # What torch and the model have made by now stays: a full collection walks through it for 0.2 s.
                        gc.collect()
                        gc.freeze()
                    if self.eval_set and self._due(self.spec.eval.every, self.step == self.total):
                        self._evaluate()  # every rank: losses are summed
                        unusual = True
                    if self._due(self.spec.checkpoint.every, stop or ending):
                        self.probe.enter("save")
                        self._save(stop or ending)  # every rank writes its part; rank 0 commits, last
                        saving = unusual = True
                    elif self.vault and report.votes == 1.0:
                        self.probe.enter("save")
                        self.vault.start(self.step, *self._state())  # every rank: to memory
                    self.tracer.step(self.step + 1, report.trace, ends=stop or ending)  # every rank, the same steps
                    begun = time.perf_counter()
                    self.probe.step(self.step + 1)
                    if stop:
                        break
            self.probe.enter("end")
            if self.gradients:
                self.gradients.close()
            while saving and not self.saver.wait():  # every rank
                time.sleep(RETRY_S)  # the last one failed, and the run must not end without it
                self._save(ending=True)  # every rank; raises after checkpoint.max_failures in a row
            if self.replicas:
                self.replicas.close(self.spec.checkpoint.timeout_s)
        finally:
            self.tracer.close()
            if self.replicas:
                self.replicas.close(0.0)
            self.saver.close()
            if self.vault:
                self.vault.close()
            if isinstance(self.optimizer, offload.OffloadedAdamW):
                self.optimizer.close()
        status = "finished" if self.step >= self.total else "interrupted" if stop else "paused"
        return Outcome(status, self.step, self.loss, self.eval_loss)

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
            "step": self.step + 1,
            "rank": self.rank.rank,
            "seconds": round(stall.seconds, 3),
            "files": self.feed.windows.files(stall.ids),
            "where": stall.at,
            "restarts": stall.restarts,
            "final": stall.final,
        }
        self._tell(Event("data_stalled", time.time(), data))

    def _saved(self, event: Event) -> None:
        """What the Saver tells, on rank 0."""
        if self.reporter and self.replicas:
            self.reporter.event(event)
            if event.kind == "checkpoint_saved":
                self.replicas.committed()

    def _due(self, every: int | None, ending: bool) -> bool:
        return ending or (every is not None and self.step % every == 0)

    def _record(self, batch: StepBatch, lr: float, loss: float, norm: float, tokens: int, seconds: float) -> None:
        if self.reporter:  # rank 0: what it reports is the same on every rank
            self.reporter.step(
                StepRecord(
                    step=self.step,
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
        self.eval_loss, tokens = evaluate(self.rank, self.strategy, self.precision, self.eval_set, self.probe)
        self.evaluated = self.step
        best = self.best_eval is None or self.eval_loss < self.best_eval
        self.best_eval = self.eval_loss if best else self.best_eval
        if self.reporter:
            self.reporter.say("eval", step=self.step, loss=self.eval_loss, tokens=tokens, best=best)

    def _noise(self) -> GradientNoise | None:
        every = self.spec.observe.grad_noise
        if every is None:
            return None
        batch, factor = self.spec.train.global_batch, self.strategy.loss_factor
        return GradientNoise(self.rank, self.strategy.module, factor, every=every, batch=batch, total=self.total)

    def _drift_watch(self, model: nn.Module, shards: Mapping[str, ParamShard]) -> DriftWatch | None:
        """None where no two ranks hold the same."""
        every, saved = self.spec.train.check_replicas or 1, self.spec.checkpoint.every
        made = DriftWatch(
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
        self.probe.enter("save")  # no deadline of a step: the state may be large, and storage slow
        self._state_is_free()

    def _before_update(self) -> None:
        self.memory.before_update()
        if self.histograms:  # every rank: counts are summed
            optimizer = self.optimizer
            pending = optimizer.pending_factor if isinstance(optimizer, offload.OffloadedAdamW) else 1.0
            self.histograms.look(self.step, pending)
        self._state_is_free()

    def _state_is_free(self) -> None:
        """Waits until no copy of the state is being taken."""
        self.saver.before_update()
        if self.vault:
            self.vault.before_update()

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        """All that a checkpoint of this step is made of: tensors, this rank's tensors, plain values."""
        if self.watch:
            self.watch.before_save(self.step)
        tensors, rank_tensors, plain = self.state.capture()
        plain |= {
            "step": self.step,
            "cursor": self.cursor.to_dict(),
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "best_eval": self.best_eval,
            "precision": self.precision.state(),
            "dataset": redact(self.job.dataset),
            "noise": self.noise.state() if self.noise else {},
            **self.guard.state(self.step),
        }
        return tensors, rank_tensors, plain

    def _save(self, ending: bool) -> None:
        if not self.saver.start(self.step, *self._state(), last=ending):
            return
        if self.vault:
            self.vault.checkpoint(self.step)
        if self.eval_loss is not None and self.evaluated == self.step:
            self.saver.mark_eval(self.step, self.eval_loss)

    def _resume(self) -> None:
        """Takes up the snapshot that the driver named, or the newest checkpoint whose every hash is right, from a replica if
        need be; at any world size.
        """
        rank, run, job = self.rank, self.job.run, self.job
        common: dict[str, Any] = {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "group": rank.control,
            "on_event": self.reporter.event if self.reporter else lambda event: None,
        }
        place, manifest, source = run, None, "memory"
        if job.vault is not None:
            place, manifest = RunDir(job.vault.folder), vaults.choose(job.vault, **common)
        if manifest is None:
            source = "storage"
            chosen = restore.choose_from(run, self.spec.checkpoint.replicas, **common)
            place, manifest = chosen if chosen is not None else (run, None)
        self.guard.resume(manifest.plain if manifest else {})
        if rank.rank == 0 and self.job.attempt in run.lineage().begun:
            resume_attempt(run, self.job.attempt, manifest.step if manifest else 0)
        if manifest is None:
            return
        restore.check_numbers(manifest, self.numbers, allow=self.job.allow_spec_change)
        tensors, rank_tensors, _ = self.state.capture()
        exact = restore.load(place, manifest, tensors, rank_tensors, group=rank.control)
        self.state.restore(tensors, rank_tensors if exact else None, manifest.plain)
        self.strategy.updated()
        self.step = int(manifest.plain["step"])
        self.cursor = Cursor.from_dict(manifest.plain["cursor"])
        self.loss, self.eval_loss = manifest.plain["loss"], manifest.plain["eval_loss"]
        self.best_eval = manifest.plain["best_eval"]
        self.precision.load(manifest.plain["precision"])
        if self.noise:
            self.noise.load(manifest.plain.get("noise", {}))
        if not exact:  # another world size: each rank draws from a stream of its own, never one that was used before
            setup.seed_all(self.spec.train.seed, "dropout", rank.rank, rank.world_size, self.step)
        if self.reporter:
            self.reporter.say(
                "resumed",
                step=self.step,
                path=step_folder(self.step),
                source=source,
                attempt=self.job.attempt,
                world_size=rank.world_size,
            )

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
