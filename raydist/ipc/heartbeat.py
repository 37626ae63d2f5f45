"""What a rank is doing now: a few numbers in shared memory that its agent can read even if the rank hangs or has crashed.

The rank writes (`Heartbeat`), its agent reads (`look`). Runs in: each train worker. Neither torch nor ray.

The time limit of a step, `limit_s`, is max(10 s, 5 x the 99th percentile of the steps so far), or `recovery.step_timeout`. There
is no limit for the first steps of an attempt, during torch.compile, or while waiting for data or storage.
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
"""backward: including the gradient reduction over all ranks; save: while the loop is blocked by a checkpoint."""
UNLIMITED = ("start", "data", "save", "end")
BYTES = 64
FIRST_STEPS = 3
LEAST_S = 10.0
TIMES_P99 = 5.0
_WINDOW = 500
_STEP, _PHASE, _SINCE, _LIMIT, _COMPILING, _THREAD = range(6)


def create() -> int:
    """Creates an in-memory file for one rank's heartbeat; returns its descriptor."""
    fd = os.memfd_create("raydist-probe")
    os.ftruncate(fd, BYTES)
    return fd


def _numbers(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, BYTES)).cast("q")


class Heartbeat:
    """The rank's side. Each call takes well under a microsecond. `fd`: from `create`; None: there is no reader.

    `timeout_s`: the limit of a step in seconds; None: computed from earlier steps.
    """

    on_phase: Callable[[str], None] | None = None
    """Called with each phase that begins, while a trace is recorded (raydist/worker/metrics/trace.py)."""

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
        """Step `number` begins, by waiting for its data."""
        self._numbers[_STEP] = number
        self.enter("data")

    def enter(self, phase: str) -> None:
        """Begins `phase`. Entering the same phase again restarts its time limit."""
        numbers, now = self._numbers, time.monotonic_ns()
        self._spent[numbers[_PHASE]] += now - numbers[_SINCE]
        numbers[_PHASE] = PHASES.index(phase)
        numbers[_SINCE] = now
        if self.on_phase is not None:
            self.on_phase(phase)

    @property
    def number(self) -> int:
        """The current step; 0 before the first."""
        return int(self._numbers[_STEP])

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase so far, including the current one. Thread-safe."""
        spent, phase = list(self._spent), self._numbers[_PHASE]
        spent[phase] += time.monotonic_ns() - self._numbers[_SINCE]
        return {name: ns / 1e9 for name, ns in zip(PHASES, spent, strict=True)}

    def stepped(self, seconds: float) -> None:
        """A step has ended; it took that time, without the wait for data."""
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
        """Sets whether torch is compiling, which has no time limit."""
        self._numbers[_COMPILING] = now
        self.enter(PHASES[self._numbers[_PHASE]])


@dataclass(frozen=True, slots=True)
class Look:
    """A rank's state from its heartbeat: step, phase, seconds in that phase, and the limit of the phase (None: no limit).

    `thread` is the ident of the training thread.
    """

    step: int
    phase: str
    seconds: float
    limit_s: float | None
    thread: int

    @property
    def late(self) -> bool:
        """Whether it has been in the phase for too long."""
        return self.limit_s is not None and self.seconds > self.limit_s


class Reader:
    """The agent's side of a heartbeat; works in any process that has its descriptor."""

    def __init__(self, fd: int) -> None:
        self._numbers = _numbers(fd)

    def look(self) -> Look:
        """The rank's current state."""
        numbers = self._numbers
        phase = PHASES[numbers[_PHASE]]
        limited = numbers[_LIMIT] and not numbers[_COMPILING] and phase not in UNLIMITED
        seconds = (time.monotonic_ns() - numbers[_SINCE]) / 1e9
        return Look(numbers[_STEP], phase, seconds, numbers[_LIMIT] / 1e9 if limited else None, numbers[_THREAD])
