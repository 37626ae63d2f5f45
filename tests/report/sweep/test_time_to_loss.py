"""The time and cost until cells reached a loss: exact seconds over all attempts, and fronts that equal a brute-force search."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.report.sweep.figures import measure
from raydist.report.sweep.results import tell
from raydist.report.sweep.time_to_loss import Axis, front, of_point, reached
from raydist.run.directory import SPEC
from tests.report.sweep.conftest import Swept

Make = Callable[..., Swept]


def test_the_course_of_a_run(swept: Make) -> None:
    """Each valid evaluation, with the seconds of all steps trained until then, including those of a lost attempt.

    The training loss has ten means, the last of which is the objective.
    """
    run = swept("array: {parameters: {lr: [1]}}").folder.run("r")
    assert measure(run)["course"] == {"eval_loss": [], "loss": []}
    run.storage.write(SPEC, b"{}")
    watch = RunMonitor(run.uri, interval_s=60.0)

    def step(s: int, attempt: int, workers: int) -> dict[str, Any]:
        return StepRecord(s, 5.0 - s / 10, 1e-3, 1.0, 100, 0.5, 0.0, workers, attempt, "0" * 16).to_dict()

    def evaluated(s: int, loss: float | None) -> dict[str, Any]:
        return Event("eval", time.time(), {"step": s, "loss": loss, "tokens": 64}).to_dict()

    watch.begin_attempt(1, 2, 0)
    watch.push([step(s, 1, 2) for s in range(1, 13)], [evaluated(5, 4.5), evaluated(10, 4.0)])
    watch.begin_attempt(2, 4, 8)  # steps 9 to 12, with their evaluation, are repeated on four workers
    watch.push([step(s, 2, 4) for s in range(9, 21)], [evaluated(10, 3.9), evaluated(15, None), evaluated(20, 3.0)])
    watch.end("finished")
    found = measure(run)
    assert found["course"]["eval_loss"] == [[5, 2.5, 5.0, 4.5], [10, 7.0, 16.0, 3.9], [20, 12.0, 36.0, 3.0]]
    assert [row[0] for row in found["course"]["loss"]] == list(range(2, 21, 2))
    assert found["course"]["loss"][0] == [2, 1.0, 2.0, pytest.approx(4.85)]
    assert found["course"]["loss"][-1] == [20, 12.0, 36.0, found["loss"]]


SEED = st.lists(st.tuples(*[st.integers(1, 6)] * 3), max_size=4).map(
    lambda rows: [[10 * i, *map(float, row)] for i, row in enumerate(rows)]
)
"""A seed's course, with many equal values."""


@given(st.lists(st.lists(SEED, min_size=1, max_size=3), max_size=5), st.sampled_from([1, -1]))
def test_the_front_by_brute_force(points: list[list[list[list[float]]]], sign: int) -> None:
    """An evaluation, as the mean of all seeds that have it, is on the front unless another one is at least as good for at most
    the same cost; of equal ones, the first is on it."""
    rows = [{"point": 7 * i, "course": of_point(seeds)} for i, seeds in enumerate(points)]
    every = []
    for row, seeds in zip(rows, points, strict=True):
        for i in range(min(len(seed) for seed in seeds)):
            seconds, amount, value = (sum(seed[i][k] for seed in seeds) / len(seeds) for k in (1, 2, 3))
            every.append(
                {"point": row["point"], "step": 10 * i, "seconds": seconds, "amount": amount, "objective": value}
            )
    axes: tuple[Axis, Axis] = ("seconds", "amount")
    for axis in axes:
        keys = [(one[axis], sign * one["objective"]) for one in every]

        def beaten(i: int, keys: list[Any] = keys) -> bool:
            return any(
                b <= keys[i][0] and v <= keys[i][1] and (keys[j] != keys[i] or j < i) for j, (b, v) in enumerate(keys)
            )

        expected = sorted((one for i, one in enumerate(every) if not beaten(i)), key=lambda one: one[axis])
        found = front(rows, axis, sign)
        assert (
            [{name: one[name] for name in expected[0]} for one in found]
            == [{name: pytest.approx(v) for name, v in one.items()} for one in expected]
            if expected
            else found == []
        )


def courses(made: Swept, ends: list[float], seconds: list[float], gpus: float = 2.0) -> None:
    """Cell i goes from 5.0 to ends[i] in four evaluations, in equal steps; a step takes seconds[i]; two workers."""
    for i, (end, each) in enumerate(zip(ends, seconds, strict=True)):
        told = [[25 * k, 25 * k * each, 50 * k * each, 5.0 + (end - 5.0) * k / 4] for k in range(1, 5)]
        made.start(i, gpus)
        made.end(i, "finished", figures={"eval_loss": end, "tokens": 1000, "course": {"eval_loss": told, "loss": []}})


def test_time_and_cost_to_a_loss(swept: Make) -> None:
    """The first cell to reach the second-best objective, in words and figures; seconds of training, and the price of its GPUs."""
    made = swept("array: {parameters: {lr: [1e-3, 2e-3, 3e-3]}}\nlimits: {cost_per_gpu_hour: 3600}")
    courses(made, [2.0, 2.6, 3.4], [1.0, 0.25, 0.5])
    told = json.loads(json.dumps(tell(made.folder), allow_nan=False))
    assert told["points"][1]["course"] == {
        "step": [25, 50, 75, 100],
        "seconds": [6.25, 12.5, 18.75, 25.0], "seconds_range": [None] * 4,
        "amount": pytest.approx([12.5, 25.0, 37.5, 50.0]), "amount_range": [None] * 4,
        "objective": pytest.approx([4.4, 3.8, 3.2, 2.6]), "objective_range": [None] * 4,
    }  # fmt: skip
    assert told["pareto"]["unit"] == "cost"
    assert [(one["point"], one["step"]) for one in told["pareto"]["seconds"]] == [
        (1, 25),
        (1, 50),
        (1, 75),
        (1, 100),
        (0, 100),
    ]
    first = told["analysis"]["reached"]
    assert (first["objective"], first["of"]) == (2.6, "second")
    assert (first["quickest"]["point"], first["cheapest"]["point"], first["best"]["step"]) == (1, 1, 100)
    assert told["analysis"]["words"][3] == (
        "quickest and cheapest to eval_loss 2.6000 (the second best): learning_rate 0.002 in 25 s, at cost 50; "
        "the best in 1:40, at cost 200: 4 times as long"
    )


def test_within_the_noise_seeds_are_means(swept: Make) -> None:
    """With several seeds it is the mean, with minimum and maximum; the target is the objective of the points within the noise of
    the best."""
    made = swept("array: {parameters: {lr: [1e-3, 2e-3, 3e-3]}, seeds: 2}")
    courses(made, [2.0, 2.05, 2.08, 2.1, 2.15, 2.18], [1.0, 0.5, 0.1, 2.0, 0.5, 0.1], gpus=0.0)
    told = tell(made.folder)
    course = told["points"][0]["course"]
    assert (course["seconds"][-1], course["seconds_range"][-1]) == (150.0, [100.0, 200.0])
    assert (course["objective"][-1], course["objective_range"][-1]) == (pytest.approx(2.05), [2.0, 2.1])
    assert told["pareto"]["unit"] == "worker_hours"
    assert course["amount"][-1] == pytest.approx(300 / 3600)
    first = told["analysis"]["reached"]
    assert (first["of"], first["objective"]) == ("as_good", told["points"][2]["objective"])
    assert told["analysis"]["words"][3] == (
        "quickest and cheapest to eval_loss 2.1300 (as good as the best, within the noise): learning_rate 0.003 in 10 s, for "
        "0.00556 worker-hours, mean of its seeds; the best in 2:30, for 0.0833 worker-hours: 15 times as long"
    )


def test_nobody_is_first_where_nothing_is_known(swept: Make) -> None:
    """With one point, without evaluations, or with cells that have just started, there is no sentence."""
    made = swept("array: {parameters: {lr: [1e-3, 2e-3]}, seeds: 2}")
    courses(made, [2.0], [1.0])
    made.start(2)
    told = tell(made.folder)
    assert told["analysis"]["reached"] is None
    assert [one["seconds_range"] for one in told["pareto"]["seconds"]] == [None] * 4
    made.finish(1, 2.0)
    assert tell(made.folder)["analysis"]["reached"] is None
    assert reached({"point": 0, "course": None}, 1.0, 1) is None
