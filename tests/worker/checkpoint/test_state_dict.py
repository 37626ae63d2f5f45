"""The training state as tensors and back: every optimizer, buffers, and values of the parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.errors import CheckpointError
from raydist.spec import OptimSpec
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import plain_name

CPU = torch.device("cpu")


class Net(nn.Module):
    """Matrices in `blocks` (for muon), a tied output, a norm with running statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 8, bias=False)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 6))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x_BD)))


def whole(model: nn.Module) -> dict[str, ParamShard]:
    """Each parameter whole, as without a strategy."""
    return {plain_name(n): ParamShard(p) for n, p in model.named_parameters()}


def build(spec: OptimSpec) -> tuple[Net, torch.optim.Optimizer, TrainState]:
    model = Net()
    optimizer = optimizers.build(whole(model), spec, CPU)
    return model, optimizer, TrainState(model, optimizer, whole(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)  # of the data and of dropout
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


SPECS: dict[str, Callable[[], OptimSpec]] = {
    "adamw": lambda: OptimSpec(),
    "adamw-for": lambda: OptimSpec(fused=False),
    "sgd": lambda: OptimSpec(name="sgd", momentum=0.9),
    "sgd-plain": lambda: OptimSpec(name="sgd", momentum=0.0),
    "adafactor": lambda: OptimSpec(name="adafactor"),
    "muon": lambda: OptimSpec(name="muon"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_restored_run_goes_on_to_the_same_bits(name: str) -> None:
    """Saved after three steps, restored into a new model and optimizer without any step: equal losses and weights."""
    torch.manual_seed(1)
    model, optimizer, state = build(SPECS[name]())
    train(model, optimizer, range(3))
    kept, _, plain = copy.deepcopy(state.capture())
    losses = train(model, optimizer, range(3, 6))

    torch.manual_seed(77)
    other, other_optimizer, other_state = build(SPECS[name]())
    tensors, rank_tensors, _ = other_state.capture()
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in kept.items()}
    assert not rank_tensors
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(kept[key])
    other_state.restore(tensors, rank_tensors, plain)
    assert train(other, other_optimizer, range(3, 6)) == losses
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_names_are_the_plain_models() -> None:
    """Names have no prefix of torch.compile, and all of `state_dict` is there under `model/`."""
    model, _, state = build(OptimSpec())
    names = {n for n in state.capture()[0] if n.startswith("model/")}
    assert names == {f"model/{n}" for n in model.state_dict()}

    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    optimizer = torch.optim.AdamW(compiled.parameters())
    assert TrainState(compiled, optimizer, whole(compiled)).capture()[0].keys() == state.capture()[0].keys()


def test_references_and_copies() -> None:
    """Parameters and moments are the live memory; buffers are copies, since a forward pass changes them."""
    model, optimizer, state = build(OptimSpec())
    train(model, optimizer, range(1))
    tensors, _, _ = state.capture()
    assert tensors["model/embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()
    moment = optimizer.state[model.embedding.weight]["exp_avg"]
    assert tensors["optim/embedding.weight/exp_avg"].data_ptr() == moment.data_ptr()
    before = tensors["model/blocks.1.running_mean"].clone()
    train(model, optimizer, range(1, 2))
    assert torch.equal(tensors["model/blocks.1.running_mean"], before)
    assert not torch.equal(model.blocks[1].running_mean, before)


def test_group_values_of_a_changed_spec_stay() -> None:
    """A value that the spec sets as before comes from the checkpoint; one that it now sets differently is the new one."""
    _, optimizer, state = build(OptimSpec(weight_decay=0.1))
    optimizer.param_groups[0]["lr"] = 0.007  # as set by a schedule, or by the optimizer itself
    tensors, _, plain = state.capture()
    _, other, other_state = build(OptimSpec(weight_decay=0.3))
    other_state.capture()
    other_state.restore(tensors, {}, plain)
    assert other.param_groups[0]["lr"] == 0.007
    assert other.param_groups[0]["weight_decay"] == 0.3
    assert other.param_groups[0]["betas"] == (0.9, 0.95)


def test_plain_slots_come_back() -> None:
    """Plain values that an optimizer keeps per parameter are restored too; other types are refused by name."""
    _, optimizer, state = build(OptimSpec())
    state.capture()
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["count"] = 5
    tensors, _, plain = state.capture()
    _, other, other_state = build(OptimSpec())
    other_state.capture()
    other_state.restore(tensors, {}, plain)
    assert other.state[other.param_groups[0]["params"][0]]["count"] == 5
    optimizer.state[parameter]["history"] = [torch.zeros(1)]
    with pytest.raises(CheckpointError, match=r"optim/embedding.weight/history: a list"):
        state.capture()
