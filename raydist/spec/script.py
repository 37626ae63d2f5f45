"""The job of a user's own script (raydist/own): what its session sets, and what the command line of `raydist run` sets.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydist import registry
from raydist.errors import SpecError
from raydist.spec.load import Overrides, merge, overriding, parse
from raydist.spec.models import JobSpec, flatten

SESSION = "raydist.own:session"
"""The model's name in such a job: model, data and optimizer are the script's."""
_OF_SESSION = ("model", "data", "train", "optim", "parallel", "precision")
_SETTABLE = {
    "cluster": frozenset(["workers", "spares", "cpus_per_worker", "gpus_per_worker", "env", "resources"]),
    "checkpoint": frozenset(
        ["keep", "asynchronous", "replicas", "verify_every", "max_failures", "timeout_s", "mtbf_h"]
    ),
    "recovery": frozenset(
        ["max_failures", "backoff_s", "backoff_cap_s", "snapshot_every", "step_timeout", "wait_for_nodes",
         "wait_for_spare_s", "head_timeout", "timeout_s"]
    ),
    "observe": frozenset(["interval_s", "memory_history", "exporters"]),
}  # fmt: skip
"""Section -> fields that `raydist run --set` may set."""
_IN_ITS_PLACE = {
    "optim.lr": "the optimizer's lr",
    "optim.clip": "the session's clip",
    "train.global_batch": "the session's batch",
    "train.micro_batch": "the session's micro_batch",
    "train.steps": "the session's steps",
    "checkpoint.every": "the session's every",
    "data.prefetch": "num_workers of its DataLoader",
    "parallel.strategy": "the session's strategy",
}
"""A job's fields -> what a script has in their place."""


def in_its_place(field: str) -> str:
    """What a script changes where a job has this field: its session's argument, or the field itself, which `--set` changes."""
    return _IN_ITS_PLACE.get(field, field)


def launched(name: str, options: Mapping[str, Any], overrides: Overrides, before: JobSpec | None) -> JobSpec:
    """The job with which `raydist run` starts a script, before the session adds its arguments (`joined`).

    `options`: fields of `cluster`, from the command's options. `overrides`: `--set`, which wins. `before`: the job of this run's
    last session, whose arguments are taken until this one's are known. Raises SpecError with all problems.
    """
    over = overriding(overrides)
    settable = [f"{section}.{each}" for section, fields in _SETTABLE.items() for each in sorted(fields)]
    if problems := [
        f"{over.origin[field]}: is not a field of a script's job; {registry.did_you_mean(field, settable)}"
        for field in flatten(over.tree)
        if ".".join(field.split(".")[:2]) not in settable
    ]:
        raise SpecError("\n".join(problems))
    tree = merge(
        {"cluster": dict(options), "recovery": {"on_oom": "stop"}}, over.tree
    )  # micro-batches are the script's
    if before is not None:
        known = {section: getattr(before, section).model_dump(mode="json") for section in _OF_SESSION}
    else:  # `epochs`: the number of steps is not known yet
        workers = tree["cluster"].get("workers", 1)
        most = workers[-1] if isinstance(workers, list) and workers else workers
        known = {
            "model": {"name": SESSION},
            "data": {"path": "own"},
            "train": {"epochs": 1, "global_batch": most, "micro_batch": 1},
            "optim": {"name": "sgd", "lr": 1.0},
        }
    return parse({**known, **tree, "name": name}, over.origin, "raydist run")


def joined(session: JobSpec, run: JobSpec) -> JobSpec:
    """The job of a session in a rank of `raydist run`: its arguments, with the run's name and the sections that `launched` sets."""
    checkpoint = run.checkpoint.model_copy(update={"every": session.checkpoint.every})
    sections = {"cluster": run.cluster, "recovery": run.recovery, "observe": run.observe}
    return session.model_copy(update={"name": run.name, "checkpoint": checkpoint, **sections})
