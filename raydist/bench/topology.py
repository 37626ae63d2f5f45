"""Latency and bandwidth between each two nodes, by messages that go there and back; and the line of one message.

Runs in: every rank, together. Torch, never ray. On one node each two of its ranks are measured. Pairs that have nobody in common
are measured at once, as in a tournament: n - 1 rounds (n, if it is odd), whatever the number of pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raydist.worker.comm.buckets.model import AlphaBeta, fit
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import Marks

SIZES = (8, 2**10, 16 * 2**10, 256 * 2**10, 2 * 2**20, 8 * 2**20)
_EACH_S, _MOST = 0.1, 100


@dataclass(frozen=True, slots=True)
class Topology:
    """`members`: ranks, of each node the first one where there are several nodes; `names`: their nodes' addresses, or "rank N".

    `latency` (seconds, of 8 bytes) and `bandwidth` (bytes/s) are matrices over them, symmetric; 0 on the diagonal. `line`: of all
    pairs together.
    """

    between: str
    members: tuple[int, ...]
    names: tuple[str, ...]
    latency: list[list[float]]
    bandwidth: list[list[float]]
    line: AlphaBeta


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Every pair of 0..n-1 once, in rounds in which nobody is in two pairs: the circle method."""
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    made = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        made.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return made


def members(nodes: Sequence[str]) -> tuple[str, list[int], list[str]]:
    """(what is measured, ranks, their names), given each rank's node: the first rank of each node, or all ranks of a single one."""
    first = {node: nodes.index(node) for node in nodes}
    if len(first) > 1:
        return "nodes", sorted(first.values()), [nodes[r] for r in sorted(first.values())]
    return "ranks", list(range(len(nodes))), [f"rank {r}" for r in range(len(nodes))]


def measure(rank: Rank) -> Topology:
    """Every pair's latency and bandwidth. Every rank; all get the same."""
    nodes: list[str] = [""] * rank.world_size
    dist.all_gather_object(nodes, rank.node_ip, group=rank.control)
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
    every: list[dict[tuple[int, int], list[tuple[int, float]]]] = [{}] * rank.world_size
    dist.all_gather_object(every, mine, group=rank.control)
    found = {pair: points for theirs in every for pair, points in theirs.items()}
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
    """Seconds one way: half the median of as many round trips as take a tenth of a second."""
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
    for told in (False, False, True):
        if told:
            dist.recv(count, other)
        for _ in range(int(count)):
            dist.recv(buffer, other)
            dist.send(buffer, other)
