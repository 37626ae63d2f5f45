"""Every byte of a prepared dataset against its index: names each file that is missing, cut short or changed.

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
    """A file that is not as it was written, and in what."""

    file: str
    reason: str


def verify(uri: str, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Reads the whole dataset; the damage found, none if it is sound. `progress` gets bytes done and in all.

    Raises DataError if the folder holds no dataset at all.
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
        # Read without an error, but not the bytes that were written.
        found.append(Damage(INDEX, "its bytes are not those that were written"))
    wanted = {s.file: (s.hash, s.bytes) for s in index.shards()}
    total, done = sum(size for _, size in wanted.values()), 0
    for file, (digest, size) in {TOKENIZER: (index.tokenizer.hash, None), **wanted}.items():
        if reason := _differs(storage, file, digest, size):
            found.append(Damage(file, reason))
        done += size or 0
        if progress is not None:
            progress(done, total)
    return found


def _differs(storage: Storage, file: str, digest: str, size: int | None) -> str:
    """Why a file is not the one that was written; empty if it is."""
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
