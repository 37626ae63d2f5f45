"""Every model that can be split, and every variant of it, under each strategy and mesh: the numbers of one process.

gpt has more combinations in test_strategies.py, test_tensor.py and test_pipeline.py.

Over a minute: each variant of each model on five kinds of meshes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from raydist import registry
from raydist.extension_plans import strategy_plan
from raydist.spec import ModelSpec
from tests.contracts.test_pipeline import OPTIM, TWO, UNCLIPPED, Result, near, same_bits, train
from tests.training import GROUPED, MODELS, alone, job, mesh_job, run

SMALL = {"layers": 2, "width": 16, "heads": 4, "context": 8, "tie_embeddings": False}
"""Untied: a tied weight's gradient is summed in another order in a pipeline."""
SPLIT = [
    name
    for name, fields in MODELS.items()
    if fields["name"] != "gpt" and registry.described("model", fields["name"], "check_tensor") is not None
]


def shared_experts(name: str) -> bool:
    """Whether two ranks can share the experts of its layers."""
    count = registry.described("model", MODELS[name]["name"], "experts")
    return count is not None and count(ModelSpec(**model(name))) % 2 == 0


def model(name: str) -> dict[str, Any]:
    return {**SMALL, **MODELS[name]}


@functools.cache
def reference(name: str, clip: float = 0.5) -> Result:
    """One process."""
    return train(alone(), job("ddp", model(name), optim={**OPTIM, "clip": clip}))


WHOLE = [
    name
    for name in registry.names("parallel")
    if (plan := strategy_plan(name)) is not None and "parameters" not in plan.sharded
]
"""Strategies that leave the modules as they are: to them a model is a list of parameters."""
STRATEGIES = [
    (name, strategy)
    for number, name in enumerate(SPLIT)
    for strategy in (
        *(other for other in registry.names("parallel") if other not in (*WHOLE, *GROUPED)),
        WHOLE[number % len(WHOLE)],
    )
]
"""Each model under the strategies that wrap its modules, and under one of the others in turn."""


@pytest.mark.parametrize(("name", "strategy"), STRATEGIES)
def test_strategies(ranks: Any, name: str, strategy: str) -> None:
    """Two data parallel ranks."""
    for got in run(ranks, train, 2, mesh_job(strategy, 1, model(name))):
        near(got, reference(name), 3e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_tensor(ranks: Any, name: str) -> None:
    """Two ranks share each layer; each gradient within 3e-6 of its largest element."""
    for got in run(ranks, train, 2, mesh_job("ddp", 2, model(name))):
        near(got, reference(name), 3e-6)


@pytest.mark.parametrize("name", [name for name in SPLIT if shared_experts(name)])
def test_expert(ranks: Any, name: str) -> None:
    """Two replicas share the experts of each layer."""
    for got in run(ranks, train, 2, mesh_job("ddp", 1, model(name), {"expert": 2})):
        near(got, reference(name), 3e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_pipeline(ranks: Any, name: str) -> None:
    """Two stages: the same bits, unless both have the embedding, whose gradient is then summed in another order."""
    for got in run(ranks, train, 2, mesh_job("ddp", 1, model(name), TWO, **UNCLIPPED)):
        if "num_nextn_predict_layers" in model(name).get("options", {}):
            near(got, reference(name, clip=0), 3e-6)
        else:
            same_bits(got, reference(name, clip=0))


@pytest.mark.parametrize("name", [name for name in SPLIT if name == MODELS[name]["name"] and shared_experts(name)])
def test_tensor_and_pipeline(ranks: Any, name: str) -> None:
    """Two stages of two ranks each; one variant of each model with experts. Without: gpt in test_pipeline.py."""
    for got in run(ranks, train, 4, mesh_job("ddp", 2, model(name), TWO)):
        near(got, reference(name), 3e-6)
