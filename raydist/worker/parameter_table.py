"""One table of all parameters of the model, the same on every rank: names, shapes, placements, and which ranks hold the same bits.

Runs in: each train worker. Torch, never ray.

Each rank describes what it has; one gather of JSON makes the union. A rank may have names that others lack, as in pipeline stages.

    rank 0   a [8, 4] whole          b [8, 4] rows 0-3         a   ranks 0, 1   holders (0, 1)
    rank 1   a [8, 4] whole          b [8, 4] rows 4-7    ->   b   ranks 0, 1   holders (0,), (1,)
    rank 2   c [4] whole                                       c   ranks 2      holders (2,)

The rule: ranks that have the same box of the same tensor hold the same bits. A plain tensor's box is the whole tensor, a DTensor's
is that of its placements. The checks, the histograms, checkpoints and copies in memory read this table, and derive nothing from
the world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist.errors import GraphMismatch
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParamShard

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as all ranks together have it.

    `dtype`: as torch spells it without `torch.`. `placement`: of a DTensor, one string a mesh dimension; () for a plain tensor.
    `ranks`: those that have the name. `holders`: those that have elements of it, in groups with the same box; in the order of
    their lowest ranks. `alias`: the name of the tensor whose memory this one shares (tied weights), or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: tuple[str, ...]
    ranks: Ranks
    holders: tuple[Ranks, ...]
    alias: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each rank that has it has all of it."""
        return not self.placement

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class TensorTable(Mapping[str, TensorRow]):
    """Rows by name. Equal on every rank, but for `rank`: names in the order of rank 0, then those that rank 1 adds, and so on."""

    def __init__(self, rows: Mapping[str, TensorRow], rank: int, world_size: int) -> None:
        self._rows, self.rank, self.world_size = dict(rows), rank, world_size

    def __getitem__(self, name: str) -> TensorRow:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def group(self, name: str) -> Ranks:
        """The ranks that hold the same bits of it as this rank, itself among them; () if this rank holds none."""
        return next((group for group in self._rows[name].holders if self.rank in group), ())

    def held_by_all(self, name: str) -> bool:
        """Whether every rank of the world holds all of it."""
        return self._rows[name].is_whole and len(self._rows[name].ranks) == self.world_size


class ParameterTable(TensorTable):
    """All parameters, those that are trained first. `shards`: this rank's part of the trained ones that it has. `base`: those that
    checkpoints leave out, because they are read from `model.hf`."""

    def __init__(
        self,
        rows: Mapping[str, TensorRow],
        rank: int,
        world_size: int,
        trained: list[str],
        shards: Mapping[str, ParamShard],
        base: Sequence[str] = (),
    ) -> None:
        super().__init__(rows, rank, world_size)
        self.trained, self.shards, self.base = trained, dict(shards), tuple(base)

    @property
    def is_same_everywhere(self) -> bool:
        """Whether every rank has every name. Pipeline stages have different names."""
        return all(len(row.ranks) == self.world_size for row in self.values())

    def apart(self, copy: Callable[[int], int]) -> ParameterTable:
        """The table of replicas that train apart: only ranks of one replica hold the same bits. `copy`: which one a rank is in."""

        def split(row: TensorRow) -> TensorRow:
            found = (
                tuple(r for r in group if copy(r) == c) for group in row.holders for c in sorted({*map(copy, group)})
            )
            return replace(row, holders=tuple(sorted(found)))

        rows = {name: split(row) for name, row in self.items()}
        return ParameterTable(rows, self.rank, self.world_size, self.trained, self.shards, self.base)

    def counts(self, name: str) -> bool:
        """Whether this rank counts its elements in a sum over all ranks: of the ranks that hold the same bits the first does."""
        return self.group(name)[:1] == (self.rank,)


def gather_parameters(
    shards: Mapping[str, ParamShard], rank: Rank, frozen: Mapping[str, Tensor] | None = None, has_base: bool = False
) -> ParameterTable:
    """The table of all ranks' `strategy.shards()`. `frozen`: parameters that are not trained; `has_base`: checkpoints leave them
    out. Names are the plain model's.

    A collective. Raises GraphMismatch, on every rank, where two ranks describe a parameter differently.
    """
    likes: dict[str, Tensor] = {
        name: shard.local if shard.like is None else shard.like for name, shard in shards.items()
    }
    mine = _described({**likes, **(frozen or {})}, {})
    every = gather_json([mine, list(shards)], rank.control)
    rows = _joined([of_rank for of_rank, _ in every])
    trained = list(dict.fromkeys(name for _, names in every for name in names))
    rows = {name: rows[name] for name in dict.fromkeys((*trained, *rows))}
    base = [name for name in rows if name not in trained] if has_base else ()
    return ParameterTable(rows, rank.rank, rank.world_size, trained, shards, base)


def gather_tensors(
    tensors: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None, aliases: Mapping[str, str] | None = None
) -> TensorTable:
    """The table of all ranks' tensors, such as the state that a checkpoint holds. A collective of `group`."""
    every = gather_json(_described(tensors, aliases or {}), group)
    return TensorTable(_joined(every), rank, len(every))


class TableCache:
    """`gather_tensors` of a state that rarely changes. Every rank has one, and calls `of` at the same steps."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = rank, group
        self._last: tuple[Any, TensorTable] | None = None

    def of(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> TensorTable:
        """The table of these tensors. A collective: one all-reduce of a number; a gather only if the state of a rank has changed in
        names, shapes, types or placements.
        """
        cuts = (t.placements if isinstance(t, DTensor) else None for t in tensors.values())
        key = aliases, [(name, t.shape, t.dtype, cut) for (name, t), cut in zip(tensors.items(), cuts, strict=True)]
        # Four numbers, by which a trace tells it from the other all-reduces (MESSAGES in worker/step.py).
        changed = torch.tensor([self._last is None or self._last[0] != key, 0, 0, 0], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if self._last is None or changed[0].item():
            self._last = key, gather_tensors(tensors, self._rank, self._group, aliases)
        return self._last[1]


def _described(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, list[str | None]]:
    """What a rank sends: name -> [facts, placement, box, alias], in texts, which are compared faster than lists.

    Facts: "float32 4,2 whole" or "float32 4,2 part". Box: "offsets:sizes", or None if this rank has no elements.
    """
    found: dict[str, list[str | None]] = {}
    boxes: dict[tuple[Any, ...], str | None] = {}  # most tensors share a shape with others
    for name, tensor in tensors.items():
        is_part = isinstance(tensor, DTensor)
        key = tuple(tensor.shape), (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if key not in boxes:
            boxes[key] = _box(tensor)
        facts = f"{dtype_name(tensor.dtype)} {_text(tensor.shape)} {'part' if is_part else 'whole'}"
        placement = "|".join(map(str, tensor.placements)) if isinstance(tensor, DTensor) else ""
        found[name] = [facts, placement, boxes[key], aliases.get(name)]
    return found


def _box(tensor: Tensor) -> str | None:
    sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return None
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return f"{_text(offsets)}:{_text(sizes)}" if math.prod(sizes) or not tensor.numel() else None


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _joined(every: list[dict[str, list[str]]]) -> dict[str, TensorRow]:
    """The union of all ranks' descriptions. Raises GraphMismatch, on every rank, where two ranks describe a tensor differently."""
    same: dict[int, list[int]] = {}  # ranks that sent the same text have one object, see gather_json
    for rank, described in enumerate(every):
        same.setdefault(id(described), []).append(rank)
    first: dict[str, list[str]] = {}
    having: dict[str, list[int]] = {}
    boxes: dict[str, dict[str, list[int]]] = {}
    for ranks in same.values():
        for name, description in every[ranks[0]].items():
            if name not in first:
                first[name], having[name], boxes[name] = list(description), [], {}
            facts, _, box, alias = description
            if facts != first[name][0]:
                raise GraphMismatch(
                    f"{name}: rank {having[name][0]} has {first[name][0]}, rank {ranks[0]} has {facts} (type, shape, part)",
                    "build the same model on every rank; ranks with different parts of one tensor have DTensors of it",
                )
            if alias != first[name][3]:
                first[name][3] = ""
            having[name] += ranks
            if box is not None:
                boxes[name].setdefault(box, []).extend(ranks)
    rows: dict[str, TensorRow] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (facts, placement, _, alias) in first.items():
        if facts not in shapes:
            dtype, sizes, _ = facts.split(" ")
            shapes[facts] = dtype, tuple(int(size) for size in sizes.split(",") if size)
        dtype, shape = shapes[facts]
        groups = tuple(sorted(tuple(sorted(group)) for group in boxes[name].values()))
        cut = tuple(placement.split("|")) if facts.endswith("part") else ()
        rows[name] = TensorRow(name, shape, dtype, cut, tuple(sorted(having[name])), groups, alias or None)
    return rows
