"""The layers that the decoders share: norm, grouped-query attention with its cache, SwiGLU, the block, and the head.

Runs in: each train worker, and in exports of weights. May not import ray.

Projections are separate and ordered as in `transformers`, so that export only renames, and so that each splits evenly over a
tensor-parallel mesh. Within a layer that is split, a rank has some of the heads or columns: sizes come from the tensors.

Shape suffixes: B sequences, T tokens of this call, S tokens seen so far (cache and this call), D width, H query heads, G key and
value heads, K size of a head, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.worker.metrics.flops import attention_flops
from raydist.worker.model._chunked_cross_entropy import head_loss
from raydist.worker.model._rotary import rotate

if TYPE_CHECKING:
    from raydist.worker.parallel._context import SharedSequence


class RMSNorm(nn.RMSNorm):
    """torch's, in fp32: also under autocast, with queries and keys in bf16, and if FSDP has gathered the weight in bf16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """x -> the same shape, fp32."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Cache:
    """Keys and values of one block for the tokens so far; the first ones allocate memory for all `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T more tokens; returns all S so far. Values may have another size of head than keys."""
        if self._kept is None:
            self._kept = tuple(x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (k_BGTK, v_BGTK))  # type: ignore[assignment]
        assert self._kept is not None
        start, self.length = self.length, self.length + k_BGTK.shape[2]
        for kept, new in zip(self._kept, (k_BGTK, v_BGTK), strict=True):
            kept[:, :, start : self.length] = new
        k_BGSK, v_BGSK = self._kept
        return k_BGSK[:, :, : self.length], v_BGSK[:, :, : self.length]


class SelfAttention(nn.Module, ABC):
    """The attention of a block. `window`: how many tokens one attends to, itself included; None: all before it.

    `shared`: the ranks that share each sequence, set by raydist/worker/parallel/_context.py; None: this rank has whole ones.
    """

    window: int | None = None
    shared: SharedSequence | None = None

    @abstractmethod
    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """x_BTD -> BTD. `mask` (bool, broadcasts to B, 1, T, S) replaces the causal mask; see `Decoder.positions`."""

    @abstractmethod
    def flops(self, context: int) -> float:
        """Training FLOPs of one token in the products of queries, keys and values: see worker/metrics/flops.py."""

    def attend(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGW: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        scale: float | None = None,
    ) -> Tensor:
        """The heads' outputs side by side, BT(HW), by the kernel. W: size of a head's value; `scale`: of the products."""
        if self.shared is not None:
            q_BTHK, k_BTGK, v_BTGW = self.shared.to_heads(q_BTHK, k_BTGK, v_BTGW)
        k_BGSK, v_BGSW = k_BTGK.transpose(1, 2), v_BTGW.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSW = cache.append(k_BGSK, v_BGSW)
        if q_BTHK.is_cuda:
            k_BGSK, v_BGSW = heads_for_cuda(q_BTHK.transpose(1, 2), k_BGSK, v_BGSW, mask)
        y_BHTW = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BGSK,
            v_BGSW,
            attn_mask=mask,
            # A single token attends to all tokens so far, so it needs no mask.
            is_causal=mask is None and q_BTHK.shape[1] > 1,
            scale=scale,
            enable_gqa=k_BGSK.shape[1] != q_BTHK.shape[2],
        )
        y_BTHW = y_BHTW.transpose(1, 2)
        if self.shared is not None:
            y_BTHW = self.shared.to_tokens(y_BTHW)
        return y_BTHW.flatten(2)


def heads_for_cuda(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSW: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values in the heads that a kernel on CUDA takes: grouped ones for flash, else one for each query head.

    Only flash knows grouped heads, and it takes no mask and no fp32. With other calls torch would compute the T x T matrices of all
    heads one after another. For fp16 each has its own, because GPUs without bf16 have no flash kernel.
    """
    flash = mask is None and q_BHTK.dtype is torch.bfloat16 and q_BHTK.shape[3] <= 256
    times = q_BHTK.shape[1] // k_BGSK.shape[1]
    if flash or times == 1:
        return k_BGSK, v_BGSW
    return k_BGSK.repeat_interleave(times, dim=1), v_BGSW.repeat_interleave(times, dim=1)


class Attention(SelfAttention):
    """Causal grouped-query attention: `heads` query heads of size `head` share `kv_heads` key and value heads.

    `qk_norm`: an RMSNorm with this eps over each head's queries and keys; None: without. Biases: of q, k and v, and of the output.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head: int,
        *,
        qk_norm: float | None = None,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head, self.window = heads, kv_heads, head, window
        self.q = nn.Linear(width, heads * head, bias=qkv_bias)
        self.k = nn.Linear(width, kv_heads * head, bias=qkv_bias)
        self.v = nn.Linear(width, kv_heads * head, bias=qkv_bias)
        self.out = nn.Linear(heads * head, width, bias=out_bias)
        self.q_norm = RMSNorm(head, qk_norm) if qk_norm is not None else nn.Identity()
        self.k_norm = RMSNorm(head, qk_norm) if qk_norm is not None else nn.Identity()

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """See `SelfAttention`."""
        batch, time, _ = x_BTD.shape
        v_BTGK = self.v(x_BTD).view(batch, time, -1, self.head)
        # Norms and rotation compute in fp32, the products in v's format (fp32, or autocast's).
        q_BTHK = rotate(self.q_norm(self.q(x_BTD).view(batch, time, -1, self.head)), cos, sin).to(v_BTGK.dtype)
        k_BTGK = rotate(self.k_norm(self.k(x_BTD).view(batch, time, -1, self.head)), cos, sin).to(v_BTGK.dtype)
        out: Tensor = self.out(self.attend(q_BTHK, k_BTGK, v_BTGK, mask, cache))
        return out

    def flops(self, context: int) -> float:
        """See `SelfAttention`."""
        return attention_flops(self.heads, self.head, self.head, min(context, self.window or context))


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD, through BTF."""
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each applied to the normalised stream and added to the stream.

    `mlp` is called with x_BTD, and gives BTD.
    """

    def __init__(self, width: int, attention: SelfAttention, mlp: nn.Module, eps: float, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

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
