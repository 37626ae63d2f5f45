"""What of a rank's time is computing, what communication, and how much of that no computing hides: from intervals of a trace.

Runs in: the user's shell. Plain python.

With C the moments in which the rank computes, M those in which it communicates (each a union of intervals: what runs twice at the
same time counts once) and T the time that was traced:

    compute        |C| / T
    communication  |M| / T
    overlap        |C and M| / |M|      of the communication, as in Holistic Trace Analysis: `get_comm_comp_overlap`
    exposed        |M without C| / T    the ranks do nothing but communicate

https://hta.readthedocs.io, "Communication Computation Overlap". docs/trace.md says what counts as computing and communication.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]
"""From and to; any unit of time."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, ascending. Empty ones go."""
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
    """Of a union."""
    return sum(end - begin for begin, end in disjoint)


def innermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Of intervals that lie in one another or apart, as calls of one thread do: those with no other inside."""
    ordered = sorted(intervals, key=lambda i: (i[0], -i[1]))
    return [i for i, after in itertools.pairwise(ordered) if after[0] >= i[1]] + ordered[-1:]


def at(ordered: list[Interval], moment: float) -> int | None:
    """Which of these disjoint, ascending intervals holds the moment."""
    index = bisect.bisect_right(ordered, moment, key=lambda i: i[0]) - 1
    return index if index >= 0 and moment < ordered[index][1] else None


@dataclass(frozen=True, slots=True)
class Shares:
    """See the module. `seconds` is T; `overlap` is None where nothing was communicated."""

    seconds: float
    compute: float
    communication: float
    overlap: float | None
    exposed: float


def shares(window: Interval, compute: Iterable[Interval], communication: Iterable[Interval]) -> Shares:
    """Of intervals in seconds, any number of threads and streams together. `window`: from the first step to the end of the last."""
    span = [window]
    computing, talking = common(union(compute), span), common(union(communication), span)
    total, both = length(span), length(common(computing, talking))
    talked = length(talking)
    return Shares(
        seconds=total,
        compute=length(computing) / total,
        communication=talked / total,
        overlap=both / talked if talked else None,
        exposed=(talked - both) / total,
    )
