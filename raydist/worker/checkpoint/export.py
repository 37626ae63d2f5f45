"""A checkpoint as a folder that `transformers` loads: safetensors, config.json and the tokenizer.

Runs in: the user's shell (`raydist checkpoint export`). Torch, never ray.

Weights are renamed, not changed: the model's file says how (`HUGGINGFACE`, raydist/spec/huggingface.py).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydist import registry
from raydist.checkpoint.huggingface import part_shape
from raydist.data.dataset import TokenDataset
from raydist.data.tokenizers import END, Bytes, Library
from raydist.errors import DataError, UsageError, UserError
from raydist.parsing import quoted
from raydist.redact import beside
from raydist.run.directory import RunDir
from raydist.spec import ModelSpec, read_stored
from raydist.spec.huggingface import Piece, format_of
from raydist.worker.checkpoint.adapters import MergedWeights, refuse_peft
from raydist.worker.checkpoint.safetensors_writer import Output, write_files
from raydist.worker.checkpoint.weights_reader import Read, WeightsReader, open_weights
from raydist.worker.precision import DTYPES

FORMATS = ("huggingface", "safetensors", "peft")
FILE_BYTES = 5 * 10**9
"""The largest file of weights, as `transformers` writes them."""


def export(
    run: RunDir,
    step: int | None,
    out: Path,
    format: str = "safetensors",
    dataset: str | None = None,
    *,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes the weights of a committed checkpoint to the new folder `out`, whole or not at all; gives `out`.

    `step`: None takes the newest good one. `dataset`: the place of the run's prepared data, if it has moved; its tokenizer is
    exported too. `dtype`: of DTYPES; None: as saved. `file_bytes`: see `write_files`; one tensor is in memory at a time.
    Raises UsageError (format, dtype, `out` exists), UserError (a model without `HUGGINGFACE`, values that `dtype` does not have),
    CheckpointNotFound, CheckpointCorrupt, DataError.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format}: cannot be written", f"there are: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: cannot be written", f"there are: {', '.join(DTYPES)}")
    check_new(out)
    spec = read_stored(run.storage)
    if format_of(spec.model.name) is None and _own_export(spec.model) is None:
        raise UserError(
            f"model.name: {spec.model.name}: has no counterpart in transformers",
            f"read the weights themselves: raydist.open({run.uri!r}).weights() in Python",
        )
    if format == "peft":
        refuse_peft(spec.model, dtype)
    with _weights(run, step, spec.model) as weights:
        data = _dataset(dataset or beside(str(weights.manifest.plain["dataset"]), run.full_uri))
        cast = None if dtype is None else DTYPES[dtype]
        rows = spec.model.rows(data.vocab_size)
        config = hf_config(spec.model, rows, data.end, str(cast or _saved(weights)).removeprefix("torch."))
        generation = {"bos_token_id": data.end, "eos_token_id": _ends(data)}
        files = {"config.json": _json(config), "generation_config.json": _json(generation)}
        outputs = outputs_of(weights, spec.model, weights.read, cast, rows)
        if format == "peft":
            assert isinstance(weights, MergedWeights)
            files, outputs = weights.peft_files(), []
        files |= tokenizer_files(data, spec.model.context)
        metadata = {"format": "pt", "raydist_run": run.name, "raydist_step": str(weights.manifest.step)}
        with new_folder(out) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            if outputs:
                write_files(outputs, folder, file_bytes, metadata)
    return out


@contextmanager
def _weights(run: RunDir, step: int | None, model: ModelSpec) -> Iterator[WeightsReader]:
    """The weights of a checkpoint; of adapters those that they are for, with the adapters added."""
    with open_weights(run, step) as weights:
        if model.lora is None:
            yield weights
            return
        with closing(MergedWeights(run, weights.manifest, model)) as merged:
            yield merged


def check_new(out: Path) -> None:
    """Raises UsageError if there is such a file or folder, or if none can have that name."""
    try:
        there = out.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {quoted(out)}: {getattr(error, 'strerror', error)}", "give another folder") from None
    if there:
        raise UsageError(f"{out} exists", "give a folder that does not exist yet")


@contextmanager
def scratch_of(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, which is to be made. Raises UsageError if none can be made there."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{out.name[:100]}-", dir=out.parent)
    except OSError as error:
        raise UsageError(
            f"--out {quoted(out)}: no folder can be made there: {error.strerror}", "give another one"
        ) from None
    with folder as made:
        yield Path(made)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` at the end of the block, and is deleted if the block raises. Raises UsageError."""
    with scratch_of(out) as scratch:
        whole = scratch / "whole"  # not made by tempfile, to have the usual permissions
        whole.mkdir()
        yield whole
        whole.rename(out)


def _own_export(spec: ModelSpec) -> Callable[[ModelSpec, int], tuple[dict[str, Any], Callable[[str], str]]] | None:
    """`build.exported` of a built-in model (raydist/worker/model/__init__.py); None: it has none, or its code is the user's, which
    an export does not run."""
    found: Any = None if registry.is_own(spec.name) else getattr(registry.load("model", spec.name), "exported", None)
    return found


def _saved(weights: WeightsReader) -> torch.dtype:
    """The format of the largest tensor."""
    found: torch.dtype = getattr(torch, max(weights.tensors.values(), key=lambda e: math.prod(e.shape)).dtype)
    return found


def outputs_of(
    weights: WeightsReader, spec: ModelSpec, read: Read, dtype: torch.dtype | None, rows: int
) -> list[Output]:
    """The tensors of `transformers` for a model's parameters. A tied head is left out: there the embedding replaces it.

    `read`: gives the values, `weights.read` or a function around it. `dtype`: of floating-point ones; None: as saved. `rows`: of
    the embedding.
    """
    format, own = format_of(spec.name), _own_export(spec)
    if format is not None:
        pieces = format.pieces
    else:
        assert own is not None
        name_of = own(spec, rows)[1]

        def pieces(parameter: str, shape: tuple[int, ...]) -> list[Piece]:
            return [Piece(name_of(parameter))]

    made: list[Output] = []
    for name, entry in weights.tensors.items():
        if spec.tie_embeddings and name == "head.weight":
            continue
        saved: torch.dtype = getattr(torch, entry.dtype)
        as_written = saved if dtype is None or not saved.is_floating_point else dtype
        made += [
            Output(
                piece.name, part_shape(piece, entry.shape), as_written, partial(_values, read, name, piece, as_written)
            )
            for piece in pieces(name, entry.shape)
        ]
    return made


def _values(read: Read, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
    """A tensor in the format of the file. Raises UserError if that has no such values."""
    values = read(name, piece)
    made = values.to(dtype)
    if dtype is torch.float16 and bool((made.isfinite() != values.isfinite()).any()):
        raise UserError(
            f"--dtype fp16: {piece.name} has values up to {values.abs().max().item():.3g}, and fp16 ends at 65504",
            "use bf16 or fp32",
        )
    return made


def _dataset(uri: str) -> TokenDataset:
    try:
        return TokenDataset(uri)
    except DataError as error:
        raise DataError(error.message, "its tokenizer belongs to the model: say where the dataset is now") from error


def hf_config(spec: ModelSpec, vocab_size: int, end: int | None, dtype: str = "float32") -> dict[str, Any]:
    """config.json of the model. `end`: the id that ends a document and begins the next; None: not known."""
    if (format := format_of(spec.name)) is not None:
        config = format.config(spec)
        config = {"architectures": [format.types[config["model_type"]]], **config}
    else:
        own = _own_export(spec)
        assert own is not None
        config = own(spec, vocab_size)[0]
    return {
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
    files = {"tokenizer.json": raw}
    if (chat := dataset.index.chat) is not None:
        config |= chat.tokens
        if chat.template is not None:
            files["chat_template.jinja"] = chat.template.encode()
    return {**files, "tokenizer_config.json": _json(config)}


def _ends(dataset: TokenDataset) -> int | list[int]:
    """The ids at which generation stops: that of a document's end, and the one that ends an answer in a chat template."""
    name = dataset.index.chat.tokens.get("eos_token") if dataset.index.chat is not None else None
    found = dataset.tokenizer.token_id(name) if name and isinstance(dataset.tokenizer, Library) else None
    return dataset.end if found in (None, dataset.end) else [found, dataset.end]


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
