"""Layers with experts on the GPU: grouped products, losses of whole models, bits of two runs, compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raydist.spec.experts import Experts as Shape
from raydist.worker.model._moe import Experts
from tests.gpu.device import DEVICE, job, trained

CPU = torch.device("cpu")
DEEPSEEK = {
    "name": "deepseek",
    "options": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64, "balance_loss": 0.1,
                "num_nextn_predict_layers": 1},
}  # fmt: skip
ODD = {"name": "mixtral", "hidden": 70}
"""The rows of an expert are no multiple of 16 bytes: a product for each expert."""


@pytest.mark.parametrize("counts", [[5, 0, 9, 0], [0, 0, 0, 14], [0, 0, 0, 0]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype, tolerance: float, counts: list[int]) -> None:
    """Output and gradients, relative to the largest element; experts without rows have gradients of zeros, and so have all if there
    are no rows."""
    torch.manual_seed(0)
    experts = Experts(64, Shape(4, 2, 32)).to(DEVICE)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)
    rows = torch.randn(sum(counts), 64, device=DEVICE, dtype=dtype, requires_grad=True)
    above = torch.randn(sum(counts), 64, device=DEVICE, dtype=dtype)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = experts(rows, torch.tensor(counts, device=DEVICE))
    out.backward(above)
    got = [out.detach(), rows.grad, *(p.grad for p in experts.parameters())]
    theirs, weights = (
        rows.detach().double().requires_grad_(),
        [p.detach().double().requires_grad_() for p in experts.parameters()],
    )
    parts = []
    for part, gate, up, down in zip(theirs.split(counts), *weights, strict=True):
        parts.append((F.silu(part @ gate.T) * (part @ up.T)) @ down.T)
    right = torch.cat(parts)
    right.backward(above.double())
    for ours, exact in zip(got, [right.detach(), theirs.grad, *(w.grad for w in weights)], strict=True):
        assert ours is not None
        assert exact is not None
        assert ours.shape == exact.shape
        if exact.numel():
            assert float((ours.double() - exact).abs().max()) <= tolerance * max(float(exact.abs().max()), 1e-30)


@pytest.mark.parametrize("model", [DEEPSEEK, ODD])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_losses_are_those_of_the_cpu(model: dict[str, Any], precision: str, tolerance: float) -> None:
    """Of the CPU in fp32, as in test_step.py; one token of 512 may take another expert. Twice with the same bits."""
    reference, _ = trained(job(model=model), CPU)
    losses, weights = trained(job(model=model, precision=precision))
    assert losses == pytest.approx(reference, rel=tolerance)
    assert losses[-1] < losses[0]
    again = trained(job(model=model, precision=precision, train={"checkpoint_activations": "full"}))
    assert again[0] == losses
    assert all(torch.equal(value, again[1][name]) for name, value in weights.items())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_compiled_blocks_are_near_eager(precision: str, tolerance: float) -> None:
    """Losses, as in test_step.py."""
    eager, _ = trained(job(model=DEEPSEEK, precision=precision))
    losses, _ = trained(job(model=DEEPSEEK, precision=precision, train={"compile": "blocks"}))
    assert losses == pytest.approx(eager, rel=tolerance)
