"""The table of all parameters on real ranks, with two pipeline stages whose ranks have different names; and its users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raydist.errors import GraphMismatch, Rollback
from raydist.run.directory import RunDir
from raydist.worker.checks.gradients import GradientCheck
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.metrics.histograms import Histograms
from raydist.worker.parallel import ParamShard
from raydist.worker.parameter_table import ParameterTable, gather_parameters, gather_tensors
from raydist.worker.step_hooks import Step
from tests.training import alone, run

STAGES = {0: ("a", "b"), 1: ("c",)}
"""The plain parameters of each stage. Of four ranks 0 and 1 are the first stage, 2 and 3 the second, which splits `rows` too."""


class Stage(nn.Module):
    """A stage's parameters, equal on its ranks."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        for name in STAGES[stage]:
            self.register_parameter(name, nn.Parameter(torch.full((3, 2), float(ord(name)))))


def staged(rank: Rank, rows: bool = True) -> tuple[Stage, ParameterTable]:
    """This rank's stage, and the table of both stages."""
    stage = rank.rank // 2
    model = Stage(stage)
    shards = {name: ParamShard(p) for name, p in model.named_parameters()}
    if rows and stage == 1:  # three rows over two ranks
        mesh = DeviceMesh("cpu", [2, 3], _init_backend=False)
        local = nn.Parameter(torch.ones(2 if rank.rank == 2 else 1, 4))
        like = DTensor.from_local(
            local.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size([3, 4]), stride=(4, 1)
        )
        shards["rows"] = ParamShard(local, like)
    return model, gather_parameters(shards, rank)


def described(rank: Rank) -> tuple[list[Any], list[tuple[int, ...]], list[str], bool]:
    _, table = staged(rank)
    rows = [(r.name, r.shape, r.dtype, r.placement, r.ranks, r.holders) for r in table.values()]
    return rows, [table.group(name) for name in table], list(table.shards), table.is_same_everywhere


def test_the_same_table_on_every_rank(ranks: Any) -> None:
    """It has the union of names in one order, and the holders of each; also for parameters that a rank does not hold."""
    found = run(ranks, described, 4)
    assert all(rows == found[0][0] for rows, _, _, _ in found)
    assert found[0][0] == [
        ("a", (3, 2), "float32", (), (0, 1), ((0, 1),)),
        ("b", (3, 2), "float32", (), (0, 1), ((0, 1),)),
        ("c", (3, 2), "float32", (), (2, 3), ((2, 3),)),
        ("rows", (3, 4), "float32", ("S(0)",), (2, 3), ((2,), (3,))),
    ]
    assert [groups for _, groups, _, _ in found] == [
        [(0, 1), (0, 1), (), ()],
        [(0, 1), (0, 1), (), ()],
        [(), (), (2, 3), (2,)],
        [(), (), (2, 3), (3,)],
    ]
    assert [names for _, _, names, _ in found] == [["a", "b"], ["a", "b"], ["c", "rows"], ["c", "rows"]]
    assert [same for _, _, _, same in found] == [False] * 4


def test_of_one_rank() -> None:
    """No process group is needed; frozen parameters come after trained ones; tied names are recorded."""
    weight = nn.Parameter(torch.zeros(2))
    table = gather_parameters({"w": ParamShard(weight)}, alone(), {"frozen": torch.zeros(())})
    assert list(table) == ["w", "frozen"]
    assert table.trained == ["w"]
    assert table["frozen"].holders == ((0,),)
    assert table.is_same_everywhere
    tied = gather_tensors({"w": weight, "head": weight}, 0, None, {"head": "w"})
    assert tied["head"].alias == "w"


def mismatched(rank: Rank) -> str:
    try:
        gather_parameters({"w": ParamShard(nn.Parameter(torch.zeros(2 + rank.rank)))}, rank)
    except GraphMismatch as error:
        return error.message
    return ""


def test_ranks_that_describe_a_parameter_differently(ranks: Any) -> None:
    """Refused on every rank, with both descriptions."""
    assert set(run(ranks, mismatched, 2)) == {
        "w: rank 0 has float32 2 whole, rank 1 has float32 3 whole (type, shape, part)"
    }


def sent(rank: Rank) -> list[Any]:
    return gather_json({"rank": rank.rank, "text": "ü" * rank.rank, "list": [None, 1.5, 2**63]}, rank.control)


def test_values_of_any_length_are_gathered(ranks: Any) -> None:
    """Gathered in rank order, on every rank; one process needs no process group."""
    expected = [{"rank": r, "text": "ü" * r, "list": [None, 1.5, 2**63]} for r in range(3)]
    assert run(ranks, sent, 3) == [expected] * 3
    assert run(ranks, sent, 1) == [expected[:1]]


class Said:
    """A reporter that records its events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def say(self, kind: str, **data: Any) -> None:
        self.events.append({"kind": kind, **data})

    def flush(self) -> None: ...


def checked(rank: Rank) -> list[dict[str, Any]]:
    """Gradients of 1, except: b's is zero, c's is missing on rank 3, a's differs on rank 1."""
    _, table = staged(rank)
    for name, shard in table.shards.items():
        shard.local.grad = torch.full_like(shard.local, 0.0 if name == "b" else 1.0)
    if rank.rank == 1:
        table.shards["a"].local.grad = torch.full((3, 2), 2.0)
    if rank.rank == 3:
        table.shards["c"].local.grad = None
    said = Said()
    GradientCheck(rank, table, 1, said if rank.first else None).gradients_ready(Step(1, []))  # type: ignore[arg-type]
    return [e for e in said.events if e["kind"] == "gradients"]


def test_gradients_of_stages(ranks: Any) -> None:
    """A rank can only lack parameters of its own stage; replicas are the ranks of a stage; zero is judged among the holders."""
    (event,), *others = run(ranks, checked, 4)
    assert others == [[], [], []]
    assert [(p["parameter"], p["problem"], p["ranks"]) for p in event["problems"]] == [
        ("a", "differs", [0, 1]),
        ("b", "zero", [0, 1]),
        ("c", "missing", [3]),
    ]


def counted(rank: Rank) -> list[dict[str, Any]]:
    _, table = staged(rank)
    said = Said()
    Histograms(rank, table, 1, said.say if rank.first else None).before_update(Step(1, []))
    return said.events


def test_histograms_of_stages(ranks: Any) -> None:
    """Rank 0 reports every parameter of the model, each element once."""
    (event,), *_ = run(ranks, counted, 4)
    assert {name: sum(h["counts"]) for name, h in event["weights"].items()} == {"a": 6, "b": 6, "c": 6, "rows": 12}
    assert event["weights"]["c"]["sum"] == 6 * ord("c")


def drifted(rank: Rank, folder: str, odd: int, stages: int) -> tuple[Any, float]:
    """A value changes on rank `odd`. With one stage all ranks have it; with two, the first stage has ranks 0 to 2."""
    stage = int(stages == 2 and rank.rank == 3)
    model = Stage(stage)
    table = gather_parameters({name: ParamShard(p) for name, p in model.named_parameters()}, rank)
    optimizer = torch.optim.SGD(model.parameters())
    check = ReplicaCheck(
        rank,
        RunDir(folder),
        1,
        model,
        optimizer,
        table,
        due=lambda step: True,
        before_write=lambda: None,
        reporter=None,
    )
    step = Step(1, [])
    check.begin(step)
    parameter = next(model.parameters())
    if rank.rank == odd:
        parameter.data.view(-1)[0] = 7.0
    try:
        found: Any = check.recompute(step, suspect=False)
    except Rollback as error:
        found = error.message
    return found, float(parameter.detach().view(-1)[0])


@pytest.mark.parametrize("stages", [1, 2])
def test_a_stage_is_repaired(ranks: Any, tmp_path: Path, stages: int) -> None:
    """The odd rank gets the majority of its own stage; the other stage keeps its values, and all ranks learn of the repair."""
    found = run(ranks, drifted, 4, str(tmp_path), 2, stages)
    assert [repaired for repaired, _ in found] == [True] * 4
    assert [value for _, value in found] == [ord("a")] * 3 + [ord("a" if stages == 1 else "c")]


def test_a_rank_alone_in_its_stage_is_compared_with_none(ranks: Any, tmp_path: Path) -> None:
    """It may hold any value."""
    found = run(ranks, drifted, 4, str(tmp_path), 3, 2)
    assert [repaired for repaired, _ in found] == [False] * 4
    assert found[3][1] == 7.0
