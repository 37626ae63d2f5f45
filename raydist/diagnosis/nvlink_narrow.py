"""Communication is slow because a GPU has fewer NVLinks up than its peers: a failed link, a bridge or a baseboard that is loose.

Runs anywhere: plain python and numpy. A ring within a node is as fast as its slowest GPU, so all ranks wait alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import all_wait, figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.gpu_throttled import gpus_of_ranks
from raydist.records import Finding

CAUSE = "a GPU has fewer NVLinks than its peers"
LOOKS = "gpu_nvlink_count of each rank's GPU against the other GPUs of its model, while all ranks wait"
COLUMNS = ("gpu_nvlink_count", "gpu_name")
THRESHOLDS = {
    "exposed": ("0.3 of the time", "as slow_link: below that a link twice as fast gains under 15%"),
    "links": ("fewer than the median of at least two others", "GPUs of one model have equally many in one cluster"),
}
EXPOSED, PEERS = 0.3, 2


def check(window: Window) -> Iterator[Finding]:
    """The GPU with the fewest links."""
    exposed, of_rank = all_wait(window, "exposed"), gpus_of_ranks(window)
    if exposed < EXPOSED or len(of_rank) <= PEERS:
        return
    links, gpus = window.recent("gpu", "gpu_nvlink_count"), window.keys("gpu")
    models = {rank: window.text("gpu", gpus[row], "gpu_name") for rank, row in of_rank.items()}
    worst: tuple[float, int, float] | None = None
    for rank, row in of_rank.items():
        peers = links[[of_rank[r] for r in of_rank if r != rank and models[r] == models[rank]]]
        usual = float(np.median(peers)) if len(peers) >= PEERS else float("nan")
        if links[row] < usual and (worst is None or links[row] < worst[0]):  # NaN: not
            worst = float(links[row]), rank, usual
    if worst is None:
        return
    has, rank, usual = worst
    who = window.culprit(rank)
    yield Finding(
        rule="nvlink_narrow",
        rank=rank,
        severity="warning",
        what=f"all ranks wait {exposed:.0%} of the time for communication: the GPU of rank {rank} on {who['host']} has {has:.0f} "
        f"NVLinks up, its peers have {usual:.0f}",
        figures={"exposed": exposed, "links": has, "links_of_peers": usual},
        remedy="drain the node (ray drain-node): `nvidia-smi nvlink -s` shows the link that is down, `nvidia-smi nvlink -e` its "
        "errors; reset the GPU, or have its board and bridges seated again",
        cause="an NVLink of its GPU is down",
        culprit=who,
        evidence=[
            figure("NVLinks up", has, "NVML"),
            figure("median of the other GPUs of its model", usual, "NVML"),
            figure("exposed communication", exposed, "telemetry: the least of all ranks"),
        ],
        others=[{"cause": "the job sends too much", "against": "one GPU has fewer links than the others"}],
        confidence=0.85,
        lost=exposed,
    )
