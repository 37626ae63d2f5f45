"""Expert parallel meshes of every strategy: each gradient, the norm, first weights, losses and loads of one process.

Over a minute: every strategy on four ranks, and what goes with it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from tests.contracts.test_context import packed
from tests.contracts.test_tensor import EQUAL, Result, compare
from tests.training import CONTEXT, GROUPED, Trainer, alone, counted, job, mesh_job, mine, run, samples, without_kernels

N, MICRO = 7, 2
SPARSE = {"name": "tests.sparse:build", "layers": 3, "width": 32, "heads": 4, "context": CONTEXT}
"""A vocabulary of 13 and 8 experts."""


def model(**options: Any) -> dict[str, Any]:
    """The fields of the model with these options."""
    return {**SPARSE, "options": options}


def mesh(
    strategy: str, expert: int, tensor: int = 1, pipeline: int = 1, fields: Any = SPARSE, **sections: Any
) -> JobSpec:
    """A job on a mesh."""
    return mesh_job(strategy, tensor, fields, {"pipeline": pipeline, "expert": expert}, **sections)


Trained = tuple[Result, list[dict[str, list[int]]], list[dict[str, list[float]]], int, list[Any]]
"""What tests/contracts/test_tensor.py compares; of each of two steps the loads, and this rank's biases; bytes exchanged; of each
step what is recorded: the loads and biases of all layers."""


def train(rank: Rank, spec: JobSpec, n: int = N) -> Trained:
    """Two steps; all ranks return the same, except for the biases."""
    parallel = spec.parallel
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    first, gradients, reports, loads, biases = trainer.whole(), dict[str, torch.Tensor](), [], [], []
    recorded: list[Any] = []
    for s in (1, 2):
        trainer.before_update = (lambda: gradients.update(trainer.whole(grad=True))) if s == 1 else (lambda: None)
        batches = mine(rank, *samples(n, seed=s), MICRO, parallel.tensor, parallel.pipeline)
        tokens = counted(batches)
        reports.append(trainer.step(s, batches, tokens, 1e-2, want_stop=False))
        loads.append({name: load.tolist() for name, load in trainer.loads.loads.items()})
        recorded.append(trainer.loads.recorded)
        biases.append({name: b.tolist() for name, b in trainer.model.named_buffers() if name.endswith("router.bias")})
    held_out = mine(rank, *samples(n, seed=99), MICRO, parallel.tensor, parallel.pipeline)
    loss, _ = evaluate(trainer.mesh, trainer.strategy, trainer.precision, held_out)
    trainer.step.optimizer_hooks.close()
    return (
        (reports, first, gradients, trainer.whole(), loss),
        loads,
        biases,
        trainer.loads.exchanged or 0,
        recorded,
    )


@functools.cache
def _reference(options: tuple[tuple[str, Any], ...], n: int) -> Trained:
    return train(alone(), job("ddp", model(**dict(options))), n)


def check(every: list[Trained], n: int = N, **options: Any) -> None:
    """All ranks against one process. Sums of fp32 in another order: 3e-6 of the largest element, 1e-6 for the norm."""
    right = _reference(tuple(options.items()), n)
    for result, loads, biases, _, recorded in every:
        compare(result, right[0])
        assert (loads, recorded) == (right[1], right[-1])
        for own, whole in zip(biases, right[2], strict=True):
            assert own.items() <= whole.items()
    (first, start), (second, moved) = right[-1]
    assert [first, second] == [[*of_step.values()] for of_step in right[1]]
    assert start == [[float(options.get("skew", 0))] * 2 + [0.0] * 6] * 2
    assert moved == [right[2][0][f"{name}.router.bias"] for name in right[1][0]], "with which step 2 chose"


@pytest.mark.parametrize("strategy", [GROUPED.get(name, name) for name in registry.names("parallel")])
def test_each_strategy_on_two_replicas_of_the_experts(ranks: Any, strategy: str) -> None:
    """dp 4 with expert 2: two ranks share the experts, and each half has two replicas. The bias moves with the loads."""
    check(run(ranks, train, 4, mesh(strategy, 2, fields=model(bias_rate=0.01))), bias_rate=0.01)


@pytest.mark.parametrize(
    ("strategy", "expert", "tensor", "pipeline", "world"),
    [
        ("zero2", 4, 2, 1, 4),
        ("zero3", 4, 2, 1, 4),
        ("ddp", 2, 2, 1, 2),
        ("zero1", 2, 2, 1, 4),
        ("ddp", 2, 1, 2, 4),
        ("zero3", 2, 1, 2, 4),
        ("zero2", 2, 2, 2, 4),
        ("ddp", 4, 4, 1, 4),
        ("ddp", 2, 4, 1, 4),
    ],
)
def test_folded_over_replicas_and_tensor_parallel_ranks(
    ranks: Any, strategy: str, expert: int, tensor: int, pipeline: int, world: int
) -> None:
    """dp 2 x tensor 2 with expert 4; tensor 2 with expert 2, alone and on dp 2, where each replica has all experts; dp 2 x
    pipeline 2 with expert 2; tensor 2 x pipeline 2 with expert 2; tensor 4 with expert 4 and 2."""
    spec = mesh(strategy, expert, tensor, pipeline, fields=model(balance=0.1, bias_rate=0.01))
    check(run(ranks, train, world, spec), balance=0.1, bias_rate=0.01)


def test_packed_documents(ranks: Any) -> None:
    """dp 2 with expert 2: positions and masks are those of the whole sequence, and each token goes to its experts."""
    right = packed(alone(), job("ddp", SPARSE))
    for got in run(ranks, packed, 2, mesh("ddp", 2)):
        for name, value in right.items():
            assert float((got[name] - value).abs().max() / value.abs().max()) <= 3e-6, name


def test_idle_ranks_and_experts(ranks: Any) -> None:
    """Three samples for four ranks: one computes a masked row, which is in no load. And all rows go to two experts of one rank:
    the others' gradients are zeros, and the bytes are those of the other ranks' rows, four times: there, back, and both gradients.
    """
    check(run(ranks, train, 4, mesh("zero3", 4), 3), n=3)
    every = run(ranks, train, 4, mesh("zero3", 4, fields=model(skew=9.0)))
    check(every, skew=9.0)
    for (_, _, gradients, _, _), loads, _, exchanged, _ in every:
        for layer in ("blocks.1.mlp", "blocks.2.mlp"):
            assert loads[0][layer] == [N * CONTEXT] * 2 + [0] * 6
            assert not gradients[f"{layer}.experts.down"][2:].any()
        away = N - 1  # the first rank has one sample
        assert exchanged == 2 * away * CONTEXT * 2 * 32 * 4 * 4


def test_two_runs_have_the_same_bits(ranks: Any) -> None:
    """The second of them computes the activations again: dp 2 x tensor 2 with expert 4, with dropout and balance loss."""
    fields = {**model(balance=0.1, bias_rate=0.01), "dropout": 0.2}
    spec = mesh("zero3", 4, 2, fields=fields)
    again = mesh("zero3", 4, 2, fields=fields, train={"checkpoint_activations": "full"})
    one, other = (run(ranks, train, 4, made)[0] for made in (spec, again))
    right = train(alone(), job("ddp", fields))
    compare(one[0], right[0])
    assert other[0][0] == one[0][0]
    assert other[1:3] == one[1:3]
    for part in (2, 3):
        assert all(torch.equal(one[0][part][name], value) for name, value in other[0][part].items())


@pytest.mark.parametrize(
    ("strategy", "sections", "loss", "norm"),
    [
        # bf16 rounds by up to 0.4%, and changes the experts of a token in a hundred.
        ("zero2", {"precision": "bf16"}, 1e-2, 5e-2),
        ("zero3", {"precision": "bf16"}, 1e-2, 5e-2),
        ("zero1", {"precision": {"params": "fp16", "loss_scale": {"initial": 1024}}}, 1e-2, 5e-2),
        ("zero1", {"offload": {"optimizer": "cpu"}}, 1e-6, 1e-6),
        ("zero2", {"offload": {"optimizer": "nvme"}, "train": {"checkpoint_activations": "selective"}}, 1e-6, 1e-6),
        ("zero3", {"offload": {"parameters": "cpu"}}, 1e-6, 1e-6),
    ],
)
def test_with_formats_and_offload(
    ranks: Any, tmp_path: Path, strategy: str, sections: dict[str, Any], loss: float, norm: float
) -> None:
    """dp 2 with expert 2 stays near one process in the same format."""
    if "offload" in sections:
        sections = {**sections, "offload": {**sections["offload"], "path": str(tmp_path)}}
    right = train(alone(), job("ddp", SPARSE, **{k: v for k, v in sections.items() if k == "precision"}))
    for (reports, _, _, _, held_out), *_ in run(ranks, train, 2, mesh(strategy, 2, **sections)):
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in right[0][0]], rel=loss)
        assert reports[0].grad_norm == pytest.approx(right[0][0][0].grad_norm, rel=norm)
        assert held_out == pytest.approx(right[0][4], rel=loss)


def traced(rank: Rank, spec: JobSpec) -> Trained:
    """`train` with equal micro-batches, since each shape is compiled for itself, and without compiled kernels."""
    with without_kernels():
        return train(rank, spec, EQUAL)


def test_compiled_blocks_compute_the_same(ranks: Any) -> None:
    """dp 2 with expert 2, with one block without experts, and one with."""
    fields = {**SPARSE, "layers": 2}
    right = train(alone(), job("ddp", fields), EQUAL)
    for got, loads, *_ in run(ranks, traced, 2, mesh("ddp", 2, fields=fields, train={"compile": "blocks"})):
        compare(got, right[0], gradients=1e-4, norm=1e-5)
        assert loads == right[1]
