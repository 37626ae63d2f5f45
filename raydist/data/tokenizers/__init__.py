"""The tokenizers: one file each, found by the name in `data.tokenizer`. This docstring is their contract.

Runs anywhere. `tokenizers` is imported only where a tokenizer needs it.

    bytes                      raydist/data/tokenizers/bytes.py
    bpe:VOCAB                  raydist/data/tokenizers/bpe.py; the file's name, and an argument for it
    package.module:attribute   your own
    PATH/tokenizer.json        a trained one, of any kind, as the `tokenizers` and `transformers` libraries save it

A tokenizer is a file here, or your own `package.module:attribute`, and has a class `Tokenizer` with the methods of the protocol
below, and

    make(name) -> Tokenizer              class method; `name` is all of `data.tokenizer`. Raises DataError
    from_bytes(name, raw) -> Tokenizer   class method; `raw` is what `to_bytes` gave. A dataset stores it as tokenizer.json

One that is trained on the corpus has two more class methods:

    vocabulary(name) -> int              how many ids it will have. Raises DataError
    train(name, texts) -> Tokenizer      from texts of the train split. The same texts must give the same tokenizer

A built-in one has `usage`: how its name is written, for errors. Tokenizers have no options: a dataset is identified by the name and
by `to_bytes`. Text that spells a special token ("<|endoftext|>") is encoded as text: a document cannot forge the end of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from raydist import registry
from raydist.data.tokenizers import bytes as _bytes
from raydist.data.tokenizers._library import END, Library, TokenArray
from raydist.errors import DataError, ExtensionNotFound

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


def from_bytes(name: str, raw: bytes) -> Tokenizer:
    """The tokenizer of a prepared dataset, from its tokenizer.json. Raises DataError."""
    found = _class(name)
    if found is None:
        return Bytes() if raw == _bytes.FILE else Library(name, raw)
    return cast(Tokenizer, found.from_bytes(name, raw))


def load(name: str) -> Tokenizer:
    """A tokenizer that needs no training, by its name or by the path of a tokenizer.json. Raises DataError."""
    found = _class(name)
    if found is not None:
        return cast(Tokenizer, found.make(name))
    try:
        return Library(name, Path(name).expanduser().read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        usages = ", ".join(registry.load("tokenizer", each).usage for each in registry.names("tokenizer"))
        raise DataError(
            f"tokenizer {name!r}: {reason}",
            f"there are: {usages}, the path of a tokenizer.json, or package.module:attribute of your own",
        ) from error


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


__all__ = ["END", "Bytes", "Library", "TokenArray", "Tokenizer", "from_bytes", "load", "train", "vocabulary"]
