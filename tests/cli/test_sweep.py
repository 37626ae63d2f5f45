"""`raydist sweep`: a file is checked as a whole before anything starts; what stands on stdout is the interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raydist.cli import main as cli
from raydist.rundir import SPEC
from raydist.spec import dump, load
from raydist.spec.sweep import load_sweep, store
from raydist.sweepdir import SweepDir, SweepLog

ROOT = Path(__file__).parents[2]
LR_BATCH = str(ROOT / "tune_sweeps/lr-batch.yaml")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `raydist` with these arguments."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    told = capsys.readouterr()
    return int(caught.value.code or 0), told.out, told.err


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def swept(tmp_path: Path) -> SweepDir:
    """tune_sweeps/lr-batch.yaml in tmp_path, its nine cells finished, the fifth best; only that one's run is there."""
    sweep = load_sweep(LR_BATCH)
    folder, cells = SweepDir(tmp_path / "lr-batch"), sweep.cells()
    store(folder, sweep, cells)
    log = SweepLog(folder)
    for cell in cells:
        log.event("started", cell.id, workers=2, gpus=0.0)
        log.event("finished", cell.id, figures={"eval_loss": 2.0 + abs(cell.index - 4), "tokens": 819200})
    log.flush()
    folder.run(cells[4].id).storage.write(SPEC, dump(cells[4].job).encode())
    return folder


def test_a_dry_run_shows_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids, parameters, steps and tokens, a line a cell; nothing is made."""
    code, out, err = call(capsys, "sweep", LR_BATCH, "--dry-run", "--storage", str(tmp_path / "runs"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == [
        "cell", "learning_rate", "batch_size", "seed", "workers", "steps", "tokens", "hours", "GPU-hours", "cost",
    ]  # fmt: skip
    assert lines[1].split()[1:7] == ["0.0001", "64", "17", "2", "100", "819,200"]
    assert lines[10] == "9 cells, 9 points; 7,372,800 tokens; GPU-hours - of 10; hours - of 2"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, the same each time; options may come before the file, and the command's own name too."""
    one = call(capsys, "sweep", LR_BATCH, "--dry-run", "--json", "--storage", str(tmp_path))
    assert one == call(capsys, "sweep", "--storage", str(tmp_path), "--json", "--dry-run", LR_BATCH)
    assert one == call(capsys, "sweep", "run", "--storage", str(tmp_path), "--json", "--dry-run", LR_BATCH)
    told = strict(one[1])
    assert list(told) == ["v", "sweep", "source", "base", "cells", "totals", "limits", "over", "notes"]
    assert list(told["cells"][0]) == [
        "index", "id", "point", "parameters", "seed", "workers", "steps", "tokens", "hours", "gpu_hours", "cost", "adjusted",
        "notes", "problems",
    ]  # fmt: skip
    assert [cell["id"] for cell in told["cells"]] == [cell.id for cell in load_sweep(LR_BATCH).cells()]
    assert told["cells"][0]["adjusted"] == {
        "train.steps": 100,
        "eval.every": 25,
        "checkpoint.every": 25,
        "eval.batches": 4,
    }


def test_bad_cells_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table comes all the same, what is wrong goes to stderr, and the exit code is 2."""
    path = tmp_path / "s.yaml"
    path.write_text(f"base: {ROOT / 'jobs/quickstart.yaml'}\narray: {{parameters: {{heads: [4, 5]}}}}")
    code, out, err = call(capsys, "sweep", str(path), "--dry-run", "--storage", str(tmp_path))
    assert code == 2
    assert len([line for line in out.splitlines() if line.startswith("heads")]) == 2
    assert err.startswith(f"raydist: {path}: model.heads: 5 does not divide width 128; try")
    assert "Traceback" not in err
    told = strict(call(capsys, "sweep", str(path), "--dry-run", "--json", "--storage", str(tmp_path))[1])
    assert [len(cell["problems"]) for cell in told["cells"]] == [0, 1]
    assert told["totals"]["invalid"] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep", "tune_sweeps/lr-bacth.yaml", "--dry-run"], 'did you mean "tune_sweeps/lr-batch.yaml"?'),
        (["sweep", "results", "another"], "no sweep 'another'"),
        (["sweep", "best", "another"], "no sweep 'another'"),
        (["sweep", "results", "x", "--json", "--csv"], "exclude one another"),
        (["sweep", "tune_sweeps/lr-batch.yaml", "--dry-run", "--name", "a/b"], "run name 'a/b'"),
        (["sweep", "./results", "--dry-run"], "results: no such file"),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    """Exit code 2, with what to do, and no traceback."""
    monkeypatch.chdir(ROOT)
    code, out, err = call(capsys, *arguments, "--storage", str(tmp_path))
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("raydist: ")


def test_results_in_every_form(swept: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    """By name and by path; the file for other tools lies in the sweep's folder."""
    home = str(Path(swept.uri).parent)
    code, out, _ = call(capsys, "sweep", "results", "lr-batch", "--storage", home, "--json")
    told = strict(out)
    assert code == 0
    assert list(told) == ["v", "sweep", "path", "objective", "points", "counts", "totals", "best", "analysis"]
    assert (told["best"], told["counts"]) == (4, {"finished": 9})
    assert (Path(swept.uri) / "results.parquet").stat().st_size > 0
    shown = call(capsys, "sweep", "results", swept.uri)[1].splitlines()
    assert shown[1].split()[:3] == ["5e-05", "128", "2.0000"]
    assert call(capsys, "sweep", "results", swept.uri, "--csv")[1].count("\n") == 10
    assert call(capsys, "sweep", "results", swept.uri, "--markdown")[1].startswith("| learning_rate | batch_size |")


def test_the_best_is_ready_to_train(swept: SweepDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its job comes as a file that loads, with a word on where it is from; or on stdout."""
    out = tmp_path / "best.yaml"
    assert call(capsys, "sweep", "best", swept.uri, "-o", str(out))[0] == 0
    job = load(out)
    assert (job.name, job.optim.lr, job.train.global_batch, job.train.steps) == ("lr-batch-best", 5e-5, 128, 50)
    assert out.read_text().startswith("# The best cell of sweep lr-batch: lr5e-05-batch128-")
    assert call(capsys, "sweep", "best", swept.uri)[1] == out.read_text()
    code, _, err = call(capsys, "sweep", "best", swept.uri, "-o", str(tmp_path / "no/such/folder.yaml"))
    # What is wrong, and where to look.
    assert (code, err.count("\n")) == (2, 2)


def test_neither_ray_nor_torch_is_loaded(swept: SweepDir) -> None:
    """Cells and results need no cluster, and answer quickly; the help needs nothing at all."""
    script = (
        "import sys; from raydist.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, sorted({n.partition('.')[0] for n in sys.modules} & {'ray', 'torch', 'numpy'}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def last(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, env=env
        )
        return done.stdout.splitlines()[-1]

    assert last("sweep", "results", swept.uri) == "0 ['numpy']"
    assert last("sweep", LR_BATCH, "--dry-run", "--storage", swept.uri) == "0 ['numpy']"
    assert last("sweep", "--help") == "0 []"
