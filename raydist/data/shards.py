"""One block of a corpus -> its shards: the pure function that is mapped, in this process or in Ray Data's
tasks.

Runs in the preparing process, or in Ray Data's tasks. numpy and pyarrow; must not import torch or ray.
The result depends only on the block and the job: the bytes are the same in any process, and on every repetition.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import xxhash

from raydist.data import documents, sources, tokenizers
from raydist.data.chat_template import ChatFormat, Rendered
from raydist.data.conversations import Conversations
from raydist.data.documents import Document
from raydist.data.index import COLUMN, COUNTS, SPLITS, Shard, Split, block_hashes
from raydist.data.sources import Block
from raydist.errors import DataError
from raydist.parsing import parse_json
from raydist.storage import Storage

JOURNAL = ".prepare"
_VERSION = 1
_SPLIT_KEY = 0x7261_7964_6973_74
"""Seed of the hash that assigns a document to train or eval. Never change it: a dataset prepared again would mix the splits."""

_BATCH_BYTES, _BATCH_DOCUMENTS = 4 << 20, 1024


@dataclass(frozen=True, slots=True)
class Job:
    """The settings that are the same for all blocks of a dataset.

    `threshold`: documents with a hash below it, of 2**64, are held out for evaluation.
    """

    out: str
    tokenizer_name: str
    tokenizer_file: bytes
    column: str
    threshold: int
    shard_tokens: int
    chat: ChatFormat | None = None

    def key(self, block: Block) -> str:
        """A key of the block's input: a journal entry with another key has other input, and is not used."""
        pieces = [asdict(p) for p in block.pieces]
        tokenizer = xxhash.xxh3_128_hexdigest(self.tokenizer_file)
        inputs = [_VERSION, tokenizer, self.column, self.threshold, self.shard_tokens, block.records, pieces]
        if self.chat is not None:
            inputs.append(self.chat.to_dict())
        return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


@dataclass(slots=True)
class Part:
    """The result of a block for one split."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass(slots=True)
class Made:
    """The result of a block. `histogram` counts the bytes of the eval split's text; `content` is a hash of all
    documents; `low` and `high` are the minimum and maximum of the documents' hashes."""

    block: int
    key: str
    train: Part
    eval: Part
    histogram: list[int]
    content: str
    low: int
    high: int

    def to_json(self) -> str:
        """JSON for the journal, and for transfer between processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Made:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError for an invalid text."""
        raw: dict[str, Any] = parse_json(text)
        for name in SPLITS:
            part = Part(**raw[name])
            part.shards = [Shard(**s) for s in raw[name]["shards"]]
            raw[name] = part
        return cls(**raw)

    def part(self, name: Split) -> Part:
        """The part of that split."""
        return self.train if name == "train" else self.eval


def journal_file(block: int) -> str:
    """The journal's file for a finished block."""
    return f"{JOURNAL}/block-{block:06d}.json"


def ends_file(block: int) -> str:
    """The journal's file with the ends of a block's documents, little-endian int64: those of train, then those of eval, each
    counted from the first token that the block has of that split."""
    return f"{JOURNAL}/block-{block:06d}.ends"


def document_hash(document: Document) -> int:
    """A 64-bit hash of a document's content, which decides between train and eval: equal documents go to the same split."""
    return xxhash.xxh64_intdigest(documents.raw(document), seed=_SPLIT_KEY)


def documents_of(
    block: Block, column: str, chat: ChatFormat | None = None, special: Sequence[str] = ()
) -> Iterator[Document]:
    """All documents of a block, in order. `special`: the tokenizer's special tokens. Raises DataError."""
    conversations = Conversations(chat, special) if chat is not None else None
    if block.records:
        for number, record in enumerate(sources.records(block.records)):
            where = partial("source {}: document {}".format, block.records, number)
            if conversations is not None:
                yield conversations.read(record, where)
            elif (document := documents.of_record(record, where, raw=True)) is not None:
                yield document
    for piece in block.pieces:
        yield from documents.read(piece, column, conversations)


def make(job: Job, block: Block) -> Made:
    """Writes the shards of a block and the ends of its documents, then its journal entry. Raises DataError, StorageError."""
    tokenizer = tokenizers.from_bytes(job.tokenizer_name, job.tokenizer_file)
    storage = Storage(job.out)
    writers = {
        name: _Writer(storage, f"{name}-{block.number:06d}", job.shard_tokens, tokenizer, counts=job.chat is not None)
        for name in SPLITS
    }
    special = getattr(tokenizer, "special", ())
    content = xxhash.xxh3_128()
    histogram = np.zeros(256, dtype=np.int64)
    low, high = 1 << 64, -1
    for document in documents_of(block, job.column, job.chat, special):
        hashed = document_hash(document)
        low, high = min(low, hashed), max(high, hashed)
        content.update(hashed.to_bytes(8, "little"))
        content.update(documents.raw(document))
        name: Split = "eval" if hashed < job.threshold else "train"
        writers[name].add(document)
        if name == "eval" and (text := _text(document)):
            histogram += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
    made = Made(
        block=block.number,
        key=job.key(block),
        train=writers["train"].finish(),
        eval=writers["eval"].finish(),
        histogram=histogram.tolist(),
        content=content.hexdigest(),
        low=low,
        high=high,
    )
    storage.write(ends_file(block.number), b"".join(writers[name].ends() for name in SPLITS))
    storage.write(journal_file(block.number), made.to_json().encode())
    return made


def _text(document: Document) -> bytes:
    """The UTF-8 text of a document; empty for token ids."""
    if isinstance(document, Rendered):
        return document.text.encode()
    return document if isinstance(document, bytes) else b""


class _Writer:
    """Writes documents to shards of at most `limit` tokens. `counts`: of conversations; each token says whether it counts."""

    def __init__(
        self, storage: Storage, stem: str, limit: int, tokenizer: tokenizers.Tokenizer, counts: bool = False
    ) -> None:
        self._storage, self._stem, self._limit, self._tokenizer = storage, stem, limit, tokenizer
        self._counts: list[npt.NDArray[np.uint8]] | None = [] if counts else None
        self._dtype = token_type(tokenizer.vocab_size)
        self._waiting: list[Document] = []
        self._waiting_bytes = 0
        self._buffered: list[npt.NDArray[Any]] = []
        self._count = 0
        self._position = 0
        self._ends = array("q")
        self._part = Part()

    def add(self, document: Document) -> None:
        """Adds a document."""
        self._waiting.append(document)
        self._part.documents += 1
        text = _text(document)
        self._waiting_bytes += len(document.text if isinstance(document, Rendered) else document)
        self._part.bytes += len(text)
        if self._waiting_bytes >= _BATCH_BYTES or len(self._waiting) >= _BATCH_DOCUMENTS:
            self._encode()

    def finish(self) -> Part:
        """Writes the remaining tokens."""
        self._encode()
        if self._count:
            self._write(self._count)
        return self._part

    def ends(self) -> bytes:
        """The positions of the documents' end tokens, as little-endian int64. After `finish`."""
        return np.array(self._ends, dtype="<i8").tobytes()

    def _encode(self) -> None:
        if self._counts is not None:
            self._encode_conversations(self._counts)
        else:
            self._encode_texts()
        self._waiting, self._waiting_bytes = [], 0
        while self._count >= self._limit:
            self._write(self._limit)

    def _encode_conversations(self, counts: list[npt.NDArray[np.uint8]]) -> None:
        """With an end after each, unless the template has written it. It counts if the last token before it does."""
        waiting = [d for d in self._waiting if isinstance(d, Rendered)]
        for rendered, (ids, each) in zip(waiting, tokenizers.encode_spans(self._tokenizer, waiting), strict=True):
            if not len(ids) or int(ids[-1]) != self._tokenizer.end:
                ids, each = np.append(ids, self._tokenizer.end), np.append(each, rendered.to_the_end)
            counts.append(each.astype(np.uint8))
            self._append(ids.astype(self._dtype))

    def _encode_texts(self) -> None:
        end = np.array([self._tokenizer.end], dtype=self._dtype)
        encoded = iter(self._tokenizer.encode([d for d in self._waiting if isinstance(d, bytes)]))
        for document in self._waiting:
            assert not isinstance(document, Rendered)
            ids = next(encoded) if isinstance(document, bytes) else self._checked(document)
            self._append(ids.astype(self._dtype, copy=False), end)

    def _append(self, *parts: npt.NDArray[Any]) -> None:
        """The tokens of a document, the last one its end."""
        self._buffered += parts
        length = sum(map(len, parts))
        self._count += length
        self._position += length
        self._ends.append(self._position - 1)

    def _checked(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if int(ids.min()) < 0 or int(ids.max()) >= self._tokenizer.vocab_size:
            raise DataError(
                f"a document of token ids has {ids.min()} to {ids.max()}: {self._tokenizer.name} has "
                f"[0, {self._tokenizer.vocab_size})",
                "use the tokenizer that made the ids",
            )
        return ids[:-1] if int(ids[-1]) == self._tokenizer.end else ids

    def _write(self, count: int) -> None:
        """Writes one shard with the first `count` buffered tokens."""
        tokens = np.concatenate(self._buffered)
        self._buffered = [tokens[count:]] if len(tokens) > count else []
        self._count -= count
        name = f"{self._stem}-{len(self._part.shards):03d}.arrow"
        columns = {COLUMN: tokens[:count]}
        if self._counts is not None:
            counts = np.concatenate(self._counts)
            self._counts[:] = [counts[count:]]
            columns[COUNTS] = counts[:count]
        raw = arrow_file(columns)
        data = memoryview(raw)
        self._storage.write(name, data)
        self._part.shards.append(Shard(name, count, raw.size, xxhash.xxh3_128_hexdigest(data), block_hashes(data)))
        self._part.tokens += count


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The type of a token in a shard: the smallest one that can hold the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def arrow_file(columns: Mapping[str, npt.NDArray[Any]]) -> pa.Buffer:
    """An Arrow IPC file of one record batch: each column is read back as one array, without a copy."""
    arrays = [pa.array(column) for column in columns.values()]
    schema = pa.schema([pa.field(name, a.type, nullable=False) for name, a in zip(columns, arrays, strict=True)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()
