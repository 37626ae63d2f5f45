"""The fingerprint of the weights that adapters are for: a run continues, and an adapter is merged, with the same bytes alone.

Runs anywhere, without torch: in the driver, before any worker starts, and in exports. The ranks of a run share the reading of the
folder (worker/base_weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from raydist.checkpoint.huggingface import tensors_of
from raydist.checkpoint.manifest import Manifest
from raydist.errors import CheckpointError, UserError
from raydist.spec import JobSpec

BASE = "base"
"""Key of the base in the plain state of a checkpoint."""
CHUNK = 64 << 20
"""Bytes that are hashed at a time."""
MOST = 32 << 30
"""Bytes of a folder that the driver reads; of a larger one only the ranks compute the fingerprint."""

Chunk = tuple[str, int]
"""Name of a file, and a position in it."""


def chunks_of(folder: Path) -> list[Chunk]:
    """All chunks of the files with tensors. Raises UserError and OSError."""
    files = sorted({tensor.file for tensor in tensors_of(folder).values()})
    return [(name, at) for name in files for at in range(0, (folder / name).stat().st_size, CHUNK)]


def hashed(folder: Path, chunk: Chunk) -> str:
    """xxh3-128 in hex of a chunk. Raises OSError."""
    name, at = chunk
    with (folder / name).open("rb") as file:
        file.seek(at)
        return xxhash.xxh3_128_hexdigest(file.read(CHUNK))


def combined(chunks: list[Chunk], hashes: Mapping[int, str]) -> str:
    """The fingerprint. `hashes`: by the number of the chunk."""
    return xxhash.xxh3_128_hexdigest(repr([(*chunk, hashes[i]) for i, chunk in enumerate(chunks)]).encode())


def unreadable(folder: Path, error: OSError) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(
        f"model.hf: {error.filename or folder}: cannot be read: {error.strerror}", "each rank reads that folder"
    )


def fingerprint(folder: Path) -> str:
    """xxh3-128 in hex over the names and contents of the files with tensors, not over the folder's name. Raises UserError."""
    try:
        chunks = chunks_of(folder)
        return combined(chunks, {i: hashed(folder, chunk) for i, chunk in enumerate(chunks)})
    except OSError as error:
        raise unreadable(folder, error) from error


def check(saved: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    """Raises CheckpointError if a checkpoint's adapters are for other weights. Both: the key BASE of a plain state, None without
    adapters."""
    if saved is None or here is None:
        return  # then the checkpoint's tensors do not fit: restore says which
    if saved["fingerprint"] != here["fingerprint"]:
        raise CheckpointError(
            f"model.hf: {here['hf']} has other weights than the adapters were trained on: fingerprint {here['fingerprint']}, "
            f"not {saved['fingerprint']} (then in {saved['hf']})",
            "give the folder as it was, or start anew (--fresh)",
        )


def check_early(job: JobSpec, newest: Manifest) -> None:
    """Raises UserError if the run whose newest checkpoint that is would fail `check` on its ranks. Reads at most MOST bytes."""
    if job.model.lora is None or job.model.hf is None or newest.plain.get(BASE) is None:
        return
    folder = Path(job.model.hf)
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > MOST:
        return
    try:
        check(newest.plain[BASE], {"hf": str(folder), "fingerprint": fingerprint(folder)})
    except CheckpointError as error:
        raise UserError(error.message, error.hint) from None
