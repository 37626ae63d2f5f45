"""Resolves `parallel.bucket_mb: auto`: once per run and number of ranks, with the same result at every restart.

Runs in: each train worker, every rank, before the run's own model is built. Torch, never ray.

With three or more ranks the sum of a gradient depends on its position in the bucket, so a restart must use the same buckets to
give the same bits. Rank 0 therefore writes the choice to the run's folder, once per world size, and every attempt reads it there. A
later run of the same model on the same ranks, nodes and links reuses the measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import xxhash
from torch import nn

from raydist.errors import StorageError
from raydist.ipc.network_interface import interface_of
from raydist.parsing import parse_json
from raydist.run.directory import BUCKETS, TUNED, RunDir
from raydist.spec import JobSpec
from raydist.spec.comm import AUTO, NONE, TORCH, sent_bytes
from raydist.worker.comm import kept
from raydist.worker.comm.buckets.measure import Passes, all_reduce_line, passes
from raydist.worker.comm.buckets.model import WORTH, Suggestion, suggest
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.parallel import Example

Build = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A bucket size in MiB, None for torch's default, and the reason. `measured`: its figures, as plain values."""

    bucket_mb: float | None
    because: str
    measured: dict[str, Any]


def settle(spec: JobSpec, rank: Rank, run: RunDir, vocab_size: int, build: Build, example: Example) -> Chosen:
    """The bucket size of this run at this world size. Every rank; all get the same. Raises StorageError on rank 0.

    `build` builds a model like the run's own, `example` returns the loss of a number of samples.
    """
    spec = _without_auto(spec)
    name, key = f"{BUCKETS}/world-{rank.world_size:05d}.json", _key(spec, rank, vocab_size)
    known = kept.from_first(
        rank, Chosen, (kept.read(run, name, Chosen) or _taken_over(run, key)) if rank.first else None
    )
    chosen = known or tried(spec, rank, build, example)
    if rank.first:
        chosen = kept.keep(run, name, chosen)
        if known is None:
            with suppress(StorageError):  # the next run then measures again
                run.home.write(f"{TUNED}/{key}.json", kept.to_json(chosen))
    made = kept.from_first(rank, Chosen, chosen if rank.first else None)
    assert made is not None
    return made


def untried(spec: JobSpec) -> str | None:
    """Why there are no trials for this job, whose size is torch's; None if there are: a trial is of ranks with the whole model."""
    for axis in ("tensor", "context", "pipeline", "expert"):
        if getattr(spec.parallel, axis) > 1:
            return f"torch's: with parallel.{axis} there are no trial passes, which are of the whole model"
    return None


def tried(spec: JobSpec, rank: Rank, build: Build, example: Example) -> Chosen:
    """Measures the link, passes with torch's buckets, and, if the cost model predicts a gain, passes with its size. Every rank.

    The predicted size is chosen only if the measured gain is `WORTH` of a pass, against torch's buckets before and after.
    """
    if why := untried(spec):
        return Chosen(None, why, {})
    if spec.train.compile:
        return Chosen(None, "torch's: with train.compile, trial passes do not take as long as those of the run", {})
    spec = _without_auto(spec)
    line = all_reduce_line(rank)
    torchs = passes(spec, rank, None, build, example)
    share = sent_bytes(spec) / 4
    # Arrivals differ between ranks: rank 0 decides.
    own = suggest(torchs.arrivals, torchs.pass_s, torchs.backward_s, line, share) if rank.first else None
    suggestion = kept.from_first(rank, Suggestion, own)
    assert suggestion is not None
    measured = {"line": asdict(line), "torchs": _figures(torchs), "suggestion": asdict(suggestion)}
    if suggestion.bucket_mb is None:
        return Chosen(None, f"torch's: {suggestion.because}", measured)
    ours = passes(spec, rank, suggestion.bucket_mb, build, example)
    measured["tried"] = _figures(ours)
    best = torchs.synced_s
    if best / ours.synced_s >= 1 + WORTH:  # measure torch's again: the machine itself may be faster than before
        again = passes(spec, rank, None, build, example)
        measured["torchs_again"] = _figures(again)
        best = min(best, again.synced_s)
    figures = f"trial passes took {ours.synced_s:.3g} s with {suggestion.bucket_mb:g} MiB, {best:.3g} s with torch's"
    if best / ours.synced_s < 1 + WORTH:
        return Chosen(None, f"torch's: {figures}, although {suggestion.because}", measured)
    return Chosen(suggestion.bucket_mb, f"{suggestion.bucket_mb:g} MiB: {figures}; {suggestion.because}", measured)


def _without_auto(spec: JobSpec) -> JobSpec:
    """Where `comm` is left to measurement, the size is that of plain sums: the ways that are tried afterwards have it too."""
    plain = {"compress": NONE, "topology": TORCH}
    return spec.with_fields({f"comm.{n}": way for n, way in plain.items() if getattr(spec.comm, n) == AUTO})


def _figures(made: Passes) -> dict[str, float]:
    return {"synced_s": made.synced_s, "pass_s": made.pass_s, "backward_s": made.backward_s}


def _taken_over(run: RunDir, key: str) -> Chosen | None:
    """The choice of an earlier run. None if it cannot be read: this run then measures itself."""
    with suppress(StorageError, ValueError, KeyError, TypeError):
        name = f"{TUNED}/{key}.json"
        if run.home.exists(name):
            known = Chosen(**parse_json(run.home.read(name))["chosen"])
            return replace(known, because=f"{known.because} (as measured for an earlier run)")
    return None


def _key(spec: JobSpec, rank: Rank, vocab_size: int) -> str:
    """A hash of all that the choice depends on: the model and its passes, the ranks, their nodes, devices and links. Every rank."""
    cuda = rank.device.type == "cuda"
    here = {
        "node": rank.node_ip,
        "interface": interface_of(rank.node_ip),
        "device": torch.cuda.get_device_name(rank.device) if cuda else "cpu",
    }
    train = spec.train
    what = {
        "ranks": gather_json(here, rank.control),
        "backend": rank.backend,
        "vocab": vocab_size,
        "model": spec.model.model_dump(mode="json"),
        "precision": spec.precision.model_dump(mode="json"),
        "comm": spec.comm.model_dump(mode="json", include={"compress", "options", "topology", "ring"}),
        "passes": [train.micro_batch, train.checkpoint_activations, train.compile, spec.data.pack, train.virtual_ranks],
        "cpus": spec.cluster.cpus_per_worker,
        "torch": torch.__version__,
    }
    return f"buckets-{xxhash.xxh64_hexdigest(json.dumps(what, sort_keys=True).encode())}"
