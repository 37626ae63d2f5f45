"""A rank computes longer because another process uses its GPU.

Runs anywhere: plain python and numpy. NVML gives the memory of other processes, not their share of the time: with memory there, and
none on the peers' GPUs, it is the likely cause of a rank that is slower at the same clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.gpu_throttled import slow_gpus

SYMPTOM = "slow_compute"
CAUSE = "another process uses its GPU"
LOOKS = "memory of other processes on the rank's GPU, against its peers' GPUs"
COLUMNS = ("gpu_other_bytes",)
THRESHOLDS = {"memory": ("256 MiB", "a CUDA context alone takes about that much; smaller ones belong to monitors")}
LEAST_BYTES = 256 << 20
LIKELY = 0.8


def check(window: Window) -> Iterator[Candidate]:
    """LIKELY, if others have memory there and not on the peers' GPUs."""
    used = window.recent("gpu", "gpu_other_bytes")
    for slow, row, peers in slow_gpus(window):
        alone = used[row] >= LEAST_BYTES and not (used[peers] >= LEAST_BYTES).any()
        yield slow.because(
            window,
            "gpu_shared",
            cause=f"another process has {used[row] / 2**30:.1f} GiB on its GPU",
            explains=LIKELY if alone else 0.0,
            evidence=[figure("bytes of other processes on its GPU", float(used[row]), "NVML")],
            remedy="end that process: nvidia-smi shows its pid; nvidia-smi -c EXCLUSIVE_PROCESS keeps others away",
            against="no other process has memory on its GPU",
        )
