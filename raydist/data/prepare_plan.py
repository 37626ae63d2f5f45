"""What a dataset is asked to be made from: names checked, files found, blocks cut, and a key of it all.

Runs in the process that was asked to prepare. numpy and pyarrow; must not import torch or ray.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from raydist.data import sources, tokenizers
from raydist.data.sources import Block, SourceFile
from raydist.errors import DataError
from raydist.redact import redact

SHARD_TOKENS = 1 << 25
"""The most tokens in a shard."""

_BLOCK_BYTES, _BLOCKS = 32 << 20, 2048
"""A block is at least so large, and there are about so many at most, so that shards stay few."""


@dataclass(frozen=True)
class Plan:
    """All that was asked, found and cut. `request` is a key of what was asked and of the files found; neither it nor `names` has
    the secrets of a URI: they may change, and an index is for all to read.
    """

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    tokenizer: str
    column: str
    eval_fraction: float
    shard_tokens: int
    request: str
    files: tuple[SourceFile, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files; a user's own source counts none."""
        return sum(b.bytes for b in self.blocks)


def plan_of(
    names: Sequence[str],
    tokenizer: str,
    column: str,
    eval_fraction: float,
    block_bytes: int | None,
    shard_tokens: int,
) -> Plan:
    """The plan for these sources: a pure function of them and of what the files are. Raises DataError."""
    if not names:
        raise DataError(
            "no source is given", f"give files, folders, globs, URIs, module:attribute, or {sources.STDLIB}"
        )
    if not 0 <= eval_fraction < 1:
        raise DataError(f"eval_fraction {eval_fraction} is not in [0, 1)", "0.01 holds out a hundredth")
    # Before anything is read: a wrong name must not cost an hour.
    known = "" if tokenizers.vocabulary(tokenizer) else hash_of(tokenizers.load(tokenizer).to_bytes())
    own = [n for n in names if sources.is_records(n)]
    files = [f for n in names if n not in own for f in sources.find(n)]
    size = block_bytes or max(_BLOCK_BYTES, sum(f.size for f in files) // _BLOCKS)
    blocks = sources.plan(files, column, size)
    blocks += [Block(len(blocks) + i, (), n) for i, n in enumerate(own)]
    told = tuple(map(redact, names))
    asked = [
        [tokenizer, known, column, eval_fraction, size, shard_tokens, list(told)],
        [(f.name, f.size, f.kind) for f in files],
        [sources.code_of(n) for n in own],
    ]
    return Plan(
        told,
        tuple(blocks),
        tokenizer,
        column,
        eval_fraction,
        shard_tokens,
        hash_of(as_json(asked)),
        tuple(files),
    )


def request_key(names: Sequence[str], tokenizer: str, column: str, eval_fraction: float) -> str:
    """Names what a dataset would be made from, the files' times included: for a folder. Raises DataError."""
    plan = plan_of(names, tokenizer, column, eval_fraction, None, SHARD_TOKENS)
    return hash_of(as_json([plan.request, [(f.path, f.mtime_ns) for f in plan.files]]))[:16]


def as_json(value: Any) -> bytes:
    """Plain values, spelled in one way."""
    return json.dumps(value, sort_keys=True).encode()


def hash_of(raw: bytes) -> str:
    """xxh3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(raw)
