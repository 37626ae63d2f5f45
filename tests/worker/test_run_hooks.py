"""Hooks of a job: when they are called, and that they change no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raydist.cluster.run.root_cause import _NEVER_HEALS
from raydist.data.prepare import prepare
from raydist.errors import HookFailed, SpecError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, parse
from raydist.spec.running import HookSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.distributed import Rank
from raydist.worker.hooks import HookFacts
from raydist.worker.loop import train
from raydist.worker.run_hooks import RunHooks
from tests.training import run

STEPS = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared corpus with held-out text."""
    root = tmp_path_factory.mktemp("text")
    for i in range(40):
        (root / f"{i:02}.txt").write_text(f"document {i}: " + "so it goes. " * (10 + i))
    prepare([str(root / "*.txt")], str(root / "tokens"), eval_fraction=0.2)
    return str(root / "tokens")


def trained(rank: Rank, dataset: str, root: str, strategy: str, hooks: Any) -> Any:
    """(losses, notes, status or the error's text) of a run with dropout."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8, "dropout": 0.1},
            "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2},
            "parallel": {"strategy": strategy},
            "checkpoint": {"every": 3, "asynchronous": False},
            "eval": {"every": 3, "batches": 1},
            "cluster": {"workers": 2},
            "hooks": hooks,
        }
    )
    records: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def push(steps: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        records.extend(steps)
        events.extend(told)

    channel = MonitorChannel(push, lambda: None) if rank.first else None
    try:
        ended = train(Job(spec, RunDir(f"{root}/run"), dataset), rank, channel).status
    except HookFailed as error:
        ended = str(error)
    notes = [event["text"] for event in events if event["kind"] == "note" and "hook" in event["text"]]
    return [(r["loss"], r["grad_norm"]) for r in records], notes, ended


def calls(folder: Path, rank: int) -> list[Any]:
    """What the recorder of that rank was called with."""
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


def test_they_are_called_and_change_no_number(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """On each rank that is asked for, in order; a hook that draws random numbers leaves the bits of the run, with dropout, and one
    whose errors are reported is noted once."""
    (plain, _, _), _ = run(ranks, trained, 2, dataset, str(tmp_path / "plain"), "ddp", [])
    recorder = {"name": "tests.ownhooks:Recorder", "options": {"folder": str(tmp_path)}, "ranks": "all"}
    hooks = [recorder, {"name": "tests.ownhooks:Raises", "on_error": "report"}]
    (losses, notes, status), _ = run(ranks, trained, 2, dataset, str(tmp_path / "hooked"), "ddp", hooks)
    assert (losses, status) == (plain, "finished")
    assert notes == [
        "hook tests.ownhooks:Raises.on_step: ValueError: no loss should be 1; the run continues, and further errors of this hook "
        "are not shown"
    ]
    first, second = calls(tmp_path, 0), calls(tmp_path, 1)
    assert first[:2] == second[:2] == [["made", 0, 2], ["start"]]
    assert [c[0] for c in first[2:]].count("start") == 0
    assert [c[1:] for c in first if c[0] == "step"] == [[i + 1, loss] for i, (loss, _) in enumerate(plain)]
    assert [c[1] for c in first if c[0] == "eval"] == [3, 6]
    assert [c[1] for c in first if c[0] == "checkpoint"] == [3, 6]
    assert first[-1] == ["end", "finished", STEPS]
    assert second == [c for c in first if c[0] != "checkpoint"]


@pytest.mark.parametrize(
    ("strategy", "hook", "what"),
    [
        ("ddp", "ChangesAndRaises", ""),
        ("zero3", "Changes", ""),
        ("ddp", "Evaluates", "the model's mode (train or eval)"),
    ],
)
def test_one_that_changes_the_model_ends_the_run(
    ranks: Any, dataset: str, tmp_path: Path, strategy: str, hook: str, what: str
) -> None:
    """On every rank alike, so that no comparison of replicas shows it; and although its errors are only to be reported."""
    hooks = [{"name": f"tests.ownhooks:{hook}", "ranks": "all", "on_error": "report"}]
    for _, _, ended in run(ranks, trained, 2, dataset, str(tmp_path), strategy, hooks):
        assert ended.startswith(f"hook tests.ownhooks:{hook}.on_eval has changed {what}")


@pytest.mark.parametrize(
    ("hook", "what"), [("LeavesGradient", "the gradient of weight"), ("Freezes", "whether weight is trained")]
)
def test_one_that_changes_the_next_step_ends_the_run(tmp_path: Path, hook: str, what: str) -> None:
    """The weights are the same, but the next backward pass would add to its gradient, or the optimizer leave a parameter out."""
    name, spec = f"tests.ownhooks:{hook}", parse({"data": {"source": "any"}, "train": {"steps": 1}})
    facts = HookFacts(RunDir(tmp_path / "run"), spec, {}, 0, 1, 1, 0, nn.Linear(1, 1))
    hooks = RunHooks([HookSpec(name=name, on_error="report")], lambda options: facts, True, print)
    with pytest.raises(HookFailed, match=f"^hook {name}.on_eval has changed {what}"):
        hooks.call("on_eval", 3, 1.0)


def test_an_error_ends_the_run(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """With the hook, the method and the error as its cause; hooks see it, and no restart is tried."""
    recorder = {"name": "tests.ownhooks:Recorder", "options": {"folder": str(tmp_path)}}
    hooks = ["tests.ownhooks:Raises", recorder]
    found = ranks.run(trained, 1, dataset, str(tmp_path), "ddp", hooks)[0]
    assert found[2].startswith("hook tests.ownhooks:Raises.on_step: ValueError: no loss should be 1")
    assert calls(tmp_path, 0)[-1][0] == "failure"
    assert "HookFailed" in _NEVER_HEALS


@pytest.mark.parametrize("on_error", ["stop", "report"])
def test_errors_of_raydist_in_a_hook_are_the_hook_s(ranks: Any, dataset: str, tmp_path: Path, on_error: str) -> None:
    """`on_error` decides about them, too; and an error of `on_failure` does not take the place of the first one."""
    hooks = [{"name": "tests.ownhooks:Refused", "on_error": on_error}]
    _, notes, ended = run(ranks, trained, 1, dataset, str(tmp_path), "ddp", hooks)[0]
    told = notes[0] if on_error == "report" else ended
    assert told.startswith("hook tests.ownhooks:Refused.on_eval: StorageError: the disk is full")
    assert (ended == "finished") == (on_error == "report")


def test_a_wrong_name_is_one_line() -> None:
    """Before anything starts."""
    tree = {"data": {"source": "any"}, "train": {"steps": 1}, "hooks": ["nowhere:Hook", {"name": "nohook"}]}
    with pytest.raises(SpecError) as caught:
        parse(tree)
    first, second = caught.value.message.splitlines()
    assert first.startswith('spec: hooks[0].name: unknown "nowhere:Hook": no module "nowhere"')
    assert second.startswith('spec: hooks[1].name: unknown "nohook"')


def test_own_code_is_found_everywhere(tmp_path: Path) -> None:
    """All kinds that a job names are shipped to a cluster, not only models."""
    tree = {
        "data": {"source": "any", "tokenizer": "tests.ownhooks:Tokenizer"},
        "train": {"steps": 1, "loss": "tests.ownhooks:build"},
        "hooks": ["tests.ownhooks:Raises"],
    }
    assert set(JobSpec.model_validate(tree).own_code()) == {
        "tests.ownhooks:Tokenizer", "tests.ownhooks:build", "tests.ownhooks:Raises",
    }  # fmt: skip
