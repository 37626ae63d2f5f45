"""The smallest complete training: spec, samples, a rank's model, strategy, optimizer and step."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist import registry
from raydist.data.batches import MASKED, MicroBatch, share
from raydist.extension_plans import strategy_plan
from raydist.planner.facts import Machine
from raydist.planner.shares import shard_of
from raydist.records import Finding
from raydist.run.directory import EVENTS
from raydist.spec import JobSpec
from raydist.worker import model_transforms
from raydist.worker.build import build_strategy, divide_into_parts, replica
from raydist.worker.comm.compression.state import Compression
from raydist.worker.comm.outer.hook import Outer
from raydist.worker.dataloader import own_tokens, to_device
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.forward_seeds import ForwardSeeds
from raydist.worker.lora import frozen_shards
from raydist.worker.loss import build as build_loss
from raydist.worker.loss import call_model
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.optim.offload import adamw as offload
from raydist.worker.parallel._model_graph import parts_of
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import split_layers
from raydist.worker.parameter_table import TensorTable, gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep
from raydist.worker.step_hooks import BeforeUpdate
from tests import tensor_pickle

DEVICE = torch.device(os.environ.get("RAYDIST_TEST_DEVICE", "cpu"))
"""Of all ranks: see tests/gpu/README.md."""
if DEVICE.type == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first CUDA call
    torch.use_deterministic_algorithms(True)
VOCAB, CONTEXT, STEPS = 13, 8, 5
MODEL = {"layers": 3, "width": 16, "heads": 2, "context": CONTEXT}


def job(strategy: str, model: dict[str, Any] = MODEL, train: Any = {}, **sections: Any) -> JobSpec:  # noqa: B006
    """The smallest valid spec, with these sections."""
    return JobSpec.model_validate(
        {
            "data": {"source": "any"},
            "train": {"steps": STEPS, **train},
            # With the usual eps AdamW divides tiny gradients by their own size, and makes rounding errors as large as updates.
            "optim": {"lr": 1e-2, "clip": 0.5, "eps": 1e-3},
            "model": model,
            "parallel": VARIANTS[strategy],
            "cluster": {"workers": 4},  # checked by hsdp
            **sections,
        }
    )


def mesh_job(strategy: str, tensor: int, model: dict[str, Any], pipeline: Any = {}, **sections: Any) -> JobSpec:  # noqa: B006
    """A job in which `tensor` ranks share each layer. `pipeline`: more fields of `parallel`."""
    made = job(strategy, model, **sections)
    return made.model_copy(update={"parallel": made.parallel.model_copy(update={"tensor": tensor, **pipeline})})


def _variants() -> dict[str, dict[str, Any]]:
    """Each strategy by its name, and by "name variant" with the fields from VARIANTS in its file."""
    found: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in registry.names("parallel")}
    for name in registry.names("parallel"):
        for variant, fields in (registry.described("parallel", name, "VARIANTS") or {}).items():
            found[f"{name} {variant}"] = {"strategy": name, **fields}
    return found


VARIANTS = _variants()
"""Name of a variant -> its fields of `parallel`."""
MODELS = {
    " ".join(filter(None, (name, variant))): {"name": name, **fields}
    for name in registry.names("model")
    for variant, fields in {"": {}, **(registry.described("model", name, "VARIANTS") or {})}.items()
}
"""Each model by its name, and by "name variant" with the fields from VARIANTS in its file -> its fields of `model`."""
GROUPED = {fields["strategy"]: variant for variant, fields in VARIANTS.items() if fields.get("shard", 1) > 1}
"""Strategy -> its variant that shards within groups of several ranks, while all ranks hold several copies."""
SHARDS_PARAMETERS = [
    GROUPED.get(name, name)
    for name in registry.names("parallel")
    if (plan := strategy_plan(name)) is not None and "parameters" in plan.sharded
]
"""One variant of each strategy that shards parameters."""


def world_of(variant: str, world: int) -> int:
    """The smallest number of ranks from `world` on that makes whole groups, and at least two of them."""
    shard = VARIANTS[variant].get("shard", 1)
    return world if shard == 1 else max(2 * shard, -(-world // shard) * shard)


def copies(variant: str, world: int) -> int:
    """Copies of the parameters that this many ranks hold."""
    plan = strategy_plan(VARIANTS[variant]["strategy"])
    if plan is None or "parameters" not in plan.sharded:
        return world
    return world // shard_of(VARIANTS[variant]["strategy"], job(variant), Machine(world, world, "cpu"))


def samples(n: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [n, 8]; in the last sample only 3 tokens count."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (n, CONTEXT + 1), generator=g)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    targets[-1, 3:] = MASKED
    return tokens, targets


def mine(
    rank: Rank,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    micro: int,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> list[MicroBatch]:
    """This rank's part, as the loader splits the batch over the replicas of a mesh."""
    mesh, made = Mesh(rank, pipeline=pipeline, context=context, tensor=tensor), []
    for ids in share(np.arange(len(tokens)), mesh.data_rank, mesh.data_size, micro):
        if len(ids):
            made.append(MicroBatch(tokens[ids], targets[ids], first=int(ids[0])))
        else:
            made.append(MicroBatch(tokens[:1], torch.full_like(targets[:1], MASKED), real=False))
    return [to_device(own_tokens(batch, mesh), rank.device) for batch in made]


def counted(batches: list[MicroBatch]) -> int:
    """How many tokens count in the loss."""
    return sum(int((m.targets != MASKED).sum()) for m in batches)


class Trainer:
    """Model, strategy, optimizer and step of one rank."""

    def __init__(self, rank: Rank, spec: JobSpec, full: int, model: nn.Module | None = None) -> None:
        if spec.train.compile:
            torch.compiler.reset()  # a rank that was used before would compile for the shapes that it saw then
        self.rank, self.spec, self.mesh = rank, spec, Mesh.of(spec, rank)
        self.replica = replica(spec, self.mesh)
        self.strategy = build_strategy(spec, self.replica or self.mesh)
        self.parts = divide_into_parts(spec, self.mesh, self.strategy)
        build = registry.load("model", spec.model.name)
        later = self.strategy.takes_meta and model is None and getattr(build, "takes_meta", False)
        if model is None:
            torch.manual_seed(1)
            with torch.device("meta") if later else nullcontext():
                model = build(spec.model, VOCAB)
        self.model: nn.Module = model
        tokens, targets = samples(1)
        self.precision = Precision(spec.precision, rank.device)
        loss = build_loss(spec)

        def example(module: nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
            batch = to_device(own_tokens(MicroBatch(tokens, targets), self.mesh), rank.device)
            with self.precision.autocast():
                return call_model(module, batch).float().sum() if part else loss(module, batch)

        self.split = split_layers(self.model, self.mesh, spec.parallel.exchange)
        if isinstance(self.strategy, Pipeline):
            self.model = self.strategy.cut(self.model)
        self.strategy.wrap(self.model, example)
        for part in parts_of(self.model):
            model_transforms.prepare(part, spec.train)
        shards = self.strategy.shards()
        self.shards = shards = self.split.shards(shards) if self.split is not None else shards
        self.optimizer: torch.optim.Optimizer
        if spec.offload.optimizer == "none":
            same_bits = spec.train.virtual_ranks is not None
            self.optimizer = optimizers.build(shards, spec.optim, rank.device, same_bits=same_bits)
        else:
            self.optimizer = offload.build(shards, spec.optim, spec.offload, rank.device, tag=f"rank{rank.rank}")
            self.optimizer.same_bits = spec.train.virtual_ranks is not None
            told = self.optimizer.gradients_final
            self.strategy.on_final = told if self.split is None else self.split.final(told)
        self.loads = ExpertLoads(parts_of(self.model), rank, 1, None)
        self.before_update: Callable[[], object] = lambda: None
        self.frozen = frozen_shards(self.model)
        if self.split is not None:
            self.split.place(self.frozen)
        likes = {name: shard.local if shard.like is None else shard.like for name, shard in self.frozen.items()}
        self.parameters = gather_parameters(shards, rank, likes)
        self.outer = Outer(spec.comm, self.replica, shards, spec.train.total(1)) if self.replica else None
        self.compression = Compression(self.strategy.reducers(), self.precision, rank) if spec.comm.compresses else None
        self.step = TrainStep(
            self.mesh,
            self.strategy,
            self.optimizer,
            self.precision,
            parameters=self.parameters.apart(self.replica.copy) if self.replica else self.parameters,
            split=self.split,
            replica=self.replica,
            full_tokens=full,
            clip=spec.optim.clip,
            hooks=[
                *([self.compression] if self.compression else []),
                *([self.outer] if self.outer else []),
                *([self.loads] if self.loads.counts else []),
                ForwardSeeds(parts_of(self.model), 7, rank.device, by_block=spec.train.compile is not True),
                BeforeUpdate(lambda: self.before_update()),
            ],
            loss=loss,
            parts=self.parts,
        )

    def whole(self, grad: bool = False) -> dict[str, torch.Tensor]:
        """Every parameter, or its gradient, gathered from all ranks."""
        parts: dict[str, torch.Tensor | None] = {}
        for name in self.parameters.trained:
            shard = self.shards.get(name)
            parts[name] = None
            if shard is not None:
                local = shard.local.grad if grad else shard.local.detach()
                assert local is not None, name
                parts[name] = shard.whole(local)
        return gather_parts(parts, self.rank, self.parameters)


def gather_parts(parts: Mapping[str, torch.Tensor | None], rank: Rank, table: TensorTable) -> dict[str, torch.Tensor]:
    """Copies of the whole tensors, from the parts of all ranks; None: this rank has none. One collective, unless every rank holds
    them all."""
    shared = [name for name in parts if not table.held_by_all(name)]
    boxes: dict[str, tuple[Box | None, ...]] = {}
    if shared:
        every = _from_all([_box(parts[name]) for name in shared], rank)
        boxes = dict(zip(shared, zip(*every, strict=True), strict=True))
    found = {}
    for name, part in parts.items():
        if name in boxes:
            # Replicas may differ in a test: this rank's part comes last.
            found[name] = _joined([*boxes[name], _box(part)], table[name].shape)
        else:
            assert part is not None
            found[name] = part.cpu() if part.is_cuda else part.clone()
    return found


def gathered(tensor: torch.Tensor, rank: Rank) -> torch.Tensor:
    """A copy of the whole tensor; a collective if it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu() if tensor.is_cuda else tensor.clone()
    return _joined([*_from_all(_box(tensor), rank), _box(tensor)], tensor.shape)


def _from_all(value: object, rank: Rank) -> list[Any]:
    every: list[Any] = [None] * rank.world_size
    dist.all_gather_object(every, tensor_pickle.dumps(value), group=rank.control)
    return [pickle.loads(each) for each in every]


Box = tuple[Sequence[int], torch.Tensor]
"""The first index in each dimension, and the values."""


def _box(part: torch.Tensor | None) -> Box | None:
    if isinstance(part, DTensor):
        _, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        return offsets, part.to_local().cpu()
    return None if part is None else ((0,) * part.ndim, part.cpu())


def _joined(boxes: Sequence[Box | None], shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor from its parts; where they overlap, the last one counts. NaN where there is none."""
    parts = [box for box in boxes if box is not None]
    whole = torch.full(tuple(shape), torch.nan, dtype=parts[0][1].dtype)
    for at, part in parts:
        whole[tuple(slice(first, first + size) for first, size in zip(at, part.shape, strict=True))] = part
    return whole


def alone() -> Rank:
    """One process without a process group."""
    return Rank(0, 1, 0, DEVICE, "gloo", "127.0.0.1", None, ())


def run(ranks: Any, function: Any, world: int, *args: Any) -> list[Any]:
    """Runs on real ranks, or in this process for one rank. Raises the error of the rank that failed, not its peers' connection
    errors."""
    results = [function(alone(), *args)] if world == 1 else ranks.run(function, world, *args)
    raised = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(raised, key=lambda error: "by peer" in str(error)):
        raise error
    return results


def without_kernels() -> AbstractContextManager[None]:
    """torch.compile traces and divides graphs as always, and runs them with torch's own kernels, because each rank takes up to a
    second to compile one. With compiled ones: blocks and whole models in test_strategies.py, on meshes in test_virtual_ranks.py and
    test_pipeline.py (tests/contracts), experts in tests/worker/model/test_moe.py."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance(force_backend="aot_eager_decomp_partition")
    return stance


def slow_link_found(run: Path) -> None:
    """The run of that folder has an event of the doctor: a link has become slow."""
    found = Finding("slow_link", None, "warning", "all ranks wait", {}, "measure it")
    with (run / EVENTS).open("a") as events:
        events.write(json.dumps(found.event(1.0).to_dict()) + "\n")
