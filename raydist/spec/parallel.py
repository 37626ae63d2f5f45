"""The section `parallel` of a job file: how the work is split over the workers. It does not change the job's numbers.

Runs anywhere. Each field's description is written here once; see raydist/spec/models.py. What fits a job is in mesh.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from raydist.spec.parts import Extension, PartWithNewFields

MOST_WORKERS = 1 << 17


class ParallelSpec(PartWithNewFields):
    """How the work is split over the workers."""

    new_fields = (
        "options",
        "tensor",
        "tensor_across_nodes",
        "pipeline",
        "chunks",
        "pipeline_cut",
        "expert",
        "exchange",
        "context",
    )

    strategy: Annotated[str, Extension("parallel")] = Field(
        "ddp", description="A built-in strategy, or package.module:attribute of your own."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that strategy; docs/extending.md."
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Ranks that share each layer, and the sequence in between (tensor parallel); the strategy splits over replicas "
        "of that many ranks. Divides the workers, model.context and the model's heads.",
    )
    tensor_across_nodes: bool = Field(
        False,
        description="Let the ranks that share a layer be on several nodes: each layer then waits for their network.",
    )
    pipeline: int = Field(
        1,
        ge=1,
        description="Stages: groups of consecutive blocks, each on other ranks, which pass micro-batches on (pipeline parallel, "
        "1F1B). Times tensor divides the workers.",
    )
    chunks: int = Field(
        1,
        ge=1,
        description="Stages of each rank; above 1 they are interleaved: less waiting at the ends of a step, more transfers.",
    )
    pipeline_cut: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="Blocks of each stage, pipeline x chunks numbers; null: such that the slowest stage is as fast as possible.",
    )
    expert: int = Field(
        1,
        ge=1,
        description="Consecutive ranks of a stage, replicas or tensor parallel ones, that share the experts of each layer (expert "
        "parallel). Divides the experts and the ranks of a stage.",
    )
    exchange: Annotated[str, Extension("exchange", bare=True)] = Field(
        "all_to_all",
        description="How tokens get to the ranks of their experts: a built-in exchange, or package.module:attribute of your own.",
    )
    context: int = Field(
        1,
        ge=1,
        description="Ranks that share each sequence, with whole weights (context parallel, by exchange of heads); the strategy "
        "splits over them, too. Divides the workers, model.context and the query heads of a tensor parallel rank.",
    )
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        None,
        description="ddp: size of a gradient bucket in MiB; auto: the faster of torch's size and the one that suits the link, "
        "measured at a run's first start (docs/how-to/bench.md); null: torch's.",
    )
    shard: int | None = Field(
        None,
        ge=1,
        le=MOST_WORKERS,
        description="hsdp: ranks that share one copy of the state; default: those of a node.",
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        "auto",
        description="zero3, hsdp: drop a block's gathered parameters after its forward pass and gather them again in backward; "
        "auto: all blocks but the last.",
    )
    prefetch: int = Field(1, ge=0, description="zero3, hsdp: blocks whose parameters are gathered ahead of their use.")

    @property
    def replica(self) -> int:
        """Ranks that together hold one replica of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def unit(self) -> int:
        """Ranks whose number divides the workers: whole replicas, which have whole sets of experts."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert)

    @property
    def replicas_with_experts(self) -> int:
        """Replicas that share one set of experts; 1 if a replica has a whole one, or several."""
        return max(self.expert // (self.tensor * self.context), 1)

    @property
    def stages(self) -> int:
        """Parts of the model in a pipeline; 1 without."""
        return self.pipeline * self.chunks

    @property
    def together(self) -> int:
        """Consecutive ranks that must be on one node."""
        return 1 if self.tensor_across_nodes else self.tensor

    def whole(self, workers: int) -> int:
        """As many of these workers as make whole replicas, with whole sets of experts."""
        return workers - workers % self.unit
