"""The table of docs/how-to/mesh.md, of what goes together with each axis of a mesh, follows the validations of the spec; and some
of its cells that no test of an axis has: optimizers, parameters that are not trained, and whole models compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import ValidationError

from raydist import registry
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.spec.running import OffloadSpec
from raydist.spec.training import PrecisionSpec, TrainSpec
from raydist.worker import build
from raydist.worker.distributed import Rank
from raydist.worker.metrics.gradient_noise_scale import NOT_MEASURED
from tests.contracts.test_context import SPARSE, WIDE, train
from tests.contracts.test_tensor import Result, compare
from tests.training import alone, job, mesh_job, run

PAGE = Path(__file__).parents[2] / "docs/how-to/mesh.md"
AXES = ("tensor", "pipeline", "expert", "context")
JOB: dict[str, Any] = {
    "data": {"source": "any"},
    "model": {"name": "gpt", "layers": 4, "width": 32, "heads": 4, "context": 16},
    "train": {"steps": 2, "global_batch": 8, "micro_batch": 2},
    "cluster": {"workers": 4},
}


def table() -> dict[str, tuple[str, ...]]:
    """The field and value that stand first in a row, "" in rows without one -> what the row says of each axis."""
    lines = PAGE.read_text().split("## What goes together")[1].split("\n|---|---|---|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for line in lines.splitlines():
        first, *cells = line.strip("| ").split(" | ")
        field = re.search(r"`([\w.]+: [^`]+)`", first)
        found[field[1] if field else first] = tuple(re.sub(r"\W.*", "", cell.strip("*")) for cell in cells)
    return found


TABLE = table()


def merged(one: Any, other: Any) -> Any:
    """The fields of both; where they differ, those of `other`."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}


def refused(field: str, axis: str) -> bool:
    """Whether a job on two ranks of that axis may not have the field."""
    name, value = field.split(": ", 1)
    nested = reduce(lambda made, part: {part: made}, reversed(name.split(".")), yaml.safe_load(value))
    parts: list[dict[str, Any]] = [{"parallel": {axis: 2}}, {"offload": {"path": "/scratch"}}]
    if axis == "expert":
        parts.append({"model": {"name": "mixtral"}})
    if name == "offload.parameters":
        parts.append({"parallel": {"strategy": "zero3"}})
    try:
        JobSpec.model_validate(reduce(merged, [*parts, nested], JOB))
    except ValidationError as error:
        (problem,) = error.errors()
        assert problem["type"] == "value_error", problem  # of a check: the field and the value exist
        return True
    return False


@pytest.mark.parametrize("field", [row for row in TABLE if ": " in row])
def test_a_row_says_what_is_refused(field: str) -> None:
    """For each axis."""
    assert set(TABLE[field]) <= {"works", "note", "refused"}
    assert [refused(field, axis) for axis in AXES] == [cell == "refused" for cell in TABLE[field]]


def test_every_choice_has_a_row() -> None:
    """Strategies, formats, optimizers, and the values of the fields that change how a pass is computed; each row has all axes."""
    fields = TrainSpec.model_fields
    wanted = {f"parallel.strategy: {name}" for name in registry.names("parallel")}
    wanted |= {f"optim.name: {name}" for name in registry.names("optimizer") if name != "adamw"}
    wanted |= {f"precision: {name}" for name in get_args(PrecisionSpec.model_fields["params"].annotation)} - {
        "precision: fp32"
    }
    for name, model in (("train.checkpoint_activations", TrainSpec), ("offload.optimizer", OffloadSpec),
                        ("offload.parameters", OffloadSpec)):  # fmt: skip
        choices = get_args(model.model_fields[name.split(".")[1]].annotation)
        wanted |= {f"{name}: {value}" for value in choices if value != "none"}
    assert fields["compile"].default is False
    wanted |= {"train.compile: true", "train.compile: blocks"}
    assert wanted <= TABLE.keys()
    assert {len(cells) for cells in TABLE.values()} == {len(AXES)}


def test_where_the_noise_is_not_measured() -> None:
    """The run says so with the same axes."""
    row = TABLE["observe.grad_noise: 10"]
    assert {axis for axis, cell in zip(AXES, row, strict=True) if cell == "note"} == NOT_MEASURED.keys()


@pytest.mark.parametrize("axis", AXES)
def test_where_buckets_are_not_measured(axis: str) -> None:
    """A rank has no passes of its own to try: the run says so, and sends nothing."""
    said: list[str] = []
    spec = mesh_job("ddp", 1, WIDE, {axis: 2, "bucket_mb": "auto"})
    made = build.settled(
        spec, replace(alone(), world_size=4), RunDir("/nowhere"), 13, lambda *_: pytest.fail("a pass"), said.append, print
    )  # fmt: skip
    assert said == [
        f"parallel.bucket_mb: auto: torch's: with parallel.{axis} there are no trial passes, which are of the whole model"
    ]
    assert made == spec
    assert TABLE["parallel.bucket_mb: auto"][AXES.index(axis)] == "note"


SGD, ADAFACTOR = ({"optim": {"name": name, "lr": 1e-2, "clip": 0.5}} for name in ("sgd", "adafactor"))
FROZEN = {**SPARSE, "options": {**SPARSE["options"], "frozen": True}, "tie_embeddings": False}


@pytest.mark.parametrize(
    ("strategy", "axis", "world", "model", "sections"),
    [
        ("zero2", "tensor", 4, WIDE, SGD),
        ("ddp", "expert", 2, SPARSE, SGD),
        ("zero1", "context", 2, WIDE, SGD),
        ("ddp", "context", 2, WIDE, ADAFACTOR),
        ("ddp", "tensor", 2, FROZEN, {}),
        ("zero2", "pipeline", 4, FROZEN, {}),
        ("zero3", "expert", 2, FROZEN, {}),
        ("zero3", "context", 2, FROZEN, {}),
    ],
)
def test_numbers_are_those_of_one_process(
    ranks: Any, strategy: str, axis: str, world: int, model: dict[str, Any], sections: dict[str, Any]
) -> None:
    """With these optimizers; and where every second parameter is not trained: the others alone have gradients."""
    right = train(alone(), job("ddp", model, **sections))
    for got in run(ranks, train, world, mesh_job(strategy, 1, model, {axis: 2}, **sections)):
        compare(got, right)


def traced(rank: Rank, spec: JobSpec) -> Result:
    """`train`, with what torch.compile traces run as it is: code for it takes seconds to make, and compiled blocks have such."""
    compiled = torch.compile
    torch.compile = partial(compiled, backend="eager")  # type: ignore[assignment]
    try:
        return train(rank, spec, 8)  # equal micro-batches: each shape is traced
    finally:
        torch.compile = compiled


@pytest.mark.parametrize("axis", ["tensor", "expert", "context"])
def test_a_whole_model_is_traced(ranks: Any, axis: str) -> None:
    """Graphs end at what ranks send."""
    model = {**SPARSE, "layers": 2} if axis == "expert" else {**WIDE, "layers": 1}
    right = train(alone(), job("ddp", model), 8)
    for got in run(ranks, traced, 2, mesh_job("ddp", 1, model, {axis: 2}, train={"compile": True})):
        compare(got, right)
