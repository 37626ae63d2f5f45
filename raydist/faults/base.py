"""What all faults have in common: fields, the rank and the phase in which they happen.

Runs anywhere.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["data", "forward", "backward", "update", "eval", "save"]
By = Literal["rank", "driver"]


class Fault(BaseModel):
    """The fields of all faults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    by: ClassVar[By] = "rank"
    """Which process injects it."""

    fault: str
    rank: int | None = Field(None, ge=0, description="The rank to inject it on; null: every rank separately.")
    step: int = Field(ge=1, description="The step in which it happens.")
    times: int = Field(
        1, ge=1, description="How often it happens in the whole run: at most once each time the step is trained."
    )

    @property
    def at(self) -> Phase:
        """The phase of the step in which it happens."""
        return "data"


class OfRank(Fault):
    """A fault of one rank."""

    rank: int = Field(ge=0, description="The rank to inject it on.")


class AtPhase(OfRank):
    """A fault of a rank at the start of a phase of the step."""

    phase: Phase = Field(
        "forward",
        description="data: before the step's batch is ready; save: before the loop starts a checkpoint; eval and save: only in "
        "steps with an evaluation or a checkpoint.",
    )

    @property
    def at(self) -> Phase:
        """The phase as given."""
        return self.phase


class InForward(Fault):
    """A fault in the model."""

    @property
    def at(self) -> Phase:
        """The first forward pass."""
        return "forward"
