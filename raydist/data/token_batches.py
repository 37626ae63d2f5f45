"""Global batches that are counted in tokens: consecutive samples of an epoch's order, as many as have so many tokens.

Runs in each train worker (and anywhere else): numpy, no torch. Put the samples of an epoch one after another: token t of them
belongs to batch t // size, and a sample to the batch of its last token. So an epoch of T tokens has exactly ceil(T / size) batches
whatever its order, none of them is empty (no sample is longer than `size`), and a cursor is enough to find the batch at it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raydist.data.batches import Batches, Cursor
from raydist.data.order import IntArray


class TokenBatches(Batches):
    """Batches of `size` tokens: on average, each one is off by less than the longest sample.

    `lengths`: ids -> tokens of these samples; all together have `tokens`. `global_batch`: sequences of a batch, on average. Raises
    DataError if there are no samples.
    """

    def __init__(
        self,
        n_samples: int,
        lengths: Callable[[IntArray], IntArray],
        tokens: int,
        size: int,
        seed: int,
        fingerprint: str,
    ) -> None:
        super().__init__(n_samples, max(1, round(size * n_samples / max(tokens, 1))), seed, fingerprint)
        self.tokens, self.size, self._lengths = tokens, size, lengths
        self._found: tuple[Cursor, IntArray, Cursor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """See `Batches.steps_per_epoch`."""
        return -(-self.tokens // self.size)

    def ids(self, cursor: Cursor) -> IntArray:
        """Sample ids of the global batch at `cursor`, int64."""
        return self._batch(cursor)[0].copy()

    def after(self, cursor: Cursor) -> Cursor:
        """See `Batches.after`."""
        return self._batch(cursor)[1]

    def number(self, cursor: Cursor) -> int:
        """See `Batches.number`."""
        return cursor.epoch * self.steps_per_epoch + self._within(cursor) + 1

    def at_step(self, step: int) -> Cursor:
        """See `Batches.at_step`. Counts the tokens of the epoch up to there: a run itself resumes from its cursor."""
        epoch, within = divmod(step, self.steps_per_epoch)
        cursor = Cursor(epoch)
        for _ in range(within):
            cursor = self.after(cursor)
        return cursor

    def _within(self, cursor: Cursor) -> int:
        """The number of the batch at `cursor` in its epoch, from 0."""
        length = int(self._lengths(self.slice(cursor, 1))[0])
        return (cursor.tokens + length - 1) // self.size

    def _batch(self, cursor: Cursor) -> tuple[IntArray, Cursor]:
        found = self._found
        if found is None or found[0] != cursor:
            found = self._found = (cursor, *self._find(cursor))
        return found[1], found[2]

    def _find(self, cursor: Cursor) -> tuple[IntArray, Cursor]:
        bound = (self._within(cursor) + 1) * self.size
        room = self.global_batch + self.global_batch // 4 + 8
        while True:
            ids = self.slice(cursor, room)
            ends = cursor.tokens + np.cumsum(self._lengths(ids))
            stop = int(np.searchsorted(ends, bound, side="right"))
            if stop < len(ids) or cursor.offset + len(ids) == self.n_samples:
                break
            room *= 2
        offset = cursor.offset + stop
        if offset == self.n_samples:
            return ids, Cursor(cursor.epoch + 1)
        return ids[:stop], Cursor(cursor.epoch, offset, int(ends[stop - 1]))
