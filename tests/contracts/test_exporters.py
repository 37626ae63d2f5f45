"""Every exporter, by name: a whole run through the monitor, and the same run resumed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist import registry
from raydist.errors import SpecError
from raydist.observe.exporters import BaseExporter, resolve
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import read_events
from raydist.spec import parse

NAMES = registry.names("exporter")
HISTOGRAM = {"edges": [-1.0, 0.0, 2.0], "counts": [3, 4], "sum": 1.0, "sum_squares": 2.0}
EVENTS = [
    Event("capacity", 5.0, {"flops_per_token": 1e6, "peak_flops": 1e12}),
    Event("eval", 5.0, {"step": 2, "loss": 2.5, "tokens": 64, "best": True}),
    Event("histograms", 5.0, {"step": 2, "weights": {"head.weight": HISTOGRAM}, "gradients": {"head.weight": HISTOGRAM}}),
    Event("failure", 5.0, {"attempt": 1, "rank": 0, "cause": "Died: x", "fault": "worker_died", "traceback": "", "echoes": 1}),
    Event("something_of_later", 5.0, {"step": None}),
]  # fmt: skip
SAMPLES: list[dict[str, Any]] = [
    {"kind": "rank", "rank": 0, "attempt": 1, "rss_bytes": 10, "forward_seconds": 1.5, "all_reduce_bytes": 7},
    {"kind": "node", "host": "h", "cpu_util": 0.5},
    {"kind": "gpu", "gpu": 0, "gpu_util": 0.5},
]

_OPTIONS = {"wandb": {"mode": "offline"}}


@pytest.fixture
def options(request: pytest.FixtureRequest) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The options that an exporter needs in this test, by its name."""

    def of(name: str) -> dict[str, Any]:
        return {"uri": request.getfixturevalue("mlflow_server")} if name == "mlflow" else _OPTIONS.get(name, {})

    yield of
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # ends the process that wandb starts


def row(step: int, attempt: int) -> dict[str, Any]:
    loss = float("nan") if step == 3 else 1 / step  # of a skipped step
    return StepRecord(step, loss, 1e-3, 0.5, 0 if step == 3 else 100, 0.1, 0.01, 2, attempt, "0").to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_gone_on_with(tmp_path: Path, options: Callable[[str], dict[str, Any]], name: str) -> None:
    """Two drivers, two attempts each, with every kind of data: the exporter accepts it without a note about an error."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"name: a-run\n")
    chosen = resolve([{"name": name, "options": options(name)}], run)
    for first in (1, 3):
        watch = RunMonitor(
            run.uri, interval_s=60.0, exporters=chosen, spec={"train": {"steps": 9}, "optim": {"lr": None}}
        )
        for attempt in (first, first + 1):
            watch.begin_attempt(attempt, 2, 2)
            watch.push([row(step, attempt) for step in range(3, 6)], [event.to_dict() for event in EVENTS])
            watch.observe([{**sample, "node": "10.0.0.1", "at": 5.0} for sample in SAMPLES])
        watch.end("finished")
    complaints = [
        text for e in read_events(run) if e.kind == "note" and (text := e.data["text"]).startswith("exporter")
    ]
    assert complaints == []


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name: str) -> None:
    """In the job, before anything starts; the error has the option's place."""
    job = {"data": {"source": "any"}, "train": {"steps": 1}}
    with pytest.raises(SpecError, match=r"observe\.exporters\[0\]\.options\.prot: unknown"):
        parse({**job, "observe": {"exporters": [{"name": name, "options": {"prot": 1}}]}})


@pytest.mark.parametrize("name", NAMES)
def test_has_the_contract_s_methods(name: str) -> None:
    """Each overrides at least one of the monitor's callbacks."""
    made = registry.load("exporter", name)
    assert issubclass(made, BaseExporter)
    overridden = set(vars(made)) & {"attempt", "steps", "event", "samples"}
    assert overridden


def test_none_loads_torch() -> None:
    """The monitor stays a light process, for any choice of exporters."""
    script = (
        "import sys; from raydist import registry\n"
        f"for name in {NAMES!r}: registry.load('exporter', name)\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'tensorflow', 'pandas', 'ray', 'mlflow', 'wandb'}))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
