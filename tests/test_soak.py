"""What `make soak` calls growth: with ranks that live for minutes, a warm-up is none, and a leak of 2 MiB a minute is."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest

STARTS = (0.0, 6.2, 8.1, 9.0, 11.1, 12.0, 13.3, 20.0)
"""Minutes at which the ranks of a soak were started, and at which the last of them ended."""


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("soak")


def ranks(soak: Any, inside: float, inherited: float, starts: tuple[float, ...] = STARTS) -> dict[str, Any]:
    """The rates of ranks as they are measured, whose memory also grows by so much a minute; `inherited`: by the time of their
    start, not by their age."""
    rng, lives = random.Random(0), []
    for start, end in itertools.pairwise(starts):
        for rank in (0, 1):
            life = soak.Life("rank", start)
            for number in range(int((end - start) * 12)):
                age = number / 12
                warm = 97 + 10 * min(1.0, age / 0.5) + 2 * (1 - math.exp(-age)) + 9 * (age > 5.0) * (rank == 0)
                memory = warm + 3 * rank + inside * age + inherited * start + rng.uniform(-1.0, 1.0)
                life.samples.append(soak.Sample(age, memory, 38 + rank, 19))
            lives.append(life)
    return dict(soak.rates(lives))


def test_a_leak_is_told_from_a_warm_up(soak: Any) -> None:
    """Inside of ranks that live for 20 minutes, and from one attempt to the next; each rate has its own leak. Shorter lives do not
    tell: what a rank takes once would be growth."""
    whole = (0.0, 20.0)
    assert soak.flat(ranks(soak, 0.0, 0.0, whole), "memory_mib", soak.MEMORY_MIB)
    assert soak.flat(ranks(soak, 0.0, 0.0), "memory_mib", soak.MEMORY_MIB)
    assert soak.flat(ranks(soak, 0.0, 0.0, whole), "descriptors", soak.NUMBER)
    inside, inherited = ranks(soak, 2.0, 0.0, whole), ranks(soak, 0.0, 2.0)
    for leaking in (inside, inherited):
        assert not soak.flat(leaking, "memory_mib", soak.MEMORY_MIB)
    assert inside["memory_mib_a_minute"] == pytest.approx(2.0, abs=0.5)
    assert inherited["memory_mib_inherited_a_minute"] == pytest.approx(2.0, abs=0.5)
    assert (inside["memory_mib_inherited_a_minute"], inherited["memory_mib_a_minute"]) == (None, None)
