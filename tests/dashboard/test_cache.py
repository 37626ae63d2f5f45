"""What the dashboard reads again, and how often: with a clock that the test moves."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from raydist.dashboard.cache import EVERY_S, PATIENCE_S, REST, SHARE, Live, Shelf
from raydist.dashboard.document import parts
from raydist.errors import StorageError
from raydist.report.html.elements import tag


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_read_again_only_when_it_has_changed_and_is_due() -> None:
    """Not within EVERY_S; afterwards only with another stamp. A value keeps its number until it is made anew."""
    clock, stamps, made = Clock(), [1], []

    def load(older: int | None, stamp: int) -> int:
        made.append((older, stamp))
        return len(made)

    live = Live(lambda: stamps[0], load, clock)
    assert live.fresh is None
    first = live.get()
    assert first.value == 1
    stamps[0] = 2
    clock.now += EVERY_S / 2
    assert live.fresh is live.get()
    assert made == [(None, 1)], "it is not due"
    clock.now += EVERY_S
    assert live.fresh is None
    second = live.get()
    assert (second.version > first.version, second.value) == (True, 2)
    clock.now += 2 * EVERY_S
    assert live.get() is second, "nothing has changed"
    assert made == [(None, 1), (1, 2)], "the former value and the stamp were given"


def test_what_takes_long_is_made_less_often() -> None:
    """At most SHARE of a core's time is spent on it; and if it only waits, as for slow storage, it rests REST times as long."""
    clock, count = Clock(), [0]

    def load(*_: Any) -> int:
        clock.now += 4.0
        count[0] += 1
        return count[0]

    for used, rest in [(clock, 4.0 / SHARE), (lambda: 0.0, 4.0 * REST)]:
        live = Live(lambda: count[0], load, clock, used)
        first = live.get().value
        assert live.due_in == pytest.approx(rest)
        clock.now += rest - 0.1
        assert live.get().value == first
        clock.now += 0.2
        assert live.get().value == first + 1


def test_an_error_is_raised_and_tried_again() -> None:
    """It does not stay."""
    answers: list[Any] = [StorageError("gone"), 7]

    def load(*_: Any) -> int:
        found = answers.pop(0)
        if isinstance(found, StorageError):
            raise found
        return int(found)

    live = Live(lambda: 1, load)
    with pytest.raises(StorageError, match="gone"):
        live.get()
    assert live.get().value == 7


def test_only_one_thread_reads_and_the_others_do_not_wait() -> None:
    """While one renews it, the others get the former value."""
    clock, began, go, stamp = Clock(), threading.Event(), threading.Event(), [1]

    def load(older: int | None, _: int) -> int:
        if older is not None:
            began.set()
            assert go.wait(240)
        return (older or 0) + 1

    live = Live(lambda: stamp[0], load, clock)
    live.get()
    stamp[0], clock.now = 2, clock.now + 2 * EVERY_S
    reader = threading.Thread(target=live.get)
    reader.start()
    assert began.wait(240)
    assert live.get().value == 1
    go.set()
    reader.join(240)
    assert live.get().value == 2


def test_nobody_waits_again_for_what_takes_long() -> None:
    """A thread renews it, and the former value is there meanwhile; a patient caller gets the new one. An error of that thread is
    raised until a later one succeeds."""
    clock, go, stamp = Clock(), threading.Semaphore(0), [1]
    answers: list[Any] = [1, StorageError("gone"), 3, 4]

    def load(older: int | None, _: int) -> int:
        assert older is None or go.acquire(timeout=240)
        clock.now += 2 * PATIENCE_S
        found = answers.pop(0)
        if isinstance(found, StorageError):
            raise found
        return int(found)

    def change() -> None:
        stamp[0] += 1
        clock.now += 4 / SHARE

    def renewed() -> None:
        go.release()
        with live._lock:  # of the thread, until it has ended
            return

    live = Live(lambda: stamp[0], load, clock)
    assert live.get().value == 1
    change()
    assert live.get().value == 1
    assert live.get().value == 1
    renewed()
    for _ in range(2):
        assert live.fresh is None
        with pytest.raises(StorageError, match="gone"):
            live.get()
    change()
    with pytest.raises(StorageError, match="gone"):
        live.get()
    renewed()
    assert live.get().value == 3
    change()
    go.release()
    assert live.get(patient=True).value == 4


def test_a_shelf_keeps_the_newest() -> None:
    """The one that was asked for longest ago makes room. Made again it has another version."""
    shelf = Shelf(2)

    def live(key: str) -> Live[str]:
        return shelf.live(key, lambda: Live(lambda: 1, lambda *_: key))

    first, second = live("a"), live("b")
    assert live("a") is first
    before = second.get()
    live("a"), live("c")
    assert live("a") is first
    assert live("b") is not second
    assert live("b").get().value == before.value
    assert live("b").get().version > before.version


def test_only_parts_that_changed_are_sent() -> None:
    """Each part has the version since which it has its text; a part that is new has the present one."""
    first = parts("x", {"a": tag("p", 1, id="a"), "b": tag("p", 1, id="b")})
    second = parts("x", {"a": tag("p", 1, id="a"), "b": tag("p", 2, id="b"), "c": tag("p", 1, id="c")}).after(first)
    assert second.version > first.version
    assert [*second.changed(first.version)] == ["b", "c"]
    assert [*second.changed(0)] == ["a", "b", "c"]
    assert second.changed(second.version) == {}
    told = json.loads(second.news(first.version))
    assert (told["title"], [*told["parts"]], told["order"]) == ("x - raydist", ["b", "c"], ["a", "b", "c"])
    assert second.news(first.version) is second.news(first.version), "made once for all readers"
