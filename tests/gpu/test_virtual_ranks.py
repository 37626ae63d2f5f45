"""`train.virtual_ranks` on the GPU: the same bits on one rank and on two, which share the device; and what that rests on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._grad_norm import row_norms
from tests.gpu.device import DEVICE, job
from tests.gpu.parts import CASES, PLAIN, trained


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Every job on one rank."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    found = {case: trained(case) for case in CASES}
    torch.use_deterministic_algorithms(before)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every job on two ranks, of each."""
    folder, world = tmp_path_factory.mktemp("ranks"), 2
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.gpu.parts"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=400)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(told)[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(Path(folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("case", ["ddp", "ddp, bf16"])
def test_two_runs_have_the_same_bits(alone: dict[str, Any], case: str) -> None:
    """Losses, norms and weights of the parts of one rank: no kernel adds in an order of its own."""
    assert trained(case) == alone[case]


@pytest.mark.parametrize("case", PLAIN)
def test_one_rank_has_the_bits_of_ddp(alone: dict[str, Any], case: str) -> None:
    """Whatever strategy, and bucket."""
    assert alone[case] == alone[PLAIN[case]]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_one(alone: dict[str, Any], shared: list[dict[str, Any]], case: str) -> None:
    """Losses, norms and weights, of both: parts are summed along the tree, in streams beside the backward pass."""
    for rank in shared:
        assert rank[case]["steps"] == alone[case]["steps"]
        assert rank[case]["weights"] == alone[case]["weights"]


@pytest.mark.parametrize("columns", [1, 3, 64, 1000, 4096, 50257])
def test_norms_of_rows_do_not_depend_on_how_many_there_are(columns: int) -> None:
    """torch's reduction divides its work by the whole shape: with fewer rows it adds up a row in another order."""
    rows = torch.randn(513, columns, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = row_norms(rows)
    for first, last in ((0, 1), (1, 8), (8, 137), (137, 513)):
        assert torch.equal(row_norms(rows[first:last]), whole[first:last])
    torch.testing.assert_close(whole.double(), torch.linalg.vector_norm(rows.double(), dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_does_not_depend_on_the_cut(name: str) -> None:
    """Each number is updated alike as part of a whole parameter, and of two parts of it, of which one begins at an odd place."""
    length, cut, draw = 10_007, 3_333, torch.Generator().manual_seed(4)
    spec = job(optim={"name": name, "lr": 1e-2}).optim
    start, grads = torch.randn(length, 1, generator=draw), torch.randn(3, length, 1, generator=draw).to(DEVICE)

    def updated(pieces: list[slice]) -> Tensor:
        values = start.clone().to(DEVICE)
        parameters = [nn.Parameter(values[piece]) for piece in pieces]
        shards = {f"p{n}": ParamShard(p) for n, p in enumerate(parameters)}
        optimizer = optimizers.build(shards, spec, DEVICE, same_bits=True)
        for grad in grads:
            for p, piece in zip(parameters, pieces, strict=True):
                p.grad = grad[piece]
            optimizer.step()
        return torch.cat([p.detach() for p in parameters])

    assert torch.equal(updated([slice(0, length)]), updated([slice(0, cut), slice(cut, length)]))
