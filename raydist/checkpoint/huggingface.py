"""The tensors in a folder of Hugging Face's format, local or on an object store: where they are, and whether they are the model's.

Runs in: the driver, before any worker starts, and in each rank, which opens the same files. Without torch: headers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.errors import UserError
from raydist.parsing import DAMAGED, parse_json
from raydist.spec.huggingface import HuggingFace, Piece, format_of, reading
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.spec.training import ModelSpec

DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""The number formats that weights are read from, by safetensors' names, and the bytes of a number."""
INDEX = "model.safetensors.index.json"
SCALE = "_scale"
"""What an int8 tensor's name is followed by in the name of its scales, one for each row."""
_SHOWN = 8
_HEADER = 100_000_000
"""Bytes of a file's header at most, as safetensors limits it."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file of the folder. `dtype`: safetensors' name. `start`: where its bytes begin, in a file of an object store
    alone: safetensors opens local ones."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0


def tensors_of(folder: Storage) -> dict[str, FileTensor]:
    """The tensors of all files of the model. Raises UserError for missing and corrupt files, StorageError of an object store."""
    found: dict[str, FileTensor] = {}
    for file in weight_files(folder):
        with reading(folder, file, "download the file again"):
            found |= _header(folder, file) if folder.local is None else _local_header(folder.local, file)
    return found


def _local_header(folder: Path, file: str) -> dict[str, FileTensor]:
    """Raises OSError, and ValueError for a corrupt file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, FileTensor] = {}
    try:
        with safe_open(folder / file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                part = opened.get_slice(name)
                found[name] = FileTensor(file, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return found


def _header(folder: Storage, file: str) -> dict[str, FileTensor]:
    """The same, read as ranges of an object: 8 bytes with the length of the header, and the header in JSON."""
    with folder.open(file) as stream:
        size = stream.size()
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_HEADER, size - 8):
            raise ValueError(f"its header has {length} bytes, the file {size}")
        raw = stream.read(length)
    found: dict[str, FileTensor] = {}
    try:
        for name, entry in parse_json(raw).items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            tensor = FileTensor(file, tuple(entry["shape"]), str(entry["dtype"]), 8 + length + start)
            whole = all(type(n) is int and n >= 0 for n in (*tensor.shape, start, stop))
            if not whole or not start <= stop <= size - 8 - length:
                raise ValueError(f"{name}: its bytes {start} to {stop} are not all in the file")
            if tensor.dtype in DTYPES and stop - start != math.prod(tensor.shape) * DTYPES[tensor.dtype]:
                raise ValueError(f"{name}: {stop - start} bytes are no {tensor.dtype} of the shape {entry['shape']}")
            found[name] = tensor
    except DAMAGED as error:
        raise ValueError(f"its header is damaged: {error}") from None
    return found


def weight_files(folder: Storage) -> list[str]:
    """The names of the files: those in the index if there is one, else the one file of the model."""
    there = folder.files() if folder.is_folder() else {}
    if INDEX not in there:
        if "model.safetensors" in there:
            return ["model.safetensors"]
        old = next((name for name in there if name.endswith(".bin")), None)
        raise UserError(
            f"{folder.uri}: has neither model.safetensors nor {INDEX}",
            f"{old} is pickle, which can run code: convert it to safetensors" if old else "give a folder with weights",
        )
    index = f"{folder.uri}/{INDEX}"
    with reading(folder, INDEX, "download the file again"):
        read = parse_json(folder.read(INDEX))
    files = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index}: has no weight_map, from tensors to files", "download the file again")
    names = sorted(set(files.values()))
    for name in names:
        if name not in there:
            raise UserError(f"{index}: names the file {name}, which is not there", "download it")
    return names


def format_for(spec: ModelSpec) -> HuggingFace:
    """The format of the model of a job with `hf`. Raises UserError for a model that does not say how it is written."""
    found = format_of(spec.name)
    if found is None:
        raise UserError(
            f"model.hf: {spec.name} does not say how it is written in Hugging Face's format", "leave hf out"
        )
    return found


def check(
    folder: Storage, spec: ModelSpec, format: HuggingFace, shapes: Mapping[str, tuple[int, ...]], *, int8: bool = False
) -> dict[str, FileTensor]:
    """The tensors in the folder. Raises UserError for missing tensors, for others than the model needs, and for wrong shapes.

    `shapes`: those of the model's parameters, by our names. `int8`: a matrix may be int8, with scales beside it.
    """
    found, problems = tensors_of(folder), list[str]()
    ignored = [pattern.format(layers=spec.layers) for pattern in format.ignored]
    left = {name for name in found if not any(fnmatchcase(name, pattern) for pattern in ignored)}
    if spec.tie_embeddings:
        left -= {piece.name for piece in format.pieces("head.weight", ())}
    for parameter, shape in shapes.items():
        for piece in format.pieces(parameter, shape):
            left.discard(piece.name)
            tensor, wanted = found.get(piece.name), part_shape(piece, shape)
            if tensor is None:
                problems.append(f"{piece.name}: is missing")
            elif tensor.shape != wanted:
                problems.append(
                    f"{piece.name}: {list(tensor.shape)} in {tensor.file}, {list(wanted)} by the job's model"
                )
            elif int8 and tensor.dtype == "I8" and (scale := found.get(piece.name + SCALE)) is not None:
                left.discard(piece.name + SCALE)
                if scale.shape != (wanted[0], 1):
                    problems.append(f"{piece.name}{SCALE}: {list(scale.shape)} in {scale.file}, not {[wanted[0], 1]}")
            elif tensor.dtype not in DTYPES:
                problems.append(f"{piece.name}: {tensor.dtype} in {tensor.file}, not one of {', '.join(DTYPES)}")
    problems += [f"{name}: the model has no such tensor" for name in sorted(left)]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise UserError(
            f"{folder.uri}: the tensors are not those of model.name: {spec.name}:\n    "
            + "\n    ".join(problems[:_SHOWN] + more),
            "take config.json and tensors of one model, and leave out the fields of `model` that change its shapes",
        )
    return found


def part_shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a piece of a parameter of this shape, as it is in the file."""
    return tuple(stop - start for start, stop, kept in _spans(piece, shape) if kept)


def overlap(
    piece: Piece, shape: tuple[int, ...], offset: Sequence[int], size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[int | slice, ...]] | None:
    """What a piece has of the part [offset, offset + size) of a parameter: (slices of the file's tensor, place in the part).

    None where they have nothing in common.
    """
    of_file: list[slice] = []
    of_part: list[int | slice] = []
    for (start, stop, kept), first, length in zip(_spans(piece, shape), offset, size, strict=True):
        low, high = max(start, first), min(stop, first + length)
        if low >= high:
            return None
        of_part.append(slice(low - first, high - first) if kept else low - first)
        if kept:
            of_file.append(slice(low - start, high - start))
    return tuple(of_file), tuple(of_part)


def _spans(piece: Piece, shape: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """For each dimension of the parameter [start, stop) of the piece, and whether the file's tensor has that dimension."""
    every = (*piece.at, *[slice(None)] * (len(shape) - len(piece.at)))
    return [
        (index, index + 1, False) if isinstance(index, int) else (*index.indices(length)[:2], True)
        for index, length in zip(every, shape, strict=True)
    ]
