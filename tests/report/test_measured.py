"""What `raydist plan --from RUN` reads from a run: medians of its newest attempt, and the jitter that its ranks were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raydist.errors import UsageError
from raydist.planner.scaling import Save
from raydist.report.measured import jitter, measured
from raydist.report.telemetry_reader import Track
from raydist.run.directory import RunDir
from tests.report import story


def track(rank: int, seconds: np.ndarray, every: float, phase: float) -> Track:
    """The readings of a rank that computes for so long in each step, and does nothing else: each `every` seconds, wherever in a
    step that is."""
    ends = np.cumsum(seconds)
    at = np.arange(phase, ends[-1], every)
    step = np.searchsorted(ends, at, side="right") + 1.0
    return Track(1, rank, "h", at, step, {"forward_seconds": at, **dict.fromkeys(OTHERS, np.zeros(len(at)))})


OTHERS = ["backward_seconds", "update_seconds"] + [
    f"{op}_exposed_seconds"
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv", "other")
]


@pytest.mark.parametrize(
    ("own", "always", "together", "expected"),
    [(0.05, 0.0, 0.0, 0.05), (0.05, 0.0, 0.3, 0.05), (0.0, 0.04, 0.0, 0.04), (0.03, 0.04, 0.1, 0.05), (0.0, 0.0, 0.2, 0.0)],
)  # fmt: skip
def test_jitter_is_what_ranks_do_not_share(own: float, always: float, together: float, expected: float) -> None:
    """Steps of 0.3 s read once a second: each rank's own deviation and the ranks' lasting differences add up as variances; that of
    all ranks together, and the moment of a reading in its step, do not count. Within 0.015."""
    draw = np.random.default_rng(1)
    shared = 1 + together * draw.standard_normal(6000)
    lasting = always * np.array([1, -1] * 4) * np.sqrt(7 / 8)
    tracks = [
        track(r, 0.3 * np.maximum(0.1, shared + lasting[r] + own * draw.standard_normal(6000)), 1.0, r / 8)
        for r in range(8)
    ]
    assert jitter(tracks) == pytest.approx(expected, abs=0.015)


def test_too_little_tells_no_jitter() -> None:
    """One rank, or half a minute."""
    steps = np.full(600, 0.3)
    assert jitter([track(0, steps, 1.0, 0.0)]) is None
    assert jitter([track(r, steps[:50], 1.0, 0.0) for r in range(2)]) is None


def test_a_run_s_own_figures(tmp_path: Path) -> None:
    """Of the newest attempt: steps, ranks, what a checkpoint and a copy in memory cost; an earlier attempt's do not count. A run
    without a step is refused."""
    run = RunDir(tmp_path / "a-run")
    with pytest.raises(UsageError, match="has no step yet"):
        measured(run)
    events = [
        story.begun(0, 1), story.event(5, "checkpoint_saved", step=2, bytes=1, seconds=90.0, stall_seconds=30.0),
        story.begun(20, 2, 2), story.event(21, "note", text="a copy in memory every 9 steps", copy_seconds=0.25),
        *(story.event(22 + n, "checkpoint_saved", step=4 + n, bytes=1, seconds=4.0 + n, stall_seconds=1.0 + n) for n in range(3)),
    ]  # fmt: skip
    story.write(run, events, [(1, 0, story.steps(1, 2, 1)), (2, 2, story.steps(3, 9, 2, seconds=0.5))])
    found = measured(run)
    assert (found.run, found.ranks, found.step_s) == ("a-run", 2, 0.5)
    assert (found.save, found.copy_s, found.jitter) == (Save(2.0, 5.0), 0.25, None)
