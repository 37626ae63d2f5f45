"""asha and hyperband: the best of a rung so far continue, as with Ray Tune's AsyncHyperBandScheduler."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.schedulers import AsyncHyperBandScheduler

from raydist.cluster.sweep.schedulers import GO, STOP
from raydist.cluster.sweep.schedulers._sorted import Ordered
from raydist.cluster.sweep.schedulers.asha import Asha
from raydist.cluster.sweep.schedulers.hyperband import Hyperband


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_are_numpys(numbers: list[float], share: float) -> None:
    """They are interpolated linearly between two numbers, whatever the order of insertion."""
    ordered = Ordered()
    for number in numbers:
        ordered.add(number)
    assert len(ordered) == len(numbers)
    assert ordered.quantile(share) == pytest.approx(float(np.quantile(numbers, share)), rel=1e-9, abs=1e-9)


def test_the_better_half_goes_on() -> None:
    """The first trial at a rung continues; later ones continue if they are no worse than the median of those before them."""
    rule = Asha([100], 2)
    told = [rule.report(cell, 100, score) for cell, score in (("a", 1.0), ("b", 0.9), ("c", 0.95), ("d", 0.94))]
    assert told == [GO, STOP, GO, STOP]


def test_judged_once() -> None:
    """Between rungs there is no decision. A trial that went back and reaches a rung again is not judged there again."""
    rule = Asha([100, 200], 2)
    rule.report("best", 100, 9.0)
    rule.report("best", 200, 9.0)
    assert rule.report("cell", 99, 0.0) == GO
    assert rule.report("cell", 110, 9.5) == GO
    assert rule.report("cell", 100, 0.0) == GO
    assert rule.report("cell", 199, 0.0) == GO
    assert rule.report("cell", 205, 8.0) == STOP


def test_no_number_is_worse_than_any() -> None:
    """A diverged trial stops at a rung that another one has reached, and does not count for later ones."""
    rule = Asha([100], 4)
    assert rule.report("first", 100, -math.inf) == GO
    assert rule.report("a", 100, 1.0) == GO
    assert rule.report("b", 100, -math.inf) == STOP
    assert rule.report("c", 100, 0.9) == STOP


def test_a_cell_that_is_over_leaves_its_scores() -> None:
    """Its reports still count; no other state of it is kept."""
    rule = Asha([100], 2)
    rule.report("a", 100, 1.0)
    rule.over("a")
    rule.over("a")
    assert rule.report("b", 100, 0.0) == STOP
    rule.over("b")
    assert rule._passed == {}


@pytest.mark.parametrize("reduction", [2, 3, 4.5])
def test_decides_as_ray_tune_does(reduction: float) -> None:
    """300 trials over three rungs, interleaved: every decision equals Ray Tune's."""
    chance = random.Random(7)
    theirs = AsyncHyperBandScheduler("tokens", "score", "max", max_t=10**9, reduction_factor=reduction)
    theirs._brackets[0]._rungs = [(n, {}) for n in (400, 200, 100)]
    ours = Asha([100, 200, 400], reduction)
    busy: dict[str, tuple[Any, int]] = {}
    stopped = 0
    for number in range(300):
        name = f"cell-{number}"
        trial = SimpleNamespace(trial_id=name)
        theirs.on_trial_add(None, trial)
        busy[name] = trial, 0
        for _ in range(2):
            cell = chance.choice(list(busy))
            trial, tokens = busy.pop(cell)
            tokens, score = tokens + 50, chance.gauss(0, 1) + tokens / 100
            expected = theirs.on_trial_result(None, trial, {"tokens": tokens, "score": score})
            assert ours.report(cell, tokens, score) == (STOP if expected == "STOP" else GO)
            if expected == "STOP":
                stopped += 1
            elif tokens < 500:
                busy[cell] = trial, tokens
            if not busy:
                break
    assert stopped > 50


def test_brackets() -> None:
    """The first bracket is judged at every rung, the last at none; trials are spread over them as in Hyperband, by their ids
    only."""
    rule, again = Hyperband([100, 300], 3), Hyperband([100, 300], 3)
    where = [rule.bracket(f"cell-{n}") for n in range(3000)]
    assert where == [again.bracket(f"cell-{n}") for n in range(3000)]
    assert [where.count(n) for n in range(3)] == pytest.approx([3000 * w / 5.5 for w in (3.0, 1.5, 1.0)], rel=0.15)
    of = [[f"cell-{n}" for n in range(3000) if where[n] == bracket][:2] for bracket in range(3)]
    for good, _ in of:
        for tokens in (100, 300):
            rule.report(good, tokens, 9.0)
    at_100 = [rule.report(bad, 100, 0.0) for _, bad in of]
    at_300 = [rule.report(bad, 300, 0.0) for _, bad in of]
    assert (at_100, at_300) == ([STOP, GO, GO], [STOP, STOP, GO])


def test_brackets_of_many_rungs() -> None:
    """Hundreds of rungs cause no overflow."""
    rule = Hyperband(range(1, 1500), 4)
    assert rule.bracket("cell") < 5
