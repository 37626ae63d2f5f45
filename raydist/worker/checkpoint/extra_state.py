"""State that is neither the model's nor the optimizer's, and belongs into checkpoints: error feedback, router bias, outer momentum.

Runs in: each train worker. Torch, never ray.

    extra/<name>/<tensor>                 replicated over the ranks, or a DTensor
    rank/<rank>/extra/<name>/<tensor>     `per_rank`: every rank has its own
    plain["extra"][<name>]                plain values

Restored:
    same mesh             all of it, bit for bit
    other mesh            DTensors are redistributed, replicated tensors are loaded; state with `per_rank` is joined, if it says how
                          (`Joins`), else starts anew, with a note; so on the same mesh, if ranks have tensors of other names
                          or shapes
    not in the checkpoint, or with other tensors: starts anew, with a note
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

EXTRA = "extra"


class ExtraState(Protocol):
    """What `CheckpointManager.register` takes. All ranks register the same names before `resume`."""

    per_rank: bool
    """Whether plain tensors are this rank's own; else they are equal on all ranks. DTensors are always parts of one tensor."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """The state as it is now. None of these tensors may change before the next update: copies of what a forward or a backward
        pass changes. A load writes into them."""

    def state_values(self) -> Mapping[str, Any]:
        """JSON values, equal on all ranks; {} without any."""

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Takes what was loaded into the tensors of `state_tensors`, and the saved values. Not called if the state starts anew."""


@runtime_checkable
class Joins(Protocol):
    """An `ExtraState` with `per_rank` that another mesh takes up, too: it adds up what the ranks had."""

    def sources(
        self, own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Sequence[str]] | None:
        """Of each of this rank's tensors, `own`, the names of those that it takes up, of those that ranks have `saved` with these
        shapes; without any it stays as it is. None: it cannot take them up, and starts anew."""

    def join(self, name: str, total: Tensor, source: str, of_rank: Tensor, first: bool) -> None:
        """Takes an old rank's tensor `source` into `total`, this rank's `name`, which is zeros at the `first` of these calls.

        Called for each rank that saved one, in their order, and each source of it.
        """


def tensor_name(name: str, tensor: str) -> str:
    """The name of a tensor of the extra state `name`."""
    return f"{EXTRA}/{name}/{tensor}"


def owner(name: str) -> str | None:
    """The extra state that a tensor of this name belongs to; None for any other tensor."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == EXTRA else None
