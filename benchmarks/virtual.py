"""What the same bits at any number of ranks cost (`train.virtual_ranks`), over the same strategy without them, in one run.

    python benchmarks/virtual.py [--rounds 12] [--worlds 2 4] [--rates none 1gbit 200mbit] [--models small]

Ranks of one thread each are on hosts of their own: network namespaces whose links have the rate. They take steps of all variants
alternately, in a new order each round, with the same samples, as benchmarks/communication.py does. Pairs, each with its baseline:

    ddp; virtual            one micro-batch a rank, torch's buckets of 25 MiB; as many virtual ranks as ranks
    ddp 1 MiB; virtual 1 MiB    the same in buckets of 1 MiB
    ddp 2; virtual 2        two micro-batches a rank; two virtual ranks a rank: the same shapes
    zero1, zero2; their virtual

`tokens`: tokens/s over the baseline's, the median over the rounds of the ratio within a round. `small`: over `ddp`'s, with its
larger micro-batches. `sent`: MB that leave a rank in a step, by its link. `processor`: seconds of a step on rank 0.
`room`: MB of the buffer for what arrives, and `bucket`: of the largest gradient bucket, which it may be as large as.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from common import on_hosts, write
from communication import BATCH, CONTEXT, MODELS, VOCAB, batch_of, corpus, sent_on
from torch import Tensor, nn

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker.build import build_strategy, divide_into_parts
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.parallel.ddp import Strategy as Ddp
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum

PLAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "ddp 1 MiB": (1, {"bucket_mb": 1.0}),
    "ddp 2": (2, {}),
    "zero1": (1, {"strategy": "zero1"}),
    "zero2": (1, {"strategy": "zero2"}),
}
"""Micro-batches a rank, and fields of `parallel`; each is measured without and with virtual ranks."""


class Trained:
    """A variant on this rank; a call is a step."""

    def __init__(self, name: str, virtual: bool, model: str, rank: Rank) -> None:
        self.each, parallel = PLAIN[name]
        count = self.each * rank.world_size
        spec = JobSpec.model_validate(
            {
                "data": {"source": "any"},
                "train": {
                    "steps": 1,
                    "global_batch": BATCH,
                    "micro_batch": BATCH // count,
                    "virtual_ranks": count if virtual else None,
                },
                "model": MODELS[model],
                "parallel": parallel,
                "cluster": {"workers": rank.world_size},
            }
        )
        mesh = Mesh.of(spec, rank)
        torch.manual_seed(1)
        made: nn.Module = registry.load("model", spec.model.name)(spec.model, VOCAB)
        self.strategy = build_strategy(spec, mesh)
        parts = divide_into_parts(spec, mesh, self.strategy)
        first = torch.zeros(1, CONTEXT, dtype=torch.int64)

        def example(module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
            batch = MicroBatch(first.expand(samples, -1), first.expand(samples, -1))
            return loss_sum(module, batch)

        self.strategy.wrap(made, example)
        shards = self.strategy.shards()
        self.step = TrainStep(
            mesh, self.strategy, optimizers.build(shards, spec.optim, rank.device, same_bits=virtual),
            Precision(spec.precision, rank.device), parameters=gather_parameters(shards, rank),
            full_tokens=BATCH * CONTEXT, clip=1.0, parts=parts,
        )  # fmt: skip

    def __call__(self, batch: MicroBatch) -> None:
        """One step."""
        tokens, targets = batch.tokens.chunk(self.each), batch.targets.chunk(self.each)
        batches = [MicroBatch(*pair) for pair in zip(tokens, targets, strict=True)]
        self.step(1, batches, batch.targets.numel(), 1e-3, want_stop=False)

    def memory(self) -> dict[str, float]:
        """MB of the buffer for what arrives, and of the largest bucket; of ddp with virtual ranks."""
        if not isinstance(self.strategy, Ddp) or self.strategy.room is None:
            return {}
        buckets: Counter[str] = Counter()
        for kind, elements, bucket in self.strategy.messages():  # a large one is sent in slices
            buckets[bucket] += elements if kind == "all_to_all" else 0
        largest = max(buckets.values())
        return {"room": round(self.strategy.room / 1e6, 2), "bucket": round(4 * largest / 1e6, 2)}


def speeds(rank: Rank, model: str, rounds: int) -> dict[str, Any]:
    """{variant: figures}."""
    steps = {(name, virtual): Trained(name, virtual, model, rank) for name in PLAIN for virtual in (False, True)}
    data, order = corpus(), random.Random(0)
    seconds: dict[tuple[str, bool], list[float]] = {key: [] for key in steps}
    sent: dict[tuple[str, bool], list[float]] = {key: [] for key in steps}
    processor: dict[tuple[str, bool], list[float]] = {key: [] for key in steps}
    for turn in range(-1, rounds):
        batch = batch_of(data, rank, turn + 1)
        for key in order.sample(list(steps), len(steps)):
            dist.barrier()
            before, busy, begun = sent_on("eth0"), time.process_time(), time.perf_counter()
            steps[key](batch)
            took = torch.tensor([time.perf_counter() - begun])
            worked = time.process_time() - busy
            dist.barrier()
            gone = sent_on("eth0") - before
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[key].append(float(took))
                sent[key].append(gone / 1e6)
                processor[key].append(worked)
    found: dict[str, Any] = {}
    for name, virtual in steps:
        own = seconds[name, virtual]
        figures = {
            "seconds": round(statistics.median(own), 4), "sent": round(statistics.median(sent[name, virtual]), 2),
            "processor": round(statistics.median(processor[name, virtual]), 4),
        }  # fmt: skip
        if virtual:
            figures |= {"tokens": _over(seconds[name, False], own), **steps[name, virtual].memory()}
        if name == "ddp 2":
            figures["small"] = _over(seconds["ddp", False], own)
        found[name + (", virtual" if virtual else "")] = figures
    return found


def _over(base: list[float], own: list[float]) -> float:
    return round(statistics.median(b / o for b, o in zip(base, own, strict=True)), 3)


def main(asked: argparse.Namespace) -> None:
    """One rank. Rank 0 prints the figures."""
    os.environ.update(MASTER_ADDR=asked.master, MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=asked.rank, world_size=asked.worlds[0])
    control = dist.new_group(backend="gloo")
    rank = Rank(asked.rank, asked.worlds[0], 0, torch.device("cpu"), "gloo", asked.master, control, ())
    made = speeds(rank, asked.models[0], asked.rounds)
    if rank.first:
        print(json.dumps(made), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "200mbit"])
    parser.add_argument("--models", nargs="+", default=["small"], choices=list(MODELS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        main(options)
        sys.exit()
    result: dict[str, Any] = {}
    for each in options.models:
        for world in options.worlds:
            for rate in options.rates:
                key = f"{each}, {world} ranks, {rate}"
                given = ["--rounds", str(options.rounds), "--worlds", str(world), "--models", each]
                result[key] = on_hosts(__file__, world, rate, given)
                for variant, figures in result[key].items():
                    print(f"{key}: {variant}: {figures}", flush=True)
    print(write("virtual", {"rounds": options.rounds, **result}))
