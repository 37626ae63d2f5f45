"""Counts the bytes of live tensors while code runs, by purpose.

Runs in: the user's shell. Torch, never ray. Works with real and fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raydist.planner.facts import Phase
from raydist.worker.metrics.collective_counters import sent_by

Tag = Literal["whole", "activations", "loss"]
AFTER = -1


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages that operators allocate within its context, by tag, and the peak of each phase and block; and in `sent`
    the bytes that collectives send.

    `ignore`: tensors that are counted elsewhere. Temporary memory inside an operator is not seen.
    Tags: `loss` for tensors made in that phase, `whole` for casts of ignored tensors, `activations` for the rest.
    """

    def __init__(self, ignore: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ignored = {id(s): s for s in (t.untyped_storage() for t in ignore)}
        self._alive: dict[int, tuple[ReferenceType[Any], int, Tag]] = {}
        self.bytes: dict[Tag, int] = {"whole": 0, "activations": 0, "loss": 0}
        self.peaks: dict[tuple[Phase, int], dict[Tag, int]] = {}
        self.phase: Phase = "forward"
        self.block = 0
        self.operators: set[str] = set()
        self.sent: dict[int, float] = {}
        """By block; of what comes after the last one, at AFTER. What comes before the first one counts there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.operators.add(name)
        if func.namespace == "c10d":
            part = AFTER if self.phase == "loss" else self.block
            self.sent[part] = self.sent.get(part, 0.0) + sent_by(name, args)
        tag: Tag = "loss" if self.phase == "loss" else "activations"
        if func is torch.ops.aten._to_copy.default and self._is_ignored(args[0]):
            tag = "whole"  # a weight, cast by autocast
        for tensor in (made,) if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor, tag)
        return made

    def _is_ignored(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._ignored

    def _see(self, tensor: Tensor, tag: Tag) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._ignored:
            return
        self._alive[key] = (ref(storage, partial(self._gone, key)), storage.nbytes(), tag)
        self._add(tag, storage.nbytes())

    def _gone(self, key: int, dead: object) -> None:
        _, size, tag = self._alive.pop(key)
        self.bytes[tag] -= size

    def _add(self, tag: Tag, size: int) -> None:
        self.bytes[tag] += size
        worst = self.peaks.get((self.phase, self.block))
        if worst is None or sum(self.bytes.values()) > sum(worst.values()):
            self.peaks[self.phase, self.block] = dict(self.bytes)

    def retag(self, tensor: Tensor, tag: Tag) -> None:
        """Counts this tensor's storage, made by an operator, as `tag` from now on."""
        key = id(tensor.untyped_storage())
        if key in self._alive:
            alive, size, before = self._alive[key]
            self._alive[key] = (alive, size, tag)
            self.bytes[before] -= size
            self._add(tag, size)
