"""What a session is given, checked: its numbers as a job, and the parameters that its optimizer updates."""

from __future__ import annotations

import torch
from torch import nn

from raydist.errors import RaydistError, UserError
from raydist.spec import JobSpec, parse
from raydist.spec.script import SESSION


def job_of(name: str, steps: int, batch: int, every: int, clip: float, seed: int, timeout_s: float) -> JobSpec:
    """The session's arguments as a job, for what is stored and compared. Its model and data are the script's."""
    tree = {
        "name": name,
        "model": {"name": SESSION},
        "data": {"path": "own"},
        "train": {"steps": steps, "global_batch": batch, "micro_batch": batch, "seed": seed},
        "optim": {"name": "sgd", "lr": 1.0, "clip": clip},
        "checkpoint": {"every": every},
        "recovery": {"timeout_s": timeout_s},
    }
    try:
        return parse(tree, source="session")
    except RaydistError as error:
        raise UserError(error.message, error.hint) from error


def trained_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name."""
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
