"""Every model in worker/model keeps the contract in its `__init__`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raydist import registry
from raydist.data.batches import MASKED
from raydist.spec import ModelSpec
from raydist.spec.huggingface import format_of
from tests.training import MODELS

VOCAB, BATCH, TIME = 29, 2, 12


def fields(name: str) -> dict[str, Any]:
    """The fields of `model` for a name in MODELS, or for a user's own model (test_extending.py)."""
    return MODELS.get(name, {"name": name})


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    spec = ModelSpec(layers=2, width=16, heads=4, context=TIME, **fields(name))
    model: nn.Module = registry.load("model", spec.name)(spec, VOCAB)
    return model


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))


def takes_documents(model: nn.Module) -> bool:
    return "documents" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_vocabulary(name):
    """tokens_BT in, finite logits_BTV out, for full and for shorter sequences."""
    model = build(name)
    assert model(tokens()).shape == (BATCH, TIME, VOCAB)
    assert model(tokens()[:, :5]).shape == (BATCH, 5, VOCAB)
    assert model(tokens()).isfinite().all()


def test_a_loss_is_that_of_the_logits():
    """If a model returns its loss, it is the cross entropy of its logits, in fp32, summed over the targets that count."""
    targets = tokens(2)
    targets[0, :7] = MASKED
    made = {name: model for name in MODELS if getattr(model := build(name), "gives_loss", False)}
    assert {"gpt", "llama", "mixtral"} <= made.keys()
    for model in made.values():
        loss, logits = model(tokens(), targets=targets), model(tokens()).flatten(0, 1)
        expected = F.cross_entropy(logits, targets.flatten(), ignore_index=MASKED, reduction="sum")
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    """The same seed gives the same bits, on the CPU; another seed gives different ones."""
    weights = build(name).state_dict()
    again, other = build(name).state_dict(), build(name, seed=1).state_dict()
    assert list(weights) == list(again)
    assert all(w.device.type == "cpu" for w in weights.values())
    assert all(torch.equal(w, again[n]) for n, w in weights.items())
    assert any(not torch.equal(w, other[n]) for n, w in weights.items())


@pytest.mark.parametrize("name", MODELS)
def test_import_draws_nothing(name):
    """Loading the extension leaves the default generator unchanged."""
    state = torch.get_rng_state()
    registry.load("model", fields(name)["name"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name):
    """Each parameter has a finite gradient that is not all zero, with and without packing."""
    for packed in (False, True):
        model = build(name)
        if packed and not takes_documents(model):
            continue
        kwargs = {"documents": torch.arange(TIME).expand(BATCH, TIME) // 5} if packed else {}
        if getattr(model, "gives_loss", False):  # which may have parts that only the loss of training uses
            model(tokens(), targets=tokens(2), **kwargs).backward()
        else:
            nn.functional.cross_entropy(model(tokens(), **kwargs).flatten(0, 1), tokens(2).flatten()).backward()
        for parameter, p in model.named_parameters():
            assert p.grad is not None, parameter
            assert p.grad.isfinite().all(), parameter
            assert p.grad.abs().sum() > 0, parameter


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_causal(name):
    """Changing the tokens from position 7 on changes no logits before it, and does change those from it."""
    model, x_BT, y_BT = build(name).eval(), tokens(), tokens()
    y_BT[:, 7:] = (y_BT[:, 7:] + 1) % VOCAB
    a, b = model(x_BT), model(y_BT)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=1e-5, atol=1e-6)
    assert (a[:, 7:] != b[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(name):
    """Changing the first document changes nothing in the second, and the second alone has the same logits.

    A model without a `documents` argument cannot be used with packing: it must refuse the argument.
    """
    model, x_BT, y_BT = build(name).eval(), tokens(), tokens()
    documents_BT = (torch.arange(TIME) >= 5).long().expand(BATCH, TIME)
    if not takes_documents(model):
        with pytest.raises(TypeError):
            model(x_BT, documents=documents_BT)
        return
    y_BT[:, :5] = (y_BT[:, :5] + 1) % VOCAB
    a, b = model(x_BT, documents=documents_BT), model(y_BT, documents=documents_BT)
    assert not torch.equal(a[:, :5], b[:, :5])
    torch.testing.assert_close(a[:, 5:], b[:, 5:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a[:, 5:], model(x_BT[:, 5:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_evaluation_is_deterministic_and_draws_nothing(name):
    """In evaluation mode two passes have the same bits and use no random numbers."""
    model = build(name).eval()
    state = torch.get_rng_state()
    assert torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", MODELS)
def test_the_driver_knows_the_parameters(name):
    """What a file says of Hugging Face's format: each parameter has tensors of its own, and the shape of the model's."""
    model = build(name)
    format = format_of(fields(name)["name"])
    if format is None:
        return
    shapes = format.shapes(model.spec, VOCAB)
    pieces = [piece.name for parameter, shape in shapes.items() for piece in format.pieces(parameter, shape)]
    assert len(pieces) == len(set(pieces))
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    assert shapes == {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}
