"""What compressed gradients save on slow links, over fp32 DDP with overlap, in one interleaved run.

    python benchmarks/communication.py [--rounds 12] [--worlds 2 4] [--rates none 1gbit 200mbit] [--models small] [--loss 0]
                                       [--variants fp32 int8 auto] [--busbw]

Ranks of one thread each are on hosts of their own: network namespaces whose links have the rate. They take steps of all variants
alternately, in a new order each round, with the same samples and fused AdamW; raydist's is raydist.worker.step.TrainStep. Variants:

    no sync        a step without any exchange: the ceiling
    fp32, no overlap   one bucket: the sum begins when backward has ended
    fp32           torch's buckets of 25 MiB: the baseline
    fp32 2 MiB     as `parallel.bucket_mb` would choose them
    direct 2 MiB   comm.topology: direct, in buckets of 2 MiB
    NAME           comm.compress: NAME, in buckets of 2 MiB
    zero1, zero1 int8; zero2, zero2 int8
    diloco, diloco int8    comm.every: 32
    streaming      the same in 4 fragments, int8, each on its way for 2 steps
    auto           what comm.compress: auto and topology: auto choose there; `way` says it. Asked: 0.98 of the best that it may take

`tokens`: tokens/s over the baseline's, the median over the rounds of the ratio within a round. `sent`: MB that leave a rank in a
step, by its link. `processor`: seconds of processor time of a step on rank 0. With more ranks than cores they compete for them, so
that only figures of one table compare.

With `--busbw` it sums and gathers arrays instead: bus bandwidth (nccl-tests) over the rate at which rank 0 sends 16 MiB to rank 1,
both of payload, the median of the rounds: by torch's all-reduce, by `comm.topology: direct`, and by the reduce-scatter and the
all-gather of zero1 and zero2 (raydist/worker/comm/gloo_p2p.py). Asked: 0.9 at 16 MiB and more.

With `--loss STEPS` it trains instead, on Python's standard library, and gives the loss on held-out text after as many steps of
equal tokens, for three seeds of each variant.

Figures of cases and variants that a run leaves out stay in the file, and those of another machine or number of steps in theirs: the
result then goes to a file beside it, whose name is printed. A variant's ratio is over the baseline of its own run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
import torch.distributed as dist
from common import on_hosts, write
from torch import Tensor, nn

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.launch.zygote import leave
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.build import build_strategy, replica
from raydist.worker.comm import auto, gloo_p2p
from raydist.worker.comm.compression.state import Compression
from raydist.worker.comm.outer.hook import Outer
from raydist.worker.comm.tree import Tree
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum
from raydist.worker.step_hooks import StepHook

VOCAB, BATCH, CONTEXT, BASE = 256, 16, 128, "fp32"
MODELS = {
    "small": {"layers": 4, "width": 256, "heads": 4, "context": CONTEXT},
    "large": {"layers": 6, "width": 384, "heads": 6, "context": CONTEXT},
    "moe": {"name": "mixtral", "layers": 4, "width": 256, "heads": 4, "context": CONTEXT, "hidden": 256},
}
"""3.3M, 10.7M and 7.4M parameters; of the last, with two of eight experts, a token uses 2.7M."""
OVERLAP = {"bucket_mb": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "no sync": {},
    "fp32, no overlap": {"parallel": {"bucket_mb": 1e4}},
    BASE: {},
    "fp32 2 MiB": {"parallel": OVERLAP},
    "direct 2 MiB": {"parallel": OVERLAP, "comm": {"topology": "direct"}},
    **{name: {"parallel": OVERLAP, "comm": {"compress": name}} for name in registry.names("compressor")},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "zero1 int8": {"parallel": {"strategy": "zero1"}, "comm": {"compress": "int8"}},
    "zero2": {"parallel": {"strategy": "zero2"}},
    "zero2 int8": {"parallel": {"strategy": "zero2"}, "comm": {"compress": "int8"}},
    "diloco": {"comm": {"every": 32}},
    "diloco int8": {"comm": {"every": 32, "compress": "int8"}},
    "auto": {"comm": {"compress": "auto", "topology": "auto"}},
    "streaming": {"comm": {"every": 32, "fragments": 4, "delay": 2, "compress": "int8"}},
}
SEEDS, HELD_OUT = (1, 2, 3), 256
SIZES_MIB = (1, 4, 16, 64)


def comm_of(name: str) -> dict[str, Any]:
    """The variant's section `comm`."""
    return dict(VARIANTS[name].get("comm", {}))


def job(name: str, model: str, world: int, steps: int = 10**9) -> JobSpec:
    """One micro-batch a rank."""
    sections = {
        "data": {"source": "any"},
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": BATCH // world},
        "model": MODELS[model],
        "cluster": {"workers": world},
    }
    return JobSpec.model_validate(sections | VARIANTS[name])


class Trained:
    """A variant on this rank; a call is a step."""

    def __init__(self, name: str, model: str, rank: Rank, seed: int = 1, steps: int = 10**9) -> None:
        first = torch.zeros(1, CONTEXT, dtype=torch.int64)

        def example(module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
            batch = MicroBatch(first.expand(samples, -1), first.expand(samples, -1))
            return loss_sum(module, batch)

        def build() -> nn.Module:
            torch.manual_seed(seed)
            made: nn.Module = registry.load("model", spec.model.name)(spec.model, VOCAB)
            return made

        spec = job(name, model, rank.world_size, steps)
        with tempfile.TemporaryDirectory() as folder:
            spec, chosen = auto.settle(spec, rank, RunDir(folder), build, example)
        self.way = {"way": chosen.because} if chosen else {}
        # Without exchange the rank is a world of its own.
        alone = Rank(0, 1, 0, rank.device, "gloo", rank.node_ip, None, ())
        self.rank = alone if name == "no sync" else rank
        self.mesh = Mesh.of(spec, self.rank)
        made = build()
        apart = replica(spec, self.mesh)
        self.strategy = build_strategy(spec, apart or self.mesh)
        self.strategy.wrap(made, example)
        shards = self.strategy.shards()
        self.precision = Precision(spec.precision, rank.device)
        reducers = self.strategy.reducers()
        hooks: list[StepHook] = [Compression(reducers, self.precision, self.rank)] if spec.comm.compresses else []
        self.outer = Outer(spec.comm, apart, shards, steps) if apart else None
        hooks += [self.outer] if self.outer else []
        parameters = gather_parameters(shards, self.rank)
        self._next = 1
        self.step = TrainStep(
            self.mesh, self.strategy, optimizers.build(shards, spec.optim, rank.device), self.precision,
            parameters=parameters.apart(apart.copy) if apart else parameters, full_tokens=BATCH * CONTEXT, clip=1.0,
            hooks=hooks, replica=apart,
        )  # fmt: skip

    def __call__(self, batch: MicroBatch, lr: float = 1e-3, number: int = 1) -> None:
        """One step."""
        self.step(number, [batch], batch.targets.numel(), lr, want_stop=False)
        if self.outer is not None and self.outer.stepped(number, lambda: None):
            self.strategy.updated()

    def turns(self) -> list[tuple[float, range]]:
        """What to measure in a round: (weight of the sum, numbers of the steps). With an outer step that training waits for, a
        step before it and the step with it; with one beside training, all steps from one outer step's middle to the next."""
        if self.outer is None:
            return [(1.0, range(1, 2))]
        plan, apart = self.outer.schedule, self.outer.schedule.every // self.outer.schedule.fragments
        if not plan.delay:
            return [((apart - 1) / apart, range(1, 2)), (1 / apart, range(apart, apart + 1))]
        self._next += apart
        return [(1 / apart, range(self._next - apart // 2, self._next + apart // 2))]


def corpus() -> Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.from_numpy(np.frombuffer(b"".join(f.read_bytes() for f in files), dtype=np.uint8).copy())


def batch_of(data: Tensor, rank: Rank, number: int) -> MicroBatch:
    """This rank's part of a global batch of random windows."""
    draw, each = torch.Generator().manual_seed(number), BATCH // rank.world_size
    at = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw)[rank.rank * each : (rank.rank + 1) * each]
    rows = torch.stack([data[a : a + CONTEXT + 1] for a in at.tolist()]).long()
    return MicroBatch(rows[:, :-1], rows[:, 1:].contiguous())


def sent_on(interface: str) -> int:
    """Bytes that left this interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def speeds(rank: Rank, model: str, rounds: int, variants: Sequence[str]) -> dict[str, Any]:
    """{variant: figures}."""
    steps = {name: Trained(name, model, rank) for name in dict.fromkeys([BASE, *variants])}
    data, order = corpus(), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        batch = batch_of(data, rank, turn + 1)
        for name in order.sample(list(steps), len(steps)):
            total = torch.zeros(3)
            for weight, numbers in steps[name].turns():
                dist.barrier()
                before, busy, begun = sent_on("eth0"), time.process_time(), time.perf_counter()
                for number in numbers:
                    steps[name](batch, number=number)
                took = torch.tensor([time.perf_counter() - begun])
                worked = time.process_time() - busy
                dist.barrier()
                gone = sent_on("eth0") - before
                dist.all_reduce(took, dist.ReduceOp.MAX)
                total += weight * torch.tensor([float(took), gone / 1e6, worked])
            if turn >= 0:
                for figures, value in zip((seconds, sent, processor), total.tolist(), strict=True):
                    figures[name].append(value)
    found = {}
    for name in steps:
        ratios = [base / own for base, own in zip(seconds[BASE], seconds[name], strict=True)]
        found[name] = {
            "tokens": round(statistics.median(ratios), 3), "seconds": round(statistics.median(seconds[name]), 4),
            "sent": round(statistics.median(sent[name]), 2), "processor": round(statistics.median(processor[name]), 4),
            **steps[name].way,
        }  # fmt: skip
    return found


def losses(rank: Rank, model: str, steps: int, variants: Sequence[str]) -> dict[str, Any]:
    """{variant: the loss on held-out text, in nats a byte, of each seed}."""
    data = corpus()
    held, data = data[-HELD_OUT * (CONTEXT + 1) :].view(HELD_OUT, -1).long(), data[: -HELD_OUT * (CONTEXT + 1)]
    own = held[rank.rank :: rank.world_size]
    batch = MicroBatch(own[:, :-1], own[:, 1:].contiguous())
    found: dict[str, Any] = {}
    learns = [BASE, *registry.names("compressor"), *(name for name in VARIANTS if "every" in comm_of(name))]
    for name in (name for name in learns if name in variants):
        found[name] = []
        for seed in SEEDS:
            trained = Trained(name, model, rank, seed, steps)
            for number in range(1, steps + 1):
                lr = 2e-3 * min(1.0, number / 30) * max(0.1, 1 - 0.9 * number / steps)
                trained(batch_of(data, rank, 10**6 * seed + number), lr, number)
            loss, _ = evaluate(trained.mesh, trained.strategy, trained.precision, [batch])
            found[name].append(round(loss, 4))
    return found


def bandwidths(rank: Rank, rounds: int) -> dict[str, Any]:
    """{MiB: {collective: bus bandwidth over the link's rate}}, and the rate in MB/s. Collectives take turns within a round."""
    world, group = rank.world_size, dist.group.WORLD
    assert group is not None
    summed = TreeAllReduce(Tree(world), [[(r, r + 1)] for r in range(world)], group, rank.device, shared=True)
    once = (world - 1) / world
    message = torch.zeros(4 * 2**20)

    def send() -> None:
        if rank.rank < 2:
            (dist.send if rank.first else dist.recv)(message, 1 - rank.rank)

    found: dict[str, Any] = {}
    rates = []
    for mib in SIZES_MIB:
        flat, parts = torch.zeros(mib * 2**18), torch.zeros(mib * 2**18)
        mine = torch.zeros(flat.numel() // world)
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "send": (0.0, send),
            "all_reduce": (2 * once, lambda flat=flat: dist.all_reduce(flat)),
            "direct": (2 * once, lambda flat=flat: summed([flat]).wait()),
            "reduce_scatter": (
                once, lambda flat=flat, mine=mine, parts=parts: gloo_p2p.reduce_scatter(mine, flat, parts, group).wait()
            ),
            "all_gather": (once, lambda flat=flat, mine=mine: gloo_p2p.all_gather(flat, mine, group).wait()),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, (_, call) in calls.items():
                dist.barrier()
                begun = time.perf_counter()
                call()
                took = torch.tensor([time.perf_counter() - begun])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn:  # the first one opens connections
                    times[name].append(float(took))
        rates.append(message.nbytes / statistics.median(times.pop("send")))
        rate = statistics.median(rates)
        found[f"{mib} MiB"] = {
            name: round(flat.nbytes * calls[name][0] / statistics.median(taken) / rate, 3)
            for name, taken in times.items()
        }
    return {"link, MB/s": round(statistics.median(rates) / 1e6, 1), **found}


def main(asked: argparse.Namespace) -> None:
    """One rank. Rank 0 prints the figures."""
    os.environ.update(MASTER_ADDR=asked.master, MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=asked.rank, world_size=asked.worlds[0])
    control = dist.new_group(backend="gloo")
    rank = Rank(asked.rank, asked.worlds[0], 0, torch.device("cpu"), "gloo", asked.master, control, ())
    if asked.busbw:
        made = bandwidths(rank, asked.rounds)
    else:
        model = asked.models[0]
        made = (
            losses(rank, model, asked.loss, asked.variants)
            if asked.loss
            else speeds(rank, model, asked.rounds, asked.variants)
        )
    if rank.first:
        print(json.dumps(made), flush=True)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "200mbit"])
    parser.add_argument("--models", nargs="+", default=["small"], choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--loss", type=int, default=0, help="steps to train, instead of timing steps")
    parser.add_argument("--busbw", action="store_true", help="bus bandwidth of sums and gathers, instead of steps")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        main(options)
        sys.exit()
    result: dict[str, Any] = {}
    for each in options.models:
        for world in options.worlds:
            for rate in ["none"] if options.loss else options.rates:
                key = f"{each}, {world} ranks" + ("" if options.loss else f", {rate}")
                given = ["--rounds", str(options.rounds), "--worlds", str(world), "--models", each]
                given += [
                    "--variants",
                    *options.variants,
                    "--loss",
                    str(options.loss),
                    *(["--busbw"] if options.busbw else []),
                ]
                result[key] = on_hosts(__file__, world, rate, given)
                for variant, figures in result[key].items():
                    print(f"{key}: {variant}: {figures}", flush=True)
    name = "communication_busbw" if options.busbw else "communication_loss" if options.loss else "communication"
    taken = {"steps": options.loss} if options.loss else {"rounds": dict.fromkeys(options.rates, options.rounds)}
    print(write(name, {**taken, **result}, merge=True))
