"""What the sections of a spec have in common; how a validator says what is wrong: field, value, problem and remedy, kept apart
until they are shown.

Runs anywhere.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class SpecValueError(ValueError):
    """A combination of values that cannot be. `field` is relative to the section that raises it."""

    def __init__(self, field: str, value: Any, what: str, remedy: str) -> None:
        super().__init__(field, value, what, remedy)
        self.field, self.value, self.what, self.remedy = field, value, what, remedy


def problem(field: str, value: Any, what: str, remedy: str) -> SpecValueError:
    """A SpecValueError, for `raise problem(...)` in a validator."""
    return SpecValueError(field, value, what, remedy)


class Part(BaseModel):
    """A section: unknown fields are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def near_divisors(n: int, near: int, field: str = "") -> str:
    """A remedy: divisors of `n` in the neighbourhood of `near`, and the field that takes one."""
    fits = sorted((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))[:3]
    return f"try {field + ' ' if field else ''}{' or '.join(str(d) for d in sorted(fits))}"
