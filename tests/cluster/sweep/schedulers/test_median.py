"""The median rule: a trial stops if its best score is worse than the median of the other trials' means up to the same tokens."""

from __future__ import annotations

import math
import random
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import MedianStoppingRule

from raydist.cluster.sweep.schedulers import GO, STOP
from raydist.cluster.sweep.schedulers.median import MOST_LOOKS, Median


def three(rule: Median, tokens: list[int], score: float = 1.0) -> None:
    """Three trials that report the same."""
    for at in tokens:
        for cell in "abc":
            rule.report(cell, at, score)


def test_worse_than_the_median() -> None:
    """A trial stops only if three others have reached that check; a trial equal to the median continues."""
    rule = Median(10, 0, 100)
    rule.report("a", 10, 1.0)
    rule.report("b", 10, 1.0)
    assert rule.report("c", 10, 0.0) == GO
    assert rule.report("d", 10, 1.0) == GO
    assert rule.report("e", 10, 0.9) == STOP


def test_the_best_so_far_counts() -> None:
    """A trial that was good once continues; the others count with their mean."""
    rule = Median(10, 0, 100)
    three(rule, [10], 0.0)
    three(rule, [20], 4.0)
    rule.report("d", 10, 1.0)
    assert rule.report("d", 20, 0.0) == STOP
    rule.report("e", 10, 2.0)
    assert rule.report("e", 20, 0.0) == GO


def test_grace() -> None:
    """Before it no trial is stopped. Reports before it are in no trial's mean, but in the trial's own best."""
    rule = Median(10, 20, 100)
    three(rule, [10], 100.0)
    three(rule, [20], 1.0)
    assert rule.report("d", 10, 0.0) == GO
    assert rule.report("d", 20, 1.0) == GO
    assert rule.report("e", 10, 1.0) == GO
    assert rule.report("e", 20, 0.0) == GO
    assert rule.report("f", 20, 0.9) == STOP


def test_looks_are_every_so_many_tokens() -> None:
    """Reports between two checks change no decision, nor do those of a trial that went back."""
    rule = Median(10, 0, 100)
    three(rule, [10, 20], 1.0)
    assert rule.report("d", 9, 0.0) == GO
    assert rule.report("d", 12, 1.0) == GO
    assert rule.report("d", 19, 0.0) == GO
    assert rule.report("d", 10, 0.0) == GO
    assert rule.report("e", 19, 0.0) == STOP


def test_a_look_that_others_passed() -> None:
    """Trials that report rarely also count at the checks that they skipped, with their mean before."""
    rule = Median(10, 0, 100)
    three(rule, [10], 1.0)
    three(rule, [40], 9.0)
    assert rule.report("d", 30, 0.9) == STOP
    assert rule.report("e", 30, 1.0) == GO


def test_no_number() -> None:
    """A diverged trial is stopped, and is in no median."""
    rule = Median(10, 0, 100)
    three(rule, [10], 1.0)
    for cell in ("d", "e", "f", "g"):
        assert rule.report(cell, 10, -math.inf) == STOP
    assert rule.report("h", 10, 0.9) == STOP


def test_one_score_that_is_no_number() -> None:
    """A trial with one counts with its other scores: with too few trials without one the rule would never stop any."""
    rule = Median(10, 0, 100)
    three(rule, [10], 1.0)
    three(rule, [20], -math.inf)
    three(rule, [30], 3.0)
    assert rule.report("d", 30, 1.9) == STOP
    assert rule.report("e", 30, 2.0) == GO


def test_looks_have_a_bound() -> None:
    """One report that passes a million checks is recorded at a hundred at most."""
    rule = Median(1, 0, 10**6)
    rule.report("a", 10**4, 1.0)
    rule.report("a", 10**6, 1.0)
    assert len(rule._looks) == MOST_LOOKS
    rule.over("a")
    assert rule._trials == {}


def test_decides_as_ray_tune_does() -> None:
    """Trials that report at every check, in random order: every decision equals that of Ray Tune's rule."""
    chance = random.Random(3)
    theirs = MedianStoppingRule("tokens", "score", "max", grace_period=20)
    theirs._on_insufficient_samples = lambda *_: "CONTINUE"
    ours = Median(10, 20, 100)
    busy: dict[str, tuple[Any, int]] = {
        f"cell-{n}": (Trial("x", trial_id=f"cell-{n}", stub=True), 0) for n in range(200)
    }
    counts = {"STOP": 0, "CONTINUE": 0}
    while busy:
        cell = chance.choice(list(busy))
        trial, tokens = busy.pop(cell)
        tokens, score = tokens + 10, chance.gauss(0, 1)
        expected = theirs.on_trial_result(None, trial, {"tokens": tokens, "score": score})
        assert ours.report(cell, tokens, score) == (STOP if expected == "STOP" else GO)
        counts[expected] += 1
        if expected != "STOP" and tokens < 100:
            busy[cell] = trial, tokens
    assert min(counts.values()) > 50
