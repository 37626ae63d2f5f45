"""Optimizers by name, their groups and kernels, and the peak learning rate."""

from __future__ import annotations

import copy

import pytest
import torch

from raydist import registry
from raydist.errors import UserError
from raydist.spec import ModelSpec, OptimSpec
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard

CPU, VOCAB = torch.device("cpu"), 13


def whole(model: torch.nn.Module) -> dict[str, ParamShard]:
    """Each parameter whole, as without a strategy."""
    return {n: ParamShard(p) for n, p in model.named_parameters() if p.requires_grad}


def gpt(**spec: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return registry.load("model", "gpt")(ModelSpec(layers=2, width=16, heads=2, context=8, **spec), VOCAB)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens_BT = torch.arange(16).view(2, 8) * 5 % VOCAB
    losses = []
    for _ in range(steps):
        logits_BTV = model(tokens_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", registry.names("optimizer"))
def test_it_learns(name):
    """Thirty steps on one batch reduce the loss by a third."""
    model = gpt()
    # SGD's gradients are small, and Adafactor's step is relative to the size of the weights.
    lr = 0.1 if name in ("sgd", "adafactor") else 1e-2
    losses = train(model, optimizers.build(whole(model), OptimSpec(name=name, lr=lr), CPU), 30)
    assert losses[-1] < losses[0] * 2 / 3


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_decay_shrinks_matrices_and_leaves_gains(name):
    """With zero gradient a step multiplies a matrix, embeddings too, by 1 - lr * decay; a norm's gain stays 1."""
    model = gpt()
    optimizer = optimizers.build(whole(model), OptimSpec(name=name, lr=0.5, weight_decay=0.1), CPU)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[n] * (0.95 if p.ndim > 1 else 1.0))


def test_frozen_parameters_are_left_out():
    """A parameter without requires_grad is in no shard, and therefore in no group."""
    model = gpt()
    model.embedding.weight.requires_grad_(False)
    names = [n for g in optimizers.build(whole(model), OptimSpec(), CPU).param_groups for n in g["param_names"]]
    assert "embedding.weight" not in names
    assert "norm.weight" in names


@pytest.mark.parametrize(
    ("name", "fused", "device", "expected"),
    [
        ("adamw", "auto", "cpu", (True, False)),
        ("adamw", False, "cpu", (False, False)),
        ("adamw", "auto", "cuda", (True, False)),
        ("adamw", False, "cuda", (False, True)),
        ("sgd", True, "cpu", (True, False)),
        ("adafactor", "auto", "cuda", (None, True)),
    ],
)
def test_kernel_follows_device_and_spec(name, fused, device, expected):
    """(fused, foreach): fused where the device has it, else foreach on GPUs, else the plain loop."""
    group = optimizers.build(whole(gpt()), OptimSpec(name=name, fused=fused), torch.device(device)).param_groups[0]
    assert (group.get("fused"), group["foreach"]) == expected


@pytest.mark.parametrize(("name", "device"), [("adafactor", "cpu"), ("adamw", "meta")])
def test_fused_where_there_is_none_is_refused(name, device):
    """`fused: true` is a requirement: it fails where there is no fused kernel."""
    with pytest.raises(UserError, match=rf"{name} has no fused kernel on {device}"):
        optimizers.build(whole(gpt()), OptimSpec(name=name).model_copy(update={"fused": True}), torch.device(device))


def test_muon_trains_the_matrices_of_the_blocks_only():
    """Embedding and head go to AdamW, and a model without blocks is refused."""
    groups = {
        g["name"]: g["param_names"]
        for g in optimizers.build(whole(gpt(tie_embeddings=False)), OptimSpec(name="muon"), CPU).param_groups
    }
    assert len(groups["muon"]) == 2 * 7
    assert all(n.startswith("blocks.") and "norm" not in n for n in groups["muon"])
    assert groups["decay"] == ["embedding.weight", "head.weight"]
    with pytest.raises(UserError, match="this model has none"):
        optimizers.build(whole(torch.nn.Linear(4, 4)), OptimSpec(name="muon"), CPU)


def test_muon_reads_the_lr_that_the_loop_sets():
    """Setting lr on the groups reaches both halves, before and after a restore: at 0 nothing moves."""
    model = gpt()
    optimizer = optimizers.build(whole(model), OptimSpec(name="muon"), CPU)
    for _ in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, optimizer, 1)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
