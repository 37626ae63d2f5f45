"""The tokenizers: one file each, found by the name in `data.tokenizer`. This docstring is their contract.

Runs anywhere. `tokenizers` is imported only where a tokenizer needs it.

    bytes                      raydist/data/tokenizers/bytes.py
    bpe:VOCAB                  raydist/data/tokenizers/bpe.py; the file's name, and an argument for it
    package.module:attribute   your own
    PATH/tokenizer.json        or its URI: a trained one, of any kind, as the `tokenizers` and `transformers` libraries save it

A tokenizer is a file here, or your own `package.module:attribute`, and has a class `Tokenizer` with the methods of the protocol
below, and

    make(name) -> Tokenizer              class method; `name` is all of `data.tokenizer`. Raises DataError
    from_bytes(name, raw) -> Tokenizer   class method; `raw` is what `to_bytes` gave. A dataset stores it as tokenizer.json

One that is trained on the corpus has two more class methods:

    vocabulary(name) -> int              how many ids it will have. Raises DataError
    train(name, texts) -> Tokenizer      from texts of the train split. The same texts must give the same tokenizer

One that knows where its tokens begin in a text, and reads special tokens where a chat template wrote the text, also has

    encode_with_starts(texts, special) -> [(ids, starts)]  starts in characters; `special`: special tokens in texts are read as such
    special -> Sequence[str]                               texts of its special tokens: messages of conversations may not spell them

A built-in one has `usage`: how its name is written, for errors. Tokenizers have no options: a dataset is identified by the name and
by `to_bytes`. Text that spells a special token ("<|endoftext|>") is encoded as text: a document cannot forge the end of one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from raydist import registry, remote_filesystem
from raydist.data.chat_template import Rendered
from raydist.data.tokenizers import bytes as _bytes
from raydist.data.tokenizers._library import END, Library, TokenArray
from raydist.errors import DataError, ExtensionNotFound
from raydist.parsing import JSON_BYTES, read_file
from raydist.paths import local_path
from raydist.redact import redact
from raydist.storage import Storage

Bytes = _bytes.Tokenizer


class Tokenizer(Protocol):
    """Text to token ids and back. Documents are UTF-8, which the caller has checked."""

    @property
    def name(self) -> str:
        """As in `data.tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size), the end of a document included."""

    @property
    def end(self) -> int:
        """The id that ends a document; `encode` never yields it."""

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, without an end."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids; ends are left out, bytes that are not UTF-8 become U+FFFD."""

    def to_bytes(self) -> bytes:
        """The file that `from_bytes` reads."""


def vocabulary(name: str) -> int | None:
    """The number of ids of a tokenizer that is trained on the corpus; None for other names. Raises DataError."""
    counted = getattr(_class(name), "vocabulary", None)
    return None if counted is None else int(counted(name))


def train(name: str, texts: Iterator[str]) -> Tokenizer:
    """The tokenizer that `name` asks for, trained on these texts."""
    return cast(Tokenizer, _class(name).train(name, texts))


def encode_spans(tokenizer: Tokenizer, texts: Sequence[Rendered]) -> list[tuple[TokenArray, npt.NDArray[np.bool_]]]:
    """Of each text the token ids, without an end, and whether each counts: where it begins in one of the text's spans.

    A tokenizer with `encode_with_starts` tells where tokens begin, and reads special tokens in texts that a template wrote. Of
    another one each stretch between the borders of spans is encoded by itself.
    """
    with_starts = getattr(tokenizer, "encode_with_starts", None)
    if with_starts is None:
        return [_by_stretches(tokenizer, text) for text in texts]
    made: dict[int, tuple[TokenArray, npt.NDArray[np.bool_]]] = {}
    for special in (False, True):
        chosen = [i for i, text in enumerate(texts) if text.special == special]
        encoded = with_starts([texts[i].text for i in chosen], special)
        for i, (ids, starts) in zip(chosen, encoded, strict=True):
            counts = np.zeros(len(ids), dtype=np.bool_)
            for first, last in texts[i].spans:
                counts |= (starts >= first) & (starts < last)
            made[i] = ids, counts
    return [made[i] for i in range(len(texts))]


def _by_stretches(tokenizer: Tokenizer, text: Rendered) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
    borders = sorted({0, len(text.text), *(at for span in text.spans for at in span)})
    stretches = list(pairwise(borders))
    parts = tokenizer.encode([text.text[a:b] for a, b in stretches])
    inside = [any(first <= a < last for first, last in text.spans) for a, _ in stretches]
    return cast("TokenArray", np.concatenate(parts)), np.repeat(inside, [len(part) for part in parts])


def from_bytes(name: str, raw: bytes) -> Tokenizer:
    """The tokenizer of a prepared dataset, from its tokenizer.json. Raises DataError."""
    found = _class(name)
    if found is None:
        return Bytes() if raw == _bytes.FILE else Library(name, raw)
    return cast(Tokenizer, found.from_bytes(name, raw))


def load(name: str) -> Tokenizer:
    """A tokenizer that needs no training, by its name or by the path or URI of a tokenizer.json. Raises DataError."""
    found = _class(name)
    if found is not None:
        return cast(Tokenizer, found.make(name))
    try:
        return Library(redact(name), _bytes_of(name))
    except OSError as error:
        reason = error.strerror or remote_filesystem.reason(error)
        if "://" in name:
            raise DataError(f"tokenizer {name}: {reason}", remote_filesystem.remedy(name, "check the URI")) from error
        usages = ", ".join(registry.load("tokenizer", each).usage for each in registry.names("tokenizer"))
        raise DataError(
            f"tokenizer {name!r}: {reason}",
            f"there are: {usages}, the path or URI of a tokenizer.json, or package.module:attribute of your own",
        ) from error


def _bytes_of(name: str) -> bytes:
    """Of a tokenizer.json. Raises OSError."""
    if "://" not in name:
        try:
            return read_file(local_path(name), JSON_BYTES)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
    place = Storage(name)
    return place.above().read(PurePosixPath(place.root).name)


def _class(name: str) -> Any:
    """The class of a built-in or an own tokenizer; None for a path. Raises DataError."""
    kind = name.partition(":")[0]
    if kind in registry.names("tokenizer"):
        return registry.load("tokenizer", kind)
    if not registry.is_own(name) or Path(name).exists():
        return None
    try:
        return registry.load("tokenizer", name)
    except ExtensionNotFound as error:
        raise DataError(error.message, error.hint) from error


__all__ = [
    "END",
    "Bytes",
    "Library",
    "TokenArray",
    "Tokenizer",
    "encode_spans",
    "from_bytes",
    "load",
    "train",
    "vocabulary",
]
