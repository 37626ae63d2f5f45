"""raydist.worker.parallel.ddp: which buffers follow rank 0, and that nothing of it outlives the strategy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from raydist.spec.experts import Experts
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.model._moe import MixtureOfExperts
from raydist.worker.parallel.ddp import Strategy
from tests.training import job


class Mixed(nn.Module):
    """Running statistics, a router's bias, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = MixtureOfExperts(8, Experts(count=4, chosen=2, hidden=8, bias=True))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(self.norm(x)[None]).sum()
        return made


def buffers(rank: Rank) -> dict[str, float]:
    """The first value of each buffer after a forward pass of equal samples, before which they were this rank's number plus 1."""
    torch.manual_seed(1)
    model, x = Mixed(), torch.randn(6, 8)
    strategy = Strategy(job("ddp"), Mesh(rank))
    strategy.wrap(model, lambda module, *_: module(x))
    for buffer in model.buffers():
        buffer.fill_(rank.rank + 1)
    strategy.module(x)
    return {name: float(buffer.flatten()[0]) for name, buffer in model.named_buffers()}


def test_running_statistics_follow_rank_0(ranks: Any) -> None:
    """Routers' biases, which all ranks move alike, and buffers that are not saved are not sent."""
    first, second = ranks.run(buffers, 2)
    own = {"layer.router.bias", "table"}
    assert {name for name in first if first[name] != second[name]} == own
    assert all((first[name], second[name]) == (1.0, 2.0) for name in own)
    assert {name.partition(".")[0] for name in first.keys() - own} == {"norm"}


def outlives(rank: Rank) -> list[str]:
    """What is left of a strategy with a hook of its own for the sums, after a step."""
    torch.manual_seed(1)
    model, x = Mixed(), torch.randn(6, 8)
    strategy = Strategy(job("ddp", precision={"reduce": "bf16"}), Mesh(rank))
    strategy.wrap(model, lambda module, *_: module(x))
    strategy.module(x).backward()
    made = {"strategy": weakref.ref(strategy), "model": weakref.ref(model), "wrapped": weakref.ref(strategy.module)}
    del strategy, model
    gc.collect()
    return [name for name, found in made.items() if found() is not None]


def test_nothing_outlives_the_strategy(ranks: Any) -> None:
    """Torch keeps the hook where the garbage collector does not see it."""
    assert ranks.run(outlives, 2) == [[], []]
