"""How often a snapshot is taken, from the step times alone: no clock, no copies."""

from __future__ import annotations

import itertools
import random

import pytest

from raydist.worker.checkpoint.snapshot_interval import AIM, SHARE, SnapshotInterval


def drive(
    pace: SnapshotInterval,
    steps: int,
    base: float,
    cost: float,
    beside: int,
    noise: float = 0.0,
    cpu: float | None = None,
) -> tuple[list[int], float]:
    """(steps after which a snapshot was taken, seconds that they cost) of a run whose snapshots take `beside` steps, and `cpu`
    seconds of processor time (default: their cost)."""
    choose = random.Random(1)
    taken, left = [], 0
    for step in range(1, steps + 1):
        pace.step(base * (1 + choose.uniform(-noise, noise)) + (cost / beside if left else 0.0), unusual=step == 1)
        if left:
            left -= 1
            if not left:
                pace.ended(True, cost if cpu is None else cpu)
        if pace.due(step):
            pace.taken(step)
            taken.append(step)
            left = beside
    return taken, len(taken) * cost


@pytest.mark.parametrize(("cost", "beside"), [(0.002, 1), (0.02, 1), (0.3, 3), (2.0, 10)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_auto_costs_its_share(cost: float, beside: int, noise: float) -> None:
    """After the first two snapshots, which measure, all others cost at most 1% of the time, and are not much rarer than that."""
    steps = 20_000
    taken, _ = drive(SnapshotInterval("auto"), steps, 0.1, cost, beside, noise)
    later = taken[3:]
    share = (len(later) - 1) * cost / ((later[-1] - later[0]) * 0.1)
    # A snapshot whose cost is within the noise of a step, or that lasts nearly as long as its interval, is less exact.
    assert share <= SHARE * AIM * (1.6 if noise else 1.001)
    if beside + 3 < cost / (0.001 * AIM):
        assert share >= SHARE * AIM * (0.4 if noise else 0.9)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_does_not_make_copies_cheap(noise: float) -> None:
    """If step times vary by more than a snapshot costs, the first hundred steps have at most their share of snapshots, plus two."""
    taken, spent = drive(SnapshotInterval("auto"), 100, 0.3, 0.02, 1, noise)
    assert spent <= SHARE * 100 * 0.3 + 2 * 0.02, taken


def test_what_runs_beside_costs_nothing() -> None:
    """With free cores, snapshots are as frequent as the measured difference allows, whatever processor time they take."""
    taken, _ = drive(SnapshotInterval("auto"), 2000, 0.1, 0.0005, 1, 0.001, cpu=0.05)
    assert taken[-1] - taken[-2] <= 2 * 4, "no sooner than after three calm steps"
    assert len(taken) > 300


def test_a_number_of_steps_is_kept() -> None:
    """Every 7 steps, counted from the newest snapshot or checkpoint; a snapshot in progress is waited for."""
    taken, _ = drive(SnapshotInterval(7), 50, 0.1, 0.1, 2)
    assert taken == list(range(7, 50, 7))
    pace = SnapshotInterval(7, newest=20)
    assert [step for step in range(21, 30) if pace.due(step)] == [27, 28, 29]
    pace.taken(24, checkpoint=True)
    assert [step for step in range(25, 33) if pace.due(step)] == [31, 32]
    taken, _ = drive(SnapshotInterval(2), 20, 0.1, 0.1, 5)
    assert all(b - a == 5 for a, b in itertools.pairwise(taken)), "one at a time"


def test_failures_make_it_wait() -> None:
    """Each failure in a row doubles the steps to the next try; a success resets that."""
    pace, tried = SnapshotInterval(2), []
    for step in range(1, 64):
        pace.step(0.1, unusual=False)
        if pace.due(step):
            tried.append(step)
            pace.taken(step)
            pace.ended(committed=len(tried) == 4, cpu_seconds=0.1)
    assert tried[:6] == [2, 6, 14, 30, 32, 36]
