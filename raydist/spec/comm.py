"""The section of a job file about communication that changes the numbers: how gradients are compressed.

Runs anywhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from raydist.extension_plans import compressor_plan
from raydist.spec.parts import Extension, Part, check_spec

NONE = "none"


class CommSpec(Part):
    """What is sent between the ranks."""

    compress: Annotated[str, Extension("compressor", also=(NONE,))] = Field(
        NONE,
        description="How gradients are sent to be summed: none (in precision.reduce), a built-in compressor, or "
        "package.module:attribute of your own; docs/how-to/communication.md.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that compressor; docs/extending.md."
    )
    error_feedback: bool | None = Field(
        None,
        description="Add what a compressor loses of a gradient to the next one; null: as the compressor does by default. It keeps "
        "8 bytes a gradient on each rank.",
    )

    @model_validator(mode="after")
    def _fits(self) -> CommSpec:
        if self.compresses:
            check_spec("compressor", self.compress, self)
        return self

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed."""
        return self.compress != NONE

    @property
    def feedback(self) -> bool:
        """Whether what is lost is added to the next gradient."""
        plan = compressor_plan(self.compress)
        return self.error_feedback if self.error_feedback is not None else plan is None or plan.feedback
