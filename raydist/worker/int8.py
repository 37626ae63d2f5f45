"""Linear layers in int8: weights with a scale for each row, activations with a scale for each token, quantized as they come.

Runs in: commands that export, sample and evaluate, on the CPU. Torch, never ray.

Symmetric: value = scale * q with q in [-127, 127]. The products are summed in int32, exactly. Embeddings, norms, routers, the head
and stacked experts keep their format. In files a weight is int8 [out, in], and NAME_scale float32 [out, 1].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

METHOD = "raydist-int8"
"""`quant_method` in config.json."""
CONFIG: dict[str, Any] = {"quant_method": METHOD, "bits": 8, "weights": "symmetric, a scale for each row",
                          "activations": "symmetric, a scale for each token, dynamic"}  # fmt: skip
SCALE = "_scale"
"""What the name of a weight's scales in a file ends with."""
_LARGEST = 127


def quantize(x_NF: Tensor) -> tuple[Tensor, Tensor]:
    """(q int8 [N, F], scale float32 [N, 1]) of the rows of `x_NF`."""
    scale_N1 = x_NF.float().abs().amax(dim=1, keepdim=True) / _LARGEST
    q_NF = (x_NF.float() / torch.where(scale_N1 > 0, scale_N1, 1.0)).round_().to(torch.int8)
    return q_NF, scale_N1


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight. Made with zeros, in place of `linear`."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        out, into = linear.weight.shape
        self.register_buffer("weight", torch.zeros(out, into, dtype=torch.int8, device="cpu"))
        self.register_buffer("scale", torch.zeros(out, 1, device="cpu"))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the format of `x`."""
        q_NF, scale_N1 = quantize(x.flatten(0, -2))
        y_NO = torch._int_mm(q_NF, self.weight.t()) * scale_N1 * self.scale.t()
        if self.bias is not None:
            y_NO = y_NO + self.bias
        return y_NO.to(x.dtype).view(*x.shape[:-1], -1)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that become int8, by name: plain nn.Linear ones. Heads and routers are of classes of their own."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def with_int8_layers(model: nn.Module) -> set[str]:
    """Replaces them. The names of their weights."""
    layers = linear_layers(model)
    for name, linear in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Int8Linear(linear))
    return {f"{name}.weight" for name in layers}
