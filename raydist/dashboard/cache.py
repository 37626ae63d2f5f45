"""What was read from storage, kept while it is new, and read again only where something has changed.

Runs anywhere. Thread-safe. One thread reads; the others meanwhile get what was read before.
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
    and the new stamp. If one of them raises, `get` raises it, and the next call tries again.
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

    @property
    def known(self) -> Made[T] | None:
        """The value that was made last, perhaps long ago."""
        return self._made

    @property
    def fresh(self) -> Made[T] | None:
        """The value, if it need not be looked at again yet."""
        return self._made if self._made is not None and self._clock() < self._due else None

    @property
    def due_in(self) -> float:
        """Seconds until it is worth asking again."""
        return max(self._due - self._clock(), 0.0)

    def get(self) -> Made[T]:
        """The newest value. Waits only for the first one."""
        known = self._made
        if not self._lock.acquire(blocking=known is None):
            assert known is not None
            return known
        try:
            if self.fresh is None:
                self._renew()
            assert self._made is not None
            return self._made
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
