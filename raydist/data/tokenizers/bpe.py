"""A byte-level BPE, trained on the corpus: `bpe:VOCAB`, where VOCAB is the number of its ids.

Runs anywhere. `tokenizers` is imported when one is trained or loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raydist.data.tokenizers._library import END, Library
from raydist.errors import DataError

_MOST = 1 << 22
"""The library takes the memory for the whole vocabulary at once, and ends the process where there is not enough."""


class Tokenizer(Library):
    """See the contract in `__init__`."""

    usage = '"bpe:VOCAB" such as bpe:8192'

    @staticmethod
    def vocabulary(name: str) -> int:
        """VOCAB. Raises DataError where it is no number, too small or too large."""
        size = int(name[4:]) if re.fullmatch(r"\d{1,9}", name[4:]) else 0
        if not 257 <= size <= _MOST:
            raise DataError(
                f"tokenizer {name!r}: the vocabulary must be a number from 257 to {_MOST:,}", "try bpe:8192"
            )
        return size

    @classmethod
    def make(cls, name: str) -> Tokenizer:
        """Raises DataError: it has to be trained."""
        cls.vocabulary(name)
        raise DataError(f"tokenizer {name!r} is trained with the corpus", "prepare a dataset with it, and load that")

    @classmethod
    def from_bytes(cls, name: str, raw: bytes) -> Tokenizer:
        """From the JSON that `to_bytes` gives."""
        return cls(name, raw)

    @classmethod
    def train(cls, name: str, texts: Iterator[str]) -> Tokenizer:
        """A BPE of the vocabulary that `name` gives. The same texts give the same tokenizer.

        Byte-level, with the pattern of GPT-2 for words; 256 ids for the bytes and one for the end come first.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        size = cls.vocabulary(name)
        inner: Any = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        inner.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=size,
                special_tokens=[END],
                initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                show_progress=False,
            ),
        )
        return cls(name, inner.to_str(pretty=False).encode())
