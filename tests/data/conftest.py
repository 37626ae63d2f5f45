"""A small corpus of text files, and a dataset prepared from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from raydist.data.dataset import TokenDataset
from raydist.data.prepare import prepare


def write_corpus(folder: Path, files: int = 12, lines: int = 60) -> list[bytes]:
    """Writes text files with a few non-ASCII letters; returns the lines of all files, in order."""
    folder.mkdir(parents=True)
    words = ["loss", "rank", "shard", "größe", "naïve", "token", "the", "of", "a", "λ"]
    choose = random.Random(7)
    written = []
    for i in range(files):
        text = [f"{i} {j} {' '.join(choose.choices(words, k=12))}\n".encode() for j in range(lines)]
        (folder / f"{i:03d}.txt").write_bytes(b"".join(text))
        written += text
    return written


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files; no test may change it."""
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """That corpus, tokenized to bytes, in several blocks and many small shards."""
    out = tmp_path_factory.mktemp("dataset") / "tokens"
    prepare([str(corpus)], str(out), eval_fraction=0.2, block_bytes=9_000, shard_tokens=1_000)
    return TokenDataset(out)
