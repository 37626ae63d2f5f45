"""Tokenizers of the `tokenizers` library, from their JSON.

Runs anywhere. `tokenizers` is imported when one is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from raydist.errors import DataError

TokenArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
END = "<|endoftext|>"
_KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_text>", "[EOS]", "[SEP]")


class Library:
    """A tokenizer of the `tokenizers` library, from its JSON. Raises DataError if that is none.

    The end is the first of the usual special tokens that it has; else one is added, which makes the
    vocabulary larger by one.
    """

    def __init__(self, name: str, raw: bytes) -> None:
        import tokenizers

        self.name: str = name
        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # The library raises a bare Exception.
            raise DataError(
                f"tokenizer {name}: {error}", "give a tokenizer.json of the `tokenizers` library"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        ends = [t for t in _KNOWN_ENDS if self._inner.token_to_id(t) is not None]
        if not ends:
            self._inner.add_special_tokens([END])
        found: int | None = self._inner.token_to_id(ends[0] if ends else END)
        assert found is not None
        self.end: int = found
        # Ids may have gaps: the largest one decides.
        self.vocab_size: int = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, uint32, without an end; the library uses all cores."""
        texts = [d if isinstance(d, str) else d.decode() for d in documents]
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of its special tokens."""
        return tuple(t.content for t in self._inner.get_added_tokens_decoder().values() if t.special)

    @cached_property
    def _reading_special(self) -> Any:
        import tokenizers

        other = tokenizers.Tokenizer.from_str(self._inner.to_str())
        other.encode_special_tokens = False
        return other

    def encode_with_starts(self, texts: Sequence[str], special: bool) -> list[tuple[TokenArray, npt.NDArray[np.int64]]]:
        """Token ids of each text, and the characters at which they begin. `special`: special tokens in it are read as such."""
        inner = self._reading_special if special else self._inner
        return [
            (np.array(e.ids, dtype=np.uint32), np.array([start for start, _ in e.offsets], dtype=np.int64))
            for e in inner.encode_batch(list(texts), add_special_tokens=False)
        ]

    def token_id(self, text: str) -> int | None:
        """The id of a token; None if there is none."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids."""
        return str(self._inner.decode([int(i) for i in ids if int(i) != self.end], skip_special_tokens=False))

    def to_bytes(self) -> bytes:
        """The library's own JSON."""
        return str(self._inner.to_str(pretty=False)).encode()
