"""When collectives end, and how long training waits for them: on the host for gloo, on the device for CUDA's backends.

Runs in: each train worker, for raydist.worker.commlog. Torch, never ray.
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
_QUEUE = 64


class HostClock:
    """For gloo: work is done where its future says so, or, for those that have none, where a wait for it returns.

    It begins where it is called, or, behind others of its group, where gloo has a thread for it.
    """

    def __init__(self, spend: Spend, expose: Spend) -> None:
        self._spend, self._expose = spend, expose
        self._lock = threading.Lock()
        self._newest: Call | None = None
        self._queues: dict[str, deque[Call]] = {}

    def now(self) -> int:
        """See Clock."""
        return time.perf_counter_ns()

    def follow(self, call: Call) -> None:
        """See Clock."""
        self._newest = call
        with self._lock:
            self._queues.setdefault(call.group, deque(maxlen=_QUEUE)).append(call)
        try:
            future = call.work.get_future()
        except RuntimeError:
            return  # gloo's reduce-scatter, send and receive have none
        future.add_done_callback(lambda _: self._end(call))

    def wait(self, call: Call | None, training: bool) -> tuple[Call | None, str, int]:
        """See Clock."""
        found = call or self._newest
        return call, found.op if training and found is not None else "", self.now()

    def waited(self, begun: tuple[Call | None, str, int]) -> None:
        """See Clock."""
        call, exposed, before = begun
        if call is not None:
            self._end(call)
        if exposed:
            self._expose(exposed, (self.now() - before) / 1e9)

    def backward(self, calls: Sequence[Call]) -> None:
        """See Clock."""
        for call in calls:
            work = call.work
            if work is not None and work.is_completed():
                self._end(call)  # before its own word, which comes in another thread
        ends = [call.ended for call in calls if call.ended is not None]
        if ends:
            self._expose(calls[-1].op, max(0, max(ends) - calls[-1].begun) / 1e9)

    def settle(self) -> None:
        """See Clock."""

    def _end(self, call: Call) -> None:
        with self._lock:
            if call.ended is not None:
                return
            call.ended = self.now()
            call.work = None  # it holds its tensors
            begun = self._started(call)
        self._spend(call.op, (call.ended - begun) / 1e9)

    def _started(self, call: Call) -> int:
        """When gloo had a thread for it: when all but one of those before it were done."""
        ends: list[int] = []
        for earlier in self._queues[call.group]:
            if earlier is call:
                break
            ends.append(earlier.ended or self.now())
        ends.sort()
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
