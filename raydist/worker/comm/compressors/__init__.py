"""The compressors, which send a sum of gradients in fewer bytes: one file each, found by the name in `comm.compress`.

Runs in: each train worker. Torch, never ray. This docstring is their contract.

A compressor is a file here, or your own `package.module:attribute`, and has a class `Compressor(options)`, where `options` is
`comm.options` of the job. It is a subclass of one of two:

- `Rows` encodes rows of numbers into rows of bytes, and back. raydist does the rest: each rank encodes one row for every rank and
  sends it; the receiver decodes what all ranks sent, adds it up in fp32 in the order of the ranks, and for an all-reduce encodes
  the sum, which all ranks gather. For an all-reduce of two ranks each encodes one row with all of its numbers, and adds up both.
- `Sums` computes the sum itself, with all-reduces of smaller arrays, as PowerSGD does with factors of matrices.

Both say what they lose, and raydist adds that to the next gradient (error feedback). What a compressor is given is the contribution
of this rank to the gradient of a full global batch's mean loss, without a loss scale. It may have numbers that are not finite: what
is decoded must then not be finite either, for that is how an overflow is found.

`encode` and `decode` are called in several threads at a time. Two calls with the same numbers have the same bits.

Optional, at the top level of the file, and free of torch (see raydist/registry.py, `described`):

- `PLAN: CompressorPlan` (raydist/extension_plans.py): whether errors are fed back by default, and the bits of a number sent.
- `Options`: a pydantic model that `comm.options` is checked against.
- `check_spec(spec: CommSpec)`: raises `raydist.spec.parts.problem(...)` for values that do not go together.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydist import registry
from raydist.errors import UserError


class Rows(ABC):
    """Encodes each row by itself. Shapes: R rows of S numbers, in fp32; of B bytes, encoded."""

    align = 1
    """Rows have a multiple of so many numbers: zeros are appended."""

    @abstractmethod
    def row_bytes(self, size: int) -> int:
        """B for rows of `size` numbers: the same on all ranks."""

    @abstractmethod
    def encode(self, values_RS: Tensor, into_RB: Tensor) -> None:
        """Writes the encoded rows (uint8) into `into_RB`. `values_RS` becomes what was lost: itself less what `decode` gives."""

    @abstractmethod
    def decode(self, encoded_RB: Tensor, into_RS: Tensor) -> None:
        """The numbers of encoded rows."""

    def add(self, encoded_RB: Tensor, total_S: Tensor) -> None:
        """Adds the decoded rows to `total_S`, one after another."""
        row = scratch(total_S[None])
        for encoded_B in encoded_RB:
            self.decode(encoded_B[None], row)
            total_S.add_(row[0])


@dataclass(frozen=True, slots=True)
class Matrix:
    """A gradient as a matrix [r, c], part after part: `values` are [P, r/P, c]. Or several, see `sides`: [P, E/P, r, c].

    `values`: this rank's contribution. `result`: where the sum goes. What only fills up the last parts is zeros.
    """

    name: str
    values: Tensor
    result: Tensor


class Sums(ABC):
    """Computes the sum of gradients over the ranks by itself."""

    def refuse(self, shapes: Mapping[str, Sequence[int]]) -> None:  # noqa: B027
        """Raises UserError if it can compress none of these parameters. With `PLAN.checks_shapes`, also before workers start."""

    @abstractmethod
    def state(self, name: str, count: int, rows: int, columns: int) -> Tensor | None:
        """What it keeps of a matrix, or of `count` of them, between steps, equal on all ranks, at the start; None: nothing."""

    @abstractmethod
    def reduce(
        self,
        matrices: Sequence[Matrix],
        rest: Sequence[tuple[Tensor, Tensor]],
        state: Mapping[str, Tensor],
        add_up: Callable[[Tensor], None],
    ) -> dict[str, Tensor]:
        """Writes the sum of all ranks' `values` into each `result`, and what was lost of this rank's into `values`.

        `rest`: (values, result) of the other gradients. `state`: by the matrix' name, not to be changed; returns the new one.
        `add_up` replaces a contiguous tensor by its sum over the ranks. All ranks call it with the same shapes in the same order.
        """


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffer = torch.empty(0)


_scratch = _Scratch()


def scratch(like: Tensor) -> Tensor:
    """A buffer of the shape of `like`, in fp32, for temporary numbers: on CPU this thread's next call gives the same memory."""
    if like.is_cuda:  # one thread launches on several streams; the allocator knows which stream a block belongs to
        return torch.empty(like.shape, device=like.device)
    if _scratch.buffer.numel() < like.numel() or _scratch.buffer.device != like.device:
        _scratch.buffer = torch.empty(like.numel(), device=like.device)
    return _scratch.buffer[: like.numel()].view(like.shape)


def refuse(compressor: Rows | Sums, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises UserError if there are parameters, and it can compress none of them."""
    if isinstance(compressor, Sums) and shapes:
        compressor.refuse(shapes)


def build(name: str, options: Mapping[str, Any]) -> Rows | Sums:
    """The compressor of this name. Raises ExtensionNotFound; UserError if it is not a subclass of `Rows` or `Sums`."""
    made = registry.load("compressor", name)(options)
    if not isinstance(made, Rows | Sums):
        raise UserError(
            f"comm.compress: {name}: {type(made).__name__} is a subclass of neither Rows nor Sums",
            "derive it from one of them (raydist/worker/comm/compressors/__init__.py has the contract)",
        )
    return made
