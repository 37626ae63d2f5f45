"""Latency and bandwidth between every two nodes, from round-trip times; the alpha-beta line of one message; the best ring.

Runs in: every rank, together. Torch, never ray. On a single node, every two of its ranks are measured. Disjoint pairs are
measured at the same time, as in a round-robin tournament: n - 1 rounds (n if n is odd).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import torch
import torch.distributed as dist

from raydist.worker.comm.buckets.model import AlphaBeta, fit
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import timed

SIZES = (8, 2**10, 16 * 2**10, 256 * 2**10, 2 * 2**20, 8 * 2**20)
_EACH_S, _MOST = 0.1, 100
_STARTS = 8
"""Orders that `ring` builds and improves; with more than 256 nodes fewer, at least one."""
_AS_GOOD = 0.05
"""Rings whose times differ by less than this share count as equal: of these the order of the ranks is kept."""


@dataclass(frozen=True, slots=True)
class Links:
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
    first = {node: rank for rank, node in reversed([*enumerate(nodes)])}
    if len(first) > 1:
        return "nodes", sorted(first.values()), [nodes[r] for r in sorted(first.values())]
    return "ranks", list(range(len(nodes))), [f"rank {r}" for r in range(len(nodes))]


def within(nodes: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks of one node, in rounds of disjoint pairs, at the same time on all nodes. `nodes`: of each rank."""
    there: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        there.setdefault(node, []).append(rank)
    each = [[[(ranks[a], ranks[b]) for a, b in pairs] for pairs in rounds(len(ranks))] for ranks in there.values()]
    merged = ([*chain.from_iterable(pairs)] for pairs in zip_longest(*each, fillvalue=[]))
    return [pairs for pairs in merged if pairs]  # a node with one rank has none


def speeds(rank: Rank, pairs: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """Of each pair of ranks (size, seconds one way) for SIZES. `pairs`: rounds of disjoint ones. Every rank; all get the same."""
    mine: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for each in pairs:
        dist.barrier(group=rank.control)
        for a, b in each:
            if rank.rank == a:
                mine[a, b] = [(size, _there_and_back(rank, b, size)) for size in SIZES]
            elif rank.rank == b:
                for size in SIZES:
                    _answer(rank, a, size)
    return {(a, b): points for theirs in gather_json(sorted(mine.items()), rank.control) for (a, b), points in theirs}


def speed(points: Sequence[tuple[int, float]]) -> float:
    """Bytes/s of a pair in `speeds`."""
    line = fit(points)
    largest, seconds = points[-1]
    return 1 / line.beta if line.beta else largest / seconds


def measure(rank: Rank) -> Links:
    """Latency and bandwidth of every pair. Every rank; all get the same result."""
    nodes = gather_json(rank.node_ip, rank.control)
    between, ranks, names = members(nodes)
    found = speeds(rank, [[(ranks[a], ranks[b]) for a, b in pairs] for pairs in rounds(len(ranks))])
    n, at = len(ranks), {number: place for place, number in enumerate(ranks)}
    latency, bandwidth = [[0.0] * n for _ in ranks], [[0.0] * n for _ in ranks]
    for (first, second), points in found.items():
        a, b = at[first], at[second]
        latency[a][b] = latency[b][a] = points[0][1]
        bandwidth[a][b] = bandwidth[b][a] = speed(points)
    whole = fit([point for _, points in sorted(found.items()) for point in points])
    return Links(between, tuple(ranks), tuple(names), latency, bandwidth, whole)


def ring(found: Links, nodes: Sequence[str], nbytes: float) -> list[int]:
    """All ranks in the order of a ring: those of a node together, nodes in the order in which `nbytes` over each link in turn take
    the least time. `nodes`: of each rank.

    The sum counts, not the slowest link: slow links often share one trunk, which a ring should cross as seldom as it can. Nodes are
    inserted one after another where they cost least, from several first ones; then stretches are reversed while that helps (2-opt).
    """
    n = len(found.members)
    seconds = np.array(found.latency) + nbytes / (np.array(found.bandwidth) + np.eye(n))
    np.fill_diagonal(seconds, 0.0)

    def cost(order: Sequence[int]) -> float:
        return float(seconds[order, np.roll(order, -1)].sum())

    best = list(range(n))
    for first in range(min(n, max(1, min(_STARTS, _STARTS * 256 // n)))):
        order = [first]
        for node in (*range(first + 1, n), *range(first)):
            after = np.roll(order, -1)
            added = seconds[order, node] + seconds[node, after] - seconds[order, after]
            order.insert(int(added.argmin()) + 1, node)
        order = _turned(seconds, order)
        if cost(order) < cost(best) * (1 - _AS_GOOD):
            best = order
    if found.between == "ranks":
        return [found.members[at] for at in best]
    there: dict[str, list[int]] = {}
    for rank, node_name in enumerate(nodes):
        there.setdefault(node_name, []).append(rank)
    return [rank for at in best for rank in there[found.names[at]]]


def _turned(seconds: np.ndarray, order: Sequence[int]) -> list[int]:
    """The order after the stretches are reversed that gain most, one after another, until none gains."""
    at = np.array(order)
    n, links = len(at), seconds[np.ix_(at, at)]
    # Row a, column e: reverse the stretch from a to e. The whole ring, reversed, is the same ring.
    stretches = np.triu(np.ones((n, n), dtype=bool), 1)
    stretches[0, n - 1] = False
    while stretches.any():
        before, behind = np.roll(links, 1, axis=0), np.roll(links, -1, axis=1)
        gain = before.diagonal()[:, None] + behind.diagonal()[None, :] - before - behind
        a, e = divmod(int(np.where(stretches, gain, -np.inf).argmax()), n)
        if gain[a, e] <= 1e-9 * behind.trace():
            break
        at[a : e + 1] = at[a : e + 1][::-1].copy()
        links[a : e + 1] = links[a : e + 1][::-1].copy()
        links[:, a : e + 1] = links[:, a : e + 1][:, ::-1].copy()
    return [int(node) for node in at]


def _there_and_back(rank: Rank, other: int, nbytes: int) -> float:
    """Seconds one way: half the median of as many round trips as fit into 0.1 s."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device)
    _trips(rank, other, buffer, 1)
    first = _trips(rank, other, buffer, 1)[0]
    count = max(min(int(_EACH_S / max(first, 1e-9)), _MOST), 1)
    dist.send(torch.tensor([count], device=rank.device), other)
    return statistics.median(_trips(rank, other, buffer, count)) / 2


def _trips(rank: Rank, other: int, buffer: torch.Tensor, count: int) -> list[float]:
    def trip() -> None:
        dist.send(buffer, other)
        dist.recv(buffer, other)

    return timed(rank.device, trip, count)


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
