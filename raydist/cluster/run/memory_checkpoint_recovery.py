"""Chooses the snapshot to resume from, and which node must fetch which of its files from which node.

Runs anywhere. Pure: no ray, no torch, no I/O; tested as a table, and for 10,000 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from raydist.checkpoint.memory_layout import Shard, peers_of


@dataclass(frozen=True, slots=True)
class Copy:
    """One snapshot, from its manifest. `files`: name -> bytes. `shared`: files that every rank reads, at the same world size.

    `peers`: groups of ranks that hold the same bits, which one of the group saved; a rank may be in several. One in none saved its
    own.
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
    """The files in one node's memory: (step, file) -> bytes; and their manifests. `files`: those that its ranks can read; `buddy`:
    others, which it keeps for the node whose buddy it is.
    """

    files: Mapping[tuple[int, str], int] = field(default_factory=dict)
    copies: Sequence[Copy] = ()
    buddy: Mapping[tuple[int, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A file that a node fetches from `source`. The node itself: from the files that it keeps as a buddy."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Resume from `copy`, once every node in `fetches` has its list. Of the files that all ranks read, each is then on a node with
    ranks, and the ranks send it to the others (worker/checkpoint/memory_sharing.py).

    Rank 0's node also needs the manifest, from node `manifest_from`.
    """

    copy: Copy
    manifest_from: str
    fetches: Mapping[str, Sequence[Fetch]]


def place(
    nodes: Mapping[str, Inventory],
    ranks: Mapping[int, str],
    *,
    after: int = 0,
    counts: Callable[[Copy], bool] = lambda copy: True,
    others: Callable[[Copy], Mapping[str, Inventory]] | None = None,
) -> Placement | None:
    """The newest snapshot after step `after` whose files are all in some node's memory; None if there is none.

    `ranks`: rank -> its node, of the next attempt. `nodes`: those that answered. `counts`: whether a copy belongs to the run's
    lineage. `others`: what nodes that were not asked have of a copy. Then None also if the newest one is incomplete: an answer of
    these nodes may complete it.
    """
    found = {(c.step, c.attempt, c.manifest): (c, node) for node, inventory in nodes.items() for c in inventory.copies}
    for step, _, _ in sorted(found, reverse=True):
        if step <= after:
            return None
        for key in sorted((k for k in found if k[0] == step), reverse=True):
            copy, manifest_from = found[key]
            if counts(copy):
                known = nodes if others is None else {**others(copy), **nodes}
                placement = _placed(copy, manifest_from, known, ranks)
                if placement is not None or others is not None:
                    return placement
    return None


def presumed(copy: Copy, ranks: Mapping[int, str], peers: bool) -> dict[str, Inventory]:
    """The files that the nodes of these ranks have if nothing has removed any: those that each rank saved. `peers`: and those of
    ranks with the same bits, as after a restart from this copy.
    """
    own, groups = _by_rank(copy), peers_of(copy.peers) if peers else {}
    files: dict[str, dict[tuple[int, str], int]] = {}
    for rank, node in ranks.items():
        names = (name for peer in groups.get(rank, {rank}) for name in own.get(peer, ()))
        files.setdefault(node, {}).update({(copy.step, name): copy.files[name] for name in names})
    return {node: Inventory(found) for node, found in files.items()}


def _by_rank(copy: Copy, without: Collection[str] = ()) -> dict[int, list[str]]:
    """Rank -> the files that it saved, without some."""
    found: dict[int, list[str]] = {}
    for name in copy.files:
        shard = Shard.parse(name)
        if shard is not None and name not in without:
            found.setdefault(shard.rank, []).append(name)
    return found


def _placed(
    copy: Copy, manifest_from: str, nodes: Mapping[str, Inventory], ranks: Mapping[int, str]
) -> Placement | None:
    holders: dict[str, list[str]] = {}
    for node, inventory in nodes.items():
        for (step, name), nbytes in chain(inventory.files.items(), inventory.buddy.items()):
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
    own, peers = _by_rank(copy, common), peers_of(copy.peers)
    fetches: dict[str, list[Fetch]] = {}
    nothing = Inventory()

    def there(node: str, name: str) -> bool:
        return nodes.get(node, nothing).files.get((copy.step, name)) == copy.files[name]

    for rank, node in sorted(ranks.items()):
        for peer in sorted(peers.get(rank, {rank})):
            for name in own.get(peer, ()):
                if not there(node, name):
                    # From the node's own memory if it keeps the file as a buddy.
                    one = Fetch(name, copy.files[name], node) if node in holders[name] else fetch(name)
                    fetches.setdefault(node, []).append(one)
    used = set(ranks.values())
    for name in sorted(common):
        if used.isdisjoint(holders[name]):
            shard = Shard.parse(name)
            node = ranks[shard.rank % len(ranks) if shard is not None else 0]
            fetches.setdefault(node, []).append(fetch(name))
    return Placement(copy, manifest_from, fetches)
