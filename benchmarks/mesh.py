"""Time of a training step on a mesh, beside torch doing the same, in one interleaved run.

    python benchmarks/mesh.py [tensor | pipeline | expert] [--rounds 12]

Two gloo ranks of one thread each train the same GPT on the same samples, with fused AdamW. They run all variants alternately, in a
new order each round: one warm-up step, then two measured ones. raydist's is raydist.worker.step.TrainStep. The losses of the first
step must agree.

tensor: sequence parallel layers, a loss over a split vocabulary, and clipping; torch's is parallelize_module with the styles of its
tutorial, loss_parallel and clip_grad_norm_.
pipeline: eight micro-batches in two stages (1F1B) or four (interleaved), cut alike; torch's is torch.distributed.pipelining, whose
last stage computes cross_entropy of all logits. raydist also sums the gradient norm over the ranks, and torch's variant does not.
expert: 8 experts a layer, of which a token takes 2, on two replicas that share them; torch's is a layer by hand with
all_to_all_single_autograd and grouped_mm, in DistributedDataParallel, which leaves the experts out. raydist also sums the gradient
norm and the loads of the experts, and torch's variant does neither.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import interleaved, write
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker.build import build_strategy
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.model import gpt, mixtral
from raydist.worker.model._moe import MixtureOfExperts, layers_of
from raydist.worker.optim import optimizers
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import split_layers
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
            parameters=gather_parameters(shards, rank), split=tensor, full_tokens=TOKENS, clip=1.0,
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


STAGED = {**MODEL, "layers": 8}
MICRO_BATCHES = 8


def staged_job(chunks: int) -> JobSpec:
    """The job of a pipeline, cut into stages of equally many blocks."""
    cut = [STAGED["layers"] // (WORLD * chunks)] * WORLD * chunks
    return JobSpec.model_validate({
        "data": {"source": "any"}, "train": {"steps": 1}, "model": STAGED, "cluster": {"workers": WORLD},
        "parallel": {"pipeline": WORLD, "chunks": chunks, "pipeline_cut": cut},
    })  # fmt: skip


SPARSE = {**MODEL, "name": "mixtral", "layers": 4, "hidden": 512}


def sparse_job() -> JobSpec:
    """The job of two replicas that share the experts."""
    sections = {"data": {"source": "any"}, "train": {"steps": 1}, "model": SPARSE}
    return JobSpec.model_validate(sections | {"parallel": {"expert": WORLD}, "cluster": {"workers": WORLD}})


class OurExperts:
    """raydist's step, each rank with its sequences."""

    def __init__(self, rank: Rank, tokens: Tensor) -> None:
        spec = sparse_job()
        own = tokens.chunk(WORLD)[rank.rank]
        self.batch = MicroBatch(own[:, :-1], own[:, 1:].contiguous())
        mesh = Mesh.of(spec, rank)
        torch.manual_seed(1)
        model = mixtral.build(spec.model, VOCAB)
        split = split_layers(model, mesh)
        assert split is not None
        strategy = build_strategy(spec, mesh)
        strategy.wrap(model, lambda module, **_: loss_sum(module, self.batch))
        shards = split.shards(strategy.shards())
        self.step = TrainStep(
            mesh, strategy, optimizers.build(shards, spec.optim, rank.device), Precision(spec.precision, rank.device),
            parameters=gather_parameters(shards, rank), split=split, full_tokens=TOKENS, clip=0.0,
            hooks=[ExpertLoads([model], rank, None, None)],
        )  # fmt: skip

    def __call__(self) -> float:
        """One step; its loss."""
        return self.step(1, [self.batch], TOKENS // WORLD, LR, want_stop=False).loss


def by_hand(layer: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """A layer with experts on all ranks, with torch's own all-to-all."""
    x, experts, chosen = x_BTD.flatten(0, 1), layer.experts, layer.shape.chosen
    scores, ids = F.linear(x, layer.router.weight).softmax(-1).topk(chosen, dim=-1)
    weights = scores / scores.sum(-1, keepdim=True)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=layer.shape.count)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    out, into = counts.view(WORLD, -1).sum(1).tolist(), theirs.view(WORLD, -1).sum(1).tolist()
    rows = all_to_all_single_autograd(x[order // chosen], into, out, dist.group.WORLD)
    expert = torch.arange(layer.shape.count // WORLD).repeat(WORLD).repeat_interleave(theirs)
    by_expert = expert.argsort(stable=True)
    ends = theirs.view(WORLD, -1).sum(0).cumsum(0).to(torch.int32)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    mine = rows[by_expert]
    made = product(F.silu(product(mine, experts.gate)) * product(mine, experts.up), experts.down)
    back = torch.zeros_like(made).index_copy(0, by_expert, made)
    back = all_to_all_single_autograd(back, out, into, dist.group.WORLD)
    return torch.zeros_like(x).index_add(0, order // chosen, back * weights.flatten()[order, None]).view_as(x_BTD)


class TorchExperts:
    """DistributedDataParallel of all but the experts, and `by_hand`."""

    def __init__(self, rank: Rank, tokens: Tensor) -> None:
        own = tokens.chunk(WORLD)[rank.rank]
        self.x, self.y = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        torch.manual_seed(1)
        model = mixtral.build(sparse_job().model, VOCAB)
        names = []
        for name, layer in layers_of(model):
            for key, p in layer.experts.named_parameters():
                p.data = p.data.chunk(WORLD)[rank.rank].clone()
                names.append(f"{name}.experts.{key}")
            layer.forward = partial(by_hand, layer)
        self.experts = [p for name, p in model.named_parameters() if name in names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def __call__(self) -> float:
        """One step; its loss."""
        loss = self.model(self.x, targets=self.y) / self.y.numel()
        loss.backward()
        torch._foreach_mul_([p.grad for p in self.experts], 1 / WORLD)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / WORLD
        dist.all_reduce(mean)
        return float(mean)


class OurPipeline:
    """raydist's step, with micro-batches of one sequence."""

    def __init__(self, rank: Rank, tokens: Tensor, chunks: int) -> None:
        spec = staged_job(chunks)
        self.batches = [MicroBatch(t[:, :-1], t[:, 1:].contiguous()) for t in tokens.split(1)]
        self.tokens = sum(b.tokens.numel() for b in self.batches)
        mesh = Mesh.of(spec, rank)
        torch.manual_seed(1)
        strategy = build_strategy(spec, mesh)
        assert isinstance(strategy, Pipeline)

        def example(module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
            return call_model(module, self.batches[0]).sum() if part else loss_sum(module, self.batches[0])

        strategy.wrap(strategy.cut(gpt.build(spec.model, VOCAB)), example)
        shards = strategy.shards()
        self.step = TrainStep(
            mesh, strategy, optimizers.build(shards, spec.optim, rank.device), Precision(spec.precision, rank.device),
            parameters=gather_parameters(shards, rank), full_tokens=self.tokens, clip=0.0,
        )  # fmt: skip

    def __call__(self) -> float:
        """One step; its loss."""
        return self.step(1, self.batches, self.tokens, LR, want_stop=False).loss


class Part(nn.Module):
    """A stage for torch, which passes its one tensor: the tokens, or the output of the stage before."""

    def __init__(self, stage: nn.Module, first: bool) -> None:
        super().__init__()
        self.stage, self.first = stage, first

    def forward(self, x: Tensor) -> Tensor:
        """tokens_BT or x_BTD -> x_BTD or logits_BTV."""
        made: Tensor = self.stage(x) if self.first else self.stage(x[..., 0].long(), hidden=x)
        return made


class TorchPipeline:
    """torch.distributed.pipelining's schedule of the same stages."""

    def __init__(self, rank: Rank, tokens: Tensor, chunks: int) -> None:
        spec = staged_job(chunks)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        torch.manual_seed(1)
        model = gpt.build(spec.model, VOCAB)
        stages, each = WORLD * chunks, STAGED["layers"] // (WORLD * chunks)
        own = range(rank.rank, stages, WORLD)
        parts = [Part(model.stage(n * each, (n + 1) * each), n == 0) for n in own]
        self.last = stages - 1 in own
        self.parameters = [p for part in parts for p in part.parameters()]
        staged = [PipelineStage(part, n, stages, rank.device) for part, n in zip(parts, own, strict=True)]

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / self.y.numel()

        if chunks == 1:
            self.schedule: Any = Schedule1F1B(staged[0], MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        else:
            self.schedule = ScheduleInterleaved1F1B(staged, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        self.first = rank.rank == 0
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=True)

    def __call__(self) -> float:
        """One step; its loss."""
        losses: list[Tensor] = []
        inputs = (self.x,) if self.first else ()
        self.schedule.step(*inputs, target=self.y if self.last else None, losses=losses if self.last else None)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        summed = torch.stack(losses).sum() if self.last else torch.zeros(())
        dist.broadcast(summed, WORLD - 1)
        return float(summed.detach())


def main(number: int, port: int, rounds: int, what: str) -> None:
    """One rank. Rank 0 writes the result."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    control = dist.new_group(backend="gloo")
    rank = Rank(number, WORLD, number, torch.device("cpu"), "gloo", "127.0.0.1", control, ())
    count = MICRO_BATCHES if what == "pipeline" else BATCH
    tokens = torch.randint(VOCAB, (count, MODEL["context"] + 1), generator=torch.Generator().manual_seed(3))
    pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]]
    if what == "tensor":
        pairs = {"": (Ours(rank, tokens), Torchs(tokens))}
    elif what == "expert":
        pairs = {"": (OurExperts(rank, tokens), TorchExperts(rank, tokens))}
    else:
        chunks = {"1f1b_": 1, "interleaved_": 2}
        pairs = {name: (OurPipeline(rank, tokens, n), TorchPipeline(rank, tokens, n)) for name, n in chunks.items()}
    variants = {
        f"{name}{whose}": step
        for name, pair in pairs.items()
        for whose, step in zip(("raydist", "torch"), pair, strict=True)
    }
    first = {name: step() for name, step in variants.items()}
    assert max(first.values()) - min(first.values()) < 1e-5 * min(first.values()), first
    wall, processor = interleaved(variants, rounds, dist.barrier)
    if number == 0:
        model = {"tensor": MODEL, "pipeline": STAGED, "expert": SPARSE}[what]
        result: dict[str, Any] = {"rounds": rounds, "load_average": os.getloadavg()[1], what: WORLD, "model": model}
        compared = [(name, f"{name}torch", f"{name}raydist") for name in pairs]
        if what == "pipeline":
            result["micro_batches"] = MICRO_BATCHES
            compared.append(("interleaved_over_1f1b_", "1f1b_raydist", "interleaved_raydist"))
        for name, theirs, ours in compared:
            beside = "over_torch" if theirs.endswith("torch") else ""
            for kind, times in (("speed", wall), ("processor_time", processor)):
                ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
                ratios = sorted(ratios if kind == "speed" else (1 / ratio for ratio in ratios))
                key = f"{name}{kind}_{beside}".rstrip("_")
                result[key] = round(statistics.median(ratios), 4)
                result[f"{key}_quartiles"] = [round(ratios[len(ratios) * k // 4], 4) for k in (1, 3)]
        result["tokens_per_second"] = {
            name: round(tokens[:, 1:].numel() / statistics.median(times), 1) for name, times in wall.items()
        }
        print(result)
        print(write("mesh" if what == "tensor" else f"mesh_{what}", result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", default="tensor", choices=("tensor", "pipeline", "expert"))
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(main, (free_port, asked.rounds, asked.what), nprocs=WORLD)
