"""One token a byte: ids 0 to 255 are the bytes, 256 ends a document. Any UTF-8, nothing to train.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from raydist.data.tokenizers._library import TokenArray
from raydist.errors import DataError

FILE = b'{"type": "bytes"}\n'


class Tokenizer:
    """See the contract in `__init__`."""

    usage = '"bytes"'
    name, vocab_size, end = "bytes", 257, 256

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, uint16, without an end."""
        raw = [d.encode() if isinstance(d, str) else d for d in documents]
        return [np.frombuffer(d, dtype=np.uint8).astype(np.uint16) for d in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def to_bytes(self) -> bytes:
        """A constant: it has no state."""
        return FILE

    @classmethod
    def make(cls, name: str) -> Tokenizer:
        """Raises DataError for a name with an argument."""
        if name != cls.name:
            raise DataError(f"tokenizer {name!r}: {cls.name} takes no argument", "write bytes, or bpe:8192")
        return cls()

    @classmethod
    def from_bytes(cls, name: str, raw: bytes) -> Tokenizer:
        """There is one only."""
        return cls()
