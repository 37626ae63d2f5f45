"""What one attempt of a rank consists of: data, model, strategy, optimizer, state, checks and the training step.

Runs in: each train worker. Torch, never ray. The loop (loop.py) runs over the parts that are made here, in the order of the data
flow; a line with `every rank` in its comment is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from raydist.data.dataset import TokenDataset
from raydist.data.samples import full_tokens
from raydist.extension_plans import strategy_plan
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event
from raydist.storage import Storage
from raydist.worker import base_weights, build, distributed, model_transforms, precision, pretrained
from raydist.worker.attempt import Job
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.checks.gradients import GradientCheck
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.comm.compression.state import NAME as COMPRESSION
from raydist.worker.comm.compression.state import Compression
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.comm.outer.hook import Outer
from raydist.worker.comm.outer.state import OuterState
from raydist.worker.dataloader import Feed
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.faults import injector_of
from raydist.worker.forward_seeds import ForwardSeeds
from raydist.worker.hooks import HookFacts
from raydist.worker.lora import frozen_shards
from raydist.worker.loss import build as build_loss
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.activations import ActivationSizes
from raydist.worker.metrics.gradient_noise_scale import NOT_MEASURED, GradientNoise
from raydist.worker.metrics.histograms import Histograms
from raydist.worker.metrics.memory import MemoryMeter
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.metrics.startup_timing import Startup
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.metrics.trace import Tracer
from raydist.worker.optim.schedule import peak_lr
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import parts_of
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import split_layers
from raydist.worker.parameter_table import ParameterTable, gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.run_hooks import RunHooks
from raydist.worker.step import TrainStep
from raydist.worker.step_hooks import BeforeUpdate, StepHook


class Assembly:
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
        self.injector = injector_of(job, rank)
        phases = heartbeat
        heartbeat = self.injector.watch(heartbeat) if self.injector else heartbeat
        self.heartbeat, self.startup, self.telemetry = heartbeat, startup, telemetry
        # Data: every rank opens it; nothing is sent.
        dataset = TokenDataset(job.dataset)
        self.mesh = Mesh.of(spec, rank)  # every rank, if a replica has several
        self.feed = Feed(spec, self.mesh, dataset)
        self.batches = self.feed.batches
        for line in (*([self.mesh.note] if self.mesh.note else []), *self.feed.notes()):
            self._note(line)
        self.total = spec.train.total(self.batches.steps_per_epoch)
        # Model, strategy, optimizer: the same on every rank, from the same seed.
        same_bits = spec.train.virtual_ranks is not None and rank.device.type == "cuda"
        if spec.train.deterministic or same_bits:
            distributed.be_deterministic()
        if same_bits and not spec.train.deterministic:
            self._note(
                "train.virtual_ranks: deterministic kernels are used on this GPU, as with train.deterministic: true"
            )
        precision.refuse(spec.precision, rank.device)
        self.precision = Precision(spec.precision, rank.device)
        self.loss = build_loss(spec)
        spec = self.spec = build.settled(
            spec, rank, job.run, dataset.vocab_size, self._example, self._note, reporter.say if reporter else _silent
        )
        self.replica = build.replica(spec, self.mesh)  # every rank, if replicas train apart
        self.strategy = build.build_strategy(spec, self.replica or self.mesh)
        self.parts = build.divide_into_parts(spec, self.mesh, self.strategy)
        self.feed = self.feed.in_parts(self.parts)
        self.eval_set = self.feed.eval_set() if spec.eval.every else []
        model = build.build_model(spec, dataset.vocab_size, self.strategy.takes_meta)
        if note := build.make_trainable(model):
            self._note(note)
        if self.parts is not None:
            build.refuse_running_statistics(model)
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
        if self.injector:
            self.injector.attach_optimizer(self.optimizer)
            telemetry.sources.append(self.injector.readings.read)
        self.peak_lr = peak_lr(spec.optim, spec.train.global_batch)
        self.tracer = Tracer(job.run, rank, job.attempt, phases, tell, self._messages, spec.comm.aside)
        self.bad_steps = BadStepCheck(spec, self.mesh, job.run, job.attempt, model, reporter, self.feed.divide)
        self.noise = self._noise()
        self.outer = Outer(spec.comm, self.replica, shards, self.total) if self.replica else None
        # State: from the newest good checkpoint, the same on all ranks.
        self.at = Progress()
        self.checkpoints = CheckpointManager(
            job,
            rank,
            reporter,
            self.at,
            TrainState(
                model,
                self.optimizer,
                shards,
                frozen,
                frozenset(parameters.base),
                self.outer.weights if self.outer else None,
            ),
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
        outer_state = OuterState(self.outer, model, self.optimizer, shards) if self.outer else None
        for name, state in outer_state.states.items() if outer_state else ():
            self.checkpoints.register(name, state)
        startup.done("build")
        if has_base:  # checkpoints do not hold it
            self._load_pretrained(model, {**shards, **frozen}, dataset.vocab_size)
        if self.checkpoints.resume():
            if outer_state:
                outer_state.resumed()  # every rank: parts of weights are gathered
            self.strategy.updated()
        elif spec.init_from is not None:
            self.checkpoints.start_from(spec.init_from)
            if outer_state:
                outer_state.resumed()
            self.strategy.updated()
        elif spec.model.hf is not None and not has_base:
            self._load_pretrained(model, shards, dataset.vocab_size)
            if self.outer:
                self.outer.begin_anew()
            self.strategy.updated()
        startup.done("load")
        self.checkpoints.open()
        self.last = min(self.total, job.until or self.total)
        self.replica_check = self._replica_check(model, parameters) if spec.train.check_replicas else None
        meter = MemoryMeter(rank.device, model, shards, self.optimizer)
        telemetry.sources.append(meter.read)
        if self.replica:
            parameters = parameters.apart(self.replica.copy)
        every = spec.train.check_gradients
        self.gradients = GradientCheck(rank, parameters, every, reporter) if every else None
        every, say = spec.observe.histograms, reporter.say if reporter else None
        experts = ExpertLoads(parts_of(model), rank, spec.observe.expert_loads, say)
        self.experts = experts if experts.counts else None
        outputs = every and not spec.train.compile
        sizes = ActivationSizes(parts_of(model), parameters.trained, rank.device) if outputs else None
        histograms = Histograms(rank, parameters, every, say, sizes) if every else None
        hooks: list[StepHook | None] = [
            telemetry,
            seeds,
            self.compression,
            self.outer,
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
            replica=self.replica,
            full_tokens=full_tokens(self.batches, self.feed.samples),
            clip=spec.optim.clip,
            hooks=[hook for hook in hooks if hook is not None],
            heartbeat=heartbeat,
            loss=self.loss,
            parts=self.parts,
        )

        self.hooks = RunHooks(spec.hooks, self._hook_facts, rank.first, tell)
        if self.hooks:
            telemetry.sources.append(self.hooks.spent)

    def _hook_facts(self, options: dict[str, Any]) -> HookFacts:
        rank, job = self.rank, self.job
        return HookFacts(
            job.run, self.spec, options, rank.rank, rank.world_size, job.attempt, self.at.step, self.strategy.module
        )

    def _note(self, text: str) -> None:
        """A note for the user, from rank 0."""
        if self.reporter:
            self.reporter.say("note", text=text)

    def _base(self, parameters: ParameterTable) -> dict[str, Any]:
        """The weights that adapters are for, as checkpoints name them. Every rank: it reads its share of the files."""
        hf = Storage(str(self.spec.model.hf))
        found = base_weights.fingerprint(hf, self.rank)
        return {"hf": hf.uri, "fingerprint": found, "frozen": list(parameters.base)}

    def _load_pretrained(self, model: nn.Module, shards: Mapping[str, ParamShard], vocab_size: int) -> None:
        read = pretrained.load(self.spec.model, model, shards, vocab_size, self.mesh)
        self._note(f"model.hf: rank 0 read {read / 2**20:,.0f} MiB of {self.spec.model.hf}")

    def _messages(self) -> list[tuple[str, int, str]]:
        """The collectives of a step that have a name: (kind, elements, name)."""
        loads = [self.experts.message] if self.experts else []
        return [*self.train_step.messages(), *loads, *self.strategy.messages()]

    def _compression(self) -> Compression | None:
        """None if no gradients are compressed on any rank."""
        reducers = self.strategy.reducers()
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
        if self.parts is not None:
            self._note(
                "observe.grad_noise: not measured with train.virtual_ranks: ranks may have different numbers of parts"
            )
            return None
        if self.replica:
            self._note("observe.grad_noise: not measured with comm.every: no step has the gradient of its global batch")
            return None
        for axis, why in NOT_MEASURED.items():
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
            due=lambda step: due(step, every, self.checkpoints.due(step, step == self.last)),
            before_write=self._before_repair,
            reporter=self.reporter,
            replica=self.replica,
            together=self.outer.schedule.together if self.outer else lambda step: False,
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

    def _example(self, module: nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
        """The loss of the first sample, `samples` times, with which a strategy checks the graph. See `Example`."""
        batch = self.feed.example(samples)
        with self.precision.autocast():
            return call_model(module, batch).float().sum() if part else self.loss(module, batch)


def _silent(kind: str, **data: Any) -> None:
    """Of ranks that have no reporter."""


def due(step: int, every: int | None, ending: bool) -> bool:
    """Whether `step` is one of every `every`, or the run ends with it."""
    return ending or (every is not None and step % every == 0)
