"""Time of a training step on a tensor parallel mesh, beside torch's parallelize_module, in one interleaved run.

    python benchmarks/mesh.py [--rounds 12]

Two gloo ranks of one thread each share each layer of the same GPT, on the same samples, with sequence parallel layers, a loss over
a split vocabulary, clipping and fused AdamW. They run both variants alternately, in a new order each round: one warm-up step, then
two measured ones. raydist's is raydist.worker.step.TrainStep with `parallel.tensor: 2`; torch's is parallelize_module with the
styles of its tutorial, loss_parallel and clip_grad_norm_. The losses of the first step must agree.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.model import gpt
from raydist.worker.optim import optimizers
from raydist.worker.parallel._tensor import split_layers
from raydist.worker.parallel.ddp import Strategy
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum

WORLD, VOCAB, BATCH, LR = 2, 2048, 4, 1e-3
MODEL = {"layers": 6, "width": 384, "heads": 6, "context": 128, "tie_embeddings": False}
TOKENS = BATCH * 128


def job() -> JobSpec:
    """The job of both variants."""
    sections = {"data": {"source": "any"}, "train": {"steps": 1}, "model": MODEL}
    return JobSpec.model_validate(sections | {"parallel": {"tensor": WORLD}, "cluster": {"workers": WORLD}})


class Ours:
    """raydist's step."""

    def __init__(self, rank: Rank, tokens: Tensor) -> None:
        spec = job()
        self.batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous())
        mesh = Mesh.of(spec, rank)
        torch.manual_seed(1)
        model = gpt.build(spec.model, VOCAB)
        tensor = split_layers(model, mesh)
        assert tensor is not None
        strategy = Strategy(spec, mesh)
        strategy.wrap(model, lambda module: loss_sum(module, MicroBatch(tokens[:1, :-1], tokens[:1, 1:])))
        shards = tensor.shards(strategy.shards())
        self.step = TrainStep(
            mesh, strategy, optimizers.build(shards, spec.optim, rank.device), Precision(spec.precision, rank.device),
            parameters=gather_parameters(shards, rank), tensor=tensor, full_tokens=TOKENS, clip=1.0,
        )  # fmt: skip

    def __call__(self) -> float:
        """One step; its loss."""
        return self.step(1, [self.batch], TOKENS, LR, want_stop=False).loss


class Torchs:
    """parallelize_module, as in torch's tutorial of tensor parallelism."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tensor",))
        torch.manual_seed(1)
        self.model = gpt.build(job().model, VOCAB)
        gathered = (Shard(1), None, None, None, None), (Replicate(), None, None, None, None)
        for block in self.model.blocks:
            parallelize_module(block, mesh, {
                "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=gathered[0], desired_input_layouts=gathered[1]),
                "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            })  # fmt: skip
        parallelize_module(self.model, mesh, {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        })  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def __call__(self) -> float:
        """One step; its loss."""
        with loss_parallel():
            logits = self.model(self.tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, self.tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def main(number: int, port: int, rounds: int) -> None:
    """One rank. Rank 0 writes the result."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    control = dist.new_group(backend="gloo")
    rank = Rank(number, WORLD, number, torch.device("cpu"), "gloo", "127.0.0.1", control, ())
    tokens = torch.randint(VOCAB, (BATCH, MODEL["context"] + 1), generator=torch.Generator().manual_seed(3))
    variants: dict[str, Callable[[], float]] = {"raydist": Ours(rank, tokens), "torch": Torchs(tokens)}
    first = {name: step() for name, step in variants.items()}
    assert abs(first["raydist"] - first["torch"]) < 1e-5 * first["torch"], first
    order = random.Random(0)
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            variants[name]()
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            for _ in range(2):
                variants[name]()
            processor[name].append((time.process_time() - busy) / 2)
            dist.barrier()
            wall[name].append((time.perf_counter() - begun) / 2)
    if number == 0:
        result: dict[str, Any] = {"rounds": rounds, "load_average": os.getloadavg()[1], "tensor": WORLD, "model": MODEL}
        for what, times in (("speed", wall), ("processor_time", processor)):
            ratios = sorted(b / a for a, b in zip(times["raydist"], times["torch"], strict=True))
            if what == "processor_time":
                ratios = sorted(1 / ratio for ratio in ratios)
            result[f"{what}_over_torch"] = round(statistics.median(ratios), 4)
            result[f"{what}_over_torch_quartiles"] = [round(ratios[len(ratios) * k // 4], 4) for k in (1, 3)]
        print(result)
        print(write("mesh", result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, (free_port, asked.rounds), nprocs=WORLD)
