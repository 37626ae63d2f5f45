"""Settles `comm.topology` before the model is built: the order of a ring is measured once, and kept.

Runs in: each train worker, every rank. Torch, never ray. How sums then go: raydist/worker/parallel/_topology.py.

On three or more ranks the order changes the bits of a sum. So rank 0 writes it to the run's folder, once for each placement of the
ranks on nodes, and every restart there reads it and measures nothing, until a link is found to have become slow.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import xxhash

from raydist.errors import UserError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.comm import kept, links
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank

_MESSAGE = 2**20
"""Bytes of a message in a ring, about: a bucket by the number of ranks."""
ORDERED = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether a group's ranks may have another order; from torch 2.12."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The order of the ranks, and the reason. `measured`: the links, as plain values; `links`: these in words."""

    order: list[int]
    because: str
    measured: dict[str, Any]
    links: str


def settle(spec: JobSpec, rank: Rank, run: RunDir, say: Callable[[str], None]) -> JobSpec:
    """The spec, with an order in place of `comm.ring: null`; `say` gets the reason. Every rank. Raises UserError."""
    comm = spec.comm
    if comm.topology != "ring" or rank.world_size == 1:
        return spec
    if problem := _no_ring(rank, comm.ring):
        raise problem
    if comm.ring is not None:
        return spec
    chosen = measured(rank, run)
    say(f"comm.ring: {chosen.because}")
    return spec.with_fields({"comm.ring": chosen.order})


def _no_ring(rank: Rank, order: Sequence[int] | None) -> UserError | None:
    """Why these ranks cannot have a ring in an order of their own; None: they can."""
    if rank.backend != "gloo":
        return UserError(
            f"comm.topology: ring: {rank.backend} orders its rings itself", "take two_level or direct, or leave it out"
        )
    if not ORDERED:
        return UserError(
            "comm.topology: ring: this version of torch sorts the ranks of a group", "take torch 2.12 or newer"
        )
    if order is not None and len(order) != rank.world_size:
        return UserError(
            f"comm.ring: an order of {len(order)} ranks, and there are {rank.world_size}",
            "name every rank once, or leave comm.ring out to have the order measured",
        )
    return None


def measured(rank: Rank, run: RunDir) -> Ring:
    """The order that was kept for ranks on these nodes, or else that of the links as they are now. Every rank."""
    nodes = gather_json(rank.node_ip, rank.control)
    placement = xxhash.xxh32_hexdigest(json.dumps(nodes).encode())
    name = kept.links_file(run, f"ring-{rank.world_size:05d}-{placement}") if rank.first else ""
    known = kept.from_first(rank, Ring, kept.read(run, name, Ring) if rank.first else None)
    if known is not None:
        return known
    found = links.measure(rank)
    order = links.ring(found, nodes, _MESSAGE)
    plain = order == list(range(rank.world_size))
    speeds = [speed for row in found.bandwidth for speed in row if speed]
    measured = f"links between {len(found.members)} {found.between} have {min(speeds) / 1e6:,.0f} to {max(speeds) / 1e6:,.0f} MB/s"
    because = f"{', '.join(map(str, order))}{', the order of the ranks' if plain else ''}: {measured}"
    figures = {"names": found.names, "latency": found.latency, "bandwidth": found.bandwidth}
    chosen = Ring(order, because, figures, measured)
    made = kept.from_first(rank, Ring, kept.keep(run, name, chosen) if rank.first else None)
    assert made is not None
    return made
