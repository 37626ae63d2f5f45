"""raydist.worker.checkpoint.numbers: with which spec a run may be resumed, and how another length changes its schedule."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from raydist.checkpoint.manifest import Manifest
from raydist.errors import SpecChanged
from raydist.spec import JobSpec
from raydist.worker.checkpoint.numbers import check, schedule_change
from raydist.worker.optim.schedule import lr_at


def job(**train: Any) -> JobSpec:
    optim = {"lr": 1e-3, "schedule": train.pop("schedule", {"name": "cosine", "warmup": 10})}
    return JobSpec.model_validate({"data": {"source": "any"}, "train": {"global_batch": 8, **train}, "optim": optim})


def saved(spec: JobSpec, step: int) -> Manifest:
    """A checkpoint of that job, after `step` steps."""
    return Manifest(step, 1, 1, 0.0, "", {}, {}, numbers=spec.numbers("f"))


def test_other_numbers_are_refused() -> None:
    """Refused with field, old and new value and remedy, unless it is allowed."""
    found, other = saved(job(steps=200), 20), job(steps=200, seed=3).numbers("f")
    assert check("r", found, job(steps=200).numbers("f"), 200) == []
    with pytest.raises(
        SpecChanged, match=r"run r has trained 20 steps .*\n    train.seed: was 0, is 3\n  restore the old"
    ) as caught:
        check("r", found, other, 200)
    assert "--allow-spec-change" in caught.value.hint
    assert caught.value.exit_code == 2
    assert check("r", found, other, 200, allow=True) == ["train.seed: was 0, is 3"]


@pytest.mark.parametrize("step", [20, 200])
def test_another_length_is_none_of_them(step: int) -> None:
    """More steps, fewer but enough, or epochs instead are accepted; together with another changed number they are refused."""
    found = saved(job(steps=200), step)
    assert check("r", found, job(steps=400).numbers("f"), 400) == ["train.steps: was 200, is 400"]
    assert check("r", found, job(epochs=2).numbers("f"), step) == [
        "train.epochs: was null, is 2.0",
        "train.steps: was 200, is null",
    ]
    with pytest.raises(
        SpecChanged, match=r"train.seed: was 0, is 3\n    train.steps: was 200, is 400\n  restore the old"
    ):
        check("r", found, job(steps=400, seed=3).numbers("f"), 400)


@pytest.mark.parametrize("allow", [False, True])
def test_fewer_steps_than_trained_are_refused(allow: bool) -> None:
    """The error has both numbers and the remedy, even with `allow`."""
    found = saved(job(steps=200), 150)
    with pytest.raises(
        SpecChanged, match=r"train.steps: was 200, is 100: run r has trained 150 .* sets 100 in"
    ) as told:
        check("r", found, job(steps=100).numbers("f"), 100, allow=allow)
    assert told.value.hint.startswith("set 150 steps or more")
    assert check("r", found, job(steps=150).numbers("f"), 150) == ["train.steps: was 200, is 150"]


def test_the_schedule_that_changes_is_told() -> None:
    """The message has the new last step, and the learning rates of the step before (old schedule) and after (new schedule)."""
    longer = job(steps=400)
    now = lr_at(201, 400, longer.optim.schedule, 1e-3)
    assert schedule_change(saved(job(steps=200), 200), longer, 400, 50) == (
        "train.steps: was 200, is 400: the run now ends at step 400 instead of 200, and its cosine schedule with it: "
        f"the learning rate goes from 0.0001 at step 200 to {now:.3g} at step 201"
    )
    was = lr_at(120, 200, longer.optim.schedule, 1e-3)
    told = schedule_change(saved(job(steps=200), 120), longer, 400, 50)
    assert told is not None
    assert f"from {was:.3g} at step 120" in told
    # 50 steps per epoch
    assert schedule_change(saved(job(epochs=4), 200), job(epochs=8), 400, 50) == (
        "train.epochs: was 4.0, is 8.0: the run now ends at step 400 instead of 200, and its cosine schedule with it: "
        f"the learning rate goes from 0.0001 at step 200 to {now:.3g} at step 201"
    )


def test_a_schedule_that_stays_is_told_as_such() -> None:
    """If the end does not affect the next step's learning rate the message says so; without another length there is no message."""
    constant = {"schedule": {"name": "constant", "warmup": 10}}
    assert schedule_change(saved(job(steps=200, **constant), 120), job(steps=400, **constant), 400, 50) == (
        "train.steps: was 200, is 400: the run now ends at step 400 instead of 200; "
        "the learning rate of step 121 is as planned: 0.001"
    )
    assert schedule_change(saved(job(steps=200), 120), job(steps=200), 200, 50) is None
    assert schedule_change(saved(job(steps=200), 120), job(steps=400, seed=3), 400, 50) is None
    ends = schedule_change(saved(job(steps=200), 120), job(steps=120), 120, 50)
    assert ends == "train.steps: was 200, is 120: the run now ends at step 120 instead of 200"


def test_needs_no_torch() -> None:
    """The driver imports it, too."""
    code = "import sys, raydist.worker.checkpoint.numbers; assert not {'torch', 'ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
