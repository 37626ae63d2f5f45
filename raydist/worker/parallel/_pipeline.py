"""Pipeline parallel: the ranks of a replica hold consecutive blocks of the model, and pass micro-batches on.

Runs in: each train worker. Torch, never ray.

    rank 0   embedding, blocks 0-3  --activations-->  rank 1   blocks 4-7, norm, head, loss
                                    <---gradients---

A stage is a module of its own, with the names of the plain model, and has a strategy of its own, which knows nothing of the others.
Passing activations changes no number: losses and gradients have the bits of the same micro-batches on one rank. The order of the
passes is in worker/pipeline_schedule.py, the cut of a model in _stages.py. A receive starts one action before its use, so it
overlaps with a computation; no action waits for a send. Stage s of a replica is on the replica's rank s modulo `pipeline`.

A model says how it is cut: `stage(first, last)` (raydist/worker/model/__init__.py), or it is an nn.Sequential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raydist.data.batches import MicroBatch
from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.comm.compression.reducer import Reducer, reducers_of
from raydist.worker.comm.groups import another
from raydist.worker.comm.tree import sum_flat
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard, Work
from raydist.worker.parallel._model_graph import initialise, plain_name, some
from raydist.worker.parallel._stages import StageCut, Stages, cut_model
from raydist.worker.parts import Parts
from raydist.worker.pipeline_schedule import Action, actions, most_sends

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPE_TAG = 8
"""Beyond the tags of `Pipeline._way`."""
Entry = tuple[tuple[int, ...], torch.dtype]
"""What passes between two stages: its shape without the micro-batch's size, and its dtype."""


@dataclass(slots=True)
class Stage:
    """One stage on this rank. `number`: of all stages. `entry`, `exit`: its input and its output, once `wrap` has found them, for
    sequences of `time` tokens of this rank."""

    number: int
    module: nn.Module
    strategy: ParallelStrategy
    entry: Entry | None = None
    exit: Entry | None = None
    time: int = 0

    def passed(self, kind: str, tokens: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what arrives for a forward or a backward pass of these tokens.

        Where sequences have another length than the example's, the first dimension after the micro-batch is that of the sequence.
        """
        passes_on = self.entry if kind == "forward" else self.exit
        assert passes_on is not None, "wrap has run the example"
        shape, dtype = passes_on
        if tokens.shape[1:] and tokens.shape[1] != self.time:
            shape = (shape[0] * tokens.shape[1] // self.time, *shape[1:])
        return (len(tokens), *shape), dtype


@dataclass(slots=True)
class _Kept:
    """Between the forward and the backward pass of a micro-batch in a stage: its input; its loss, or the output's place in the
    graph."""

    entered: Tensor | None
    made: Tensor | GradientEdge


class Pipeline:
    """The strategy of a pipeline: one strategy a stage, and the order of their passes. See `ParallelStrategy`.

    `cut` comes before `wrap`, and sets `cuts`. `in_flight`: the most micro-batches that were between their passes, of all stages of
    this rank.
    """

    module: nn.Module
    cuts: StageCut
    takes_meta = True

    def __init__(self, spec: JobSpec, mesh: Mesh, make: Callable[[JobSpec, Mesh], ParallelStrategy]) -> None:
        self._spec, self._mesh = spec, mesh
        self._chunks = spec.parallel.chunks
        self._strategies = [make(spec, mesh) for _ in range(self._chunks)]
        self.stages: list[Stage] = []
        self.loss_factor = self._strategies[0].loss_factor
        self.in_flight = 0
        self._told: list[tuple[dist.Work, Tensor]] = []
        self.most_sends = most_sends(mesh.pipeline, self._chunks)
        self._on_final: Callable[[Sequence[Tensor]], None] | None = None
        self._tied: dict[tuple[int, ...], list[str]] = {}
        self._tie_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def cut(self, model: nn.Module) -> nn.Module:
        """This rank's part of a whole model: its parameters, under their names. Creates weights of a model on the meta device: each
        is drawn in the order of the whole model, and those of other ranks are dropped at once.

        Raises UserError if the model cannot be cut, or not into so many stages.
        """
        self.cuts = cut_model(model, self._spec)
        parts = self.cuts.parts(model)
        own = {number: parts[number] for number in range(self._mesh.pipeline_rank, len(parts), self._mesh.pipeline)}
        chunks = list(own.values())
        self._tied = self._shared(model, parts)
        if any(p.is_meta for p in model.parameters()):
            keep = {name for chunk in chunks for name, _ in chunk.named_parameters(remove_duplicate=False)}
            for _ in initialise(model, keep):
                pass
            for chunk in chunks:  # a stage has its own copy of the outermost module
                for key in chunk._parameters:
                    chunk._parameters[key] = model._parameters[key]
        self.stages = [
            Stage(number, chunk, strategy)
            for (number, chunk), strategy in zip(own.items(), self._strategies, strict=True)
        ]
        return chunks[0] if len(chunks) == 1 else Stages(chunks)

    def _shared(self, model: nn.Module, parts: Sequence[nn.Module]) -> dict[tuple[int, ...], list[str]]:
        """Parameters of several stages (tied weights): the pipeline ranks that have them -> their names."""
        names = {id(p): plain_name(n) for n, p in model.named_parameters()}
        having: dict[str, list[int]] = {name: [] for name in names.values()}
        for number, part in enumerate(parts):
            for name, p in part.named_parameters():
                if names.get(id(p)) != plain_name(name):
                    known = names.get(id(p))
                    raise UserError(
                        f"stage {number} has a parameter {name}, and in the whole model its name is {known}",
                        "let `stage` keep the names, of a tied weight its first one (docs/reference/models.md)",
                    )
                having[plain_name(name)].append(number)
        if lost := [name for name, stages in having.items() if not stages]:
            raise UserError(f"no stage has {some(lost)}", "give each parameter to a stage (docs/reference/models.md)")
        found: dict[tuple[int, ...], list[str]] = {}
        for name, stages in having.items():
            ranks = sorted({number % self._mesh.pipeline for number in stages})
            if len(ranks) < len(stages):
                raise UserError(
                    f"{name} belongs to stages {some([str(s) for s in stages])}, of which one rank has several",
                    "tie only weights of the first and the last stage, or set parallel.chunks: 1",
                )
            if len(ranks) > 1:
                found.setdefault((*ranks,), []).append(name)
        return found

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """See `ParallelStrategy.wrap`; `model` is the result of `cut`. Each strategy wraps its stage."""
        mesh = self._mesh
        self._group = mesh.group("pipeline")
        assert self._group is not None, "a pipeline of several ranks"
        self._peers = mesh.peers("pipeline")
        # NCCL ignores tags, and runs the transfers of a group one by one: each way gets a group.
        ways = 1 if mesh.rank.device.type == "cpu" else 4 if self._chunks == 1 else 8
        self._ways = [self._group] + [another(self._peers) for _ in range(ways - 1)]
        for ranks in self._tied:
            if mesh.pipeline_rank in ranks:
                self._tie_groups[ranks] = another([self._peers[r] for r in ranks])
        for stage in self.stages:
            stage.strategy.wrap(stage.module, _ExampleOfStage(self, stage, example))
        for sent, _ in self._told:
            sent.wait()
        if isinstance(model, Stages):
            model.refresh()
        self.module = model
        return model

    # --- the passes

    def passes(self, micro_batches: Sequence[MicroBatch], work: Work) -> None:
        """See `ParallelStrategy.passes`."""
        mesh = self._mesh
        order = actions(mesh.pipeline_rank, mesh.pipeline, self._chunks, len(micro_batches), backward=work.trains)
        run = _Run(self, order, micro_batches, work)
        try:
            run()
        finally:
            self.in_flight = max(self.in_flight, run.most_kept)

    # --- what the stages have together

    @property
    def parts(self) -> Parts | None:
        """See `ParallelStrategy`."""
        return getattr(self._strategies[0], "parts", None)

    @parts.setter
    def parts(self, parts: Parts) -> None:
        """Sets them for every stage, before `cut`."""
        for strategy in self._strategies:
            strategy.parts = parts  # type: ignore[attr-defined]

    def reduces_together(self) -> int:
        """See `ParallelStrategy`."""
        together: int = self._strategies[0].reduces_together()  # type: ignore[attr-defined]
        return together

    @property
    def on_final(self) -> Callable[[Sequence[Tensor]], None] | None:
        """See `ParallelStrategy.on_final`. Weights of several stages are left out: their gradients are not summed yet."""
        return self._on_final

    @on_final.setter
    def on_final(self, told: Callable[[Sequence[Tensor]], None] | None) -> None:
        """Sets it for every stage."""
        shards = self.shards()
        tied = {id(shards[name].local) for names in self._tied.values() for name in names if name in shards}
        self._on_final = told
        if told is not None and tied:
            self._on_final = lambda parameters: told([p for p in parameters if id(p) not in tied])
        for stage in self.stages:
            stage.strategy.on_final = self._on_final

    def shards(self) -> Mapping[str, ParamShard]:
        """See `ParallelStrategy.shards`: those of this rank's stages."""
        return {name: shard for stage in self.stages for name, shard in stage.strategy.shards().items()}

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `ParallelStrategy.accumulate`: `passes` calls that of each stage."""
        return nullcontext()

    @torch.no_grad()
    def finish_grads(self) -> None:
        """See `ParallelStrategy.finish_grads`. Sums the gradients of tied weights over their stages."""
        for stage in self.stages:
            stage.strategy.finish_grads()
        if self._tie_groups:
            shards = self.shards()
            for ranks, group in self._tie_groups.items():
                trained = [shards[name].local.grad for name in self._tied[ranks] if name in shards]
                sum_flat(trained, group, self._mesh.rank.device)

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        for stage in self.stages:
            stage.strategy.scale_grads(factor)

    def zero_grad(self) -> None:
        """See `ParallelStrategy.zero_grad`."""
        for stage in self.stages:
            stage.strategy.zero_grad()

    def updated(self) -> None:
        """See `ParallelStrategy.updated`."""
        for stage in self.stages:
            stage.strategy.updated()

    def reducers(self) -> list[Reducer]:
        """See `ParallelStrategy`: those of the stages."""
        return [r for stage in self.stages for r in reducers_of(stage.strategy)]

    def messages(self) -> list[tuple[str, int, str]]:
        """For traces: the collectives of the stages, the last one's first, as backward does."""
        return [m for stage in reversed(self.stages) for m in getattr(stage.strategy, "messages", list)()]

    # --- transfers

    def _is_last(self, stage: Stage) -> bool:
        return stage.number == self._mesh.pipeline * self._chunks - 1

    def _peer(self, number: int) -> int:
        """The world rank of a stage."""
        return self._peers[number % self._mesh.pipeline]

    def _way(self, kind: str, source: int, target: int) -> dict[str, Any]:
        """Group and tag for a transfer between two stages. What a rank sends and what it receives never have the same: neither has
        to wait for the other."""
        wraps = (source < target) != (source % self._mesh.pipeline < target % self._mesh.pipeline)
        tag = (kind == "backward") + 2 * (source % 2) + 4 * wraps
        return {"group": self._ways[tag % len(self._ways)], "tag": tag}


class _ExampleOfStage:
    """See `Example`, for one stage: random numbers go in, and where the loss is not computed, the sum of the output is one.

    The first call tells the next stage the shape of what it will receive.
    """

    def __init__(self, pipeline: Pipeline, stage: Stage, example: Example) -> None:
        self._pipeline, self._stage, self._example = pipeline, stage, example

    def __call__(self, module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
        pipeline, stage = self._pipeline, self._stage
        control = pipeline._mesh.rank.control
        hidden = None
        if stage.number:
            if stage.entry is None:
                told = torch.empty(8, dtype=torch.int64)
                dist.recv(told, pipeline._peer(stage.number - 1), group=control, tag=_SHAPE_TAG)
                code, ndim, *sizes = told.tolist()
                stage.entry = tuple(sizes[:ndim]), _DTYPES[code]
            shape, dtype = stage.entry
            hidden = torch.randn((samples, *shape), generator=torch.Generator().manual_seed(0))
            hidden = hidden.to(pipeline._mesh.rank.device, dtype).requires_grad_()
        last = pipeline._is_last(stage)
        bound = BoundStage(module, hidden)
        made = self._example(cast(nn.Module, bound), samples, part=not last)
        stage.time = bound.time
        if not last and stage.exit is None:
            out = _checked(stage.number, bound.out)
            stage.exit = tuple(out.shape[1:]), out.dtype
            told = torch.zeros(8, dtype=torch.int64)
            told[: 1 + out.ndim] = torch.tensor([_DTYPES.index(out.dtype), out.ndim - 1, *out.shape[1:]])
            # Not awaited here: a rank whose next stage this is may have to wrap the one before it first, together with this rank.
            sent = dist.isend(told, pipeline._peer(stage.number + 1), group=control, tag=_SHAPE_TAG)
            assert sent is not None
            pipeline._told.append((sent, told))
        return made


def _checked(number: int, out: object) -> Tensor:
    if isinstance(out, Tensor) and out.dtype in _DTYPES and 1 <= out.ndim <= 7:
        return out
    raise UserError(
        f"stage {number} of the model gives {type(out).__name__}, not one tensor of floating-point numbers [B, ...]",
        "pass one tensor from stage to stage; compute in each stage what else its blocks need",
    )


class BoundStage:
    """A stage with its input. It is called with the arguments of the whole model, and otherwise has what the stage has."""

    def __init__(self, module: nn.Module, hidden: Tensor | None) -> None:
        self._module, self._hidden = module, hidden
        self.out: Any = None
        self.time = 0

    def __call__(self, tokens: Tensor, **more: Any) -> Tensor:
        self.time = tokens.shape[1] if tokens.ndim > 1 else 0
        if self._hidden is None:
            self.out = self._module(tokens, **more)
        elif isinstance(self._module, nn.Sequential):
            self.out = self._module(self._hidden, **more)
        else:
            self.out = self._module(tokens, hidden=self._hidden, **more)
        made: Tensor = self.out
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass(slots=True)
class _Run:
    """One series of passes."""

    pipeline: Pipeline
    order: list[Action]
    micro_batches: Sequence[MicroBatch]
    work: Work
    most_kept: int = 0
    _kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    _received: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    _sent: dict[Action, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    """Transfers that may not have ended. gloo's cannot be asked."""

    def __call__(self) -> None:
        last_of = {action.index: at for at, action in enumerate(self.order)}
        contexts: dict[int, ExitStack] = {}
        with ExitStack() as every:
            for at, action in enumerate(self.order):
                if action.index not in contexts:
                    contexts[action.index] = every.enter_context(ExitStack())
                    contexts[action.index].enter_context(self.work.around(action.index))
                self._receive(action)
                if at + 1 < len(self.order):
                    self._receive(self.order[at + 1])
                if action.kind == "forward":
                    self._forward(action)
                else:
                    self._backward(action)
                if last_of[action.index] == at:
                    contexts[action.index].close()
        for transfer, _ in self._sent.values():
            transfer.wait()

    def _forward(self, action: Action) -> None:
        stage = self.pipeline.stages[action.chunk]
        batch = self.micro_batches[action.index]
        entered = self._arrived(action)
        if self.work.trains:
            if entered is not None:
                entered.requires_grad_()
        elif self.pipeline.parts is not None:
            self.pipeline.parts.enter(action.index, len(self.micro_batches))
        last = self.pipeline._is_last(stage)
        bound = cast(nn.Module, BoundStage(stage.module, entered))
        made = self.work.forward(bound, action.index, batch, part=not last)
        if not last:
            self._send(action, made.detach(), stage.number + 1)
        if self.work.trains:
            # Of an output only its place in the graph is kept: its memory is free once it is sent.
            self._kept[action.chunk, action.index] = _Kept(entered, made if last else get_gradient_edge(made))
            self.most_kept = max(self.most_kept, len(self._kept))

    def _backward(self, action: Action) -> None:
        stage = self.pipeline.stages[action.chunk]
        grad = self._arrived(action)
        if grad is not None and (sent := self._sent.pop(Action("forward", action.chunk, action.index), None)):
            sent[0].wait()  # has ended: the next stage has used it
        kept = self._kept.pop((action.chunk, action.index))
        if self.pipeline.parts is not None:  # gradients and losses are added in backward passes
            self.pipeline.parts.enter(action.index, len(self.micro_batches))
        with stage.strategy.accumulate(last=action.index == len(self.micro_batches) - 1):
            self.work.backward(action.index, kept.made, grad)
        if kept.entered is not None:
            assert kept.entered.grad is not None
            self._send(action, kept.entered.grad, stage.number - 1)

    def _receive(self, action: Action) -> None:
        """Starts to receive what an action needs, if it needs something and has not started."""
        pipeline, stage = self.pipeline, self.pipeline.stages[action.chunk]
        source = stage.number - 1 if action.kind == "forward" else stage.number + 1
        if action in self._received or source < 0 or (action.kind == "backward" and pipeline._is_last(stage)):
            return
        shape, dtype = stage.passed(action.kind, self.micro_batches[action.index].tokens)
        into = torch.empty(shape, dtype=dtype, device=pipeline._mesh.rank.device)
        way = pipeline._way(action.kind, source, stage.number)
        started = dist.irecv(into, pipeline._peer(source), **way) if into.numel() else None
        self._received[action] = into, started

    def _arrived(self, action: Action) -> Tensor | None:
        if action not in self._received:
            return None
        into, started = self._received.pop(action)
        if started is not None:
            started.wait()
        return into

    def _send(self, action: Action, tensor: Tensor, target: int) -> None:
        """Starts to send the result of an action to a stage."""
        if not tensor.numel():
            return
        tensor, source = tensor.contiguous(), self.pipeline.stages[action.chunk].number
        way = self.pipeline._way(action.kind, source, target)
        transfer = dist.isend(tensor, self.pipeline._peer(target), **way)
        assert transfer is not None
        self._sent[action] = transfer, tensor
        if len(self._sent) > self.pipeline.most_sends:
            oldest = next(iter(self._sent))
            self._sent.pop(oldest)[0].wait()
