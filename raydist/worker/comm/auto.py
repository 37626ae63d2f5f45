"""Resolves `comm.compress: auto` and `comm.topology: auto` by trial passes, once per run and number of ranks.

Runs in: each train worker, every rank, before the run's own model is built. Torch, never ray.

    passes without any exchange, and with torch's all-reduce     nothing to gain: torch's
      -> a few passes of every way                                each with a model of its own, which is dropped
      -> the fastest and torch's once more                        the machine itself may be faster than before
      -> RUN/comm/world-00004.json                                every restart reads it there

Which compressor is chosen changes numbers, and what is left of gradients is state of its kind. So a run keeps it at every number of
ranks; the topology is chosen for each number, and anew after a link was found to have become slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from raydist import registry
from raydist.extension_plans import compressor_plan
from raydist.run.directory import COMM, RunDir
from raydist.spec import JobSpec
from raydist.spec.comm import AUTO, NONE, TORCH
from raydist.worker.comm import kept, topology
from raydist.worker.comm.buckets.measure import Passes, passes
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.parallel import Example
from raydist.worker.parallel._topology import teams, two_levels

Build = Callable[[], nn.Module]
WORTH = 0.03
"""A share of a pass: less is not worth another way than torch's, and two measurements of one way differ by up to it."""
_AS_GOOD = 0.02
"""Of ways whose times differ by less than this share the one that changes least is taken."""
SMALL_MB = 1.0
"""Buckets of trials with a compressor, where the job does not say a size: its exchange then overlaps with backward."""


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
    """The fields of the chosen way, and the reason. `seconds`: of a pass, by way; "no exchange" is the limit."""

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
    name = kept.links_file(run, "world", rank.world_size) if rank.first else ""
    known = kept.from_first(rank, Chosen, kept.read(run, name, Chosen) if rank.first else None)
    if known is None:
        before = kept.from_first(rank, Chosen, _elsewhere(run) if rank.first else None)
        chosen = tried(spec, rank, run, build, example, before)
        known = kept.from_first(rank, Chosen, kept.keep(run, name, chosen) if rank.first else None)
    assert known is not None
    return Way(**known.way).of(spec), known


def _size(spec: JobSpec) -> float | None:
    size = spec.parallel.bucket_mb
    return None if size == "auto" else size


def _elsewhere(run: RunDir) -> Chosen | None:
    """Rank 0. What this run has chosen at another number of ranks, or before a link became slow."""
    for name in sorted(run.storage.files(COMM)):
        if name.startswith(f"{COMM}/world-"):
            return kept.read(run, name, Chosen)
    return None


def tried(
    spec: JobSpec, rank: Rank, run: RunDir, build: Build, example: Example, before: Chosen | None = None
) -> Chosen:
    """Measures ways, and takes the fastest. Every rank. `before`: an earlier choice of the run."""
    size = _size(spec)
    torchs = Way(bucket_mb=size)
    if before is not None and before.way["compress"] != NONE:
        way = Way(**{**before.way, "topology": TORCH, "ring": None})
        return Chosen(asdict(way), f"{way}: as this run has chosen before", {})

    def timed(way: Way) -> Passes:
        return passes(way.of(spec), rank, way.bucket_mb, build, example)

    first = timed(torchs)
    times = {"no exchange": first.pass_s, str(torchs): first.synced_s}
    share = 1 - first.pass_s / first.synced_s
    waits = f"{max(share, 0.0):.0%} of a pass of {first.synced_s:.3g} s waits for gradients"
    if share < WORTH:
        return Chosen(asdict(torchs), f"{torchs}: {waits}, so nothing is to be gained", times)
    others = _ways(spec, rank, run, size, choose_compress=before is None)
    times |= {str(way): timed(way).synced_s for way in others}
    ways = [torchs, *others]
    best = fastest(ways, times)
    if best != torchs:
        for way in (torchs, best):
            times[str(way)] = min(times[str(way)], timed(way).synced_s)
    gain = times[str(torchs)] / times[str(best)] - 1
    figures = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.items())
    if gain < WORTH:
        return Chosen(
            asdict(torchs), f"{torchs}: no way is faster by {WORTH:.0%}; {waits}; of a pass: {figures}", times
        )
    return Chosen(asdict(best), f"{best}: {gain:.0%} faster than {torchs}; {waits}; of a pass: {figures}", times)


def fastest(ways: list[Way], times: Mapping[str, float]) -> Way:
    """The first of those within `_AS_GOOD` of the least time. `ways`: those that change least come first."""
    least = min(times[str(way)] for way in ways)
    return next(way for way in ways if times[str(way)] <= least * (1 + _AS_GOOD))


def _ways(spec: JobSpec, rank: Rank, run: RunDir, size: float | None, choose_compress: bool) -> list[Way]:
    """What to try beside torch's: other topologies, smaller buckets, then compressors by their loss. Every rank."""
    found: list[Way] = []
    plain = Way(bucket_mb=size)
    if spec.comm.topology == AUTO:
        if two_levels(teams(range(rank.world_size), gather_json(rank.node_ip, rank.control))):
            found.append(replace(plain, topology="two_level"))
        if rank.backend == "gloo":
            found.append(replace(plain, topology="direct"))
            if rank.world_size > 2 and topology.ORDERED:
                order = topology.measured(rank, run).order
                if order != [*range(rank.world_size)]:
                    found.append(replace(plain, topology="ring", ring=order))
    if spec.comm.compress == AUTO and choose_compress:
        small = Way(bucket_mb=SMALL_MB if size is None else size)
        if small != plain:
            found.append(small)
        found += [replace(small, compress=name) for name in within(spec.comm.max_loss_increase)]
    return found


def within(bound: float) -> list[str]:
    """The built-in compressors whose known loss is within `bound`; the least loss first, then the most bits."""
    plans = {name: plan for name in registry.names("compressor") if (plan := compressor_plan(name)) is not None}
    known = {
        n: (p.loss_increase, -p.bits)
        for n, p in plans.items()
        if p.loss_increase is not None and p.loss_increase <= bound
    }
    return sorted(known, key=lambda name: known[name])
