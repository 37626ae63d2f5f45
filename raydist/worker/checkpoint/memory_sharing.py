"""The files of a copy in memory that all ranks read: sent from rank to rank to the nodes that lack them.

Runs in: each train worker, in `memory_manager.choose`. Torch, never ray. The files that single ranks read are fetched by the nodes'
MemoryStores, as the driver orders (cluster/run/memory_checkpoints.py): for files that all read these would be orders to all nodes,
and all nodes would read from one.

    first rank of a node that has the file --pieces--> first ranks of two nodes that lack it --pieces--> of two more each ...
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import FileEntry, Manifest
from raydist.checkpoint.memory_layout import BUDDY, Shard, Use
from raydist.worker.checkpoint.shard_reader import read_all

PIECE_BYTES = 8 << 20
_BRANCHES = 2


def held(folder: Path, found: Manifest, names: Sequence[str]) -> str:
    """Which of these files this node has, as bits in hex. Those that it keeps as a buddy are its own, too, from now on."""
    bits = np.zeros(len(names), dtype=bool)
    for index, name in enumerate(names):
        path, kept = (place / manifest.path(found.step, name) for place in (folder, folder / BUDDY))
        with contextlib.suppress(OSError):
            if not path.exists() and kept.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another rank of this node has done it
                    os.link(kept, path)
            bits[index] = path.stat().st_size == found.files[name].bytes
    return np.packbits(bits).tobytes().hex()


def spread(
    folder: Path,
    found: Manifest,
    names: Sequence[str],
    every: Sequence[tuple[str, str]],
    rank: int,
    group: dist.ProcessGroup | None,
) -> list[str]:
    """Sends each of these files to all nodes that lack it. A line for each error here. `every`: of each rank, its node and the
    answer of `held` there.

    A collective. When it returns, the files are there for all ranks of a node.
    """
    nodes = [node for node, _ in every]
    firsts = np.array(sorted({node: first for first, node in reversed([*enumerate(nodes)])}.values()))
    rows = [np.unpackbits(np.frombuffer(bytes.fromhex(every[r][1]), np.uint8), count=len(names)) for r in firsts]
    has_NF = np.array(rows, dtype=bool)  # nodes, files
    lacking = np.flatnonzero(~has_NF.all(axis=0))
    here = {(r, len(nodes)) for r, node in enumerate(nodes) if node == nodes[rank]}
    problems = []
    for index in lacking:
        name, having = names[int(index)], firsts[has_NF[:, index]]
        route = [int(r) for r in (*having[index % max(1, len(having)) :][:1], *firsts[~has_NF[:, index]])]
        if not len(having) or rank not in route:
            continue  # a file that no node has is found where the hashes are checked
        path, position = folder / manifest.path(found.step, name), route.index(rank)
        if problem := _passed_on(path, found.files[name], route, position, group):
            problems.append(f"{path}: {problem}")
        elif position and (shard := Shard.parse(name)) and (shard.rank, shard.world_size) in here:
            memory_layout.ring(folder, step=found.step, name=name, kept=None)  # the buddy copies it, too
    if len(lacking) and group is not None:
        dist.barrier(group)
    return problems


def _passed_on(
    path: Path, entry: FileEntry, route: Sequence[int], position: int, group: dist.ProcessGroup | None
) -> str | None:
    """Sends a file along a tree of ranks, piece by piece: the first of `route` reads it, the others write it. The problem here, or
    None. A rank with a problem sends on, as the others wait for it; the hash is then wrong there.
    """
    part, hasher = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}"), xxhash.xxh3_128()
    children = route[_BRANCHES * position + 1 :][:_BRANCHES]
    file: Any = None

    def begin() -> None:
        nonlocal file
        if position:
            stack.callback(Use(str(path.parents[2])).close)
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.callback(part.unlink, missing_ok=True)
        file = part.open("xb") if position else path.open("rb")
        stack.callback(_problem_of, file.close)  # without room, what is buffered fails again

    def end() -> None:
        file.close()
        if hasher.hexdigest() != entry.xxh3:
            raise OSError("its bytes are not those that were written")
        if position:
            part.rename(path)

    with contextlib.ExitStack() as stack:
        problem = _problem_of(begin)
        for start in range(0, entry.bytes, PIECE_BYTES):
            piece = torch.zeros(min(PIECE_BYTES, entry.bytes - start), dtype=torch.uint8)
            if position:
                dist.recv(piece, group=group, group_src=route[(position - 1) // _BRANCHES])
            elif problem is None:
                problem = _problem_of(partial(read_all, file, piece.numpy()))
            sent = [dist.isend(piece, group=group, group_dst=child) for child in children]
            hasher.update(piece.numpy().data)
            if position and problem is None:
                problem = _problem_of(partial(file.write, piece.numpy()))
            for sending in filter(None, sent):
                sending.wait()
        return problem or _problem_of(end)


def _problem_of(work: Callable[[], object]) -> str | None:
    """The text of its error, or None."""
    try:
        work()
    except (OSError, EOFError) as error:
        return str(error)
    return None
