"""Tensor parallel meshes of every strategy: each gradient, the norm, the first weights and the losses of one process.

Over a minute: every strategy and model, on two to eight ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.mesh import Mesh
from raydist.worker.parallel._tensor import TensorParallel
from raydist.worker.step import StepReport
from tests.training import (
    CONTEXT,
    GROUPED,
    MODEL,
    VOCAB,
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
"""Heads for up to four ranks; a vocabulary of 13, which no number of ranks divides."""
MODELS: dict[str, dict[str, Any]] = {
    "tied": WIDE,
    "untied": {**WIDE, "tie_embeddings": False},
    "qk_norm": {**WIDE, "qk_norm": True},
    "one layer": {**WIDE, "layers": 1},
    "grouped heads, odd feed-forward": {**WIDE, "kv_heads": 2, "hidden": 37},
}
N, MICRO = 7, 2
"""Samples of a global batch and of a micro-batch: with accumulation, a short micro-batch, and masked targets."""
EQUAL = 8
"""Samples of a global batch of equal micro-batches."""

Result = tuple[list[StepReport], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], float]
"""Reports of two steps; first weights; gradients of the first step, clipped; weights after both; the loss of held-out samples."""


def train(rank: Rank, spec: JobSpec, n: int = N) -> Result:
    """Two steps; all ranks return the same."""
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    first, gradients = trainer.whole(), {}
    reports = []
    for s in (1, 2):
        trainer.before_update = (lambda: gradients.update(trainer.whole(grad=True))) if s == 1 else (lambda: None)
        batches = mine(rank, *samples(n, seed=s), MICRO, spec.parallel.tensor)
        tokens = counted(batches)
        reports.append(trainer.step(s, batches, tokens, 1e-2, want_stop=False))
    held_out = mine(rank, *samples(n, seed=99), MICRO, spec.parallel.tensor)
    loss, _ = evaluate(trainer.mesh, trainer.strategy, trainer.precision, held_out)
    trainer.step.optimizer_hooks.close()
    return reports, first, gradients, trainer.whole(), loss


@functools.cache
def reference(model: str, **sections: Any) -> Result:
    """One process, without a strategy."""
    return train(alone(), job("ddp", MODELS[model], **sections))


def compare(got: Any, right: Result, gradients: float = 3e-6, norm: float = 1e-6) -> None:
    """First weights bit for bit; losses, norms and each gradient (of its own largest element) within relative tolerances."""
    for name, value in right[1].items():
        assert torch.equal(got[1][name], value), f"first weights: {name}"
    for ours, theirs in zip(got[0], right[0], strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, rel=norm)
    assert got[0][0].grad_norm == pytest.approx(right[0][0].grad_norm, rel=norm)
    assert got[2].keys() == right[2].keys()
    for name, value in right[2].items():
        far = float((got[2][name] - value).abs().max() / value.abs().max())
        assert far <= gradients, f"gradient of {name}: {far:.1e} of its largest element"
    for name, value in right[3].items():
        torch.testing.assert_close(got[3][name], value, rtol=1e-4, atol=5e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert got[4] == pytest.approx(right[4], rel=1e-5)


@pytest.mark.parametrize(("model", "world"), [*((model, 4) for model in MODELS), ("tied", 2)])
def test_each_gradient_is_that_of_one_process(ranks: Any, model: str, world: int) -> None:
    """Under ddp, tensor 2, and every model. Sums of fp32 in another order: 3e-6 of the largest element, 1e-6 for the norm."""
    for got in run(ranks, train, world, mesh_job("ddp", 2, MODELS[model])):
        compare(got, reference(model))


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (GROUPED.get(name, name), model)
        for name in registry.names("parallel")
        for model in ("tied", "qk_norm")
        if name != "ddp" and (name == "zero3" or model == "tied")
    ],
)
def test_each_strategy_splits_what_a_tensor_rank_has(ranks: Any, strategy: str, model: str) -> None:
    """On dp 2 x tensor 2; hsdp in pairs on dp 4 x tensor 2."""
    world = 8 if strategy in GROUPED.values() else 4
    for got in run(ranks, train, world, mesh_job(strategy, 2, MODELS[model], cluster={"workers": world})):
        compare(got, reference(model))


def test_four_ranks_share_a_layer(ranks: Any) -> None:
    """Tensor 4, with a rank that has one word of the vocabulary."""
    for got in run(ranks, train, 4, mesh_job("ddp", 4, MODELS["qk_norm"])):
        compare(got, reference("qk_norm"))


def test_two_runs_have_the_same_bits(ranks: Any) -> None:
    """Losses, gradients and weights of two runs on dp 2 x tensor 2."""
    spec = mesh_job("zero3", 2, MODELS["qk_norm"])
    (one, *_), (two, *_) = run(ranks, train, 4, spec), run(ranks, train, 4, spec)
    assert one[0] == two[0]
    for part in (2, 3):
        assert all(torch.equal(one[part][name], value) for name, value in two[part].items())


@pytest.mark.parametrize("world", [2, 4])
def test_dropout_draws_the_masks_of_one_process(ranks: Any, world: int) -> None:
    """One and two replicas of two tensor ranks: each draws the whole mask of a micro-batch and takes its tokens."""
    model = {**WIDE, "dropout": 0.2}
    right = train(alone(), job("ddp", model))
    for got in run(ranks, train, world, mesh_job("ddp", 2, model)):
        compare(got, right)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("zero2", "bf16"), ("zero3", "bf16"), ("zero3", {"params": "fp16", "loss_scale": {"initial": 1024}})],
)
def test_low_precision_stays_near_one_process(ranks: Any, strategy: str, precision: Any) -> None:
    """Losses within 0.5% of one process in that format, the norm within 2%: bf16 rounds by up to 0.4%."""
    right = train(alone(), job("ddp", WIDE, precision=precision))
    for reports, _, _, _, eval_loss in run(ranks, train, 4, mesh_job(strategy, 2, WIDE, precision=precision)):
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in right[0]], rel=5e-3)
        assert reports[0].grad_norm == pytest.approx(right[0][0].grad_norm, rel=2e-2)
        assert eval_loss == pytest.approx(right[4], rel=5e-3)


@pytest.mark.parametrize(
    ("strategy", "place", "recomputed"), [("zero1", "cpu", "full"), ("zero3", "nvme", "selective")]
)
def test_with_offload_and_recomputed_activations(
    ranks: Any, tmp_path: Path, strategy: str, place: str, recomputed: str
) -> None:
    """The optimizer in host memory or in a file, activations computed again: bit for bit the run without."""
    model, offload = {**WIDE, "dropout": 0.1}, {"optimizer": place, "path": str(tmp_path)}
    saving = mesh_job(strategy, 2, model, offload=offload, train={"checkpoint_activations": recomputed})
    (one, *_), (two, *_) = run(ranks, train, 4, mesh_job(strategy, 2, model)), run(ranks, train, 4, saving)
    assert one[0] == two[0]
    assert all(torch.equal(one[3][name], value) for name, value in two[3].items())


def test_parameters_in_host_memory(ranks: Any) -> None:
    """zero3 on dp 2 x tensor 2, with its shards on the host."""
    for got in run(ranks, train, 4, mesh_job("zero3", 2, WIDE, offload={"parameters": "cpu"})):
        compare(got, reference("tied"))


def packed(rank: Rank, spec: JobSpec) -> dict[str, torch.Tensor]:
    """The gradients of a step on samples of three documents each."""
    trainer, gradients = Trainer(rank, spec, full=N * CONTEXT), dict[str, torch.Tensor]()
    trainer.before_update = lambda: gradients.update(trainer.whole(grad=True))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], device=rank.device)
    batches = [
        replace(batch, documents=documents.expand_as(batch.tokens))
        for batch in mine(rank, *samples(N, seed=1), MICRO, spec.parallel.tensor)
    ]
    trainer.step(1, batches, counted(batches), 1e-2, want_stop=False)
    return gradients


def test_packed_documents(ranks: Any) -> None:
    """Positions and masks are those of the whole sequence."""
    right = packed(alone(), job("ddp", MODELS["qk_norm"]))
    for got in run(ranks, packed, 2, mesh_job("ddp", 2, MODELS["qk_norm"])):
        for name, value in right.items():
            assert float((got[name] - value).abs().max() / value.abs().max()) <= 3e-6, name


def traced(rank: Rank, spec: JobSpec) -> Result:
    """`train` with equal micro-batches, since each shape is compiled for itself, and without compiled kernels."""
    with without_kernels():
        return train(rank, spec, EQUAL)


def test_compiled_blocks_compute_the_same(ranks: Any) -> None:
    """Within 1e-4 of one process without compilation."""
    right = train(alone(), job("ddp", MODELS["one layer"]), EQUAL)
    for got in run(ranks, traced, 2, mesh_job("ddp", 2, MODELS["one layer"], train={"compile": "blocks"})):
        compare(got, right, gradients=1e-4, norm=1e-5)


def refused(rank: Rank, rules: dict[str, str] | None) -> str:
    """The error of a model with these rules."""
    model = registry.load("model", "gpt")(mesh_job("ddp", 2, WIDE).model, VOCAB)
    type(model).tensor_rules, kept = rules, type(model).tensor_rules
    mesh = Mesh(rank, tensor=2)
    mesh.connect()
    try:
        TensorParallel(mesh).split(model)
    except UserError as error:
        return error.message
    finally:
        type(model).tensor_rules = kept
    return ""


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (None, "GPT has no tensor_rules"),
        ({"blocks.*.atention": "gather"}, "blocks.*.atention: the model has no such module"),
        ({"norm": "column"}, "column does not fit norm, a RMSNorm"),
        ({"head": "columns"}, "columns does not fit head"),
        ({"embedding": "vocabulary", "head": "row"}, "embedding.weight: tensor_rules split it in two ways"),
    ],
)
def test_rules_that_do_not_fit_are_one_clear_error(ranks: Any, rules: dict[str, str] | None, says: str) -> None:
    """Each names the rule or the module."""
    assert all(says in error for error in run(ranks, refused, 2, rules))
