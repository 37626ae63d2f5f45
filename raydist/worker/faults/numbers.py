"""Faults in the model's numbers: bad or far too large ones in its passes and updates, routers that prefer some experts, a bit that
flips.

Runs in: a rank of a run with faults. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raydist import faults, registry
from raydist.faults import Fault
from raydist.worker.faults import InjectedError
from raydist.worker.model._moe import Router, layers_of
from raydist.worker.parallel._model_graph import plain_name

_ABOVE_ANY_SCORE = 2.0
T = TypeVar("T")


class Numbers:
    """At most one of these faults at a time, from `begin` to its last step."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._last = 0
        self._bias: Tensor | None = None
        """Of the router that runs now."""
        self._scales: RemovableHandle | None = None
        self._rates: list[float] = []
        """The optimizer's own, in its update."""

    def attach(self, model: nn.Module, due: Sequence[Fault]) -> None:
        """Registers hooks, if any of the faults needs them."""
        if any(isinstance(fault, faults.BadNumber | faults.LossSpike) for fault in due):
            model.register_forward_hook(self._tamper)
        if any(isinstance(fault, faults.ExpertImbalance) for fault in due):
            for _, layer in layers_of(model):
                layer.router.register_forward_pre_hook(self._prefer)
                layer.router.register_forward_hook(self._restore)
        for fault in due:
            if isinstance(fault, faults.ScaleGradient):
                chosen = _named(model, fault)
                each = (
                    (m, leaf) for m in model.modules() for leaf, p in m.named_parameters(recurse=False) if p is chosen
                )
                owner, name = next(each)
                owner.register_forward_pre_hook(partial(self._scale, fault, name))
            if isinstance(fault, faults.ScaleActivations):  # before hooks that read the output
                _layer(model, fault).register_forward_hook(partial(self._multiply, fault), prepend=True)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, due: Sequence[Fault]) -> None:
        """As `attach`."""
        if any(isinstance(fault, faults.LearningRate) for fault in due):
            optimizer.register_step_pre_hook(self._raise_rates)
            optimizer.register_step_post_hook(self._restore_rates)

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

    def _scale(self, fault: faults.ScaleGradient, leaf: str, module: nn.Module, arguments: Any) -> None:
        """Before a pass of the module: the parameter that this pass uses, which under zero3 is another one than between passes."""
        parameter = getattr(module, leaf)
        if self._scales is not None:
            self._scales.remove()
        self._scales = None
        if self._fault is fault and parameter.requires_grad:
            self._scales = parameter.register_hook(lambda gradient: gradient * fault.factor)

    def _multiply(self, fault: faults.ScaleActivations, module: nn.Module, arguments: Any, output: Any) -> Any:
        """After a pass of a layer."""
        return output * fault.factor if self._fault is fault and module.training else None

    def _raise_rates(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Before an update."""
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if isinstance(self._fault, faults.LearningRate):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._fault.factor

    def _restore_rates(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """And after it."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def flip(model: nn.Module, fault: faults.FlipBit) -> None:
    """Flips that bit in the first four bytes that this rank holds of a parameter."""
    local = _named(model, fault).data  # autograd does not see this change, as it would not see one in faulty memory
    local = local.to_local() if hasattr(local, "to_local") else local
    with torch.no_grad():
        local.view(-1)[:1].view(torch.uint8)[fault.bit // 8] ^= 1 << fault.bit % 8


def _named(model: nn.Module, fault: faults.FlipBit | faults.ScaleGradient) -> nn.Parameter:
    """The fault's parameter, or the first one. Raises InjectedError."""
    return _found(fault, "parameter", fault.parameter, dict(model.named_parameters()))


def _layer(model: nn.Module, fault: faults.ScaleActivations) -> nn.Module:
    """The fault's layer, or that of the first parameter. Raises InjectedError."""
    of_parameters = {name: m for name, m in model.named_modules() if [*m.parameters(recurse=False)]}
    return _found(fault, "layer", fault.layer, of_parameters)


def _found(fault: Fault, field: str, asked: str | None, named: Mapping[str, T]) -> T:
    plain = {plain_name(name): one for name, one in named.items()}
    name = asked or next(iter(plain))
    if name not in plain:
        remedy = registry.did_you_mean(name, list(plain))
        raise InjectedError(f"{fault.fault}: {field}: {name!r} is not in the model; {remedy}")
    return plain[name]
