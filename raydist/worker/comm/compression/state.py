"""What compressed gradients keep between steps, and what a step tells of them.

Runs in: each train worker. Torch, never ray.

A step computes what is left into buffers of its own. They count from the update on: a step that overflows, is left out or is run
again leaves what was kept before. So the state is constant from one update to the next, as a copy of it needs.

In a checkpoint each rank has its own, by parameter. On the same mesh each gets its own back, to the bit. On another one, and where
copies are sharded over other ranks, the sum over the ranks is kept: see `Compression.join`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydist.worker.comm.compression.reducer import Reducer, agreed
from raydist.worker.distributed import Rank
from raydist.worker.precision import Precision
from raydist.worker.step_hooks import Step, StepHook

NAME = "comm"
"""Of the extra state in checkpoints."""
LEFT, SHARED = "left", "shared"
"""Tensors of the state: of this rank alone, or equal on the ranks that sum a gradient."""
_ROWS = re.compile(r"(.*)[/-]rows-(\d+)-of-\d+")
"""The key of some rows of a parameter, which the ranks of a copy share: see `part` of a reducer."""


@dataclass(frozen=True, slots=True)
class Report:
    """Of one step, on this rank: see `StepRecord`."""

    residual_norm: float | None
    compression_error: float
    sent_bytes: int
    saved_bytes: int


class Compression(StepHook):
    """All reducers of this rank: a hook of the step, and an `ExtraState`.

    Raises UserError, on every rank, if ranks would send different things. A collective of all ranks.
    """

    per_rank = True

    def __init__(self, reducers: Sequence[Reducer], precision: Precision, rank: Rank) -> None:
        self._reducers, self._precision = reducers, precision
        self._feedback = any(reducer.feedback for reducer in reducers)
        self.last: Report | None = None
        every = agreed([(reducer.ranks, reducer.described()) for reducer in reducers], rank.control)
        self._elsewhere = self._held_before(every)

    def _held_before(self, every: Sequence[Sequence[Any]]) -> set[str]:
        """The tensors of which another group with a lower rank keeps some too, of a weight that is tied over pipeline stages."""
        firsts: dict[str, set[int]] = {}
        for of_rank in every:
            for ranks, (part, _, lines) in of_rank:
                for name in (name for names, _ in lines for name in names):
                    firsts.setdefault(_key(LEFT, name, part), set()).add(ranks[0])
        own = {_key(LEFT, n, r.part): r.ranks[0] for r in self._reducers for p in r.pieces for n in p.shapes}
        return {name for name, first in own.items() if min(firsts[name]) != first}

    # --- the step

    def begin(self, step: Step) -> None:
        """See `StepHook.begin`."""
        for reducer in self._reducers:
            reducer.begin(self._precision.loss_scale)

    def updated(self, step: Step) -> None:
        """What this step left is kept."""
        for reducer in self._reducers:
            reducer.commit()

    def gradients_ready(self, step: Step) -> None:
        """The figures of the step: the host has waited for its gradients anyway."""
        sent = [each for reducer in self._reducers for each in reducer.sent]
        squares = [each.given for each in sent] + [each.lost for each in sent] + [r.left() for r in self._reducers]
        found = torch.stack(squares).double().tolist() if squares else []
        given, lost, left = sum(found[: len(sent)]), sum(found[len(sent) : 2 * len(sent)]), sum(found[2 * len(sent) :])
        nbytes = sum(each.nbytes for each in sent)
        residual = math.sqrt(left) if self._feedback else None
        self.last = Report(
            residual,
            math.sqrt(lost / given) if given else 0.0,
            round(nbytes),
            round(sum(each.plain for each in sent) - nbytes),
        )

    # --- checkpoints

    def state_tensors(self) -> Mapping[str, Tensor]:
        """See `ExtraState.state_tensors`."""
        found: dict[str, Tensor] = {}
        for reducer in self._reducers:
            for piece in reducer.pieces:
                if piece.kept is not None:
                    left = piece.of_parameters(piece.kept)
                    found |= {_key(LEFT, name, reducer.part): tensor for name, tensor in left.items()}
                found |= {_key(SHARED, name, reducer.part): tensor for name, tensor in piece.kept_state.items()}
        return found

    def state_values(self) -> Mapping[str, Any]:
        """See `ExtraState.state_values`."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState.load_state`."""
        for reducer in self._reducers:
            for piece in reducer.pieces:
                if piece.kept is not None:
                    piece.take(piece.kept, {name: tensors[_key(LEFT, name, reducer.part)] for name in piece.shapes})
                for name in piece.kept_state:
                    piece.kept_state[name] = tensors[_key(SHARED, name, reducer.part)].clone()

    def sources(
        self, own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Sequence[str]] | None:
        """See `Joins.sources`. Of what is left all that has rows of this rank's; of what ranks had alike the first of these."""
        with_rows: dict[str, list[str]] = {}
        for name in sorted(saved, key=lambda name: _rows(name)[1]):
            with_rows.setdefault(_rows(name)[0], []).append(name)
        found: dict[str, Sequence[str]] = {}
        for name, tensor in own.items():
            shape, every = tuple(tensor.shape), with_rows.get(_rows(name)[0], [])
            those = [s for s in every if s == name or _common(name, shape, s, saved[s])]
            if name.startswith(SHARED):
                # Of several matrices each has a row here, as it has in the parameter, and ranks may share them in another way.
                several = len(shape) > 2
                found[name] = [s for s in those if saved[s][several:] == shape[several:]][: None if several else 1]
            elif not every or any(saved[s] != shape if s == name else saved[s][1:] != shape[1:] for s in those):
                return None
            else:  # none of a part that only fills up
                found[name] = those
        return found

    def join(self, name: str, total: Tensor, source: str, of_rank: Tensor, first: bool) -> None:
        """See `Joins.join`.

        Of what is left: on one stretch of it. Each rank has another stretch, so the sum over the ranks is to the bit what it was,
        however many there are. What all ranks had alike is taken from the first, and of several matrices from those that had them.
        """
        if name.startswith(SHARED):
            if total.dim() > 2:
                rows, its_rows = _common_rows(name, total, source, of_rank)
                total[rows] = of_rank[its_rows]
            elif first:
                total.copy_(of_rank)
            return
        if name in self._elsewhere:
            return
        reducer = next(
            r for r in self._reducers if any(name == _key(LEFT, n, r.part) for p in r.pieces for n in p.shapes)
        )
        if source != name:
            rows, its_rows = _common_rows(name, total, source, of_rank)
            taken = of_rank[its_rows]
            of_rank = torch.zeros_like(total)
            of_rank[rows] = taken
        place, ranks = reducer.ranks.index(reducer.me), len(reducer.ranks)
        total.view(-1).tensor_split(ranks)[place].add_(of_rank.reshape(-1).tensor_split(ranks)[place])


def _key(kind: str, name: str, part: str) -> str:
    """The name of a tensor of the state: of ranks that have the same part of a parameter the same."""
    return "/".join(filter(None, (kind, name, part)))


def _rows(key: str) -> tuple[str, int]:
    """The key without the rows that it is of, and their place among those of the other ranks."""
    found = _ROWS.fullmatch(key)
    return (found[1], int(found[2])) if found else (key, 0)


def _common(key: str, shape: Sequence[int], other: str, its_shape: Sequence[int]) -> range:
    """The rows of the whole parameter that both have, with those that fill up the last parts."""
    (begin, rows), (its_begin, its_rows) = (
        (_rows(k)[1] * (s[0] if s else 1), s[0] if s else 1) for k, s in ((key, shape), (other, its_shape))
    )
    return range(max(begin, its_begin), max(min(begin + rows, its_begin + its_rows), begin, its_begin))


def _common_rows(key: str, tensor: Tensor, other: str, its: Tensor) -> tuple[slice, slice]:
    """Where the rows that both have are in each of them."""
    common = _common(key, tensor.shape, other, its.shape)
    begin, its_begin = (_rows(n)[1] * len(t) for n, t in ((key, tensor), (other, its)))
    return slice(common.start - begin, common.stop - begin), slice(common.start - its_begin, common.stop - its_begin)
