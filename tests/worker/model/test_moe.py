"""The layer with experts, and what decoders with experts say of themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raydist.errors import SpecError
from raydist.spec import ModelSpec
from raydist.spec.experts import Experts
from raydist.spec.load import parse
from raydist.worker.distributed import Rank
from raydist.worker.model import mixtral, qwen_moe
from raydist.worker.model._moe import MixtureOfExperts

B, T, D = 3, 10, 16
SHAPE = Experts(8, 3, 12, score="sigmoid", groups=4, top_groups=2, group_score="two best", bias=True, balance=0.3)


def layer(shape: Experts) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(D, shape)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return made


def _balance(plain: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, times the tokens of each sequence."""
    scores_BTE = (x_BTD @ plain.router.weight.T).sigmoid()
    shares_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    kth_BT1 = scores_BTE.topk(3, dim=-1).values[..., -1:]
    f_BE = (scores_BTE >= kth_BT1).float().sum(1) * 8 / (3 * T)
    return 0.3 * (f_BE * shares_BTE.mean(1)).sum() * T


def test_the_balance_loss_has_the_gradient_of_its_formula() -> None:
    """Written down and differentiated, times the factor of the pass; the layer's output is that without it."""
    x_BTD = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    with_loss, plain = layer(SHAPE), layer(Experts(8, 3, 12, score="sigmoid", groups=4, top_groups=2,
                                                   group_score="two best", bias=True))  # fmt: skip
    with_loss.loss_factor = 2.0
    y_BTD = with_loss(x_BTD)
    y_BTD.mean().backward()
    right_BTD = plain(x_BTD)
    (right_BTD.mean() + 2.0 * _balance(plain, x_BTD)).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(y_BTD, right_BTD)
    for name, p in plain.named_parameters():
        got, right = with_loss.get_parameter(name).grad, p.grad
        assert got is not None
        assert right is not None
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    (of_formula,) = torch.autograd.grad(_balance(plain, x_BTD), plain.router.weight)
    assert of_formula.abs().max() > 0.05  # so that its absence would be seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_experts_compute_the_same() -> None:
    """In fp32 with rows of a multiple of 16 bytes, whose grouped product torch.compile does not know; gradients too."""
    torch.manual_seed(0)
    experts, rows = layer(Experts(3, 2, 8)).experts, torch.randn(7, D)
    compiled = torch.compile(experts.forward, backend="aot_eager")
    found = []
    for forward in (experts.forward, compiled):
        out = forward(rows, torch.tensor([3, 0, 4]))
        found.append([out.detach(), *torch.autograd.grad((out**2).sum(), [*experts.parameters()])])
    torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def plain_and_compiled(rank: Rank) -> list[list[Tensor]]:
    """The output of a layer, its gradients, and its loads, as it is and compiled."""
    found = []
    for compiled in (False, True):
        made, x_BTD = layer(SHAPE), torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
        made.loss_factor, made.records = 2.0, True
        out = (torch.compile(made.forward) if compiled else made.forward)(x_BTD)
        found.append([out.detach(), *torch.autograd.grad((out**2).sum(), [*made.parameters()]), made.loads])
    return found


def test_a_compiled_layer_computes_the_same(ranks: Any) -> None:
    """Router, balance loss and loads by kernels of torch.compile. In a rank's process, as its warnings fail this one."""
    ((plain, compiled),) = ranks.run(plain_and_compiled, 1)
    assert torch.equal(plain[-1], compiled[-1])
    assert plain[-1].sum() == B * T * SHAPE.chosen
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_a_masked_batch_has_neither_loads_nor_a_balance_loss() -> None:
    """Of a micro-batch without samples."""
    made = layer(SHAPE)
    made.real, made.records = False, True
    made(torch.randn(B, T, D)).mul(0.0).sum().backward()
    assert made.loads.sum() == 0
    assert made.router.weight.grad is not None
    assert made.router.weight.grad.abs().max() == 0


def spec(name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, layers=2, width=32, heads=4, hidden=48, **fields)


@pytest.mark.parametrize(
    ("build", "fields", "unused"),
    [
        (mixtral.build, {"name": "mixtral", "options": {"num_local_experts": 8, "num_experts_per_tok": 2}}, 2 * 6 * 48),
        (
            qwen_moe.build,
            {
                "name": "qwen_moe",
                "qk_norm": True,
                "options": {
                    "moe_intermediate_size": 10,
                    "num_experts": 5,
                    "num_experts_per_tok": 3,
                    "mlp_only_layers": [0],
                },
            },
            2 * 10,
        ),
    ],
)
def test_flops_count_the_experts_that_a_token_takes(build: Any, fields: dict[str, Any], unused: int) -> None:
    """6 for each parameter, but for three matrices of each expert that a token does not take, and attention."""
    model = build(spec(**fields), 50)
    parameters = sum(p.numel() for p in model.parameters())
    assert model.flops_per_token(16) == 6 * (parameters - unused * 3 * 32) + 2 * 6 * 4 * 16 * 16


def test_first_weights_of_experts() -> None:
    """Normal with variance 1 / fan-in; what writes to the residual stream is smaller by sqrt(2 layers)."""
    torch.manual_seed(0)
    model = qwen_moe.build(spec("qwen_moe", options={"num_experts": 16}), 50)
    found = {
        name: float(p.detach().std())
        for name, p in model.named_parameters()
        if "blocks.1.mlp" in name and p.numel() > 500
    }
    assert len(found) == 7
    for name, std in found.items():
        down = "down" in name
        right = (48 if down else 32) ** -0.5 / (math.sqrt(2 * 2) if down else 1.0)
        assert std == pytest.approx(right, rel=0.1), name


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"name": "mixtral", "options": {"num_experts_per_tok": 9}},
         "model.options.num_experts_per_tok: 9 is more than the 8 experts of num_local_experts; take fewer"),
        ({"name": "mixtral", "qk_norm": True}, "set model.name: qwen_moe"),
        ({"name": "qwen_moe", "options": {"mlp_only_layers": [4]}},
         "model.options.mlp_only_layers: 4 is not the number of one of the 4 layers; take numbers from 0 to 3"),
        ({"name": "qwen_moe", "options": {"decoder_sparse_step": 5}},
         "model.options.decoder_sparse_step: 5 leaves no layer with experts"),
        ({"name": "qwen_moe", "qk_norm": True, "options": {"shared_expert_intermediate_size": 8}},
         "Qwen3-MoE has no shared expert"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together(model: dict[str, Any], says: str) -> None:
    """One line with the field, its value and the remedy."""
    with pytest.raises(SpecError) as caught:
        parse({"model": model, "data": {"source": "any"}, "train": {"steps": 1}})
    assert says in str(caught.value)
