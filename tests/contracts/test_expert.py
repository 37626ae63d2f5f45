"""Expert parallel meshes of every strategy: each gradient, the norm, first weights, losses and loads of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.step import evaluate
from tests.contracts.test_tensor import Result, compare
from tests.training import CONTEXT, GROUPED, Trainer, alone, counted, job, mesh_job, mine, run, samples

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


Trained = tuple[Result, list[dict[str, list[int]]], list[dict[str, list[float]]], int]
"""What tests/contracts/test_tensor.py compares; of each of two steps the loads, and this rank's biases; bytes exchanged."""


def train(rank: Rank, spec: JobSpec, n: int = N) -> Trained:
    """Two steps; all ranks return the same, except for the biases."""
    parallel = spec.parallel
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    first, gradients, reports, loads, biases = trainer.whole(), dict[str, torch.Tensor](), [], [], []
    for s in (1, 2):
        trainer.before_update = (lambda: gradients.update(trainer.whole(grad=True))) if s == 1 else (lambda: None)
        batches = mine(rank, *samples(n, seed=s), MICRO, parallel.tensor, parallel.pipeline)
        tokens = counted(batches)
        reports.append(trainer.step(s, batches, tokens, 1e-2, want_stop=False))
        loads.append({name: load.tolist() for name, load in trainer.loads.loads.items()})
        biases.append({name: b.tolist() for name, b in trainer.model.named_buffers() if name.endswith("router.bias")})
    held_out = mine(rank, *samples(n, seed=99), MICRO, parallel.tensor, parallel.pipeline)
    loss, _ = evaluate(trainer.mesh, trainer.strategy, trainer.precision, held_out)
    trainer.step.optimizer_hooks.close()
    return (reports, first, gradients, trainer.whole(), loss), loads, biases, trainer.loads.exchanged or 0


@functools.cache
def _reference(options: tuple[tuple[str, Any], ...], n: int) -> Trained:
    return train(alone(), job("ddp", model(**dict(options))), n)


def check(every: list[Trained], n: int = N, **options: Any) -> None:
    """All ranks against one process. Sums of fp32 in another order: 3e-6 of the largest element, 1e-6 for the norm."""
    right = _reference(tuple(options.items()), n)
    for result, loads, biases, _ in every:
        compare(result, right[0])
        assert loads == right[1]
        for own, whole in zip(biases, right[2], strict=True):
            for name, bias in own.items():
                assert bias == pytest.approx(whole[name], abs=1e-7)


@pytest.mark.parametrize("strategy", [GROUPED.get(name, name) for name in registry.names("parallel")])
def test_each_strategy_on_two_replicas_of_the_experts(ranks: Any, strategy: str) -> None:
    """dp 4 with expert 2: two ranks share the experts, and each half has two replicas. The bias moves with the loads."""
    check(run(ranks, train, 4, mesh(strategy, 2, fields=model(bias_rate=0.01))), bias_rate=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(("expert", "tensor", "pipeline"), [(4, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_folded_over_replicas_and_tensor_parallel_ranks(
    ranks: Any, strategy: str, expert: int, tensor: int, pipeline: int
) -> None:
    """dp 2 x tensor 2 with expert 4; dp 2 x pipeline 2 with expert 2; tensor 2 x pipeline 2 with expert 2."""
    spec = mesh(strategy, expert, tensor, pipeline, fields=model(balance=0.1))
    check(run(ranks, train, 4, spec), balance=0.1)
