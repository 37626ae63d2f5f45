"""Tokenizers: encoding is reversible, training is deterministic, and no text encodes to the end token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.data import tokenizers
from raydist.errors import DataError

TEXT = [
    "the rank and the shard",
    "größe, naïve λ\n\n",
    "a" * 50,
    "the loss of the rank <|endoftext|> is not the end",
]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=5))
def test_bytes_round_trip(texts: list[str]) -> None:
    """Any text is decoded to itself; ids are its bytes; the end token is no byte and decodes to nothing."""
    tokenizer = tokenizers.load("bytes")
    encoded = tokenizer.encode(texts)
    assert [e.tolist() for e in encoded] == [list(t.encode()) for t in texts]
    assert [tokenizer.decode([*e, tokenizer.end]) for e in encoded] == texts
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)


def test_bpe_round_trips_and_is_no_larger_than_asked() -> None:
    """Text with other letters than the training text is decoded to itself too; text that spells the end token does not encode to
    it."""
    tokenizer = tokenizers.train("bpe:290", iter(TEXT))
    assert tokenizer.vocab_size == 290
    for text in [*TEXT, "日本 \x00 🙂"]:
        (ids,) = tokenizer.encode([text])
        assert tokenizer.end not in ids
        assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert len(tokenizer.encode(["the rank"])[0]) < len("the rank")


def test_a_stored_tokenizer_is_the_same(tmp_path: Path) -> None:
    """A tokenizer loaded from its bytes or from a path encodes as the original does."""
    tokenizer = tokenizers.train("bpe:290", iter(TEXT))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    for other in (
        tokenizers.from_bytes("bpe:290", tokenizer.to_bytes()),
        tokenizers.load(str(tmp_path / "tokenizer.json")),
    ):
        assert (other.vocab_size, other.end) == (tokenizer.vocab_size, tokenizer.end)
        for a, b in zip(other.encode(TEXT), tokenizer.encode(TEXT), strict=True):
            assert np.array_equal(a, b)
    assert tokenizers.from_bytes("bytes", tokenizers.load("bytes").to_bytes()).vocab_size == 257


def test_bpe_training_is_deterministic() -> None:
    """Two processes with different hash seeds and numbers of threads train the same tokenizer, byte for byte."""
    script = (
        "import sys, random; from raydist.data import tokenizers; r = random.Random(1)\n"
        "texts = [' '.join(''.join(r.choices('abcdef', k=r.randint(1, 7))) for _ in range(400)) for _ in range(40)]\n"
        "sys.stdout.buffer.write(tokenizers.train('bpe:700', iter(texts)).to_bytes())"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"))
    ]
    assert tokenizers.from_bytes("bpe:700", made[0]).vocab_size == 700
    assert made[0] == made[1]


def test_a_tokenizer_without_an_end_gets_one(tmp_path: Path) -> None:
    """A tokenizer.json without a special token of a usual name gets one more id, the end token."""
    import tokenizers as library

    words = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = tokenizers.load(str(tmp_path / "words.json"))
    assert (tokenizer.vocab_size, tokenizer.end) == (4, 3)
    assert tokenizer.encode(["a b c"])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["bpe:", "bpe:12", "bpe:4194305", "bpe:999999999", "bpe:many", "no/such/tokenizer.json", "byte"]
)
def test_a_wrong_name_says_what_there_is(name: str) -> None:
    """A wrong name raises DataError with a hint that gives a valid name."""
    with pytest.raises(DataError) as caught:
        tokenizers.load(name)
    assert name in caught.value.message
    assert "bpe:8192" in caught.value.hint


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    """JSON that is no tokenizer raises DataError, not the library's bare Exception."""
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json"):
        tokenizers.load(str(tmp_path / "x.json"))
