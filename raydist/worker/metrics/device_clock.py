"""Moments on a device's own time line: the host's clock, or events on CUDA's current stream.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import time

import torch


class Marks:
    """`mark()` as often as you like, then `seconds()`: the time between each two. On CUDA nothing waits before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Now; on CUDA, once the stream has come this far."""
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
