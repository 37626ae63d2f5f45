"""Time and memory per rank of a training step, for each strategy and option and for plain FSDP2, in one interleaved run.

    python benchmarks/step.py [--rounds 8]

Two gloo ranks of one thread each hold all variants at once and run them alternately, in a new order each round: one warm-up step,
then two measured ones. All train the same GPT on the same samples with fused AdamW, except "AdamW not fused". raydist's steps are
raydist.worker.step.TrainStep, with the gradient norm and clipping; the plain ones have neither. `bytes_over_ideal`: the bytes of
parameters, gradients and optimizer state on the fuller rank after a backward pass, divided by the ideal of the ZeRO paper: 4 + 4
+ 8 bytes per parameter, sharded according to the stage.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import interleaved, write
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker import model_transforms
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.model import gpt
from raydist.worker.optim import optimizers
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum
from raydist.worker.step_hooks import BeforeUpdate

WORLD, VOCAB, BATCH = 2, 2048, 4
MODEL = {"layers": 6, "width": 384, "heads": 6, "context": 128}

RAYDIST: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, AdamW not fused": {"optim": {"fused": False}},
    "ddp, activations full": {"train": {"checkpoint_activations": "full"}},
    "ddp, activations selective": {"train": {"checkpoint_activations": "selective"}},
    "ddp, blocks compiled": {"train": {"compile": "blocks"}},
    "ddp, all compiled": {"train": {"compile": True}},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "zero2": {"parallel": {"strategy": "zero2"}},
    "zero3": {"parallel": {"strategy": "zero3", "reshard_after_forward": True}},
    "zero3, reshard auto": {"parallel": {"strategy": "zero3"}},
}
PLAIN = {"FSDP2, not resharded": False, "FSDP2, resharded": True}
BESIDE = {"zero2": "FSDP2, not resharded", "zero3": "FSDP2, resharded"}
"""Variant -> the plain one with the same communication."""


class Ours:
    """raydist's step."""

    def __init__(self, rank: Rank, sections: dict[str, Any], tokens: Tensor) -> None:
        base = {"data": {"source": "any"}, "train": {"steps": 1}, "model": MODEL}
        spec = JobSpec.model_validate(base | sections | {"train": {"steps": 1, **sections.get("train", {})}})
        self.batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous())
        self.strategy = registry.load("parallel", spec.parallel.strategy)(spec, Mesh(rank))
        torch.manual_seed(1)
        model = gpt.build(spec.model, VOCAB)
        self.strategy.wrap(model, lambda module: loss_sum(module, MicroBatch(tokens[:1, :-1], tokens[:1, 1:])))
        model_transforms.prepare(model, spec.train)
        shards = self.strategy.shards()
        optimizer = optimizers.build(shards, spec.optim, rank.device)
        self.counted = 0

        def count() -> None:
            """Counts bytes right after the backward pass. The optimizer state is empty in the first step."""
            grads = [p.grad for p in model.parameters()] + [s.local.grad for s in shards.values()]
            state = [t for s in optimizer.state.values() for t in s.values()]
            self.counted = _bytes([*model.parameters(), *grads, *state])

        self.step = TrainStep(
            Mesh(rank), self.strategy, optimizer, Precision(spec.precision, rank.device),
            parameters=gather_parameters(self.strategy.shards(), rank),
            full_tokens=WORLD * BATCH * MODEL["context"], clip=1.0, hooks=[BeforeUpdate(count)],
        )  # fmt: skip

    def __call__(self) -> None:
        """One step."""
        self.step(1, [self.batch], self.batch.targets.numel(), 1e-3, want_stop=False)


class Plain:
    """torch's FSDP2 as in its tutorial."""

    def __init__(self, reshard: bool, tokens: Tensor) -> None:
        self.tokens = tokens
        torch.manual_seed(1)
        self.model = gpt.build(JobSpec.model_validate(
            {"data": {"source": "any"}, "train": {"steps": 1}, "model": MODEL}
        ).model, VOCAB)  # fmt: skip
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(self.model, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.counted = 0

    def __call__(self) -> None:
        """One step."""
        module: nn.Module = self.model
        F.cross_entropy(module(self.tokens[:, :-1]).flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages of these tensors, each storage once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def main(number: int, port: int, rounds: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    control = dist.new_group(backend="gloo")
    rank = Rank(number, WORLD, number, torch.device("cpu"), "gloo", "127.0.0.1", control, ())
    tokens = torch.randint(VOCAB, (BATCH, MODEL["context"] + 1), generator=torch.Generator().manual_seed(number))
    variants: dict[str, Callable[[], None]] = {name: Ours(rank, s, tokens) for name, s in RAYDIST.items()}
    variants |= {name: Plain(reshard, tokens) for name, reshard in PLAIN.items()}
    for step in variants.values():
        for _ in range(2):  # compiles
            step()
    times, _ = interleaved(variants, rounds, dist.barrier)
    counted: list[Any] = [None] * WORLD
    dist.all_gather_object(counted, {n: v.counted for n, v in variants.items()})  # type: ignore[attr-defined]
    if number == 0:
        spec = JobSpec.model_validate({"data": {"source": "any"}, "train": {"steps": 1}, "model": MODEL})
        parameters = sum(p.numel() for p in gpt.build(spec.model, VOCAB).parameters())
        ideal = {"ddp": 16, "zero1": 8 + 8 / WORLD, "zero2": 4 + 12 / WORLD, "zero3": 16 / WORLD}
        table = {}
        for name in variants:
            row = {"step_s": statistics.median(times[name])}
            row["speed_over_ddp"] = statistics.median(b / a for a, b in zip(times[name], times["ddp"], strict=True))
            if name in BESIDE:
                pairs = zip(times[name], times[BESIDE[name]], strict=True)
                row["speed_over_plain_fsdp2"] = statistics.median(b / a for a, b in pairs)
            if name in ideal:
                row["bytes_over_ideal"] = max(c[name] for c in counted) / (parameters * ideal[name])
            table[name] = {k: round(v, 4) for k, v in row.items()}
            print(f"{name:28s}", "  ".join(f"{k} {v:.3f}" for k, v in table[name].items()))
        load = os.getloadavg()[1]
        print(write("step", {"parameters": parameters, "rounds": rounds, "load_average": load, "variants": table}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, (free_port, asked.rounds), nprocs=WORLD)
