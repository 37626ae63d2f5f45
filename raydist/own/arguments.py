"""What a session is given, checked: its numbers as a job, and the parameters that its optimizer updates."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from raydist.errors import RaydistError, UserError
from raydist.extension_plans import strategies, strategy_plan
from raydist.spec import JobSpec, parse
from raydist.spec.script import SESSION
from raydist.worker.parallel import ParamShard

_BY_MATRIX = ("Adafactor", "Muon")
"""Optimizers of torch whose update of an element depends on others: rows of a parameter cannot be updated alone."""


def job_of(
    name: str, steps: int, batch: int, every: int, clip: float, seed: int, timeout_s: float, strategy: str
) -> JobSpec:
    """The session's arguments as a job, for what is stored and compared. Its model and data are the script's."""
    plan = strategy_plan(strategy)
    if plan is None or not plan.without_example:
        known = [s for s in strategies() if getattr(strategy_plan(s), "without_example", False)]
        raise UserError(f"strategy: {strategy!r} cannot be used in a session", f"give one of {', '.join(known)}")
    tree = {
        "name": name,
        "model": {"name": SESSION},
        "data": {"path": "own"},
        "train": {"steps": steps, "global_batch": batch, "micro_batch": batch, "seed": seed},
        "optim": {"name": "sgd", "lr": 1.0, "clip": clip},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every": every},
        "recovery": {"timeout_s": timeout_s},
    }
    try:
        return parse(tree, source="session")
    except RaydistError as error:
        raise UserError(error.message, error.hint) from error


def plain_module(model: Any) -> nn.Module:
    """The module whose names checkpoints have: the one that torch.compile has wrapped. Raises UserError for what is no module, and
    for other wrappers."""
    module = getattr(model, "_orig_mod", model)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model: {type(module).__name__} is not an nn.Module",
            "give one module; several that are trained together go in an nn.ModuleDict",
        )
    if isinstance(module, DistributedDataParallel | FSDPModule):
        raise UserError(
            f"model: it is distributed already: {type(module).__name__}",
            "give the model itself: the session distributes it",
        )
    return module


def trained_by(model: nn.Module, optimizer: Any) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name. Raises UserError for what the session cannot update with."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer",
            "give one optimizer, with a parameter group for each learning rate",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} computes the loss several times in a step, and the session's step has one",
            "use one whose step() needs no closure, such as AdamW",
        )
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if missing := [name for name, p in wanted.items() if id(p) not in given]:
        raise UserError(
            f"optimizer: it does not have {', '.join(missing[:5])}",
            "give it all parameters of the model, or set requires_grad=False for those that are not trained",
        )
    if len(given) > len(wanted):
        raise UserError(
            "optimizer: it has parameters that are not trained in this model", "give it the model's parameters"
        )
    return wanted


def splits_state(strategy: str) -> bool:
    """Whether a rank has only a part of the state under that strategy."""
    plan = strategy_plan(strategy)
    return plan is not None and bool(plan.sharded)


def check_splits(
    strategy: str, model: nn.Module, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Raises UserError where the strategy cannot split the state of the model's parameters over ranks. `model`: as it is called."""
    if not splits_state(strategy):
        return
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        raise UserError(
            f"model: it is compiled whole, and with strategy: {strategy} ranks send each other weights between its blocks",
            "compile what the blocks compute, block.forward = torch.compile(block.forward), or use strategy: ddp",
        )
    if type(optimizer).__name__ in _BY_MATRIX:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} does not update each element by itself, and strategy: {strategy} gives each "
            "rank some rows of a parameter",
            "use strategy: ddp, or an elementwise optimizer such as AdamW",
        )
    if optimizer.state:
        raise UserError(
            f"optimizer: it has state of steps before the session, which strategy: {strategy} would have to split",
            "give one that has made no step, or use strategy: ddp",
        )
    other = [
        f"{name} ({str(p.dtype).removeprefix('torch.')})" for name, p in trained.items() if p.dtype != torch.float32
    ]
    if other:
        raise UserError(
            f"model: strategy: {strategy} trains parameters in float32, not {', '.join(other[:5])}",
            "call model.float(), and torch.autocast around forward for another format of the compute; or use strategy: ddp",
        )


def give_shards(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], shards: Mapping[str, ParamShard]
) -> None:
    """The optimizer updates this rank's shards from now on, in the groups of their parameters."""
    own = {id(p): shards[name].local for name, p in trained.items()}
    for group in optimizer.param_groups:
        group["params"] = [own[id(p)] for p in group["params"]]
