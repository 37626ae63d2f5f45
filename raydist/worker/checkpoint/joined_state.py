"""Extra state of single ranks that others take up, on another mesh or with other parts: which tensors, and how they are read.

Runs in: each train worker. Torch, never ray. The states say how: see `Joins`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.memory_layout import PEERS
from raydist.worker.checkpoint.extra_state import EXTRA, Joins, owner, tensor_name
from raydist.worker.checkpoint.save_plan import rank_name
from raydist.worker.parameter_table import dtype_name

_OF_RANK = re.compile(r"rank/\d+/(.*)")
"""A tensor of one rank alone: see `rank_name`."""


def why_not(
    found: Manifest, name: str, rank_tensors: Mapping[str, Tensor], sources: Mapping[str, Sequence[str]] | None
) -> str | None:
    """Why this rank cannot take what other ranks had of an extra state; None if it can."""
    if name not in found.plain.get(EXTRA, {}):
        return "is not in the checkpoint"
    if not any(owner(n) == name for n in rank_tensors):
        return "has nothing to keep on this mesh"
    return f"has other tensors than the state that was saved on the mesh {found.mesh}" if sources is None else None


def sources_of(
    found: Manifest, state: str, rank_tensors: Mapping[str, Tensor], join: Joins
) -> dict[str, Sequence[str]] | None:
    """See `Joins.sources`, with the names of `rank_tensors`. None also for tensors that ranks saved with several shapes, and for
    those of another dtype."""
    prefix = tensor_name(state, "")
    own = {n.removeprefix(prefix): t for n, t in rank_tensors.items() if owner(n) == state}
    saved: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, entry in found.tensors.items():
        of_rank = _OF_RANK.fullmatch(name)
        if of_rank is not None and of_rank[1].startswith(prefix):
            facts = entry.shape, entry.dtype
            if saved.setdefault(of_rank[1].removeprefix(prefix), facts) != facts:
                return None
    made = join.sources(own, {n: shape for n, (shape, _) in saved.items()})
    if made is None or any(saved[s][1] != dtype_name(own[n].dtype) for n, those in made.items() for s in those):
        return None
    return {prefix + n: [prefix + s for s in those] for n, those in made.items()}


def has_other_parts(found: Manifest, own: Mapping[str, Tensor], rank: int, state: str) -> bool:
    """Whether this rank of the same mesh saved other tensors of an extra state than it has: of other names or shapes. Never of a
    copy in memory: there a rank has its peers' shards alone (memory_layout.needs)."""
    mine = {n: tuple(t.shape) for n, t in own.items() if owner(n.removeprefix(rank_name(rank, ""))) == state}
    return PEERS not in found.plain and any(
        (entry := found.tensors.get(n)) is None or entry.shape != shape for n, shape in mine.items()
    )


def reshaped(found: Manifest, rank_tensors: Mapping[str, Tensor], sources: Mapping[str, Sequence[str]]) -> bool:
    """Whether there are tensors that stay as they are because ranks saved them with other shapes."""
    every = [(rank_name(rank, n), tuple(rank_tensors[n].shape)) for n, those in sources.items() if not those
             for rank in range(found.world_size)]  # fmt: skip
    return any((entry := found.tensors.get(n)) is not None and entry.shape != shape for n, shape in every)


def read(
    found: Manifest,
    own: Mapping[str, Tensor],
    joins: Mapping[str, Joins],
    sources: Mapping[str, Sequence[str]],
    fill: Callable[[dict[str, Tensor]], None],
) -> None:
    """Reads what each rank saved of its own, one rank after another, so that one copy is in memory at a time."""
    begun: set[str] = set()
    for name, tensor in own.items():
        if sources[name]:
            tensor.zero_()
    like = {source: tensor for name, tensor in own.items() for source in sources[name]}
    for rank in range(found.world_size):
        theirs = {
            source: tensor.new_empty(entry.shape)
            for source, tensor in like.items()
            if (entry := found.tensors.get(rank_name(rank, source))) is not None
        }
        if theirs:
            fill({rank_name(rank, source): tensor for source, tensor in theirs.items()})
        for name, tensor in own.items():
            state = owner(name)
            assert state is not None
            prefix = tensor_name(state, "")
            for source in filter(theirs.__contains__, sources[name]):
                first = name not in begun
                joins[state].join(name.removeprefix(prefix), tensor, source.removeprefix(prefix), theirs[source], first)
                begun.add(name)
