"""A rank computes longer because the memory of its GPU corrects errors all the time: failing cells, rows that need remapping.

Runs anywhere: plain python and numpy. NVML counts corrected errors, not their time: with many of them there, and next to none on
the peers' GPUs, they are the likely cause of a rank that is slower at the same clock. Those that are not corrected: _gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.gpu_throttled import slow_gpus

SYMPTOM = "slow_compute"
CAUSE = "the memory of its GPU corrects errors all the time"
LOOKS = "gpu_ecc_corrected of the rank's GPU a second, against its peers' GPUs"
COLUMNS = ("gpu_ecc_corrected",)
THRESHOLDS = {
    "rate": (
        "1 a second, and 10 times that of each peer",
        "18,688 GPUs of Titan together had 7 an hour (Oak Ridge, GTC 2015)",
    )
}
RATE, TIMES = 1.0, 10.0
LIKELY = 0.85


def check(window: Window) -> Iterator[Candidate]:
    """LIKELY, if its memory corrects far more than those of all peers."""
    rates = np.nan_to_num(window.recent("gpu", "gpu_ecc_corrected"))
    for slow, row, others in slow_gpus(window):
        rate, peers = float(rates[row]), float(rates[others].max(initial=0.0))
        yield slow.because(
            window,
            "gpu_ecc_retries",
            cause=f"the memory of its GPU corrects {rate:.3g} errors a second, those of its peers {peers:.2g} at most",
            explains=LIKELY if rate >= max(RATE, TIMES * peers) else 0.0,
            evidence=[
                figure("corrected memory errors a second", rate, "NVML: volatile ECC counts"),
                figure("the most of a peer's GPU", peers, "NVML: volatile ECC counts"),
            ],
            remedy="drain the node (ray drain-node), reset the GPU, which remaps failing rows (nvidia-smi -q -d ROW_REMAPPER shows "
            "them), and have its memory tested (dcgmi diag -r 3)",
            against=f"the memory of its GPU corrects {rate:.2g} errors a second",
        )
