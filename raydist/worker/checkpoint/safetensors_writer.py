"""Writes tensors as safetensors files of a given size, one tensor in memory at a time.

Runs in: commands that export weights. Torch, never ray.

safetensors' own `save_file` needs all tensors of a file in memory, and copies them. A file is 8 bytes with the length of the
header, the header (JSON: names, dtypes, shapes, positions), and the values in row-major order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from raydist.checkpoint.huggingface import INDEX

NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL", torch.float64: "F64", torch.int16: "I16",
}  # fmt: skip
"""Format -> safetensors' name."""
ALIGN = 8


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of a file. `read` gives its values, with this shape and dtype; it is called once."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_files(outputs: Sequence[Output], folder: Path, most: int, metadata: Mapping[str, str]) -> None:
    """model.safetensors, or if the tensors have more than `most` bytes model-00001-of-0000N.safetensors and so on, with an index.

    A tensor is not split: a file is larger than `most` if a single tensor is. `metadata`: of each file.
    """
    files = _files(outputs, most)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        _write(folder / name, tensors, metadata)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(o.nbytes for o in outputs)},
            "weight_map": {o.name: name for name, tensors in zip(names, files, strict=True) for o in tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(outputs: Sequence[Output], most: int) -> list[list[Output]]:
    files: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if files[-1] and size + output.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(output)
        size += output.nbytes
    return files


def _write(file: Path, outputs: Sequence[Output], metadata: Mapping[str, str]) -> None:
    # The widest formats first, so that each tensor starts at a multiple of its element.
    ordered = sorted(outputs, key=lambda o: -o.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for output in ordered:
        end = position + output.nbytes
        header[output.name] = {"dtype": NAMES[output.dtype], "shape": output.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    with file.open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little"))
        sink.write(text)
        for output in ordered:
            values = output.read().contiguous()
            assert (tuple(values.shape), values.dtype) == (output.shape, output.dtype), output.name
            sink.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
