"""How models are written in Hugging Face's format: config.json as fields of `model`, and the names of tensors.

Runs anywhere, without torch. A family says it in its model's file (raydist/worker/model), as `HUGGINGFACE`, once for import and
export; that is read without importing the file. Here is what the families share.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import registry, remote_filesystem
from raydist.errors import StorageError, UserError
from raydist.parsing import parse_json
from raydist.spec.decoder import DecoderOptions, default_hidden
from raydist.storage import Storage, refused

if TYPE_CHECKING:
    from raydist.spec.training import ModelSpec

Config = Mapping[str, Any]
"""The values of a config.json."""


HUB = "hf://"
"""How the name of a model of a hub begins: hf://OWNER/NAME or hf://OWNER/NAME@REVISION."""


def read_folder(name: str) -> tuple[str, dict[str, Any]]:
    """(`name`, the fields of `model`) of a folder in Hugging Face's format, or of a model of a hub, of which config.json alone is
    downloaded; its name gets the revision that was found. Raises UserError."""
    if name.startswith(HUB):
        downloaded = download(name, ["config.json"])
        name = f"{name.partition('@')[0]}@{downloaded.name}"  # so that the weights are those of this config.json
        folder = Storage(downloaded)
    else:
        folder = Storage(name)
    return name, fields_of(read_config(folder), f"{folder.uri}/config.json")


def read_config(folder: Storage) -> dict[str, Any]:
    """The values of the config.json in a folder. Raises UserError."""
    try:
        with reading(folder, "config.json", "give a folder in Hugging Face's format"):
            config = parse_json(folder.read("config.json"))
    except StorageError as error:
        raise UserError(error.message, remote_filesystem.remedy(folder.full_uri, "check the permissions")) from None
    if not isinstance(config, dict):
        raise UserError(
            f"{folder.uri}/config.json: holds {type(config).__name__}, not the config of a model", "download it again"
        )
    return config


@contextmanager
def reading(folder: Storage, name: str, remedy: str) -> Iterator[None]:
    """Raises UserError for a file that is missing, damaged (ValueError) or, in a local folder, not readable; StorageError where an
    object store refuses to read it: another attempt may succeed."""
    place = f"{folder.uri}/{name}"
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = os.strerror(errno.ENOENT) if missing else remote_filesystem.reason(error)
        hint = remote_filesystem.remedy(folder.full_uri, remedy) if missing else "download it again"
        raise UserError(f"{place}: cannot be read: {why}", hint) from None
    except OSError as error:
        failed = error if isinstance(error, StorageError) else refused("read", place, error)
        raise UserError(failed.message, remedy) if folder.local is not None else failed from None


def fields_of(config: Config, place: str) -> dict[str, Any]:
    """The fields of `model`, its name among them, of a config.json. `place`: of the file. Raises UserError."""
    try:
        model, format = reader_of(config)
        return {"name": model, "vocab_size": need(config, "vocab_size"), **format.fields(config)}
    except UserError as error:
        raise UserError(f"{place}: {error.message}", error.hint) from None


def download(name: str, patterns: Sequence[str], cache: Path | None = None, *, present: bool = False) -> Path:
    """The folder of a model of a hub, with its files of these patterns. Raises UserError.

    `cache`: where files are kept; None: huggingface_hub's own folder (HF_HOME). A file that is there is not downloaded again, and
    of several processes one downloads it while the others wait. `present`: all files must be there.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: needs the package huggingface_hub", "install it, or download the model and give its folder"
        ) from None
    owner, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(
            snapshot_download(
                owner, revision=revision or None, allow_patterns=[*patterns], cache_dir=cache, local_files_only=present
            )
        )
    except Exception as error:  # of the hub, the network and the cache, in many classes
        raise UserError(
            f"{name}: cannot be downloaded: {type(error).__name__}: {remote_filesystem.reason(error)}",
            "check the name and the network (HF_ENDPOINT, and HF_TOKEN for gated models), or download it elsewhere and give "
            "its folder",
        ) from error


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a file: its name there, and which part of our parameter it is; `at` () is the whole."""

    name: str
    at: tuple[int | slice, ...] = ()


Pieces = Callable[[str, tuple[int, ...]], list[Piece]]
"""Name and shape of one of our parameters -> the tensors in files that make it."""


def dense_pieces(parameter: str, shape: tuple[int, ...] = ()) -> list[Piece]:
    """The tensors of `transformers` that make a parameter of a decoder of dense blocks. Raises KeyError for other names."""
    module, _, leaf = parameter.rpartition(".")
    if not module.startswith("blocks."):
        return [Piece(f"{_TOP[module]}.{leaf}")]
    _, layer, inner = module.split(".", 2)
    return [Piece(f"model.layers.{layer}.{_BLOCK[inner]}.{leaf}")]


def sparse_pieces(moe: Mapping[str, str]) -> Pieces:
    """`pieces` of a decoder that has blocks with experts. `moe`: of parameters in such a block the names here -> in files, with {}
    for the number of an expert, which has a tensor of its own there."""

    def pieces(parameter: str, shape: tuple[int, ...]) -> list[Piece]:
        layer, _, inner = parameter.removeprefix("blocks.").partition(".")
        if inner not in moe:
            return dense_pieces(parameter)
        name = f"model.layers.{layer}.{moe[inner]}"
        return [Piece(name.format(n), (n,)) for n in range(shape[0])] if "{}" in name else [Piece(name)]

    return pieces


_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""A module of a block -> its name in `transformers`."""

_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The counterpart of a model in `transformers`.

    types    `model_type` in config.json -> the class in `architectures`, for each that this model reads
    fields   config.json -> the fields of `model` besides its name; raises UserError for what the model cannot compute
    config   the model -> the keys of config.json that describe it, `model_type` among them
    shapes   the model and the rows of its embedding -> the shape of each parameter and persistent buffer here; a tied one once
    pieces   name and shape of one of our parameters -> the tensors in files that make it
    ignored  patterns of names in files that may be there without a parameter; {layers} is the number of blocks
    reads    whether config.json of these types is read as this model; otherwise it is only written
    """

    types: Mapping[str, str]
    fields: Callable[[Config], dict[str, Any]]
    config: Callable[[ModelSpec], dict[str, Any]]
    shapes: Callable[[ModelSpec, int], dict[str, tuple[int, ...]]]
    pieces: Pieces = dense_pieces
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    reads: bool = True


def format_of(model: str) -> HuggingFace | None:
    """What a model's file says of Hugging Face's format; None where it says nothing."""
    found = registry.described("model", model, "HUGGINGFACE")
    assert found is None or isinstance(found, HuggingFace)
    return found


def reader_of(config: Config) -> tuple[str, HuggingFace]:
    """The built-in model that reads a config.json, by `model_type`. Raises UserError for another one, with those that there are."""
    known: dict[str, tuple[str, HuggingFace]] = {}
    for name in registry.names("model"):
        if (format := format_of(name)) is not None and format.reads:
            known |= {kind: (name, format) for kind in format.types}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise UserError(f"model_type {kind!r}: no model here reads it", f"there are: {', '.join(sorted(known))}")
    return known[kind]


def decoder_fields(config: Config, options: DecoderOptions) -> dict[str, Any]:
    """The fields of `model` that all decoders have in config.json. `options`: their defaults. Raises UserError."""
    for key, computed in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0), ("quantization_config", None)):
        if config.get(key, computed) != computed:
            raise UserError(f"{key}: {config[key]!r} is not computed here", f"only {computed!r} is")
    width, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    base, scaling = _rotary(config)
    kv_heads, head_dim = (
        None if config.get(key) is None else need(config, key) for key in ("num_key_value_heads", "head_dim")
    )
    given = {
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_scaling": scaling,
    }
    return {
        "layers": need(config, "num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads or None,
        "context": need(config, "max_position_embeddings"),
        "hidden": need(config, "intermediate_size"),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "rope_base": base,
        "options": {name: value for name, value in given.items() if value != getattr(options, name)},
    }


def decoder_config(spec: ModelSpec, options: DecoderOptions) -> dict[str, Any]:
    """The keys of config.json that all decoders have."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    longest = spec.context
    if options.rope_scaling is not None:
        scaling = options.rope_scaling.model_dump(exclude_unset=True)
        if options.rope_scaling.rope_type == "dynamic":  # there max_position_embeddings is the context before scaling
            longest = scaling.pop("original_max_position_embeddings")
    return {
        "hidden_size": spec.width,
        "intermediate_size": spec.hidden or default_hidden(spec.width),
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads or spec.heads,
        "head_dim": options.head_dim or spec.width // spec.heads,
        "hidden_act": "silu",
        "max_position_embeddings": longest,
        "rms_norm_eps": options.rms_norm_eps,
        # transformers 5 reads rope_parameters, 4 reads rope_theta and rope_scaling.
        "rope_theta": spec.rope_base,
        **({} if options.rope_scaling is None else {"rope_scaling": scaling}),
        "rope_parameters": {**scaling, "rope_theta": spec.rope_base},
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": 0.0,
    }


def need(config: Config, key: str) -> int:
    """A whole number of a config.json. Raises UserError where it is missing, or something else."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{key}: is missing", _ITS_OWN)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{key}: {value!r} is not a whole number", _ITS_OWN)
    return value


_ITS_OWN = "take the config.json that belongs to the weights"


def _rotary(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary frequencies, as `transformers` 5 and 4 write them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"rope_parameters: {given!r} is no table of values", _ITS_OWN)
    rope = dict(given)
    base = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if not isinstance(base, (int, float)):
        raise UserError(f"rope_theta: {base!r} is not a number", _ITS_OWN)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("partial_rotary_factor: is not computed here", "only 1.0 is")
    if kind == "default":
        return float(base), None
    if kind == "dynamic" or (kind in ("llama3", "yarn") and "original_max_position_embeddings" not in rope):
        rope["original_max_position_embeddings"] = need(config, "max_position_embeddings")
    return float(base), {"rope_type": kind, **{key: value for key, value in rope.items() if value is not None}}
