"""The section of a job file about communication that changes the numbers: what is sent between replicas, which way, and how often.

Runs anywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raydist.extension_plans import compressor_plan
from raydist.spec.parts import Extension, Part, PartWithNewFields, check_spec, near_divisors, problem

NONE = "none"
TORCH = "torch"


class OuterSpec(Part):
    """The outer optimizer of `comm.every`: SGD with Nesterov momentum, on the outer gradient."""

    lr: float = Field(
        0.7, gt=0, description="Learning rate of the outer step; 1 with momentum 0: the mean of the replicas' weights."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step.")
    blend: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="With comm.delay: the share of its own weights that a replica keeps where outer weights arrive.",
    )


class CommSpec(PartWithNewFields):
    """What is sent between the ranks."""

    new_fields = ("every", "outer", "fragments", "delay", "topology", "ring")

    compress: Annotated[str, Extension("compressor", also=(NONE,))] = Field(
        NONE,
        description="How gradients are sent to be summed: none (in precision.reduce), a built-in compressor, or "
        "package.module:attribute of your own; with every: how outer gradients are. docs/how-to/communication.md.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that compressor; docs/extending.md."
    )
    error_feedback: bool | None = Field(
        None,
        description="Add what a compressor loses of a gradient to the next one; null: as the compressor does by default. It keeps "
        "8 bytes a gradient on each rank.",
    )
    topology: Literal["torch", "direct", "two_level", "ring"] = Field(
        "torch",
        description="ddp: how gradients are summed. torch: by its all-reduce; direct: each rank adds up a part, received from all; "
        "two_level: within each node, then between nodes; ring: by torch's all-reduce, in the order of `ring`.",
    )
    ring: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="With topology ring: all ranks, in the order of the ring; null: that of the fastest links, measured at a run's "
        "first start.",
    )
    every: int | None = Field(
        None,
        ge=1,
        description="Steps in which replicas train apart, each on its own part of the batches, before an outer step brings them "
        "together (local SGD, DiLoCo); null: gradients are summed in each step.",
    )
    outer: OuterSpec = Field(default_factory=OuterSpec, description="With every: the outer optimizer.")
    fragments: int = Field(
        1,
        ge=1,
        description="With every: parts of the model that are brought together one by one, at equal distances. Divides every.",
    )
    delay: int = Field(
        0,
        ge=0,
        description="With every: steps between the start of an outer step and the arrival of its result, which goes on beside "
        "training; 0: training waits. Below every / fragments.",
    )

    @model_validator(mode="after")
    def _fits(self) -> CommSpec:
        if self.ring is not None and self.topology != "ring":
            raise problem("ring", self.ring, f"has no effect with topology: {self.topology}", "set comm.topology: ring, or leave "
                          "it out")  # fmt: skip
        if self.ring is not None and sorted(self.ring) != list(range(len(self.ring))):
            raise problem(
                "ring", self.ring, f"is no order of the ranks 0 to {len(self.ring) - 1}", "name each rank once"
            )
        if self.compress != NONE:
            check_spec("compressor", self.compress, self)
        if self.every is None:
            for field in ("outer", "fragments", "delay"):
                if getattr(self, field) != type(self).model_fields[field].get_default(call_default_factory=True):
                    raise problem(field, _shown(getattr(self, field)), "belongs to an outer step, and there is none",
                                  "set comm.every, such as 32, or leave it out")  # fmt: skip
            return self
        if self.every % self.fragments:
            raise problem("fragments", self.fragments, f"does not divide every: {self.every}",
                          near_divisors(self.every, self.fragments))  # fmt: skip
        if self.delay >= self.every // self.fragments:
            raise problem("delay", self.delay, f"is not below the {self.every // self.fragments} steps (every / fragments) after "
                          "which the next fragment starts", f"set it to {self.every // self.fragments - 1} or less")  # fmt: skip
        if self.delay == 0 and "blend" in self.outer.model_fields_set:
            raise problem("outer.blend", self.outer.blend, "has no effect without delay: replicas take the outer weights",
                          "leave it out, or set comm.delay")  # fmt: skip
        if self.compress != NONE and not getattr(compressor_plan(self.compress), "outer", False):
            raise problem("compress", self.compress, "does not go with comm.every: it rounds too much without error feedback",
                          "take int8, bf16 or fp16, or leave it out")  # fmt: skip
        if self.error_feedback:
            raise problem("error_feedback", True, "does not go with comm.every: outer gradients have none",
                          "leave it out")  # fmt: skip
        return self

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed. With `every` there are outer gradients instead, see `rounds`."""
        return self.compress != NONE and self.every is None

    @property
    def rounds(self) -> bool:
        """Whether outer gradients are compressed."""
        return self.compress != NONE and self.every is not None

    @property
    def aside(self) -> bool:
        """Whether threads beside the training thread send gradients."""
        return self.compresses or self.topology in ("direct", "two_level")

    @property
    def feedback(self) -> bool:
        """Whether what is lost is added to the next gradient."""
        plan = compressor_plan(self.compress)
        return self.error_feedback if self.error_feedback is not None else plan is None or plan.feedback


def _shown(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Part) else value
