"""Population based training: which trial copies which, and the values that result."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.cluster.sweep.schedulers import GO, TURN, Copy, Decision
from raydist.cluster.sweep.schedulers.pbt import Population
from raydist.spec.sweep import Axis

RATE = Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-2)
COUNT = Axis("n", "model.layers", "int_uniform", low=1, high=8)
DROP = Axis("dropout", "model.dropout", "uniform", low=0.0, high=0.5)
NAMED = Axis("optimizer", "optim.name", "values", ("adamw", "sgd", "lion"))
FIXED = Axis("batch", "train.global_batch", "values", (8,))
AXES = (RATE, COUNT, DROP, NAMED, FIXED)
OWN = {"optim.lr": 1e-3, "model.layers": 4, "model.dropout": 0.2, "optim.name": "sgd", "train.global_batch": 8}


def population(axes: Sequence[Axis] = AXES, own: Mapping[str, Any] = OWN, **told: Any) -> Population:
    """All trials have the same values, and are judged every 100 tokens."""
    options = {"every": 100, "quantile": 0.25, "resample": 0.0, "perturb": (0.8, 1.25), "seed": 0}
    return Population(axes, lambda cell: own, **{**options, **told})


def judged(rule: Population, tokens: int, scores: Mapping[str, float]) -> dict[str, Decision]:
    """The decision on each trial's report, in that order."""
    return {cell: rule.report(cell, tokens, score) for cell, score in scores.items()}


def test_the_worst_quarter_copies_the_best() -> None:
    """Of eight trials the two worst copy one of the two best, once all have reported; the others may yield their workers."""
    rule = population()
    scores = {str(n): float(n) for n in (7, 6, 5, 4, 3, 2)}
    judged(rule, 100, scores)
    told = judged(rule, 100, {"1": 1.0, "0": 0.0, "8": 8.0})
    assert isinstance(told["1"], Copy)
    assert isinstance(told["0"], Copy)
    assert {told["0"].source, told["1"].source} <= {"7", "6"}
    assert told["8"] == TURN


def test_once_in_an_interval() -> None:
    """No decision before the first interval, nor twice in one interval, nor when a trial that went back reaches it again."""
    rule = population(quantile=0.5)
    judged(rule, 100, {"best": 9.0})
    assert rule.report("cell", 99, 0.0) == GO
    assert isinstance(rule.report("cell", 150, 0.0), Copy)
    assert rule.report("cell", 199, 0.0) == GO
    assert rule.report("cell", 100, 0.0) == GO
    assert isinstance(rule.report("cell", 201, 0.0), Copy)


def test_alone_or_equal() -> None:
    """No trial copies if there is no other one, no better one, or if all diverged."""
    rule = population(quantile=0.5)
    assert rule.report("a", 100, 1.0) == TURN
    assert rule.report("b", 100, 1.0) == TURN
    rule = population(quantile=0.5)
    assert set(judged(rule, 100, dict.fromkeys("abcd", -math.inf)).values()) == {TURN}


def test_a_copy_counts_when_it_was_made() -> None:
    """Until then the trial is unchanged. After that it has the source's tokens and the new values. It keeps its rank among the
    others, but no trial copies it before it is judged again."""
    rule = population([RATE], {"optim.lr": 1e-3}, quantile=0.5)
    judged(rule, 100, {"best": 9.0})
    first = rule.report("cell", 100, 0.0)
    assert isinstance(first, Copy)
    again = rule.report("cell", 200, 0.0)
    assert again == first
    rule.copied("cell", 310, {"optim.lr": [1e-3, 5e-3]})
    assert rule.report("cell", 390, 99.0) == GO
    assert rule.report("other", 100, -1.0) != TURN
    assert rule.report("cell", 400, 99.0) == TURN
    told = rule.report("other", 200, -1.0)
    assert told in [Copy("cell", {"optim.lr": [1e-3, rate]}) for rate in (4e-3, 6.25e-3)]
    back = rule.report("cell", 500, -9.0)
    assert isinstance(back, Copy)
    assert back.changes["optim.lr"][0] == 5e-3


def test_who_has_copied_is_one_of_the_worst() -> None:
    """Until it is judged again: the trials that were better than it do not become the worst, and no trial copies it."""
    rule = population([], {}, quantile=0.25)
    judged(rule, 100, {str(n): float(n) for n in range(8, 0, -1)})
    for cell in ("1", "2"):
        rule.copied(cell, 100, {})
    assert rule.report("3", 200, 3.0) == TURN
    for cell in ("8", "7", "6", "5", "4"):
        rule.over(cell)
    assert rule.report("1", 200, -1.0) == Copy("3", {})
    rule.copied("3", 200, {})
    assert rule.report("1", 300, -1.0) == TURN


def test_who_has_ended_is_copied_by_nobody() -> None:
    """It does not count among the others either."""
    rule = population(quantile=0.5)
    judged(rule, 100, {"best": 9.0, "better": 5.0})
    rule.over("best")
    rule.over("best")
    told = rule.report("cell", 100, 0.0)
    assert isinstance(told, Copy)
    assert told.source == "better"
    rule.over("better")
    assert rule.report("cell", 200, 0.0) == TURN


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from(["1", "2", "3", "4"]))
def test_values_stay_inside(seed: int, resample: float, cell: str) -> None:
    """Every value is one that the file allows, with the same type; parameters with a single value do not change."""
    rule = population(seed=seed, resample=resample, quantile=0.5)
    for number in range(4):
        told = judged(rule, 100 * (number + 1), {"best": 9.0, cell: 0.0})[cell]
        assert isinstance(told, Copy)
        assert list(told.changes) == ["optim.lr", "model.layers", "model.dropout", "optim.name"]
        after = {field: values[1] for field, values in told.changes.items()}
        assert 1e-4 <= after["optim.lr"] <= 1e-2
        assert 0 <= after["model.dropout"] <= 0.5
        assert type(after["model.layers"]) is int
        assert 1 <= after["model.layers"] <= 8
        assert after["optim.name"] in NAMED.values
        for copier in ("best", cell):
            rule.copied(copier, 100 * (number + 1), told.changes)


@pytest.mark.parametrize("cell", [str(n) for n in range(20)])
def test_values_are_perturbed(cell: str) -> None:
    """Numbers are multiplied by one of the two factors, integers change by at least one, a list value moves to a neighbour."""
    rule = population(own={**OWN, "model.layers": 2}, quantile=0.5)
    told = judged(rule, 100, {"best": 9.0, cell: 0.0})[cell]
    assert isinstance(told, Copy)
    assert told.changes["optim.lr"] in ([1e-3, 8e-4], [1e-3, 1.25e-3])
    assert told.changes["model.layers"] in ([2, 1], [2, 3])
    assert told.changes["model.dropout"] in ([0.2, 0.16], [0.2, 0.25])
    assert told.changes["optim.name"] in (["sgd", "adamw"], ["sgd", "lion"])


def test_edges() -> None:
    """Values stay within the range or the list."""
    edge = {"optim.lr": 9e-3, "model.layers": 8, "optim.name": "lion"}
    seen = set()
    for number in range(20):
        rule = population([RATE, COUNT, NAMED], edge, quantile=0.5, perturb=(1.25, 1.25))
        told = judged(rule, 100, {"best": 9.0, str(number): 0.0})[str(number)]
        assert isinstance(told, Copy)
        assert told.changes["optim.lr"][1] == 1e-2
        assert told.changes["model.layers"][1] == 8
        seen.add(told.changes["optim.name"][1])
    assert seen == {"sgd", "lion"}


def test_a_value_that_is_not_there() -> None:
    """If the base sets the value, or it was removed from the list, a new one is drawn."""
    for own in ({}, {"optim.name": "gone"}):
        rule = population([NAMED], own, quantile=0.5)
        told = judged(rule, 100, {"best": 9.0, "cell": 0.0})["cell"]
        assert isinstance(told, Copy)
        before, after = told.changes["optim.name"]
        assert before == own.get("optim.name")
        assert after in NAMED.values


def test_draws_follow_from_seed_cell_and_copies() -> None:
    """Python's global random state has no effect; another seed, trial, or number of copies has."""

    def values(seed: int, cell: str, copies: int, pythons: int = 0) -> list[Any]:
        random.seed(pythons)
        rule = population(seed=seed, resample=1.0, quantile=0.5)
        for _ in range(copies):
            rule.copied(cell, 0, {})
        told = judged(rule, 100, {"best": 9.0, cell: 0.0})[cell]
        assert isinstance(told, Copy)
        return [after for _, after in told.changes.values()]

    assert values(0, "a", 0) == values(0, "a", 0, pythons=1)
    different = [values(0, "a", 0), values(1, "a", 0), values(0, "b", 0), values(0, "a", 1)]
    assert len({str(found) for found in different}) == 4


def test_sources_are_drawn_among_the_best() -> None:
    """Each of the best quarter is copied about equally often."""
    found: dict[str, int] = {}
    for seed in range(300):
        rule = population([RATE], seed=seed)
        told = judged(rule, 100, {str(n): float(n) for n in (11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)})["0"]
        assert isinstance(told, Copy)
        found[told.source] = found.get(told.source, 0) + 1
    assert sorted(found) == ["10", "11", "9"]
    assert min(found.values()) > 70
