"""The metadata of a prepared dataset: `index.json`, written last; a folder without it is not a dataset.

Runs anywhere. Plain python.

        DATASET/index.json                  this file
                tokenizer.json              the tokenizer, to encode and decode text later
                train-000000-000.arrow      Arrow IPC: a column "tokens", for conversations one "counts" too; the numbers
                                            are the block and its shard
                eval-000000-000.arrow
                train-ends.bin              the position of each document's end token in the split, as little-endian int64
                eval-ends.bin
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

import xxhash

from raydist.data.chat_template import ChatFormat, LossOn
from raydist.errors import DataError
from raydist.parsing import DAMAGED, NAME, parse_json
from raydist.storage import Storage

T = TypeVar("T", "Shard", "Ends", "SplitIndex", "TokenizerIndex", "DatasetIndex")
INDEX, TOKENIZER = "index.json", "tokenizer.json"
SPLITS: tuple[Split, Split] = ("train", "eval")
Split = Literal["train", "eval"]
COLUMN, COUNTS = "tokens", "counts"
"""The columns of a shard. Only conversations have the second one: 1 if a token counts in the loss, where it is a target."""
_FORMAT, _VERSION = "raydist-tokens", 1
_MOST_BYTES = 1 << 30
FILE_NAME = re.compile(r"(train|eval)-(\d{6}-\d{3,9}\.arrow|ends\.bin)")
BLOCK, DIGITS = 1 << 20, 16
_DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}
"""The types of a token, and how many ids each can tell apart."""
_HEX = re.compile(r"[0-9a-f]*")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens: its name, number of tokens, size in bytes, and xxh3-128 in hex.

    `blocks`: `block_hashes` of its bytes, which ranks check while they read. None: of a version of raydist without them.
    """

    file: str
    tokens: int
    bytes: int
    hash: str
    blocks: str | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The file of the documents' ends: its name, size in bytes (8 a document), and xxh3-128 in hex."""

    file: str
    bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """One split: tokens (end tokens included), documents, bytes of their text, and the shards in order.

    `ends`: None if a version of raydist prepared the dataset that stored no ends of documents.
    """

    tokens: int
    documents: int
    bytes: int
    shards: tuple[Shard, ...]
    ends: Ends | None = None


@dataclass(frozen=True, slots=True)
class TokenizerIndex:
    """The requested name, the vocabulary size, the end-of-document id, and the xxh3-128 of tokenizer.json."""

    name: str
    vocab_size: int
    end: int
    hash: str


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """A prepared dataset.

    fingerprint     a hash of the shards' hashes and the tokenizer; key of the sample order
    dtype           "uint16" or "uint32": type of a token in a shard
    unigram_nats    entropy of the eval split's bytes: the loss of a model that knows only their frequencies
    sources         as requested; `source_fingerprint` is a hash of their documents' content
    chat            how conversations became text, if it has any: then each token says whether it counts
    request         a hash of the request: sources (names and sizes), tokenizer, fractions, shard size
    """

    fingerprint: str
    dtype: str
    tokenizer: TokenizerIndex
    train: SplitIndex
    eval: SplitIndex
    unigram_nats: float
    sources: tuple[str, ...]
    source_fingerprint: str
    request: str
    eval_fraction: float
    column: str
    chat: ChatFormat | None = None

    def split(self, name: Split) -> SplitIndex:
        """The split of that name."""
        return self.train if name == "train" else self.eval

    @property
    def has_block_hashes(self) -> bool:
        """Whether ranks notice a changed byte while they train."""
        return all(shard.blocks is not None for shard in (*self.train.shards, *self.eval.shards))

    def files(self) -> tuple[Shard | Ends, ...]:
        """All files but the tokenizer and the index: shards, train before eval, then the ends."""
        ends = (split.ends for split in (self.train, self.eval) if split.ends is not None)
        return (*self.train.shards, *self.eval.shards, *ends)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; without `chat` and `ends` where there are none, so that the hash of an older index stays."""
        made = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        if self.chat is None:
            del made["chat"]
        for name in SPLITS:
            if made[name]["ends"] is None:
                del made[name]["ends"]
            for shard in made[name]["shards"]:
                if shard["blocks"] is None:
                    del shard["blocks"]
        return made

    def to_bytes(self) -> bytes:
        """The only serialisation of an index: verify compares it byte for byte."""
        return (json.dumps({**self.to_dict(), "hash": self._hash()}, indent=1, ensure_ascii=False) + "\n").encode()

    def _hash(self) -> str:
        """A hash of the index itself, which no other file has."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_dict(), sort_keys=True).encode())

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DatasetIndex:
        """The inverse of `to_dict`. Raises one of DAMAGED for an invalid dict."""
        given = {k: v for k, v in raw.items() if k not in ("format", "version", "hash")}
        for name in SPLITS:
            split = dict(given[name])
            ends = _checked(Ends(**split["ends"])) if "ends" in split else None
            shards = tuple(_checked(Shard(**s)) for s in split["shards"])
            given[name] = _checked(SplitIndex(**{**split, "shards": shards, "ends": ends}))
        given["tokenizer"] = _checked(TokenizerIndex(**given["tokenizer"]))
        if "chat" in given:
            given["chat"] = ChatFormat(**given["chat"])
        if not isinstance(given["sources"], list | tuple):
            raise ValueError("sources is no list")
        made = _checked(cls(**{**given, "sources": tuple(given["sources"])}))
        made._check_values()
        made._check_names()
        return made

    def _check_values(self) -> None:
        """Raises ValueError for what would be wrong only where it is used: who wrote an index may have computed its hash, too."""
        token = self.tokenizer
        if self.dtype not in _DTYPES:
            raise ValueError(f"the type of its tokens is {self.dtype!r:.40}")
        if not 0 <= token.end < token.vocab_size <= _DTYPES[self.dtype]:
            raise ValueError(
                f"{token.vocab_size} ids, stored as {self.dtype}, and {token.end} as the end of a document"
            )
        if not all(isinstance(source, str) for source in self.sources):
            raise ValueError("the name of a source is no text")
        for split in (self.train, self.eval):
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise ValueError(f"{split.tokens} tokens are not those of its shards")
            if split.ends is not None and split.ends.bytes != 8 * split.documents:
                raise ValueError(f"the ends of {split.documents} documents do not have {split.ends.bytes} bytes")
        if (chat := self.chat) is not None:
            words = [*chat.tokens, *chat.tokens.values(), *([] if chat.template is None else [chat.template])]
            if chat.loss_on not in get_args(LossOn) or not all(isinstance(word, str) for word in words):
                raise ValueError("the format of its conversations is none")

    def _check_names(self) -> None:
        """The cache has a folder named by the fingerprint, with files named as the shards. Raises ValueError."""
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise ValueError(f"the fingerprint {self.fingerprint!r} is not 32 hexadecimal digits")
        if self.fingerprint != fingerprint(self.train, self.eval, self.tokenizer):
            raise ValueError("the fingerprint is not that of its shards and tokenizer")
        for one in self.files():
            if not FILE_NAME.fullmatch(one.file):
                raise ValueError(f"the name of a file is {one.file!r}")
            if isinstance(one, Shard) and one.blocks is not None and not _fit(one.blocks, one.bytes):
                raise ValueError(f"the hashes of the blocks of {one.file} are not one for each {BLOCK >> 20} MiB")


_TYPES: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
}


def _checked(made: T) -> T:
    """Returns the dataclass if its texts and numbers have the declared types. Raises ValueError."""
    for field in fields(made):
        value = getattr(made, field.name)
        if not _TYPES.get(str(field.type), lambda value: True)(value):
            raise ValueError(f"{field.name} is {value!r:.{NAME}}")
    return made


def _fit(hashes: str, size: int) -> bool:
    return _HEX.fullmatch(hashes) is not None and len(hashes) == DIGITS * -(-size // BLOCK)


def block_hashes(data: memoryview) -> str:
    """The xxh3-64 of each BLOCK of bytes, DIGITS hexadecimal digits each: 16 bytes of the index for a MiB of tokens."""
    return "".join(xxhash.xxh3_64_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def fingerprint(train: SplitIndex, evaluation: SplitIndex, tokenizer: TokenizerIndex) -> str:
    """xxh3-128 in hex over the hashes of all shards and the tokenizer."""
    hashes = [[s.hash for s in split.shards] for split in (train, evaluation)]
    return xxhash.xxh3_128_hexdigest(json.dumps([hashes, tokenizer.hash, tokenizer.vocab_size, tokenizer.end]).encode())


def read(storage: Storage) -> DatasetIndex:
    """The index of the dataset in that folder. Raises DataError if it is missing or cannot be read."""
    try:
        raw = parse_json(storage.read(INDEX), _MOST_BYTES)
        if raw["format"] != _FORMAT or raw["version"] != _VERSION:
            raise DataError(
                f"{storage.uri}/{INDEX}: format {raw['format']} {raw['version']}, not {_FORMAT} {_VERSION}",
                "prepare it again with this version of raydist",
            )
        index = DatasetIndex.from_dict(raw)
    except FileNotFoundError:
        raise DataError(
            f"{storage.uri} is not a prepared dataset: it has no {INDEX}",
            "`raydist data prepare SRC --out DIR` creates one, or finishes an interrupted one",
        ) from None
    except DAMAGED as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{storage.uri}/{INDEX} is damaged: {error}", "delete it and prepare it again") from error
    if raw.get("hash") != index._hash():
        raise DataError(f"{storage.uri}/{INDEX} is damaged: its hash differs", "delete it and prepare it again")
    return index
