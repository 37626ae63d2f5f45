"""Steps of two ranks over links of a given rate, beside their forecasts by `raydist plan`.

    python benchmarks/links.py [--rounds 8]

Each rank of one thread is on a host of its own, in a network namespace whose link has the rate. A variant is a GPT, or a mixtral
for `expert`, on a mesh of two ranks. For each rate the ranks take steps of all variants alternately, in a new order each round.

Seconds: the median of a variant's steps. Its step over links without a limit gives the processor's speed for the forecast, so the
forecasts of the other rates show the error of what is planned to pass over the links, and of what it overlaps with. Bytes: of rank
0's link, per step, with TCP's and Ethernet's headers, over the bytes of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from common import write
from torch import Tensor, nn

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.planner import speed as planned
from raydist.planner.estimate import estimates, measured
from raydist.planner.facts import Machine
from raydist.planner.measure import Planner
from raydist.planner.traffic import traffic
from raydist.spec import JobSpec
from raydist.worker.build import build_strategy
from raydist.worker.comm import gloo_p2p
from raydist.worker.dataloader import own_tokens
from raydist.worker.distributed import Rank
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import split_layers
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum
from tests.hosts import Hosts

WORLD, VOCAB, SEQUENCES = 2, 1024, 8
RATES = {"unlimited": (None, "128kb"), "1 Gbit/s": ("1gbit", "128kb"), "200 Mbit/s": ("200mbit", "16kb")}
"""Name -> rate and burst, as `tc` writes them. A burst is what the link sends at once after a pause: about a millisecond of the
rate. More would speed up each message of a mesh that computes between two of them: with 128 kB at 200 Mbit/s, messages of 512 KiB
after a pause of 20 ms went at 30.9 MB/s, and with 16 kB at 23.0."""
MODEL = {"layers": 6, "width": 256, "heads": 4, "context": 128, "tie_embeddings": False}
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "tensor": {"tensor": 2, "tensor_across_nodes": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "chunks": 2},
    "expert": {"expert": 2},
}


def job(name: str) -> JobSpec:
    """Eight sequences a step: in one micro-batch a rank, or in eight of a pipeline."""
    mesh = MESHES[name]
    micro = 1 if "pipeline" in mesh else SEQUENCES if {"tensor", "context"} & mesh.keys() else SEQUENCES // WORLD
    return JobSpec.model_validate({
        "data": {"source": "any"}, "train": {"steps": 1, "global_batch": SEQUENCES, "micro_batch": micro},
        "model": {**MODEL, "name": "mixtral", "hidden": 256} if name == "expert" else MODEL,
        "parallel": {"bucket_mb": None, **mesh}, "cluster": {"workers": WORLD},
    })  # fmt: skip


def step_of(spec: JobSpec, rank: Rank) -> Any:
    """A call of it is a step."""
    mesh = Mesh.of(spec, rank)
    torch.manual_seed(1)
    model: nn.Module = registry.load("model", spec.model.name)(spec.model, VOCAB)
    split, strategy = split_layers(model, mesh), build_strategy(spec, mesh)
    if isinstance(strategy, Pipeline):
        model = strategy.cut(model)
    tokens = torch.randint(VOCAB, (spec.train.micro_batch, spec.model.context + 1))
    count = spec.batches(WORLD)[1]
    own = [own_tokens(MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous()), mesh)] * count

    def example(module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
        first = own[0].tokens[:1].expand(samples, -1)
        batch = MicroBatch(first, first)
        return call_model(module, batch).float().sum() if part else loss_sum(module, batch)

    strategy.wrap(model, example)
    shards = strategy.shards() if split is None else split.shards(strategy.shards())
    train = TrainStep(
        mesh, strategy, optimizers.build(shards, spec.optim, rank.device), Precision(spec.precision, rank.device),
        parameters=gather_parameters(shards, rank), split=split, full_tokens=SEQUENCES * spec.model.context, clip=1.0,
    )  # fmt: skip
    counted = sum(batch.targets.numel() for batch in own)
    return lambda: train(1, own, counted, 1e-3, want_stop=False)


def sent_on(interface: str) -> int:
    """Bytes that left this interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def rates_of_link(rank: Rank) -> dict[str, float]:
    """Bus bandwidth in bytes/s of each kind of collective, as `TrainStep` starts it, of 4 MiB: the median of 7."""
    group, size = dist.group.WORLD, 2**20
    assert group is not None
    here, there = torch.ones(size), torch.empty(size)
    half = here[: size // WORLD]

    def send() -> None:
        dist.send(here, 1) if rank.first else dist.recv(there, 0)

    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (1.0, lambda: dist.all_reduce(there)),
        "all_gather": (0.5, lambda: gloo_p2p.all_gather(there, half, group).wait()),
        "all_to_all": (0.5, lambda: gloo_p2p.all_to_all(there, here, group).wait()),
        "send": (1.0, send),
    }
    found = {}
    for name, (share, call) in calls.items():
        times = []
        for _ in range(8):
            dist.barrier()
            begun = time.perf_counter()
            call()
            dist.barrier()
            times.append(time.perf_counter() - begun)
        found[name] = share * there.nbytes / statistics.median(times[1:])
    return found


def main(number: int, master: str, rounds: int) -> None:
    """One rank. Rank 0 prints {variant: {"seconds", "bytes"}}."""
    os.environ.update(MASTER_ADDR=master, MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    rank = Rank(number, WORLD, 0, torch.device("cpu"), "gloo", f"host {number}", dist.new_group(backend="gloo"), ())
    steps = {name: step_of(job(name), rank) for name in MESHES}
    links = rates_of_link(rank)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            before, begun = sent_on("eth0"), time.perf_counter()
            for _ in range(2):
                steps[name]()
            dist.barrier()
            if round_:
                seconds[name].append((time.perf_counter() - begun) / 2)
                sent[name].append((sent_on("eth0") - before) // 2)
    if number == 0:
        found = {
            name: {"seconds": statistics.median(seconds[name]), "bytes": statistics.median(sent[name])}
            for name in steps
        }
        print(json.dumps({"links": links, "variants": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Forecast:
    """What `raydist plan` says of a job on two hosts: bytes that rank 0 has `sent` in a step, and its `seconds`."""

    def __init__(self, spec: JobSpec, vocabulary: int) -> None:
        self.spec, self.machine = spec, Machine(WORLD, 1, "cpu")
        planner, strategy = Planner(self.spec, vocabulary, "cpu"), self.spec.parallel.strategy
        self.model, self.flops = planner.model(), planner.flops_per_token()
        self.passes = measured(strategy, self.spec, self.machine, self.model, planner.measure)
        first = estimates(strategy, self.spec, self.machine, self.model, planner.measure)[0]
        self.sent = first.sent + first.tensor_sent + first.pipeline_sent + first.exchanged
        stages = [stage.model for stage in self.model.stages] or [self.model]
        between = [traffic(strategy, self.spec, self.machine, stage) for stage in stages[:1]]
        gathers = sum(each.gathers for each in between) + first.tensor_sent * (spec.parallel.tensor > 1) / 2
        reduced = first.sent if strategy == "ddp" else 0
        self.kinds = {"all_reduce": reduced, "all_gather": gathers, "send": first.pipeline_sent}
        self.kinds["all_to_all"] = self.sent - sum(self.kinds.values())

    def link(self, links: dict[str, float]) -> float:
        """Bytes/s of what it sends, of these bandwidths of the kinds."""
        return self.sent / sum(sent / links[kind] for kind, sent in self.kinds.items())

    def seconds(self, flops: float, link: float) -> float:
        """Of a step, with this speed of the processor."""
        device = planned.Device("cpu", flops, flops, 1.0, link, link, link, 0)
        strategy = self.spec.parallel.strategy
        return planned.speed(strategy, self.spec, self.machine, self.model, device, self.flops, self.passes).seconds

    def calibrated(self, seconds: float, link: float) -> float:
        """FLOP/s with which a step over this link takes so long."""
        low, high = 1e8, 1e13
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.seconds(middle, link) > seconds else (low, middle)
        return low


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        main(asked.rank, asked.master, asked.rounds)
        sys.exit()
    found: dict[str, dict[str, Any]] = {}
    for name, (rate, burst) in RATES.items():
        with Hosts(WORLD, rate, burst) as hosts:
            command = [sys.executable, __file__, "--rounds", str(asked.rounds), "--master", hosts[0].ip, "--rank"]
            other = hosts[1].popen([*command, "1"])
            done = hosts[0].run([*command, "0"], timeout=1200)
            other.wait(60)
            if done.returncode:
                sys.exit(done.stderr)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    result: dict[str, Any] = {}
    for variant in MESHES:
        forecast = Forecast(job(variant), VOCAB)
        free = found["unlimited"]
        flops = forecast.calibrated(free["variants"][variant]["seconds"], forecast.link(free["links"]))
        rows = {}
        for name in RATES:
            measured_, links = found[name]["variants"][variant], found[name]["links"]
            expected = forecast.seconds(flops, forecast.link(links))
            rows[name] = {
                "seconds": round(measured_["seconds"], 4), "forecast": round(expected, 4),
                "error": round(expected / measured_["seconds"] - 1, 3),
                "bytes_over_forecast": round(measured_["bytes"] / forecast.sent, 3),
            }  # fmt: skip
        result[variant] = {"forecast_bytes": round(forecast.sent), **rows}
        print(variant, result[variant], flush=True)
    links = {name: {kind: round(rate / 1e6, 1) for kind, rate in of["links"].items()} for name, of in found.items()}
    print(links)
    result = {
        "rounds": asked.rounds,
        "model": MODEL,
        "sequences": SEQUENCES,
        "megabytes_per_second": links,
        "variants": result,
    }
    print(write("links", result))
