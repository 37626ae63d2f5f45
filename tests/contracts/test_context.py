"""Context parallel meshes of every strategy: each gradient, the norm, the first weights and the losses of one process.

Over a minute: every strategy, and what goes with it, on two to eight ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.dataloader import own_tokens
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.mesh import Mesh
from raydist.worker.parallel._context import SharedSequence, share_sequences
from tests.contracts.test_tensor import EQUAL, Result, compare
from tests.training import (
    CONTEXT,
    GROUPED,
    MODEL,
    Trainer,
    alone,
    counted,
    job,
    mesh_job,
    mine,
    run,
    samples,
    without_kernels,
)

WIDE = {**MODEL, "heads": 4, "width": 32}
MODELS: dict[str, dict[str, Any]] = {
    "tied": WIDE,
    "qk_norm": {**WIDE, "qk_norm": True},
    "grouped heads": {**WIDE, "kv_heads": 2},
    "one key and value head": {**WIDE, "kv_heads": 1},
    "window": {**WIDE, "name": "llama", "options": {"sliding_window": 3}},
    "latent": {
        "name": "deepseek",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "context": CONTEXT,
        "options": {
            "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_nextn_predict_layers": 0,
        },
    },
}  # fmt: skip
SPARSE = {"name": "tests.sparse:build", "layers": 3, "width": 32, "heads": 4, "context": CONTEXT,
          "options": {"balance": 0.1}}  # fmt: skip
FP16 = {"params": "fp16", "loss_scale": {"initial": 1024}}
N, MICRO = 7, 2
"""Samples of a global batch and of a micro-batch: with accumulation, a short micro-batch, and masked targets, which are all of a
rank's part of the last sample."""


def mesh(
    strategy: str, context: int, model: Any = WIDE, tensor: int = 1, pipeline: int = 1, expert: int = 1, **sections: Any
) -> JobSpec:
    """A job on a mesh."""
    fields = {"context": context, "pipeline": pipeline, "expert": expert}
    return mesh_job(strategy, tensor, model, fields, **sections)


def own(rank: Rank, spec: JobSpec, seed: int, n: int = N) -> list[MicroBatch]:
    """This rank's part of the samples of a seed."""
    parallel = spec.parallel
    return mine(rank, *samples(n, seed), MICRO, parallel.tensor, parallel.pipeline, parallel.context)


def train(rank: Rank, spec: JobSpec, n: int = N) -> Result:
    """Two steps; all ranks return the same."""
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    first, gradients = trainer.whole(), {}
    reports = []
    for s in (1, 2):
        trainer.before_update = (lambda: gradients.update(trainer.whole(grad=True))) if s == 1 else (lambda: None)
        batches = own(rank, spec, s, n)
        reports.append(trainer.step(s, batches, counted(batches), 1e-2, want_stop=False))
    loss, tokens = evaluate(trainer.mesh, trainer.strategy, trainer.precision, own(rank, spec, 99, n))
    assert tokens == n * CONTEXT - 5
    trainer.step.optimizer_hooks.close()
    return reports, first, gradients, trainer.whole(), loss


@functools.cache
def reference(model: str) -> Result:
    """One process, without a strategy."""
    return train(alone(), job("ddp", MODELS[model]))


@pytest.mark.parametrize("model", MODELS)
def test_each_gradient_is_that_of_one_process(ranks: Any, model: str) -> None:
    """dp 1 x context 2 under ddp. Sums of fp32 in another order: 3e-6 of the largest element, 1e-6 for the norm."""
    for got in run(ranks, train, 2, mesh("ddp", 2, MODELS[model])):
        compare(got, reference(model))


@pytest.mark.parametrize("strategy", [GROUPED.get(name, name) for name in registry.names("parallel")])
def test_each_strategy_splits_over_replicas_and_context(ranks: Any, strategy: str) -> None:
    """dp 2 x context 2; the strategy's groups have both."""
    for got in run(ranks, train, 4, mesh(strategy, 2, MODELS["qk_norm"])):
        compare(got, reference("qk_norm"))


def test_more_ranks_than_key_and_value_heads(ranks: Any) -> None:
    """Context 4, with two of them: each is sent to two ranks."""
    for got in run(ranks, train, 4, mesh("zero2", 4, MODELS["grouped heads"])):
        compare(got, reference("grouped heads"))


@pytest.mark.parametrize(
    ("strategy", "tensor", "pipeline"), [("zero2", 2, 1), ("zero3", 2, 1), ("ddp", 1, 2), ("zero1", 1, 2)]
)
def test_with_tensor_and_pipeline(ranks: Any, strategy: str, tensor: int, pipeline: int) -> None:
    """Context 2 x tensor 2, and pipeline 2 x context 2, with dropout: the masks of one process."""
    model = {**MODELS["qk_norm"], "dropout": 0.2}
    right = train(alone(), job("ddp", model))
    for got in run(ranks, train, 4, mesh(strategy, 2, model, tensor, pipeline)):
        compare(got, right)


@pytest.mark.parametrize(
    ("strategy", "context", "expert", "tensor", "pipeline", "world"),
    [
        ("ddp", 2, 1, 1, 1, 4),
        ("zero2", 2, 4, 1, 1, 4),
        ("zero3", 2, 2, 1, 1, 4),
        ("zero1", 2, 2, 2, 1, 4),
        ("ddp", 2, 4, 2, 1, 4),
        ("zero2", 2, 2, 1, 1, 2),
        ("zero1", 2, 2, 1, 2, 4),
        ("zero3", 4, 4, 1, 1, 4),
        ("ddp", 4, 2, 1, 1, 4),
    ],
)
def test_with_experts(
    ranks: Any, strategy: str, context: int, expert: int, tensor: int, pipeline: int, world: int
) -> None:
    """dp 2 x context 2 with whole experts, and with a quarter and a half on each rank; so context 2 x tensor 2; context 2 alone and
    pipeline 2 x context 2 with half of them; context 4. The balance loss is that of whole sequences."""
    right = train(alone(), job("ddp", SPARSE))
    for got in run(ranks, train, world, mesh(strategy, context, SPARSE, tensor, pipeline, expert)):
        compare(got, right)


def test_two_runs_have_the_same_bits(ranks: Any) -> None:
    """The second of them computes the activations again: dp 2 x context 2, with dropout."""
    model = {**MODELS["qk_norm"], "dropout": 0.2}
    again = mesh("zero3", 2, model, train={"checkpoint_activations": "full"})
    one, other = (run(ranks, train, 4, spec)[0] for spec in (mesh("zero3", 2, model), again))
    compare(one, train(alone(), job("ddp", model)))
    assert one[0] == other[0]
    for part in (2, 3):
        assert all(torch.equal(one[part][name], value) for name, value in other[part].items())


def packed(rank: Rank, spec: JobSpec) -> dict[str, torch.Tensor]:
    """The gradients of a step on samples of three documents each."""
    trainer, gradients = Trainer(rank, spec, full=N * CONTEXT), dict[str, torch.Tensor]()
    trainer.before_update = lambda: gradients.update(trainer.whole(grad=True))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], device=rank.device)
    batches = [replace(b, documents=documents.expand(len(b.tokens), -1)) for b in own(rank, spec, 1)]
    trainer.step(1, batches, counted(batches), 1e-2, want_stop=False)
    return gradients


@pytest.mark.parametrize("model", ["qk_norm", "window"])
def test_packed_documents(ranks: Any, model: str) -> None:
    """Positions and masks are those of the whole sequence, also of a document that two ranks share."""
    right = packed(alone(), job("ddp", MODELS[model]))
    for got in run(ranks, packed, 2, mesh("ddp", 2, MODELS[model])):
        for name, value in right.items():
            assert float((got[name] - value).abs().max() / value.abs().max()) <= 3e-6, name


@pytest.mark.parametrize(
    ("strategy", "sections", "loss", "norm"),
    [
        ("zero2", {"precision": "bf16"}, 5e-3, 2e-2),  # bf16 rounds by up to 0.4%
        ("zero1", {"precision": FP16}, 5e-3, 2e-2),
        ("ddp", {"optim": {"name": "muon", "lr": 1e-2}}, 1e-4, 1e-6),
        ("zero1", {"offload": {"optimizer": "cpu"}}, 1e-6, 1e-6),
        ("zero2", {"offload": {"optimizer": "nvme"}, "train": {"checkpoint_activations": "selective"}}, 1e-6, 1e-6),
        ("zero3", {"offload": {"parameters": "cpu"}}, 1e-6, 1e-6),
    ],
)
def test_with_formats_and_offload(
    ranks: Any, tmp_path: Path, strategy: str, sections: dict[str, Any], loss: float, norm: float
) -> None:
    """Context 2 stays near one process in the same format, and with an optimizer of whole matrices."""
    if "offload" in sections:
        sections = {**sections, "offload": {**sections["offload"], "path": str(tmp_path)}}
    right = train(alone(), job("ddp", WIDE, **{k: v for k, v in sections.items() if k != "offload"}))
    for reports, _, _, _, held_out in run(ranks, train, 2, mesh(strategy, 2, **sections)):
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in right[0]], rel=loss)
        assert reports[0].grad_norm == pytest.approx(right[0][0].grad_norm, rel=norm)
        assert held_out == pytest.approx(right[4], rel=loss)


def traced(rank: Rank, spec: JobSpec) -> Result:
    """`train` with equal micro-batches, since each shape is compiled for itself, and without compiled kernels."""
    with without_kernels():
        return train(rank, spec, EQUAL)


def test_compiled_blocks_compute_the_same(ranks: Any) -> None:
    """Context 2, with one block."""
    model = {**WIDE, "layers": 1}
    right = train(alone(), job("ddp", model), EQUAL)
    for got in run(ranks, traced, 2, mesh("ddp", 2, model, train={"compile": "blocks"})):
        compare(got, right, gradients=1e-4, norm=1e-5)


def exchanged(rank: Rank) -> tuple[bool, bool]:
    """Whether heads of all tokens come in the order of the ranks, and whether they go back to where they were."""
    made = Mesh(rank, context=rank.world_size)
    made.connect()
    group = made.group("context")
    assert group is not None
    shared = SharedSequence(group)
    x_BTHK = torch.arange(2 * 6 * 4 * 3.0).view(2, 6, 4, 3)
    own = x_BTHK[:, shared.own(6 // shared.size)]
    (heads,) = shared.to_heads(own)
    each = 4 // shared.size
    return torch.equal(heads, x_BTHK[:, :, rank.rank * each :][:, :, :each]), torch.equal(shared.to_tokens(heads), own)


def test_the_exchange(ranks: Any) -> None:
    """Two ranks with three tokens each exchange two heads each."""
    assert run(ranks, exchanged, 2) == [(True, True)] * 2


def test_sequences_and_models_that_ranks_cannot_share_are_one_clear_error() -> None:
    """A sequence of seven tokens, and a model without the attention of the built-in ones."""
    made = Mesh(replace(alone(), world_size=2), context=2)
    with pytest.raises(UserError, match="parallel.context: 2 does not divide a sequence of 7 tokens"):
        own_tokens(MicroBatch(torch.zeros(1, 7), torch.zeros(1, 7)), made)
    with pytest.raises(UserError, match="Linear cannot share sequences"):
        share_sequences(torch.nn.Linear(2, 2), made)
