"""Measures a model without memory or data: its parameters, and one micro-batch's forward and backward pass.

Runs in: the user's shell (`raydist plan`). Torch, never ray.

The passes run the real code of model and loss on fake tensors, which have a shape and a storage size but no values. Every
operator's output is counted when it is allocated and when it is freed. The meta device cannot be used: autocast does nothing
there, and attention takes another path. They are fake *CPU* tensors, because a torch without CUDA has no autocast or autograd for
fake CUDA tensors; for GPU jobs, target.py emulates the differences.

With `parallel.tensor` the model is split as on the first rank of a tensor group, whose collectives send nothing, but are counted;
with `parallel.context` as on the first of the ranks that share a sequence, with its part of the tokens;
with `parallel.expert` as on the first of the ranks that share the experts, each of which gets as many tokens as any other.
Such a model is built for each measurement, because it belongs to its process group.

With `parallel.pipeline` the stages are cut as in a run, and each is measured with an input like the output of the stage before.

If all blocks of a built-in model are equal and more than three, passes run with two and with three blocks, and each further block
counts as much as the third one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import RaydistError, UserError
from raydist.extension_plans import strategy_plan
from raydist.planner.facts import Activations, Model, Pass, Peak, Stage
from raydist.planner.fake_module import FakeModule
from raydist.planner.live import LiveBytes
from raydist.planner.target import KERNELS, OnTarget
from raydist.planner.tensor import EvenExchange, first_of
from raydist.worker import lora
from raydist.worker.comm import compressors
from raydist.worker.dataloader import own_tokens
from raydist.worker.loss import build as build_loss
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.flops import flops_per_token
from raydist.worker.model._moe import layers_of
from raydist.worker.parallel._pipeline_passes import BoundStage
from raydist.worker.parallel._split import LayerSplit, split_layers
from raydist.worker.parallel._stages import cut_model
from raydist.worker.precision import DTYPES

if TYPE_CHECKING:
    from raydist.spec import JobSpec


_FEW = 3
"""Blocks of a stage up to which all are measured."""


class Planner:
    """A model of a job on fake tensors. `target` is the device type that it will train on: cuda or cpu.

    `measuring` gets a text at the start of each measurement. `shorter`: planners of the same job with other meshes share it; they
    measure each kind of stage once. Raises UserError if the model cannot be built, cut or run without values.
    """

    def __init__(
        self,
        spec: JobSpec,
        vocab_size: int,
        target: Literal["cuda", "cpu"],
        measuring: Callable[[str], None] = lambda text: None,
        shorter: dict[tuple[int, ...], Planner] | None = None,
    ) -> None:
        self._spec, self._vocab = spec, spec.model.rows(vocab_size)
        self._target, self._measuring = target, measuring
        self._build = cast(Callable[..., nn.Module], registry.load("model", spec.model.name))
        self._loss = build_loss(spec)
        # Constants in the user's module are real tensors.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._mesh: Mesh | None = None
        self._models: dict[bool, list[FakeModule]] = {}
        self._known: dict[Pass, Activations] = {}
        self._shorter = {} if shorter is None else shorter
        """Planners of the same model with fewer blocks, by (tensor, context, expert, blocks of each stage)."""
        self._blocks: tuple[int, ...] = ()
        """Of each stage, once the model was built; and whether all are equal."""
        self._alike = False
        self._exits: list[tuple[tuple[int, ...], torch.dtype]] = []
        """What stages hand on, as far as it was needed."""
        self._shares: tuple[float, ...] | None = None
        self.attention = "none"
        """The kernel that scaled_dot_product_attention used. `math` keeps T x T matrices for backward, the others do not."""

    def model(self) -> Model:
        """Its parameters and buffers, as one rank has them if there is `parallel.tensor`; and its stages in a pipeline."""
        with self._guard("built"):
            return self._model()

    def checked(self) -> Model | None:
        """`model`; None where that is not known, because the model cannot be built without values. Raises UserError if raydist
        would not train it."""
        try:
            with self._in_group():
                return self._model()
        except RaydistError:
            raise
        except Exception:  # whatever the user's code raises where there are no values
            return None

    def _model(self) -> Model:
        parts = [(fake.facts, fake.blocks) for fake in self._parts(cast=False)]
        for facts, _ in parts:  # a strategy of its own works on each stage
            _refuse_compression(self._spec, facts)
        if self._shares is None:
            return parts[0][0]
        stages = tuple(Stage(m, b, share) for (m, b), share in zip(parts, self._shares, strict=True))
        params = {p.name: p for model, _ in parts for p in model.params}  # tied weights of two stages count once
        return Model((*params.values(),), max(model.buffers for model, _ in parts), stages)

    def flops_per_token(self) -> float:
        """FLOPs per token of training, of all ranks of a tensor group, without recomputation."""
        with self._guard("built"):
            return flops_per_token(self._whole(), self._spec.largest_pass[1])

    def measure(self, how: Pass) -> Activations:
        """One micro-batch, forward and backward, with the peak of each phase. Results are cached."""
        found = self._by_block(how)
        phases = dict.fromkeys(p.phase for p in found.peaks)
        peaks = (max((p for p in found.peaks if p.phase == phase), key=lambda p: p.total) for phase in phases)
        return replace(found, peaks=tuple(replace(p, block=0) for p in peaks))

    def _by_block(self, how: Pass) -> Activations:
        """With the peaks of each block; of many equal blocks, those of the first and the last one."""
        if how not in self._known:
            if not self._blocks:
                with self._guard("built"):
                    self._parts(how.cast)
            blocks = self._blocks[how.stage]
            if self._alike and blocks > _FEW:
                few, more = (self._with_blocks(n, how) for n in (_FEW - 1, _FEW))
                self._known[how] = _extrapolated(few, more, blocks - _FEW)
            elif self._alike and sum(self._cut_around(blocks, how)) < sum(self._blocks):
                self._known[how] = self._with_blocks(blocks, how)
            else:
                with self._guard("run"):
                    parts = self._parts(how.cast)
                    again = "nothing" if how.checkpoint == "none" else how.checkpoint
                    # Of blocks that differ every stage is needed, and a model in a group is built for each measurement.
                    for stage in [how.stage] if self._alike else range(len(parts)):
                        count, one = self._blocks[stage], replace(how, stage=stage)
                        self._measuring(f"micro-batch {how.micro_batch} in {count} blocks, {again} computed again")
                        self._known[one] = self._measure(parts, one)
        return self._known[how]

    def of(self, spec: JobSpec) -> Planner:
        """Of the same job on another mesh, which shares measured passes."""
        return Planner(spec, self._vocab, self._target, self._measuring, self._shorter)

    def _cut_around(self, count: int, how: Pass) -> tuple[int, ...]:
        """Blocks of the stages of the smallest model that has a stage like that of a pass, with `count` blocks."""
        return (*(1,) * (how.stage > 0), count, *(1,) * (how.stage < len(self._blocks) - 1))

    def _with_blocks(self, count: int, how: Pass) -> Activations:
        """The same pass, if its stage had `count` blocks."""
        cut = self._cut_around(count, how)
        parallel = self._spec.parallel
        key = (parallel.tensor, parallel.context, parallel.expert, *cut)
        if key not in self._shorter:
            fields = {"pipeline": len(cut), "chunks": 1, "pipeline_cut": [*cut] if len(cut) > 1 else None}
            stages = {f"parallel.{name}": value for name, value in fields.items()}
            spec = self._spec.with_fields({"model.layers": sum(cut), **stages})
            self._shorter[key] = Planner(spec, self._vocab, self._target, self._measuring)
        shorter = self._shorter[key]
        found = shorter._by_block(replace(how, stage=int(how.stage > 0)))
        if shorter.attention != "none":
            self.attention = shorter.attention
        return found

    def _whole(self) -> nn.Module:
        self._measuring("building the model")
        with self._fake:
            made = self._build(self._spec.model, self._vocab).train()
            if self._spec.model.lora is not None:
                lora.add(made, self._spec.model.lora)
            return made

    def _parts(self, cast: bool) -> list[FakeModule]:
        """The model, or its stages."""
        if cast not in self._models:
            module = self._whole()
            whole = {name: p.shape for name, p in module.named_parameters()}
            with self._fake:
                cuts = cut_model(module, self._spec) if self._spec.parallel.pipeline > 1 else None
                split = self._split(module)
                experts = Fraction(self._spec.parallel.tensor, self._spec.parallel.expert)
                replicas = dict.fromkeys(split.experts or (), experts) if split is not None else {}
                if cast:
                    _cast(module, DTYPES[self._spec.precision.params])
                self._shares = cuts.shares if cuts is not None else None
                parts = [FakeModule(part, whole, replicas) for part in (cuts.parts(module) if cuts else [module])]
                self._models[cast] = parts
            self._blocks = tuple(part.blocks for part in parts)
            name = self._spec.model.name
            by_layers = name in registry.names("model") and registry.described("model", name, "BY_LAYERS") is not False
            self._alike = by_layers and _alike(parts)
        return self._models[cast]

    def _split(self, module: nn.Module) -> LayerSplit | None:
        if self._mesh is None:
            return None
        split = split_layers(module, self._mesh)
        if split is not None and split.experts is not None:
            group = self._mesh.experts.group("tensor")
            assert group is not None
            for _, layer in layers_of(module):
                layer.exchange = EvenExchange(group)
        return split

    def _batch(self, micro_batch: int) -> MicroBatch:
        shape = (micro_batch, self._spec.largest_pass[1])
        tokens = torch.zeros(shape, dtype=torch.int64)
        documents = torch.zeros(shape, dtype=torch.int32) if self._spec.data.pack else None
        batch = MicroBatch(tokens, torch.zeros_like(tokens), documents)
        return batch if self._mesh is None else own_tokens(batch, self._mesh)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = DTYPES[self._spec.precision.params]
        return torch.autocast("cpu", dtype=dtype) if dtype is not torch.float32 else nullcontext()

    def _handed_on(
        self, parts: list[FakeModule], stage: int, target: OnTarget
    ) -> tuple[tuple[int, ...], torch.dtype] | None:
        """What a stage gets from the one before: its shape without the micro-batch's size, and its dtype. None for the first."""
        for n in range(len(self._exits), stage):
            shape, dtype = self._exits[n - 1] if n else ((), None)
            hidden = torch.empty((1, *shape), dtype=dtype) if n else None
            with torch.no_grad(), self._autocast(), target:
                out = call_model(cast(nn.Module, BoundStage(parts[n].module, hidden)), self._batch(1))
            self._exits.append((tuple(out.shape[1:]), out.dtype))
        return self._exits[stage - 1] if stage else None

    def _measure(self, parts: list[FakeModule], how: Pass) -> Activations:
        made, last = parts[how.stage], how.stage == len(parts) - 1
        on_target = OnTarget(self._target == "cuda")
        train = self._spec.train.model_copy(update={"checkpoint_activations": how.checkpoint, "compile": False})
        passed_on = 0
        with self._fake:
            entry = self._handed_on(parts, how.stage, on_target)
            with made.prepared(train, on_target), on_target:
                batch = self._batch(how.micro_batch)
                inputs = [t for t in (batch.tokens, batch.targets, batch.documents) if t is not None]
                with LiveBytes([*made.module.parameters(), *made.module.buffers(), *inputs]) as live:
                    made.watch(live, how.hold)
                    exchanges = [layer.exchange for _, layer in layers_of(made.module) if layer.exchange is not None]
                    exchanged = -sum(exchange.sent for exchange in exchanges)
                    entered = None
                    if entry is not None:
                        entered = torch.empty((how.micro_batch, *entry[0]), dtype=entry[1], requires_grad=True)
                    module = made.module if entered is None else cast(nn.Module, BoundStage(made.module, entered))
                    with self._autocast():
                        out = self._loss(module, batch) if last else call_model(module, batch)
                    del module
                    if last:
                        saved, copied = live.bytes["activations"] + live.bytes["loss"], live.bytes["whole"]
                        live.phase = "loss"
                        out.backward()  # type: ignore[no-untyped-call]
                    else:  # its output is sent, and its gradient comes back after other passes
                        shape, dtype, passed_on = out.shape, out.dtype, out.nbytes
                        edge = get_gradient_edge(out)
                        del out
                        saved, copied = live.bytes["activations"] + live.bytes["loss"], live.bytes["whole"]
                        live.phase = "backward"
                        torch.autograd.backward(edge, torch.empty(shape, dtype=dtype))
                made.forget()
        if on_target.attends:
            self.attention = " and ".join(sorted(KERNELS[n] for n in live.operators & KERNELS.keys())) or "math"
        peaks = tuple(Peak(phase, **worst, block=block) for (phase, block), worst in live.peaks.items())
        exchanged += sum(exchange.sent for exchange in exchanges)
        return Activations(saved, peaks, max(round(live.sent) - exchanged, 0), copied, passed_on, exchanged)

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """As the first of the ranks that share layers or experts, if there are any."""
        parallel = self._spec.parallel
        if parallel.tensor == parallel.expert == parallel.context == 1:
            yield
            return
        with first_of(parallel.tensor, parallel.expert, parallel.context) as self._mesh:
            try:
                yield
            finally:
                self._mesh = None
                self._models.clear()

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        with self._in_group():
            try:
                yield
            except RaydistError:
                raise
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), "")
                raise UserError(
                    f'model "{self._spec.model.name}" cannot be {what} without values: {type(error).__name__}: {first}',
                    "a plan has tensors with shapes only: no .item(), no branch on a value, no weights from a file, no kernel "
                    "whose shapes torch does not know; make the model do without, or train a few steps and look at the peak memory",
                ) from error


def _refuse_compression(spec: JobSpec, model: Model) -> None:
    """Raises UserError as a rank does, if the compressor can compress none of these parameters."""
    comm, replicas = spec.comm, spec.cluster.most // spec.parallel.replica
    if not comm.checks_shapes or replicas == 1:
        return
    plan, shard = strategy_plan(spec.parallel.strategy), spec.parallel.shard
    # Copies of shards send the rows of one rank each. Without a fixed number of ranks a copy, they are known on the nodes alone.
    rows = shard if shard is not None and plan is not None and plan.group is not None and replicas > shard else 1
    compressors.refuse(
        compressors.build(comm.compress, comm.options), {p.name: p.rows(rows) for p in model.params if p.trained}
    )


def _alike(parts: list[FakeModule]) -> bool:
    """Whether all blocks have the same layers and shapes."""
    every = {(repr(b), *((n, p.shape) for n, p in b.named_parameters())) for part in parts for b in part.of_blocks}
    return len(every) == 1


def _extrapolated(few: Activations, more: Activations, further: int) -> Activations:
    """With `further` blocks beyond those of `more`, which has one more than `few`. From one block to the next a peak grows or
    shrinks by the same bytes, so those of the first and the last one are enough."""

    def at(a: int, b: int) -> int:
        return b + further * (b - a)

    before = {(p.phase, p.block + (p.block > 0)): p for p in few.peaks}
    peaks = [
        Peak(p.phase, at(b.whole, p.whole), at(b.activations, p.activations), at(b.loss, p.loss), p.block)
        for p in more.peaks
        if (b := before.get((p.phase, p.block))) is not None
    ]
    return Activations(
        saved=at(few.saved, more.saved),
        peaks=(*peaks,),
        tensor_sent=at(few.tensor_sent, more.tensor_sent),
        copied=at(few.copied, more.copied),
        passed_on=more.passed_on,
        exchanged=at(few.exchanged, more.exchanged),
    )


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """All parameters in another format, as FSDP2 gathers them; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for holder in module.modules():
        for name, p in list(holder.named_parameters(recurse=False)):
            if p.is_floating_point():
                made.setdefault(id(p), nn.Parameter(p.detach().to(dtype), p.requires_grad))
                setattr(holder, name, made[id(p)])
