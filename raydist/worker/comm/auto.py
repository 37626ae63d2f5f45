"""Resolves `comm.compress: auto` and `comm.topology: auto` by trial passes, once per run and number of ranks.

Runs in: each train worker, every rank, before the run's own model is built. Torch, never ray.

    passes without any exchange, and with torch's all-reduce     where none waits, also in small buckets; still: torch's
      -> a few passes of each compressor, the fewest bytes first  each with a model of its own, which is dropped
      -> torch's in small buckets                                 the faster size is that of other topologies
      -> every topology                                           where passes take long, none that cannot come near the best
      -> the fastest and torch's once more                        the machine itself may be faster than before
      -> RUN/comm/world-00004-compress-0-topology.json            every restart reads it there, while the job asks for the same

Only the last micro-batch of a step is summed: what a way gains in a pass counts as a share of the whole step.

Which compressor is chosen changes numbers, and what is left of gradients is state of its kind. So a run keeps it at every number of
ranks; the topology is chosen for each number, and anew after a link was found to have become slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from raydist import registry
from raydist.errors import UserError
from raydist.extension_plans import compressor_plan
from raydist.run.directory import COMM, RunDir
from raydist.spec import CommSpec, JobSpec
from raydist.spec.comm import AUTO, NONE, TORCH, sent_bytes
from raydist.worker.comm import compressors, kept, topology
from raydist.worker.comm.buckets.measure import LONG_S, passes
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.parallel import Example
from raydist.worker.parallel._topology import teams, two_levels

Build = Callable[[], nn.Module]
WORTH = 0.02
"""A share of a step. Ways whose times differ by less count as equal: of these the one that changes least is taken, torch's first.
It is also the most that the choice may lose (docs/adr/0018)."""
FAR = 1.5
"""Where passes take long, a way is not tried if what it sends takes this many times as long as a step of the best so far."""
SMALL_MB = 2.0
"""Buckets that are tried beside torch's, where the job does not say a size: their sums overlap with backward."""


@dataclass(frozen=True, slots=True)
class Way:
    """How gradients could be sent. `bucket_mb`: None for torch's default."""

    compress: str = NONE
    topology: str = TORCH
    ring: list[int] | None = None
    bucket_mb: float | None = None

    def __str__(self) -> str:
        what = self.topology if self.compress == NONE else self.compress
        return what + (f", buckets of {self.bucket_mb:g} MiB" if self.bucket_mb is not None else "")

    def of(self, spec: JobSpec) -> JobSpec:
        """The job, sent this way."""
        comm = {"compress": self.compress, "topology": self.topology, "ring": self.ring, "max_loss_increase": 0.0}
        sent = {f"comm.{name}": value for name, value in comm.items()}
        return spec.with_fields({**sent, "parallel.bucket_mb": self.bucket_mb})


@dataclass(frozen=True, slots=True)
class Chosen:
    """The fields of the chosen way, and the reason. `seconds`: of a step's passes, by way; "no exchange" is the limit."""

    way: dict[str, Any]
    because: str
    seconds: dict[str, float]


def settle(spec: JobSpec, rank: Rank, run: RunDir, build: Build, example: Example) -> tuple[JobSpec, Chosen | None]:
    """The spec with the chosen way in place of `auto`; None if there is nothing to choose. Every rank; all get the same."""
    if not spec.comm.auto:
        return spec, None
    torchs = Way(bucket_mb=_size(spec))
    if rank.world_size == 1:
        return torchs.of(spec), None
    asked, size = _asked(spec.comm), torchs.bucket_mb
    name = kept.links_file(run, f"world-{rank.world_size:05d}-{asked}") if rank.first else ""
    known = kept.from_first(rank, Chosen, kept.read(run, name, Chosen) if rank.first else None)
    if known is None:
        before = kept.from_first(rank, Chosen, _elsewhere(run, asked) if rank.first else None)
        chosen = tried(spec, rank, run, build, example, before)
        known = kept.from_first(rank, Chosen, kept.keep(run, name, chosen) if rank.first else None)
    assert known is not None
    way = Way(**known.way)
    way = replace(way, bucket_mb=way.bucket_mb if size is None else size)  # the job may have another one since
    if way.topology == "ring":  # the order is that of the nodes that this attempt has
        way = replace(way, ring=topology.measured(rank, run).order)
    return way.of(spec), replace(known, way=asdict(way))


def _size(spec: JobSpec) -> float | None:
    size = spec.parallel.bucket_mb
    return None if size == "auto" else size


def _asked(comm: CommSpec) -> str:
    """What is left to measurement, and the bound: a choice counts for a job that asks for the same."""
    compress = f"compress-{comm.max_loss_increase:g}" if comm.compress == AUTO else ""
    return "-".join(filter(None, (compress, "topology" if comm.topology == AUTO else "")))


def _elsewhere(run: RunDir, asked: str) -> Chosen | None:
    """Rank 0. What this run has chosen at another number of ranks, or before a link became slow."""
    of_same = re.compile(rf"{COMM}/world-\d+-{re.escape(asked)}(-slow-\d+)?\.json")
    found = sorted(name for name in run.storage.files(COMM) if of_same.fullmatch(name))
    return kept.read(run, found[0], Chosen) if found else None


def tried(
    spec: JobSpec, rank: Rank, run: RunDir, build: Build, example: Example, before: Chosen | None = None
) -> Chosen:
    """Measures ways, and takes the fastest. Every rank. `before`: an earlier choice of the run."""
    size = _size(spec)
    torchs = Way(bucket_mb=size)
    if before is not None and before.way["compress"] != NONE:
        way = Way(**{**before.way, "topology": TORCH, "ring": None})
        return Chosen(asdict(way), f"{way}: as this run has chosen before", {})

    count = spec.batches(rank.world_size)[1]
    shapes: dict[str, torch.Size] = {}
    alone_s, synced = math.inf, dict[str, float]()
    ways, left = list[Way](), dict[str, float]()

    def built() -> nn.Module:
        model = build()
        shapes.update((name, p.shape) for name, p in model.named_parameters() if p.requires_grad)
        return model

    def measure(way: Way) -> None:
        """The least of the way's trials counts. Without exchange a pass takes at most as long as the fastest with one."""
        nonlocal alone_s
        made = passes(way.of(spec), rank, way.bucket_mb, built, example)
        synced[str(way)] = min(made.synced_s, synced.get(str(way), math.inf))
        alone_s = min(alone_s, made.pass_s, made.synced_s)
        if way not in ways:
            ways.append(way)

    def times() -> dict[str, float]:
        """Seconds of a step: of its micro-batches only the last one is summed."""
        rest = (count - 1) * alone_s
        return {"no exchange": rest + alone_s, **{name: rest + seconds for name, seconds in synced.items()}}

    def waits() -> tuple[float, str]:
        """The share of a step that waits for gradients with torch's, also in words."""
        step_s = times()[str(torchs)]
        share = 1 - times()["no exchange"] / step_s
        several = f" in {count} micro-batches" if count > 1 else ""
        return share, f"{share:.0%} of a step of {step_s:.3g} s{several} waits for gradients"

    def sent(way: Way) -> float:
        """Bytes over those of torch's."""
        return sent_bytes(way.of(spec), [*shapes.values()]) / sent_bytes(torchs.of(spec))

    def least(way: Way) -> float:
        """Seconds of a step if links are as fast as with torch's and all overlaps. Two levels and rings use other links."""
        exchange_s = synced[str(torchs)] - alone_s if way.topology in (TORCH, "direct") else 0.0
        return (count - 1) * alone_s + max(alone_s, sent(way) * exchange_s)

    def far(seconds: float) -> bool:
        """Whether no trial is worth its time."""
        found = times()
        return synced[str(torchs)] > LONG_S and seconds > FAR * min(found[str(way)] for way in ways)

    def measure_near(more: list[Way]) -> None:
        for way in more:
            if far(least(way)):
                left[str(way)] = least(way)
            elif way not in ways:
                measure(way)

    small = Way(bucket_mb=SMALL_MB) if size is None else torchs
    measure(torchs)
    if waits()[0] < WORTH:  # or other work has slowed down the passes without exchange: both again, in small buckets
        measure(small)
    if waits()[0] < WORTH:
        return Chosen(asdict(torchs), f"{torchs}: {waits()[1]}, so nothing is to be gained", times())
    compressed: list[Way] = []
    if spec.comm.compress == AUTO and before is None:
        # On CUDA each bucket costs launches, and the lanes are one stream: large ones may be faster, which no CPU shows.
        sizes = [small] if rank.backend == "gloo" or small == torchs else [small, torchs]
        compressed = [replace(way, compress=name) for name in within(spec.comm, shapes) for way in sizes]
    measure_near(sorted(compressed, key=sent))
    measure_near([small])
    more, links = _topologies(spec, rank, run, fastest([w for w in (torchs, small) if w in ways], times()), small)
    measure_near(more)
    ways = [way for way in dict.fromkeys((torchs, small, *more, *compressed)) if way in ways]
    if (best := fastest(ways, times())) != torchs:
        for way in (torchs, best):
            if not far(times()[str(way)]):
                measure(way)
        best = fastest(ways, times())
    found = times()
    steps = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.items())
    because = f"{waits()[1]}; of a step: {steps}{links}"
    if left:
        because += (
            f"; not tried, as what they send takes longer: {', '.join(f'{n} {s:.3g} s' for n, s in left.items())}"
        )
    if best == torchs:
        return Chosen(asdict(torchs), f"{torchs}: no way is faster by {WORTH:.0%}; {because}", found)
    gain = found[str(torchs)] / found[str(best)] - 1
    return Chosen(asdict(best), f"{best}: {gain:.0%} faster than {torchs}; {because}", found)


def fastest(ways: list[Way], times: Mapping[str, float]) -> Way:
    """The first of those within `WORTH` of the least time. `ways`: those that change least come first."""
    least = min(times[str(way)] for way in ways)
    return next(way for way in ways if times[str(way)] <= least * (1 + WORTH))


def _topologies(spec: JobSpec, rank: Rank, run: RunDir, sized: Way, small: Way) -> tuple[list[Way], str]:
    """Other topologies to try, and what was measured of links for it. `sized`: torch's in the faster buckets. A direct sum alone
    takes longer than a ring's, and gains where several overlap: it is tried in `small` buckets. Every rank."""
    found: list[Way] = []
    if spec.comm.topology != AUTO:
        return found, ""
    if two_levels(teams(range(rank.world_size), gather_json(rank.node_ip, rank.control))):
        found.append(replace(sized, topology="two_level"))
    if rank.backend != "gloo":
        return found, ""
    found.append(replace(small, topology="direct"))
    if rank.world_size == 2 or not topology.ORDERED:
        return found, ""
    ring = topology.measured(rank, run)
    if ring.order != [*range(rank.world_size)]:
        found.append(replace(sized, topology="ring", ring=ring.order))
    return found, f"; {ring.links}"


def within(comm: CommSpec, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The built-in compressors whose known loss is within `max_loss_increase`; the least loss first, then the most bits. Without
    those that can compress no parameter of these shapes, and those whose loss is known with error feedback alone, if the job
    leaves it out."""
    known: dict[str, tuple[float, float]] = {}
    for name in registry.names("compressor"):
        plan = compressor_plan(name)
        if plan is None or plan.loss_increase is None or plan.loss_increase > comm.max_loss_increase:
            continue
        if comm.error_feedback is False and plan.feedback and plan.loss_increase:
            continue
        if _takes(name, shapes):
            known[name] = plan.loss_increase, -plan.bits
    return sorted(known, key=lambda name: known[name])


def _takes(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    try:
        compressors.refuse(compressors.build(name, {}), shapes)
    except UserError:
        return False
    return True
