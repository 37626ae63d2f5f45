"""Clock offsets between hosts, estimated from the collectives that their traces share.

Runs in: the user's shell. Plain python.

No rank can leave an all-reduce, all-gather or reduce-scatter before every rank has entered it, and all leave it at about the same
time. Ranks a and b record the same collective as (begin, end), each by its own clock. With d = b's clock - a's clock:

    begin_b - end_a  <=  d  <=  end_b - begin_a        always, as in NTP: a reply follows its request
    end_b - end_a    ~   d                             to within the duration of its last message

The estimate is the median of the second line over all collectives of a trace, clipped to the tightest bounds of the first line.
These bounds give the error. No rank sends a message for it, and the loop does not wait. An exchange of messages at the start of a
trace would block every rank for the round trips of all, without being more accurate. Ranks of one host have one clock, so their
collectives are pooled. docs/how-to/trace.md has measurements.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Collectives = Mapping[Hashable, tuple[float, float]]
"""Of one rank: key of a collective, the same on every rank -> (begin, end) in seconds."""


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock's lead over the first clock, in seconds: subtract it from its times.

    `error`: upper bound of the error, if the clocks do not drift; None if no collective connects the two clocks.
    """

    seconds: float
    error: float | None


def between(a: Sequence[Collectives], b: Sequence[Collectives]) -> Offset | None:
    """b's lead over a, from all pairs of ranks of two hosts; None if the two hosts share no collective."""
    ends: list[float] = []
    low, high = float("-inf"), float("inf")
    for ours in a:
        for theirs in b:
            for key in ours.keys() & theirs.keys():
                (begin_a, end_a), (begin_b, end_b) = ours[key], theirs[key]
                ends.append(end_b - end_a)
                low, high = max(low, begin_b - end_a), min(high, end_b - begin_a)
    if not ends:
        return None
    middle = statistics.median(ends)
    if low > high:  # a clock was set during the trace
        return Offset(middle, None)
    lead = min(max(middle, low), high)
    return Offset(lead, max(high - lead, lead - low))


def offsets(clocks: Mapping[str, Sequence[Collectives]]) -> dict[str, Offset]:
    """Clock -> its lead over the first clock; through other clocks if it shares no collective with the first."""
    first = next(iter(clocks))
    found = {first: Offset(0.0, 0.0)}
    near = deque([first])
    while near:
        a = near.popleft()
        for b in clocks:
            if b in found:
                continue
            step = between(clocks[a], clocks[b])
            if step is not None:
                before = found[a]
                error = None if step.error is None or before.error is None else before.error + step.error
                found[b] = Offset(before.seconds + step.seconds, error)
                near.append(b)
    return {clock: found.get(clock, Offset(0.0, None)) for clock in clocks}
