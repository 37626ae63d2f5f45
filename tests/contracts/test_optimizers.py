"""Every optimizer keeps the contract in worker/optim/optimizers/__init__.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from raydist import registry
from raydist.planner.estimate import optimizer_bytes
from raydist.planner.facts import ROOT, Param
from raydist.spec import ModelSpec, OptimSpec
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard

CPU, VOCAB = torch.device("cpu"), 13
NAMES = registry.names("optimizer")


def whole(model: nn.Module) -> dict[str, ParamShard]:
    """Each parameter whole, as without a strategy."""
    return {n: ParamShard(p) for n, p in model.named_parameters() if p.requires_grad}


def gpt(**spec: object) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    fields = {"layers": 2, "width": 16, "heads": 2, "context": 8, **spec}
    model: nn.Module = registry.load("model", "gpt")(ModelSpec.model_validate(fields), VOCAB)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The losses of steps on one batch."""
    tokens_BT = torch.arange(16).view(2, 8) * 5 % VOCAB
    losses = []
    for _ in range(steps):
        logits_BTV = model(tokens_BT)
        loss = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_groups_hold_every_parameter(name: str) -> None:
    """Each group has a name; each parameter is in one of them, with its own name, in the order of named_parameters; weight decay
    is only on matrices."""
    model = gpt(tie_embeddings=False)
    optimizer = optimizers.build(whole(model), OptimSpec(name=name, weight_decay=0.3), CPU)
    order = [n for n, _ in model.named_parameters()]
    by_name = dict(model.named_parameters())
    seen: list[str] = []
    for group in optimizer.param_groups:
        names = group["param_names"]
        assert names == sorted(names, key=order.index)
        assert all(by_name[n] is p for n, p in zip(names, group["params"], strict=True))
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}
        assert group["weight_decay"] in (0.3, 0.0)
        seen += names
    assert sorted(seen) == sorted(order)
    assert len({group["name"] for group in optimizer.param_groups}) == len(optimizer.param_groups)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_continues(name: str) -> None:
    """State loaded through state_dict into a new optimizer continues with the same bits."""
    model = gpt(qk_norm=True)
    spec = OptimSpec(name=name)
    optimizer = optimizers.build(whole(model), spec, CPU)
    train(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 3)
    other = gpt(qk_norm=True)
    other.load_state_dict(weights)
    resumed = optimizers.build(whole(other), spec, CPU)
    resumed.load_state_dict(state)
    assert train(other, resumed, 3) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_its_state(name: str) -> None:
    """PLAN gives the bytes of each parameter's state, as torch allocates it."""
    spec = OptimSpec(name=name)
    built = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(6, 10)]), "head": nn.Linear(10, 7)})
    optimizer = optimizers.build(whole(built), spec, CPU)
    for p in built.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for n, p in built.named_parameters():
        held = sum(t.numel() * t.element_size() for t in optimizer.state[p].values() if isinstance(t, Tensor))
        assert optimizer_bytes(Param(n, tuple(p.shape), True, ROOT), spec) == held
