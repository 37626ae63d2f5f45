"""The GPU of this machine; and GPU behaviour on CPU tensors: the attention kernel, and what autocast computes in fp32.

Runs in: the user's shell. Torch, never ray.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
}
"""aten's operators for attention -> their names. None of them keeps a T x T matrix for backward."""

_NARROW = frozenset({
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell",
    "addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv",
})  # fmt: skip
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot",
})  # fmt: skip

_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@cache
def wide_on_cuda() -> frozenset[str]:
    """Functions that autocast computes in fp32 on CUDA but not on a CPU, by this torch's own table.

    The table also has functions that only CUDA computes in half precision (they reduce to matrix products, as on a CPU) and some
    that use the widest dtype of their arguments: those are left out here.
    """
    table = torch._C._dispatch_get_registrations_for_dispatch_key
    more = set(table("AutocastCUDA")) - set(table("AutocastCPU"))
    return frozenset({name.removeprefix("aten::").partition(".")[0] for name in more} - _NARROW - _WIDEST)


def device_memory() -> int | None:
    """Bytes of the first GPU of this machine; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def device_name() -> str | None:
    """The driver's name of that GPU."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


class _GroupedProduct(torch.autograd.Function):
    """The shapes of F.grouped_mm, [R, I] x [L, I, O] -> [R, O], and what it keeps: torch knows them for bf16 alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows @ weights[0]  # a product, whose result selective checkpointing keeps

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.empty_like(kept) for kept in ctx.saved_tensors)  # type: ignore[return-value]


class OnTarget(TorchFunctionMode):
    """Function mode around forward and loss, under CPU autocast. `cuda`: emulate CUDA. `attends`: whether attention was called."""

    def __init__(self, cuda: bool) -> None:
        super().__init__()
        self._cuda = cuda
        self.attends = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.attends = True
            if self._cuda:
                return self._attend(*args, **kwargs)
        if func == _IS_CUDA:  # our own attention asks: it gives kernels other heads there
            return self._cuda
        if func is torch._grouped_mm:
            made: Tensor = _GroupedProduct.apply(*args[:2])  # type: ignore[no-untyped-call]
            return made
        if self._cuda and torch.is_autocast_enabled("cpu"):
            name = getattr(func, "__name__", "").replace("__rpow__", "pow")
            if name in wide_on_cuda() or (name in _WIDEST and _formats(args, kwargs) > {torch.float32}):
                args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's choice on CUDA, in order of preference: flash (half precision, no mask), memory-efficient, plain math."""
        if torch.is_autocast_enabled("cpu"):
            few = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(few), key.to(few), value.to(few)
        aten = torch.ops.aten
        few_bits = query.dtype in (torch.float16, torch.bfloat16)
        same_size = value.shape[-1] == query.shape[-1]  # not in latent attention
        if query.dim() == 4 and attn_mask is None and few_bits and query.shape[-1] <= 256 and same_size:
            room = -query.shape[-1] % 8  # the kernel needs head dimensions that are multiples of 8
            wide = [F.pad(t, (0, room)) if room else t for t in (query, key, value)]
            out: Tensor = aten._scaled_dot_product_flash_attention(*wide, dropout_p, is_causal, scale=scale)[0]
            return out[..., : query.shape[-1]]
        if query.dim() == 4 and query.shape[-3] == key.shape[-3]:
            bias = attn_mask
            if bias is not None:
                if bias.dtype is torch.bool:
                    bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
                bias = bias.expand(*query.shape[:-1], key.shape[-2])
            out = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
            return out
        out = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out


def _formats(*tree: Any) -> set[torch.dtype]:
    return {t.dtype for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
