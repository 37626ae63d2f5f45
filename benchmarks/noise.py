"""Cost of measuring the gradient noise scale: a training step with the measurement compared with one without.

    python benchmarks/noise.py [--rounds 60]

Two gloo ranks of one thread each train a GPT of 3.3 million parameters, one strategy after another. A round is two steps, one of
them with the measurement, in random order, and gives their ratio. Printed: the median ratio over the rounds, for wall-clock time
and for both ranks' processor time, which other load affects less; and a tenth of the excess, because a run measures every tenth
step.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import write

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.model import gpt
from raydist.worker.optim import optimizers
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum

WORLD, VOCAB, BATCH, EVERY = 2, 256, 8, 10
MODEL = {"layers": 4, "width": 256, "heads": 4, "context": 128}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def trainer(rank: Rank, strategy: str) -> tuple[TrainStep, MicroBatch]:
    """A train step that measures in even step numbers, and its batch."""
    sections = {"data": {"source": "any"}, "train": {"steps": 1}, "model": MODEL, "parallel": {"strategy": strategy}}
    spec = JobSpec.model_validate(sections)
    text = torch.randint(0, VOCAB, (BATCH, MODEL["context"] + 1), generator=torch.Generator().manual_seed(rank.rank))
    batch = MicroBatch(text[:, :-1], text[:, 1:].contiguous())
    made = registry.load("parallel", strategy)(spec, Mesh(rank))
    torch.manual_seed(1)
    model = gpt.build(spec.model, VOCAB)
    made.wrap(model, lambda module: loss_sum(module, MicroBatch(batch.tokens[:1], batch.targets[:1])))
    noise = GradientNoise(Mesh(rank), made.module, made.loss_factor, every=2)
    step = TrainStep(
        Mesh(rank), made, optimizers.build(made.shards(), spec.optim, rank.device), Precision(spec.precision, rank.device),
        parameters=gather_parameters(made.shards(), rank), full_tokens=WORLD * batch.targets.numel(), clip=1.0, hooks=[noise],
    )  # fmt: skip
    return step, batch


def serve(number: int, port: int, rounds: int, results: Any) -> None:
    """One rank. Rank 0 puts each strategy's ratios: (wall, processor) of a measured step over an unmeasured one."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    rank = Rank(number, WORLD, number, torch.device("cpu"), "gloo", "127.0.0.1", dist.new_group(backend="gloo"), ())
    draw = random.Random(1)
    for strategy in STRATEGIES:
        step, batch = trainer(rank, strategy)
        ratios = []
        for turn in range(rounds + 3):
            spent = {}
            for measured in draw.sample((True, False), 2):
                dist.barrier()
                begun, used = time.perf_counter(), time.process_time()
                step(2 if measured else 1, [batch], batch.targets.numel(), 1e-4, False, samples=WORLD * BATCH)
                both = torch.tensor([time.perf_counter() - begun, time.process_time() - used], dtype=torch.float64)
                dist.all_reduce(both)
                spent[measured] = both.tolist()
            if turn >= 3:  # the first rounds warm up
                ratios.append([on / off for on, off in zip(spent[True], spent[False], strict=True)])
        if number == 0:
            results.put((strategy, ratios))
    dist.destroy_process_group()


def main() -> None:
    """Runs, prints the ratios, writes results/noise.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(serve, (port, options.rounds, results), WORLD)
    told: dict[str, Any] = {}
    while not results.empty():
        strategy, ratios = results.get()
        wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
        quarters = statistics.quantiles([r[1] for r in ratios])
        told[strategy] = {"wall": wall, "cpu": cpu, "cpu_quartiles": quarters, "cpu_every_tenth": (cpu - 1) / EVERY}
        print(
            f"{strategy}: measured over not: wall {wall:.3f}, processor {cpu:.4f}; every tenth: {(cpu - 1) / EVERY:+.3%}"
        )
    print(write("noise", {"rounds": options.rounds, "model": MODEL, "strategies": told}))


if __name__ == "__main__":
    main()
