"""Pipeline parallel: the ranks of a replica hold consecutive blocks of the model, and pass micro-batches on.

Runs in: each train worker. Torch, never ray.

    rank 0   embedding, blocks 0-3  --activations-->  rank 1   blocks 4-7, norm, head, loss
                                    <---gradients---

A stage is a module of its own, with the names of the plain model, and has a strategy of its own, independent of the others.
Passing activations changes no number: losses and gradients have the bits of the same micro-batches on one rank. The order of the
passes is in worker/pipeline_schedule.py, how they are made in _pipeline_passes.py, the cut of a model in _stages.py. Stage s of a
replica is on the replica's rank s modulo `pipeline`.

A model says how it is cut: `stage(first, last)` (raydist/worker/model/__init__.py), or it is an nn.Sequential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist.data.batches import MicroBatch
from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.groups import another
from raydist.worker.comm.tree import sum_flat
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard, Work
from raydist.worker.parallel._model_graph import initialise, plain_name, some
from raydist.worker.parallel._pipeline_passes import BoundStage, Links, Passes, Stage
from raydist.worker.parallel._stages import StageCut, Stages, cut_model
from raydist.worker.parts import Parts
from raydist.worker.pipeline_schedule import actions, most_sends, neighbours, way

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPE_TAG = 8
"""Beyond the ways of transfers."""


class Pipeline(ParallelStrategy):
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
        self._sent_shapes: list[tuple[dist.Work, Tensor]] = []
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
        group = mesh.group("pipeline")
        assert group is not None, "a pipeline of several ranks"
        peers = mesh.peers("pipeline")
        stages = mesh.pipeline * self._chunks
        ways = sorted({way(*pair, mesh.pipeline) for pair in neighbours(stages)})
        # NCCL ignores tags, and runs the transfers of a group one by one: each way gets a group.
        alike = mesh.rank.device.type == "cpu"
        groups = {w: group if alike or w == ways[0] else another(peers) for w in ways}
        self._links = Links(peers, groups, stages)
        self._links.connect(mesh.rank)
        for ranks in self._tied:
            # Torch names a group by its ranks and the number of groups before: a stage that has no part makes one by itself.
            among = ranks if mesh.pipeline_rank in ranks else (mesh.pipeline_rank,)
            group = another([peers[r] for r in among], alone=True)
            if among is ranks:
                self._tie_groups[ranks] = group
        for stage in self.stages:
            stage.strategy.wrap(stage.module, _ExampleOfStage(self, stage, example))
        for sent, _ in self._sent_shapes:
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
        run = Passes(
            self.stages, self._links, self.parts, mesh.rank.device, self.most_sends, order, micro_batches, work
        )
        try:
            run()
        finally:
            self.in_flight = max(self.in_flight, run.most_kept)

    # --- what the stages have together

    @property
    def parts(self) -> Parts | None:
        """See `ParallelStrategy`."""
        return self._strategies[0].parts

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        """Sets them for every stage, before `cut`."""
        for strategy in self._strategies:
            strategy.parts = parts

    def reduces_together(self) -> int:
        """See `ParallelStrategy`."""
        return self._strategies[0].reduces_together()

    @property
    def on_final(self) -> Callable[[Sequence[Tensor]], None] | None:
        """See `ParallelStrategy.on_final`. Weights of several stages are left out: their gradients are not summed yet."""
        return self._on_final

    @on_final.setter
    def on_final(self, callback: Callable[[Sequence[Tensor]], None] | None) -> None:
        """Sets it for every stage."""
        shards = self.shards()
        tied = {id(shards[name].local) for names in self._tied.values() for name in names if name in shards}
        self._on_final = callback
        if callback is not None and tied:
            self._on_final = lambda parameters: callback([p for p in parameters if id(p) not in tied])
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
        return [r for stage in self.stages for r in stage.strategy.reducers()]

    def messages(self) -> list[tuple[str, int, str]]:
        """For traces: the collectives of the stages, the last one's first, as backward does."""
        return [m for stage in reversed(self.stages) for m in stage.strategy.messages()]


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
                head = torch.empty(8, dtype=torch.int64)
                dist.recv(head, pipeline._links.peer(stage.number - 1), group=control, tag=_SHAPE_TAG)
                code, ndim, *sizes = head.tolist()
                stage.entry = tuple(sizes[:ndim]), _DTYPES[code]
            shape, dtype = stage.entry
            hidden = torch.randn((samples, *shape), generator=torch.Generator().manual_seed(0))
            hidden = hidden.to(pipeline._mesh.rank.device, dtype).requires_grad_()
        last = pipeline._links.is_last(stage)
        bound = BoundStage(module, hidden)
        made = self._example(cast(nn.Module, bound), samples, part=not last)
        stage.time = bound.time
        if not last and stage.exit is None:
            out = _checked(stage.number, bound.out)
            stage.exit = tuple(out.shape[1:]), out.dtype
            head = torch.zeros(8, dtype=torch.int64)
            head[: 1 + out.ndim] = torch.tensor([_DTYPES.index(out.dtype), out.ndim - 1, *out.shape[1:]])
            # Not awaited here: a rank whose next stage this is may have to wrap the one before it first, together with this rank.
            sent = dist.isend(head, pipeline._links.peer(stage.number + 1), group=control, tag=_SHAPE_TAG)
            assert sent is not None
            pipeline._sent_shapes.append((sent, head))
        return made


def _checked(number: int, out: object) -> Tensor:
    if isinstance(out, Tensor) and out.dtype in _DTYPES and 1 <= out.ndim <= 7:
        return out
    raise UserError(
        f"stage {number} of the model gives {type(out).__name__}, not one tensor of floating-point numbers [B, ...]",
        "pass one tensor from stage to stage; compute in each stage what else its blocks need",
    )
