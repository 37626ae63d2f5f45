"""The loader: batches made ahead of time by a thread, which is replaced if it gets stuck.

Runs in: each train worker. No torch.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from raydist.data.batches import Batches, Cursor, Divide, Samples, StepBatch, make_step
from raydist.data.order import IntArray
from raydist.errors import DataError


@dataclass(frozen=True, slots=True)
class Stall:
    """A loader that delivers no batch. `seconds`: time waited for the batch at `cursor`, of which this rank needs samples `ids`.

    `at`: the innermost lines of the stuck thread, one per line. `restarts`: number of restarts so far; `final`: no more restarts.
    """

    cursor: Cursor
    ids: IntArray
    seconds: float
    at: str
    restarts: int
    final: bool


RESTARTS = 2
"""How often a thread that delivers no batch is replaced by a new one."""

_CLOSE_S = 5.0


class Loader:
    """An iterator of StepBatch from `cursor` on, prefetched by one thread; the queue holds at most `prefetch` (at
    least 1).

    `steps`: number of batches; None: no end. `transform` runs in the thread, on each StepBatch. An error in the thread is raised
    by the `next` for its batch. Close the loader, or use it as a context manager.

    If `next` waits longer than `timeout_s`, the thread is abandoned, and a new one starts at the missing batch; `on_stall` is
    called each time. Later results of the old thread are dropped. After RESTARTS restarts `next` raises DataError.
    """

    def __init__(
        self,
        windows: Samples,
        batches: Batches,
        cursor: Cursor,
        *,
        rank: int = 0,
        world: int = 1,
        divide: Divide,
        pack: bool = False,
        prefetch: int = 2,
        steps: int | None = None,
        transform: Callable[[StepBatch], StepBatch] | None = None,
        timeout_s: float | None = None,
        on_stall: Callable[[Stall], None] = lambda stall: None,
    ) -> None:
        assert 0 <= rank < world, (rank, world)
        self._windows, self._batches, self._cursor = windows, batches, cursor
        self._rank, self._world, self._divide, self._pack = rank, world, divide, pack
        self._room, self._steps, self._transform = max(prefetch, 1), steps, transform
        self._timeout_s, self._on_stall = timeout_s, on_stall
        self._given = 0
        self._restarts = 0
        self._failure: DataError | None = None
        self._before = (0.0, 0.0)
        self._prefetcher = self._start()

    def _start(self) -> _Prefetcher:
        """Starts a thread from the current cursor."""
        left = None if self._steps is None else self._steps - self._given
        return _Prefetcher(self._make(self._cursor, left), self._room)

    def _make(self, cursor: Cursor, steps: int | None) -> Iterator[StepBatch]:
        made = 0
        while steps is None or made < steps:
            after = self._batches.after(cursor)
            step = make_step(
                self._windows,
                cursor,
                after,
                self._batches.ids(cursor),
                rank=self._rank,
                world=self._world,
                divide=self._divide,
                pack=self._pack,
            )
            yield step if self._transform is None else self._transform(step)
            cursor, made = after, made + 1

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        begun = time.perf_counter()
        while not self._prefetcher.wait(self._timeout_s):
            self._stalled(time.perf_counter() - begun)
        if self._failure is not None:
            raise self._failure
        step = self._prefetcher.take()
        self._cursor, self._given, self._restarts = step.after, self._given + 1, 0
        step.wait_seconds = time.perf_counter() - begun
        return step

    def spent(self) -> dict[str, float | None]:
        """Telemetry's columns of the time that its threads took to make batches. Thread-safe."""
        made, waited = (a + b for a, b in zip(self._before, self._prefetcher.spent, strict=True))
        return {"loader_seconds": made, "loader_waited_seconds": None if math.isnan(waited) else waited}

    def _stalled(self, seconds: float) -> None:
        """Gives up the thread; starts another one, or stores the error for the caller of `next`."""
        at = self._prefetcher.give_up()
        final = self._restarts == RESTARTS
        whole = self._batches.ids(self._cursor)
        ids = whole[np.concatenate(self._divide(whole, self._rank, self._world))]
        self._on_stall(Stall(self._cursor, ids, seconds, at, self._restarts, final))
        if final:
            self._failure = DataError(
                f"no batch for {seconds:.0f} s at epoch {self._cursor.epoch}, sample {self._cursor.offset}, on rank {self._rank}, "
                f"although the loader was restarted {RESTARTS} times; it is stuck in:\n{at}",
                "check the storage of the data; raise recovery.data_timeout if it is only slow",
            )
            return
        self._restarts += 1
        made, waited = self._prefetcher.spent
        self._before = self._before[0] + made, self._before[1] + waited
        self._prefetcher = self._start()

    def close(self) -> None:
        """Ends the thread, even if it is waiting, and drops prefetched batches. May be called again."""
        self._prefetcher.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _busy_seconds() -> float:
    """Time in which this thread ran or was ready to run; NaN if the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, ready, _ = file.read().split()
        return (int(ran) + int(ready)) / 1e9
    except (OSError, ValueError):
        return math.nan


class _Prefetcher:
    """A thread that iterates over `steps`, and the queue of its results."""

    def __init__(self, steps: Iterator[StepBatch], room: int) -> None:
        self._steps, self._room = steps, room
        self._ready: deque[StepBatch] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = self._given_up = False
        self._error: BaseException | None = None
        self.spent = 0.0, 0.0
        """Seconds in which batches were made, and those of them in which the thread neither ran nor was ready to run: it waited for
        storage, a lock or the GIL. NaN if the kernel does not tell."""
        self._thread = threading.Thread(target=self._run, name="raydist-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                begun, busy = time.perf_counter(), _busy_seconds()
                step = next(self._steps, None)
                if step is None:
                    return
                seconds = time.perf_counter() - begun
                waited = seconds - (_busy_seconds() - busy)
                self.spent = self.spent[0] + seconds, self.spent[1] + (0.0 if waited < 0 else waited)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._room)
                    if self._closed:
                        return
                    self._ready.append(step)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether `take` has a result or an error: now, or within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self._ended, timeout_s)

    def take(self) -> StepBatch:
        """The next batch. Raises the thread's error, or StopIteration at the end."""
        with self._changed:
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            step = self._ready.popleft()
            self._changed.notify_all()
            return step

    def give_up(self) -> str:
        """Returns the current stack of the thread. The thread ends when it runs again; its results are dropped."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        with self._changed:
            self._closed = self._ended = self._given_up = True
            self._ready.clear()
            self._changed.notify_all()
        lines = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return "\n".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(lines))

    def close(self) -> None:
        """Ends the thread. Does not wait for an abandoned one, and at most 5 s for one that is stuck."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._given_up:
            self._thread.join(_CLOSE_S)
        self._ready.clear()
