"""Fixtures that run the `raydist` command in a user's folder, and a check for processes that it leaves behind, as in
tests/end_to_end."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from raydist.faults import Fault
from tests.end_to_end.conftest import nothing_left, project
from tests.exact import exact

__all__ = ["exact", "nothing_left", "project", "undisturbed", "write"]

STEPS = 60
GPT = ["--set", "model.name=gpt", "--set", "recovery.max_failures=-1"]
LONG = [*GPT, "--set", f"train.steps={STEPS}", "--set", "checkpoint.keep=100", "--set", "train.virtual_ranks=4"]


@pytest.fixture(scope="session")
def undisturbed(project: Any) -> dict[str, Any]:
    """A run of STEPS steps on one rank without a fault: its records, weights and eval loss. By virtual ranks they are those of a
    run on two ranks, too."""
    shown = project.train("no-fault", *LONG, "--set", "cluster.workers=1", own_model=False)
    rows = exact(project.steps("no-fault"))
    assert len(rows) == STEPS
    return {"rows": rows, "weights": project.weights("no-fault", STEPS), "eval_loss": shown["eval_loss"]}


def write(project: Any, name: str, faults: list[Fault]) -> list[str]:
    """Writes the file of faults; returns the option that names it."""
    path = project.root / f"{name}.yaml"
    path.write_text(yaml.safe_dump([fault.model_dump(mode="json") for fault in faults]))
    return ["--faults", path.name]
