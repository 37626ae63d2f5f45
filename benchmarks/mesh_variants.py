"""What mesh.py compares: the jobs of each comparison, and a training step of each variant, raydist's and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def _job(model: dict[str, Any], rows: int, micro_batches: int, **mesh: Any) -> JobSpec:
    """The job of all variants. `rows`: sequences of a micro-batch; `micro_batches`: of all replicas."""
    train = {"steps": 1, "global_batch": rows * micro_batches, "micro_batch": rows}
    return JobSpec.model_validate({
        "data": {"source": "any"}, "train": train, "model": model, "parallel": mesh, "cluster": {"workers": WORLD},
    })  # fmt: skip


def job() -> JobSpec:
    """The job of a tensor group."""
    return _job(MODEL, BATCH, 1, tensor=WORLD, tensor_across_nodes=True)


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
FEW, FEW_ROWS, FEW_IDS = 2, 4, 256
"""Micro-batches of `bubble`, their sequences, and its vocabulary."""
FEW_MODELS = {"bubble": STAGED, "bubble_wide": {**STAGED, "width": 768, "heads": 12}}
CHUNKS = {"1f1b": 1, "chunks_2": 2, "chunks_4": 4}
"""Its variants, and the stages of a rank."""


def staged_job(
    chunks: int, rows: int = 1, micro_batches: int = MICRO_BATCHES, model: dict[str, Any] = STAGED
) -> JobSpec:
    """The job of a pipeline, cut into stages of equally many blocks."""
    cut = [model["layers"] // (WORLD * chunks)] * WORLD * chunks
    return _job(model, rows, micro_batches, pipeline=WORLD, chunks=chunks, pipeline_cut=cut)


def few_job(what: str, chunks: int) -> JobSpec:
    """A job of `bubble` or `bubble_wide`."""
    return staged_job(chunks, FEW_ROWS, FEW, FEW_MODELS[what])


SPARSE = {**MODEL, "name": "mixtral", "layers": 4, "hidden": 512}


def sparse_job() -> JobSpec:
    """The job of two replicas that share the experts."""
    return _job(SPARSE, BATCH // WORLD, WORLD, expert=WORLD)


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


def summed_norm(own: Sequence[Tensor], same: Sequence[Tensor] = ()) -> float:
    """Of gradients of which each rank has its `own`, and all have the `same`."""
    square = torch.nn.utils.get_total_norm(own).square()
    dist.all_reduce(square)
    if same:
        square += torch.nn.utils.get_total_norm(same).square()
    return float(square.sqrt())


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
        self.shared = [p for name, p in model.named_parameters() if name not in names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def __call__(self) -> float:
        """One step; its loss."""
        loss = self.model(self.x, targets=self.y) / self.y.numel()
        loss.backward()
        torch._foreach_mul_([p.grad for p in self.experts], 1 / WORLD)
        summed_norm([p.grad for p in self.experts], [p.grad for p in self.shared])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / WORLD
        dist.all_reduce(mean)
        return float(mean)


class OurPipeline:
    """raydist's step of such a job."""

    def __init__(self, rank: Rank, tokens: Tensor, spec: JobSpec, vocabulary: int = VOCAB) -> None:
        self.batches = [MicroBatch(t[:, :-1], t[:, 1:].contiguous()) for t in tokens.split(spec.train.micro_batch)]
        self.tokens = sum(b.tokens.numel() for b in self.batches)
        mesh = Mesh.of(spec, rank)
        torch.manual_seed(1)
        strategy = build_strategy(spec, mesh)
        assert isinstance(strategy, Pipeline)

        def example(module: nn.Module, samples: int = 1, part: bool = False) -> Tensor:
            first = self.batches[0].tokens[:1].expand(samples, -1)
            batch = MicroBatch(first, first)
            return call_model(module, batch).sum() if part else loss_sum(module, batch)

        strategy.wrap(strategy.cut(gpt.build(spec.model, vocabulary)), example)
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
        summed_norm([p.grad for p in self.parameters])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        summed = torch.stack(losses).sum() if self.last else torch.zeros(())
        dist.broadcast(summed, WORLD - 1)
        return float(summed.detach())


def variants_of(what: str, rank: Rank) -> tuple[dict[str, Callable[[], float]], int]:
    """(name -> a step of it, tokens of a step)."""
    few = what in FEW_MODELS
    count = FEW * FEW_ROWS if few else MICRO_BATCHES if what == "pipeline" else BATCH
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(FEW_IDS if few else VOCAB, (count, MODEL["context"] + 1), generator=generator)
    variants: dict[str, Callable[[], float]]
    if what == "tensor":
        variants = {"raydist": Ours(rank, tokens), "torch": Torchs(tokens)}
    elif what == "expert":
        variants = {"raydist": OurExperts(rank, tokens), "torch": TorchExperts(rank, tokens)}
    elif few:
        variants = {name: OurPipeline(rank, tokens, few_job(what, chunks), FEW_IDS) for name, chunks in CHUNKS.items()}
    else:
        variants = {}
        for name, chunks in (("1f1b", 1), ("interleaved", 2)):
            variants[f"{name}_raydist"] = OurPipeline(rank, tokens, staged_job(chunks))
            variants[f"{name}_torch"] = TorchPipeline(rank, tokens, chunks)
    return variants, tokens[:, 1:].numel()


def jobs(what: str) -> dict[str, JobSpec]:
    """The jobs of raydist's variants."""
    if what == "tensor":
        return {"raydist": job()}
    if what == "expert":
        return {"raydist": sparse_job()}
    if what in FEW_MODELS:
        return {name: few_job(what, chunks) for name, chunks in CHUNKS.items()}
    return {"1f1b_raydist": staged_job(1), "interleaved_raydist": staged_job(2)}
