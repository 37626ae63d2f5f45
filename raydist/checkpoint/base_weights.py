"""The fingerprint of the weights that adapters are for: a run continues, and an adapter is merged, with the same bytes alone.

Runs anywhere, without torch: in the driver, before any worker starts, and in exports. The ranks of a run share the reading of the
folder (worker/base_weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from raydist.checkpoint.huggingface import tensors_of
from raydist.checkpoint.manifest import Manifest
from raydist.errors import CheckpointError, UserError
from raydist.spec import JobSpec
from raydist.spec.huggingface import reading
from raydist.storage import Storage

BASE = "base"
"""Key of the base in the plain state of a checkpoint."""
CHUNK = 64 << 20
"""Bytes that are hashed at a time."""
MOST = 32 << 30
"""Bytes of a folder that the driver reads; of a larger one, or one on an object store, only the ranks compute the fingerprint."""

Chunk = tuple[str, int]
"""Name of a file, and a position in it."""


def chunks_of(folder: Storage) -> list[Chunk]:
    """All chunks of the files with tensors. Raises as `tensors_of`."""
    files = sorted({tensor.file for tensor in tensors_of(folder).values()})
    sizes = folder.files()
    # A file that is gone has one, with which `hashed` says so.
    return [(name, at) for name in files for at in range(0, sizes.get(name, 1), CHUNK)]


def hashed(folder: Storage, chunk: Chunk) -> str:
    """xxh3-128 in hex of a chunk. Raises as `tensors_of`."""
    name, at = chunk
    with reading(folder, name, "each rank reads that folder"), folder.open(name) as file:
        file.seek(at)
        return xxhash.xxh3_128_hexdigest(file.read(CHUNK))


def combined(chunks: list[Chunk], hashes: Mapping[int, str]) -> str:
    """The fingerprint. `hashes`: by the number of the chunk."""
    return xxhash.xxh3_128_hexdigest(repr([(*chunk, hashes[i]) for i, chunk in enumerate(chunks)]).encode())


def fingerprint(folder: Storage) -> str:
    """xxh3-128 in hex over the names and contents of the files with tensors, not over the folder's name. Raises as `tensors_of`."""
    chunks = chunks_of(folder)
    return combined(chunks, {i: hashed(folder, chunk) for i, chunk in enumerate(chunks)})


def check(saved: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    """Raises CheckpointError if a checkpoint's adapters are for other weights. Both: the key BASE of a plain state, None without
    adapters."""
    if saved is None or here is None:
        return  # then the checkpoint's tensors do not fit: restore says which
    if saved["fingerprint"] != here["fingerprint"]:
        raise CheckpointError(
            f"model.hf: {here['hf']} has other weights than the adapters were trained on: fingerprint {here['fingerprint']}, "
            f"not {saved['fingerprint']} (then in {saved['hf']})",
            "give the folder as it was, or start from the beginning (--fresh)",
        )


def check_early(job: JobSpec, newest: Manifest) -> None:
    """Raises UserError if the run whose newest checkpoint that is would fail `check` on its ranks. Reads at most MOST bytes."""
    if job.model.lora is None or job.model.hf is None or newest.plain.get(BASE) is None:
        return
    folder = Storage(job.model.hf)
    if folder.local is None or sum(n for name, n in folder.files().items() if name.endswith(".safetensors")) > MOST:
        return
    try:
        check(newest.plain[BASE], {"hf": folder.uri, "fingerprint": fingerprint(folder)})
    except CheckpointError as error:
        raise UserError(error.message, error.hint) from None
