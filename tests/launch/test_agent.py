"""When an agent sends a heartbeat, by a clock of the test's own: without Ray, and without waiting."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.launch import agent


class Exited(Exception):
    """The agent has ended its process."""


class Clock:
    """A node's clock; also the event that the agent waits for, which comes at `end`."""

    def __init__(self, now: float, end: float) -> None:
        self.now, self.end = now, end
        self.at: dict[float, Callable[[], object]] = {}
        """What another thread of the agent does, and when."""

    def wait(self, seconds: float) -> bool:
        until = self.now + seconds
        for due in sorted(due for due in self.at if due <= until):
            self.now = due
            self.at.pop(due)()
        self.now = until
        return self.now >= self.end


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """beats(clock, answer, other): when an agent of that node sends beats, and `other` messages at those times."""

    def exited(code: int) -> None:
        raise Exited

    def found(clock: Clock, answer: Callable[[], float], other: dict[float, str]) -> list[float]:
        monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(agent, "os", SimpleNamespace(_exit=exited))
        made: Any = object.__new__(agent._Agent)
        sent: list[float] = []

        def call(method: str, *given: Any, timeout_s: float | None) -> float:
            if method == "beat":
                sent.append(clock.now)
            return answer()

        made._left, made._told, made._group, made._number = clock, -9.0, 1, 0
        made._link, made.server = SimpleNamespace(call=call), SimpleNamespace(close=lambda: None)
        clock.at = {at: lambda method=method: made.tell(method) for at, method in other.items()}
        try:
            made.beat()
        except Exited:
            sent.append(-1.0)
        return sent

    return found


def test_beats_of_a_node_come_together(beats: Callable[..., list[float]]) -> None:
    """Agents that started at different times beat at the same ones, as often as the coordinator says."""
    assert beats(Clock(0.3, 19.0), lambda: 5.0, {}) == [1.0, 5.0, 10.0, 15.0]
    assert beats(Clock(2.9, 19.0), lambda: 5.0, {}) == [3.0, 5.0, 10.0, 15.0]
    assert beats(Clock(0.3, 5.0), lambda: 1.0, {}) == [1.0, 2.0, 3.0, 4.0]


def test_another_message_takes_a_beats_place(beats: Callable[..., list[float]]) -> None:
    """How a rank has ended, or that an agent waits for an order, is a sign of life. Of beats that are a second apart none is left
    out."""
    assert beats(Clock(0.3, 29.0), lambda: 5.0, {8.5: "ended", 19.0: "next"}) == [1.0, 5.0, 15.0, 25.0]
    assert beats(Clock(0.3, 19.0), lambda: 5.0, {7.0: "ended", 14.0: "seen"}) == [1.0, 5.0, 10.0, 15.0]
    assert beats(Clock(0.3, 4.0), lambda: 1.0, {1.9: "ended"}) == [1.0, 2.0, 3.0]


def test_an_agent_that_is_replaced_or_cut_off_exits(beats: Callable[..., list[float]]) -> None:
    """It no longer belongs to the group, or has no answer for longer than the others need to go on without it."""

    def silent() -> float:
        raise TimeoutError

    assert beats(Clock(0.3, 99.0), lambda: 0.0, {}) == [1.0, -1.0]
    assert beats(Clock(0.3, 99.0), silent, {}) == [*(float(second) for second in range(1, 20)), -1.0]
