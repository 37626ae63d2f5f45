"""Which cells stop early, and which go on from another's checkpoint: one rule a file, told what cells report.

Runs anywhere: no ray, no clock, no I/O. `raydist.cluster.sweep.ray_tune.Decisions` carries out what they decide.

    asha.py        at each rung the best 1/reduction go on
    hyperband.py   asha in brackets, to which cells belong by their ids
    median.py      a cell that is worse than the median of the others stops
    pbt.py         a cell of the worst copies one of the best, with other values
    _sorted.py     numbers in order, one added at a time

A rule's state follows from what it was told, and from nothing else: not from what it decided, nor from what came of that. So the
sweep's event log makes the same rule again (`replay`), and it decides on as if nothing had been between. What it is told of one
cell changes what it knows of that cell alone, so that it makes no difference in which order the log has things of different cells.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec


@dataclass(frozen=True, slots=True)
class Go:
    """The cell goes on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The cell goes on, or makes room if others wait for their turn."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The cell ends, for good."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The cell goes on from the newest checkpoint of `source`, with these values: field -> [before, after]."""

    source: str
    changes: Mapping[str, list[Any]]


Decision = Go | Turn | Stop | Copy
GO, TURN, STOP = Go(), Turn(), Stop()


class Rule(ABC):
    """Decides when a cell reports, in O(log n) of n cells but for moving memory."""

    name: ClassVar[str]

    @abstractmethod
    def report(self, cell: str, tokens: int, score: float) -> Decision:
        """What becomes of the cell, which has been trained on so many tokens. `score`: see `score`.

        A cell that went back to a checkpoint reports again what it has reported before: nothing is decided twice.
        """

    def copied(  # noqa: B027  # only pbt copies: the others have nothing to remember
        self, cell: str, tokens: int, changes: Mapping[str, Sequence[Any]]
    ) -> None:
        """The cell stands now where another one's checkpoint was, at so many tokens, with values as `Copy` has them."""

    @abstractmethod
    def over(self, cell: str) -> None:
        """The cell has ended, for good. What it reported may count on."""


def score(value: float | None, better: Literal["min", "max"]) -> float:
    """What rules compare: more is better. -inf for an objective that is no number, which JSON has as null."""
    if value is None or not math.isfinite(value):
        return -math.inf
    return value if better == "max" else -value


def replay(rule: Rule, events: Iterable[Event], better: Literal["min", "max"]) -> None:
    """Tells the rule what a sweep's log has.

    Cells that are over are named last: a driver may have written down a last report when its cell had ended already.
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
    for cell in over:
        rule.over(cell)


def make(spec: SweepSpec, axes: Sequence[Axis], tokens: int, values: Callable[[str], Mapping[str, Any]]) -> Rule | None:
    """The rule that the file asks for; None: every cell trains to its end.

    `tokens`: those of the longest cell. `values(cell)`: its parameters as the file has them, field -> value.
    """
    from raydist.cluster.sweep.schedulers.asha import Asha
    from raydist.cluster.sweep.schedulers.hyperband import Hyperband
    from raydist.cluster.sweep.schedulers.median import Median
    from raydist.cluster.sweep.schedulers.pbt import Population

    asked = spec.scheduler
    match asked.name:
        case "asha":
            return Asha(asked.rungs_of(tokens), asked.reduction_of)
        case "hyperband":
            return Hyperband(asked.rungs_of(tokens), asked.reduction_of)
        case "median":
            return Median(asked.every_of(tokens), asked.grace_of(tokens), tokens)
        case "pbt":
            return Population(
                axes,
                values,
                every=asked.every_of(tokens),
                quantile=asked.quantile,
                resample=asked.resample,
                perturb=asked.perturb,
                seed=spec.search.seed,
            )
        case _:
            return None
