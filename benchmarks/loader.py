"""The data loader alone: tokens/s compared with a plain memory copy, and the time to resume at any sample.

    python benchmarks/loader.py [--rounds 9] [--megabytes 128]

The corpus is the source of the standard library, repeated, as bytes in memory-mapped shards in the page cache. A measured step
is all CPU work of the loader's thread: the permutation, gathering random windows, the conversion to int64, tokens and targets, the
hash of the ids. The reference is a numpy copy of the same two int64 arrays into newly allocated ones: the minimum cost of a batch.
Both use one thread; each round measures everything once, one after the other.

The resume time is from a cursor to the first batch at the consumer, with new objects and including the thread start, in an epoch
of 10^11 samples (whose ids are mapped onto the corpus by modulo).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import write

from raydist.data import sources
from raydist.data.batches import Batches, Cursor, equal_parts, make_step
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.loader import Loader
from raydist.data.order import IntArray
from raydist.data.prepare import prepare

SHAPES = ((128, 32), (1024, 32), (2048, 64), (8192, 16))
"""Context length and samples per batch."""

HUGE = 10**11
SECONDS = 0.25


def repeat(call: Callable[[], Any]) -> float:
    """Seconds of one call, averaged over about SECONDS."""
    count, begun = 0, time.perf_counter()
    while True:
        call()
        count += 1
        if (spent := time.perf_counter() - begun) >= SECONDS:
            return spent / count


def measure(windows: Windows, size: int, pack: bool) -> tuple[float, float]:
    """Tokens/s of the loader and of the copy."""
    batches = Batches(len(windows), size, 1, windows.split.name)
    cursor = Cursor()

    def step() -> None:
        nonlocal cursor
        after = batches.after(cursor)
        ids = batches.ids(cursor)
        make_step(windows, cursor, after, ids, rank=0, world=1, divide=equal_parts(size), pack=pack)
        cursor = after

    batch = windows.batch(batches.ids(Cursor()))[:2]
    tokens = size * windows.context
    return tokens / repeat(step), tokens / repeat(lambda: [a.copy() for a in batch])


class Folded:
    """Windows that accept ids of any size."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def row_lengths(self, ids: IntArray) -> None:
        """As Windows.row_lengths."""

    def batch(self, ids: IntArray, pack: bool = False) -> Any:
        """As Windows.batch."""
        return self.windows.batch(ids % len(self.windows), pack)


def resume(windows: Windows, sample: int) -> float:
    """Milliseconds from a cursor to the first batch."""
    begun = time.perf_counter()
    batches = Batches(HUGE, 32, 1, "f")
    with Loader(Folded(windows), batches, Cursor(3, sample), divide=equal_parts(8)) as loader:
        next(loader)
        return (time.perf_counter() - begun) * 1e3


def main(rounds: int, megabytes: int) -> None:
    """Prepares, measures, writes results/loader.json."""
    with tempfile.TemporaryDirectory() as folder:
        text = b"".join(Path(f.path).read_bytes() for f in sources.find(sources.STDLIB))
        repeats = -(-megabytes * 1_000_000 // len(text))
        (Path(folder) / "text.txt").write_bytes(text * repeats)
        begun = time.perf_counter()
        index = prepare([f"{folder}/text.txt"], f"{folder}/tokens")
        prepared = len(text) * repeats / 1e6 / (time.perf_counter() - begun)
        split = TokenDataset(f"{folder}/tokens").split("train")
        split.read(0, len(split)).sum()
        figures: dict[str, list[tuple[float, float]]] = {}
        positions: dict[int, list[float]] = {0: [], 10**9: [], 9 * 10**10: []}
        for round_ in range(rounds):
            for context, size in SHAPES:
                for pack in (False, True):
                    name = f"context {context}, batch {size}{', packed' if pack else ''}"
                    figures.setdefault(name, []).append(measure(Windows(split, context), size, pack))
            for sample, times in positions.items():
                for _ in range(5):
                    times.append(resume(Windows(split, 1024), sample))
            print(f"round {round_ + 1} of {rounds}", flush=True)
        batches = {
            name: {
                "tokens_per_second": round(statistics.median(a for a, _ in pairs)),
                "copy_tokens_per_second": round(statistics.median(b for _, b in pairs)),
                "ratio": round(statistics.median(a / b for a, b in pairs), 3),
            }
            for name, pairs in figures.items()
        }
        resumed = {f"{sample:.0e}": round(statistics.median(times), 3) for sample, times in positions.items()}
        result = {
            "rounds": rounds,
            "corpus_tokens": index.train.tokens,
            "batches": batches,
            "resume_ms_at_sample": resumed,
            "prepare_megabytes_per_second": round(prepared, 1),
        }
        for name, figure in batches.items():
            print(f"{name:<32} {figure['tokens_per_second'] / 1e6:8.1f} M tokens/s, {figure['ratio']:.2f} of a copy")
        print(f"resume, ms at sample: {resumed}; prepared {prepared:.0f} MB/s")
        print(write("loader", result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=128)
    main(**vars(parser.parse_args()))
