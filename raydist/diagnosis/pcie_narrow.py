"""A rank computes longer because its GPU is connected by fewer PCIe lanes than it has: a loose card or riser, a bad slot.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.gpu_throttled import slow_gpus

SYMPTOM = "slow_compute"
CAUSE = "its GPU has fewer PCIe lanes than its peers"
LOOKS = "gpu_pcie_width of the rank's GPU, against its peers'"
COLUMNS = ("gpu_pcie_width",)
LIKELY = 0.75


def check(window: Window) -> Iterator[Candidate]:
    """LIKELY, if its link is narrower than those of all peers."""
    lanes = window.recent("gpu", "gpu_pcie_width")
    for slow, row, others in slow_gpus(window):
        peers = lanes[others].tolist()
        narrow = bool(peers) and lanes[row] < min(peers)
        yield slow.because(
            window,
            "pcie_narrow",
            cause=f"its GPU has {lanes[row]:.0f} PCIe lanes, its peers have {min(peers, default=0):.0f}",
            explains=LIKELY if narrow else 0.0,
            evidence=[figure("PCIe lanes in use", float(lanes[row]), "NVML")],
            remedy="drain the node (ray drain-node), and have the card and its riser seated again; `lspci -vv` shows LnkSta",
            against="its GPU has as many PCIe lanes as its peers",
        )
