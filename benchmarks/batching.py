"""Padding and tokens/s of batches by tokens, beside fixed batches with padding and beside packing, on documents with a long tail.

    python benchmarks/batching.py [--rounds 8] [--contexts 2048 8192] [--max-tokens 16384] [--padding-only]

The documents are the functions and classes of Python's standard library, as bytes. `padding` is counted exactly, without timing,
for each context: the share of padding in all tokens that are computed, over the first 50 global batches of an epoch or all of it,
by the micro-batches that a replica has of a global batch. `fixed` has as many random documents a micro-batch as fit if all have the
longest length, padded to the longest of them or to the context; `by tokens` is data.batching, with any padded length or with 8.
`waits` is the part of the replicas' time, if it is in proportion to padded tokens, in which they wait for the fullest one. Packing
has no padding; `cut` is the share of documents that lie in several windows.

`speed`, with the first context: one process trains a small GPT with AdamW, on a GPU in bf16 if there is one, else on one thread in
fp32. Each round runs one global batch of each way, in a new order; tokens are those that count in the loss. `over_fixed`: median of
the rounds' ratios to `fixed, longest`. Before, each way runs one global batch.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write

from raydist.data.batches import Batches, Cursor, Divide, MicroBatch, equal_parts, make_step
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.micro_batches import Shapes, few_lengths
from raydist.data.padding import padding
from raydist.data.prepare import prepare
from raydist.data.sequences import Sequences
from raydist.data.token_batches import TokenBatches
from raydist.spec import JobSpec
from raydist.worker.model import gpt
from raydist.worker.step import loss_sum

STEPS, MULTIPLE, FEW = 50, 8, 8
REPLICAS = (1, 8)
PER_REPLICA = (1, 2, 4, 16)
"""Micro-batches of max_tokens tokens that one replica has of a global batch."""


def documents() -> list[str]:
    """The source of each function and class at the top level of the standard library's modules."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"test", "tests", "site-packages", "__pycache__"} & set(path.parts):
            continue
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (SyntaxError, ValueError, UnicodeDecodeError):
            continue
        nodes = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
        found |= dict.fromkeys(filter(None, (ast.get_source_segment(text, node) for node in nodes)))
    return list(found)


def prepared(folder: Path) -> TokenDataset:
    """The documents as bytes."""
    lines = (json.dumps({"text": text}) + "\n" for text in documents())
    (folder / "all.jsonl").write_text("".join(lines))
    prepare([str(folder / "all.jsonl")], str(folder / "tokens"), eval_fraction=0.01)
    return TokenDataset(folder / "tokens")


def with_shapes(dataset: TokenDataset, context: int, shapes: Shapes) -> Sequences:
    """The documents in these shapes."""
    return Sequences(dataset.split("train"), context, "split", shapes)


def by_tokens(samples: Sequences, size: int) -> TokenBatches:
    """Global batches of `size` tokens."""
    return TokenBatches(len(samples), samples.lengths, samples.tokens, size, 0, "benchmark")


def fixed_share(samples: Sequences, batches: Batches, rows: int, to: int | None) -> float:
    """The share of padding with micro-batches of `rows` random documents, padded to their longest one or to `to`."""
    cursor, tokens, padded = Cursor(), 0, 0
    for _ in range(min(STEPS, batches.steps_per_epoch)):
        lengths = samples.lengths(batches.ids(cursor))
        for at in range(0, len(lengths), rows):
            part = lengths[at : at + rows]
            tokens += int(part.sum())
            padded += len(part) * (to or int(samples.shapes.padded(part).max()))
        cursor = batches.after(cursor)
    return 1 - tokens / padded


def shares(dataset: TokenDataset, context: int, max_tokens: int) -> dict[str, Any]:
    """The shares of padding."""
    any_length = with_shapes(dataset, context, Shapes(max_tokens, context, None, MULTIPLE))
    few = few_lengths(any_length.histogram, FEW, MULTIPLE)
    few_shapes = with_shapes(dataset, context, Shapes(max_tokens, context, None, MULTIPLE, few))
    rows = max_tokens // context
    large = by_tokens(any_length, 16 * max_tokens)
    result: dict[str, Any] = {
        "fixed, longest": fixed_share(any_length, large, rows, None),
        "fixed, context": fixed_share(any_length, large, rows, context),
        "lengths": list(few),
        "shapes": len(few_shapes.shapes.all()),
        "by tokens": [],
    }
    for replicas in REPLICAS:
        for count in PER_REPLICA:
            size = count * replicas * max_tokens
            one = padding(any_length, by_tokens(any_length, size), replicas, STEPS)
            other = padding(few_shapes, by_tokens(few_shapes, size), replicas, STEPS)
            result["by tokens"].append(
                {
                    "replicas": replicas,
                    "micro_batches_per_replica": count,
                    "padding": one.share,
                    "waits": one.waits,
                    "padding_8_lengths": other.share,
                    "waits_8_lengths": other.waits,
                }
            )
    split = dataset.split("train")
    ends = split.ends()
    first = np.append(0, ends[:-1] + 1)
    result["packed"] = {"padding": 0.0, "cut": float(np.mean(first // context != ends // context))}
    return result


class Way:
    """One way to make batches. Each call trains one global batch; returns its counted tokens and the seconds."""

    def __init__(self, samples: Any, batches: Batches, divide: Divide, pack: bool, trainer: Trainer) -> None:
        self.samples, self.batches, self.divide, self.pack, self.trainer = samples, batches, divide, pack, trainer
        self.cursor = Cursor()

    def __call__(self) -> tuple[int, float]:
        """One global batch."""
        after = self.batches.after(self.cursor)
        ids = self.batches.ids(self.cursor)
        step = make_step(self.samples, self.cursor, after, ids, rank=0, world=1, divide=self.divide, pack=self.pack)
        self.cursor = after
        return step.tokens, self.trainer.train(step.micro_batches, step.tokens)


class Trainer:
    """A small GPT and AdamW."""

    def __init__(self, vocab: int, context: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        large = self.device.type == "cuda"
        model = {"layers": 12, "width": 768, "heads": 12} if large else {"layers": 2, "width": 128, "heads": 4}
        self.shape = {**model, "context": context}
        spec = JobSpec.model_validate({"data": {"source": "any"}, "train": {"steps": 1}, "model": self.shape})
        torch.manual_seed(0)
        self.model = gpt.build(spec.model, vocab).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def train(self, micro_batches: list[MicroBatch], tokens: int) -> float:
        """Seconds of one step."""
        self._wait()
        begun = time.perf_counter()
        for batch in micro_batches:
            documents = None if batch.documents is None else torch.from_numpy(batch.documents).to(self.device)
            arrays = (torch.from_numpy(array).to(self.device) for array in (batch.tokens, batch.targets))
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = loss_sum(self.model, MicroBatch(*arrays, documents))
            (loss / tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def speeds(dataset: TokenDataset, context: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens/s of each way."""
    torch.set_num_threads(1)
    trainer, size, rows = Trainer(dataset.vocab_size, context), 4 * max_tokens, max_tokens // context
    any_length = with_shapes(dataset, context, Shapes(max_tokens, context, None, MULTIPLE))
    few = few_lengths(any_length.histogram, FEW, MULTIPLE)
    few_shapes = with_shapes(dataset, context, Shapes(max_tokens, context, None, MULTIPLE, few))
    whole = with_shapes(dataset, context, Shapes(max_tokens, context, rows, MULTIPLE, (context,)))
    windows = Windows(dataset.split("train"), context)
    documents, fixed = by_tokens(any_length, size), equal_parts(rows)
    packed = Batches(len(windows), size // context, 0, "benchmark")
    ways = {
        "fixed, longest": Way(any_length, documents, fixed, False, trainer),
        "fixed, context": Way(whole, documents, fixed, False, trainer),
        "by tokens": Way(any_length, documents, any_length.divide, False, trainer),
        "by tokens, 8 lengths": Way(few_shapes, documents, few_shapes.divide, False, trainer),
        "packed": Way(windows, packed, fixed, True, trainer),
        "windows": Way(windows, packed, fixed, False, trainer),
    }
    for way in ways.values():
        way()
        way.cursor = Cursor()
    order, measured = random.Random(0), {name: [] for name in ways}
    for _ in range(rounds):
        names = list(ways)
        order.shuffle(names)
        for name in names:
            measured[name].append(ways[name]())
    rates = {name: [tokens / seconds for tokens, seconds in found] for name, found in measured.items()}
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu"
    return {
        "device": device,
        "model": trainer.shape,
        "rounds": rounds,
        "ways": {
            name: {
                "tokens_per_second": statistics.median(rate),
                "over_fixed": statistics.median(
                    ours / theirs for ours, theirs in zip(rate, rates["fixed, longest"], strict=True)
                ),
            }
            for name, rate in rates.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--padding-only", action="store_true", help="no timing")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepared(Path(folder))
        lengths = np.diff(dataset.split("train").ends(), prepend=-1) - 1
        quantiles = dict(zip(("p10", "p50", "p90", "p99", "max"), np.quantile(lengths, (0.1, 0.5, 0.9, 0.99, 1)).tolist(),
                             strict=True))  # fmt: skip
        result: dict[str, Any] = {
            "documents": len(lengths),
            "lengths": quantiles,
            "max_tokens": args.max_tokens,
            "padding": {context: shares(dataset, context, args.max_tokens) for context in args.contexts},
        }
        if not args.padding_only:
            result["speed"] = speeds(dataset, args.contexts[0], args.max_tokens, args.rounds)
    print(json.dumps(result, indent=1))
    print(write("batching", result, *([args.out] if args.out else [])))


if __name__ == "__main__":
    main()
