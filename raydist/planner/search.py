"""Compares the meshes of a job on given GPUs: tensor x context x pipeline x chunks x expert x strategy x micro-batch, by forecast
speed.

Runs in: the user's shell (`raydist plan --search`). Plain python: no torch, no ray. `planner` measures passes of a mesh.

Every combination has a limit that its forecast cannot exceed: its speed if no rank of a pipeline waited longer than for the first
and the last micro-batch. The fastest by this limit is looked at first: it gets its forecast, with which it takes its place among
the others, and when it comes first again, its memory is looked at, until enough meshes fit. So those that are never reached cannot
be among the best, and the result is that of forecasts of all.

A pass is measured with one sequence and with the most, and those in between are interpolated: peaks are at most that much, because
the largest of several sums that grow with the micro-batch is convex. What does not fit without any activations needs no pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from raydist import registry
from raydist.errors import UserError
from raydist.planner.advice import divisors, listed, value
from raydist.planner.estimate import estimates, measured, refusal
from raydist.planner.facts import Activations, Estimate, Machine, Model, Pass, Peak
from raydist.planner.shares import planned, replicas
from raydist.planner.speed import Device, Speed, speed
from raydist.worker.pipeline_schedule import Timeline, soonest, timeline

if TYPE_CHECKING:
    from raydist.spec import JobSpec

AXES = ("tensor", "context", "pipeline", "chunks", "expert")
"""Fields of `parallel` that are a mesh."""
_MOST = 32
"""The largest micro-batch that is tried."""
_CHUNKS = (1, 2, 4)
_SAME = math.log(1.005)
"""Forecasts that differ by less are the same: then the simpler mesh comes first."""
_ROUNDING = 1 + 1e-9
"""A limit may be below its forecast by the rounding of sums."""


class Measured(Protocol):
    """What `raydist.planner.measure.Planner` gives of one mesh."""

    def model(self) -> Model:
        """As one rank of a tensor group has it."""

    def measure(self, how: Pass) -> Activations:
        """One micro-batch of a stage."""

    def sends(self, how: Pass) -> Activations:
        """What it sends, and nothing else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination that fits. `changes`: fields of the job, by their dotted names; `estimate`: of the rank with the most."""

    spec: JobSpec
    changes: dict[str, Any]
    estimate: Estimate
    speed: Speed
    because: str


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest combination of each of the best meshes. `combinations`: all; `slower`: those that were not looked at, because
    they cannot be among the best; `refused`: reason -> number of meshes that cannot be; `too_large`: what takes most of the memory
    -> number of combinations that were looked at and do not fit."""

    best: tuple[Candidate, ...]
    combinations: int
    slower: int
    refused: dict[str, int]
    too_large: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Tried:
    """One combination. `forecast`: its speed, or with `soonest` the limit of it."""

    spec: JobSpec
    strategy: str
    model: Model
    measure: Callable[[Pass], Activations]
    forecast: Callable[[Callable[..., Timeline]], Speed]

    @property
    def mesh(self) -> tuple[int, ...]:
        return tuple(getattr(self.spec.parallel, axis) for axis in AXES)


def search(
    spec: JobSpec,
    machine: Machine,
    device: Device,
    flops_per_token: float,
    blocks: int,
    planner: Callable[[JobSpec], Measured],
    best: int = 5,
) -> Found:
    """The `best` meshes. Other fields stay as in the job. `blocks`: of the model; `machine` has a `memory`."""
    refused: Counter[str] = Counter()
    tried = []
    for job in _meshes(spec, machine, blocks, refused):
        job = _whole_rows(job)
        of_mesh = planner(job)
        try:
            model, measure, sends = of_mesh.model(), _Between(of_mesh.measure), _Between(of_mesh.sends)
        except UserError as error:
            refused[error.message] += 1
            continue
        count = machine.ranks // job.parallel.replica
        strategies = []
        for strategy in planned(job) if replicas(job, machine) > 1 else (job.parallel.strategy,):
            if (why := refusal(strategy, job, machine, model)) is None:
                strategies.append(strategy)
            else:
                refused[f"{strategy}: {why}"] += 1
        alone = job.parallel.replica == job.parallel.expert == 1  # then nothing is sent in a replica
        for size in _sizes(job, count) if strategies else ():
            sized = job.with_fields(size)
            passes = () if alone else measured("ddp", sized, machine, model, sends)  # the same for any strategy
            for strategy in strategies:
                one = sized.with_fields({"parallel.strategy": strategy})
                forecast = partial(speed, strategy, one, machine, model, device, flops_per_token, passes)
                tried.append(_Tried(one, strategy, model, measure, forecast))
    return _fitting(spec, machine, tried, refused, best)


def _fitting(spec: JobSpec, machine: Machine, tried: list[_Tried], refused: Counter[str], best: int) -> Found:
    assert machine.usable is not None
    too_large: Counter[str] = Counter()
    beaten: dict[tuple[int, ...], dict[str, None]] = {}
    found: dict[tuple[int, ...], Candidate] = {}
    order = {strategy: i for i, strategy in enumerate(planned(spec))}

    def place(number: int, tokens_per_second: float) -> tuple[int, ...]:
        one = tried[number]
        return (
            -round(math.log(tokens_per_second) / _SAME), one.spec.parallel.replica * one.spec.parallel.chunks,
            one.spec.parallel.expert, order.get(one.strategy, 0), -one.spec.largest_pass[0], number,
        )  # fmt: skip

    limits = (one.forecast(soonest).tokens_per_second * _ROUNDING for one in tried)
    ahead: list[tuple[tuple[int, ...], Speed | None]] = [(place(n, limit), None) for n, limit in enumerate(limits)]
    heapify(ahead)
    looked_at = 0
    while ahead and len(found) < best:
        (*_, number), known = heappop(ahead)
        one = tried[number]
        if one.mesh in found:
            continue
        if known is None:
            looked_at += 1
            known = one.forecast(timeline)
            heappush(ahead, (place(number, known.tokens_per_second), known))
            continue
        fullest = _fullest(one, machine, _no_activations)
        if fullest.total <= machine.usable:
            fullest = _fullest(one, machine, one.measure)
        if fullest.total > machine.usable:
            state = fullest.state > fullest.total / 2
            too_large["parameters, gradients and optimizer" if state else "activations, loss and buffers"] += 1
            beaten.setdefault(one.mesh, {})[one.strategy] = None
            continue
        fields = [f"parallel.{f}" for f in (*AXES, "strategy")]
        batching = [f"data.batching.{f}" for f in ("max_tokens", "min", "longest")]
        fields += ["train.micro_batch"] if spec.data.batching is None else batching
        changes = {name: new for name in fields if (new := value(one.spec, name)) != value(spec, name)}
        because = _because(known, [s for s in beaten.get(one.mesh, {}) if s != one.strategy])
        found[one.mesh] = Candidate(one.spec, changes, fullest, known, because)
    return Found((*found.values(),), len(tried), len(tried) - looked_at, dict(refused), dict(too_large))


def _fullest(one: _Tried, machine: Machine, measure: Callable[[Pass], Activations]) -> Estimate:
    """The rank with the most."""
    return max(estimates(one.strategy, one.spec, machine, one.model, measure), key=lambda e: e.total)


def _no_activations(how: Pass) -> Activations:
    """Of a stage that keeps nothing but its state: the phases that every stage has."""
    return Activations(0, (Peak("forward", 0, 0, 0), Peak("backward", 0, 0, 0)))


def _because(found: Speed, beaten: list[str]) -> str:
    """What a step's time is, and which strategies of the same mesh would be as fast or faster, and do not fit."""
    parts = {
        "computes": found.compute,
        "waits for other stages": found.waits,
        "waits for collectives": found.exposed,
        "updates on the host": found.offload,
    }
    shares = [f"{what} {part / found.seconds:.0%}" for what, part in parts.items() if part >= 0.005 * found.seconds]
    why = f"a rank {listed(shares)} of a step"
    return f"{why}; {listed(beaten)} {'does' if len(beaten) == 1 else 'do'} not fit with it" if beaten else why


def _meshes(spec: JobSpec, machine: Machine, blocks: int, refused: Counter[str]) -> Iterator[JobSpec]:
    """The job with each mesh that its fields allow. The ranks that share layers or sequences stay on a node."""
    count = registry.described("model", spec.model.name, "experts")
    experts = count(spec.model) if count is not None else 1
    shares = registry.described("model", spec.model.name, "check_context") is not None
    on_node = math.gcd(machine.ranks, machine.per_node)
    groups = [(t, c) for t in divisors(on_node) for c in (divisors(on_node // t) if shares else [1])]
    for tensor, context in groups:
        for pipeline in divisors(machine.ranks // (tensor * context)):
            for chunks in _CHUNKS if pipeline > 1 else (1,):
                if pipeline * chunks > blocks:
                    refused["more stages than blocks"] += 1
                    continue
                for expert in divisors(math.gcd(experts, machine.ranks // pipeline)):
                    mesh = dict(zip(AXES, (tensor, context, pipeline, chunks, expert), strict=True))
                    parallel = {**spec.parallel.model_dump(), **mesh, "pipeline_cut": None}
                    try:
                        yield type(spec).model_validate({**dict(spec), "parallel": parallel})
                    except ValidationError as error:
                        refused[error.errors()[0]["msg"].removeprefix("Value error, ")] += 1


def _sizes(spec: JobSpec, count: int) -> list[dict[str, Any]]:
    """The sizes of a micro-batch that are tried, as fields of the job: powers of two for which all micro-batches of a replica are
    full. With data.batching so many of the longest sequences, at least `min` and no more than a replica has in a step."""
    powers = [2**n for n in range(_MOST.bit_length())]
    batching, share = spec.data.batching, -(-spec.train.global_batch // count)
    if batching is None:
        return [{"train.micro_batch": size} for size in powers if size == 1 or share % size == 0]
    if batching.global_tokens is not None:
        share = -(-batching.global_tokens // (count * spec.longest))
    most = max(min(share, batching.max or share), batching.min)
    sizes = [size for size in powers if batching.min <= size <= most] or [batching.min]
    return [{"data.batching.max_tokens": size * spec.longest} for size in sizes]


def _whole_rows(spec: JobSpec) -> JobSpec:
    """The job such that the largest micro-batch of each size is one of the longest sequences, whatever `max_tokens` is."""
    if spec.data.batching is None:
        return spec
    return spec.with_fields({"data.batching.longest": spec.longest, "data.batching.max_tokens": spec.longest})


class _Between:
    """Measured passes of one mesh, interpolated between the smallest and the largest micro-batch."""

    def __init__(self, measure: Callable[[Pass], Activations]) -> None:
        self._measure = measure

    def __call__(self, how: Pass) -> Activations:
        if how.micro_batch in (1, _MOST):
            return self._measure(how)
        few, many = (self._measure(replace(how, micro_batch=n)) for n in (1, _MOST))
        share = (how.micro_batch - 1) / (_MOST - 1)

        def at(a: int, b: int) -> int:
            return round(a + share * (b - a))

        before = {p.phase: p for p in few.peaks}
        peaks = [
            Peak(p.phase, at(b.whole, p.whole), at(b.activations, p.activations), at(b.loss, p.loss))
            for p in many.peaks
            for b in (before[p.phase],)
        ]
        return Activations(
            saved=at(few.saved, many.saved),
            peaks=(*peaks,),
            tensor_sent=at(few.tensor_sent, many.tensor_sent),
            copied=at(few.copied, many.copied),
            passed_on=at(few.passed_on, many.passed_on),
            exchanged=at(few.exchanged, many.exchanged),
        )
