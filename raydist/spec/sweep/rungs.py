"""The settings of asha and hyperband: the tokens at which they decide, and how many cells continue.

Runs anywhere.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from raydist.spec.parts import Part, Tokens, problem


class RungOptions(Part):
    """A subclass gives `reduction` its default."""

    rungs: list[Tokens] | None = Field(
        None,
        min_length=1,
        description="tokens at which it is decided, ascending; null: those of a cell over reduction, repeatedly, three rungs at "
        "most.",
    )
    reduction: float = Field(gt=1, description="one in so many continues.")

    @model_validator(mode="after")
    def _ascends(self) -> RungOptions:
        if self.rungs is not None and sorted(set(self.rungs)) != self.rungs:
            raise problem("rungs", self.rungs, "do not ascend", f"write {sorted(set(self.rungs))}")
        return self

    def rungs_of(self, tokens: int) -> list[int]:
        """Tokens at which a cell of so many is judged, ascending."""
        if self.rungs is not None:
            return self.rungs
        return sorted({max(1, round(tokens / self.reduction**k)) for k in (1, 2, 3)})

    def unfit(self, tokens: int) -> tuple[str, str, str] | None:
        """A rung that a cell of so many tokens does not reach: (field, problem, remedy)."""
        if self.rungs is None or self.rungs[-1] < tokens:
            return None
        what = f"{self.rungs[-1]:,} tokens are not reached before the end of a cell of {tokens:,}"
        return "rungs", what, "lower it, or train longer"
