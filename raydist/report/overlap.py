"""A rank's time for compute, for communication, and for communication not overlapped with computation, from intervals of a trace.

Runs in: the user's shell. Plain python.

C is the time in which the rank computes, M the time in which it communicates (each a union of intervals: simultaneous work counts
once), and T the traced time:

    compute        |C| / T
    communication  |M| / T
    overlap        |C and M| / |M|      of the communication, as in Holistic Trace Analysis: `get_comm_comp_overlap`
    exposed        |M without C| / T    the rank only communicates

https://hta.readthedocs.io, "Communication Computation Overlap". docs/how-to/trace.md says what counts as computing and
communication.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]
"""(begin, end), in any unit of time."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint, ascending intervals. Empty ones are dropped."""
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The moments that are in both unions."""
    made: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            made.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return made


def length(disjoint: Iterable[Interval]) -> float:
    """Total length of a union."""
    return sum(end - begin for begin, end in disjoint)


def innermost(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals that contain no other one. They must be nested or disjoint, like calls of one thread."""
    ordered = sorted(intervals, key=lambda i: (i[0], -i[1]))
    return [i for i, after in itertools.pairwise(ordered) if after[0] >= i[1]] + ordered[-1:]


def at(ordered: list[Interval], moment: float) -> int | None:
    """The index of the one of these disjoint, ascending intervals that contains the moment."""
    index = bisect.bisect_right(ordered, moment, key=lambda i: i[0]) - 1
    return index if index >= 0 and moment < ordered[index][1] else None


@dataclass(frozen=True, slots=True)
class Shares:
    """See the module. `seconds` is T; `overlap` is None without communication."""

    seconds: float
    compute: float
    communication: float
    overlap: float | None
    exposed: float


def shares(window: Interval, compute: Iterable[Interval], communication: Iterable[Interval]) -> Shares:
    """Shares from intervals in seconds, of all threads and streams. `window`: from the first step to the end of the last."""
    span = [window]
    computing, communicating = common(union(compute), span), common(union(communication), span)
    total, both = length(span), length(common(computing, communicating))
    comm = length(communicating)
    return Shares(
        seconds=total,
        compute=length(computing) / total,
        communication=comm / total,
        overlap=both / comm if comm else None,
        exposed=(comm - both) / total,
    )
