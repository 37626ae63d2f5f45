"""The families of `transformers`: logits, gradients, losses of training, and config.json there and back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from raydist import registry
from raydist.errors import UserError
from raydist.spec.huggingface import reader_of
from raydist.worker.model import _latent_attention, _layers, _moe
from tests.worker.model.families import (
    CONTEXT,
    FAMILIES,
    MOE,
    SPARSE,
    TINY,
    VOCAB,
    gradients,
    of_config,
    ours,
    renamed,
    spec_of,
    theirs,
)


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(seed))


class InOrderOfExperts:
    """In place of `_moe._Gather`: transformers adds up the rows of a token in the order of their experts."""

    @staticmethod
    def apply(rows_RD: Tensor, weights_NK: Tensor, order_R: Tensor, factor: float) -> Tensor:
        rows_RD = rows_RD * weights_NK.flatten()[order_R, None]
        return rows_RD.new_zeros(len(weights_NK), rows_RD.shape[1]).index_add_(
            0, order_R // weights_NK.shape[1], rows_RD
        )


def of_experts(self: _moe.Experts, rows_RD: Tensor, counts_L: Tensor) -> Tensor:
    """In place of `_moe.Experts.forward`: transformers has gate and up in one matrix."""
    parts = zip(rows_RD.split(counts_L.tolist()), self.gate, self.up, self.down, strict=True)
    both = [(F.linear(rows, torch.cat((gate, up))).chunk(2, -1), down) for rows, gate, up, down in parts]
    return torch.cat([F.linear(F.silu(gate) * up, down) for (gate, up), down in both])


@pytest.fixture(params=[False, True], ids=["as it is", "their operations"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The allowed distance, relative to the largest logit. The rotation here is one fused operation, which rounds once less, and
    experts are computed in other products and added up in another order; with their operations in place of these, the bits are
    equal."""
    if not request.param:
        return 2e-6
    for module in (_layers, _latent_attention):
        monkeypatch.setattr(module, "rotate", lambda x, cos, sin: x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin)
    monkeypatch.setattr(_moe, "_Gather", InOrderOfExperts)
    monkeypatch.setattr(_moe.Experts, "forward", of_experts)
    return 0.0


def distance(got: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((got - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits(name: str, far: float) -> None:
    """Whole sequences, packed documents, and rows with padding on the left, which here is a document of its own."""
    if "deepseek_v2" in name:
        far = 2e-6  # it leaves rotated pairs as neighbours, and adds up the products of queries and keys in that order
    peer = theirs(name)
    model = ours(peer)
    assert distance(model(tokens()), peer(tokens()).logits) <= far
    at_BT = torch.arange(CONTEXT).expand(3, CONTEXT)
    packed = peer(tokens(), position_ids=at_BT % 7, use_cache=False).logits  # positions that restart separate documents
    assert distance(model(tokens(), documents=at_BT // 7), packed) <= far
    real_BT = at_BT >= torch.tensor([[0], [4], [9]])
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0)
    padded = peer(tokens(), attention_mask=real_BT.long(), position_ids=positions_BT).logits
    if name in SPARSE:
        far = 2e-6  # padding is not computed alike, so an expert may multiply another number of rows, which rounds in another way
    assert distance(model(tokens(), documents=real_BT.long())[real_BT], padded[real_BT]) <= far


@torch.no_grad()
def test_dynamic_scaling_at_a_longer_context(far: float) -> None:
    """Of sequences of `context` tokens, twice the config's: also by the config that we write."""
    peer = theirs("llama, dynamic", max_position_embeddings=CONTEXT // 2)
    model = ours(peer, context=CONTEXT)
    assert distance(model(tokens()), peer(tokens()).logits) <= far
    spec, format = spec_of(peer.config.to_dict())
    again = of_config({**format.config(spec.model_copy(update={"context": CONTEXT})), "vocab_size": VOCAB})
    again.load_state_dict(peer.state_dict())
    assert torch.equal(again(tokens()).logits, peer(tokens()).logits)
    assert distance(ours(peer, context=CONTEXT, options={})(tokens()), peer(tokens()).logits) > 0.01  # without scaling


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name: str) -> None:
    """Each within 1e-5 of its largest element, from the loss that the head computes."""
    peer = theirs(name)
    model = ours(peer)
    model(tokens(), targets=tokens(2)).backward()
    F.cross_entropy(peer(tokens()).logits.flatten(0, 1), tokens(2).flatten(), reduction="sum").backward()
    right = renamed(gradients(peer), model)
    for parameter, p in model.named_parameters():
        assert distance(p.grad, right[parameter]) <= 1e-5, parameter  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_config_goes_there_and_back(name: str) -> None:
    """transformers computes the same with the config that we write, and we read the same model from it."""
    peer = theirs(name)
    spec, format = spec_of(peer.config.to_dict())
    written = format.config(spec)
    assert spec_of(written)[0] == spec
    assert format.types[written["model_type"]] in format.types.values()
    again = of_config({**written, "vocab_size": VOCAB})
    again.load_state_dict(peer.state_dict())
    assert torch.equal(again(tokens()).logits, peer(tokens()).logits)


@pytest.mark.parametrize("name", ["mistral", "qwen2, window from the second layer"])
@torch.no_grad()
def test_a_window_with_a_cache(name: str) -> None:
    """In pieces of one or several tokens the logits are those of the whole sequence."""
    model: Any = ours(theirs(name))
    caches = model.caches()
    pieces = [model(x, caches=caches) for x in tokens().split((7, 1, 1, 10, 5), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama 3", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
def test_fifty_steps_beside_a_plain_loop(name: str) -> None:
    """AdamW on the same batches from the same weights: each loss within 1e-4 of transformers' own."""
    peer = theirs(name).train()
    model = ours(peer).train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, peer)]
    for step in range(50):
        x_BT, count = tokens(step % 5), 3 * (CONTEXT - 1)
        losses = (
            model(x_BT[:, :-1], targets=x_BT[:, 1:].contiguous()) / count,
            peer(x_BT, labels=x_BT).loss,
        )
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4), step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0].item() < 2.3  # of ln 37 = 3.6


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gptj"}, "model_type 'gptj': no model here reads it\n  there are: "),
        ({}, "model_type None: no model here reads it"),
        ({"model_type": ["llama"]}, "model_type ['llama']: no model here reads it"),
        ({"model_type": "llama"}, "hidden_size: is missing"),
        ({**TINY, "model_type": "llama", "head_dim": {}}, "head_dim: {} is not a whole number"),
        ({**TINY, "model_type": "llama", "rope_scaling": "yarn"}, "rope_parameters: 'yarn' is no table of values"),
        ({**TINY, "model_type": "llama", "rope_theta": "1e4"}, "rope_theta: '1e4' is not a number"),
        ({**TINY, "model_type": "qwen2", "layer_types": {}}, "layer_types: {} is not computed here"),
        ({**TINY, "model_type": "llama", "hidden_act": "gelu"}, "hidden_act: 'gelu' is not computed here"),
        ({**TINY, "model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        ({**TINY, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ({**TINY, "model_type": "mixtral", "num_experts_per_tok": 2}, "num_local_experts: is missing"),
        ({**TINY, "model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise: 0.1 is not computed here"),
        ({**TINY, "model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 8, "use_sliding_window": True},
         "layer_types: [] with use_sliding_window is not computed here"),
        ({**TINY, "model_type": "qwen2_moe", **MOE, "qkv_bias": False}, "qkv_bias: False is not computed here"),
        ({**TINY, "model_type": "qwen3", "attention_bias": True}, "attention_bias: True is not computed here"),
        ({**TINY, "model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
         "layer_types"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(config: dict[str, Any], says: str) -> None:
    """The key, its value, and what there is."""
    with pytest.raises(UserError) as caught:
        reader_of(config)[1].fields(config)
    assert says in str(caught.value)
    if "there are" in says:
        assert (
            "deepseek_v2, deepseek_v3, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe" in caught.value.hint
        )


def test_an_old_config_names_its_rotation_as_transformers_4_did() -> None:
    """rope_theta beside rope_scaling with `type`."""
    old = {**TINY, "model_type": "llama", "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {**TINY, "model_type": "llama",
           "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}  # fmt: skip
    assert spec_of(old) == spec_of(new)
    assert spec_of(old)[0].rope_base == 500.0


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3"]
)
def test_a_key_that_config_json_lacks_has_the_librarys_default(name: str) -> None:
    """Or it is refused."""
    whole = getattr(transformers, f"{name}Config")().to_dict()
    model, format = reader_of(whole)
    options = registry.load("model", model).__globals__["Options"]

    def read(config: dict[str, Any]) -> Any:
        fields = format.fields(config)
        return fields | {"options": options(**fields["options"])}

    right = read(whole)
    for key in whole.keys() - {"model_type"}:
        with contextlib.suppress(UserError):
            assert read({other: value for other, value in whole.items() if other != key}) == right, key
