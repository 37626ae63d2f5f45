"""Every tokenizer keeps the contract in data/tokenizers/__init__.py."""

from __future__ import annotations

import numpy as np
import pytest

from raydist import registry
from raydist.data import tokenizers

NAMES = registry.names("tokenizer")
TEXT = ["the rank and the shard", "größe, naïve λ\n\n", "", "日本 \x00 🙂", "the loss <|endoftext|> is not the end"]


def made(name: str) -> tokenizers.Tokenizer:
    """Trained on TEXT if it needs training, with 300 ids."""
    trained = hasattr(registry.load("tokenizer", name), "vocabulary")
    return tokenizers.train(f"{name}:300", iter(TEXT)) if trained else tokenizers.load(name)


@pytest.mark.parametrize("name", NAMES)
def test_text_comes_back(name: str) -> None:
    """Ids are in the vocabulary, none is the end token, and they decode to the text; also after loading the tokenizer from its
    bytes."""
    tokenizer = made(name)
    stored = tokenizers.from_bytes(tokenizer.name, tokenizer.to_bytes())
    assert (stored.name, stored.vocab_size, stored.end) == (tokenizer.name, tokenizer.vocab_size, tokenizer.end)
    assert tokenizer.end < tokenizer.vocab_size
    for text, ids, again in zip(TEXT, tokenizer.encode(TEXT), stored.encode(TEXT), strict=True):
        assert np.array_equal(ids, again)
        assert all(i < tokenizer.vocab_size and i != tokenizer.end for i in ids)
        assert tokenizer.decode([*ids, tokenizer.end]) == text


@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_its_name_is_written(name: str) -> None:
    """`usage` is in the error for a name that does not exist."""
    assert name in registry.load("tokenizer", name).usage
