"""Times collectives, and how long training waits for them: on the host for gloo, on the device for CUDA's backends.

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
"""Gets a kind of collective and seconds."""


@dataclass(slots=True, eq=False)
class Call:
    """One collective: its kind, its group, the time of its call by its clock, and its Work, None if NCCL runs it in the current
    stream; HostClock drops the Work when done."""

    op: str
    group: str
    begun: Any
    work: Any = None
    ended: int | None = None
    waited: bool = False
    spent: bool = False

    def done(self, future: object = None) -> None:
        """On the host's clock: sets the end to now, in the first call only. May be called in any thread."""
        if self.ended is None:
            self.ended = time.perf_counter_ns()
            self.work = None  # it holds the tensors


class Clock(Protocol):
    """Passes the seconds of each collective to `spend`, and the seconds that the training thread waited for it to `expose`."""

    def now(self) -> Any:
        """The current time, for `Call.begun`."""

    def follow(self, call: Call) -> None:
        """Starts to watch for the end of a collective that has been started and has its work."""

    def wait(self, call: Call | None, training: bool) -> Any:
        """A wait begins: for `call`, or if it is None for the newest call. `training`: whether the training thread waits."""

    def waited(self, begun: Any) -> None:
        """The wait ends for which `wait` returned `begun`."""

    def backward(self, calls: Sequence[Call]) -> None:
        """A backward pass has ended. Its engine has waited for `calls`, which no other code waited for."""

    def settle(self) -> None:
        """Reports the seconds of all calls and waits that have ended. May be called in any thread; does not wait."""


GLOO_THREADS = 2
"""Collectives of one group that run at once; the others queue."""
_MANY = 1024
"""Calls to keep before `follow` itself calls `settle`."""
_KEPT = _MANY // 2
"""Calls to keep after `settle` while one has not ended; a call that falls out is not counted."""


class HostClock:
    """For gloo: work ends when its future is done, or, if it has no future, when a wait for it returns.

    Work begins with its call, or, behind others of its group, when gloo has a free thread. Training only records the times, because
    each line of Python between two large products has to be fetched from memory again. `settle` computes the seconds.
    """

    def __init__(self, spend: Spend, expose: Spend) -> None:
        self._spend, self._expose = spend, expose
        self._lock = threading.Lock()
        self._newest: Call | None = None
        self._calls: deque[Call] = deque()
        self._waits: tuple[str, int] | None = None
        """Kind and begin of the training thread's wait that has not ended."""

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
        exposed, now = found.op if training and found is not None else "", self.now()
        if exposed:
            self._waits = exposed, now
        return call, exposed, now

    def waited(self, begun: tuple[Call | None, str, int]) -> None:
        """See Clock."""
        call, exposed, before = begun
        if call is not None:
            call.done()
        if exposed:
            self._waits = None
            self._expose(exposed, (self.now() - before) / 1e9)

    def backward(self, calls: Sequence[Call]) -> None:
        """See Clock."""
        for call in calls:
            work = call.work
            if work is not None and work.is_completed():
                call.done()  # before its callback, which runs in another thread
        ends = [call.ended for call in calls if call.ended is not None]
        if ends:
            self._expose(calls[-1].op, max(0, max(ends) - calls[-1].begun) / 1e9)

    def exposing(self, calls: Sequence[Call]) -> tuple[str, float] | None:
        """Kind and seconds of the training thread's wait that has not ended, for which `waited` or `backward` will call `expose`.
        `calls`: of the backward pass, if the last one of them has been made and its engine only waits. May be called in any
        thread."""
        if (waits := self._waits) is not None:
            return waits[0], (self.now() - waits[1]) / 1e9
        if not calls:
            return None
        ends = [call.ended for call in calls]
        until = self.now() if None in ends else max(end for end in ends if end is not None)
        return calls[-1].op, max(0, until - calls[-1].begun) / 1e9

    def settle(self) -> None:
        """See Clock."""
        with self._lock:
            calls = []
            while self._calls:  # other threads may append at the same time
                calls.append(self._calls.popleft())
            # By group: the calls that may not have ended when the next one was made.
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
            # Keep calls that have not ended, and those that may have delayed them.
            stay = [c for c in calls if not c.spent or (c.ended or 0) > first][-_KEPT:] if first is not None else []
            self._calls.extendleft(reversed(stay))


def _started(call: Call, ended: int, others: Sequence[Call]) -> int:
    """The time at which gloo had a free thread: when all but one of the calls before had ended."""
    ends = sorted(min(other.ended or ended, ended) for other in others)
    return max(call.begun, ends[-GLOO_THREADS]) if len(ends) >= GLOO_THREADS else int(call.begun)


class DeviceClock:
    """For NCCL, which times its own kernels if this is enabled; events on the training stream measure how long that one waited."""

    def __init__(self, spend: Spend, expose: Spend) -> None:
        self._spend, self._expose = spend, expose
        self._lock = threading.Lock()
        self._working: deque[Call] = deque()
        self._stalls: deque[tuple[str, torch.cuda.Event, torch.cuda.Event, bool]] = deque()
        """Kind, begin and end of each wait; whether that was the collective itself."""
        self._newest = ""

    def now(self) -> torch.cuda.Event:
        """See Clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def follow(self, call: Call) -> None:
        """See Clock."""
        self._newest = call.op
        if call.work is None:
            self._stalls.append((call.op, call.begun, self.now(), True))
        else:
            self._working.append(call)
        self.settle()  # with each call, because a work holds its tensors

    def wait(self, call: Call | None, training: bool) -> tuple[str, torch.cuda.Event] | None:
        """See Clock."""
        op = call.op if call is not None else self._newest
        return (op, self.now()) if training and op else None

    def waited(self, begun: tuple[str, torch.cuda.Event] | None) -> None:
        """See Clock."""
        if begun is not None:
            self._stalls.append((*begun, self.now(), False))

    def backward(self, calls: Sequence[Call]) -> None:
        """See Clock."""
        if calls:
            self._stalls.append((calls[-1].op, calls[-1].begun, self.now(), False))

    def settle(self) -> None:
        """See Clock."""
        with self._lock:
            while self._working and self._working[0].work.is_completed():
                call = self._working.popleft()
                self._spend(call.op, call.work._get_duration() / 1e3)
            while self._stalls and self._stalls[0][2].query():  # type: ignore[no-untyped-call]
                op, begun, ended, itself = self._stalls.popleft()
                seconds = begun.elapsed_time(ended) / 1e3
                self._expose(op, seconds)
                if itself:
                    self._spend(op, seconds)
