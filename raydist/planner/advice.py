"""Recommends a strategy: compares all of them, picks the cheapest that fits, and suggests changes if none does.

Runs in: the user's shell (`raydist plan`). Plain python: no torch, no ray. `measure` gives the memory of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydist.extension_plans import optimizer_plan
from raydist.planner.estimate import Measure, estimates, refusal
from raydist.planner.facts import ROOT, Estimate, Machine, Model
from raydist.planner.shares import plan_of, planned, replicas, shard_of

if TYPE_CHECKING:
    from raydist.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy with the job as it stands: an estimate of the fullest rank, or why there is none. `fits`: None if no memory is
    given. `ranks`: estimates of each rank of a pipeline."""

    strategy: str
    estimate: Estimate | None
    refused: str | None
    fits: bool | None
    ranks: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """The cheapest that fits. `changes`: fields of the job to set, by their dotted names; `because` is a sentence.

    `micro_batch`: the largest that fits with it.
    """

    estimate: Estimate
    micro_batch: int
    changes: dict[str, Any]
    because: str


@dataclass(frozen=True, slots=True)
class Advice:
    """`pick`: None without a given memory, or if nothing fits. `suggestions` are sentences."""

    rows: tuple[Row, ...]
    pick: Pick | None
    suggestions: tuple[str, ...]


def advise(spec: JobSpec, machine: Machine, model: Model, measure: Measure) -> Advice:
    """Every strategy, the pick, and suggestions."""
    return _Adviser(spec, machine, model, measure).advice()


class _Adviser:
    def __init__(self, spec: JobSpec, machine: Machine, model: Model, measure: Measure) -> None:
        self._spec, self._machine, self._model, self._measure = spec, machine, model, measure
        self._replicas = replicas(spec, machine)

    def advice(self) -> Advice:
        rows = tuple(self._row(s) for s in planned(self._spec))
        if self._machine.usable is None:
            return Advice(
                rows,
                None,
                ("Give --device, such as h100, or --memory, such as 16GiB, to know what fits.",),
            )
        pick = self._pick(rows)
        return Advice(rows, pick, tuple(self._suggestions(rows, pick)))

    def _estimate(self, strategy: str, spec: JobSpec) -> Estimate | None:
        return max(self._estimates(strategy, spec), key=lambda e: e.total, default=None)

    def _estimates(self, strategy: str, spec: JobSpec) -> tuple[Estimate, ...]:
        if refusal(strategy, spec, self._machine, self._model) is not None:
            return ()
        return estimates(strategy, spec, self._machine, self._model, self._measure)

    def _fits(self, found: Estimate) -> bool:
        assert self._machine.usable is not None
        return found.total <= self._machine.usable

    def _row(self, strategy: str) -> Row:
        ranks = self._estimates(strategy, self._spec)
        found = max(ranks, key=lambda e: e.total, default=None)
        fits = self._fits(found) if found is not None and self._machine.usable is not None else None
        return Row(strategy, found, refusal(strategy, self._spec, self._machine, self._model), fits, ranks)

    def _candidates(self) -> list[str]:
        """In the order of preference. With one replica all are the same. Of strategies that split the same state into the same
        parts on this machine (hsdp with one group is zero3) only one stays: the job's own, or the simplest."""
        own, all_of_them = self._spec.parallel.strategy, planned(self._spec)
        if self._replicas == 1:
            return [own if own in all_of_them else all_of_them[0]]
        kept: dict[Any, str] = {}
        for strategy in sorted(all_of_them, key=lambda s: (s != own, plan_of(s).group is not None)):
            plan = plan_of(strategy)
            custom = strategy if plan.traffic or plan.in_flight else ""
            kept.setdefault((plan.sharded, shard_of(strategy, self._spec, self._machine), custom), strategy)
        return [s for s in all_of_them if s in kept.values()]

    def _pick(self, rows: tuple[Row, ...]) -> Pick | None:
        if not any(row.fits for row in rows) and ((lightest := self._lightest()) is None or not self._fits(lightest)):
            return None
        for changes in self._ways():
            spec = self._spec.with_fields(changes)
            found = [e for s in self._candidates() if (e := self._estimate(s, spec)) is not None]
            fitting = [e for e in found if self._fits(e)]
            if fitting:
                best = fitting[0]
                if best.strategy != spec.parallel.strategy:
                    changes = {"parallel.strategy": best.strategy, **changes}
                larger = [e.strategy for e in found[: found.index(best)]]
                least = best.sent == min(e.sent for e in fitting)
                largest = self._micro_batch(best.strategy, self._spec.with_fields(changes))
                return Pick(best, largest, changes, self._because(best, changes, larger, least))
        return None

    def _ways(self) -> Iterator[dict[str, Any]]:
        """Changes besides the strategy, the cheapest first: none; offload; recomputation; smaller micro-batches."""
        train, offload = self._spec.train, self._spec.offload
        checkpoints = ["none", "selective", "full"]
        checkpoints = checkpoints[checkpoints.index(train.checkpoint_activations) :] if self._has_blocks() else ["none"]
        smaller = self._micro_batches(below=self._spec.batches(self._machine.ranks)[0])
        for micro in ({}, *({self._pass_field: size} for size in reversed(smaller))):
            for checkpoint in checkpoints:
                for optimizer in ("none", "cpu") if self._can_offload() else (offload.optimizer,):
                    wanted = {
                        **micro,
                        "train.checkpoint_activations": checkpoint,
                        "offload.optimizer": optimizer,
                    }
                    yield {k: v for k, v in wanted.items() if value(self._spec, k) != v}

    def _lightest(self) -> Estimate | None:
        """The estimate with the least memory of all settings: if it does not fit, nothing does."""
        changes: dict[str, Any] = {self._pass_field: self._micro_batches()[0]}
        if self._has_blocks():
            changes["train.checkpoint_activations"] = "full"
        if self._can_offload():
            changes["offload.optimizer"] = "cpu"
        spec = self._spec.with_fields(changes)
        found = [e for s in self._candidates() if (e := self._estimate(s, spec)) is not None]
        return min(found, key=lambda e: e.total, default=None)

    @property
    def _one(self) -> str:
        return "rank" if self._replicas == self._machine.ranks else "replica"

    def _can_offload(self) -> bool:
        """Whether offloading helps. On a CPU it does not: host and device memory are the same."""
        return (
            self._machine.device == "cuda"
            and self._spec.offload.optimizer == "none"
            and bool((plan := optimizer_plan(self._spec.optim.name)) and plan.offload)
        )

    def _has_blocks(self) -> bool:
        return any(p.unit != ROOT for p in self._model.params)

    @property
    def _pass_field(self) -> str:
        """The field that sets the size of a micro-batch."""
        return "train.micro_batch" if self._spec.data.batching is None else "data.batching.max_tokens"

    def _micro_batches(self, below: int | None = None) -> list[int]:
        """Sizes, ascending, that divide a replica's share of the global batch, so that all micro-batches are full.

        With data.batching in tokens: max_tokens and its halves, but for those that shorten the longest sequence; with `below`
        without the job's own.
        """
        if (batching := self._spec.data.batching) is not None:
            least = self._spec.longest * batching.min
            sizes = [batching.max_tokens]
            while sizes[0] // 2 >= least:
                sizes.insert(0, sizes[0] // 2)
            return sizes if below is None else sizes[:-1]
        share, rest = divmod(self._spec.train.global_batch, self._replicas)
        sizes = [n for n in divisors(self._spec.train.global_batch) if n <= share] if rest else divisors(share)
        return [n for n in sizes if below is None or n < below]

    def _because(self, found: Estimate, changes: dict[str, Any], larger: list[str], least: bool) -> str:
        others = [f"{k}: {v}" for k, v in changes.items() if k != "parallel.strategy"]
        with_them = f"nothing fits as the job stands; with {' and '.join(others)}, " if others else ""
        if self._replicas == 1:
            return with_them + ("it does." if others else f"one {self._one} has nothing to share, and it fits.")
        too_large = f"{listed(larger)} {'does' if len(larger) == 1 else 'do'} not fit, and " if larger else ""
        others_too = "of those that do" if larger else "of all that fit"
        sends = "sends least" if self._one == "rank" else "sends least to other replicas"
        merit = f"it {sends}, {_size(found.sent)} a step and rank" if least else "it waits least for other ranks"
        return f"{with_them}{too_large}{others_too} {merit}."

    def _suggestions(self, rows: tuple[Row, ...], pick: Pick | None) -> Iterator[str]:
        own = next((r for r in rows if r.strategy == self._spec.parallel.strategy), None)
        if own is None:
            yield f"{self._spec.parallel.strategy} has no PLAN (docs/extending.md): it cannot be planned."
        elif own.fits is False and own.estimate is not None and pick is not None:
            yield f"{own.strategy}, which the job names, needs {_size(own.estimate.total)} and does not fit."
        elif own.fits and pick is not None and pick.estimate.strategy != own.strategy:
            yield f"{own.strategy}, which the job names, fits too."
        if pick is None:
            yield from self._nothing_fits()
            return
        if pick.micro_batch > self._spec.with_fields(pick.changes).batches(self._machine.ranks)[0]:
            share = self._spec.train.global_batch // self._replicas
            yield (
                f"train.micro_batch: {pick.micro_batch} is the largest that fits and divides a {self._one}'s {share} sequences."
            )
        found = pick.estimate
        if found.loss > found.total / 3:
            yield f"Logits and loss take {_size(found.loss)} of {_size(found.total)}: a smaller {self._pass_field} shrinks them."
        if found.host:
            each = min(self._machine.ranks, self._machine.per_node)
            yield f"Each node needs {_size(found.host * each)} of free host memory for what is offloaded."

    def _micro_batch(self, strategy: str, spec: JobSpec) -> int:
        """The largest micro-batch that fits, by bisection: memory grows with it."""
        if spec.data.batching is not None:
            return spec.batches(self._machine.ranks)[0]
        sizes = self._micro_batches()
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            found = self._estimate(strategy, spec.with_fields({"train.micro_batch": sizes[middle]}))
            if found is not None and self._fits(found):
                low = middle + 1
            else:
                high = middle
        return sizes[low - 1] if low else spec.batches(self._machine.ranks)[0]

    def _nothing_fits(self) -> Iterator[str]:
        lightest = self._lightest()
        if lightest is None:
            yield "No strategy can train this job at all: see above."
            return
        assert self._machine.usable is not None
        least = "1" if self._spec.data.batching is None else f"{self._micro_batches()[0]:,} tokens"
        yield (
            f"Nothing fits: even with all options that save memory and micro-batches of {least}, {lightest.strategy} needs "
            f"{_size(lightest.total)} per device, and {_size(self._machine.usable)} are usable."
        )
        if lightest.state > lightest.total / 2:
            yield "Most of it is parameters, gradients and optimizer state: use more GPUs with zero3, or a smaller model."
        else:
            yield "Most of it is activations and loss: use a shorter model.context, or a narrower model."


def value(spec: JobSpec, name: str) -> Any:
    """A field of the job by its dotted name."""
    found: Any = spec
    for part in name.split("."):
        found = getattr(found, part)
    return found


def divisors(n: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def listed(names: list[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
