"""The samples of a run with `data.batching`: each is a document, or a piece of one, in a row of its own.

Runs in each train worker (and anywhere else): numpy and pyarrow, no torch. Nothing is stored per document beyond the dataset's file
of ends, which is memory-mapped: a rank's own memory is 16 bytes for each document that is longer than `longest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from raydist.data.batches import MASKED
from raydist.data.dataset import TokenSplit
from raydist.data.micro_batches import Shapes, divide
from raydist.data.order import IntArray
from raydist.errors import DataError

Longer = Literal["split", "cut", "error"]
_CHUNK = 1 << 20
"""Documents whose lengths are computed at a time."""


class Sequences:
    """The documents of a split as samples. A document of n tokens and its end token is n tokens and n targets, the end included.

    A document longer than `longest` tokens is split into the fewest pieces of nearly equal length (ids from the number of documents
    on are second and later pieces), or cut after `longest` tokens, or refused. Raises DataError.

    `tokens`: of all samples; `histogram[n]`: how many have n tokens; `too_long`: documents longer than `longest`; `left_out`: their
    tokens that were cut off. `shapes`: of micro-batches; each sample is one, if it is not set.
    """

    def __init__(self, split: TokenSplit, longest: int, longer: Longer = "split", shapes: Shapes | None = None) -> None:
        assert longest >= 1, longest
        self.split, self.longest = split, longest
        self.shapes = shapes or Shapes(longest, longest)
        self._longer = longer
        self._ends = split.ends()
        self.documents = len(self._ends)
        self.histogram = np.zeros(longest + 1, dtype=np.int64)
        self.left_out = 0
        long: list[IntArray] = []
        pieces: list[IntArray] = []
        self._largest, largest = 0, 0
        for first, lengths in self._lengths_of_all():
            count = -(-lengths // longest)
            more = np.flatnonzero(count > 1)
            if more.size:
                long.append(first + more)
                pieces.append(count[more])
            if longer == "split":
                small, larger = lengths // count, lengths % count
                self.histogram += np.bincount(small, weights=count - larger, minlength=longest + 1).astype(np.int64)
                one_more = larger > 0
                self.histogram += np.bincount(
                    small[one_more] + 1, weights=larger[one_more], minlength=longest + 1
                ).astype(np.int64)
                kept = -(-lengths // count)
            else:
                kept = np.minimum(lengths, longest)
                self.left_out += int((lengths - kept).sum())
                self.histogram += np.bincount(kept, minlength=longest + 1)
            if int(kept.max()) > largest:
                self._largest, largest = first + int(kept.argmax()), int(kept.max())
        self._long = np.concatenate(long) if long else np.empty(0, dtype=np.int64)
        self.too_long = len(self._long)
        if longer == "error" and self.too_long:
            document = int(self._long[0])
            start, stop = self._bounds(self._long[:1])
            raise DataError(
                f"{self.too_long:,} of the {self.documents:,} documents of the {split.name} split have more than {longest} tokens; "
                f"the first is document {document}, with {int(stop[0] - start[0])}",
                "set data.batching.longer: split or cut, or raise data.batching.max_tokens and model.context",
            )
        # Pieces beyond the first of each document, up to and including each long document.
        self._further = np.cumsum(np.concatenate(pieces) - 1) if pieces and longer == "split" else self._long[:0]
        self.tokens = int((self.histogram * np.arange(longest + 1)).sum())

    def __len__(self) -> int:
        return self.documents + (int(self._further[-1]) if len(self._further) else 0)

    def lengths(self, ids: IntArray) -> IntArray:
        """The tokens of these samples, at least 1 each. Raises IndexError for an id that is out of range."""
        start, stop = self._places(ids)
        return np.maximum(stop - start, 1)

    def files(self, ids: IntArray) -> list[str]:
        """Paths or URIs of the shards that contain these samples; opens none."""
        start, stop = self._places(ids)
        return self.split.files(start, stop + 1 - start)

    def example(self, samples: int) -> IntArray:
        """Ids with which a strategy checks the graph: the longest sample, `samples` times or as often as a micro-batch has room."""
        length = int(self.shapes.padded(self.lengths(np.array([self._largest])))[0])
        return np.full(min(samples, self.shapes.rows(length)), self._largest, dtype=np.int64)

    def divide(self, ids: IntArray, rank: int, world: int) -> list[IntArray]:
        """See `raydist.data.batches.Divide`."""
        return divide(self.lengths(ids), world, self.shapes)[rank]

    def batch(
        self, ids: IntArray, pack: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32] | None]:
        """tokens [n, T] int64, targets [n, T] int64 (-100 where masked) and None, in a shape of `shapes`. Each sample begins a row;
        the rest of the row, and rows without a sample, are end tokens and masked. Of conversations only what counts is a target.
        Raises IndexError for an id that is out of range.
        """
        assert not pack, "a row has one document"
        start, stop = self._places(ids)
        shape = self.shapes.shape(np.maximum(stop - start, 1))
        tokens = np.full(shape, self.split.end, dtype=np.int64)
        targets = np.full(shape, MASKED, dtype=np.int64)
        for row, (first, last) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
            read = self.split.read(first, last + 1)
            tokens[row, : last - first] = read[:-1]
            targets[row, : last - first] = read[1:]
            if self.split.counts is not None:
                targets[row, : last - first][self.split.counts.read(first + 1, last + 1) == 0] = MASKED
        return tokens, targets, None

    def row_lengths(self, ids: IntArray) -> IntArray:
        """Tokens of each row of `batch`, int64; 0 of a row without a sample."""
        start, stop = self._places(ids)
        made = np.zeros(self.shapes.shape(np.maximum(stop - start, 1))[0], dtype=np.int64)
        made[: len(start)] = np.maximum(stop - start, 1)
        return made

    def notes(self) -> list[str]:
        """What was done about documents longer than `longest`, and how many shapes there are; each a line."""
        notes = []
        if self.too_long:
            done = f"cut: {self.left_out:,} of their tokens are not trained"
            if self._longer == "split":
                done = f"split into {self.too_long + int(self._further[-1]):,} sequences"
            notes.append(
                f"data.batching.longer: {self.too_long:,} of the {self.documents:,} documents are longer than {self.longest} "
                f"tokens, and are {done}"
            )
        if self.shapes.lengths:
            lengths = ", ".join(map(str, self.shapes.lengths))
            notes.append(f"data.batching: micro-batches have {len(self.shapes.all())} shapes, of lengths {lengths}")
        return notes

    def _lengths_of_all(self) -> Iterator[tuple[int, IntArray]]:
        """(first document, lengths of the documents from it on, at least 1), in chunks."""
        before = -1
        for first in range(0, self.documents, _CHUNK):
            ends = np.asarray(self._ends[first : first + _CHUNK])
            yield first, np.maximum(np.diff(ends, prepend=before) - 1, 1)
            before = int(ends[-1])

    def _bounds(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        """First token and end token of these documents."""
        stop = np.asarray(self._ends[documents])
        start = np.where(documents > 0, np.asarray(self._ends[documents - 1]) + 1, 0)
        return start, stop

    def _places(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """The first token of each sample, and the one after its last."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= len(self)):
            raise IndexError(f"[{ids.min()}, {ids.max()}] is not within the {len(self)} samples of {self.split.name}")
        if not ids.size:
            return ids, ids
        further = np.maximum(ids - self.documents, 0)
        long = np.searchsorted(self._further, further, side="right") if len(self._further) else further
        is_first = ids < self.documents
        documents = np.where(is_first, ids, self._long[np.minimum(long, len(self._long) - 1)] if self.too_long else ids)
        start, stop = self._bounds(documents)
        if self._longer == "split":
            before = np.where(long > 0, self._further[long - 1], 0) if len(self._further) else further
            piece = np.where(is_first, 0, further - before + 1)
            length, count = stop - start, np.maximum(-(-(stop - start) // self.longest), 1)
            return start - -piece * length // count, start - -(piece + 1) * length // count
        return start, np.minimum(stop, start + self.longest)
