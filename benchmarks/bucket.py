"""`parallel.bucket_mb: auto` compared with torch's default, on a slow and on an unlimited link: tokens/s, in one interleaved run.

    python benchmarks/bucket.py [--rounds 12]

Two hosts in network namespaces with one gloo rank of one thread each; links of 200 Mbit/s, or as fast as the machine. Both ranks
hold several trainings of the same GPT: one with torch's buckets, one with the size that
`raydist.worker.comm.buckets.choose.tried` chose there, and some with fixed sizes (`asked`) for comparison. They alternate step by
step, in an order that rotates each round. `ratio` is auto over torch's: the median over the rounds. If auto chose torch's own
size, both are the same, and the ratio shows the noise. `chose_s`: the time of the choice. Needs root, or permission to create
user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from common import write
from torch import nn

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.comm.buckets import choose
from raydist.worker.comm.buckets.measure import slowest
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum
from tests.hosts import Hosts

VOCAB = 257
LINKS: dict[str, str | None] = {"200 Mbit/s": "200mbit", "unlimited": None}
MODELS = {
    "3.5M parameters": {"layers": 4, "width": 256, "heads": 4, "context": 128},
    "12M parameters": {"layers": 6, "width": 384, "heads": 6, "context": 128},
}
ASKED = (1.0, 4.0)


class Training:
    """One training with buckets of `bucket_mb`: model, strategy, optimizer and step."""

    def __init__(self, spec: JobSpec, rank: Rank, bucket_mb: float | None, tokens: torch.Tensor) -> None:
        parallel = spec.parallel.model_copy(update={"bucket_mb": bucket_mb})
        spec = spec.model_copy(update={"parallel": parallel})
        self.batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous())
        strategy = registry.load("parallel", "ddp")(spec, Mesh(rank))
        strategy.wrap(build(spec), lambda module, samples=1: example(module, tokens, samples))
        optimizer = optimizers.build(strategy.shards(), spec.optim, rank.device)
        self.step = TrainStep(
            Mesh(rank),
            strategy,
            optimizer,
            Precision(spec.precision, rank.device),
            parameters=gather_parameters(strategy.shards(), rank),
            full_tokens=rank.world_size * self.batch.targets.numel(),
            clip=1.0,
        )

    def __call__(self) -> float:
        """Seconds of one step, from the common start to the end of this rank."""
        dist.barrier()
        begun = time.perf_counter()
        self.step(1, [self.batch], self.batch.targets.numel(), 1e-3, want_stop=False)
        return time.perf_counter() - begun


def build(spec: JobSpec) -> nn.Module:
    torch.manual_seed(1)
    made: nn.Module = registry.load("model", "gpt")(spec.model, VOCAB)
    return made


def example(module: nn.Module, tokens: torch.Tensor, samples: int) -> torch.Tensor:
    return loss_sum(module, MicroBatch(tokens[:samples, :-1], tokens[:samples, 1:].contiguous()))


def one_rank(model: str, rounds: int) -> None:
    """One rank. Rank 0 prints the measurements of both."""
    rank = distributed.start(gpus=0, threads=1, timeout_s=600)
    spec = JobSpec.model_validate(
        {
            "data": {"source": "none"},
            "train": {"steps": 1, "global_batch": 16, "micro_batch": 8},
            "model": MODELS[model],
        }
    )
    tokens = torch.randint(VOCAB, (8, MODELS[model]["context"] + 1), generator=torch.Generator().manual_seed(rank.rank))
    begun = time.perf_counter()
    chosen = choose.tried(spec, rank, lambda: build(spec), lambda module, samples=1: example(module, tokens, samples))
    chose_s = time.perf_counter() - begun
    sizes: dict[str, float | None] = {"default": None, "auto": chosen.bucket_mb, **{f"{mb:g} MiB": mb for mb in ASKED}}
    trainings = {name: Training(spec, rank, mb, tokens) for name, mb in sizes.items()}
    times: dict[str, list[float]] = {name: [] for name in sizes}
    for i in range(rounds + 1):
        names = list(sizes)[i % len(sizes) :] + list(sizes)[: i % len(sizes)]
        for name in names:
            (seconds,) = slowest(rank, [trainings[name]()])
            if i:  # the first round warms up
                times[name].append(seconds)
    if rank.first:
        ratio = {n: statistics.median(b / a for a, b in zip(times[n], times["default"], strict=True)) for n in sizes}
        each = 2 * 8 * MODELS[model]["context"]
        found = {
            "ratio": round(ratio["auto"], 4),
            "tokens_per_second": {n: round(each / statistics.median(t), 1) for n, t in times.items()},
            "asked": {n: round(r, 4) for n, r in ratio.items() if n not in ("default", "auto")},
            "bucket_mb": chosen.bucket_mb,
            "because": chosen.because,
            "chose_s": round(chose_s, 2),
            "quotients": [round(b / a, 3) for a, b in zip(times["auto"], times["default"], strict=True)],
        }
        print(json.dumps(found))
    distributed.stop(rank)


def on_hosts(rate: str | None, model: str, rounds: int) -> dict[str, Any]:
    """Runs the two ranks, each on its own host."""
    command = [sys.executable, str(Path(__file__).absolute()), "--rounds", str(rounds), "--model", model]
    with Hosts(2, rate=rate) as hosts:
        place = {"MASTER_ADDR": hosts[0].ip, "MASTER_PORT": "29400", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        ranks = [
            host.popen(command, env={**os.environ, **place, "RANK": str(i)}, stdout=PIPE)
            for i, host in enumerate(hosts)
        ]
        out = [rank.communicate()[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    found: dict[str, Any] = json.loads(out[0].splitlines()[-1])
    return found


def main() -> None:
    """Runs, prints, writes results/bucket.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", choices=MODELS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        one_rank(options.model, options.rounds)
        return
    table = {}
    for link, rate in LINKS.items():
        for model in MODELS:
            found = table[f"{model}, {link}"] = on_hosts(rate, model, options.rounds)
            print(
                f"{model}, {link}: auto {found['bucket_mb']} MiB, {found['ratio']:.3f} of torch's; {found['asked']}",
                flush=True,
            )
            print(f"    {found['because']}; {found['chose_s']} s", flush=True)
    print(write("bucket", {"rounds": options.rounds, "load_average": os.getloadavg()[1], "cases": table}))


if __name__ == "__main__":
    main()
