"""Time marks on a device: the host's clock, or events on CUDA's current stream.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Marks:
    """Call `mark()` repeatedly, then `seconds()`: the time between successive marks. On CUDA only `seconds` waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Marks now; on CUDA the time at which the stream gets here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between one mark and the next, in order."""
        if self._cuda:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


def timed(device: torch.device, call: Callable[[], object], count: int = 1) -> list[float]:
    """Seconds of each of `count` calls, one right after the other."""
    marks = Marks(device)
    marks.mark()
    for _ in range(count):
        call()
        marks.mark()
    return marks.seconds()
