"""All that `raydist bench comm` measures, in order, as one plain object; docs/bench.md has its keys.

Runs in: every rank, together. Torch, never ray. Without Ray at all:

    torchrun --nproc-per-node 2 -m raydist.bench.comm '{"ops": ["all_reduce"], "most": 1048576}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.bench import collectives, predict, topology
from raydist.bench.options import Ask, read
from raydist.data.batches import MicroBatch
from raydist.errors import RankFailed, RaydistError, UserError
from raydist.launch.rank_main import facts
from raydist.spec import JobSpec, parse
from raydist.worker import distributed
from raydist.worker.comm.buckets import choose
from raydist.worker.comm.buckets.measure import slowest
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import Marks
from raydist.worker.precision import Precision
from raydist.worker.step import loss_sum

_AT_ONCE = 256 * 2**20
_GRADIENTS_S = 10.0
"""How long the all-reduce of a model's gradients may take; what is left then is taken to be as fast."""


def in_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """What Ray Train calls in each worker; `config`: the fields of Ask. What is raised crosses as RankFailed."""
    try:
        return measure(config)
    except Exception as error:
        told = facts(error, int(os.environ["RANK"]))
        raise RankFailed(**{**told, "bases": tuple(told["bases"])}) from error


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the group that the environment describes, measures, and leaves it. Every rank. Raises UserError for less than two."""
    ask = read(config)
    rank = distributed.start(gpus=ask.gpus, threads=ask.threads, timeout_s=ask.timeout_s)
    if rank.world_size < 2:
        raise UserError("one rank has nobody to speak to", "ask for two or more")
    told = run(ask, rank)
    distributed.stop(rank)
    return told


def run(ask: Ask, rank: Rank) -> dict[str, Any]:
    """Collectives, pairs, the model's gradients, its buckets. Every rank; all get the same."""
    begun = time.perf_counter()
    every: list[dict[str, Any]] = [{}] * rank.world_size
    dist.all_gather_object(every, distributed.describe(rank), group=rank.control)
    rows = [
        asdict(collectives.measure(op, size, dtype, rank, ask.iterations))
        for op in ask.ops
        for dtype in ask.dtypes
        for size in collectives.sizes(ask.least, ask.most, ask.factor)
    ]
    found = topology.measure(rank)
    gradients = None
    if ask.gradients is not None:
        took, of = all_reduce(ask.gradients, rank)
        gradients = {
            "bytes": ask.gradients,
            "predicted": predict.predict(ask.gradients, rank.world_size, found.line),
            "measured": took,
            "measured_bytes": of,
        }
    return {
        "v": 1,
        "world_size": rank.world_size,
        "backend": rank.backend,
        "notes": list(rank.notes),
        "ranks": every,
        "collectives": rows,
        "pairs": {
            "between": found.between,
            "ranks": found.members,
            "names": found.names,
            "latency": found.latency,
            "bandwidth": found.bandwidth,
        },
        "fit": asdict(found.line),
        "gradients": gradients,
        "bucket": asdict(bucket(parse(dict(ask.job)), ask.vocab, rank)) if ask.job is not None else None,
        "seconds": time.perf_counter() - begun,
    }


def all_reduce(nbytes: int, rank: Rank) -> tuple[float, int]:
    """(seconds, bytes measured) of an all-reduce of as many bytes of fp32, at most 256 MiB at once. Every rank.

    Past ten seconds the rest is left out, and the seconds are those of all bytes at the speed of the measured ones.
    """
    buffer = torch.zeros(min(nbytes, _AT_ONCE) // 4, device=rank.device)
    dist.all_reduce(buffer)  # connections, and NCCL's own buffers
    done, seconds = 0, 0.0
    while done < nbytes and seconds < _GRADIENTS_S:
        piece = buffer[: max((nbytes - done) // 4, 1)]
        marks = Marks(rank.device)
        dist.barrier(group=rank.control)
        marks.mark()
        dist.all_reduce(piece)
        marks.mark()
        seconds += slowest(rank, marks.seconds())[0]
        done += piece.numel() * 4
    return seconds * nbytes / done, min(done, nbytes)


def bucket(job: JobSpec, vocab: int, rank: Rank) -> choose.Chosen:
    """What `parallel.bucket_mb: auto` would take for this job on these ranks. Every rank. Trains nothing; tokens are made up."""
    precision = Precision(job.precision, rank.device)

    def build() -> nn.Module:
        distributed.seed_all(job.train.seed, "init")
        make: Callable[..., nn.Module] = registry.load("model", job.model.name)
        return make(job.model, vocab)

    def example(module: nn.Module, samples: int = 1) -> torch.Tensor:
        tokens = torch.arange(samples * (job.model.context + 1)).view(samples, -1).remainder(vocab).to(rank.device)
        with precision.autocast():
            return loss_sum(module, MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous()))

    return choose.tried(job, rank, build, example)


def main(arguments: Sequence[str]) -> int:
    """Under torchrun: the fields of Ask as one JSON object, or nothing. Rank 0 prints what was measured. Gives the exit code."""
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        told = measure(json.loads(arguments[0]) if arguments else {})
    except RaydistError as error:
        if first:
            print(f"raydist: {error}", file=sys.stderr)
        return error.exit_code
    if first:
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
