"""The fingerprint of the weights that adapters are for: a run continues, and an adapter is merged, with the same bytes alone.

Runs in: each train worker, and in exports of weights. Torch, never ray. The ranks share the reading of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from raydist.checkpoint.huggingface import tensors_of
from raydist.errors import CheckpointError, UserError
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank

BASE = "base"
"""Key of the base in the plain state of a checkpoint."""
_CHUNK = 64 << 20
"""Bytes that a rank hashes at a time."""


def fingerprint(folder: Path, rank: Rank | None = None) -> str:
    """xxh3-128 in hex over the names and contents of the files with tensors, not over the folder's name. A collective of all ranks
    (None: this process alone): each reads every world_size-th chunk. Raises UserError, on every rank, for files that one of them
    cannot read."""
    first, count = (rank.rank, rank.world_size) if rank is not None else (0, 1)
    chunks, mine, problem = [], dict[str, str](), list[str]()
    try:
        files = sorted({tensor.file for tensor in tensors_of(folder).values()})
        chunks = [(name, at) for name in files for at in range(0, (folder / name).stat().st_size, _CHUNK)]
        mine = {str(i): _hashed(folder, *chunks[i]) for i in range(first, len(chunks), count)}
    except UserError as error:  # sent to all ranks, which wait for this one
        problem = [error.message, error.hint]
    except OSError as error:
        problem = [
            f"model.hf: {error.filename or folder}: cannot be read: {error.strerror}",
            "each rank reads that folder",
        ]
    hashes: dict[str, str] = {}
    for theirs, failed in gather_json([mine, problem], rank.control if rank is not None else None):
        if failed:
            raise UserError(*failed)
        hashes |= theirs
    return xxhash.xxh3_128_hexdigest(repr([(*chunk, hashes[str(i)]) for i, chunk in enumerate(chunks)]).encode())


def _hashed(folder: Path, name: str, at: int) -> str:
    with (folder / name).open("rb") as file:
        file.seek(at)
        return xxhash.xxh3_128_hexdigest(file.read(_CHUNK))


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
