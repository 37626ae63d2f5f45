"""A checkpoint as a folder that `transformers` loads: safetensors, config.json and the tokenizer.

Runs in: the user's shell (`raydist checkpoint export`). Torch, never ray.

Weights are renamed, not changed: the model's file says how (`HUGGINGFACE`, raydist/spec/huggingface.py).
"""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from raydist.checkpoint.manifest import Manifest
from raydist.data.dataset import TokenDataset
from raydist.data.tokenizers import END, Bytes, Library
from raydist.errors import CheckpointNotFound, DataError, UsageError, UserError
from raydist.redact import beside
from raydist.run.directory import SPEC, RunDir
from raydist.spec import ModelSpec, parse
from raydist.spec.huggingface import format_of
from raydist.worker.checkpoint import restore

FORMATS = ("huggingface", "safetensors")
MODEL = "model/"
"""The prefix of the model's tensors in a checkpoint."""


def export(run: RunDir, step: int | None, out: Path, format: str = "safetensors", dataset: str | None = None) -> Path:
    """Writes the weights of a committed checkpoint to the new folder `out`, whole or not at all; gives `out`.

    `step`: None takes the newest good one. `dataset`: the place of the run's prepared data, if it has moved; its tokenizer is
    exported too. Raises UsageError (format, `out` exists), UserError (a model without `HUGGINGFACE`),
    CheckpointNotFound, CheckpointCorrupt, DataError.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format}: cannot be written", f"there are: {', '.join(FORMATS)}")
    if out.exists():
        raise UsageError(f"{out} exists", "give a folder that does not exist yet")
    spec = parse(yaml.safe_load(run.storage.read(SPEC)), source=f"{run.uri}/{SPEC}")
    if format_of(spec.model.name) is None:
        raise UserError(
            f"model.name: {spec.model.name}: has no counterpart in transformers",
            "read the weights themselves with raydist.worker.checkpoint.restore",
        )
    manifest = restore.choose(run, step=step)
    if manifest is None:
        raise CheckpointNotFound(
            f"run {run.name} has no checkpoint yet", "train it up to its first one (checkpoint.every)"
        )
    weights = _read(run, manifest)
    dtype = str(weights["embedding.weight"].dtype).removeprefix("torch.")
    data = _dataset(dataset or beside(str(manifest.plain["dataset"]), run.full_uri))
    config = hf_config(spec.model, len(weights["embedding.weight"]), data.end, dtype)
    generation = {"bos_token_id": data.end, "eos_token_id": data.end}
    files = {"config.json": _json(config), "generation_config.json": _json(generation)}
    files |= tokenizer_files(data, spec.model.context)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        whole = Path(scratch) / "whole"  # not made by tempfile, to have the usual permissions
        whole.mkdir()
        for name, content in files.items():
            (whole / name).write_bytes(content)
        metadata = {"format": "pt", "raydist_run": run.name, "raydist_step": str(manifest.step)}
        saved = whole / "model.safetensors"
        save_file(hf_weights(weights, spec.model), saved, metadata)
        # safetensors creates its file for the owner alone: set the permissions of the other files, which follow the umask.
        saved.chmod(stat.S_IMODE((whole / "config.json").stat().st_mode))
        whole.rename(out)
    return out


def _read(run: RunDir, manifest: Manifest) -> dict[str, Tensor]:
    """The model's tensors by their names, whole, on the CPU, in their saved dtype. Names and shapes come from the manifest."""
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in manifest.tensors.items()
        if name.startswith(MODEL)
    }
    restore.load(run, manifest, tensors, {})
    return {name.removeprefix(MODEL): t for name, t in tensors.items()}


def _dataset(uri: str) -> TokenDataset:
    try:
        return TokenDataset(uri)
    except DataError as error:
        raise DataError(error.message, "its tokenizer belongs to the model: say where the dataset is now") from error


def hf_weights(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """A model's parameters by name -> the tensors of `transformers`. A tied head is left out: there the embedding replaces it."""
    format = format_of(spec.name)
    assert format is not None
    return {
        piece.name: w.detach()[piece.at].cpu().contiguous()
        for name, w in weights.items()
        if not (spec.tie_embeddings and name == "head.weight")
        for piece in format.pieces(name, tuple(w.shape))
    }


def hf_config(spec: ModelSpec, vocab_size: int, end: int | None, dtype: str = "float32") -> dict[str, Any]:
    """config.json of the model. `end`: the id that ends a document and begins the next; None: not known."""
    format = format_of(spec.name)
    assert format is not None
    config = format.config(spec)
    return {
        "architectures": [format.types[config["model_type"]]],
        **config,
        "vocab_size": vocab_size,
        # transformers 5 reads dtype, 4 reads torch_dtype.
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def tokenizer_files(dataset: TokenDataset, context: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for `transformers`, of the dataset's tokenizer."""
    from tokenizers import Tokenizer

    if not isinstance(dataset.tokenizer, Bytes | Library):
        raise DataError(
            f"tokenizer {dataset.tokenizer.name}: cannot be written as a tokenizer.json that `transformers` reads",
            "export a model that was trained with bytes, bpe:VOCAB or a tokenizer.json",
        )
    raw = byte_tokenizer() if isinstance(dataset.tokenizer, Bytes) else dataset.tokenizer.to_bytes()
    end = Tokenizer.from_str(raw.decode()).id_to_token(dataset.end)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": raw, "tokenizer_config.json": _json(config)}


def byte_tokenizer() -> bytes:
    """The bytes tokenizer as a byte-level BPE without merges: id = byte, and 256 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's table shows each byte as a character: printable ones as themselves, the others from 256 on, in order.
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    characters = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    assert tokenizer.token_to_id(END) == Bytes.end
    return str(tokenizer.to_str(pretty=True)).encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
