"""How a validator of the spec says what is wrong: field, value, problem and remedy, kept apart until they are shown.

Runs anywhere.
"""

from __future__ import annotations

from typing import Any


class SpecValueError(ValueError):
    """A combination of values that cannot be. `field` is relative to the section that raises it."""

    def __init__(self, field: str, value: Any, what: str, remedy: str) -> None:
        super().__init__(field, value, what, remedy)
        self.field, self.value, self.what, self.remedy = field, value, what, remedy


def problem(field: str, value: Any, what: str, remedy: str) -> SpecValueError:
    """A SpecValueError, for `raise problem(...)` in a validator."""
    return SpecValueError(field, value, what, remedy)
