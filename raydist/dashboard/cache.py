"""What was read from storage, kept while it is new, and read again only where something has changed.

Runs anywhere. Thread-safe. One thread reads; the others meanwhile get what was read before. What takes long to read is read again
in a thread of its own, so that nobody waits for it a second time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

EVERY_S = 2.0
"""Seconds between two readings: ranks' records reach storage at this interval."""
SHARE = 0.05
"""Of a core's time, this part at most is spent on reading and drawing one page again while a browser shows it."""
REST = 2.0
"""A reading that took long, because storage is slow or the machine busy, is followed by this many times as much rest."""
PATIENCE_S = 0.5
"""Nobody waits for a value again that took longer than this."""

T = TypeVar("T")
VERSIONS = itertools.count(1)
"""Of all values of this process: one that was dropped and made again has none that it had before."""


@dataclass(frozen=True)
class Made(Generic[T]):
    """A value, and its number of VERSIONS."""

    version: int
    value: T


class Live(Generic[T]):
    """A value that `load` makes from storage, and makes again when what `stamp` returns has changed; it is given the former value,
    and the new stamp. If one of them raises, `get` raises it, this time or the next, and tries again.
    """

    def __init__(
        self,
        stamp: Callable[[], Any],
        load: Callable[[T | None, Any], T],
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self._stamp, self._load, self._clock, self._used = stamp, load, clock, used
        self._lock = threading.Lock()
        self._made: Made[T] | None = None
        self._seen: Any = None
        self._due = 0.0
        self._took = 0.0
        self._error: Exception | None = None  # of the thread that has renewed it

    @property
    def known(self) -> Made[T] | None:
        """The value that was made last, perhaps long ago."""
        return self._made

    @property
    def fresh(self) -> Made[T] | None:
        """The value, if it need not be looked at again yet."""
        return self._made if self._error is None and not self._is_due() else None

    @property
    def due_in(self) -> float:
        """Seconds until it is worth asking again."""
        return max(self._due - self._clock(), 0.0)

    def get(self, patient: bool = False) -> Made[T]:
        """The newest value; waits for the first one. A later one that takes longer than PATIENCE_S is for another call, unless the
        caller is `patient`."""
        known = self._made
        if not self._lock.acquire(blocking=known is None or patient):
            return self._last()
        behind = False
        try:
            if self._is_due():
                if known is not None and self._took > PATIENCE_S and not patient:
                    threading.Thread(target=self._renew_behind, name="dashboard-reads", daemon=True).start()
                    behind = True
                else:
                    self._renew()
            return self._last()
        finally:
            if not behind:
                self._lock.release()

    def _is_due(self) -> bool:
        return self._made is None or self._clock() >= self._due

    def _last(self) -> Made[T]:
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._made is not None
        return self._made

    def _renew_behind(self) -> None:
        """In a thread of its own, which has the lock."""
        try:
            self._renew()
        except Exception as error:
            self._error, self._due = error, self._clock() + EVERY_S
        finally:
            self._lock.release()

    def _renew(self) -> None:
        began, used = self._clock(), self._used()
        stamp = self._stamp()
        if self._made is None or stamp != self._seen:
            # The stamp is older than what is read now: a change in between is seen the next time.
            older = self._made
            made = self._load(older.value if older else None, stamp)
            self._made, self._seen = Made(next(VERSIONS), made), stamp
            self._took = self._clock() - began
        self._error = None
        now = self._clock()
        self._due = now + max(EVERY_S, (self._used() - used) / SHARE, REST * (now - began))


class Shelf:
    """At most `most` values of each kind, by key; the one that was asked for longest ago makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Live[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def live(self, key: Hashable, make: Callable[[], Live[T]]) -> Live[T]:
        """The value of that key, made if there is none."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = make()
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return found
