"""Latency and bandwidth between every two nodes, from round-trip times; and the alpha-beta line of one message.

Runs in: every rank, together. Torch, never ray. On a single node, every two of its ranks are measured. Disjoint pairs are
measured at the same time, as in a round-robin tournament: n - 1 rounds (n if n is odd).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raydist.worker.comm.buckets.model import AlphaBeta, fit
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import Marks

SIZES = (8, 2**10, 16 * 2**10, 256 * 2**10, 2 * 2**20, 8 * 2**20)
_EACH_S, _MOST = 0.1, 100


@dataclass(frozen=True, slots=True)
class Topology:
    """`members`: the measured ranks (with several nodes, the first one of each); `names`: their nodes' addresses, or "rank N".

    `latency` (seconds for 8 bytes) and `bandwidth` (bytes/s): symmetric matrices over the members, 0 on the diagonal. `line`: fit
    over all pairs.
    """

    between: str
    members: tuple[int, ...]
    names: tuple[str, ...]
    latency: list[list[float]]
    bandwidth: list[list[float]]
    line: AlphaBeta


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Every pair of 0..n-1 once, in rounds of disjoint pairs: the circle method."""
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    made = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        made.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return made


def members(nodes: Sequence[str]) -> tuple[str, list[int], list[str]]:
    """("nodes" or "ranks", ranks to measure, their names), from each rank's node: one rank per node, or all of a single node."""
    first = {node: nodes.index(node) for node in nodes}
    if len(first) > 1:
        return "nodes", sorted(first.values()), [nodes[r] for r in sorted(first.values())]
    return "ranks", list(range(len(nodes))), [f"rank {r}" for r in range(len(nodes))]


def measure(rank: Rank) -> Topology:
    """Latency and bandwidth of every pair. Every rank; all get the same result."""
    nodes = gather_json(rank.node_ip, rank.control)
    between, ranks, names = members(nodes)
    mine: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for pairs in rounds(len(ranks)):
        dist.barrier(group=rank.control)
        for a, b in pairs:
            if rank.rank == ranks[a]:
                mine[a, b] = [(size, _there_and_back(rank, ranks[b], size)) for size in SIZES]
            elif rank.rank == ranks[b]:
                for size in SIZES:
                    _answer(rank, ranks[a], size)
    found = {(a, b): points for theirs in gather_json(sorted(mine.items()), rank.control) for (a, b), points in theirs}
    n = len(ranks)
    latency, bandwidth = [[0.0] * n for _ in ranks], [[0.0] * n for _ in ranks]
    for (a, b), points in found.items():
        line = fit(points)
        latency[a][b] = latency[b][a] = points[0][1]
        largest, seconds = points[-1]
        speed = 1 / line.beta if line.beta else largest / seconds
        bandwidth[a][b] = bandwidth[b][a] = speed
    whole = fit([point for _, points in sorted(found.items()) for point in points])
    return Topology(between, tuple(ranks), tuple(names), latency, bandwidth, whole)


def _there_and_back(rank: Rank, other: int, nbytes: int) -> float:
    """Seconds one way: half the median of as many round trips as fit into 0.1 s."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device)
    _trips(rank, other, buffer, 1)
    first = _trips(rank, other, buffer, 1)[0]
    count = max(min(int(_EACH_S / max(first, 1e-9)), _MOST), 1)
    dist.send(torch.tensor([count], device=rank.device), other)
    return statistics.median(_trips(rank, other, buffer, count)) / 2


def _trips(rank: Rank, other: int, buffer: torch.Tensor, count: int) -> list[float]:
    marks = Marks(rank.device)
    marks.mark()
    for _ in range(count):
        dist.send(buffer, other)
        dist.recv(buffer, other)
        marks.mark()
    return marks.seconds()


def _answer(rank: Rank, other: int, nbytes: int) -> None:
    """The other side of `_there_and_back`."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device)
    count = torch.ones(1, dtype=torch.int64, device=rank.device)
    for counted in (False, False, True):
        if counted:
            dist.recv(count, other)
        for _ in range(int(count)):
            dist.recv(buffer, other)
            dist.send(buffer, other)
