"""Whether the summed gradients are sound: of each parameter, is it there, not all zero, finite, and the same on all replicas.

Runs in: each train worker. Torch, never ray. Every rank has one; rank 0 judges, tells, and changes nothing.

    after the sync, before clipping: each rank one number a parameter --one gather--> rank 0 --> event `gradients`
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from raydist.worker.distributed import Rank
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel import ParamShard, replicas

TOLERANCE = 1e-5
"""Norms further apart, relative to the larger, differ. Sums are the same bits on all replicas; norms of them, on unlike devices,
nearly."""
NAMED = 20
"""Most problems, and most ranks of one, that an event names."""
_MISSING = -1.0


class GradientCheck:
    """`look` in every step; every `every`-th it does something. `close` at the end."""

    def __init__(self, rank: Rank, shards: Mapping[str, ParamShard], every: int, reporter: Reporter | None) -> None:
        self._rank, self._every, self._reporter = rank, every, reporter
        self._names, self._shards = list(shards), list(shards.values())
        self._replicas = [replicas(shard.like, rank.world_size) for shard in self._shards]
        self._told: list[dict[str, Any]] = []
        self._seconds = self._ended = 0.0
        self._looks = 0

    def look(self, step: int) -> None:
        """Every rank: the gradients of `step` are there, each parameter's in its shard's `local`. Reads them, and nothing else."""
        if step % self._every:
            return
        begun = time.perf_counter()
        table = self._gathered(self._norms())
        if table is None:
            return
        problems = judge(self._names, self._replicas, table)
        now = time.perf_counter()
        if self._reporter and problems and _facts(problems) != _facts(self._told):
            self._reporter.say("gradients", step=step, problems=problems[:NAMED], count=len(problems))
        self._told = problems
        self._looks += 1
        since, self._seconds, self._ended = now - self._ended, now - begun, now
        if self._looks == 2:  # the first one warms up
            self._tell_cost(f", {self._seconds / since:.2%} of the time")

    def close(self) -> None:
        """Says what a look costs, if it has not been said."""
        if self._looks == 1:
            self._tell_cost("")

    def _tell_cost(self, share: str) -> None:
        if self._reporter:
            text = f"train.check_gradients: {self._every}: a look takes {1000 * self._seconds:.2f} ms{share}"
            self._reporter.say("note", text=text)

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """[P] in fp64, on the host: the L2 norm of what this rank has of each gradient; -1 where it has none, but should."""
        grads = [shard.local.grad for shard in self._shards]
        there = [i for i, grad in enumerate(grads) if grad is not None and grad.numel()]
        found = torch.tensor(
            [_MISSING if s.local.numel() and s.local.grad is None else 0.0 for s in self._shards], dtype=torch.float64
        )
        if there:
            norms = torch.stack(torch._foreach_norm([grads[i] for i in there]))  # type: ignore[misc]
            found[there] = norms.double().cpu()
        return found

    def _gathered(self, mine: torch.Tensor) -> NDArray[np.float64] | None:
        """[W, P] on rank 0, else None."""
        if self._rank.world_size == 1:
            return mine.numpy()[None]
        every = [torch.empty_like(mine) for _ in range(self._rank.world_size)] if self._rank.first else None
        dist.gather(mine, every, dst=0, group=self._rank.control)
        return torch.stack(every).numpy() if every is not None else None


def judge(
    names: list[str], replicas: list[tuple[tuple[int, ...], ...]], norms: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """What is wrong, in the order of the parameters. `norms`: [W, P], -1 for a gradient that is missing.

    `replicas`: of each parameter the ranks in groups that hold the same of it. A problem has `parameter`, `problem` (missing, zero,
    not_finite, differs), `ranks`; where norms differ `least` and `most` too, and `ranks` are those in the minority, or all
    of the group where none is.
    """
    missing, finite = norms == _MISSING, np.isfinite(norms)
    sound = finite & ~missing
    odd = _differing(replicas, np.where(sound, norms, np.nan))
    found: list[dict[str, Any]] = []
    for p, name in enumerate(names):
        for problem, where in (("missing", missing[:, p]), ("not_finite", ~finite[:, p])):
            if where.any():
                found.append(_problem(name, problem, np.flatnonzero(where).tolist()))
        if not norms[:, p].any():
            found.append(_problem(name, "zero", list(range(len(norms)))))
        for ranks, least, most in odd.get(p, []):
            found.append({**_problem(name, "differs", ranks), "least": least, "most": most})
    return found


def _differing(
    replicas: list[tuple[tuple[int, ...], ...]], norms: NDArray[np.float64]
) -> dict[int, list[tuple[list[int], float, float]]]:
    """Number of a parameter -> of each group of replicas that differ the odd ranks, and the least and the largest norm."""
    found: dict[int, list[tuple[list[int], float, float]]] = {}
    for groups in set(replicas):
        columns = np.array([p for p, of in enumerate(replicas) if of == groups])
        for group in groups:
            if len(group) < 2:
                continue
            part = norms[np.array(group)[:, None], columns]
            # fmax and fmin pass over what is missing.
            most, least = np.fmax.reduce(part, axis=0), np.fmin.reduce(part, axis=0)
            for at in np.flatnonzero(most - least > TOLERANCE * most):
                values = part[:, at]
                middle = np.sort(values[~np.isnan(values)])[(~np.isnan(values)).sum() // 2]
                away = np.abs(values - middle) > TOLERANCE * most[at]
                minority = 2 * away.sum() < (~np.isnan(values)).sum()
                odd = [r for r, is_away in zip(group, away, strict=True) if is_away] if minority else list(group)
                found.setdefault(int(columns[at]), []).append((odd, float(least[at]), float(most[at])))
    return found


def _problem(name: str, problem: str, ranks: list[int]) -> dict[str, Any]:
    return {"parameter": name, "problem": problem, "ranks": ranks[:NAMED]}


def _facts(problems: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What makes them others than those told before: not the norms, which are never the same."""
    return [(p["parameter"], p["problem"], p["ranks"]) for p in problems]
