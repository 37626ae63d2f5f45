"""How the clocks of hosts differ, from what their traces have in common: collectives.

Runs in: the user's shell. Plain python.

No rank can leave an all-reduce, all-gather or reduce-scatter before every rank has entered it, and all leave it at about the same
time. So of one collective that ranks a and b record as (begin, end), each by its own clock, with d = b's clock - a's:

    begin_b - end_a  <=  d  <=  end_b - begin_a        always, as in NTP: who answers has been asked
    end_b - end_a    ~   d                             to within the time its last message takes

The median of the second over all collectives of a trace is taken, and held within the narrowest of the first: the bounds of that
are the error's. The ranks send nothing for it and the loop waits for nothing; an exchange of messages when a trace begins would
stop every rank for the round trips of all, and know no more. Ranks of one host have one clock, so their collectives count
together. docs/trace.md has what was measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Collectives = Mapping[Hashable, tuple[float, float]]
"""Of one rank: what the same collective is called on every rank -> (begin, end) in seconds."""


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock's lead over the first one, in seconds: to be taken off its times.

    `error`: it is wrong by so much at most, if clocks did not drift meanwhile; None where no collective ties the two together.
    """

    seconds: float
    error: float | None


def between(a: Sequence[Collectives], b: Sequence[Collectives]) -> Offset | None:
    """b's lead over a, from all pairs of ranks of two hosts; None if no rank of one shares a collective with one of the other."""
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
    if low > high:  # a clock that was set in the middle of it
        return Offset(middle, None)
    found = min(max(middle, low), high)
    return Offset(found, max(high - found, found - low))


def offsets(clocks: Mapping[str, Sequence[Collectives]]) -> dict[str, Offset]:
    """Clock -> its lead over the first one. One that shares no collective with it is compared by way of one that does."""
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
