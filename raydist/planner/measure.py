"""Measures a model without memory or data: its parameters, and one micro-batch's forward and backward pass.

Runs in: the user's shell (`raydist plan`). Torch, never ray.

The passes run the real code of model and loss on fake tensors, which have a shape and a storage size but no values. Every
operator's output is counted when it is allocated and when it is freed. The meta device cannot be used: autocast does nothing
there, and attention takes another path. They are fake *CPU* tensors, because a torch without CUDA has no autocast or autograd for
fake CUDA tensors; for GPU jobs, target.py emulates the differences.

With `parallel.tensor` the model is split as on the first rank of a tensor group, whose collectives send nothing, but are counted;
with `parallel.context` as on the first of those that share a sequence, with its tokens; with `parallel.expert` as on the first
that shares the experts, each of which gets as many tokens as any other. Such a model belongs to its process group.

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
from torch.autograd.graph import get_gradient_edge

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import RaydistError, UserError
from raydist.planner.common import Common, Sent, Unsplit, cut_key, refuse_compression
from raydist.planner.facts import ROOT, Activations, Model, Param, Pass, Peak, Stage
from raydist.planner.fake_module import FakeModule
from raydist.planner.live import AFTER, LiveBytes
from raydist.planner.target import KERNELS, OnTarget
from raydist.planner.tensor import EvenExchange
from raydist.worker import lora
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

    `measuring` gets a text at the start of each measurement. `common`: of planners of the same job with other meshes. Raises
    UserError if the model cannot be built, cut or run without values.
    """

    def __init__(
        self,
        spec: JobSpec,
        vocab_size: int,
        target: Literal["cuda", "cpu"],
        measuring: Callable[[str], None] = lambda text: None,
        common: Common | None = None,
    ) -> None:
        self._spec, self._vocab = spec, spec.model.rows(vocab_size)
        self._target, self._measuring = target, measuring
        self._build = cast(Callable[..., nn.Module], registry.load("model", spec.model.name))
        self._loss = build_loss(spec)
        self._mesh: Mesh | None = None
        self._models: dict[bool, list[FakeModule]] = {}
        self._known: dict[Pass, Activations] = {}
        self._sent: dict[Pass, Sent] = {}
        self._common = Common() if common is None else common
        self._fake = self._common.fake
        self._own: Unsplit | None = None
        self._exits: list[tuple[tuple[int, ...], torch.dtype]] = []
        """What stages hand on, as far as it was needed."""
        self.attention = "none"
        """The kernel that scaled_dot_product_attention used. `math` keeps T x T matrices for backward, the others do not."""

    def model(self) -> Model:
        """Its parameters and buffers, as one rank has them if there is `parallel.tensor`; and its stages in a pipeline."""
        parallel, models, unsplit = self._spec.parallel, self._common.models, self._unsplit()
        key = (parallel.tensor, parallel.expert, *cut_key(self._spec))
        if key not in models:
            facts = [part.facts for part in unsplit.parts]
            if parallel.tensor * parallel.expert > 1:
                facts = self._facts_of_shorter(unsplit.parts) if _repeats(unsplit) else self._facts_in_group()
            models[key] = facts[0]
            if unsplit.shares is not None:
                stages = tuple(Stage(*each) for each in zip(facts, unsplit.blocks, unsplit.shares, strict=True))
                params = {p.name: p for model in facts for p in model.params}  # tied weights of two stages count once
                models[key] = Model((*params.values(),), max(model.buffers for model in facts), stages)
        for each in [stage.model for stage in models[key].stages] or [models[key]]:  # strategies work on stages
            refuse_compression(self._spec, each)
        return models[key]

    def checked(self) -> Model | None:
        """`model`; None where it cannot be built without values. Raises UserError if raydist would not train it."""
        try:
            return self.model()
        except UserError as error:
            if error.__cause__ is None:  # else the user's code raised it
                raise
            return None

    def _facts_in_group(self) -> list[Model]:
        with self._guard("built"):
            return [part.facts for part in self._parts(cast=False)]

    def _facts_of_shorter(self, parts: list[FakeModule]) -> list[Model]:
        """The same, from a model with fewer blocks: each block is split as any other."""
        short = self._shorter((_FEW - 1,))
        with short._guard("built"):
            (fake,) = short._parts(cast=False)
        like = {(p.unit == ROOT, fake.within[p.name]): p for p in fake.facts.params}

        def split(part: FakeModule, p: Param) -> Param:
            return replace(like[p.unit == ROOT, part.within[p.name]], name=p.name, unit=p.unit)

        return [replace(part.facts, params=tuple(split(part, p) for p in part.facts.params)) for part in parts]

    def flops_per_token(self) -> float:
        """FLOPs per token of training, of all ranks of a tensor group, without recomputation."""
        with self._errors("built"):
            whole, _ = self._common.whole(self._spec, self._whole)
            return flops_per_token(whole, self._spec.largest_pass[1])

    def sends(self, how: Pass) -> Activations:
        """What a micro-batch of a stage sends, as `measure` has it, without memory: one pass of a model with two blocks has it of
        all stages of equal blocks."""
        unsplit = self._unsplit()
        if not _repeats(unsplit):
            return self.measure(how)
        short, one = self._shorter((2,)), replace(how, stage=0)
        short._by_block(one)
        sent = short._sent[one]
        if sent.handed_on is None:
            return self.measure(how)
        is_first, is_last = how.stage == 0, how.stage == len(unsplit.blocks) - 1
        blocks = unsplit.blocks[how.stage]
        tensor_sent = (sent.first if is_first else sent.further) + (blocks - 1) * sent.further + is_last * sent.after
        passed_on = 0 if is_last else sent.handed_on
        return Activations(0, (), tensor_sent, passed_on=passed_on, exchanged=blocks * sent.exchanged)

    def measure(self, how: Pass) -> Activations:
        """One micro-batch, forward and backward, with the peak of each phase. Results are cached."""
        found = self._by_block(how)
        phases = dict.fromkeys(p.phase for p in found.peaks)
        peaks = (max((p for p in found.peaks if p.phase == phase), key=lambda p: p.total) for phase in phases)
        return replace(found, peaks=tuple(replace(p, block=0) for p in peaks))

    def _by_block(self, how: Pass) -> Activations:
        """With the peaks of each block; of many equal blocks, those of the first and the last one."""
        if how not in self._known:
            unsplit = self._unsplit()
            blocks, stages = unsplit.blocks[how.stage], len(unsplit.blocks)
            if unsplit.alike and blocks > _FEW:
                few, more = (self._with_blocks(n, stages, how) for n in (_FEW - 1, _FEW))
                self._known[how] = _extrapolated(few, more, blocks - _FEW)
            elif unsplit.alike and sum(_cut_around(blocks, stages, how)) < sum(unsplit.blocks):
                self._known[how] = self._with_blocks(blocks, stages, how)
            else:
                with self._guard("run"):
                    parts = self._parts(how.cast)
                    again = "nothing" if how.checkpoint == "none" else how.checkpoint
                    # Of blocks that differ every stage is needed, and a model in a group is built for each measurement.
                    for stage in [how.stage] if unsplit.alike else range(stages):
                        count, one = unsplit.blocks[stage], replace(how, stage=stage)
                        self._measuring(f"micro-batch {how.micro_batch} in {count} blocks, {again} computed again")
                        self._known[one] = self._measure(parts, one)
        return self._known[how]

    def of(self, spec: JobSpec) -> Planner:
        """Of the same job on another mesh, which shares measured passes."""
        return Planner(spec, self._vocab, self._target, self._measuring, self._common)

    @contextmanager
    def keeping_group(self) -> Iterator[None]:
        """In the block, the process group of a measurement stays for the next one, and what was built in it."""
        self._common.group.keep()
        try:
            yield
        finally:
            self._common.group.close()

    def _with_blocks(self, count: int, stages: int, how: Pass) -> Activations:
        """The same pass, if its stage had `count` blocks."""
        shorter = self._shorter(_cut_around(count, stages, how))
        found = shorter._by_block(replace(how, stage=int(how.stage > 0)))
        if shorter.attention != "none":
            self.attention = shorter.attention
        return found

    def _shorter(self, cut: tuple[int, ...]) -> Planner:
        """Of the same model with so many blocks in each stage."""
        parallel, known = self._spec.parallel, self._common.shorter
        key = (parallel.tensor, parallel.context, parallel.expert, *cut)
        if key not in known:
            fields = {"pipeline": len(cut), "chunks": 1, "pipeline_cut": [*cut] if len(cut) > 1 else None}
            stages = {f"parallel.{name}": value for name, value in fields.items()}
            known[key] = self.of(self._spec.with_fields({"model.layers": sum(cut), **stages}))
        return known[key]

    def _unsplit(self) -> Unsplit:
        """The model, or its stages, as one rank alone would have them."""
        if self._own is None:
            with self._errors("built"), self._fake:
                self._own = self._common.unsplit(self._spec, self._whole)
        return self._own

    def _whole(self) -> nn.Module:
        self._measuring("building the model")
        with self._fake:
            made = self._build(self._spec.model, self._vocab).train()
            if self._spec.model.lora is not None:
                lora.add(made, self._spec.model.lora)
            return made

    def _parts(self, cast: bool) -> list[FakeModule]:
        """The model, or its stages, as a rank has them."""
        if self._mesh is None and not cast:
            return self._unsplit().parts
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
                parts = [FakeModule(part, whole, replicas) for part in (cuts.parts(module) if cuts else [module])]
                self._models[cast] = parts
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
        each = exchanged // max(made.blocks, 1)
        first, further, after = (round(live.sent.get(part, 0.0)) for part in (0, 1, AFTER))
        self._sent[how] = Sent(max(first - each, 0), max(further - each, 0), after, each, made.handed_on)
        sent = round(sum(live.sent.values())) - exchanged
        return Activations(saved, peaks, max(sent, 0), copied, passed_on, exchanged)

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """As the first of the ranks that share layers or experts, if there are any."""
        parallel = self._spec.parallel
        if parallel.tensor == parallel.expert == parallel.context == 1:
            yield
            return
        sizes = (parallel.tensor, parallel.expert, parallel.context)
        with self._common.group.of(*sizes, self._models) as self._mesh:
            try:
                yield
            finally:
                self._mesh = None

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        with self._in_group(), self._errors(what):
            yield

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RaydistError:
            raise
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            raise UserError(
                f'model "{self._spec.model.name}" cannot be {what} without values: {type(error).__name__}: {first}',
                "a plan has tensors with shapes only: no .item(), no branch on a value, no weights from a file, no kernel whose "
                "shapes torch does not know; make the model do without, or train a few steps and look at the peak memory",
            ) from error


def _cut_around(count: int, stages: int, how: Pass) -> tuple[int, ...]:
    """Blocks of the stages of the smallest model that has a stage like that of a pass, with `count` blocks."""
    return (*(1,) * (how.stage > 0), count, *(1,) * (how.stage < stages - 1))


def _repeats(unsplit: Unsplit) -> bool:
    """Whether all blocks are equal, and more than are measured."""
    return unsplit.alike and sum(unsplit.blocks) > _FEW


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
