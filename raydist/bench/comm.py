"""Runs all measurements of `raydist bench comm` and returns one plain object; docs/how-to/bench.md lists its keys.

Runs in: every rank, together. Torch, never ray. To run it without Ray:

    torchrun --nproc-per-node 2 -m raydist.bench.comm '{"ops": ["all_reduce"], "most": 1048576}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.bench import collectives, nccl, predict
from raydist.bench.failures import carried
from raydist.bench.options import Ask, read
from raydist.data.batches import MicroBatch
from raydist.errors import RaydistError, UserError
from raydist.spec import JobSpec, parse
from raydist.worker import distributed
from raydist.worker.comm import links
from raydist.worker.comm.buckets import choose
from raydist.worker.comm.buckets.measure import slowest
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.loss import build as build_loss
from raydist.worker.metrics.device_clock import timed
from raydist.worker.precision import Precision

_AT_ONCE = 256 * 2**20
_GRADIENTS_S = 10.0
"""Time limit for the all-reduce of a model's gradients; the rest is extrapolated."""


def in_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Train calls this in each worker. `config`: the fields of Ask. Re-raises every error as RankFailed."""
    return carried(measure, config)


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the process group of the environment, measures, and leaves it. Every rank. Raises UserError for a single rank."""
    ask = read(config)
    rank = distributed.start(gpus=ask.gpus, threads=ask.threads, timeout_s=ask.timeout_s)
    if rank.world_size < 2:
        raise UserError("the world size is 1", "use two ranks or more")
    result = run(ask, rank)
    distributed.stop(rank)
    return result


def run(ask: Ask, rank: Rank) -> dict[str, Any]:
    """Measures collectives, pairs, the model's gradients and its buckets. Every rank; all get the same result."""
    begun = time.perf_counter()
    every = gather_json(distributed.describe(rank), rank.control)
    rows = [
        asdict(collectives.measure(op, size, dtype, rank, ask.iterations))
        for op in ask.ops
        for dtype in ask.dtypes
        for size in collectives.sizes(ask.least, ask.most, ask.factor)
    ]
    found = links.measure(rank)
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
        "nccl": nccl.expected(rows, rank.world_size, len({one["node_ip"] for one in every}))
        if rank.backend == "nccl"
        else None,
        "bucket": asdict(bucket(parse(dict(ask.job)), ask.vocab, rank)) if ask.job is not None else None,
        "seconds": time.perf_counter() - begun,
    }


def all_reduce(nbytes: int, rank: Rank) -> tuple[float, int]:
    """(seconds, bytes measured) of an all-reduce of `nbytes` of fp32, in pieces of at most 256 MiB. Every rank.

    After ten seconds it stops; the seconds are then extrapolated to all bytes.
    """
    buffer = torch.zeros(min(nbytes, _AT_ONCE) // 4, device=rank.device)
    dist.all_reduce(buffer)  # opens connections, and allocates NCCL's buffers
    done, seconds = 0, 0.0
    while done < nbytes and seconds < _GRADIENTS_S:
        piece = buffer[: max((nbytes - done) // 4, 1)]
        dist.barrier(group=rank.control)
        seconds += slowest(rank, timed(rank.device, partial(dist.all_reduce, piece)))[0]
        done += piece.numel() * 4
    return seconds * nbytes / done, min(done, nbytes)


def bucket(job: JobSpec, vocab: int, rank: Rank) -> choose.Chosen:
    """The choice of `parallel.bucket_mb: auto` for this job on these ranks. Every rank. Trains nothing; tokens are synthetic."""
    precision, loss = Precision(job.precision, rank.device), build_loss(job)

    def build() -> nn.Module:
        distributed.seed_all(job.train.seed, "init")
        make: Callable[..., nn.Module] = registry.load("model", job.model.name)
        return make(job.model, vocab)

    def example(module: nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
        assert not part, "the whole model"
        tokens = torch.arange(samples * (job.model.context + 1)).view(samples, -1).remainder(vocab).to(rank.device)
        with precision.autocast():
            return loss(module, MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous()))

    return choose.tried(job, rank, build, example)


def main(arguments: Sequence[str]) -> int:
    """Entry point for torchrun. Optional argument: fields of Ask as JSON. Rank 0 prints the result. Returns the exit code."""
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        result = measure(json.loads(arguments[0]) if arguments else {})
    except RaydistError as error:
        if first:
            print(f"raydist: {error}", file=sys.stderr)
        return error.exit_code
    if first:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
