"""What a parameter of a sweep is called -> the field of the job that it is.

Runs anywhere.
"""

from __future__ import annotations

import difflib

from raydist.spec.models import JobSpec
from raydist.spec.validate import everywhere

SHORT = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "batch_size": "train.global_batch",
    "global_batch": "train.global_batch",
    "micro_batch": "train.micro_batch",
    "seed": "train.seed",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "weight_decay": "optim.weight_decay",
    "betas": "optim.betas",
    "momentum": "optim.momentum",
    "clip": "optim.clip",
    "optimizer": "optim.name",
    "scale_lr": "optim.scale_lr",
    "base_batch": "optim.base_batch",
    "schedule": "optim.schedule",
    "warmup": "optim.schedule.warmup",
    "width": "model.width",
    "layers": "model.layers",
    "heads": "model.heads",
    "context": "model.context",
    "dropout": "model.dropout",
    "strategy": "parallel.strategy",
    "workers": "cluster.workers",
}
"""Short name -> field. Any other field goes by its dotted name."""

_LABELS = {"optim.lr": "lr", "train.global_batch": "batch", "train.micro_batch": "micro", "optim.weight_decay": "wd",
           "optim.name": "optim", "optim.schedule": "schedule", "parallel.strategy": "", "precision": ""}  # fmt: skip
FREE = ("model.options.", "parallel.options.", "optim.options.", "train.loss.options.", "cluster.env.")
"""Sections whose fields are the user's own."""
OWN = ("name", "deepspeed")
"""A cell's name is its id; and a file that sets other fields is no value."""


def field(name: str) -> str | None:
    """The dotted field of a parameter's name; None if there is none."""
    if name in SHORT:
        return SHORT[name]
    known = name in everywhere(JobSpec) and name not in OWN
    return name if known or any(name.startswith(free) and name != free for free in FREE) else None


def remedy(name: str) -> str:
    """What to write instead of an unknown name."""
    fields = [f for f in everywhere(JobSpec) if "." in f]
    if of_section := [f for f in fields if f.rsplit(".", 1)[-1] == name]:
        return f'did you mean "{of_section[0]}"?'
    near = difflib.get_close_matches(name, [*SHORT, *fields], n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"short names: {', '.join(SHORT)}; or a field such as optim.eps"


def label(dotted: str) -> str:
    """A field in the id of a cell: as short as it can be understood."""
    return _LABELS.get(dotted, dotted.rsplit(".", 1)[-1])


def shortest(dotted: str) -> str:
    """A field as the heading of a column: its first short name, or itself."""
    return next((short for short, full in SHORT.items() if full == dotted), dotted)
