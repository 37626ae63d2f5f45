"""A prepared dataset, open for reading: its tokens, and the fixed-length windows that are its samples.

Runs in each train worker (and anywhere else): numpy and pyarrow, no torch. Shards are memory-mapped and read without a copy. Each
MiB of a shard is compared with its hash when a process first reads of it (docs/how-to/data.md has the cost). A dataset at a URI is
read through a cache on local disk: because sample order is random over the whole split, each node soon needs every shard. It is
downloaded as a whole, once per node, at its first use, and its hash is checked. The cache is $RAYDIST_CACHE or ~/.cache/raydist, by
the dataset's fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import xxhash

from raydist.data import index as indexes
from raydist.data import tokenizers
from raydist.data.batches import MASKED
from raydist.data.index import BLOCK, COLUMN, COUNTS, DIGITS, DatasetIndex, Ends, Shard, Split
from raydist.data.locks import locked
from raydist.data.order import IntArray
from raydist.errors import DataError
from raydist.paths import cache_folder
from raydist.sinks import write_whole
from raydist.storage import Storage

Tokens = npt.NDArray[np.unsignedinteger[Any]]
_OPEN_SHARDS = 256
"""Number of memory maps that a split keeps open; a view keeps its own map alive, so maps can be closed early."""

_FETCH = 8 << 20


class TokenDataset:
    """A dataset by its folder's path or URI. Raises DataError if there is none; shards are opened at the first read."""

    def __init__(self, uri: str | os.PathLike[str] | Storage) -> None:
        self.storage = uri if isinstance(uri, Storage) else Storage(uri)
        self.index: DatasetIndex = indexes.read(self.storage)
        self.tokenizer = tokenizers.from_bytes(self.index.tokenizer.name, self._tokenizer_file())

    def _tokenizer_file(self) -> bytes:
        wanted = self.index.tokenizer.hash
        try:
            raw = self.storage.read(indexes.TOKENIZER)
        except FileNotFoundError:
            raw = b""
        if xxhash.xxh3_128_hexdigest(raw) != wanted:
            raise DataError(
                f"{self.storage.uri}/{indexes.TOKENIZER} is missing or damaged: its hash is not {wanted}",
                "delete the dataset and prepare it again",
            )
        return raw

    @property
    def uri(self) -> str:
        """Path or URI of its folder."""
        return self.storage.uri

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and the tokenizer."""
        return self.index.fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self.index.tokenizer.vocab_size

    @property
    def end(self) -> int:
        """The id that ends a document."""
        return self.index.tokenizer.end

    def split(self, name: Split) -> TokenSplit:
        """The tokens of one split."""
        return TokenSplit(self.storage, self.index, name)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A shard in memory: its tokens, all its bytes, and where in these the tokens begin."""

    tokens: Tokens
    raw: npt.NDArray[np.uint8]
    at: int


class TokenSplit:
    """All tokens of one split as one array, document after document, with an end token after each.

    `counts`: whether each token counts in the loss, read like the tokens; None: the dataset has no conversations, and all do.
    """

    def __init__(self, storage: Storage, index: DatasetIndex, name: Split, column: str = COLUMN) -> None:
        self.name = name
        self.end = index.tokenizer.end
        self.shards = index.split(name).shards
        self._ends = index.split(name).ends
        self._checked_ends: IntArray | None = None
        self.counts = TokenSplit(storage, index, name, COUNTS) if index.chat is not None and column == COLUMN else None
        self.dtype = np.dtype(index.dtype if column == COLUMN else np.uint8)
        self._column = column
        self._storage, self._fingerprint = storage, index.fingerprint
        self._bounds = np.cumsum([0] + [s.tokens for s in self.shards], dtype=np.int64)
        self._unread: dict[int, set[int] | None] = {}
        """Opened shard -> its blocks that are not compared with their hashes yet; None: all are. Not of a shard without hashes."""
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __reduce__(self) -> Any:
        return _reopen, (self._storage, self.name)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop): a view of the mapped shard, or a copy if they span several shards. Raises IndexError."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not within the {len(self)} tokens of {self.name}")
        first = self._shard_of(start)
        last = max(self._shard_of(stop - 1), first) if stop > start else first
        if start == stop:
            return np.empty(0, dtype=self.dtype)
        parts = []
        for i in range(first, last + 1):
            low, high = int(self._bounds[i]), int(self._bounds[i + 1])
            begin, end = max(start - low, 0), min(stop, high) - low
            shard = self._open(i)
            self._check(i, shard, np.array([begin]), end - begin)
            parts.append(shard.tokens[begin:end])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def gather(self, starts: IntArray, length: int) -> Tokens:
        """Rows of `length` tokens from each of `starts` on, [len(starts), length]: copied once, without a loop over rows.

        All must lie within the split.
        """
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        inside = starts + length <= self._bounds[first + 1]
        if len(starts) and inside.all() and (first == first[0]).all():
            return self._windows(int(first[0]), starts - self._bounds[first[0]], length)
        rows = np.empty((len(starts), length), dtype=self.dtype)
        for i in np.unique(first[inside]):
            mine = np.flatnonzero(inside & (first == i))
            rows[mine] = self._windows(int(i), starts[mine] - self._bounds[i], length)
        for row in np.flatnonzero(~inside):
            rows[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return rows

    def document(self, number: int) -> tuple[int, int]:
        """[first, last + 1) of the tokens of a document, its end included. Raises IndexError, and DataError as `ends`."""
        ends = self.ends()
        if number >= len(ends):
            raise IndexError(f"document {number} of {self.name}, which has {len(ends)}")
        return int(ends[number - 1]) + 1 if number else 0, int(ends[number]) + 1

    def are_ends(self, starts: IntArray, length: int) -> npt.NDArray[np.bool_]:
        """[len(starts), length]: whether each token from each of `starts` on ends a document. Raises DataError as `ends`."""
        ends = self.ends()
        made = np.zeros((len(starts), length), dtype=np.bool_)
        for row, start in enumerate(starts.tolist()):
            first, last = np.searchsorted(ends, (start, start + length))
            made[row, np.asarray(ends[first:last]) - start] = True
        return made

    def ends(self) -> IntArray:
        """The positions of the documents' end tokens, ascending: memory-mapped, 8 bytes a document on disk.

        Raises DataError, also if their hash is not the index's.
        """
        if self._ends is None:
            raise DataError(
                f"{self._storage.uri}: the ends of its documents are not stored: an older version of raydist prepared it",
                "prepare it again, into another folder, or leave data.batching out",
            )
        if not self._ends.bytes:
            return np.empty(0, dtype=np.int64)
        if self._checked_ends is None:
            self._checked_ends = self._map_ends(self._ends)
        return self._checked_ends

    def _map_ends(self, wanted: Ends) -> IntArray:
        path = self._local(wanted)
        try:
            if path.stat().st_size != wanted.bytes:
                raise DataError(f"{path}: not {wanted.bytes} bytes", "delete the dataset and prepare it again")
            mapped = np.memmap(path, dtype="<i8", mode="r")
        except (OSError, OverflowError) as error:
            raise DataError(f"{path} cannot be read: {error}", "`raydist data verify` lists all damage") from error
        if xxhash.xxh3_128_hexdigest(mapped.data) != wanted.hash:
            raise DataError(
                f"{path}: its bytes are not those that were written",
                "`raydist data verify` lists all damage; restore the file, or delete the dataset and prepare it again",
            )
        inside = mapped[0] >= 0 and mapped[-1] < len(self)
        if not inside or not all((part[1:] > part[:-1]).all() for part in _overlapping(mapped)):
            raise DataError(f"{path}: is not the ends of its documents", "delete the dataset and prepare it again")
        return mapped

    def files(self, starts: IntArray, length: int | IntArray) -> list[str]:
        """Paths or URIs of the shards that contain the `length` tokens from each of `starts` on."""
        last = np.minimum(starts + length, len(self)) - 1
        ends = (np.searchsorted(self._bounds, x, side="right") - 1 for x in (starts, last))
        needed = {i for first, end in zip(*ends, strict=True) for i in range(int(first), int(end) + 1)}
        return [f"{self._storage.uri}/{self.shards[i].file}" for i in sorted(needed)]

    def _windows(self, i: int, starts: IntArray, length: int) -> Tokens:
        """Rows of `length` tokens of a shard, from its tokens `starts` on: a copy."""
        shard = self._open(i)
        self._check(i, shard, starts, length)
        tokens = shard.tokens
        shape = (len(tokens) - length + 1, length)
        every: Tokens = np.lib.stride_tricks.as_strided(tokens, shape, tokens.strides * 2, writeable=False)
        return every[starts]

    def _check(self, i: int, shard: _Mapped, starts: IntArray, length: int) -> None:
        """Compares the blocks that contain these tokens with their hashes, each block once. Raises DataError."""
        unread = self._unread.get(i)
        if unread is None or not length:
            return
        size = self.dtype.itemsize
        first = (shard.at + starts * size) // BLOCK
        last = (shard.at + (starts + length) * size - 1) // BLOCK
        needed = {
            b for one, end in zip(first.tolist(), last.tolist(), strict=True) for b in range(one, end + 1)
        } & unread
        self._compare(i, shard, needed)

    def _compare(self, i: int, shard: _Mapped, blocks: set[int]) -> None:
        hashes = self.shards[i].blocks
        assert hashes is not None
        for block in sorted(blocks):
            data = shard.raw[block * BLOCK : (block + 1) * BLOCK].data
            if xxhash.xxh3_64_hexdigest(data) != hashes[block * DIGITS : (block + 1) * DIGITS]:
                raise DataError(
                    f"{self._storage.uri}/{self.shards[i].file}: bytes {block * BLOCK} to {block * BLOCK + len(data) - 1} are "
                    "not those that were written",
                    "`raydist data verify` lists all damage; restore the file, or delete the dataset and prepare it again",
                )
        left = (self._unread[i] or set()) - blocks
        self._unread[i] = left or None

    def _shard_of(self, position: int) -> int:
        return int(np.searchsorted(self._bounds, position, side="right")) - 1

    def _map(self, i: int) -> _Mapped:
        shard = self.shards[i]
        path = self._local(shard)
        try:
            if path.stat().st_size != shard.bytes:
                raise DataError(
                    f"{path}: {path.stat().st_size} bytes, not {shard.bytes}",
                    "delete the dataset and prepare it again",
                )
            with pa.memory_map(str(path)) as file:
                whole = file.read_buffer()
                column = pa.ipc.open_file(file).get_batch(0).column(self._column)
            column.validate()
        except (OSError, KeyError, ValueError, IndexError, pa.ArrowException) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} cannot be read: {error}", "`raydist data verify` lists all damage") from error
        if len(column) != shard.tokens or column.type != pa.from_numpy_dtype(self.dtype) or column.null_count:
            raise DataError(f"{path}: its tokens do not match the index", "delete the dataset and prepare it again")
        # Not column.to_numpy(), which imports pandas if that is installed: one second at the start of every rank.
        buffer, skipped = column.buffers()[1], column.offset * self.dtype.itemsize
        at, size = buffer.address - whole.address + skipped, len(column) * self.dtype.itemsize
        if not 0 <= at <= at + size <= whole.size:  # compressed: its hashes would not be of these bytes
            raise DataError(f"{path}: its tokens do not match the index", "delete the dataset and prepare it again")
        mapped = _Mapped(np.frombuffer(buffer, self.dtype, len(column), skipped), np.frombuffer(whole, np.uint8), at)
        if shard.blocks is not None and i not in self._unread:
            count = -(-shard.bytes // BLOCK)
            self._unread[i] = set(range(count))
            self._compare(i, mapped, {0, count - 1})  # what describes the tokens is at both ends
        return mapped

    def _local(self, file: Shard | Ends) -> Path:
        return Path(self._storage.path(file.file)) if self._storage.local else self._cached(file)

    def _cached(self, shard: Shard | Ends) -> Path:
        cache = Storage(cache_folder()).at(f"data/{self._fingerprint}")
        assert cache.local is not None
        path = cache.local / shard.file
        with locked(path.with_name(f".{path.name}.lock")):
            if cache.size(shard.file) != shard.bytes:
                digest = xxhash.xxh3_128()
                try:
                    with self._storage.open(shard.file) as source, cache.create(shard.file) as sink:
                        while chunk := source.read(_FETCH):
                            digest.update(chunk)
                            write_whole(sink, chunk)
                        if digest.hexdigest() != shard.hash:
                            raise DataError(
                                f"{self._storage.uri}/{shard.file} is damaged",
                                "delete the dataset and prepare it again",
                            )
                except FileNotFoundError:
                    raise DataError(
                        f"{self._storage.uri}/{shard.file} is missing",
                        "delete the dataset and prepare it again",
                    ) from None
        return path


def _overlapping(numbers: IntArray) -> Iterator[IntArray]:
    """All of it in parts, each of which begins with the last number of the one before."""
    for at in range(0, len(numbers), _FETCH):
        yield numbers[max(at - 1, 0) : at + _FETCH]


def _reopen(storage: Storage, name: Split) -> TokenSplit:
    return TokenDataset(storage).split(name)


class Windows:
    """The samples of a split: sample i reads tokens [i*context, (i+1)*context] and predicts each token from the previous ones.

    Every token except the first is a target exactly once. The last window may be short: it is padded and masked.
    """

    def __init__(self, split: TokenSplit, context: int) -> None:
        assert context >= 1, context
        self.split = split
        self.context = context

    def __len__(self) -> int:
        return -(-max(len(self.split) - 1, 0) // self.context)

    def files(self, ids: IntArray) -> list[str]:
        """Paths or URIs of the shards that contain these samples; opens none."""
        return self.split.files(ids * self.context, self.context + 1)

    def row_lengths(self, ids: IntArray) -> None:
        """Rows are full, but for the last sample's."""

    def example(self, samples: int) -> IntArray:
        """Ids with which a strategy checks the graph: the first sample, `samples` times."""
        return np.zeros(samples, dtype=np.int64)

    def batch(
        self, ids: IntArray, pack: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32] | None]:
        """tokens [n, T] int64, targets [n, T] int64 (-100 where masked), and documents [n, T] int32 if
        `pack`, else None.

        `documents` numbers the documents of a window from 0; targets in the next document are then masked. Of conversations only
        what counts is a target. If `ids` is empty, the result is one fully masked row. Raises IndexError for an id that is out of
        range.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= len(self)):
            raise IndexError(f"[{ids.min()}, {ids.max()}] is not within the {len(self)} samples of {self.split.name}")
        rows = self._rows(self.split, ids, self.split.end)
        tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if not ids.size:
            targets[:] = MASKED
        elif (left := len(self.split) - ids * self.context).min() <= self.context:  # tokens up to the end of the split
            targets[np.arange(1, self.context + 1) >= left[:, None]] = MASKED
        if self.split.counts is not None:
            targets[self._rows(self.split.counts, ids, 0)[:, 1:] == 0] = MASKED
        if not pack:
            return tokens, targets, None
        # A template may write the end token within a conversation.
        conversations = self.split.counts is not None and ids.size > 0
        ends = self.split.are_ends(ids * self.context, self.context) if conversations else tokens == self.split.end
        targets[ends] = MASKED
        return tokens, targets, (np.cumsum(ends, axis=1, dtype=np.int32) - ends).astype(np.int32, copy=False)

    def _rows(self, split: TokenSplit, ids: IntArray, fill: int) -> Tokens:
        """The `context` + 1 values of each sample, [n, T + 1]; `fill` after the end of the split. At least one row."""
        width, starts = self.context + 1, ids * self.context
        whole = starts + width <= len(split)
        if whole.all() and ids.size:
            return split.gather(starts, width)
        rows = np.full((max(len(ids), 1), width), fill, dtype=split.dtype)
        rows[: len(ids)][whole] = split.gather(starts[whole], width)
        for row in np.flatnonzero(~whole):
            tail = split.read(int(starts[row]), len(split))
            rows[row, : len(tail)] = tail
        return rows
