"""The decoder that the built-in models are: embedding, blocks, norm and head, with first weights, stages, FLOPs and generation.

Runs in: each train worker, and in exports of weights. May not import ray.

A model's file makes its blocks (`dense_block`, or a Block with an attention or feed-forward layer of its own) and gives them to
`Decoder`, as it is or as a subclass. Shape suffixes: see _layers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.spec.decoder import Dense, RopeScaling, default_hidden
from raydist.worker.metrics.flops import flops_of
from raydist.worker.model import part_of
from raydist.worker.model._layers import Attention, Block, Cache, Head, RMSNorm, SelfAttention, SwiGLU
from raydist.worker.model._rotary import causal_mask, packed_mask, packed_positions, rotary_tables
from raydist.worker.parallel._model_graph import initialise

if TYPE_CHECKING:
    from raydist.spec import ModelSpec
    from raydist.worker.parallel._context import SharedSequence

M = TypeVar("M", bound=nn.Module)

EMBEDDING_STD = 0.02
"""Small, because a tied embedding is also the output head: the first logits are near zero, the first loss near ln V."""


def built(make: Callable[[], M]) -> M:
    """For `build`: the model that `make` gives, with first weights; without weights if the default device is meta."""
    later = torch.get_default_device().type == "meta"
    with torch.device("meta"):  # skips torch's own initial values, which would be overwritten
        model = make()
    if not later:
        for _ in initialise(model):
            pass
    return model


def dense_block(
    spec: ModelSpec,
    eps: float,
    *,
    head: int | None = None,
    qk_norm: bool = False,
    window: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> Block:
    """A block of grouped-query attention and SwiGLU. `head`: the size of a head, default width / heads. See `Attention`."""
    attention = Attention(
        spec.width,
        spec.heads,
        spec.kv_heads or spec.heads,
        head or spec.width // spec.heads,
        qk_norm=eps if qk_norm else None,
        window=window,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    mlp = SwiGLU(spec.width, spec.hidden or default_hidden(spec.width), mlp_bias)
    return Block(spec.width, attention, mlp, eps, spec.dropout)


def dense_blocks(spec: ModelSpec, dense: Dense) -> list[Block]:
    """The blocks of a dense decoder."""
    return [
        dense_block(
            spec,
            dense.eps,
            head=dense.head,
            qk_norm=dense.qk_norm,
            window=window,
            qkv_bias=dense.qkv_bias,
            out_bias=dense.out_bias,
            mlp_bias=dense.mlp_bias,
        )
        for window in dense.windows
    ]


def dense_decoder(spec: ModelSpec, vocab_size: int, dense: Dense, kind: type[Decoder] | None = None) -> Decoder:
    """For `build`: a decoder of dense blocks. `kind`: a subclass of Decoder."""

    def make() -> Decoder:
        made = Decoder if kind is None else kind
        blocks = dense_blocks(spec, dense)
        return made(spec, vocab_size, blocks, eps=dense.eps, rotary=dense.head, scaling=dense.scaling)

    return built(make)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. `model.dropout` applies to the embedding and to the output of each sub-layer.

    `eps`: of the last norm. `rotary`: the size of the part of a head that is rotated; `scaling`: of its frequencies.
    `shared`: see `SelfAttention`.
    """

    cos: Tensor
    sin: Tensor
    shared: SharedSequence | None = None
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
    residual: ClassVar[tuple[str, ...]] = (".attention.out", ".mlp.down")
    """How the names of the linear layers end that write to the residual stream."""
    after_blocks: ClassVar[tuple[str, ...]] = ("norm", "head")
    """Children of the last stage of a pipeline alone."""

    def __init__(
        self,
        spec: ModelSpec,
        vocab_size: int,
        blocks: Sequence[Block],
        *,
        eps: float,
        rotary: int,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.vocab_size = spec, vocab_size
        self.embedding = nn.Embedding(vocab_size, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(spec.width, eps)
        self.head = Head(spec.width, vocab_size, bias=False)
        if spec.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(spec.context, rotary, spec.rope_base, scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.windows = tuple(block.attention.window for block in blocks)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draws the own weights of `module`, whose name in `named_modules` is `name`. See the contract in __init__.py.

        Matrices are normal with variance 1/fan_in, which keeps the scale of activations at any width. Matrices that write to
        the residual stream are smaller by sqrt(2 layers), so that its variance does not grow with depth (GPT-2). Biases are zero.
        """
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding) or (module is self.head and not self.spec.tie_embeddings):
            assert isinstance(module.weight, Tensor)
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, nn.Linear) and name != "head":  # a tied head is the embedding
            std = module.in_features**-0.5
            if name.endswith(self.residual):
                std /= math.sqrt(2 * self.spec.layers)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage of a pipeline needs the embedding, too."""
        return self.spec.tie_embeddings

    def stage(self, first: int, last: int) -> Self:
        """The part with blocks `first` to `last` - 1: see the contract in __init__.py."""
        ends = last == len(self.windows)
        before = ("dropout",) if ends and self.shares_embedding else ("embedding", "dropout")
        return part_of(self, first, last, blocks="blocks", before=before, after=self.after_blocks)

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
        # The stream stays fp32, even if FSDP gathers weights in bf16.
        x_BTD = self.dropout(self.embedding(tokens_BT).float()) if hidden is None else hidden
        x_BTD = self.run_blocks(x_BTD, tokens_BT, documents, caches)
        if self._modules["head"] is None:  # a stage that others follow
            return x_BTD
        return self.outputs(self.norm(x_BTD), tokens_BT, documents, targets)

    def outputs(
        self, x_BTD: Tensor, tokens_BT: Tensor, documents_BT: Tensor | None, targets_BT: Tensor | None
    ) -> Tensor:
        """What `forward` gives, from the normalised stream after the last block."""
        out: Tensor = self.head(x_BTD, targets_BT)
        return out

    def run_blocks(
        self, x_BTD: Tensor, tokens_BT: Tensor, documents_BT: Tensor | None, caches: Sequence[Cache] | None
    ) -> Tensor:
        """The residual stream before and after the blocks that this part of the model has."""
        cos, sin, masks = self.positions(tokens_BT, documents_BT, caches[0].length if caches else 0)
        for number, block in self.blocks.named_children():
            i = int(number)
            x_BTD = block(x_BTD, cos, sin, masks[self.windows[i]], caches[i] if caches else None)
        return x_BTD

    def positions(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, start: int = 0
    ) -> tuple[Tensor, Tensor, dict[int | None, Tensor | None]]:
        """(cos, sin, window -> mask) of these tokens, which follow `start` cached ones. The mask None: the kernel's causal one.

        Of a shared sequence cos and sin are of this rank's tokens, and masks of all, whose documents `documents_BT` has.
        """
        time, device = tokens_BT.shape[1], tokens_BT.device
        own = slice(start, start + time)
        if self.shared is not None:
            assert not start, "a shared sequence has no cache"
            own, time = self.shared.own(time), time * self.shared.size
        if start + time > self.spec.context:
            raise UserError(
                f"{start + time} tokens are longer than model.context {self.spec.context}", "raise model.context"
            )
        masks: dict[int | None, Tensor | None]
        if documents_BT is None:
            masks = {window: causal_mask(start, time, window, device) for window in dict.fromkeys(self.windows)}
            return self.cos[own, None], self.sin[own, None], masks
        assert not start, "packed documents have no cache"
        positions_BT, run_BT = packed_positions(documents_BT)
        masks = {window: packed_mask(run_BT, window) for window in dict.fromkeys(self.windows)}
        if self.shared is not None:
            positions_BT = positions_BT[:, own]
        return self.cos[positions_BT, None], self.sin[positions_BT, None], masks

    def flops_per_token(self, context: int) -> float:
        """FLOPs of training on one token of a sequence of `context` tokens: see worker/metrics/flops.py."""
        products = sum(flops_of(p) for p in self.parameters())
        if not self.spec.tie_embeddings:
            products -= flops_of(self.embedding.weight)
        return products + sum(m.flops(context) for m in self.modules() if isinstance(m, SelfAttention))

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
                    caches, seen = self.caches(), start
                logits_BTV = self(tokens_BT[:, seen if use_cache else start :], caches=caches)
                seen = tokens_BT.shape[1]
                next_B1 = draw(logits_BTV[:, -1].float(), temperature, top_k, generator)
                tokens_BT, ended = append(tokens_BT, next_B1, prompt, end)
                if ended:
                    break
            return tokens_BT
        finally:
            self.train(training)

    def caches(self) -> list[Cache]:
        """An empty cache for each block."""
        return [Cache(self.spec.context) for _ in self.blocks]


def append(tokens_BT: Tensor, next_B1: Tensor, prompt: int, end: int | None) -> tuple[Tensor, bool]:
    """(tokens_BT and one more token, whether all rows have drawn `end`). `prompt`: tokens of a row that were not drawn.

    A prompt that ends in `end` starts a document: only a drawn `end` stops a row, which then repeats it.
    """
    if end is not None:
        done_B1 = (tokens_BT[:, -1:] == end) & (tokens_BT.shape[1] > prompt)
        next_B1 = torch.where(done_B1, end, next_B1)
    return torch.cat((tokens_BT, next_B1), dim=1), end is not None and bool((next_B1 == end).all())


def draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draws one token per row, (B, 1)."""
    if temperature < 1e-30:  # logits over less are more than fp32 has
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
