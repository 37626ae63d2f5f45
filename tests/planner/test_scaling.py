"""The formulas of `raydist plan --scaling`: checked against sums and searches that they are the short form of."""

from __future__ import annotations

import random
import statistics

import pytest

from raydist.checkpoint.interval import CheckpointInterval, apart, young_daly
from raydist.planner.facts import Machine
from raydist.planner.scaling import GPUS, Assumed, Save, forecast, lost, slowest
from raydist.planner.speed import Speed
from raydist.spec import parse


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_the_slowest_rank(ranks: int) -> None:
    """The mean of the largest of so many normal numbers, over 4,000 draws of a fixed seed; their own error is under 0.02."""
    draw = random.Random(ranks)
    drawn = statistics.fmean(max(draw.gauss(0, 1) for _ in range(ranks)) for _ in range(4000))
    assert slowest(ranks) == pytest.approx(drawn, abs=0.06)


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(1.0, 1e5), (10.0, 1e5), (60.0, 2e4)])
def test_the_interval_loses_least(save_s: float, mtbf_s: float) -> None:
    """No interval between a tenth and ten times of it loses more than 0.1% less."""
    best = young_daly(save_s, mtbf_s)
    at_best = sum(lost(best, save_s, mtbf_s, 60.0))
    others = [sum(lost(best * 10 ** (n / 50), save_s, mtbf_s, 60.0)) for n in range(-50, 51)]
    assert at_best <= min(others) + 1e-3
    assert max(others) > 1.5 * at_best or at_best > 0.05


def test_shares_add_up_and_batches_refuse() -> None:
    """Useful time and losses are the whole; with a batch that stays, more replicas than sequences are refused, by name; with one
    that grows none is."""
    job = parse({"data": {"source": "x"}, "train": {"steps": 1, "global_batch": 64}, "cluster": {"workers": 32}})

    def step(asked: object, here: Machine) -> Speed:
        return Speed(4.0, 2.0, 1.0, 0.0, 0.0, 1000.0 * here.ranks, 0.0)

    machine, assumed = Machine(32, 8, "cuda", None), Assumed(1000.0, jitter=0.02)
    strong, refused = forecast(job, machine, step, lambda here: Save(1.0), assumed, weak=False)
    assert [point.gpus for point in strong] == [8, 16, 32, 64]
    assert set(refused) == {128, 256, 512, 1024}
    weak, none = forecast(job, machine, step, lambda here: Save(1.0, 900.0), assumed, weak=True)
    assert none == {}
    assert [point.gpus for point in weak] == list(GPUS)
    assert [point.global_batch for point in weak] == [2 * gpus for gpus in GPUS]
    for point in (*strong, *weak):
        assert sum(point.shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert weak[-1].efficiency < weak[0].efficiency == 1.0
    assert weak[-1].shares["failures"] > 10 * weak[0].shares["failures"]
    assert weak[-1].interval_s == apart(1.0, 900.0, 3_600_000 / 1024) > 900.0
    hopeless, _ = forecast(job, machine, step, lambda here: Save(1.0), Assumed(1e-3), weak=False)
    assert {(point.tokens_per_second, point.efficiency) for point in hopeless} == {(0.0, 0.0)}


@pytest.mark.parametrize("write_s", [0.0, 30.0, 3000.0])
def test_the_forecast_interval_is_that_of_auto(write_s: float) -> None:
    """A run on as many GPUs, whose saves cost what the forecast assumes, saves as many steps apart, to the step."""
    job = parse({"data": {"source": "x"}, "train": {"steps": 1, "global_batch": 64}, "cluster": {"workers": 32}})

    def step(asked: object, here: Machine) -> Speed:
        return Speed(4.0, 2.0, 1.0, 0.0, 0.0, 1000.0, 0.0)

    machine = Machine(32, 8, "cuda", None)
    points, _ = forecast(job, machine, step, lambda here: Save(1.5, write_s), Assumed(1000.0), weak=False)
    run = CheckpointInterval("auto", 0, 1000.0 * 3600 / 32)
    run.stepped(4.0, unusual=False)
    run.saved(write_s, stall_s=1.5)
    (point,) = [point for point in points if point.gpus == 32]
    assert run.after(0) == -(-point.interval_s // 4.0)
