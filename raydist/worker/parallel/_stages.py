"""A model cut into the stages of a pipeline, and several stages of a rank as one module.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from torch import nn

from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.model import part_of
from raydist.worker.model._moe import layers_of
from raydist.worker.parallel._model_graph import blocks_of
from raydist.worker.pipeline_schedule import cut

Costs = tuple[list[float], list[int]]


@dataclass(frozen=True, slots=True)
class StageCut:
    """Where a model is cut: the blocks of each stage, and its share of the multiplications of a pass."""

    blocks: tuple[int, ...]
    shares: tuple[float, ...]

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """The stages of a model, in order."""
        ends = [*accumulate(self.blocks)]
        make = _part_maker(model)[1]
        return [make(end - count, end) for end, count in zip(ends, self.blocks, strict=True)]


def cut_model(model: nn.Module, spec: JobSpec, known: Costs | None = None) -> StageCut:
    """Where a model is cut: by `parallel.pipeline_cut`, or such that all stages take the same time.

    `known`: `costs_of` the model, if they are. Raises UserError if it has no blocks to cut between, fewer blocks than stages,
    or other ones than `pipeline_cut` counts.
    """
    stages, counts = spec.parallel.stages, spec.parallel.pipeline_cut
    blocks = _part_maker(model)[0]
    if stages > blocks:
        raise UserError(
            f"parallel.pipeline: {stages} stages (pipeline x chunks), and the model has {blocks} blocks",
            "take fewer stages",
        )
    costs, sizes = known or costs_of(model, spec.model.context)
    if counts is None:
        counts = cut(costs, sizes, stages)
    elif sum(counts) != blocks:
        raise UserError(
            f"parallel.pipeline_cut: {counts} has {sum(counts)} blocks in all, and the model has {blocks}",
            "give the number of blocks of each stage",
        )
    ends = [*accumulate(counts)]
    whole = sum(costs) or 1.0  # a model without matrices
    shares = (sum(costs[end - count : end]) / whole for end, count in zip(ends, counts, strict=True))
    return StageCut((*counts,), (*shares,))


def _part_maker(model: nn.Module) -> tuple[int, Callable[[int, int], nn.Module]]:
    """(blocks of a model, what makes a part of it from the first block and the one after the last)."""
    stage: Callable[[int, int], nn.Module] | None = getattr(model, "stage", None)
    if callable(stage):
        return len(blocks_of(model)), stage
    if isinstance(model, nn.Sequential):
        return len(model), partial(part_of, model)
    raise UserError(
        f"parallel.pipeline: {type(model).__name__} has no stage(first, last), and is no nn.Sequential",
        "add it (docs/reference/models.md), or set parallel.pipeline: 1",
    )


def costs_of(model: nn.Module, context: int) -> Costs:
    """Of the model's blocks, with what belongs to the first and the last stage: multiplications for a token, and elements.

    A matrix costs its elements, of experts those that a token takes; an embedding only looks up. What the model's
    `flops_per_token` counts beyond that (attention) is the same in all blocks.
    """

    count, make = _part_maker(model)
    blocks = [make(i, i + 1) for i in range(count)]

    def multiplications(module: nn.Module) -> Iterator[float]:
        for m in module.modules():
            if not isinstance(m, nn.Embedding):
                yield from (p.numel() for p in m.parameters(recurse=False) if p.ndim >= 2)
        for _, layer in layers_of(module):  # a token takes some of the experts, of which this rank may have a part
            yield from (p.numel() * (layer.shape.chosen / len(p) - 1) for p in layer.experts.parameters())

    costs = [float(sum(multiplications(block))) for block in blocks]
    of_model = getattr(model, "flops_per_token", None)
    if of_model is not None:
        rest = max(of_model(context) / 6 - sum(multiplications(model)), 0.0)
        costs = [cost + rest / len(costs) for cost in costs]
    return costs, [sum(p.numel() for p in block.parameters()) for block in blocks]


class Stages(nn.Module):
    """Several stages of a rank as one module, with the names of the plain model. It has their parameters, and no forward."""

    chunks: tuple[nn.Module, ...]

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["chunks"] = tuple(chunks)  # not as children, which would give each parameter a second name
        self.refresh()

    def refresh(self) -> None:
        """Takes over parameters and buffers that were replaced in modules of which each stage has a copy."""
        _join(self, self.chunks)

    def train(self, mode: bool = True) -> Stages:
        """See nn.Module; the stages' own flags, too."""
        for chunk in self.chunks:
            chunk.train(mode)
        super().train(mode)
        return self


def _join(into: nn.Module, parts: Sequence[nn.Module]) -> None:
    for table in ("_parameters", "_buffers"):
        setattr(into, table, {name: value for part in reversed(parts) for name, value in getattr(part, table).items()})
    into._non_persistent_buffers_set = set().union(*(part._non_persistent_buffers_set for part in parts))
    for name in dict.fromkeys(name for part in parts for name in part._modules):
        children = list({id(m): m for part in parts if (m := part._modules.get(name)) is not None}.values())
        if len(children) > 1:
            child = nn.ModuleList() if isinstance(children[0], nn.ModuleList) else nn.Module()
            _join(child, children)
            into.add_module(name, child)
        elif children:
            into.add_module(name, children[0])
