"""A module on fake tensors, which reports where a pass is, and which gradients exist.

Runs in: the user's shell (`raydist plan`). Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raydist.planner.facts import ROOT, Model, Param
from raydist.planner.live import LiveBytes
from raydist.planner.target import OnTarget
from raydist.worker import model_transforms
from raydist.worker.parallel._model_graph import blocks_of

if TYPE_CHECKING:
    from raydist.spec.training import TrainSpec


class FakeModule:
    """A module on fake tensors, with hooks that report phases and gradients to a `LiveBytes`."""

    def __init__(self, module: nn.Module, whole: Mapping[str, torch.Size], replicas: Mapping[str, Fraction]) -> None:
        """`whole`: the shapes of its parameters before it was split; `replicas`: of experts, see `Param`."""
        self.module = module
        named = blocks_of(module)
        self.of_blocks = [block for _, block in named]
        self.blocks = len(self.of_blocks)
        self._units = {id(p): i for i, block in reversed(list(enumerate(self.of_blocks))) for p in block.parameters()}
        units = self._units
        self.within = {
            name: name.removeprefix(f"{named[unit][0]}.") if (unit := units.get(id(p), ROOT)) != ROOT else name
            for name, p in module.named_parameters()
        }
        """The name of each parameter within its block."""
        self.facts = Model(
            tuple(
                Param(
                    name,
                    tuple(p.shape),
                    p.requires_grad,
                    units.get(id(p), ROOT),
                    None if p.shape == whole[name] else tuple(whole[name]),
                    replicas.get(name),
                )
                for name, p in module.named_parameters()
            ),
            sum(b.untyped_storage().nbytes() for b in module.buffers()),
        )
        self._live: LiveBytes | None = None
        self._unit: dict[int, list[Tensor]] = {}
        self._hooked = False
        self.handed_on: int | None = None
        """Bytes of a block's output in the last pass, if that is one tensor."""

    def _hook(self) -> None:
        self._hooked = True
        for p in self.module.parameters():
            if p.requires_grad:
                unit = self._units.get(id(p), ROOT)
                self._unit.setdefault(unit, []).append(p)
                gradient = partial(self._has_gradient, unit)
                p.register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]
        for i, block in enumerate(self.of_blocks):
            block.register_forward_pre_hook(partial(self._entered, i))
            block.register_forward_hook(partial(self._left, i))

    def watch(self, live: LiveBytes, hold: bool) -> None:
        """Reports to `live`. `hold`: see `Pass`."""
        if not self._hooked:
            self._hook()
        self._live, self._hold = live, hold
        self._missing = {unit: len(members) for unit, members in self._unit.items()}

    def forget(self) -> None:
        """Reports to nothing: another stage may have the same weights."""
        self._live = None

    def _entered(self, number: int, block: nn.Module, args: object) -> None:
        if self._live is not None and self._live.phase != "backward":  # a model may recompute its blocks itself
            self._live.phase, self._live.block = "forward", number

    def _left(self, number: int, block: nn.Module, args: object, out: object) -> None:
        if self._live is None or self._live.phase == "backward":
            return
        self._live.phase = "loss"  # until the next block, if there is one
        self.handed_on = out.nbytes if isinstance(out, Tensor) else None
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._comes_back, number))  # type: ignore[no-untyped-call]

    def _comes_back(self, number: int, grad: Tensor) -> None:
        assert self._live is not None
        self._live.phase, self._live.block = "backward", number

    def _has_gradient(self, unit: int, parameter: Tensor) -> None:
        if self._live is None:
            return
        if not self._hold:
            parameter.grad = None  # accumulated into memory that is counted as gradients
            return
        assert parameter.grad is not None
        self._live.retag(parameter.grad, "whole")
        self._missing[unit] -= 1
        if not self._missing[unit]:
            for p in self._unit[unit]:
                p.grad = None

    @contextmanager
    def prepared(self, spec: TrainSpec, on_target: OnTarget) -> Iterator[None]:
        """`train.checkpoint_activations` on each block, as in the training loop; never compiled."""

        def within(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with on_target:
                return forward(*args, **kwargs)

        try:
            for block in self.of_blocks:
                # Recomputation runs within `backward`, where function modes are off, so the mode is entered again.
                block.forward = partial(within, block.forward)
            model_transforms.prepare(self.module, spec)
            yield
        finally:
            for block in self.of_blocks:
                block.__dict__.pop("forward", None)
