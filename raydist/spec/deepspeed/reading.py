"""What stands between a DeepSpeed file and the rules: its checked values, and what the rules make of them.

Runs anywhere: plain python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """A file's checked values, the spec around it, and what the rules make of them."""

    given: Mapping[str, Any]
    auto: Collection[str]
    """Fields that say "auto": the spec decides."""
    spec: Mapping[str, Any]
    """Dotted name -> value of all else that the spec says, whether it beats this file or not."""
    nearer: Collection[str]
    """Fields of `spec` that beat this file."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Dotted name of the spec -> value, as the rules put them."""
    sources: dict[str, str] = field(default_factory=dict)
    """Dotted name of the spec -> where in the file it comes from."""
    problems: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Field without a counterpart -> why, or empty."""
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, which then counts as dealt with."""
        self.used.add(name)
        return self.given.get(name, default)

    def absent(self, name: str) -> bool:
        """Neither a value nor "auto": DeepSpeed takes its default."""
        return name not in self.given and name not in self.auto

    def put(self, name: str, value: Any, source: str) -> None:
        """A field of the spec, and the field of the file that it comes from."""
        self.fields[name], self.sources[name] = value, source

    def lose(self, name: str, why: str) -> None:
        """A field that has no counterpart, or whose value has none."""
        self.used.add(name)
        self.dropped[name] = why

    def problem(self, name: str, value: Any, what: str, remedy: str) -> None:
        """A value that cannot be used."""
        self.problems.append(f"{name}: {value!r} {what}; {remedy}")

    def whole(self, name: str) -> int | None:
        """A whole number that the spec says. What is wrong with any other value, the spec's loader says."""
        value = self.fields.get(name, self.spec.get(name))
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


Rule = Callable[[Reading], None]
Check = Callable[[Any], Any]
"""Gives a value in its type; raises ValueError with what it must be."""


@dataclass(frozen=True)
class Field:
    """What becomes of one field: a rule reads it, raydist does it by itself, or it is lost."""

    check: Check | None = None
    rule: Rule | None = None
    own: bool = False
    why: str = ""
    off: tuple[Any, ...] = ()


def takes(check: Check, rule: Rule) -> Field:
    """A field that `rule` reads, after `check`."""
    return Field(check=check, rule=rule)


def lost(why: str = "", *, off: Any = None) -> Field:
    """A field that nothing here answers to, and why; the value `off` asks for nothing."""
    return Field(why=why, off=() if off is None else (off,))


OWN = Field(own=True)
"""A field for what raydist does by itself."""


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    return value


def whole(low: int, high: int | None = None) -> Check:
    """A whole number from `low` to `high`; 5e8 is one."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(value: Any) -> int:
        try:
            found = number(value)
        except ValueError:
            raise ValueError(wanted) from None
        if found != int(found) or found < low or (high is not None and found > high):
            raise ValueError(wanted)
        return int(found)

    return check


def one_of(*choices: str) -> Check:
    """One of these words, in any case."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value.lower()

    return check


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def pair(value: Any) -> list[float]:
    """Two numbers."""
    try:
        first, second = (number(v) for v in value)
    except (TypeError, ValueError):
        raise ValueError("two numbers, such as [0.9, 0.999]") from None
    return [first, second]


def anything(value: Any) -> Any:
    """Whatever it is: the rule says what is wrong with it."""
    return value
