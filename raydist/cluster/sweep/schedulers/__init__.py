"""The schedulers of sweeps: one file each, found by the name in `scheduler.name`. This docstring is their contract.

Runs anywhere: no ray, no clock, no I/O. `raydist.cluster.sweep.ray_tune.Decisions` carries out the decisions.

A scheduler is a file here, or your own `package.module:attribute`, and has

    build(settings: Mapping[str, Any], setting: Setting) -> Rule

A Rule gets the reports of the trials and decides which of them stop, and which continue from another trial's checkpoint. `settings`
are the scheduler's fields in the sweep's file: those beside `name`, and those of `scheduler.options`.

The state of a rule follows from its calls alone, not from its decisions or their effects. So a restarted driver makes the same rule
from the sweep's event log (`replay`). A call about one trial changes the state of that trial only, so the order of the log
between trials makes no difference.

Optional, at the top level of the file:

- `Options`: a pydantic model of the settings. The fields of a built-in one can stand beside `name` in the file. If it has
  `unfit(tokens) -> (field, problem, remedy) | None`, that is called for the shortest trial before the sweep starts.
- `COPIES = True`: the rule decides `Copy`, so the values of a trial change while it trains.

    asha.py        at each rung the best 1/reduction continue
    hyperband.py   asha in brackets; the id of a trial selects its bracket
    median.py      a trial that is worse than the median of the others stops
    pbt.py         a trial of the worst copies one of the best, with other values
    _sorted.py     numbers in order, one added at a time
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from raydist import registry
from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec


@dataclass(frozen=True, slots=True)
class Go:
    """The trial continues."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The trial continues, or pauses if others wait for its workers."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The trial ends."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The trial continues from the newest checkpoint of `source`, with these values: field -> [before, after]."""

    source: str
    changes: Mapping[str, list[Any]]


Decision = Go | Turn | Stop | Copy
GO, TURN, STOP = Go(), Turn(), Stop()


class Rule(ABC):
    """Decides when a trial reports, in O(log n) of n trials, apart from moving memory. `name`: as in the sweep's file."""

    name = ""

    @abstractmethod
    def report(self, trial: str, tokens: int, score: float) -> Decision:
        """The decision for the trial, which has trained on so many tokens. `score`: see `score`.

        A trial that went back to a checkpoint repeats its reports: the rule decides nothing twice.
        """

    def copied(  # noqa: B027  # only pbt copies
        self, trial: str, tokens: int, changes: Mapping[str, Sequence[Any]]
    ) -> None:
        """The trial has loaded another one's checkpoint, at so many tokens, with `changes` as in `Copy`."""

    @abstractmethod
    def over(self, trial: str) -> None:
        """The trial has ended. Its reports may still count."""


def score(value: float | None, better: Literal["min", "max"]) -> float:
    """The number that rules compare: more is better. -inf for an objective that is not finite, which JSON has as null."""
    if value is None or not math.isfinite(value):
        return -math.inf
    return value if better == "max" else -value


def replay(rule: Rule, events: Iterable[Event], better: Literal["min", "max"]) -> None:
    """Calls the rule for each event of a sweep's log.

    `over` is called last: a driver may have logged a report after the end of its trial.
    """
    over: dict[str, None] = {}
    for event in events:
        data = event.data
        match event.kind:
            case "report":
                rule.report(data["cell"], data["tokens"], score(data["value"], better))
            case "exploited":
                rule.copied(data["cell"], data["tokens"], data["changes"])
            case "finished" | "stopped":
                over[data["cell"]] = None
            case "failed" if data.get("final"):
                over[data["cell"]] = None
    for trial in over:
        rule.over(trial)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rule knows of its sweep. `tokens`: those of the longest trial; `values(trial)`: its parameters, field -> value."""

    axes: Sequence[Axis]
    tokens: int
    values: Callable[[str], Mapping[str, Any]]
    seed: int


def make(spec: SweepSpec, axes: Sequence[Axis], tokens: int, values: Callable[[str], Mapping[str, Any]]) -> Rule | None:
    """The rule that the file names; None with `none`: every trial trains to its end. The arguments are those of `Setting`.

    Raises ExtensionNotFound.
    """
    asked = spec.scheduler
    if asked.name == "none":
        return None
    build = cast(Callable[[Mapping[str, Any], Setting], Rule], registry.load("scheduler", asked.name))
    made = build(asked.settings(), Setting(axes, tokens, values, spec.search.seed))
    made.name = asked.name
    return made
