"""Start and end times of gloo's collectives are converted to seconds later: no process group, only works that never complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist

from raydist.worker.metrics.collective_timing import Call, HostClock

Follow = Callable[..., Call]


def clocked() -> tuple[HostClock, Follow, dict[str, list[int]]]:
    """A clock, a function that makes it follow a call of a group, and kind -> reported nanoseconds."""
    told: dict[str, list[int]] = defaultdict(list)
    clock = HostClock(lambda op, seconds: told[op].append(round(seconds * 1e9)), lambda op, seconds: None)

    def follow(op: str, begun: int, group: str = "all") -> Call:
        call = Call(op, group, begun, dist.Work())
        clock.follow(call)
        return call

    return clock, follow, told


def test_what_queues_counts_from_when_it_has_a_thread() -> None:
    """Two calls of a group run at once; the third waits for one of them; other groups do not matter."""
    clock, follow, told = clocked()
    for op, begun, ended in (("a", 0, 100), ("b", 1, 300), ("c", 2, 320), ("d", 310, 330), ("e", 400, 401)):
        follow(op, begun).ended = ended
    follow("other", 3, "pair").ended = 500
    clock.settle()
    assert told == {"a": [100], "b": [299], "c": [220], "d": [20], "e": [1], "other": [497]}
    clock.settle()
    assert sum(map(len, told.values())) == 6, "once each"


def test_what_has_no_end_yet_is_told_later() -> None:
    """Finished calls are reported at once; a pending call's queue position is still known when it ends."""
    clock, follow, told = clocked()
    first, second, third = follow("first", 0), follow("second", 1), follow("third", 2)
    second.ended = 200
    clock.settle()
    assert told == {"second": [199]}
    first.ended, third.ended = 300, 310
    clock.settle()
    assert told["first"] == [300]
    assert told["third"] == [310 - 200], "it had the thread of the second"


def test_a_call_that_never_ends_costs_no_memory() -> None:
    """For a send that never completes: all others are reported, any number of them, and only the newest are kept."""
    clock, follow, told = clocked()
    follow("lost", 0)
    for n in range(1, 5000):
        follow("op", 10 * n).ended = 10 * n + 5
    clock.settle()
    assert told == {"op": [5] * 4999}
    assert len(clock._calls) < 1024
