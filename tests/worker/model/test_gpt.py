"""The GPT against `transformers`, and against itself with a cache, packed, and in other precisions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from raydist.errors import UserError
from raydist.spec import ModelSpec
from raydist.spec.decoder import default_hidden
from raydist.spec.huggingface import dense_pieces
from raydist.worker.checkpoint.export import hf_config
from raydist.worker.model import gpt
from raydist.worker.model._decoder import EMBEDDING_STD
from raydist.worker.model._layers import heads_for_cuda
from raydist.worker.model._rotary import packed_positions
from raydist.worker.precision import DTYPES

VOCAB, CONTEXT = 37, 24


def spec(**fields: object) -> ModelSpec:
    return ModelSpec(**{"layers": 2, "width": 32, "heads": 4, "context": CONTEXT, **fields})


def build(seed: int = 0, **fields: object) -> gpt.GPT:
    torch.manual_seed(seed)
    model = gpt.build(spec(**fields), VOCAB)
    # With gains of 1 a norm in the wrong place would not show.
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    return model.eval()


def tokens(batch: int = 2, time: int = CONTEXT, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_logits_equal_transformers(tie_embeddings, kv_heads, qk_norm):
    """With the same weights, the logits equal Llama's (with qk_norm: Qwen3's) in fp32, to 1e-5."""
    model = build(tie_embeddings=tie_embeddings, kv_heads=kv_heads, qk_norm=qk_norm, rope_base=500.0, hidden=48)
    config = hf_config(model.spec, VOCAB, end=None)
    kind = transformers.Qwen3Config if qk_norm else transformers.LlamaConfig
    peer = transformers.AutoModelForCausalLM.from_config(kind(**config))
    missing, unexpected = peer.load_state_dict(
        {dense_pieces(name)[0].name: p for name, p in model.named_parameters()}, strict=False
    )
    assert not unexpected
    assert list(missing) == (["lm_head.weight"] if tie_embeddings else [])
    torch.testing.assert_close(model(tokens()), peer.eval()(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_sizes_and_names():
    """The weights of Llama at these sizes: q and out are square, k and v smaller by H/G, the feed-forward 8/3 wide."""
    model = build(kv_heads=2)
    shapes = {n.removeprefix("blocks.0."): tuple(p.shape) for n, p in model.named_parameters() if "blocks.1" not in n}
    assert shapes == {
        "embedding.weight": (VOCAB, 32),
        "attention_norm.weight": (32,),
        "attention.q.weight": (32, 32),
        "attention.k.weight": (16, 32),
        "attention.v.weight": (16, 32),
        "attention.out.weight": (32, 32),
        "mlp_norm.weight": (32,),
        "mlp.gate.weight": (96, 32),
        "mlp.up.weight": (96, 32),
        "mlp.down.weight": (32, 96),
        "norm.weight": (32,),
    }
    assert model.head.weight is model.embedding.weight
    assert not list(model.state_dict().keys() & {"cos", "sin"})


def test_initial_scale():
    """Matrices have variance 1/fan_in, those into the residual stream 1/(2 layers) of it; the first loss is close to ln V."""
    torch.manual_seed(0)
    model = gpt.build(ModelSpec(layers=8, width=256, heads=4, context=CONTEXT), VOCAB)
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
    for layer, residual in ((attention.q, 1), (mlp.up, 1), (attention.out, 4), (mlp.down, 4)):
        expected = layer.in_features**-0.5 / residual
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(EMBEDDING_STD, rel=0.03)
    with torch.no_grad():
        logits_BTV = model(tokens(8))
    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens(8, seed=2).flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.1)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_packed_documents_equal_separate_ones(qk_norm):
    """Each document of a packed row has the logits that it has alone; ids need not ascend, and may be used again."""
    model = build(kv_heads=2, qk_norm=qk_norm)
    lengths, x_BT = (5, 1, 11, 7), tokens()
    documents_BT = torch.cat([torch.full((2, n), i) for n, i in zip(lengths, (4, 0, 4, 2), strict=True)], dim=1)
    packed_BTV = model(x_BT, documents=documents_BT)
    for x, packed in zip(x_BT.split(lengths, dim=1), packed_BTV.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(packed, model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_may_be_packed_differently():
    """Positions and masks are separate for each row."""
    model, x_BT = build(), tokens()
    documents_BT = torch.stack([torch.arange(CONTEXT) // 6, torch.arange(CONTEXT) // 8])
    both_BTV = model(x_BT, documents=documents_BT)
    for row in range(2):
        alone_BTV = model(x_BT[row : row + 1], documents=documents_BT[row : row + 1])
        torch.testing.assert_close(both_BTV[row : row + 1], alone_BTV, rtol=1e-5, atol=1e-5)


def test_packed_positions():
    """Positions restart where the number changes; each document is identified by its start."""
    positions, runs = packed_positions(torch.tensor([[7, 7, 7, 2, 7, 7], [1, 1, 1, 1, 1, 1]]))
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert runs.tolist() == [[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("kv_heads", [None, 2])
@torch.no_grad()
def test_cached_logits_equal_whole_ones(kv_heads):
    """Fed in pieces of one or several tokens, the logits equal those of the whole sequence."""
    model, x_BT = build(kv_heads=kv_heads, qk_norm=True), tokens()
    caches = model.caches()
    pieces = [model(x, caches=caches) for x in x_BT.split((7, 1, 1, 10, 5), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(x_BT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 9, CONTEXT, CONTEXT + 5])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (1.0, None), (0.8, 5)])
def test_generation_with_and_without_cache(prompt, temperature, top_k):
    """The same tokens, also far past the context, where the older half is dropped; the prompt comes first."""
    model, x_BT = build(), tokens(time=prompt)

    def run(use_cache: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        return model.generate(x_BT, 2 * CONTEXT, temperature, top_k, generator, use_cache=use_cache)

    out_BS = run(use_cache=True)
    assert torch.equal(out_BS, run(use_cache=False))
    assert out_BS.shape == (2, prompt + 2 * CONTEXT)
    assert torch.equal(out_BS[:, :prompt], x_BT)


@torch.no_grad()
def test_greedy_and_top_1_take_the_likeliest():
    """Temperature 0 and top_k 1 agree with argmax of the model's own logits."""
    model, x_BT = build(), tokens(time=6)
    expected = model(x_BT)[:, -1].argmax(dim=-1)
    for temperature in (0, 1e-320, 1e-45, 1e-29):
        assert torch.equal(model.generate(x_BT, 1, temperature=temperature)[:, -1], expected)
    assert torch.equal(model.generate(x_BT, 1, temperature=1.0, top_k=1)[:, -1], expected)


def test_generation_stops_at_the_end():
    """A row that drew the end token repeats it until all rows have; a prompt that ends with it continues."""
    model = build()
    x_BT = tokens(time=4)
    free = model.generate(x_BT, 12, generator=torch.Generator().manual_seed(0))
    end = int(free[0, 6])
    out = model.generate(x_BT, 12, generator=torch.Generator().manual_seed(0), end=end)
    first = free[0, 4:].tolist().index(end) + 4
    assert torch.equal(out[0, : first + 1], free[0, : first + 1])
    assert (out[0, first:] == end).all()
    alone = model.generate(x_BT[:1], 12, temperature=0, end=int(model.generate(x_BT[:1], 1, temperature=0)[0, -1]))
    assert alone.shape[1] == 5
    begun = model.generate(torch.full((1, 1), end), 3, generator=torch.Generator().manual_seed(3), end=end)
    assert begun[0, 1] != end


def test_generation_leaves_the_model_as_it_was():
    """Dropout is off during sampling, and training mode is restored after it."""
    model = build(dropout=0.5).train()
    a, b = (model.generate(tokens(), 4, temperature=0) for _ in range(2))
    assert torch.equal(a, b)
    assert model.training
    assert model.blocks[0].training


def test_dropout_acts_in_training_only():
    """In training two passes differ and a seed repeats them; in evaluation they are the same."""
    model = build(dropout=0.3).train()
    torch.manual_seed(3)
    first, second = model(tokens()), model(tokens())
    torch.manual_seed(3)
    assert torch.equal(model(tokens()), first)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}, {"kv_heads": 2, "qk_norm": True}])
def test_bf16_autocast_stays_close(fields):
    """Under autocast logits are bf16, close to fp32's, without a warning (pytest turns one into an error), also packed and
    cached."""
    model = build(**fields)
    whole = model(tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(tokens())
        low.float().sum().backward()
        packed = model(tokens(), documents=torch.zeros_like(tokens()))
        generated = model.generate(tokens(), 3, temperature=0)
    assert low.dtype is packed.dtype is torch.bfloat16
    assert generated.shape[1] == CONTEXT + 3
    assert (low.float() - whole).abs().max() < 0.05 * whole.abs().max()
    assert model.embedding.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("width", [96, 128, 768])
def test_default_hidden(width):
    """8/3 of the width, rounded up to a multiple of 32."""
    hidden = default_hidden(width)
    assert hidden % 32 == 0
    assert 0 <= hidden - width * 8 / 3 < 32


def test_too_long_a_sequence_is_refused():
    """The rotary tables end at the context; the message names the field."""
    with pytest.raises(UserError, match=rf"{CONTEXT + 1} tokens are longer than model.context {CONTEXT}"):
        build()(tokens(time=CONTEXT + 1))


def test_options_are_refused():
    """An unknown option is an error, and is named."""
    with pytest.raises(UserError, match="gpt takes none, got rotary_scale"):
        gpt.build(spec(options={"rotary_scale": 2}), VOCAB)


@pytest.mark.parametrize(
    ("precision", "packed", "grouped"),
    [("bf16", False, True), ("bf16", True, False), ("fp16", False, False), ("fp32", False, False)],
)
def test_cuda_s_kernels_get_heads_that_they_take(precision, packed, grouped):
    """On CUDA only flash knows grouped heads: with a mask, or in fp32, torch would compute the T x T matrices of all heads."""
    q, k, v = (torch.randn(2, heads, 8, 4, dtype=DTYPES[precision]) for heads in (6, 2, 2))
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if packed else None
    keys, values = heads_for_cuda(q, k, v, mask)
    assert keys.shape[1] == values.shape[1] == (2 if grouped else 6)
    out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=not packed, enable_gqa=grouped)
    same = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not packed, enable_gqa=True)
    torch.testing.assert_close(out, same)
