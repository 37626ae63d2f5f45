"""`raydist runs` and `raydist show`: their output on stdout is an interface."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import runs
from raydist.errors import RunNotFound
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.report import summary
from raydist.run.directory import SPEC, RunDir
from raydist.storage import Storage

KEYS = [
    "run", "path", "status", "steps", "loss", "eval_loss", "tokens_per_second", "attempts", "checkpoints", "faults",
    "workers",
]  # fmt: skip


def call(*arguments: str) -> str:
    """Stdout of the command; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(runs.runs)
    app.command()(runs.show)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run of 3 steps; the gradient norm of the second is infinite, the last one has a noise scale."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"name: a-run\n")
    watch = RunMonitor(run.uri, interval_s=60.0)
    watch.begin_attempt(1, 2, 0)
    known = ((0.5, None), (math.inf, None), (0.25, 41.5))
    watch.push(
        [
            StepRecord(s, 1 / s, 1e-3, norm, 100, 0.1, 0.0, 2, 1, f"{s:016x}", scale).to_dict()
            for s, (norm, scale) in enumerate(known, 1)
        ],
        [],
    )
    watch.push([], [Event("eval", time.time(), {"step": 3, "loss": 2.5, "tokens": 64}).to_dict()])
    watch.end("finished")
    return run


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_show_json_is_one_object(run: RunDir) -> None:
    """On one line, with exactly the documented keys in their order: by path, by name and --storage, by a file URI."""
    by_path = call("show", run.uri, "--json")
    assert by_path.count("\n") == 1
    told = strict(by_path)
    assert list(told) == KEYS
    assert told == summary.show(run)
    assert (told["status"], told["steps"], told["loss"], told["eval_loss"]) == ("finished", 3, 1 / 3, 2.5)
    assert call("show", "a-run", "--storage", str(Path(run.uri).parent), "--json") == by_path
    assert call("show", f"file://{run.uri}", "--json") == by_path


def test_show_steps_json_is_an_object_a_line(run: RunDir) -> None:
    """With the fields of StepRecord in their order, exact floats, and null for values that JSON does not have."""
    rows = [strict(line) for line in call("show", run.uri, "--steps", "--json").splitlines()]
    assert [list(row) for row in rows] == [[f.name for f in dataclasses.fields(StepRecord)]] * 3
    assert [row["loss"] for row in rows] == [1.0, 0.5, 1 / 3]
    assert [row["grad_norm"] for row in rows] == [0.5, None, 0.25]
    assert [row["grad_noise_scale"] for row in rows] == [None, None, 41.5]


def test_runs_json_is_a_list(run: RunDir) -> None:
    """One object per run; for an empty storage an empty list."""
    listed = strict(call("runs", "--storage", str(Path(run.uri).parent), "--json"))
    assert [(one["run"], one["status"], one["steps"], one["path"]) for one in listed] == [
        ("a-run", "finished", 3, run.uri)
    ]
    assert call("runs", "--storage", f"{run.uri}/nothing", "--json") == "[]\n"


def test_runs_on_an_object_store(run: RunDir, s3: Any) -> None:
    """The same rows in the same order, from several requests at once; what is no run is left out."""
    stored = Storage(s3.uri("listed"))
    for name in (f"r{number:02d}" for number in range(40)):
        stored.write(f"{name}/{SPEC}", b"name: r\n")
        stored.write(f"{name}/state.json", run.storage.read("state.json"))
    stored.write("no-run/file", b"")
    here = summary.runs(run.home.uri)[0]
    listed = summary.runs(stored.full_uri)
    assert listed == [
        {**here, "run": name, "path": stored.at(name).uri} for name in sorted(f"r{number:02d}" for number in range(40))
    ]


def test_tables(run: RunDir) -> None:
    """The same data as tables."""
    table = call("runs", "--storage", str(Path(run.uri).parent))
    assert next(word for word in table.splitlines() if "a-run" in word).split() == [
        "a-run",
        "finished",
        "3",
        "0.3333",
        "2.5000",
        "1,000",
    ]
    shown = call("show", run.uri)
    assert "a-run  finished" in shown
    assert "step 3   loss 0.3333   eval loss 2.5000" in shown
    steps = call("show", run.uri, "--steps").splitlines()
    assert steps[0].split()[:2] == ["step", "loss"]
    assert [line.split()[0] for line in steps[1:]] == ["1", "2", "3"]
    assert [line.split()[4] for line in steps] == ["norm", "-", "-", "41.5"]
    home = str(Path(run.uri).parent)
    assert table.splitlines()[-1].startswith(
        f"runs in {home} (--storage); look elsewhere with --storage, RAYDIST_STORAGE, or"
    )


def test_no_runs(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The searched folder and why it was searched, the remedy, and other folders that have runs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYDIST_STORAGE", raising=False)
    (tmp_path / "runs").mkdir()
    Path(run.uri).rename(tmp_path / "runs" / "a-run")
    monkeypatch.chdir(tmp_path)
    assert f"runs in {tmp_path}/runs (the nearest folder 'runs' with raydist's runs)" in call("runs")
    told = call("runs", "--storage", "nothing").splitlines()
    assert told[0] == f"no runs in {tmp_path}/nothing (--storage)"
    assert told[1].startswith(
        f"start one with `raydist train JOB.yaml`, or there are runs in {tmp_path}/runs: look elsewhere with"
    )


def test_no_such_run(run: RunDir) -> None:
    """RunNotFound with exit code 2; it names the runs that exist."""
    with pytest.raises(RunNotFound, match="a-run") as caught:
        call("show", "another", "--storage", str(Path(run.uri).parent))
    assert caught.value.exit_code == 2


def test_show_loads_neither_ray_nor_torch(run: RunDir) -> None:
    """The command needs no cluster: neither library is imported."""
    script = (
        "import sys, typer; from raydist.cli import runs; app = typer.Typer(); app.command()(runs.runs); app.command()(runs.show)\n"
        "loaded = sorted({n.partition('.')[0] for n in sys.modules} & {'ray', 'torch', 'pyarrow', 'pandas'})\n"
        "app(['show', sys.argv[1], '--json'], standalone_mode=False)\n"
        "print(loaded, sorted({n.partition('.')[0] for n in sys.modules} & {'ray', 'torch', 'pandas', 'tensorboard'}))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run([sys.executable, "-c", script, run.uri], capture_output=True, text=True, check=True, env=env)
    assert told.stdout.splitlines()[-1] == "[] []"


ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b5mblink\x08\u202egnp"


def test_text_of_a_run_cannot_control_the_terminal(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and control characters of events, of the state, of names and of what ranks printed are not shown."""
    with open(run.storage.path("events.jsonl"), "a") as events:
        for kind, data in (
            ("attempt_started", {"attempt": 2, "world_size": 2, "resume_step": 0}),
            ("failure", {"attempt": 2, "rank": 1, "cause": f"it {ESCAPE}failed", "step": 1}),
        ):
            events.write(json.dumps({"v": 1, "kind": kind, "at": 1.0, **data}) + "\n")
    state = json.loads(run.storage.read("state.json"))
    worker = {
        "rank": 0,
        "host": f"host{ESCAPE}",
        "node_ip": "1",
        "pid": 1,
        "device": "cpu",
        "python": "3",
        "torch": "2",
    }
    run.storage.write("state.json", json.dumps({**state, "workers": [worker]}).encode())
    odd = run.home.at(f"odd{ESCAPE.replace('/', '')}")
    odd.write(SPEC, b"name: odd\n")
    odd.write("state.json", f'{{"status": "{chr(92)}u001b]0;x"}}'.encode())
    shown = call("show", run.uri) + call("runs", "--storage", run.home.uri) + capsys.readouterr().err
    assert "it redblinkgnpfailed" in shown, shown
    assert not set(shown) & {chr(n) for n in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}
    error = RunNotFound(f"no run {ESCAPE}", f"hint\n{ESCAPE}\there")
    assert str(error) == "no run redblinkgnp\n  hint\nredblinkgnp\there"


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"status": "running", "heartbeat_at": 1, "driver": 3}', "[" * 100_000, '{"status": ["a"]}'],
)
def test_one_damaged_state_hides_no_other_run(run: RunDir, content: str) -> None:
    """It is listed as damaged; the others are listed as always."""
    other = RunDir(run.home.at("b-run"))
    other.storage.write(SPEC, b"name: b-run\n")
    other.storage.write("state.json", content.encode())
    rows = strict(call("runs", "--json", "--storage", run.home.uri))
    assert [(row["run"], row["status"], row["steps"]) for row in rows] == [
        ("a-run", "finished", 3),
        ("b-run", "damaged", None),
    ]
