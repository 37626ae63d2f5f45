"""Faults in the model's numbers: bad or far too large ones in its passes, routers that prefer some experts, a bit that flips.

Runs in: a rank of a run with faults. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydist import faults, registry
from raydist.faults import Fault
from raydist.worker.faults import InjectedError
from raydist.worker.model._moe import Router, layers_of
from raydist.worker.parallel._model_graph import plain_name

_ABOVE_ANY_SCORE = 2.0


class Numbers:
    """At most one of these faults at a time, from `begin` to its last step."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._last = 0
        self._bias: Tensor | None = None
        """Of the router that runs now."""

    def attach(self, model: nn.Module, due: Sequence[Fault]) -> None:
        """Registers hooks, if any of the faults needs them."""
        if any(isinstance(fault, faults.BadNumber | faults.LossSpike) for fault in due):
            model.register_forward_hook(self._tamper)
        if any(isinstance(fault, faults.ExpertImbalance) for fault in due):
            for _, layer in layers_of(model):
                layer.router.register_forward_pre_hook(self._prefer)
                layer.router.register_forward_hook(self._restore)

    def begin(self, fault: Fault, last: int) -> None:
        """It lasts until this step, and replaces an earlier one."""
        self._fault, self._last = fault, last

    def step(self, number: int) -> None:
        """A step begins."""
        if number > self._last:
            self._fault = None

    def _tamper(self, module: nn.Module, arguments: Any, logits: Tensor) -> Tensor | None:
        """The model's forward hook."""
        if not module.training:
            return None
        match self._fault:
            case faults.LossSpike(factor=factor):
                return logits * factor
            case faults.BadNumber(where="loss", value=value):
                return logits * float(value)
            case faults.BadNumber(value=value):
                logits.register_hook(lambda gradient: gradient * float(value))  # type: ignore[no-untyped-call]
        return None

    def _prefer(self, router: Router, arguments: tuple[Tensor]) -> None:
        """A router's hook before its pass: a bias above any score, for the fault's tokens and experts."""
        self._bias = router.bias
        if router.training and isinstance(self._fault, faults.ExpertImbalance):
            (x_ND,) = arguments
            more_NE = torch.zeros(len(x_ND), len(router.weight), device=x_ND.device)
            more_NE[: round(self._fault.tokens * len(x_ND)), : self._fault.experts] = _ABOVE_ANY_SCORE
            router.bias = more_NE if self._bias is None else self._bias + more_NE  # type: ignore[assignment]

    def _restore(self, router: Router, arguments: Any, made: Any) -> None:
        """And after it."""
        router.bias = self._bias  # type: ignore[assignment]


def flip(model: nn.Module, parameter: str | None, bit: int) -> None:
    """Flips that bit in the first four bytes that this rank holds of a parameter; None: the first one."""
    named = {plain_name(name): p for name, p in model.named_parameters()}
    name = parameter or next(iter(named))
    if name not in named:
        raise InjectedError(
            f"flip_bit: parameter: {name!r} is not in the model; {registry.did_you_mean(name, list(named))}"
        )
    local = named[name].data  # autograd does not see this change, as it would not see one in faulty memory
    local = local.to_local() if hasattr(local, "to_local") else local
    with torch.no_grad():
        local.view(-1)[:1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
