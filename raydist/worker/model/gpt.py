"""A decoder-only transformer: the Llama architecture, and with `qk_norm` Qwen3's.

Runs in: each train worker, and in exports of weights. May not import ray.

RMSNorm, rotary positions, SwiGLU and grouped-query attention; no biases. Projections are separate and ordered as
in `transformers`, so that export only renames, and so that each splits evenly over a tensor-parallel mesh.

Shape suffixes: B sequences, T tokens of this call, S tokens seen so far (cache and this call), D width,
H query heads, G key and value heads, K size of a head, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.spec.parts import near_divisors, problem
from raydist.worker.metrics.flops import decoder_flops
from raydist.worker.model import part_of
from raydist.worker.model._chunked_cross_entropy import head_loss
from raydist.worker.parallel._model_graph import initialise

if TYPE_CHECKING:
    from raydist.spec import ModelSpec

NORM_EPS = 1e-5
EMBEDDING_STD = 0.02
"""Small, because a tied embedding is also the output head: the first logits are near zero, the first loss near ln V."""


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError if the heads do not fit the width. Called without torch: see raydist/registry.py."""
    if spec.width % spec.heads:
        raise problem("heads", spec.heads, f"does not divide width {spec.width}", near_divisors(spec.width, spec.heads))
    if (spec.width // spec.heads) % 2:
        raise problem("heads", spec.heads, f"makes heads of odd size {spec.width // spec.heads}",
                      "rotary positions need an even width / heads")  # fmt: skip
    if spec.kv_heads and spec.heads % spec.kv_heads:
        raise problem("kv_heads", spec.kv_heads, f"does not divide heads {spec.heads}",
                      near_divisors(spec.heads, spec.kv_heads))  # fmt: skip


def check_tensor(spec: ModelSpec, ranks: int) -> None:
    """Raises SpecValueError if `ranks` tensor parallel ranks cannot share its heads. Called without torch."""
    kv_heads = spec.kv_heads or spec.heads
    if kv_heads % ranks:
        field = "kv_heads" if spec.kv_heads else "heads"
        raise problem(field, kv_heads, f"cannot be shared by parallel.tensor: {ranks} ranks",
                      near_divisors(kv_heads, ranks, "parallel.tensor:"))  # fmt: skip
    hidden = spec.hidden or default_hidden(spec.width)
    if hidden < ranks:
        raise problem("hidden", hidden, f"is less than parallel.tensor: {ranks}", "set parallel.tensor lower")


def build(spec: ModelSpec, vocab_size: int) -> GPT:
    """The model with initial weights from torch's default generator; without weights if the default device is meta.

    Raises UserError on `model.options`.
    """
    if spec.options:
        raise UserError(
            f"model.options: gpt takes none, got {', '.join(sorted(spec.options))}",
            "remove them, or name your own model as package.module:build",
        )
    later = torch.get_default_device().type == "meta"
    with torch.device("meta"):  # skips torch's own initial values, which would be overwritten
        model = GPT(spec, vocab_size)
    if not later:
        for _ in initialise(model):
            pass
    return model


build.takes_meta = True  # type: ignore[attr-defined]  # GPT.init_module creates the weights


def default_hidden(width: int) -> int:
    """Width of the feed-forward layer: 8/3 of the width (as many weights as 4x without a gate), in whole 32s."""
    return 32 * math.ceil(width * 8 / 3 / 32)


class Cache:
    """Keys and values of one block for the tokens so far; memory for all S tokens is allocated at once."""

    def __init__(self, batch: int, kv_heads: int, capacity: int, head: int, like: Tensor) -> None:
        self.k_BGSK = like.new_empty(batch, kv_heads, capacity, head)
        self.v_BGSK = torch.empty_like(self.k_BGSK)
        self.length = 0

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T more tokens; returns all S so far."""
        start, self.length = self.length, self.length + k_BGTK.shape[2]
        self.k_BGSK[:, :, start : self.length] = k_BGTK
        self.v_BGSK[:, :, start : self.length] = v_BGTK
        return self.k_BGSK[:, :, : self.length], self.v_BGSK[:, :, : self.length]


def rotary_tables(context: int, head: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each (context, head), fp32.

    Frequencies are repeated, for the two halves of a head that are rotated together (the layout of `transformers`);
    the first half of sin is negated here instead of in every step.
    """
    # On the CPU, even if the model is built without weights: the tables are not in checkpoints.
    inverse_K2 = 1.0 / (base ** (torch.arange(0, head, 2, dtype=torch.int64, device="cpu").float() / head))
    angles_SK2 = torch.outer(torch.arange(context, device="cpu").float(), inverse_K2)
    cos, sin = angles_SK2.cos(), angles_SK2.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x_BTNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on N heads. cos and sin broadcast to (B, T, 1, K); the result has the wider dtype."""
    swapped_BTNK = x_BTNK.roll(x_BTNK.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTNK * cos, swapped_BTNK, sin)


def packed_positions(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(positions_BT, run_BT) of packed documents: the position within the document, and a number for each run."""
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.where(first_BT, at_T, 0).cummax(dim=1).values
    # The start position numbers the runs; it also distinguishes two runs with the same document number.
    return at_T - start_BT, start_BT


class RMSNorm(nn.RMSNorm):
    """torch's, in fp32: also under autocast, with queries and keys in bf16, and if FSDP has gathered the weight in bf16."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """x -> the same shape, fp32."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share G key and value heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads = spec.heads, spec.kv_heads or spec.heads
        self.head = spec.width // spec.heads
        self.q = nn.Linear(spec.width, self.heads * self.head, bias=False)
        self.k = nn.Linear(spec.width, self.kv_heads * self.head, bias=False)
        self.v = nn.Linear(spec.width, self.kv_heads * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, spec.width, bias=False)
        self.q_norm = RMSNorm(self.head) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head) if spec.qk_norm else nn.Identity()

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """x_BTD -> BTD. `mask` (bool, broadcasts to B, 1, T, S) replaces the causal mask; see `GPT.forward`."""
        batch, time, _ = x_BTD.shape
        v_BTGK = self.v(x_BTD).view(batch, time, -1, self.head)
        # Norms and rotation compute in fp32, the products in v's format (fp32, or autocast's).
        q_BTHK = rotate(self.q_norm(self.q(x_BTD).view(batch, time, -1, self.head)), cos, sin).to(v_BTGK.dtype)
        k_BTGK = rotate(self.k_norm(self.k(x_BTD).view(batch, time, -1, self.head)), cos, sin).to(v_BTGK.dtype)
        k_BGSK, v_BGSK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
        y_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BGSK,
            v_BGSK,
            attn_mask=mask,
            # A single token attends to all tokens so far, so it needs no mask.
            is_causal=mask is None and time > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(y_BHTK.transpose(1, 2).reshape(batch, time, -1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD, through BTF."""
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each applied to the normalised stream and added to the stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.width)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.width)
        self.mlp = SwiGLU(spec.width, spec.hidden or default_hidden(spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """x_BTD -> BTD."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos, sin, mask, cache))
        out: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return out


class Head(nn.Linear):
    """The output head: logits, or with targets their loss."""

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """x_BTD -> logits_BTV; with `targets_BT` their summed cross entropy, a scalar in fp32."""
        if targets_BT is None:
            return super().forward(x_BTD)
        return head_loss(x_BTD.flatten(0, 1), self.weight, targets_BT.flatten())


class GPT(nn.Module):
    """Embedding, blocks, norm, head. `model.dropout` applies to the embedding and to the output of each sub-layer."""

    cos: Tensor
    sin: Tensor
    gives_loss = True
    tensor_rules: ClassVar[Mapping[str, str]] = {
        "embedding": "vocabulary",
        "head": "vocabulary",
        "blocks.*.attention": "gather",
        "blocks.*.attention.[qkv]": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp": "gather",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
    }

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.spec, self.vocab_size = spec, vocab_size
        self.embedding = nn.Embedding(vocab_size, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.width)
        self.head = Head(spec.width, vocab_size, bias=False)
        if spec.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(spec.context, spec.width // spec.heads, spec.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draws the own weights of `module`, whose name in `named_modules` is `name`. See the contract in __init__.py.

        Matrices are normal with variance 1/fan_in, which keeps the scale of activations at any width. Matrices that write to
        the residual stream are smaller by sqrt(2 layers), so that its variance does not grow with depth (GPT-2).
        """
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding) or (module is self.head and not self.spec.tie_embeddings):
            assert isinstance(module.weight, Tensor)
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, nn.Linear) and name != "head":  # a tied head is the embedding
            std = module.in_features**-0.5
            if name.endswith((".attention.out", ".mlp.down")):
                std /= math.sqrt(2 * self.spec.layers)
            nn.init.normal_(module.weight, std=std)

    def stage(self, first: int, last: int) -> GPT:
        """The part with blocks `first` to `last` - 1: see the contract in __init__.py."""
        ends = last == self.spec.layers
        before = ("dropout",) if ends and self.spec.tie_embeddings else ("embedding", "dropout")
        return part_of(self, first, last, blocks="blocks", before=before, after=("norm", "head"))

    def forward(
        self,
        tokens_BT: Tensor,
        documents: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        targets: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """tokens_BT (int64) -> logits_BTV. T may not exceed `model.context`, cached tokens included. `hidden`: see `stage`.

        `documents` (int, B x T), and `targets` (int64, B x T), with which the result is a scalar: see the contract in
        model/__init__.py. `caches`, one per block, hold the tokens before these; `generate` uses them. They cannot be combined
        with `documents`.
        """
        time = tokens_BT.shape[1]
        start = caches[0].length if caches else 0
        if start + time > self.spec.context:
            raise UserError(
                f"{start + time} tokens are longer than model.context {self.spec.context}", "raise model.context"
            )
        mask = None
        if documents is None:
            cos, sin = self.cos[start : start + time, None], self.sin[start : start + time, None]
            if start and time > 1:
                at_S = torch.arange(start + time, device=tokens_BT.device)
                mask = at_S[start:, None] >= at_S
        else:
            assert not caches, "packed documents have no cache"
            positions_BT, run_BT = packed_positions(documents)
            cos, sin = self.cos[positions_BT, None], self.sin[positions_BT, None]
            mask = ((run_BT[:, :, None] == run_BT[:, None, :]).tril())[:, None]
        # The stream stays fp32, even if FSDP gathers weights in bf16.
        x_BTD = self.dropout(self.embedding(tokens_BT).float()) if hidden is None else hidden
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, cos, sin, mask, caches[i] if caches else None)
        if self._modules["head"] is None:  # a stage that others follow
            return x_BTD
        out: Tensor = self.head(self.norm(x_BTD), targets)
        return out

    def flops_per_token(self, context: int) -> float:
        """FLOPs of training on one token of a sequence of `context` tokens: see worker/metrics/flops.py."""
        parameters = sum(p.numel() for p in self.parameters())
        if not self.spec.tie_embeddings:
            parameters -= self.embedding.weight.numel()
        head = self.spec.width // self.spec.heads
        return decoder_flops(parameters, self.spec.layers, self.spec.heads, head, head, context)

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        max_new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        end: int | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """tokens_BT -> tokens_BS: the prompt, followed by at most `max_new` tokens.

        `temperature` 0 takes the most probable token; `top_k` draws from the k most probable. A row that has drawn `end`
        repeats it; when all rows have, generation stops. When the context is full its older half is dropped.
        `use_cache=False` computes every token again: slower, the same result. Dropout is off.
        """
        assert tokens_BT.shape[1] > 0, "an empty prompt: give at least one token"
        training = self.training
        self.eval()
        try:
            prompt = tokens_BT.shape[1]
            start = seen = max(0, prompt - self.spec.context)
            caches: list[Cache] | None = None
            for _ in range(max_new):
                if tokens_BT.shape[1] - start > self.spec.context:
                    start, caches = start + max(1, self.spec.context // 2), None
                if use_cache and caches is None:
                    caches, seen = self._caches(tokens_BT.shape[0]), start
                logits_BTV = self(tokens_BT[:, seen if use_cache else start :], caches=caches)
                seen = tokens_BT.shape[1]
                next_B1 = _draw(logits_BTV[:, -1].float(), temperature, top_k, generator)
                if end is not None:
                    # A prompt that ends in `end` starts a document: only a drawn `end` stops a row.
                    done_B1 = (tokens_BT[:, -1:] == end) & (tokens_BT.shape[1] > prompt)
                    next_B1 = torch.where(done_B1, end, next_B1)
                tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
                if end is not None and bool((next_B1 == end).all()):
                    break
            return tokens_BT
        finally:
            self.train(training)

    def _caches(self, batch: int) -> list[Cache]:
        kv_heads, head = self.spec.kv_heads or self.spec.heads, self.spec.width // self.spec.heads
        like: Tensor = self.norm.weight
        if torch.is_autocast_enabled(like.device.type):
            like = like.to(torch.get_autocast_dtype(like.device.type))
        return [Cache(batch, kv_heads, self.spec.context, head, like) for _ in self.blocks]


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draws one token per row, (B, 1)."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
