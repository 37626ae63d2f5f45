"""A sweep whose driver is killed at any point: the rule rebuilt from the log makes the same decisions as the first one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.cluster.sweep.schedulers import Copy, Decision, Rule, Stop, make, replay, score
from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec

TOKENS, AT_A_TIME = 640, 16
AXES = [Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-2)]
SCHEDULERS: list[dict[str, Any]] = [
    {"name": "asha", "rungs": [64, 256], "reduction": 2},
    {"name": "hyperband", "rungs": [64, 256], "reduction": 2},
    {"name": "median", "grace": 64, "every": 32},
    {"name": "pbt", "every": 64, "quantile": 0.5},
]


def rule(scheduler: dict[str, Any]) -> Rule:
    """The rule of a sweep with trials of 640 tokens."""
    spec = SweepSpec.model_validate(
        {"base": "b.yaml", "array": {"parameters": [{"lr": [1e-3]}]}, "scheduler": scheduler}
    )
    made = make(spec, AXES, TOKENS, lambda cell: {"optim.lr": 1e-3})
    assert made is not None
    return made


class Cells:
    """Trials that report in any order and follow the rule's decisions; a copy is made at once, or before the next report."""

    def __init__(self, scheduler: dict[str, Any], log: list[Event]) -> None:
        self.rule, self.log = rule(scheduler), log
        self.tokens: dict[str, int] = {}
        self.to_copy: dict[str, Copy] = {}
        self.over: set[str] = set()

    def note(self, kind: str, **data: Any) -> None:
        """Appends an event to the log, after a round trip through JSON, as in a driver."""
        self.log.append(Event.from_dict(Event(kind, 0.0, data).to_dict()))

    def adopt(self, cell: str) -> None:
        """The copy is made."""
        copy = self.to_copy.pop(cell)
        self.tokens[cell] = self.tokens[copy.source]
        changes = dict(copy.changes)
        self.note("exploited", cell=cell, source=copy.source, step=1, tokens=self.tokens[cell], changes=changes)
        self.rule.copied(cell, self.tokens[cell], changes)

    def report(self, cell: str, tokens: int, value: float | None, at_once: bool) -> Decision | None:
        """The trial trains and reports."""
        if cell in self.over:
            return None
        if cell in self.to_copy:
            self.adopt(cell)
        self.tokens[cell] = self.tokens.get(cell, 0) + tokens
        last = self.tokens[cell] >= TOKENS
        if last and at_once:
            self.note("finished", cell=cell)  # the trial's thread is faster than Ray Tune's
        self.note("report", cell=cell, tokens=self.tokens[cell], step=1, value=value)
        told = self.rule.report(cell, self.tokens[cell], score(value, "min"))
        if last or isinstance(told, Stop):
            if not (last and at_once):
                self.note("finished" if last else "stopped", cell=cell)
            self.rule.over(cell)
            self.over.add(cell)
        elif isinstance(told, Copy) and told.source in self.tokens:
            self.to_copy[cell] = told
            if at_once:
                self.adopt(cell)
        return told


REPORTS = st.lists(
    st.tuples(
        st.sampled_from([f"cell-{n}" for n in range(AT_A_TIME)]),
        st.integers(1, 130),
        st.one_of(st.none(), st.floats(-1e3, 1e3)),
        st.booleans(),
    ),
    max_size=120,
)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda told: told["name"])
@settings(max_examples=150)
@given(reports=REPORTS, data=st.data())
def test_a_driver_that_takes_over(scheduler: dict[str, Any], reports: list[Any], data: st.DataObject) -> None:
    """Cut at any report: the rule rebuilt from the log decides on all later reports as the original rule does."""
    cut = data.draw(st.integers(0, len(reports)))
    log: list[Event] = []
    whole = Cells(scheduler, log)
    for told in reports[:cut]:
        whole.report(*told)
    again = Cells(scheduler, [])
    again.tokens, again.to_copy, again.over = dict(whole.tokens), dict(whole.to_copy), set(whole.over)
    replay(again.rule, log, "min")
    for told in reports[cut:]:
        assert again.report(*told) == whole.report(*told)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda told: told["name"])
def test_the_log_matters(scheduler: dict[str, Any]) -> None:
    """Without the log the next driver would decide otherwise, so the replay has an effect."""
    log: list[Event] = []
    whole = Cells(scheduler, log)
    for tokens in range(2):
        for number in range(12):
            whole.report(f"cell-{number}", 64, float(number % 6 + tokens), True)
    late = [f"late-{n}" for n in range(12)]
    expected = [whole.rule.report(cell, 64, -99.0) for cell in late]
    again, blank = rule(scheduler), rule(scheduler)
    replay(again, log, "min")
    assert [again.report(cell, 64, -99.0) for cell in late] == expected
    assert [blank.report(cell, 64, -99.0) for cell in late] != expected


def test_scores() -> None:
    """A higher score is better; None, NaN and infinity are worse than all numbers."""
    assert score(2.0, "max") == 2.0
    assert score(2.0, "min") == -2.0
    assert [score(value, "max") for value in (None, float("nan"), float("inf"))] == [float("-inf")] * 3


def test_none() -> None:
    """A file without a scheduler has no rule."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1e-3]}]}})
    assert make(spec, AXES, TOKENS, lambda cell: {}) is None
