"""The leak rule: no finding for memory that does not leak, rather late than wrong, and correct on a real process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raydist.diagnosis import BINS, Diagnosis, Lows, leak
from raydist.records import Finding
from raydist.worker.metrics.memory import process

GIB = 2**30
START = 1_700_000_010.0  # the start of a bin
Floats = NDArray[np.float64]
T = np.arange(BINS, dtype=float)
STEPS = T[None] * 10


def window(step: Any = STEPS, **kinds: Any) -> Lows:
    """A window of 32 minutes; kinds that are not given are NaN."""
    ranks = len(next(iter(kinds.values())))
    nothing = np.full((ranks, BINS), np.nan)
    lows = {"step": np.broadcast_to(step, (ranks, BINS)), **{name: kinds.get(name, nothing) for name in leak.LONG}}
    return Lows(30.0, START, tuple(range(ranks)), lows)


def autoregressive(rng: np.random.Generator, n: int, phi: float) -> Floats:
    """[n, BINS] of autoregressive noise with mean 0 and standard deviation 1."""
    found = rng.standard_normal((n, BINS))
    for i in range(1, BINS):
        found[:, i] = phi * found[:, i - 1] + np.sqrt(1 - phi**2) * found[:, i]
    return found


def stairs(rng: np.random.Generator, n: int) -> Floats:
    """[n, BINS]: 1 to 11 steps up, each of up to a fifth, at random times: a cache that fills."""
    found = np.zeros((n, BINS))
    for row, count in zip(found, rng.integers(1, 12, n), strict=True):
        for at in rng.integers(0, BINS, count):
            row[at:] += rng.uniform(0.01, 0.2)
    return found


NO_LEAKS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "noise": lambda rng, n: 1 + 0.05 * rng.standard_normal((n, BINS)),
    "noise that remembers": lambda rng, n: 1 + 0.05 * autoregressive(rng, n, 0.9),
    "noise that hardly forgets": lambda rng, n: 1 + 0.05 * autoregressive(rng, n, 0.99),
    "wandering": lambda rng, n: np.maximum(1 + np.cumsum(0.02 * rng.standard_normal((n, BINS)), 1), 0.05),
    "wandering by jumps": lambda rng, n: np.maximum(1 + np.cumsum(0.02 * rng.standard_t(2, (n, BINS)), 1), 0.05),
    "garbage collected every 2 to 25 minutes": lambda rng, n: (
        1 + 0.4 * ((T / rng.uniform(4, 50, (n, 1)) + rng.uniform(0, 1, (n, 1))) % 1)
    ),
    "steps up": lambda rng, n: 1 + stairs(rng, n) + 0.001 * rng.standard_normal((n, BINS)),
    "one step up": lambda rng, n: 1 + 0.5 * (rng.integers(1, BINS, (n, 1)) <= T),
    "filling up": lambda rng, n: (
        1 + 0.5 * (1 - np.exp(-T / rng.uniform(2, 192, (n, 1)))) + 0.001 * rng.standard_normal((n, BINS))
    ),
    "spikes": lambda rng, n: 1 + 2.0 * (rng.uniform(0, 1, (n, BINS)) < 0.1),
    "going down": lambda rng, n: 2 - 0.01 * T + 0.001 * rng.standard_normal((n, BINS)),
    "growing by 4%": lambda rng, n: 1 + np.linspace(0, 0.04, BINS) + 0.0001 * rng.standard_normal((n, BINS)),
}
"""Memory of a rank without a leak: [n, BINS], about 1."""


@pytest.mark.parametrize("name", NO_LEAKS)
def test_no_leak_is_no_finding(name: str) -> None:
    """Of 2,000 random series of each kind none is taken for a leak. docs/explanation/memory.md has the rates for many more."""
    lows = 4 * GIB * NO_LEAKS[name](np.random.default_rng(7), 2000)
    assert leak.leaks(lows, np.broadcast_to(STEPS, lows.shape)).sum() == 0


def rows(memory: Iterable[tuple[float, float]], rank: int = 0, attempt: int = 1) -> Iterator[dict[str, Any]]:
    """Rows of one rank with (seconds since START, bytes): a step a second."""
    for at, held in memory:
        step = int(at) + 2
        yield {
            "kind": "rank",
            "rank": rank,
            "attempt": attempt,
            "at": START + at,
            "step": step,
            "anon_bytes": int(held),
        }


def found(memory: Iterable[tuple[float, float]]) -> tuple[float, Finding] | None:
    """(minutes after the first step, finding) of the first finding."""
    diagnosis = Diagnosis()
    every = list(rows(memory))
    for i in range(0, len(every), 12):
        for finding in diagnosis.observe(every[i : i + 12]):
            return (every[i]["at"] - START) / 60, finding
    return None


def test_a_day_without_a_leak() -> None:
    """Warm-up that doubles memory, a cache that fills for two hours, garbage and checkpoint spikes give no finding at any
    scale."""
    rng = np.random.default_rng(3)

    def memory() -> Iterator[tuple[float, float]]:
        for at in np.arange(0.0, 86_400.0, 15.0):
            warm = min(at / 100, 1.0)
            cache = min(int(at / 1200), 6) * 0.1
            spike = 1.0 if at % 1800 < 45 else 0.0
            yield at, GIB * (1 + warm + cache + spike + 0.2 * (at % 230) / 230 + 0.01 * rng.standard_normal())

    assert found(memory()) is None


@pytest.mark.parametrize(
    ("percent", "noise", "minutes"),
    [(5.0, 0.002, 36), (1.0, 0.01, 36), (0.1, 0.002, 140), (0.1, 0.01, 300), (0.02, 0.002, 520)],
)
def test_a_leak_is_found(percent: float, noise: float, minutes: float) -> None:
    """A leak of this many percent a minute, under noise and garbage, is found with its rate within this many minutes."""
    rng = np.random.default_rng(11)

    def memory() -> Iterator[tuple[float, float]]:
        for at in np.arange(0.0, 60.0 * minutes, 10.0):
            level = 1 + percent / 100 * at / 60 + 0.02 * (at % 90) / 90
            yield at, 2 * GIB * (level + noise * rng.standard_normal())

    result = found(memory())
    assert result is not None
    _, finding = result
    assert (finding.rule, finding.rank, finding.severity, finding.figures["kind"]) == (
        "leak",
        0,
        "warning",
        "anon_bytes",
    )
    rate = 2 * GIB * percent / 100
    assert finding.figures["bytes_per_minute"] == pytest.approx(rate, rel=0.15)
    assert finding.figures["bytes_per_step"] == pytest.approx(rate / 60, rel=0.15)
    assert "tracemalloc" in finding.remedy
    assert finding.what.startswith("rank 0: memory of the process has grown by ")


LEAKS = "kept.append(bytearray(1 << 20))"
DOES_NOT = "kept = [bytearray(1 << 20)]"


@pytest.mark.parametrize(("code", "leaks"), [(LEAKS, True), (DOES_NOT, False)])
def test_a_real_process(code: str, leaks: bool) -> None:
    """A process that keeps 1 MiB a step is found, one that frees it is not; their memory is read from /proc after each step."""
    program = f"import sys\nkept = []\nfor line in sys.stdin:\n    {code}\n    print(flush=True)"
    diagnosis = Diagnosis()
    findings: list[Finding] = []
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for turn in range(BINS + 10):
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            held = process(child.pid)["anon_bytes"]
            assert held is not None
            findings += diagnosis.observe(rows([(30.0 * turn, held)]))
        child.stdin.close()
    assert [f.rule for f in findings] == (["leak"] if leaks else [])
    if leaks:
        assert findings[0].figures["bytes_per_minute"] == pytest.approx(2 << 20, rel=0.01)


def test_the_worst_rank_of_the_most_telling_kind_is_named() -> None:
    """Tensors come before the allocator, the allocator before the process; then the rank that grows most; the others are
    listed."""
    flat, grows = np.full(BINS, 4.0 * GIB), 4.0 * GIB + T * 2**26
    kinds = {
        "allocated_bytes": np.stack([flat, grows, flat + 2 * (grows - flat)]),
        "reserved_bytes": np.stack([flat, grows, flat]),
        "anon_bytes": np.stack([grows, flat, flat]),
    }
    finding = leak.leak(window(**kinds))
    assert finding is not None
    assert (finding.rank, finding.figures["kind"]) == (2, "allocated_bytes")
    assert finding.figures["bytes_per_minute"] == pytest.approx(2 * 2 * 2**26)
    assert finding.figures["also"] == [
        {"rank": 1, "kind": "allocated_bytes"},
        {"rank": 1, "kind": "reserved_bytes"},
        {"rank": 0, "kind": "anon_bytes"},
    ]
    assert "3 more (rank, kind) pairs" in finding.what


def test_what_does_not_count() -> None:
    """Growth without steps, below 16 MiB, or seen in too few bins is no leak; with a few missing bins a leak is still found."""
    grows = 4.0 * GIB + T[None] * 2**26
    assert leak.leaks(grows, STEPS).all()
    assert not leak.leaks(grows, np.full((1, BINS), 5.0)).any()
    assert not leak.leaks(2.0**20 + T[None] * 2**17, STEPS).any()
    few = grows.copy()
    few[0, ::4] = np.nan
    assert leak.leaks(few, STEPS).all()
    few[0, 1::4] = np.nan
    assert not leak.leaks(few, STEPS).any()
    gap = grows.copy()
    gap[0, 20:24] = np.nan  # a whole segment
    assert not leak.leaks(gap, STEPS).any()


def test_theil_sen_is_the_median_of_the_slopes() -> None:
    """Four points with slopes 1, 1, 1, 11/3, 5 and 9 have the slope (1 + 11/3) / 2; a missing point is left out."""
    assert leak.theil_sen(np.array([0.0, 1.0, np.nan, 3.0])) == 1.0
    assert leak.theil_sen(np.array([0.0, 1.0, 2.0, 11.0])) == pytest.approx((1 + 11 / 3) / 2)
