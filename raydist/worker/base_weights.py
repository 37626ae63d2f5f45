"""The fingerprint of the weights that adapters are for (checkpoint/base_weights.py), by all ranks: each reads a part of the folder.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from raydist.checkpoint.base_weights import Chunk, chunks_of, combined, hashed
from raydist.errors import UserError
from raydist.storage import Storage
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank


def fingerprint(folder: Storage, rank: Rank) -> str:
    """See `raydist.checkpoint.base_weights.fingerprint`. A collective of all ranks: each reads every world_size-th chunk.

    Raises UserError, on every rank, for files that one of them cannot read.
    """
    chunks: list[Chunk] = []
    mine: dict[str, str] = {}
    problem: list[str] = []
    try:
        chunks = chunks_of(folder)
        mine = {str(i): hashed(folder, chunks[i]) for i in range(rank.rank, len(chunks), rank.world_size)}
    except UserError as error:  # sent to all ranks, which wait for this one
        problem = [error.message, error.hint]
    hashes: dict[int, str] = {}
    for theirs, failed in gather_json([mine, problem], rank.control):
        if failed:
            raise UserError(*failed)
        hashes |= {int(i): value for i, value in theirs.items()}
    return combined(chunks, hashes)
