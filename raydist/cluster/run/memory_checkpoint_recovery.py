"""Which snapshot to go on from, and which node must fetch what of it from which.

Runs anywhere. Pure: no ray, no torch, no I/O; tested as a table, and for 10,000 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from raydist.checkpoint.memory_layout import Shard


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot, as its manifest has it: `files` -> bytes. `shared`: those that every rank of as many ranks reads.

    `peers`: groups of ranks one of which saved what all of the group hold; a rank of none saved its own.
    """

    step: int
    attempt: int
    manifest: str
    world_size: int
    files: Mapping[str, int]
    shared: frozenset[str]
    peers: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is in one node's memory: (step, file) -> bytes, for its own ranks and for its buddy; and the manifests among it."""

    files: Mapping[tuple[int, str], int] = field(default_factory=dict)
    copies: Sequence[Copy] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """A file for a node, from another or from its own buddy's part (`source` is then the node itself)."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Go on from `copy`: every node in `fetches` needs its own list and all of `common`, where it has not got a file already.

    Rank 0's node also needs the manifest, which `manifest_from` has.
    """

    copy: Copy
    manifest_from: str
    common: Sequence[Fetch]
    fetches: Mapping[str, Sequence[Fetch]]


def place(
    nodes: Mapping[str, Inventory],
    ranks: Mapping[int, str],
    *,
    after: int = 0,
    counts: Callable[[Copy], bool] = lambda copy: True,
) -> Placement | None:
    """The newest snapshot past step `after` of which every file is in some node's memory; None if there is none.

    `ranks`: rank -> its node, of the attempt to come; `nodes`: those that answered. `counts`: whether a copy is of the
    run's one lineage.
    """
    found = {(c.step, c.attempt, c.manifest): (c, node) for node, inventory in nodes.items() for c in inventory.copies}
    for step, _, _ in sorted(found, reverse=True):
        if step <= after:
            return None
        for key in sorted((k for k in found if k[0] == step), reverse=True):
            copy, manifest_from = found[key]
            if counts(copy):
                placement = _placed(copy, manifest_from, nodes, ranks)
                if placement is not None:
                    return placement
    return None


def _placed(
    copy: Copy, manifest_from: str, nodes: Mapping[str, Inventory], ranks: Mapping[int, str]
) -> Placement | None:
    holders: dict[str, list[str]] = {}
    for node, inventory in nodes.items():
        for (step, name), nbytes in inventory.files.items():
            if step == copy.step and copy.files.get(name) == nbytes:
                holders.setdefault(name, []).append(node)
    if len(holders) < len(copy.files):
        return None
    load: Counter[str] = Counter()

    def fetch(name: str) -> Fetch:
        source = min(holders[name], key=lambda node: load[node])
        load[source] += 1
        return Fetch(name, copy.files[name], source)

    common = set(copy.shared) if copy.world_size == len(ranks) else set(copy.files)
    own: dict[int, list[str]] = {}
    for name in copy.files:
        shard = Shard.parse(name)
        if shard is not None and name not in common:
            own.setdefault(shard.rank, []).append(name)
    peers = {rank: group for group in copy.peers for rank in group}
    fetches: dict[str, list[Fetch]] = {}
    for rank, node in sorted(ranks.items()):
        mine = fetches.setdefault(node, [])
        for peer in peers.get(rank, (rank,)):
            for name in own.get(peer, ()):
                # From its own memory if it is there: its buddy's part, if not that of its own ranks.
                mine.append(Fetch(name, copy.files[name], node) if node in holders[name] else fetch(name))
    return Placement(copy, manifest_from, [fetch(name) for name in sorted(common)], fetches)
