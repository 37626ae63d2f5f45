"""Checks every byte of a prepared dataset against its index: lists files that are missing, truncated or changed.

Runs anywhere. Plain python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from raydist.data import index as indexes
from raydist.data.index import INDEX, TOKENIZER
from raydist.errors import DataError
from raydist.storage import Storage

_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged file, and the damage."""

    file: str
    reason: str


def verify(uri: str, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Reads the whole dataset; returns the damage, an empty list if there is none. `progress` gets bytes done and total.

    Raises DataError if the folder contains no dataset.
    """
    storage = Storage(uri)
    if storage.size(INDEX) is None:
        indexes.read(storage)
    try:
        index = indexes.read(storage)
    except DataError as error:
        return [Damage(INDEX, error.message)]
    found = []
    if storage.read(INDEX) != index.to_bytes():
        # It can be parsed, but its bytes have changed.
        found.append(Damage(INDEX, "its bytes have changed"))
    wanted = {s.file: (s.hash, s.bytes) for s in index.files()}
    total, done = sum(size for _, size in wanted.values()), 0
    for file, (digest, size) in {TOKENIZER: (index.tokenizer.hash, None), **wanted}.items():
        if reason := _differs(storage, file, digest, size):
            found.append(Damage(file, reason))
        done += size or 0
        if progress is not None:
            progress(done, total)
    return found


def _differs(storage: Storage, file: str, digest: str, size: int | None) -> str:
    """How a file differs from the one that was written; empty if it does not."""
    there = storage.size(file)
    if there is None:
        return "missing"
    if size is not None and there != size:
        return f"{there} bytes, not {size}"
    found = xxhash.xxh3_128()
    with storage.open(file) as stream:
        while chunk := stream.read(_CHUNK):
            found.update(chunk)
    return "" if found.hexdigest() == digest else f"its hash is {found.hexdigest()}, not {digest}"
