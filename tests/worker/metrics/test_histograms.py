"""raydist.worker.metrics.histograms: counts against numpy's, and those of sharded parameters against the full ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.metrics.activations import ActivationSizes
from raydist.worker.metrics.histograms import BUCKETS, Histograms, count, histogram
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import parts_of
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.step_hooks import Step
from tests.training import CONTEXT, MODEL, VARIANTS, Trainer, counted, job, mesh_job, mine, run, samples


def counts(values: Tensor, factor: float = 1.0) -> dict[str, Any]:
    row = torch.zeros(BUCKETS + 2, dtype=torch.float64)
    count(values, factor, row)
    return histogram(row.tolist())


def test_counts_are_numpy_s() -> None:
    """Over 14 orders of magnitude and both signs, each bucket holds what numpy counts between its edges; sums are right."""
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) ** 9
    values[:100] = 0.0
    made = counts(values)
    assert made["counts"] == np.histogram(values.double().numpy(), made["edges"])[0].tolist()
    assert sum(made["counts"]) == len(values)
    assert 0 not in (made["counts"][0], made["counts"][-1])
    assert all(0 < a < b < 1.6 * a for a, b in zip(made["edges"], made["edges"][1:], strict=False) if a > 1e-3)
    assert made["sum"] == pytest.approx(float(values.double().sum()))
    assert made["sum_squares"] == pytest.approx(float((values.double() ** 2).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_edges_and_gaps(dtype: torch.dtype) -> None:
    """An edge belongs to the bucket further from zero; nearly zero values count as zeros; an empty range is one bucket."""
    made = counts(torch.tensor([1.0, 1.25, 1.5, -2.0, 0.0, -0.0], dtype=dtype))
    small = 2.0**-40
    assert made["edges"] == [-3.0, -2.0, -small, small, 1.0, 1.5, 2.0]
    assert made["counts"] == [1, 0, 2, 0, 2, 1]
    assert counts(torch.tensor([small / 2, -small / 2]))["counts"] == [2]
    assert counts(torch.tensor([1.0]), 3.0)["edges"] == [3.0, 4.0]
    assert counts(torch.empty(0)) == {"edges": [], "counts": [], "sum": 0.0, "sum_squares": 0.0}


def watched(rank: Rank, spec: JobSpec) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two steps, with histograms of the second: the events; the histograms of full weights and gradients before its update, and of
    the outputs of this rank's layers the elements and the sum of their squares."""
    trainer, said = Trainer(rank, spec, full=4 * CONTEXT), []
    say = (lambda kind, **data: said.append({"kind": kind, **data})) if rank.first else None
    outputs = ActivationSizes(parts_of(trainer.model), trainer.parameters.trained, rank.device)
    histograms = Histograms(rank, trainer.parameters, every=2, say=say, activations=outputs)
    own: dict[str, list[Tensor]] = {}
    for part in parts_of(trainer.model):
        for name, module in part.named_modules():
            module.register_forward_hook(lambda module, _, made, name=name: own.setdefault(name, []).append(made))
    whole: dict[str, Any] = {}

    def before_update() -> None:
        for what, factor in (("weights", 1.0), ("gradients", trainer.step.optimizer_hooks.pending_factor)):
            found = trainer.whole(grad=what == "gradients")
            whole[what] = {name: counts(value, factor) for name, value in found.items()}

    trainer.before_update = before_update
    trainer.step.hooks = [*trainer.step.hooks, histograms]
    for step in (1, 2):
        own.clear()
        batches = mine(rank, *samples(4, seed=step), 2, spec.parallel.tensor)
        trainer.step(step, batches, counted(batches), 1e-2, want_stop=False)
    trainer.step.optimizer_hooks.close()
    layers = {name.rpartition(".")[0] for name in trainer.parameters.trained}
    whole["activations"] = {
        name: [sum(x.numel() for x in made), float(sum(x.detach().double().square().sum() for x in made))]
        for name, made in own.items()
        if name in layers
    }
    return said, whole


@pytest.mark.parametrize(
    ("variant", "tensor"),
    [
        ("ddp", 1),
        ("zero1", 1),
        ("zero2", 1),
        ("zero3", 1),
        ("hsdp in pairs", 1),
        ("ddp", 2),
        ("zero2", 2),
        ("zero3", 2),
    ],
)
def test_sharded_is_whole(ranks: Any, variant: str, tensor: int) -> None:
    """Only rank 0 reports, only the due step, and each full parameter: as counted on the gathered parameter."""
    world = 4 if VARIANTS[variant].get("shard") or tensor > 1 else 2
    (said, whole), *others = run(ranks, watched, world, mesh_job(variant, tensor, MODEL))
    assert [other[0] for other in others] == [[]] * (world - 1)
    (event,) = said
    assert (event["kind"], event["step"]) == ("histograms", 2)
    for what in ("weights", "gradients"):
        assert event[what].keys() == whole[what].keys()
        for name, right in whole[what].items():
            got = event[what][name]
            assert (got["edges"], got["counts"]) == (right["edges"], right["counts"]), f"{what} of {name}"
            assert got["sum_squares"] == pytest.approx(right["sum_squares"])
    parts = [
        whole["activations"],
        *(one[1]["activations"] for one in others if not variant.startswith("ddp") or tensor > 1),
    ]
    right = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    assert event["activations"] == {name: pytest.approx((n / k) ** 0.5, rel=1e-5) for name, (k, n) in right.items()}
    assert len(right) > 6


def test_of_an_offloaded_optimizer(ranks: Any) -> None:
    """Its gradients are not scaled yet: the histograms equal those of a run without offload."""
    plain, offloaded = (
        run(ranks, watched, 1, job("ddp", **sections))[0] for sections in ({}, {"offload": {"optimizer": "cpu"}})
    )
    assert plain[0][0]["gradients"] == offloaded[0][0]["gradients"]


def mixed(rank: Rank) -> list[dict[str, Any]]:
    """A user's strategy: one parameter whole on both ranks, one split by rows."""
    said: list[dict[str, Any]] = []
    mesh = init_device_mesh("cpu", (2,))
    rows = nn.Parameter(torch.full((3, 2), float(rank.rank + 1)))
    split = DTensor.from_local(rows.detach(), mesh, [Shard(0)], run_check=False)
    shards = {"whole": ParamShard(nn.Parameter(torch.ones(5))), "split": ParamShard(rows, split)}
    made = Histograms(
        rank, gather_parameters(shards, rank), 1, (lambda kind, **data: said.append(data)) if rank.first else None
    )
    made.before_update(Step(1, []))
    return said


def test_whole_and_split_together(ranks: Any) -> None:
    """A parameter on every rank counts once, a split one counts from all ranks; one without a gradient has an empty histogram."""
    ((event,), _) = run(ranks, mixed, 2)
    assert {name: h["counts"] for name, h in event["weights"].items()} == {"whole": [5], "split": [6, 0, 6]}
    assert event["gradients"]["whole"]["counts"] == []
