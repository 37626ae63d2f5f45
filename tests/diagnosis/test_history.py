"""A rule's input: the minimum of each rank per bin, at every scale, without rows of earlier attempts."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.diagnosis import BINS, Diagnosis, History
from raydist.diagnosis._history import EVERY, SCALES

COLUMN = "anon_bytes"


def row(at: float, value: float | None, rank: int = 0, attempt: int = 1, step: int | None = None) -> dict[str, Any]:
    """A row of a rank; by default ten steps a second, in the middle of a run."""
    step = int(10 * at) + 500 if step is None else step
    return {"kind": "rank", "rank": rank, "attempt": attempt, "at": at, "step": step, COLUMN: value}


def history() -> History:
    """Bins of a second, no warm-up; two ranks are in their first step."""
    made = History([COLUMN], bin_s=1.0, warmup_s=0.0)
    made.add([row(-0.5, 9.0, rank=rank) for rank in (0, 1)])
    return made


def test_lows_at_every_scale() -> None:
    """With ten readings a bin, each bin is the minimum that numpy gives for its time; each scale has a window when it is full,
    and again after 16 new bins."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 1, 10 * (4 * BINS + EVERY + 1))
    seen, given = history(), []
    for i, value in enumerate(values):
        seen.add([row(i / 10, float(value))])
        given += [(i // 10, w) for w in seen.windows()]
    for at, window in given:
        end = int(window.end)
        assert at >= end
        size = int(window.bin_s)
        expected = values[10 * (end - BINS * size) : 10 * end].reshape(BINS, 10 * size).min(-1)
        assert (window.lows[COLUMN][0] == expected).all()
    ends = {scale: [int(w.end) for _, w in given if w.bin_s == 2**scale] for scale in range(SCALES)}
    assert ends[0][:3] == [BINS + 1, BINS + 1 + EVERY, BINS + 1 + 2 * EVERY]
    assert ends[1][:2] == [2 * (BINS + 1), 2 * (BINS + 1 + EVERY)]
    assert len(ends[2]) == 1
    assert not any(ends[scale] for scale in range(3, SCALES))


def test_a_silent_rank_has_no_reading() -> None:
    """While rank 1 sends nothing its bins are NaN, in the end all of them; rank 0 has all its values."""
    seen, given = history(), []
    for at in range(3 * BINS):
        seen.add([row(at, 1.0)])
        given += [w for w in seen.windows() if w.bin_s == 1.0]
        if at < 10 or 30 <= at <= BINS + 1:  # a little later than rank 0
            seen.add([row(at, 2.0, rank=1)])
    first, last = given[0], given[-1]
    assert first.ranks == (0, 1)
    begin = int(first.end) - BINS
    assert np.flatnonzero(np.isnan(first.lows[COLUMN][1])).tolist() == [*range(10 - begin, 30 - begin)]
    assert (first.lows[COLUMN][0] == 1.0).all()
    assert np.isnan(last.lows[COLUMN][1]).all()


def test_warm_up_is_no_past() -> None:
    """Rows before the end of the first step, and in the two minutes after it, are left out."""
    seen = History([COLUMN], bin_s=1.0, warmup_s=120.0)
    seen.add([row(0.0, 9.0, step=0)])
    for at in range(50):
        seen.add([row(at, 9.0, step=500)])
    for at in range(50, 170):
        seen.add([row(at, 9.0)])
    assert list(seen.windows()) == []
    for at in range(170, 170 + BINS + 3):
        seen.add([row(at, 1.0)])
    (window,) = seen.windows()
    assert (window.lows[COLUMN] == 1.0).all()


def test_a_new_attempt_begins_anew() -> None:
    """Windows contain only the newest attempt; a late row of the old attempt changes nothing."""
    seen = history()
    for at in range(BINS):
        seen.add([row(at, 1.0, rank=0), row(at, 1.0, rank=1)])
    seen.add([row(BINS - 0.5, 9.0, attempt=2)])
    for at in range(BINS, 2 * BINS + 3):
        seen.add([row(at, 2.0, attempt=2), row(at, 0.5, rank=1, attempt=1)])
    (window,) = seen.windows()
    assert window.ranks == (0,)
    assert (window.lows[COLUMN] == 2.0).all()


def test_a_clock_that_is_set_back_breaks_nothing() -> None:
    """Readings from before the open bin are added to it."""
    seen = history()
    for at in [*range(10), 3, 4, *range(10, BINS + 3)]:
        seen.add([row(at, 0.5 if at == 3 else 1.0)])
    (window,) = seen.windows()
    assert np.flatnonzero(window.lows[COLUMN][0] == 0.5).tolist() == [
        3 - 1,
        9 - 1,
    ]  # bin 0 began before the first reading


def test_each_finding_is_told_once_an_attempt() -> None:
    """A leak that continues is found in each window, but reported once an attempt."""
    diagnosis, told = Diagnosis(bin_s=1.0, warmup_s=0.0), []
    for at in range(6 * BINS):
        attempt = 1 + at // (3 * BINS)
        told += [
            (attempt, f.rank)
            for f in diagnosis.observe([row(at, (1 << 30) + (at << 22), attempt=attempt, step=at + 2)])
        ]
    assert told == [(1, 0), (2, 0)]
