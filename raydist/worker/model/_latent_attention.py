"""Multi-head latent attention (MLA) of DeepSeek-V2 and V3: keys and values are made from one small latent vector of a token.

Runs in: each train worker, and in exports of weights. May not import ray. Source: arXiv 2405.04434, section 2.1.

A head's query and key have a part without position and a rotated part; the rotated part of the key is the same for all heads. The
cache has keys and values of each head. Shape suffixes as in _layers.py, and N size of a head's part without position, R of its
rotated part, K = N + R, W size of a head's value, L size of the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raydist.spec.latent_attention import LatentShape
from raydist.worker.metrics.flops import attention_flops
from raydist.worker.model._layers import Cache, RMSNorm, SelfAttention
from raydist.worker.model._rotary import rotate

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the eps of the model's other norms is: so do `transformers` and the released code."""


class LatentAttention(SelfAttention):
    """The attention of a block. `scale`: of the products of queries and keys."""

    def __init__(self, width: int, shape: LatentShape, scale: float) -> None:
        super().__init__()
        self.shape, self.scale = shape, scale
        queries = shape.heads * (shape.nope + shape.rope)
        if shape.query_latent is None:
            self.q = nn.Linear(width, queries, bias=False)
        else:
            self.q_a = nn.Linear(width, shape.query_latent, bias=False)
            self.q_norm = RMSNorm(shape.query_latent, LATENT_EPS)
            self.q_b = nn.Linear(shape.query_latent, queries, bias=False)
        self.kv_a = nn.Linear(width, shape.latent + shape.rope, bias=False)
        self.kv_norm = RMSNorm(shape.latent, LATENT_EPS)
        self.kv_b = nn.Linear(shape.latent, shape.heads * (shape.nope + shape.value), bias=False)
        self.out = nn.Linear(shape.heads * shape.value, width, bias=False)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """See `SelfAttention`."""
        shape, (batch, time, _) = self.shape, x_BTD.shape
        q_BTE = self.q(x_BTD) if shape.query_latent is None else self.q_b(self.q_norm(self.q_a(x_BTD)))
        q_BTHN, q_BTHR = q_BTE.view(batch, time, -1, shape.nope + shape.rope).split((shape.nope, shape.rope), -1)
        latent_BTL, k_BTR = self.kv_a(x_BTD).split((shape.latent, shape.rope), -1)
        kv_BTHE = self.kv_b(self.kv_norm(latent_BTL)).view(batch, time, -1, shape.nope + shape.value)
        k_BTHN, v_BTHW = kv_BTHE.split((shape.nope, shape.value), -1)
        # The rotation computes in fp32, the products in v's format (fp32, or autocast's).
        q_BTHR = self._rotated(q_BTHR, cos, sin).to(v_BTHW.dtype)
        k_BTHR = self._rotated(k_BTR[:, :, None], cos, sin).to(v_BTHW.dtype).expand(-1, -1, k_BTHN.shape[2], -1)
        q_BTHK, k_BTHK = torch.cat((q_BTHN, q_BTHR), -1), torch.cat((k_BTHN, k_BTHR), -1)
        out: Tensor = self.out(self.attend(q_BTHK, k_BTHK, v_BTHW, mask, cache, self.scale))
        return out

    def _rotated(self, x_BTHR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.shape.interleaved:  # pairs (2i, 2i + 1) are rotated together: put them into two halves
            x_BTHR = torch.cat((x_BTHR[..., 0::2], x_BTHR[..., 1::2]), -1)
        return rotate(x_BTHR, cos, sin)

    def flops(self, context: int) -> float:
        """See `SelfAttention`."""
        shape = self.shape
        return attention_flops(shape.heads, shape.nope + shape.rope, shape.value, context)
