"""A rank computes longer because the clock of its GPU is held down: heat, the power limit, a power brake.

Runs anywhere: plain python and numpy. On a GPU that all ranks need, time is inversely proportional to the clock: a clock of f times
the peers' explains 1 - f of its computing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, Slow, figure, slow_ranks
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "the clock of its GPU is held down"
LOOKS = "gpu_sm_clock_hz of the rank's GPU against its peers', and gpu_throttle"
COLUMNS = ("gpu_sm_clock_hz", "gpu_throttle", "gpu_temperature_celsius", "gpu_power_watts", "gpu_power_limit_watts")
THRESHOLDS = {"clock": ("0.95 of the peers'", "GPUs of one model differ by a few per cent under the same load")}
CLOCK = 0.95
_REMEDY = {
    "thermal": "check its cooling: fans, air flow, dust, the temperature of the room (nvidia-smi -q -d TEMPERATURE)",
    "power": "check its power limit (nvidia-smi -q -d POWER) and the power supply; nvidia-smi -pl sets the limit",
    "": "check its clocks: nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi -rgc resets a lock",
}


def check(window: Window) -> Iterator[Candidate]:
    """The share of its computing that a lower clock explains."""
    clocks = window.recent("gpu", "gpu_sm_clock_hz")
    for slow, row, peers in slow_gpus(window):
        usual = float(np.nanmedian(clocks[peers])) if peers and not np.isnan(clocks[peers]).all() else float("nan")
        ratio = float(clocks[row] / usual) if usual else float("nan")
        reason = window.text("gpu", window.keys("gpu")[row], "gpu_throttle")
        now = window.series("gpu", "gpu_throttle")[row, -1] > 0
        lower = 0.0 if np.isnan(ratio) else max(0.0, 1.0 - ratio)
        slower = 1.0 - 1.0 / max(slow.times, 1.0)
        hold = "thermal" if "thermal" in reason else "power" if "power" in reason else ""
        why = f" ({reason})" if reason and now else ""
        yield slow.because(
            window,
            "gpu_throttled",
            cause=f"the clock of its GPU is {ratio:.0%} of its peers'{why}",
            explains=lower / max(slower, 1e-3) if ratio < CLOCK else 0.0,
            evidence=[
                figure("clock of its multiprocessors, Hz", float(clocks[row]), "NVML"),
                figure("median clock of the peers, Hz", usual, "NVML"),
                figure("temperature, C", float(window.recent("gpu", "gpu_temperature_celsius")[row]), "NVML"),
                figure("power, W", float(window.recent("gpu", "gpu_power_watts")[row]), "NVML"),
            ],
            remedy=_REMEDY[hold],
            against=f"the clock of its GPU is {ratio:.0%} of its peers'",
        )


def slow_gpus(window: Window) -> Iterator[tuple[Slow, int, list[int]]]:
    """The slow ranks that have a GPU, the row of that GPU in the series, and the rows of their peers' GPUs."""
    of_rank, ranks = gpus_of_ranks(window), window.keys("rank")
    for slow in slow_ranks(window, SYMPTOM):
        if (row := of_rank.get(slow.rank)) is not None:
            yield slow, row, [of_rank[ranks[p]] for p in slow.peers if ranks[p] in of_rank]


def gpus_of_ranks(window: Window) -> dict[int, int]:
    """Rank -> row of its GPU in the series."""
    found = {}
    for row, key in enumerate(window.keys("gpu")):
        rank = window.who("gpu", key).get("rank")
        if rank is not None:
            found[int(rank)] = row
    for rank in window.keys("rank"):
        who = window.who("rank", rank)
        if (key := (who["node"], who.get("gpu"))) in window.keys("gpu"):
            found[rank] = window.keys("gpu").index(key)
    return found
