"""Further groups of ranks, which their members alone create. Those of a trial are used again by later trials and by the run.

Runs in: each train worker. Torch, never ray.

Torch gives a further group its own time limit, 30 minutes; those here have the limit of the world's.

A group of a trial is kept rather than destroyed: torch derives the name of a group from its ranks and the number of open groups
(2.13), so that one made after another was destroyed would have its name, and find its addresses in the store. For the same reason
ranks that will share a group later must have made as many before. With NCCL each group also holds GPU memory, which a second trial
of the same ranks would take once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Key = tuple[bool, tuple[int, ...]]
"""Whether its members alone connect, and the world ranks of a group, in its order."""


class _Groups:
    """Of one default group. `free`: those that another call may have, the first one first. `lent`: those of the present trial."""

    def __init__(self) -> None:
        self.free: defaultdict[Key, list[dist.ProcessGroup]] = defaultdict(list)
        self.lent: list[tuple[Key, dist.ProcessGroup]] | None = None


_known: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()


def another(ranks: Sequence[int], ordered: bool = False, alone: bool = False) -> dist.ProcessGroup:
    """A group of these world ranks for the caller alone. A collective of these ranks. `ordered`: in this order, not sorted; from
    torch 2.12.

    `alone`: other ranks of the world may make none meanwhile. NCCL else splits the communicator of all ranks, which each of them
    must call. For collectives only: such a group connects at its first one, and the first of two ranks to send would wait on the
    host until the other one receives.
    """
    of = _of_world()
    members = [*ranks] if ordered else sorted(ranks)
    key = alone, (*members,)
    if of.free[key]:
        made = of.free[key].pop(0)
    else:
        with _unbound() if alone else nullcontext():
            limit = _time_limit()
            if ordered:
                made = dist.new_group(members, limit, use_local_synchronization=True, sort_ranks=False)
            else:
                made = dist.new_group(members, limit, use_local_synchronization=True)
    if of.lent is not None:
        of.lent.append((key, made))
    return made


def device_mesh(device: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """torch's `init_device_mesh`. A collective of the world."""
    made = init_device_mesh(device, (*sizes,), mesh_dim_names=(*names,))
    for axis in range(made.ndim) if dist.get_backend() != "fake" else ():
        distributed_c10d._set_pg_timeout(_time_limit(), made.get_group(axis))
    return made


def _time_limit() -> timedelta:
    """Of the world's collectives: recovery.timeout_s."""
    world = dist.group.WORLD
    assert world is not None, "the process group exists"
    limit: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return limit


@contextmanager
def lent() -> Iterator[None]:
    """Groups made in the block are free for `another` after it. Every rank; all must have finished what they send over them."""
    of = _of_world()
    assert of.lent is None, "no trial within a trial"
    of.lent = []
    try:
        yield
        for key, group in of.lent:
            of.free[key].append(group)
    finally:
        of.lent = None


@contextmanager
def _unbound() -> Iterator[None]:
    """Meanwhile the world has no device: with one torch splits its communicator for each new group."""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _of_world() -> _Groups:
    world = dist.group.WORLD
    assert world is not None, "the process group exists"
    return _known.setdefault(world, _Groups())
