"""Global batches: which samples a step trains, how ranks share them, and the thread that makes them ahead of
time.

Runs in each train worker (and anywhere else): numpy, no torch. The samples of a step never depend on the
number of ranks: a rank takes its part of a global batch that is the same for every world size. The whole
state is a `Cursor`.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from raydist.data.order import IntArray, Permutation, epoch_order
from raydist.errors import DataError

MASKED = -100
"""The target of a position that takes no part in the loss (torch's `ignore_index`)."""

_AHEAD = 4096
"""Ids that are computed at once: the permutation's cost is per call for few of them."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where training is: `offset` samples of epoch `epoch` are trained."""

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """For a checkpoint's manifest."""
        return {"epoch": self.epoch, "offset": self.offset}

    @classmethod
    def from_dict(cls, raw: dict[str, int]) -> Cursor:
        """The inverse of `to_dict`."""
        return cls(int(raw["epoch"]), int(raw["offset"]))


class Batches:
    """The global batches of a run, in order: slices of each epoch's permutation, the last of an epoch short.

    `global_batch` is in samples. Raises DataError if there is no sample at all.
    """

    def __init__(self, n_samples: int, global_batch: int, seed: int, fingerprint: str) -> None:
        assert global_batch >= 1, global_batch
        if n_samples < 1:
            raise DataError("the train split has no sample", "give more text, or a smaller model.context")
        self.n_samples = n_samples
        self.global_batch = global_batch
        self.seed = seed
        self.fingerprint = fingerprint
        self._order: tuple[int, Permutation] | None = None
        self._ahead: tuple[int, int, IntArray] = (-1, 0, np.empty(0, dtype=np.int64))

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, the short one included."""
        return -(-self.n_samples // self.global_batch)

    def order(self, epoch: int) -> Permutation:
        """The epoch's order; the last one asked for is kept."""
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = (epoch, epoch_order(self.seed, epoch, self.fingerprint, self.n_samples))
        return kept[1]

    def ids(self, cursor: Cursor) -> IntArray:
        """Sample ids of the global batch at `cursor`, int64 [global_batch]; shorter at the end of an
        epoch."""
        offset, stop = cursor.offset, min(cursor.offset + self.global_batch, self.n_samples)
        epoch, first, ids = self._ahead
        if epoch != cursor.epoch or offset < first or stop > first + len(ids):
            last = min(offset + max(self.global_batch, _AHEAD), self.n_samples)
            ids, first = self.order(cursor.epoch)(np.arange(offset, last, dtype=np.int64)), offset
            self._ahead = (cursor.epoch, first, ids)
        return ids[offset - first : stop - first].copy()

    def after(self, cursor: Cursor) -> Cursor:
        """The cursor once the batch at `cursor` is trained."""
        offset = cursor.offset + self.global_batch
        return Cursor(cursor.epoch, offset) if offset < self.n_samples else Cursor(cursor.epoch + 1, 0)

    def at_step(self, step: int) -> Cursor:
        """The cursor after `step` steps from the very start."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Cursor(epoch, within * self.global_batch)


def samples_hash(ids: IntArray) -> str:
    """xxh64 in hex of the ids as little-endian int64, in order."""
    return xxhash.xxh64_hexdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes())


def share(ids: IntArray, rank: int, world: int, micro_batch: int) -> list[IntArray]:
    """The micro-batches of one rank: near-equal parts of its contiguous slice of the global batch.

    Their number is the same on every rank, so that all take part in every collective: the fewest of at most
    `micro_batch` samples that hold the largest slice. A rank that is short of samples gets empty ones.
    """
    n = len(ids)
    largest = -(-n // world)
    count = -(-largest // micro_batch)
    mine = ids[rank * n // world : (rank + 1) * n // world]
    return [mine[i * len(mine) // count : (i + 1) * len(mine) // count] for i in range(count)]


def eval_batches(n_samples: int, batches: int, global_batch: int) -> list[IntArray]:
    """Ids of at most `batches` global batches of the eval split: the same every time, from all over it."""
    if n_samples < 1:
        return []
    order = epoch_order(0, 0, "eval", n_samples)
    count = min(n_samples, batches * global_batch)
    return [order(np.arange(i, min(i + global_batch, count))) for i in range(0, count, global_batch)]


@dataclass(slots=True)
class MicroBatch:
    """One forward pass of one rank. numpy arrays, or what the loader's `transform` makes of them.

    tokens [n, T] int64; targets [n, T] int64, -100 where masked; documents [n, T] int32 when documents are
    packed.
    """

    tokens: Any
    targets: Any
    documents: Any = None


@dataclass(slots=True)
class StepBatch:
    """What one rank needs for one optimizer step.

    `cursor` is before the step, `after` behind it; `ids` is the whole global batch; `tokens` counts the
    unmasked targets of this rank; `wait_seconds` is how long the training loop waited for this batch.
    """

    cursor: Cursor
    after: Cursor
    ids: IntArray
    samples_hash: str
    micro_batches: list[MicroBatch]
    tokens: int
    wait_seconds: float = 0.0


class Samples(Protocol):
    """What the loader reads from: `raydist.data.dataset.Windows`, or anything like it."""

    def batch(
        self, ids: IntArray, pack: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32] | None]:
        """tokens, targets and documents of these samples; of one fully masked row if there are none."""


def make_step(
    windows: Samples,
    cursor: Cursor,
    after: Cursor,
    ids: IntArray,
    *,
    rank: int,
    world: int,
    micro_batch: int,
    pack: bool,
) -> StepBatch:
    """The part of `rank` in the global batch `ids`, as arrays."""
    micro_batches, tokens = [], 0
    for part in share(ids, rank, world, micro_batch):
        made = MicroBatch(*windows.batch(part, pack))
        tokens += int(np.count_nonzero(made.targets != MASKED))
        micro_batches.append(made)
    return StepBatch(cursor, after, ids, samples_hash(ids), micro_batches, tokens)


@dataclass(frozen=True, slots=True)
class Stall:
    """A loader that gives no batch. `seconds`: waited for the one at `cursor`, of whose samples this rank wants `ids`.

    `at`: the innermost lines of the stuck thread, one a line. `restarts`: of it before; `final`: there will be no other.
    """

    cursor: Cursor
    ids: IntArray
    seconds: float
    at: str
    restarts: int
    final: bool


RESTARTS = 2
"""Threads that are started, one after the other, in the place of one that gives no batch."""

_CLOSE_S = 5.0


class Loader:
    """An iterator of StepBatch from `cursor` on, made ahead of time by one thread; at most `prefetch` (at
    least 1) wait.

    `steps` ends it after that many; None never does. `transform` runs in the thread, on each StepBatch. An
    error in the thread is raised by the `next` that would have had its batch. Close it, or use it as a
    context manager.

    A thread that lets `next` wait for `timeout_s` is given up, and another one starts at the batch that is waited for:
    `on_stall` is told each time. What the old one may still make is dropped. After RESTARTS of them `next` raises
    DataError.
    """

    def __init__(
        self,
        windows: Samples,
        batches: Batches,
        cursor: Cursor,
        *,
        rank: int = 0,
        world: int = 1,
        micro_batch: int,
        pack: bool = False,
        prefetch: int = 2,
        steps: int | None = None,
        transform: Callable[[StepBatch], StepBatch] | None = None,
        timeout_s: float | None = None,
        on_stall: Callable[[Stall], None] = lambda stall: None,
    ) -> None:
        assert 0 <= rank < world, (rank, world)
        self._windows, self._batches, self._cursor = windows, batches, cursor
        self._rank, self._world, self._micro_batch, self._pack = rank, world, micro_batch, pack
        self._room, self._steps, self._transform = max(prefetch, 1), steps, transform
        self._timeout_s, self._on_stall = timeout_s, on_stall
        self._given = 0
        self._restarts = 0
        self._failure: DataError | None = None
        self._maker = self._start()

    def _start(self) -> _Maker:
        """A thread from the present cursor on."""
        left = None if self._steps is None else self._steps - self._given
        return _Maker(self._make(self._cursor, left), self._room)

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
                micro_batch=self._micro_batch,
                pack=self._pack,
            )
            yield step if self._transform is None else self._transform(step)
            cursor, made = after, made + 1

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        begun = time.perf_counter()
        while not self._maker.wait(self._timeout_s):
            self._stalled(time.perf_counter() - begun)
        if self._failure is not None:
            raise self._failure
        step = self._maker.take()
        self._cursor, self._given, self._restarts = step.after, self._given + 1, 0
        step.wait_seconds = time.perf_counter() - begun
        return step

    def _stalled(self, seconds: float) -> None:
        """Gives the thread up; starts another one, or leaves the error for whoever waits."""
        at = self._maker.give_up()
        final = self._restarts == RESTARTS
        ids = np.concatenate(share(self._batches.ids(self._cursor), self._rank, self._world, self._micro_batch))
        self._on_stall(Stall(self._cursor, ids, seconds, at, self._restarts, final))
        if final:
            self._failure = DataError(
                f"no batch for {seconds:.0f} s at epoch {self._cursor.epoch}, sample {self._cursor.offset}, on rank {self._rank}, "
                f"though the loader was started again {RESTARTS} times; it stands in:\n{at}",
                "look at the storage that the data is on; raise recovery.data_timeout if it is only slow",
            )
            return
        self._restarts += 1
        self._maker = self._start()

    def close(self) -> None:
        """Ends the thread, whatever it waits for, and drops what was made. Harmless when repeated."""
        self._maker.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Maker:
    """A thread that takes from `steps`, and the queue of what it has taken."""

    def __init__(self, steps: Iterator[StepBatch], room: int) -> None:
        self._steps, self._room = steps, room
        self._ready: deque[StepBatch] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raydist-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for step in self._steps:
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
        """Whether `take` has something to say: at once, or within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self._ended, timeout_s)

    def take(self) -> StepBatch:
        """The next one. Raises what the thread raised, or StopIteration where it has come to its end."""
        with self._changed:
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            step = self._ready.popleft()
            self._changed.notify_all()
            return step

    def give_up(self) -> str:
        """Where the thread stands now. It ends by itself if it ever comes to; nothing that it makes is seen."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        with self._changed:
            self._closed = self._ended = self._given_up = True
            self._ready.clear()
            self._changed.notify_all()
        lines = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return "\n".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(lines))

    def close(self) -> None:
        """Ends the thread; one that was given up is not waited for, and one that is stuck no longer than 5 s."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._given_up:
            self._thread.join(_CLOSE_S)
        self._ready.clear()
