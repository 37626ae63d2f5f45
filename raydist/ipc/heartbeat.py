"""What a rank is doing now, where its agent can see it whatever became of the rank: a few numbers in shared memory.

The rank writes (`Heartbeat`), its agent reads (`look`). Runs in: each train worker. Neither torch nor ray.

A step may last `limit_s`: max(10 s, 5 x the 99th percentile of the steps so far), or what `recovery.step_timeout` says. The first
steps of an attempt have no limit, nor has a step while torch compiles, nor what waits for data or storage.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PHASES = ("start", "data", "forward", "backward", "update", "eval", "save", "end")
"""backward: until the gradients are those of all ranks; save: where the loop stands for a checkpoint."""
UNLIMITED = ("start", "data", "save", "end")
BYTES = 64
FIRST_STEPS = 3
LEAST_S = 10.0
TIMES_P99 = 5.0
_WINDOW = 500
_STEP, _PHASE, _SINCE, _LIMIT, _COMPILING, _THREAD = range(6)


def create() -> int:
    """A file in memory for one rank's heartbeat: its descriptor."""
    fd = os.memfd_create("raydist-probe")
    os.ftruncate(fd, BYTES)
    return fd


def _numbers(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, BYTES)).cast("q")


class Heartbeat:
    """The rank's side. Each call takes well under a microsecond. `fd`: from `create`; None: nobody looks.

    `timeout_s`: the limit of a step in seconds; None: from the steps themselves.
    """

    on_phase: Callable[[str], None] | None = None
    """Called with each phase that is entered, while somebody wants to know (raydist/worker/metrics/trace.py)."""

    def __init__(self, fd: int | None = None, timeout_s: float | None = None) -> None:
        self._numbers = memoryview(bytearray(BYTES)).cast("q") if fd is None else _numbers(fd)
        self._timeout_s = timeout_s
        self._steps = 0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._numbers[_THREAD] = threading.get_ident()
        self._spent = [0] * len(PHASES)
        self._numbers[_SINCE] = time.monotonic_ns()
        self.enter("start")

    def step(self, number: int) -> None:
        """Step `number` begins, with waiting for its data."""
        self._numbers[_STEP] = number
        self.enter("data")

    def enter(self, phase: str) -> None:
        """From now on this rank is in `phase`. Entering the same one again says that it gets on."""
        numbers, now = self._numbers, time.monotonic_ns()
        self._spent[numbers[_PHASE]] += now - numbers[_SINCE]
        numbers[_PHASE] = PHASES.index(phase)
        numbers[_SINCE] = now
        if self.on_phase is not None:
            self.on_phase(phase)

    @property
    def number(self) -> int:
        """The step that this rank is in; 0 before the first."""
        return int(self._numbers[_STEP])

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase so far, that which is going on included. From any thread."""
        spent, phase = list(self._spent), self._numbers[_PHASE]
        spent[phase] += time.monotonic_ns() - self._numbers[_SINCE]
        return {name: ns / 1e9 for name, ns in zip(PHASES, spent, strict=True)}

    def stepped(self, seconds: float) -> None:
        """A step is done, in that time without the wait for data."""
        self._steps += 1
        if self._steps < FIRST_STEPS:
            return
        if self._timeout_s is not None:
            limit = self._timeout_s
        else:
            self._recent.append(seconds)
            bisect.insort(self._sorted, seconds)
            if len(self._recent) > _WINDOW:
                del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
            limit = max(LEAST_S, TIMES_P99 * self._sorted[int(0.99 * (len(self._sorted) - 1))])
        self._numbers[_LIMIT] = int(limit * 1e9)

    def compiling(self, now: bool) -> None:
        """Whether torch is compiling: that takes as long as it takes."""
        self._numbers[_COMPILING] = now
        self.enter(PHASES[self._numbers[_PHASE]])


@dataclass(frozen=True, slots=True)
class Look:
    """A rank as its heartbeat has it: the step, the phase, for how many seconds, and how long it may last (None: as long as it
    takes).

    `thread` is the ident of the thread that trains.
    """

    step: int
    phase: str
    seconds: float
    limit_s: float | None
    thread: int

    @property
    def late(self) -> bool:
        """Whether it has been in there for too long."""
        return self.limit_s is not None and self.seconds > self.limit_s


class Reader:
    """The agent's side of a heartbeat; from any process that has its descriptor."""

    def __init__(self, fd: int) -> None:
        self._numbers = _numbers(fd)

    def look(self) -> Look:
        """The rank as it is now."""
        numbers = self._numbers
        phase = PHASES[numbers[_PHASE]]
        limited = numbers[_LIMIT] and not numbers[_COMPILING] and phase not in UNLIMITED
        seconds = (time.monotonic_ns() - numbers[_SINCE]) / 1e9
        return Look(numbers[_STEP], phase, seconds, numbers[_LIMIT] / 1e9 if limited else None, numbers[_THREAD])
