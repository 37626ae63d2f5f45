"""Measures what each rank's device and each link does, for `raydist check`: some seconds, and about one more for each further node
and for each further rank of a node.

Runs in: every rank, together. Torch, never ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raydist.bench.failures import carried
from raydist.worker import distributed
from raydist.worker.comm import links
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import timed

_WARM, _TIMES = 2, 9


def in_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Train calls this in each worker. `config`: `gpus` of each rank, `threads`. Re-raises every error as RankFailed."""
    return carried(measure, config)


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Each rank's rates, with the median bandwidth to the other ranks of its node, and the bandwidth between each two nodes, in
    bytes/s. Every rank."""
    rank = distributed.start(gpus=config["gpus"], threads=config["threads"], timeout_s=600.0)
    mine = {"node_ip": rank.node_ip, "device": distributed.describe(rank)["device"], **rates(rank)}
    ranks = gather_json(mine, rank.control)
    places = [one["node_ip"] for one in ranks]
    pairs: dict[str, Any] = {"names": [], "bandwidth": []}
    if len({*places}) > 1:
        found = links.measure(rank)
        pairs = {"names": found.names, "bandwidth": found.bandwidth}
    peers: list[list[float]] = [[] for _ in places]
    for (a, b), points in links.speeds(rank, links.within(places)).items():
        for one in (a, b):
            peers[one].append(links.speed(points))
    for one, speeds in zip(ranks, peers, strict=True):
        one["in_node"] = statistics.median(speeds) if speeds else None
    distributed.stop(rank)
    return {"backend": rank.backend, "ranks": ranks, "pairs": pairs}


def rates(rank: Rank) -> dict[str, float | None]:
    """Of this rank's device: FLOP/s of a matrix product, bytes/s of a copy in its memory, and to it from pinned host memory."""
    cuda = rank.device.type == "cuda"
    n, words = (8192, 1 << 26) if cuda else (768, 1 << 22)
    a = torch.randn(n, n, device=rank.device, dtype=torch.bfloat16 if cuda else torch.float32)
    out = torch.empty_like(a)
    source, target = (torch.ones(words, device=rank.device) for _ in range(2))
    found: dict[str, float | None] = {
        "matmul": 2 * n**3 / _median(rank, lambda: torch.mm(a, a, out=out)),
        "memory": 2 * source.nbytes / _median(rank, lambda: target.copy_(source)),
        "to_device": None,
    }
    if cuda:
        host = torch.ones(words, pin_memory=True)
        found["to_device"] = host.nbytes / _median(rank, lambda: target.copy_(host, non_blocking=True))
    return found


def _median(rank: Rank, work: Callable[[], object]) -> float:
    for _ in range(_WARM):
        work()
    return statistics.median(timed(rank.device, work, _TIMES))
