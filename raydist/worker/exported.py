"""A folder of `raydist checkpoint export` as a model and a tokenizer: weights in fp32, and in int8 what is int8 there.

Runs in: commands that need no training: `raydist sample`, `raydist evaluate`, exports. Torch, never ray.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from raydist import registry
from raydist.checkpoint.huggingface import SCALE, check, weight_files
from raydist.data.tokenizers import Library
from raydist.errors import DataError, UserError
from raydist.parsing import JSON_BYTES, read_file
from raydist.paths import local_path
from raydist.spec import ModelSpec
from raydist.spec.huggingface import HuggingFace, fields_of, format_of, read_config
from raydist.spec.validate import validate
from raydist.storage import Storage
from raydist.worker.int8 import Int8Linear, described
from raydist.worker.weight_files import WeightFiles


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported folder. `model` is in evaluation mode; `end`: the id that ends a document."""

    folder: Path
    spec: ModelSpec
    format: HuggingFace
    model: nn.Module

    def tokenizer(self) -> Library:
        """Its tokenizer.json. Raises DataError."""
        path = self.folder / "tokenizer.json"
        try:
            data = read_file(path, JSON_BYTES)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{path}: cannot be read: {reason}", "export the model again") from None
        return Library(str(path), data)

    def step(self) -> int:
        """The step of the checkpoint that it was exported from. Raises KeyError for other folders."""
        with safe_open(self.folder / weight_files(Storage(self.folder))[0], framework="pt") as opened:
            return int((opened.metadata() or {})["raydist_step"])

    @property
    def nbytes(self) -> int:
        """Bytes of its weights' files."""
        return sum((self.folder / name).stat().st_size for name in weight_files(Storage(self.folder)))


def is_exported(name: str) -> bool:
    """Whether this is a folder with a config.json."""
    return "://" not in name and (local_path(name) / "config.json").is_file()


@torch.no_grad()
def open_folder(folder: Path, context: int | None = None) -> Exported:
    """Reads a folder, one tensor at a time. `context`: tokens of the longest sequence; None: the config's.

    Raises UserError for an unknown architecture, tensors that do not fit, and corrupt files.
    """
    folder = local_path(folder)
    config = read_config(Storage(folder))
    quantized = config.pop("quantization_config", None)
    if quantized is not None and not _is_ours(quantized):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{folder}/config.json: quantization_config: {method!r} with these settings is not read here",
            "take a folder of `raydist checkpoint export`, or weights that are not quantised",
        )
    fields = fields_of(config, f"{folder}/config.json") | ({} if context is None else {"context": context})
    spec, problems = validate(ModelSpec, fields, {}, f"{folder}/config.json", "docs/reference/models.md", "model.")
    if spec is None or problems:
        raise UserError("\n".join(problems), "take the config.json that belongs to the weights")
    format = format_of(spec.name)
    assert format is not None
    assert spec.vocab_size is not None
    shapes = format.shapes(spec, spec.vocab_size)
    files = check(Storage(folder), spec, format, shapes, int8=quantized is not None)
    with torch.device("meta"):  # the families set takes_meta
        model: nn.Module = registry.load("model", spec.name)(spec, spec.vocab_size)
    buffers = dict(model.named_buffers())

    def read(name: str) -> Tensor:
        with WeightFiles(Storage(folder), files) as opened:  # open while one tensor is read
            return opened.read(name)

    for name, shape in shapes.items():
        pieces = format.pieces(name, shape)
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        if leaf == "weight" and (scale := pieces[0].name + SCALE) in files:
            layer = Int8Linear(read(pieces[0].name), read(scale))
            parent, _, own = module.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
            continue
        whole = torch.empty(shape)
        for piece in pieces:
            whole[piece.at] = read(piece.name)
        if isinstance(owner, Int8Linear):  # its bias
            owner.register_buffer(leaf, whole)
        elif name in buffers:
            buffers[name].copy_(whole)
        else:
            setattr(owner, leaf, nn.Parameter(whole, requires_grad=False))
    if spec.tie_embeddings:
        model.get_submodule("head").weight = model.get_submodule("embedding").weight
    return Exported(folder, spec, format, model.eval())


def _is_ours(config: Any) -> bool:
    """Whether a `quantization_config` is that of raydist/worker/int8.py."""
    if not isinstance(config, dict):
        return False
    ours = described([])
    return all(
        json.dumps(config.get(key)) == json.dumps(ours[key]) for key in ("quant_method", "format", "config_groups")
    )
