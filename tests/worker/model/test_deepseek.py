"""DeepSeek: multi-token prediction, the cache of latent attention, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from raydist.data.batches import MASKED
from raydist.errors import SpecError
from raydist.spec import ModelSpec
from raydist.spec.huggingface import reader_of
from raydist.spec.load import parse
from raydist.worker.model import deepseek
from tests.worker.model.families import CONTEXT, VOCAB, ours, theirs, weights
from tests.worker.model.test_families import distance, tokens

LAYERS, DEPTHS = 3, 2
IN_FILES = {"post_norm": "shared_head.norm", "mtp_block.": ""}
"""Names in a layer of MtpModel -> in files, if they are others."""


@pytest.fixture
def peers() -> tuple[Any, MtpModel, deepseek.DeepSeek]:
    """DeepSeek-V3 of `transformers`, its modules for two further tokens, and ours with the weights of both."""
    main = theirs("deepseek_v3", first_k_dense_replace=0)
    further = MtpModel(main, DEPTHS).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in further.layers.named_parameters():
            p.uniform_(0.5, 1.5, generator=generator) if "norm" in name else p.normal_(0.0, 0.1, generator=generator)
    name, format = reader_of(main.config.to_dict())
    fields = format.fields(main.config.to_dict())
    fields["options"] |= {"num_nextn_predict_layers": DEPTHS, "mtp_weight": 0.5}
    model = deepseek.build(ModelSpec(name=name, **fields), VOCAB).eval()
    files = weights(main) | of_layers(further)
    held = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("bias")}}
    with torch.no_grad():
        for parameter, value in held.items():
            for piece in format.pieces(parameter, tuple(value.shape)):
                value[piece.at] = files[piece.name]
    return main, further, model


def of_layers(further: MtpModel) -> dict[str, Tensor]:
    """The tensors of its layers, as the released files name them."""
    made: dict[str, Tensor] = {}
    for key, value in further.layers.state_dict().items():
        depth, inner = key.split(".", 1)
        for old, new in IN_FILES.items():
            inner = inner.replace(old, new, 1)
        name = f"model.layers.{LAYERS + int(depth)}.{inner}"
        if "experts.gate_up_proj" in name:
            for part, of_all in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                made |= {name.replace("gate_up_proj", f"{n}.{part}_proj.weight"): w for n, w in enumerate(of_all)}
        elif name.endswith("experts.down_proj"):
            made |= {name.replace("down_proj", f"{n}.down_proj.weight"): w for n, w in enumerate(value)}
        else:
            made[name] = value
    return made


def further_loss(main: Any, further: MtpModel, targets_BT: Tensor) -> Tensor:
    """From the logits of `transformers`, of sequences cut off at the end."""
    hidden, losses = main.model(tokens()).last_hidden_state, []
    for depth in range(DEPTHS):
        ahead = depth + 1
        at = torch.arange(CONTEXT - ahead)[None].expand(len(tokens()), -1)
        hidden = further.forward_layer(depth, hidden[:, :-1], at, None, input_ids=tokens()[:, ahead:])
        logits = further._project_to_logits(hidden)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets_BT[:, ahead:].flatten(), reduction="sum"))
    return torch.stack(losses).mean() * 0.5


def test_further_tokens_are_predicted_as_transformers_does(peers: tuple[Any, MtpModel, deepseek.DeepSeek]) -> None:
    """The value of the loss is that of the next token; its gradients have the losses of further tokens, too."""
    main, further, model = peers
    targets_BT = tokens(2)
    model.train()
    loss = model(tokens(), targets=targets_BT)
    loss.backward()
    plain = F.cross_entropy(main(tokens()).logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    more = further_loss(main, further, targets_BT)
    (plain + more).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert more.item() > 100.0
    with torch.no_grad():
        normalised = model.norm(model.run_blocks(model.embedding(tokens()), tokens(), None, None))
        assert model.further_loss(normalised, tokens(), None, targets_BT).item() == pytest.approx(more.item(), rel=1e-6)
    for mine, right in (
        (model.embedding, main.model.embed_tokens),
        (model.head, main.lm_head),
        (model.blocks[0].attention.kv_a, main.model.layers[0].self_attn.kv_a_proj_with_mqa),  # type: ignore[union-attr]
        (model.mtp["3"].project, further.layers[0].eh_proj),
        (model.mtp["4"].block.attention.q_b, further.layers[1].mtp_block.self_attn.q_b_proj),
        (model.mtp["4"].block.mlp.router, further.layers[1].mtp_block.mlp.gate),
        (model.mtp["4"].norm, further.layers[1].post_norm),
    ):
        assert distance(gradient(mine), gradient(right)) <= 1e-5


def gradient(module: Any) -> Tensor:
    assert isinstance(module, nn.Module)
    found = module.weight.grad
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
def test_no_token_of_another_document_is_predicted(peers: tuple[Any, MtpModel, deepseek.DeepSeek]) -> None:
    """The loss of packed documents is the sum of the documents' own losses."""
    model = peers[2]
    x_BT, targets_BT = tokens(), tokens(2)
    packed_BT = (torch.arange(CONTEXT) >= 10).long().expand(3, CONTEXT)

    def loss(x_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        stream = model.norm(model.run_blocks(model.embedding(x_BT), x_BT, documents_BT, None))
        return model.further_loss(stream, x_BT, documents_BT, targets_BT)

    alone = [loss(x_BT[:, part], targets_BT[:, part], None) for part in (slice(10), slice(10, None))]
    torch.testing.assert_close(loss(x_BT, targets_BT, packed_BT), sum(alone), rtol=1e-5, atol=1e-4)
    masked_BT = torch.full_like(targets_BT, MASKED)
    assert loss(x_BT, masked_BT, None) == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
@torch.no_grad()
def test_a_cache(name: str) -> None:
    """In pieces of one or several tokens the logits are those of the whole sequence."""
    model: Any = ours(theirs(name))
    caches = model.caches()
    pieces = [model(x, caches=caches) for x in tokens().split((7, 1, 1, 10, 5), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens()), rtol=1e-5, atol=1e-5)


def test_flops_of_further_tokens() -> None:
    """Every parameter counts as often as it is used: the head once more for each further token, unused experts not at all."""
    options = {"num_nextn_predict_layers": 2, "n_routed_experts": 4, "first_k_dense_replace": 0, "qk_rope_head_dim": 4}
    model = deepseek.build(ModelSpec(name="deepseek", layers=2, width=32, heads=4, hidden=48, options=options), 50)
    parameters = sum(p.numel() for p in model.parameters()) + 2 * 50 * 32 - 4 * 2 * 3 * 48 * 32
    assert model.flops_per_token(16) == 6 * parameters + 4 * 6 * 4 * (8 + 4 + 8) * 16


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"kv_heads": 2}, "model.kv_heads: 2 is not heads"),
        ({"qk_norm": True}, "model.qk_norm: True deepseek normalises latents"),
        ({"heads": 3}, "model.heads: 3 does not divide width 128"),
        ({"options": {"qk_rope_head_dim": 5}}, "model.options.qk_rope_head_dim: 5 is odd"),
        (
            {
                "options": {
                    "qk_rope_head_dim": 2,
                    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
                }
            },
            "rope_type: 'dynamic' divides by the rotated size of a head less 2, which is 0 here; take linear, or larger heads",
        ),
        ({"options": {"first_k_dense_replace": 4}}, "leaves no layer with experts; set it below layers: 4"),
        ({"options": {"topk_method": "greedy", "n_group": 2}}, "n_group: 2 has no effect with topk_method: greedy"),
        ({"options": {"topk_method": "group_limited_greedy", "bias_rate": 0.1}}, "bias_rate: 0.1 has no effect"),
        ({"options": {"n_group": 3}}, "model.options.n_group: 3 does not divide n_routed_experts: 8"),
    ],
)
def test_values_that_do_not_go_together(model: dict[str, Any], says: str) -> None:
    """One line with the field, its value and the remedy."""
    with pytest.raises(SpecError) as caught:
        parse({"model": {"name": "deepseek", **model}, "data": {"source": "any"}, "train": {"steps": 1}})
    assert says in str(caught.value)
