"""The chunked loss of the head equals cross entropy of all logits, and so do its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.spec import ModelSpec
from raydist.worker.model import _chunked_cross_entropy as chunked_cross_entropy
from raydist.worker.model import gpt
from raydist.worker.model._chunked_cross_entropy import head_loss
from raydist.worker.step import loss_sum

N, D, V = 29, 8, 17
BF16 = 2**-8
"""Half the relative distance of two neighbouring bf16 numbers: the error of one rounding."""


def made(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and targets of which some are masked."""
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(V, (N,), generator=g)
    targets[::5] = MASKED
    x, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=MASKED, reduction="sum")


def results(function: Any, factor: float = 0.37) -> list[Tensor]:
    """Loss and gradients."""
    x, weight, targets = made()
    loss = function(x, weight, targets)
    (loss * factor).backward()
    return [loss.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def distance(a: Tensor, b: Tensor) -> float:
    """Distance of a from b, relative to b."""
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("logits", [1 << 28, 5 * V, 1], ids=["one chunk", "several", "a token each"])
def test_equals_cross_entropy_of_all_logits(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 within a few roundings, for any chunk size."""
    monkeypatch.setattr(chunked_cross_entropy, "LOGITS", logits)
    for ours, theirs in zip(results(head_loss), results(plain), strict=True):
        assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to the fp32 result as the plain version, within a few roundings; gradients are fp32, of master weights."""
    monkeypatch.setattr(chunked_cross_entropy, "LOGITS", 5 * V)
    exact = results(plain)
    with torch.autocast("cpu", dtype=dtype):
        ours = results(head_loss)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32
        assert 0 < distance(a, b) < 2 * BF16


def test_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch in which no target counts, as on a rank without samples: loss and gradients are 0."""
    x, weight, targets = made()
    loss = head_loss(x, weight, torch.full_like(targets, MASKED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert not x.grad.any()  # type: ignore[union-attr]
    assert not weight.grad.any()  # type: ignore[union-attr]


class Largest(torch.overrides.TorchFunctionMode):
    """Records the largest number of elements of any function's result."""

    elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_never_are_all_logits_there(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in evaluation, whose loss is the same."""
    x, weight, targets = made()
    whole = plain(x, weight, targets).item()
    monkeypatch.setattr(chunked_cross_entropy, "LOGITS", N * V // 2)
    with torch.set_grad_enabled(grad), Largest() as seen:
        assert head_loss(x, weight, targets).item() == pytest.approx(whole, rel=1e-6)
    assert 0 < seen.elements < N * V


@pytest.mark.parametrize("tie", [True, False])
def test_gpt_gives_its_loss(tie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and all gradients equal those computed from its logits, also with packed documents; and the loop uses it."""
    monkeypatch.setattr(chunked_cross_entropy, "LOGITS", 100)
    torch.manual_seed(0)
    model = gpt.build(ModelSpec(layers=2, width=16, heads=2, context=12, tie_embeddings=tie), V)
    nn.init.normal_(model.head.weight)
    tokens, targets = torch.randint(V, (2, 3, 12))
    targets[0, :4] = MASKED
    documents = torch.arange(12).expand(3, 12) // 5

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    logits = model(tokens, documents=documents)
    theirs = gradients(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="sum"))
    called: list[int] = []
    model.head.register_forward_hook(lambda module, args, out: called.append(out.ndim))
    ours = gradients(loss_sum(model, MicroBatch(tokens, targets, documents)))
    assert called == [0]
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b) < 1e-5
