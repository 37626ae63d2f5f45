"""The plan for preparing a dataset: checks names, finds files, divides them into blocks, and computes a key of the request.

Runs in the preparing process. numpy and pyarrow; must not import torch or ray.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from raydist import registry
from raydist.data import sources, tokenizers
from raydist.data.chat_template import ChatFormat
from raydist.data.sources import Block, SourceFile
from raydist.errors import DataError
from raydist.redact import redact

SHARD_TOKENS = 1 << 25
"""Maximum number of tokens in a shard."""

_BLOCK_BYTES, _BLOCKS = 32 << 20, 2048
"""Minimum size of a block, and approximate maximum number of blocks, which limits the number of shards."""


@dataclass(frozen=True)
class Plan:
    """The request, the files and the blocks. `request` is a hash of the request and of the files; neither it nor `names` contains
    secrets of a URI: these may change, and everyone can read an index.
    """

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    tokenizer: str
    column: str
    eval_fraction: float
    shard_tokens: int
    request: str
    files: tuple[SourceFile, ...]
    chat: ChatFormat | None = None

    @property
    def bytes(self) -> int:
        """Total size of the files; a user's own source counts as 0."""
        return sum(b.bytes for b in self.blocks)


def plan_of(
    names: Sequence[str],
    tokenizer: str,
    column: str,
    eval_fraction: float,
    block_bytes: int | None,
    shard_tokens: int,
    chat: ChatFormat | None = None,
) -> Plan:
    """The plan for these sources: a pure function of the arguments and the files' metadata. Raises DataError."""
    if not names:
        raise DataError(
            "no source is given", f"give files, folders, globs, URIs, module:attribute, or {sources.STDLIB}"
        )
    if not 0 <= eval_fraction < 1:
        raise DataError(f"eval_fraction {eval_fraction} is not in [0, 1)", "0.01 holds out 1%")
    # Before anything is read, so that a wrong name is reported at once.
    known = "" if tokenizers.vocabulary(tokenizer) else hash_of(tokenizers.load(tokenizer).to_bytes())
    own = [n for n in names if sources.is_records(n)]
    files = [f for n in names if n not in own for f in sources.find(n)]
    size = block_bytes or max(_BLOCK_BYTES, sum(f.size for f in files) // _BLOCKS)
    blocks = sources.plan(files, column if chat is None else None, size)
    blocks += [Block(len(blocks) + i, (), n) for i, n in enumerate(own)]
    public_names = tuple(map(redact, names))
    request = [
        [redact(tokenizer), known, column, eval_fraction, size, shard_tokens, list(public_names)],
        [(f.name, f.size, f.kind) for f in files],
        [sources.code_of(n) for n in own],
    ]
    if registry.is_own(tokenizer):
        request.append([sources.code_of(tokenizer)])
    if chat is not None:
        request.append([chat.to_dict()])
    return Plan(
        public_names,
        tuple(blocks),
        tokenizer,
        column,
        eval_fraction,
        shard_tokens,
        hash_of(as_json(request)),
        tuple(files),
        chat,
    )


def request_key(
    names: Sequence[str], tokenizer: str, column: str, eval_fraction: float, chat: ChatFormat | None = None
) -> str:
    """A key of the request, including the files' times, for the name of a folder. Raises DataError."""
    plan = plan_of(names, tokenizer, column, eval_fraction, None, SHARD_TOKENS, chat)
    return hash_of(as_json([plan.request, [(f.path, f.mtime_ns) for f in plan.files]]))[:16]


def as_json(value: Any) -> bytes:
    """Plain values in canonical form."""
    return json.dumps(value, sort_keys=True).encode()


def hash_of(raw: bytes) -> str:
    """xxh3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(raw)
