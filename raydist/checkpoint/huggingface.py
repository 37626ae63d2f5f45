"""The tensors in a folder of Hugging Face's format: where they are, and whether they are those of the model.

Runs in: the driver, before any worker starts, and in each rank, which opens the same files. Without torch: headers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.errors import UserError
from raydist.parsing import parse_json
from raydist.spec.huggingface import HuggingFace, Piece, format_of

if TYPE_CHECKING:
    from raydist.spec.training import ModelSpec

DTYPES = ("F32", "BF16", "F16")
"""The number formats that weights are read from, by safetensors' names."""
INDEX = "model.safetensors.index.json"
SCALE = "_scale"
"""What an int8 tensor's name is followed by in the name of its scales, one for each row."""
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file of the folder. `dtype`: safetensors' name."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def tensors_of(folder: Path) -> dict[str, FileTensor]:
    """The tensors of all files of the model. Raises UserError for missing and corrupt files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, FileTensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(folder / file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    part = opened.get_slice(name)
                    found[name] = FileTensor(file, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / file}: cannot be read: {error}", "download the file again") from error
    return found


def weight_files(folder: Path) -> list[str]:
    """The names of the files: those in the index if there is one, else the one file of the model."""
    index = folder / INDEX
    if not index.exists():
        if (folder / "model.safetensors").exists():
            return ["model.safetensors"]
        old = next(folder.glob("*.bin"), None)
        raise UserError(
            f"{folder}: has neither model.safetensors nor {INDEX}",
            f"{old.name} is pickle, which can run code: convert it to safetensors"
            if old
            else "give a folder with weights",
        )
    try:
        read = parse_json(index.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{index}: cannot be read: {error}", "download the file again") from error
    files = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index}: has no weight_map, from tensors to files", "download the file again")
    names = sorted(set(files.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
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
    folder: Path, spec: ModelSpec, format: HuggingFace, shapes: Mapping[str, tuple[int, ...]], *, int8: bool = False
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
            f"{folder}: the tensors are not those of model.name: {spec.name}:\n    "
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
