"""Checks the summed gradients: whether that of each parameter exists, is not all zero, is finite, and is equal on all replicas.

Runs in: each train worker. Torch, never ray. Every rank has one; rank 0 judges and reports. Nothing is changed.

    after the sync, before clipping: each rank one number a parameter --one gather--> rank 0 --> event `gradients`

The parameters are those of all ranks (worker/parameter_table.py); a rank need not have all of them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from raydist.worker.distributed import Rank
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parameter_table import ParameterTable, Ranks
from raydist.worker.step_hooks import Step, StepHook

TOLERANCE = 1e-5
"""Norms that differ by more, relative to the larger, are reported. Sums have the same bits on all replicas; their norms, computed
on
different kinds of devices, nearly."""
NAMED = 20
"""An event names at most so many problems, and so many ranks of each."""
_MISSING = -1.0


class GradientCheck(StepHook):
    """A hook that checks every `every`-th step. `close` after the last one."""

    def __init__(self, rank: Rank, parameters: ParameterTable, every: int, reporter: Reporter | None) -> None:
        self._rank, self._every, self._reporter = rank, every, reporter
        self._names = parameters.trained
        self._shards = [parameters.shards.get(name) for name in self._names]
        self._holders = [parameters[name].holders for name in self._names]
        self._reported: list[dict[str, Any]] = []
        self._seconds = self._ended = 0.0
        self._looks = 0

    def gradients_ready(self, step: Step) -> None:
        """Compares the gradients of all ranks, and changes none."""
        if step.overflow or step.number % self._every:
            return
        begun = time.perf_counter()
        table = self._gathered(self._norms())
        if table is None:
            return
        problems = judge(self._names, self._holders, table)
        now = time.perf_counter()
        if self._reporter and problems and _facts(problems) != _facts(self._reported):
            self._reporter.say("gradients", step=step.number, problems=problems[:NAMED], count=len(problems))
        self._reported = problems
        self._looks += 1
        since, self._seconds, self._ended = now - self._ended, now - begun, now
        if self._looks == 2:  # the first one warms up
            self._report_cost(f", {self._seconds / since:.2%} of the time")

    def close(self) -> None:
        """Reports the cost of a look, if that has not been done."""
        if self._looks == 1:
            self._report_cost("")

    def _report_cost(self, share: str) -> None:
        if self._reporter:
            text = f"train.check_gradients: {self._every}: a look takes {1000 * self._seconds:.2f} ms{share}"
            self._reporter.say("note", text=text)

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """[P] in fp64, on the host: the L2 norm of this rank's part of each gradient; -1 if it should have one, and has none."""
        grads = [shard.local.grad if shard is not None else None for shard in self._shards]
        there = [i for i, grad in enumerate(grads) if grad is not None and grad.numel()]
        missing = [s is not None and s.local.numel() > 0 and s.local.grad is None for s in self._shards]
        found = torch.tensor([_MISSING if is_missing else 0.0 for is_missing in missing], dtype=torch.float64)
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


def judge(names: list[str], holders: list[tuple[Ranks, ...]], norms: NDArray[np.float64]) -> list[dict[str, Any]]:
    """The problems, in the order of the parameters. `norms`: [W, P], -1 for a gradient that is missing.

    `holders`: of each parameter the ranks in groups that hold the same bits of it. A problem has `parameter`, `problem` (missing,
    zero, not_finite, differs), `ranks`; if norms differ also `least` and `most`, and `ranks` are the minority, or the whole group
    if there is none.
    """
    missing, finite = norms == _MISSING, np.isfinite(norms)
    sound = finite & ~missing
    odd = _differing(holders, np.where(sound, norms, np.nan))
    found: list[dict[str, Any]] = []
    for p, name in enumerate(names):
        for problem, where in (("missing", missing[:, p]), ("not_finite", ~finite[:, p])):
            if where.any():
                found.append(_problem(name, problem, np.flatnonzero(where).tolist()))
        if not norms[:, p].any():
            found.append(_problem(name, "zero", sorted(rank for group in holders[p] for rank in group)))
        for ranks, least, most in odd.get(p, []):
            found.append({**_problem(name, "differs", ranks), "least": least, "most": most})
    return found


def _differing(
    holders: list[tuple[Ranks, ...]], norms: NDArray[np.float64]
) -> dict[int, list[tuple[list[int], float, float]]]:
    """Index of a parameter -> of each group of holders that differ the odd ranks, and the smallest and the largest norm."""
    found: dict[int, list[tuple[list[int], float, float]]] = {}
    for groups in set(holders):
        columns = np.array([p for p, its_groups in enumerate(holders) if its_groups == groups])
        for group in groups:
            if len(group) < 2:
                continue
            part = norms[np.array(group)[:, None], columns]
            # fmax and fmin ignore missing norms.
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
    """What is compared with the problems reported before: not the norms, which always change."""
    return [(p["parameter"], p["problem"], p["ranks"]) for p in problems]
