"""The next point of a search: better than random draws, never twice the same, and independent of how often the driver
restarted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from raydist.cluster.sweep.sampler import PointResult, Sampler
from raydist.spec.sweep import Axis, Point
from raydist.spec.sweep.models import SearchSpec
from raydist.spec.sweep.space import draw

RATE = Axis("lr", "optim.lr", "log_uniform", low=1e-5, high=1e-1)
DECAY = Axis("wd", "optim.weight_decay", "uniform", low=0.0, high=1.0)
LAYERS = Axis("layers", "model.layers", "int_uniform", low=1, high=4)
BATCH = Axis("batch", "train.global_batch", "values", (64, 8, 32))
KIND = Axis("schedule", "optim.schedule", "values", ({"name": "wsd"}, {"name": "cosine"}))
FIXED = Axis("clip", "optim.clip", "values", (1.5,))
BOTH: Any = pytest.mark.parametrize("name", ["optuna", "bayes"])


def sampler(axes: list[Axis], name: Any, seed: int = 0, better: Literal["min", "max"] = "min") -> Sampler:
    """A sampler of that kind."""
    return Sampler(axes, SearchSpec(name=name, seed=seed), better)


def bowl(point: Point) -> float:
    """0 at a learning rate of 1e-3 and a weight decay of 0.3; a factor of 10 in the rate is as bad as 0.5 in the decay."""
    return (math.log10(point["optim.lr"]) + 3) ** 2 + 4 * (point["optim.weight_decay"] - 0.3) ** 2


def go(made: Sampler, count: int, f: Callable[[Point], float] = bowl) -> list[PointResult]:
    """This number of points, one after another."""
    told: list[PointResult] = []
    for _ in range(count):
        point = made.ask(told)
        assert point is not None
        told.append(PointResult(point, "finished", f(point)))
    return told


def best(told: list[PointResult]) -> float:
    """The lowest value."""
    return min(one.value for one in told if one.value is not None)


@pytest.mark.parametrize(("name", "seeds"), [("optuna", 10), ("bayes", 3)])
def test_choosing_beats_drawing(name: str, seeds: int) -> None:
    """With the same 24 points, the best one is less than half as far from the minimum as random draws, in the median over seeds.
    Maximizing the negative gives the same points."""
    axes = [RATE, DECAY]
    chosen = [go(sampler(axes, name, seed), 24) for seed in range(seeds)]
    drawn = [min(bowl(draw(axes, seed, i)) for i in range(24)) for seed in range(40)]
    assert statistics.median(map(best, chosen)) < 0.5 * statistics.median(drawn)
    told: list[PointResult] = []
    for _ in range(12):
        point = sampler(axes, name, 0, "max").ask(told)
        assert point is not None
        told.append(PointResult(point, "finished", -bowl(point)))
    assert [one.point for one in told] == [one.point for one in chosen[0][:12]]


@BOTH
def test_the_answer_follows_from_the_question(name: str) -> None:
    """A new sampler answers as one that was asked all along; another seed gives other draws, and another result changes the next
    point."""
    axes = [RATE, DECAY]
    told = go(sampler(axes, name, 3), 14)
    for count in (0, 5, 10, 13):
        assert sampler(axes, name, 3).ask(told[:count]) == told[count].point
    assert sampler(axes, name, 4).ask([]) != told[0].point
    assert sampler(axes, name, 3).ask([*told[:12], replace(told[12], value=9.0)]) != told[13].point


@BOTH
def test_points_that_are_tried_now_count(name: str) -> None:
    """With running trials near the best point so far, the next point is not the one without them."""
    told = go(sampler([RATE, DECAY], name), 14)
    place = min(told, key=lambda one: one.value or 0.0).point
    near = [PointResult({**place, "optim.weight_decay": place["optim.weight_decay"] + 1e-3 * i}) for i in (1, 2)]
    gone = [replace(one, state="failed") for one in near]
    made = sampler([RATE, DECAY], name)
    assert made.ask([*told, *near]) != made.ask([*told, *gone])


@BOTH
def test_what_was_stopped_or_failed(name: str) -> None:
    """Points that a scheduler stopped count as bad ones: the next are near points that finished. A failed point has no effect;
    points that failed or stopped without a loss are accepted."""
    told = []
    for i in range(12):
        low = PointResult({"optim.lr": 1e-5 * 2**i, "optim.weight_decay": 0.05 * i}, "finished", 2.0 + 0.01 * i, 6400)
        high = PointResult({"optim.lr": 2e-2 * 1.1**i, "optim.weight_decay": 0.05 * i}, "stopped", 4.0, 400)
        told += [low, high]
    told.append(PointResult({"optim.lr": 1e-3, "optim.weight_decay": 0.9}, "stopped"))
    told.append(PointResult({"optim.lr": 3e-3, "optim.weight_decay": 0.9}, "failed"))
    asked = [sampler([RATE, DECAY], name, seed).ask(told) for seed in range(5)]
    assert all(point is not None and point["optim.lr"] < 2e-2 for point in asked)
    lost = [PointResult(draw([RATE, DECAY], 0, i), "failed") for i in range(30)]
    assert sampler([RATE, DECAY], name).ask(lost) is not None


@BOTH
def test_a_grid_is_gone_through_once(name: str) -> None:
    """Small spaces: every point comes once, whatever the results, with the file's own values; then the answer is None."""
    axes = [BATCH, LAYERS, KIND, FIXED]
    made, told = sampler(axes, name), []
    for _ in range(24):
        point = made.ask(told)
        assert point is not None
        assert list(point) == [axis.field for axis in axes]
        assert point not in [one.point for one in told]
        assert (point["train.global_batch"] in BATCH.values, point["optim.clip"]) == (True, 1.5)
        assert type(point["model.layers"]) is int
        told.append(PointResult(point, "finished", float(point["model.layers"])))
    assert made.ask(told) is None
    assert sampler([FIXED], name).ask([]) == {"optim.clip": 1.5}
    assert sampler([FIXED], name).ask([PointResult({"optim.clip": 1.5})]) is None


def test_a_range_with_few_values_ends() -> None:
    """Rounded to five digits, a range may have no new value: then the answer is None, without a wait."""
    axis = Axis("lr", "optim.lr", "uniform", low=1.0, high=1.0001)
    told = [PointResult({"optim.lr": float(f"1.000{i}")}) for i in (0, 1)]
    assert sampler([axis], "optuna").ask(told) is None


def test_five_digits_within_the_range() -> None:
    """Values are rounded as in random draws: the trial's value is the one that the sampler gets back."""
    for one in go(sampler([RATE, DECAY], "optuna"), 30):
        assert all(float(f"{value:.5g}") == value for value in one.point.values())
        assert 1e-5 <= one.point["optim.lr"] <= 1e-1


def test_points_of_another_space_are_left_out() -> None:
    """After a change of the file, points in the new ranges are used, and the others are ignored."""
    told = [
        PointResult({"optim.lr": 0.5}, "finished", 1.0),
        PointResult({"optim.lr": 1e-3}, "finished", 2.0),
        PointResult({"clip": 3}, "finished", 0.0),
    ]
    point = sampler([RATE], "optuna").ask(told)
    assert point is not None
    assert 1e-5 <= point["optim.lr"] <= 1e-1


def test_numbers_in_a_list_are_neighbours() -> None:
    """A list of numbers is an ordered axis, not a set of categories: values next to good ones are preferred to distant ones."""
    values = tuple(2**n for n in range(12))
    axis = Axis("batch", "train.global_batch", "values", values)
    told = [PointResult({"train.global_batch": 2**n}, "finished", float(n)) for n in (1, 2, 3, 8, 9, 10, 11, 7, 6, 5)]
    asked = [sampler([axis], "bayes", seed).ask(told) for seed in range(4)]
    assert all(point == {"train.global_batch": 1} for point in asked)
