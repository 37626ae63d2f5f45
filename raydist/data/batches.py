"""Global batches: the samples of each step, and their division among ranks.

Runs in each train worker (and anywhere else): numpy, no torch. The samples of a step never depend on the
number of ranks: a rank takes its part of a global batch that is the same for every world size. The whole
state is a `Cursor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    a rank without any has masked rows only. lengths [n] int64: tokens of each row, after which there is padding; None if they
    are not needed.
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
