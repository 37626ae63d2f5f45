"""The most memory that torch has allocated at one time while a function ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_of(function: Callable[[], T]) -> tuple[T, int]:
    """(result, bytes on the CPU at the highest point, above those at the start): of torch's allocator, as its profiler records it.

    A file that torch maps counts with its whole size.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = function()
    most = now = 0
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return result, most
