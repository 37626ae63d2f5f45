"""Global batches: the samples of each step, their division among ranks, and the thread that prefetches them.

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
"""The target of a position that is not counted in the loss (torch's `ignore_index`)."""

_AHEAD = 4096
"""Number of ids computed per call, because a call of the permutation has a fixed cost."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of training: `offset` samples of epoch `epoch` are trained.

    `tokens`: of these samples, where global batches are counted in tokens, else 0.
    """

    epoch: int = 0
    offset: int = 0
    tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        """For a checkpoint's manifest."""
        counted = {"tokens": self.tokens} if self.tokens else {}
        return {"epoch": self.epoch, "offset": self.offset, **counted}

    @classmethod
    def from_dict(cls, raw: dict[str, int]) -> Cursor:
        """The inverse of `to_dict`."""
        return cls(int(raw["epoch"]), int(raw["offset"]), int(raw.get("tokens", 0)))


class Batches:
    """The global batches of a run, in order: slices of each epoch's permutation; the last one of an epoch is shorter.

    `global_batch` is in samples. Raises DataError if there are no samples.
    """

    def __init__(self, n_samples: int, global_batch: int, seed: int, fingerprint: str) -> None:
        assert global_batch >= 1, global_batch
        if n_samples < 1:
            raise DataError("the train split has no samples", "add text, or reduce model.context")
        self.n_samples = n_samples
        self.global_batch = global_batch
        self.seed = seed
        self.fingerprint = fingerprint
        self._order: tuple[int, Permutation] | None = None
        self._ahead: tuple[int, int, IntArray] = (-1, 0, np.empty(0, dtype=np.int64))

    @property
    def steps_per_epoch(self) -> int:
        """Global batches per epoch, including the short one."""
        return -(-self.n_samples // self.global_batch)

    def order(self, epoch: int) -> Permutation:
        """The epoch's order; the last one is cached."""
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = (epoch, epoch_order(self.seed, epoch, self.fingerprint, self.n_samples))
        return kept[1]

    def ids(self, cursor: Cursor) -> IntArray:
        """Sample ids of the global batch at `cursor`, int64 [global_batch]; shorter at the end of an
        epoch."""
        return self.slice(cursor, self.global_batch)

    def slice(self, cursor: Cursor, count: int) -> IntArray:
        """The next `count` sample ids at `cursor`; fewer at the end of an epoch."""
        offset, stop = cursor.offset, min(cursor.offset + count, self.n_samples)
        epoch, first, ids = self._ahead
        if epoch != cursor.epoch or offset < first or stop > first + len(ids):
            last = min(offset + max(count, _AHEAD), self.n_samples)
            ids, first = self.order(cursor.epoch)(np.arange(offset, last, dtype=np.int64)), offset
            self._ahead = (cursor.epoch, first, ids)
        return ids[offset - first : stop - first].copy()

    def after(self, cursor: Cursor) -> Cursor:
        """The cursor after the batch at `cursor`."""
        offset = cursor.offset + self.global_batch
        return Cursor(cursor.epoch, offset) if offset < self.n_samples else Cursor(cursor.epoch + 1, 0)

    def number(self, cursor: Cursor) -> int:
        """The number of the step that trains the batch at `cursor`, from 1."""
        return cursor.epoch * self.steps_per_epoch + cursor.offset // self.global_batch + 1

    def at_step(self, step: int) -> Cursor:
        """The cursor after `step` steps from the beginning of training."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Cursor(epoch, within * self.global_batch)


def samples_hash(ids: IntArray) -> str:
    """xxh64 in hex of the ids as little-endian int64, in order."""
    return xxhash.xxh64_hexdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes())


def share(ids: IntArray, rank: int, world: int, micro_batch: int) -> list[IntArray]:
    """The micro-batches of one rank: near-equal parts of its contiguous slice of the global batch.

    Their number is the same on every rank, because all ranks must run the same collectives: the smallest number of micro-batches,
    of at most `micro_batch` samples each, for the largest slice. A rank with fewer samples gets empty micro-batches.
    """
    n = len(ids)
    largest = -(-n // world)
    count = -(-largest // micro_batch)
    mine = ids[rank * n // world : (rank + 1) * n // world]
    return [mine[i * len(mine) // count : (i + 1) * len(mine) // count] for i in range(count)]


Divide = Callable[[IntArray, int, int], list[IntArray]]
"""(ids of a global batch, rank, world) -> the micro-batches of that rank, as positions in the global batch. All ranks have equally
many; some may be empty. A pure function."""


def equal_parts(micro_batch: int) -> Divide:
    """`share`, as a Divide."""
    return lambda ids, rank, world: share(np.arange(len(ids)), rank, world, micro_batch)


def eval_batches(n_samples: int, batches: int, global_batch: int) -> list[IntArray]:
    """Ids of at most `batches` global batches of the eval split: the same every time, spread over the whole split."""
    if n_samples < 1:
        return []
    order = epoch_order(0, 0, "eval", n_samples)
    count = min(n_samples, batches * global_batch)
    return [order(np.arange(i, min(i + global_batch, count))) for i in range(0, count, global_batch)]


@dataclass(slots=True)
class MicroBatch:
    """One forward pass of one rank. numpy arrays, or the result of the loader's `transform`.

    tokens [n, T] int64; targets [n, T] int64, -100 where masked; documents [n, T] int32 if documents are
    packed. `first`: the index of its first sample in the global batch, by which dropout is seeded. `real`: whether it has samples;
    a rank without any has masked rows only. lengths [n] int64: tokens of each row, after which there is padding; None if nobody
    needs to know.
    """

    tokens: Any
    targets: Any
    documents: Any = None
    first: int = 0
    real: bool = True
    lengths: Any = None


@dataclass(slots=True)
class StepBatch:
    """One rank's data for one optimizer step.

    `cursor`: before the step, `after`: after it; `ids`: the whole global batch; `tokens`: number of unmasked targets of this rank;
    `wait_seconds`: how long the training loop waited for this batch.
    """

    cursor: Cursor
    after: Cursor
    ids: IntArray
    samples_hash: str
    micro_batches: list[MicroBatch]
    tokens: int
    wait_seconds: float = 0.0


class Samples(Protocol):
    """The loader's input: `raydist.data.dataset.Windows`, or a class with the same methods."""

    def batch(
        self, ids: IntArray, pack: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32] | None]:
        """tokens, targets and documents of these samples; one fully masked row if `ids` is empty."""

    def row_lengths(self, ids: IntArray) -> IntArray | None:
        """Tokens of each row of their `batch`, int64; None if its rows are full, or need not be told from full ones."""


def make_step(
    windows: Samples,
    cursor: Cursor,
    after: Cursor,
    ids: IntArray,
    *,
    rank: int,
    world: int,
    divide: Divide,
    pack: bool,
) -> StepBatch:
    """The part of global batch `ids` for `rank`, as arrays."""
    micro_batches, tokens = [], 0
    for part in divide(ids, rank, world):
        first = int(part[0]) if len(part) else len(ids)
        lengths = windows.row_lengths(ids[part])
        made = MicroBatch(*windows.batch(ids[part], pack), first=first, real=len(part) > 0, lengths=lengths)
        tokens += int(np.count_nonzero(made.targets != MASKED))
        micro_batches.append(made)
    return StepBatch(cursor, after, ids, samples_hash(ids), micro_batches, tokens)


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

    If `next` waits longer than `timeout_s`, the thread is given up, and a new one starts at the missing batch; `on_stall` is called
    each time. Later results of the old thread are dropped. After RESTARTS restarts `next` raises DataError.
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
        self._prefetcher = self._start()

    def close(self) -> None:
        """Ends the thread, even if it is waiting, and drops prefetched batches. May be called again."""
        self._prefetcher.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Prefetcher:
    """A thread that iterates over `steps`, and the queue of its results."""

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
        """Ends the thread. Does not wait for one that was given up, and at most 5 s for one that is stuck."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._given_up:
            self._thread.join(_CLOSE_S)
        self._ready.clear()
