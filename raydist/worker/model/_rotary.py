"""Rotary positions of the decoders: tables, their scaling for long contexts, and positions and masks of packed documents.

Runs in: each train worker, and in exports of weights. May not import ray.

The two halves of a head are rotated against each other: the layout of `transformers`, whose frequencies these are, too.
Shape suffixes: B sequences, T tokens of this call, S tokens seen so far, N heads, K size of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raydist.spec.decoder import RopeScaling


def rotary_tables(context: int, head: int, base: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each (context, head), fp32. `head`: the size of the part of a head that is rotated.

    Frequencies are repeated, for the two halves of a head that are rotated together; the first half of sin is negated here instead
    of in every step. With yarn both have the attention factor in them.
    """
    # On the CPU, even if the model is built without weights: the tables are not in checkpoints.
    inverse_K2 = 1.0 / (base ** (torch.arange(0, head, 2, dtype=torch.int64, device="cpu").float() / head))
    if scaling is not None:
        inverse_K2 = _scaled(inverse_K2, context, head, base, scaling)
    angles_SK2 = torch.outer(torch.arange(context, device="cpu").float(), inverse_K2)
    cos, sin = angles_SK2.cos(), angles_SK2.sin()
    if scaling is not None and (factor := attention_factor(scaling)) != 1.0:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def attention_factor(scaling: RopeScaling) -> float:
    """What cos and sin are multiplied by: 1 unless yarn. YaRN (arXiv 2309.00071), equation 22; with mscale: DeepSeek-V2."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1: YaRN's temperature of the attention at a longer context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaled(inverse_K2: Tensor, context: int, head: int, base: float, scaling: RopeScaling) -> Tensor:
    """The frequencies for the longer context, with the same roundings as in `transformers`.

    dynamic: those that `transformers` has for a sequence of `context` tokens, for shorter ones, too. If they changed with the
    length, tokens in a cache would have other frequencies than the next one, and logits would depend on the batches before.
    """
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return inverse_K2 / factor
    assert original is not None
    if scaling.rope_type == "dynamic":
        if context <= original:
            return inverse_K2
        length = torch.tensor(context, device="cpu")  # a tensor there, too: fp32
        longer = base * ((factor * length / original) - (factor - 1)) ** (head / (head - 2))
        return 1.0 / (longer ** (torch.arange(0, head, 2, dtype=torch.int64, device="cpu").float() / head))
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None
        assert high is not None
        length_K2 = 2 * math.pi / inverse_K2
        kept_K2 = (original / length_K2 - low) / (high - low)
        between_K2 = (1 - kept_K2) * inverse_K2 / factor + kept_K2 * inverse_K2
        scaled_K2 = torch.where(length_K2 > original / low, inverse_K2 / factor, between_K2)
        return torch.where(length_K2 < original / high, inverse_K2, scaled_K2)

    def dimension(turns: float) -> float:
        """The dimension that turns so often within the original context."""
        return head * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head - 1)
    ramp_K2 = (torch.arange(head // 2, device="cpu").float() - first) / (last - first or 0.001)
    kept_K2 = 1 - ramp_K2.clamp(0, 1)
    interpolated_K2 = 1.0 / (factor * (base ** (torch.arange(0, head, 2, device="cpu").float() / head)))
    return interpolated_K2 * (1 - kept_K2) + inverse_K2 * kept_K2


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


def packed_mask(run_BT: Tensor, window: int | None) -> Tensor:
    """Which tokens each token attends to, (B, 1, T, T): those of its run up to itself, the last `window` of them."""
    mask_BTT = (run_BT[:, :, None] == run_BT[:, None, :]).tril()
    return (mask_BTT if window is None else mask_BTT.triu(1 - window))[:, None]


def causal_mask(start: int, time: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of S = start + time tokens the last `time` attend to, (T, S): those up to themselves, the last `window` of them.

    None where the kernel's own causal path computes the same, and for a single token that attends to all so far.
    """
    if window is not None and start + time <= window:
        window = None
    if window is None and (not start or time == 1):
        return None
    at_S = torch.arange(start + time, device=device)
    mask = at_S[start:, None] >= at_S
    return mask if window is None else mask & (at_S > at_S[start:, None] - window)
