"""`train.virtual_ranks`: every strategy, on any number of ranks, has the bits of one: losses, norms, weights and optimizer state.

Ranks are warm processes without Ray. A job is trained on one process once, and compared with all others of the same job.

Over a minute: each strategy and mesh on several numbers of ranks, and compiled blocks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from raydist.data.batches import MASKED, MicroBatch, equal_parts
from raydist.spec import JobSpec
from raydist.worker.comm.tree import Fold, in_place
from raydist.worker.dataloader import own_tokens, to_device
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.model_transforms import prepare
from raydist.worker.parallel._grad_norm import RowNorm
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce
from raydist.worker.parts import Parts
from tests.training import (
    CONTEXT,
    GROUPED,
    MODEL,
    VARIANTS,
    Trainer,
    alone,
    counted,
    gather_parts,
    job,
    run,
    samples,
    without_kernels,
)

STEPS, MOST = 2, 16
"""A step with a whole batch, after which optimizers have state, and one with a short batch; and the most samples of a batch."""
ODD = {**MODEL, "width": 12, "hidden": 20, "dropout": 0.1}
"""No row is a whole number of vectors, so that optimizers see parts with an end; the default has rows of 16."""
State = Mapping[str, torch.Tensor]
Result = tuple[list[tuple[float, float]], str, float, dict[str, torch.Tensor]]
"""(loss, norm) of each step, hash of weights and optimizer state, eval loss, and the state itself by name."""


def divided(trainer: Trainer, tokens: torch.Tensor, targets: torch.Tensor) -> list[MicroBatch]:
    """This rank's micro-batches, as the loader divides a batch."""
    assert trainer.parts is not None
    made: list[MicroBatch] = []
    divide = trainer.parts.divide(equal_parts(trainer.spec.train.micro_batch))
    for ids in divide(np.arange(len(tokens)), trainer.mesh.data_rank, trainer.mesh.data_size):
        if len(ids):
            made.append(MicroBatch(tokens[ids], targets[ids], first=int(ids[0])))
        else:
            nothing = torch.full_like(targets[:1], MASKED)
            made.append(MicroBatch(tokens[:1], nothing, first=len(tokens), real=False))
    return [to_device(own_tokens(batch, trainer.mesh), trainer.rank.device) for batch in made]


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors, whole."""
    found = trainer.whole()
    for slot in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        parts: dict[str, torch.Tensor | None] = {}
        for name in trainer.parameters.trained:
            shard = trainer.shards.get(name)  # a stage has some
            held = trainer.optimizer.state[shard.local].get(slot) if shard is not None else None
            parts[name] = None if held is None or shard is None else shard.whole(held)
        if (slot == "momentum_buffer") == (trainer.spec.optim.name == "sgd"):
            found |= {f"{slot} {n}": t for n, t in gather_parts(parts, trainer.rank, trainer.parameters).items()}
    return found


def hashed(state: State) -> str:
    """Of all names and bits."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(rank: Rank, spec: JobSpec, evaluated: bool = True) -> Result:
    """STEPS steps, of which the last has a short batch. tests/worker/test_exactness.py goes on from checkpoints."""
    assert spec.train.virtual_ranks is not None
    whole = min(MOST, 2 * spec.train.virtual_ranks * spec.train.micro_batch)
    trainer = Trainer(rank, spec, full=whole * CONTEXT)
    reports = []
    for step in range(1, STEPS + 1):
        batches = divided(trainer, *samples(whole if step != STEPS else 5, seed=step))
        report = trainer.step(step, batches, counted(batches), 1e-2, want_stop=False)
        reports.append((report.loss, report.grad_norm))
    held_out = divided(trainer, *samples(whole, seed=99)) if evaluated else []
    loss = evaluate(trainer.mesh, trainer.strategy, trainer.precision, held_out)[0] if evaluated else 0.0
    found = state_of(trainer)
    loads = {f"load {n}": t for n, t in trainer.loads.loads.items()}
    result = reports, hashed({**found, **loads}), loss, found
    trainer.step.optimizer_hooks.close()
    return result


def made(strategy: str, parts: int, micro: int = 1, model: Mapping[str, Any] = MODEL, **sections: Any) -> JobSpec:
    """A job of `parts` virtual ranks."""
    fields = {
        "virtual_ranks": parts,
        "global_batch": parts * micro * 2,
        "micro_batch": micro,
        **sections.pop("train", {}),
    }
    return job(strategy, dict(model), fields, **{"cluster": {"workers": min(parts, 4)}, **sections})


@functools.cache
def _alone(text: str) -> Result:
    return train(alone(), JobSpec.model_validate_json(text))


def reference(spec: JobSpec) -> Result:
    """On one process, by ddp, with activations kept: all others have the same bits."""
    train = spec.train.model_copy(update={"checkpoint_activations": "none"})
    plain = spec.model_copy(update={"parallel": job("ddp").parallel, "offload": job("ddp").offload, "train": train})
    return _alone(plain.model_dump_json())


def check(got: Result, expected: Result) -> None:
    """Equal to the bit. Names the first tensor that differs."""
    assert got[0] == expected[0]
    assert got[2] == expected[2]
    different = [name for name, tensor in expected[3].items() if not torch.equal(tensor, got[3][name])]
    assert not different
    assert got[1] == expected[1]


SPREADS = [
    ("ddp", 4, 4, 2), ("ddp", 3, 8, 1), ("ddp", 2, 5, 1), ("zero1", 4, 8, 1), ("zero1", 3, 5, 2), ("zero2", 4, 4, 2),
    ("zero2", 3, 4, 1), ("zero2", 2, 8, 2), ("zero3", 4, 4, 1), ("zero3", 3, 8, 2), ("zero3", 2, 3, 2), ("hsdp", 4, 8, 2),
    ("hsdp", 3, 3, 1),
]  # fmt: skip
"""(strategy, ranks, virtual ranks, micro-batch): one part a rank, several, uneven; one micro-batch a part, and several."""


@pytest.mark.parametrize(("strategy", "world", "parts", "micro"), SPREADS)
def test_any_number_of_ranks_has_the_bits_of_one(ranks: Any, strategy: str, world: int, parts: int, micro: int) -> None:
    """Losses, norms, weights, moments and the eval loss, with clipping, dropout, a short last batch, and rows of odd lengths."""
    if strategy in GROUPED and world % VARIANTS[GROUPED[strategy]].get("shard", 1) == 0:
        strategy = GROUPED[strategy]
    spec = made(strategy, parts, micro, ODD)
    for got in run(ranks, train, world, spec):
        check(got, reference(spec))


FEATURES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "bf16": ("zero3", 3, 4, 2, {"precision": "bf16"}),
    "bf16, whole": ("ddp", 2, 4, 2, {"precision": "bf16"}),
    "fp16 and its loss scale": ("zero2", 3, 4, 2, {"precision": {"params": "fp16", "loss_scale": {"initial": 1024}}}),
    "optimizer in host memory": ("zero1", 3, 4, 2, {"offload": {"optimizer": "cpu"}}),
    "parameters in host memory": ("zero3", 2, 4, 2, {"offload": {"parameters": "cpu"}}),
    "activations again": ("zero3", 2, 4, 1, {"train": {"checkpoint_activations": "full"}}),
    "sgd": ("zero1", 3, 4, 2, {"optim": {"name": "sgd", "lr": 0.1, "clip": 0.5}}),
    "experts": ("zero2", 3, 4, 2, {"model": {**MODEL, "name": "mixtral"}}),
    "experts with biases, sharded": ("zero3", 2, 5, 1, {"model": {**MODEL, "name": "deepseek"}}),
    "untied": ("zero3", 3, 4, 2, {"model": {**ODD, "tie_embeddings": False}}),
    "another model": ("ddp", 3, 4, 1, {"model": {**MODEL, "name": "llama"}}),
}
"""Each with one strategy: (strategy, ranks, virtual ranks, micro-batch, sections)."""


@pytest.mark.parametrize("feature", FEATURES)
def test_with_everything_else_too(ranks: Any, feature: str) -> None:
    """The same with other number formats, offload, recomputed activations, optimizers and models."""
    strategy, world, parts, micro, sections = FEATURES[feature]
    spec = made(strategy, parts, micro, **{"model": ODD, **sections})
    for got in run(ranks, train, world, spec):
        check(got, reference(spec))


DROPPING = {**MODEL, "dropout": 0.1}
FOUR = {**DROPPING, "layers": 4, "heads": 4}
SPARSE = {**DROPPING, "name": "mixtral"}
UNTIED = {**FOUR, "tie_embeddings": False}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], int, dict[str, tuple[int, ...]]]] = {
    "tensor 2": ({"tensor": 2}, DROPPING, 4, {"ddp": (4, 2)}),
    "tensor 4": ({"tensor": 4}, FOUR, 2, {"zero1": (8,)}),
    "pipeline 2": ({"pipeline": 2}, FOUR, 4, {"ddp": (4, 2), "zero1": (6,), "zero3": (6,)}),
    "two stages a rank": ({"pipeline": 2, "chunks": 2}, UNTIED, 4, {"ddp": (4, 2), "zero2": (4,)}),
    "context 2": ({"context": 2}, DROPPING, 4, {"ddp": (4, 2), "zero1": (6,), "hsdp in pairs": (8,)}),
    "expert 2": ({"expert": 2}, SPARSE, 8, {"ddp": (4, 2), "zero3": (6,), "hsdp in pairs": (4,)}),
    "expert 2 in tensor 4": ({"expert": 2, "tensor": 4}, {**SPARSE, "heads": 4}, 2, {"zero3": (8,)}),
    "expert 4, tensor 2": ({"expert": 4, "tensor": 2}, {**SPARSE, "name": "deepseek"}, 4, {"zero2": (8,)}),
    "all but context": ({"tensor": 2, "pipeline": 2, "expert": 2}, {**SPARSE, "layers": 4}, 2, {"zero1": (8,)}),
}
"""Fields of `parallel`, the model, virtual ranks, and of each strategy the numbers of ranks. Each pair of a kind of mesh and a
strategy is here, or among the twelve steps on each mesh of two in tests/worker/test_exactness.py."""
LEAST = {
    mesh: min(4, *(world for worlds in of_strategy.values() for world in worlds))
    for mesh, (*_, of_strategy) in MESHES.items()
}
"""The ranks of one replica of each mesh, with its experts: four of the largest ones."""


def of_mesh(mesh: str, strategy: str) -> JobSpec:
    """A job of it."""
    fields, model, parts, of_strategy = MESHES[mesh]
    sections = {"parallel": {**VARIANTS[strategy], **fields}, "cluster": {"workers": of_strategy[strategy][0]}}
    return made(strategy, parts, 2, model, **sections)


@functools.cache
def _of_one(ranks: Any, world: int, text: str) -> Result:
    every: list[Result] = run(ranks, train, world, JobSpec.model_validate_json(text))
    for other in every[1:]:
        check(other, every[0])
    return every[0]


@pytest.mark.parametrize(("mesh", "strategy"), [(mesh, name) for mesh in MESHES for name in MESHES[mesh][3]])
def test_any_number_of_replicas_on_a_mesh(ranks: Any, mesh: str, strategy: str) -> None:
    """The same, of replicas of several ranks, or with experts on several: all strategies have the bits of the least replicas."""
    spec, least = of_mesh(mesh, strategy), LEAST[mesh]
    plain = spec.parallel.model_copy(update={"strategy": "ddp", "shard": None})
    cluster = spec.cluster.model_copy(update={"workers": least})
    expected = _of_one(ranks, least, spec.model_copy(update={"parallel": plain, "cluster": cluster}).model_dump_json())
    for world in {*MESHES[mesh][3][strategy]} - ({least} if strategy == "ddp" else set()):
        for got in run(ranks, train, world, spec):
            check(got, expected)


def rows_of_norm(rank: Rank, spec: JobSpec) -> dict[str, int]:
    """Where the rows of this rank's parameters stand in the sum of the gradient norm, which decides its last bit."""
    trainer = Trainer(rank, spec, full=MOST * CONTEXT)
    norm = trainer.step._grad_norm
    assert isinstance(norm, RowNorm)
    names = {id(shard.local): name for name, shard in trainer.shards.items()}
    return {names[id(local)]: rows.start for local, rows in norm._own}


def test_stages_change_no_bit(ranks: Any) -> None:
    """Two stages on each of two ranks, with weights that are not tied, have the bits of one process."""
    spec = of_mesh("two stages a rank", "ddp")
    expected = reference(spec)
    for got in run(ranks, train, 2, spec):
        check(got, expected)
    plain = spec.model_copy(update={"parallel": job("ddp").parallel})
    (places,) = {frozenset(found.items()) for found in run(ranks, rows_of_norm, 1, plain)}
    assert frozenset().union(*(found.items() for found in run(ranks, rows_of_norm, 2, spec))) == places


def slices(rank: Rank, lengths: list[int], parts: int) -> tuple[list[bool], int]:
    """Of buckets of so many numbers: whether the sum of each has the bits of the tree; and the bytes of the room."""
    dealt, world = Parts(parts, rank.rank, rank.world_size), dist.group.WORLD
    assert world is not None
    summing = TreeAllReduce(dealt.tree, dealt.nodes_of_copies(), world, rank.device)
    found = []
    for length in lengths:
        whole, own = Fold(dealt.tree, in_place), Fold(dealt.tree, in_place)
        for term in range(parts):
            value = torch.randn(length, generator=torch.Generator().manual_seed(term)).to(rank.device)
            if term in dealt.own:
                own.push((term, term + 1), value.clone())
            whole.push((term, term + 1), value)
        found.append((summing([value for _, value in own.nodes]), whole.nodes[0][1]))
    return [torch.equal(done.wait(), expected) for done, expected in found], summing.room


def test_a_bucket_in_slices(ranks: Any) -> None:
    """Of ddp: each sum has the bits of the tree, with one and with several nodes a rank, in one slice, in two and in three, some of
    uneven lengths; slices are exchanged in the room of one bucket, if each rank has one node."""
    lengths = [5, 1_100_001, 2_200_003, 70_000]
    for world, parts in ((3, 3), (3, 5)):
        for equal, room in ranks.run(slices, world, lengths, parts):
            assert equal == [True] * len(lengths)
            assert parts != world or room <= 4 * (max(lengths) + 2 * world)


COMPILED = {"train": {"compile": "blocks"}}
FEW_KERNELS = {"name": "mlp", "layers": 1, "width": 12, "hidden": 20, "context": CONTEXT, "dropout": 0.1}
"""A block of it takes less than half the time of a GPT's to compile."""


def test_compiled_blocks(ranks: Any) -> None:
    """Ranks that have seen other shapes, in another order, compile the same code for each: two ranks have the bits of three. The
    evaluation would be compiled, too, and is not here."""
    spec = made("zero3", 3, 2, FEW_KERNELS, **COMPILED)
    expected = run(ranks, train, 2, spec.model_copy(update={"parallel": job("ddp").parallel}), False)[0]
    for got in run(ranks, train, 3, spec, False):
        check(got, expected)


def traced(rank: Rank, spec: JobSpec) -> Result:
    """`train`, without compiled kernels and evaluation."""
    with without_kernels():
        return train(rank, spec, False)


@pytest.mark.parametrize(("mesh", "strategy"), [("tensor 2", "ddp"), ("pipeline 2", "zero3"), ("context 2", "zero1")])
def test_compiled_blocks_on_a_mesh(ranks: Any, mesh: str, strategy: str) -> None:
    """The same, of two replicas of two ranks, under ddp and another strategy. A block each, one shape and no evaluation, because to
    compile takes seconds. Only a mesh that divides attention compiles it, and of two such meshes one its kernels."""
    fields, model, parts, _ = MESHES[mesh]
    function, *more = (traced,) if mesh == "tensor 2" else (train, False)
    small = {**FEW_KERNELS, "layers": 2} if mesh == "pipeline 2" else {**model, "layers": 1}
    one, two = (
        made(name, parts, 1, small, parallel={**VARIANTS[name], **fields}, **COMPILED) for name in ("ddp", strategy)
    )
    expected = run(ranks, function, 2, one, *more)[0]
    for got in run(ranks, function, 4, two, *more):
        check(got, expected)


def graphs(rank: Rank, spec: JobSpec) -> int:
    """How many a block has been compiled to, after passes of two, three and four rows."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4))
    prepare(model, spec.train)
    for rows in (2, 3, 4):
        model(torch.ones(rows, 4))
    return int(counters["stats"]["unique_graphs"])


def test_each_shape_is_compiled_for_itself(ranks: Any) -> None:
    """By default torch compiles code for any number of rows once it has seen two: which ones it has seen depends on the parts."""
    assert ranks.run(graphs, 2, made("ddp", 2, 4, **COMPILED)) == [3, 3]
