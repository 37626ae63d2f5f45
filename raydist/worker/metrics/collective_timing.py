"""When collectives end, and how long training waits for them: on the host for gloo, on the device for CUDA's backends.

Runs in: each train worker, for raydist.worker.metrics.collective_counters. Torch, never ray.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Spend = Callable[[str, float], None]
"""Takes a kind of collective and seconds."""


@dataclass(slots=True, eq=False)
class Call:
    """One collective: its kind, its group, when it was called by its clock, and its Work, on the host's clock until it is done."""

    op: str
    group: str
    begun: Any
    work: Any = None
    ended: int | None = None
    waited: bool = False
    spent: bool = False

    def done(self, future: object = None) -> None:
        """On the host's clock: it is done by now. The first word counts; from any thread."""
        if self.ended is None:
            self.ended = time.perf_counter_ns()
            self.work = None  # it holds its tensors


class Clock(Protocol):
    """Tells `spend` the seconds of each collective, `expose` those that the training thread waited for one."""

    def now(self) -> Any:
        """This moment, for `Call.begun`."""
        ...

    def follow(self, call: Call) -> None:
        """The collective is on its way: its end will be told. It has its work."""
        ...

    def wait(self, call: Call | None, training: bool) -> Any:
        """A wait for `call` begins, or where that is not known for the newest one. `training`: of the training thread."""
        ...

    def waited(self, begun: Any) -> None:
        """The wait is over for which `wait` gave this."""
        ...

    def backward(self, calls: Sequence[Call]) -> None:
        """A backward pass is over, whose engine has waited for those of `calls` that nobody else waited for."""
        ...

    def settle(self) -> None:
        """Takes in what is known by now. From any thread; does not wait."""
        ...


GLOO_THREADS = 2
"""Of each group: so many of its collectives run at once, the others queue."""
_MANY = 1024
"""Calls that are kept until `settle` is asked for; then it is time."""
_KEPT = _MANY // 2
"""As many stay while one has no end; then that one is given up."""


class HostClock:
    """For gloo: work is done where its future says so, or, for those that have none, where a wait for it returns.

    It begins where it is called, or, behind others of its group, where gloo has a thread for it. While it trains a rank only notes
    the times: each line of Python between two large products is fetched from memory anew. `settle` makes seconds of them.
    """

    def __init__(self, spend: Spend, expose: Spend) -> None:
        self._spend, self._expose = spend, expose
        self._lock = threading.Lock()
        self._newest: Call | None = None
        self._calls: deque[Call] = deque()

    def now(self) -> int:
        """See Clock."""
        return time.perf_counter_ns()

    def follow(self, call: Call) -> None:
        """See Clock."""
        self._newest = call
        self._calls.append(call)
        try:
            future = call.work.get_future()
        except RuntimeError:
            pass  # gloo's reduce-scatter, send and receive have none
        else:
            future.add_done_callback(call.done)
        if len(self._calls) > _MANY:
            self.settle()

    def wait(self, call: Call | None, training: bool) -> tuple[Call | None, str, int]:
        """See Clock."""
        found = call or self._newest
        return call, found.op if training and found is not None else "", self.now()

    def waited(self, begun: tuple[Call | None, str, int]) -> None:
        """See Clock."""
        call, exposed, before = begun
        if call is not None:
            call.done()
        if exposed:
            self._expose(exposed, (self.now() - before) / 1e9)

    def backward(self, calls: Sequence[Call]) -> None:
        """See Clock."""
        for call in calls:
            work = call.work
            if work is not None and work.is_completed():
                call.done()  # before its own word, which comes in another thread
        ends = [call.ended for call in calls if call.ended is not None]
        if ends:
            self._expose(calls[-1].op, max(0, max(ends) - calls[-1].begun) / 1e9)

    def settle(self) -> None:
        """See Clock."""
        with self._lock:
            calls = []
            while self._calls:  # others are appended meanwhile
                calls.append(self._calls.popleft())
            # Of each group, those that may still have been on their way when the next one was called.
            before: dict[str, list[Call]] = {}
            for call in calls:
                others = before[call.group] = [
                    c for c in before.get(call.group, ()) if c.ended is None or c.ended > call.begun
                ]
                if call.ended is not None and not call.spent:
                    call.spent = True
                    self._spend(call.op, (call.ended - _started(call, call.ended, others)) / 1e9)
                others.append(call)
            first = next((call.begun for call in calls if not call.spent), None)
            # Those without an end, and behind which they may have stood.
            stay = [c for c in calls if not c.spent or (c.ended or 0) > first][-_KEPT:] if first is not None else []
            self._calls.extendleft(reversed(stay))


def _started(call: Call, ended: int, others: Sequence[Call]) -> int:
    """When gloo had a thread for it: when all but one of those before it were done."""
    ends = sorted(min(other.ended or ended, ended) for other in others)
    return max(call.begun, ends[-GLOO_THREADS]) if len(ends) >= GLOO_THREADS else int(call.begun)


class DeviceClock:
    """For NCCL: it times its own kernels, if it is asked to, and events on the training stream say how long that one stood."""

    def __init__(self, spend: Spend, expose: Spend) -> None:
        self._spend, self._expose = spend, expose
        self._lock = threading.Lock()
        self._working: deque[Call] = deque()
        self._stalls: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._newest = ""

    def now(self) -> torch.cuda.Event:
        """See Clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def follow(self, call: Call) -> None:
        """See Clock."""
        self._newest = call.op
        self._working.append(call)
        self.settle()  # with each call, for a work that is held holds its tensors

    def wait(self, call: Call | None, training: bool) -> tuple[str, torch.cuda.Event] | None:
        """See Clock."""
        op = call.op if call is not None else self._newest
        return (op, self.now()) if training and op else None

    def waited(self, begun: tuple[str, torch.cuda.Event] | None) -> None:
        """See Clock."""
        if begun is not None:
            self._stalls.append((*begun, self.now()))

    def backward(self, calls: Sequence[Call]) -> None:
        """See Clock."""
        if calls:
            self._stalls.append((calls[-1].op, calls[-1].begun, self.now()))

    def settle(self) -> None:
        """See Clock."""
        with self._lock:
            while self._working and self._working[0].work.is_completed():
                call = self._working.popleft()
                self._spend(call.op, call.work._get_duration() / 1e3)
            while self._stalls and self._stalls[0][2].query():  # type: ignore[no-untyped-call]
                op, begun, ended = self._stalls.popleft()
                self._expose(op, begun.elapsed_time(ended) / 1e3)
