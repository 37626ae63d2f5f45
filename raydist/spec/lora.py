"""Which linear layers get an adapter: the names in `model.lora.targets`.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from raydist.errors import UserError
from raydist.registry import did_you_mean


def chosen(names: Iterable[str], targets: Sequence[str] | None) -> list[str]:
    """Of these layers those that a target names: by its whole name or the end of it, with * for any text; None: all.

    Raises UserError for a target that names none.
    """
    every = list(names)
    if targets is None:
        return every
    found = {target: [n for n in every if _matches(n, target)] for target in targets}
    for target, layers in found.items():
        if not layers:
            ends = sorted({".".join(n.split(".")[2:]) if n.startswith("blocks.") else n for n in every})
            raise UserError(f"model.lora.targets: no linear layer is named {target!r}", did_you_mean(target, ends))
    return [n for n in every if any(n in layers for layers in found.values())]


def _matches(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def linear_names(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The layers of blocks that have a matrix, from the shapes of a model's parameters."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2 and ".router" not in name
    ]
