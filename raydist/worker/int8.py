"""int8 linear layers: weights of 8 bits with a scale for each output, and inputs that are quantised as they come, token by token.

Runs in: `raydist checkpoint export --quantize int8`, and commands that read the result. Torch, never ray.

    weight [O, I] ~ int8 [O, I] * scale [O, 1]          in the file; symmetric, rounded to the nearest
    x      [N, I] ~ int8 [N, I] * scale [N, 1]          at run time ("dynamic")
    y = int32 products * both scales + bias             one integer matrix product, exact

Embeddings, norms, the head, routers and stacked experts keep their format. In files the layout is the one that the package
compressed-tensors calls int-quantized: X.weight (int8) and X.weight_scale, described in config.json. docs/adr/0019 has the reasons.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raydist.checkpoint.huggingface import INDEX, SCALE, weight_files
from raydist.parsing import parse_json
from raydist.spec.huggingface import HuggingFace
from raydist.storage import Storage

MOST = 127
"""The largest magnitude of a quantised value; -128 is not used, so that the range is symmetric."""
_LEAST_ROWS, _WHOLE = 32, 8
"""CUDA's integer product takes more than 16 rows, and sizes that are multiples of 8."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values, scales) of a matrix: x is about values * scales. The scales are fp32, one for each row [N, 1]."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).div_(MOST).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / scales).round_().clamp_(-MOST, MOST).to(torch.int8), scales


class Int8Linear(nn.Module):
    """A linear layer with int8 weights. It cannot be trained."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        padding = (0, -weight.shape[1] % _WHOLE, 0, -weight.shape[0] % _WHOLE)
        self.register_buffer("weight", F.pad(weight, padding))
        self.register_buffer("scale", scale.float().flatten())
        self.register_buffer("bias", None if bias is None else bias.float())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O], in the format of x."""
        rows, scales = quantize(x.reshape(-1, self.in_features))
        count = len(rows)
        more = max(_LEAST_ROWS - count, 0) if x.device.type == "cuda" else 0
        rows = F.pad(rows, (0, self.weight.shape[1] - self.in_features, 0, more))
        y = torch._int_mm(rows, self.weight.t())[:count, : self.out_features].float()
        y = y.mul_(scales).mul_(self.scale)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def linear_tensors(model: nn.Module, format: HuggingFace) -> set[str]:
    """The tensors in files that become int8: weights of plain linear layers. `model`: may be without values."""
    found = set()
    for name, module in model.named_modules():
        # Head and Router are subclasses; a layer with one output is a gate, which decides more than it weighs.
        if type(module) is nn.Linear and module.out_features > 1:
            (piece,) = format.pieces(f"{name}.weight", tuple(module.weight.shape))
            found.add(piece.name)
    return found


def write(source: Path, out: Path, tensors: Collection[str]) -> None:
    """Writes the folder `source` with these tensors in int8 to the new folder `out`, one file of weights at a time."""
    out.mkdir()
    files = weight_files(Storage(source))
    for path in source.iterdir():
        if path.name not in (*files, INDEX, "config.json"):
            shutil.copyfile(path, out / path.name)
    places: dict[str, str] = {}
    kept = {"lm_head"}  # a tied head has no tensor, and others see the module all the same
    total = 0
    for file in files:
        made: dict[str, Tensor] = {}
        with safe_open(source / file, framework="pt") as opened:
            metadata = opened.metadata()
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                tensor = opened.get_tensor(name)
                if name in tensors:
                    made[name], made[name + SCALE] = quantize(tensor)
                else:
                    made[name] = tensor
                    kept |= {name.removesuffix(".weight")} if tensor.ndim > 1 else set()
        save_file(made, out / file, metadata)
        places |= dict.fromkeys(made, file)
        total += sum(t.nbytes for t in made.values())
    config = parse_json((source / "config.json").read_bytes())
    config["quantization_config"] = described(sorted(kept))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    mode = stat.S_IMODE((out / "config.json").stat().st_mode)
    for file in files:  # safetensors creates its files for the owner alone
        (out / file).chmod(mode)


def described(kept: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json, as compressed-tensors writes it. `kept`: modules with matrices that are not int8."""
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }
