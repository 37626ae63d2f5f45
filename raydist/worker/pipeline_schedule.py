"""The order in which the ranks of a pipeline work: 1F1B, and interleaved 1F1B where a rank has several stages. And the cut of a
model into stages.

Runs anywhere: neither torch nor ray.

    1F1B, 3 ranks, 4 micro-batches: forward 0 to 3, backward a to d
    rank 0   0 1 2 . . a 3 b . c . d        Stage s is on rank s % ranks. A rank has at most ranks - rank micro-batches between
    rank 1   . 0 1 . a 2 b 3 c . d          their forward and backward pass, however many a step has.
    rank 2   . . 0 a 1 b 2 c 3 d            Sources: Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

_MANY = 4
"""Micro-batches for each rank of a pipeline that are enough: the bubble is then at most a fifth."""


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or backward pass of micro-batch `index` in stage `chunk` of this rank."""

    kind: Literal["forward", "backward"]
    chunk: int
    index: int


def actions(rank: int, ranks: int, chunks: int, micro_batches: int, backward: bool = True) -> list[Action]:
    """What `rank` of a pipeline computes, in order. Backward passes of a stage are in ascending order of the micro-batches.

    Works for any number of micro-batches. Interleaved, their number is rounded up to a multiple of `ranks`, and the passes that do
    not exist are left out, which keeps every order that the others have.
    """
    padded = micro_batches if chunks == 1 else -(-micro_batches // ranks) * ranks
    group = padded if chunks == 1 else ranks
    order = [
        (chunk, first + i) for first in range(0, padded, group or 1) for chunk in range(chunks) for i in range(group)
    ]
    forward = [Action("forward", chunk, i) for chunk, i in order]
    if not backward:
        return [action for action in forward if action.index < micro_batches]
    back = [Action("backward", chunks - 1 - chunk, i) for chunk, i in order]
    ahead = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    ahead = min(ahead, len(forward))
    made = forward[:ahead]
    for one_forward, one_backward in zip(forward[ahead:], back, strict=False):
        made += one_forward, one_backward
    made += back[len(forward) - ahead :]
    return [action for action in made if action.index < micro_batches]


def neighbours(stages: int) -> list[tuple[int, int]]:
    """The pairs of stages of which the first one sends to the second one."""
    return [pair for stage in range(1, stages) for pair in ((stage - 1, stage), (stage, stage - 1))]


def way(source: int, target: int, ranks: int) -> int:
    """The way of a transfer between two neighbouring stages: 0 to 5, by its direction and the sender's rank; from one end of the
    pipeline to the other (interleaved) one of its own.

    What a rank sends and what it receives never have the same: where the transfers of a way are made one by one (NCCL), neither
    waits for the other.
    """
    forward, sender = source < target, source % ranks
    wraps = forward != (sender < target % ranks)
    return (not forward) + (4 if wraps else 2 * (sender % 2))


def receives_ahead(device: str) -> int:
    """Actions before its use in which a receive starts, on a `cuda` or `cpu` device.

    gloo sends when it has the message that the receive has started, which waits behind the data that the receiver sends to the same
    rank: it needs the time of one action more.
    """
    return 2 if device == "cpu" else 1


def most_sends(ranks: int, chunks: int) -> int:
    """Transfers of a rank whose end is not awaited, and whose memory is therefore kept.

    More than a rank can have sent before its neighbours have received the first: to wait for the oldest never blocks. In an
    evaluation it holds back a rank that is far ahead.
    """
    return 2 * ranks * (chunks + 1)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank has ended its passes, and how long it has computed, in the unit of the given times."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the passes' time in which the ranks wait, on average: 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * max(self.ends))


def timeline(
    forward: Sequence[float], backward: Sequence[float], ranks: int, micro_batches: int, transfer: Sequence[float] = ()
) -> Timeline:
    """The passes of a step, from the times of a pass of one micro-batch in each stage.

    `transfer`: the time from each stage but the last to the next one, and back; default: none. A transfer delays the pass that
    needs it, and the later ones from the same rank to the same rank, which a link carries one after another. If all stages take the
    same time, the bubble of 1F1B is (ranks - 1) / (micro_batches + ranks - 1); interleaved, with a multiple of `ranks`
    micro-batches, it is (ranks - 1) / (chunks x micro_batches + ranks - 1).
    """
    if micro_batches > 3 * _MANY * ranks:
        # In the middle of a step each further group of micro-batches, one for each rank, takes the same time: that of the rank
        # that computes most, or more.
        least = 2 * _MANY * ranks + micro_batches % ranks
        few, more = (timeline(forward, backward, ranks, n, transfer) for n in (least, least + ranks))
        groups = (micro_batches - least) // ranks
        each = [b - a for a, b in zip(few.busy, more.busy, strict=True)]
        last = max(*each, max(more.ends) - max(few.ends))
        computed = tuple(a + groups * b for a, b in zip(few.busy, each, strict=True))
        return Timeline(tuple(end + groups * last for end in few.ends), computed)
    stages = len(forward)
    way = transfer or [0.0] * (stages - 1)
    times = {"forward": forward, "backward": backward}
    left = [actions(rank, ranks, stages // ranks, micro_batches)[::-1] for rank in range(ranks)]
    clocks, busy = [0.0] * ranks, [0.0] * ranks
    arrived: dict[tuple[str, int, int], float] = {}
    free: dict[tuple[int, int], float] = {}
    while any(left):
        for rank in range(ranks):
            while left[rank]:
                action = left[rank][-1]
                stage = action.chunk * ranks + rank
                source, target = (stage - 1, stage + 1) if action.kind == "forward" else (stage + 1, stage - 1)
                if 0 <= source < stages:
                    if (action.kind, stage, action.index) not in arrived:
                        break
                    clocks[rank] = max(clocks[rank], arrived.pop((action.kind, stage, action.index)))
                took = times[action.kind][stage]
                clocks[rank] += took
                busy[rank] += took
                if 0 <= target < stages:
                    link = rank, target % ranks
                    free[link] = max(clocks[rank], free.get(link, 0.0)) + way[min(stage, target)]
                    arrived[action.kind, target, action.index] = free[link]
                left[rank].pop()
    return Timeline((*clocks,), (*busy,))


def soonest(
    forward: Sequence[float], backward: Sequence[float], ranks: int, micro_batches: int, transfer: Sequence[float] = ()
) -> Timeline:
    """Like `timeline`, without playing the passes: no rank ends earlier there.

    A rank begins when the first forward pass has come through the ranks before it, and its last backward pass, in its first stage,
    goes through these afterwards.
    """
    way = transfer or [0.0] * (len(forward) - 1)
    busy = [micro_batches * (sum(forward[rank::ranks]) + sum(backward[rank::ranks])) for rank in range(ranks)]
    begins = [0.0, *accumulate(f + w for f, w in zip(forward[: ranks - 1], way, strict=False))]
    ends = [begin + took for begin, took in zip(begins, busy, strict=True)]
    for rank in reversed(range(ranks - 1)):
        ends[rank] = max(ends[rank], ends[rank + 1] + way[rank] + backward[rank])
    return Timeline((*ends,), (*busy,))


def schedule(
    blocks: Sequence[int],
    shares: Sequence[float],
    ranks: int,
    sequences: int,
    micro_batch: int,
    recomputed: bool = False,
) -> dict[str, Any]:
    """What a run says of its pipeline: `ranks`, `chunks`, `blocks` of each stage, `micro_batches` of a step, and `bubble`, of
    passes that take the stages' `shares` of a step's time; and if micro-batches are few, `better`: other values of fields, each
    with its bubble.

    `sequences`: of a step, in one replica. `recomputed`: backward computes the blocks once more. Transfers take no time.
    """

    def waits(shares: Sequence[float], micro_batch: int) -> float:
        backward = [(3 if recomputed else 2) * share for share in shares]
        return timeline(shares, backward, ranks, -(-sequences // micro_batch)).bubble

    chunks, count = len(blocks) // ranks, -(-sequences // micro_batch)
    better = []
    if count < _MANY * ranks:
        least = next((size for size in range(micro_batch, 0, -1) if -(-sequences // size) >= _MANY * ranks), 1)
        if least < micro_batch:
            better.append({"set": f"train.micro_batch: {least}", "bubble": waits(shares, least)})
        if 2 * len(blocks) <= sum(blocks):
            equal = [1.0] * (2 * len(blocks))
            better.append({"set": f"parallel.chunks: {2 * chunks}", "bubble": waits(equal, micro_batch)})
    found = {"ranks": ranks, "chunks": chunks, "blocks": [*blocks], "micro_batches": count}
    return {**found, "bubble": waits(shares, micro_batch), "better": better}


def cut(costs: Sequence[float], sizes: Sequence[float], stages: int) -> list[int]:
    """Blocks of each stage. The most expensive stage is as cheap as possible; among such cuts the largest one is as small as
    possible.

    `costs`, `sizes`: of each block, what comes before the first and after the last block included. Every stage has a block.
    """
    assert 1 <= stages <= len(costs), (stages, len(costs))
    limit = _least_worst(costs, stages, costs, float("inf"))[0]
    return _least_worst(sizes, stages, costs, limit * (1 + 1e-9))[1]


def _least_worst(values: Sequence[float], stages: int, costs: Sequence[float], limit: float) -> tuple[float, list[int]]:
    """(the largest sum of `values` of a stage, blocks of each stage): the smallest where no sum of `costs` is over `limit`."""
    value, cost = ([0.0, *accumulate(numbers)] for numbers in (values, costs))
    # best[n]: of the first n blocks in the stages so far.
    nowhere: tuple[float, list[int]] = (float("inf"), [])
    best: list[tuple[float, list[int]]] = [(0.0, []), *[nowhere] * len(values)]
    for _ in range(stages):
        following = [nowhere] * (len(values) + 1)
        for end in range(1, len(values) + 1):
            for start in range(end):
                worst, counts = best[start]
                if worst == float("inf") or cost[end] - cost[start] > limit:
                    continue
                worst = max(worst, value[end] - value[start])
                if worst < following[end][0]:
                    following[end] = worst, [*counts, end - start]
        best = following
    return best[-1]
