"""Adapters of a checkpoint, for exports: added to the weights that they are for, or alone as a folder of peft.

Runs in: commands that export weights, in one process. Torch, never ray. One tensor of the base is in memory at a time.
"""

from __future__ import annotations

import json

from safetensors.torch import save
from torch import Tensor

from raydist.checkpoint import base_weights
from raydist.checkpoint.base_weights import BASE
from raydist.checkpoint.huggingface import check, format_for
from raydist.checkpoint.manifest import Manifest, TensorEntry
from raydist.errors import UsageError, UserError
from raydist.redact import beside
from raydist.run.directory import RunDir
from raydist.spec import ModelSpec
from raydist.spec.huggingface import Piece
from raydist.spec.training import LoraSpec
from raydist.storage import Storage
from raydist.worker.checkpoint.weights_reader import WHOLE, WeightsReader
from raydist.worker.lora import A, B, layers_of, merge
from raydist.worker.weight_files import WeightFiles


class MergedWeights(WeightsReader):
    """The weights of a base, with the adapters of a checkpoint added, in fp32. Close it as a WeightsReader.

    Raises UserError and CheckpointError if the folder `model.hf` has not the weights that the adapters were trained on.
    """

    def __init__(self, run: RunDir, manifest: Manifest, model: ModelSpec) -> None:
        super().__init__(run, manifest)
        self._model, self._format = model, format_for(model)
        self._folder = Storage(beside(str(model.hf), run.full_uri))
        here = {"hf": self._folder.uri, "fingerprint": base_weights.fingerprint(self._folder)}
        base_weights.check(manifest.plain.get(BASE), here)
        assert model.vocab_size is not None, "config.json of model.hf has set it"
        self.shapes = self._format.shapes(model, model.vocab_size)
        self._files = check(self._folder, model, self._format, self.shapes)
        saved = self.tensors
        self.adapters = {name: super(MergedWeights, self).read(name) for name in saved if name.endswith((A, B))}
        self._saved = saved.keys() - self.adapters.keys()  # persistent buffers
        of_base = {name: TensorEntry("float32", shape, ()) for name, shape in self.shapes.items()}
        self.tensors = {**of_base, **{name: saved[name] for name in self._saved}}

    def read(self, name: str, piece: Piece = WHOLE) -> Tensor:
        """See WeightsReader. A piece is a whole tensor of the files."""
        if name in self._saved:
            return super().read(name, piece)
        pieces = self._format.pieces(name, self.shapes[name])
        (file,) = [each for each in pieces if each.at == piece.at]
        with WeightFiles(self._folder, self._files) as opened:
            values = opened.read(file.name).float()
        return merge(name, values, self.adapters, self._lora) if not piece.at else values

    @property
    def _lora(self) -> LoraSpec:
        assert self._model.lora is not None
        return self._model.lora

    def peft_files(self) -> dict[str, bytes]:
        """adapter_config.json and adapter_model.safetensors. Raises UserError if a layer has no counterpart there."""
        tensors: dict[str, Tensor] = {}
        targets = []
        has_experts = any(".experts." in name for name in self.shapes)
        for layer in layers_of(self.adapters):
            pieces = self._format.pieces(f"{layer}.weight", self.shapes[f"{layer}.weight"])
            if len(pieces) != 1 or pieces[0].at:
                raise UserError(
                    f"{layer}: is no layer of its own in transformers, so peft has no adapter for it",
                    "export it merged: --format huggingface",
                )
            if has_experts and ".mlp." in layer:
                raise UserError(
                    f"{layer}: peft takes an adapter of such a layer for one of the experts, which have the same names",
                    "export it merged (--format huggingface), or train with model.lora.targets: ['attention.*']",
                )
            targets.append(pieces[0].name.removesuffix(".weight"))
            for key in (A, B):
                tensors[f"base_model.model.{targets[-1]}.{key}.weight"] = self.adapters[f"{layer}.{key}"].contiguous()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._folder.uri,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": self._lora.dropout,
            "target_modules": targets,
            "bias": "none",
            "inference_mode": True,
        }
        return {
            "adapter_config.json": (json.dumps(config, indent=2) + "\n").encode(),
            "adapter_model.safetensors": save(tensors, {"format": "pt"}),
        }


def refuse_peft(model: ModelSpec, dtype: str | None) -> None:
    """Raises UsageError for a run without adapters, and for a dtype: they are written as saved."""
    if dtype is not None:
        raise UsageError(f"--dtype {dtype}: adapters are written as they are saved, in fp32", "leave it out")
    if model.lora is None:
        raise UsageError("--format peft: the run has no adapters (model.lora)", "use --format huggingface")
