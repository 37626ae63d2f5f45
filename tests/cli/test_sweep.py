"""`raydist sweep`: the whole file is checked before anything starts; its output on stdout is an interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raydist.api import speed
from raydist.cli import main as cli
from raydist.cluster import place
from raydist.run.directory import SPEC
from raydist.run.sweep_directory import CellNote, SweepDir, SweepLog
from raydist.spec import dump, load
from raydist.spec.sweep import load_sweep, note, store

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four processors, no GPU and no cluster, whatever the tests run on."""
    monkeypatch.setattr(place, "_cpus", lambda: 4)
    monkeypatch.setattr(place, "_gpus", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


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
    """tune_sweeps/lr-batch.yaml in tmp_path with its nine cells finished, the fifth best; only the best one has its run."""
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
    """Ids, parameters, steps and tokens, one line per cell; nothing is created."""
    code, out, err = call(capsys, "sweep", LR_BATCH, "--dry-run", "--storage", str(tmp_path / "runs"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == [
        "cell", "learning_rate", "batch_size", "seed", "workers", "steps", "tokens", "time",
    ]  # fmt: skip
    assert lines[1].split()[1:7] == ["0.001", "8", "17", "2", "800", "819,200"]
    assert lines[10] == "9 cells, 9 points; 7,372,800 tokens; it pauses after 2:00:00 (limits.hours)"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, the same each time; options may come before the file, and the subcommand `run` may be named."""
    one = call(capsys, "sweep", LR_BATCH, "--dry-run", "--json", "--storage", str(tmp_path))
    assert one == call(capsys, "sweep", "--storage", str(tmp_path), "--json", "--dry-run", LR_BATCH)
    assert one == call(capsys, "sweep", "run", "--storage", str(tmp_path), "--json", "--dry-run", LR_BATCH)
    told = strict(one[1])
    assert list(told) == ["v", "sweep", "source", "base", "where", "cells", "totals", "limits", "over", "notes"]
    assert list(told["cells"][0]) == [
        "index", "id", "point", "parameters", "seed", "workers", "steps", "tokens", "hours", "gpu_hours", "cost", "by",
        "adjusted", "notes", "problems",
    ]  # fmt: skip
    assert [cell["id"] for cell in told["cells"]] == [cell.id for cell in load_sweep(LR_BATCH).cells()]
    assert told["cells"][0]["adjusted"] == {
        "train.steps": 800,
        "eval.every": 200,
        "checkpoint.every": 200,
        "eval.batches": 32,
    }


def test_a_dry_run_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell's hours equal the estimate of `raydist plan` for that GPU, and say so; a cell without an estimate has none."""
    path = tmp_path / "s.yaml"
    path.write_text(
        f"base: {ROOT / 'jobs/quickstart.yaml'}\narray: {{type: list, parameters: [{{batch_size: 32}}, {{batch_size: 64, "
        "model.context: 64}, {offload.optimizer: nvme, offload.path: /x}, {cluster.gpus_per_worker: 0}]}"
    )
    asked = ["sweep", str(path), "--dry-run", "--storage", str(tmp_path), "--device", "h200"]
    cells = strict(call(capsys, *asked, "--json")[1])["cells"]
    for cell in cells[:2]:
        planned = ["plan", str(ROOT / "jobs/quickstart.yaml"), "--device", "h200", "--json"]
        fields = [f"--set={name}={value}" for name, value in cell["parameters"].items()]
        ddp = strict(call(capsys, *planned, *fields)[1])["strategies"][0]
        assert cell["hours"] * 3600 == pytest.approx(cell["tokens"] / ddp["speed"]["tokens_per_second"])
        assert cell["by"] == "reckoned for H200 at 40% of its peak"
    assert cells[0]["hours"] != cells[1]["hours"]
    assert [cell["by"] for cell in cells[2:]] == [
        "unknown: the speed of the disk of offload.path is not known", "unknown: it trains on CPUs",
    ]  # fmt: skip
    assert "time marked ~, of 2 of 4 cells: estimated as in raydist plan, for H200" in call(capsys, *asked)[1]
    for wrong, why in (
        (["--dry-run", "--device", "h20"], 'did you mean "h200"?'),
        (["--device", "h200"], "needs --dry-run"),
    ):
        code, _, err = call(capsys, "sweep", str(path), "--storage", str(tmp_path / "runs"), *wrong)
        assert (code, why in err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_the_slowest_gpu_of_a_cluster() -> None:
    """By the names of Ray's nodes; if the peak of one GPU is unknown, there is no estimate."""
    kinds = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0, "accelerator_type:A100": 1.0}
    found = speed.slowest(kinds)
    assert not isinstance(found, str)
    assert found.name == "A100"
    assert "T4" in str(speed.slowest({**kinds, "accelerator_type:T4": 1.0}))
    assert "--device" in str(speed.slowest({"CPU": 8.0}))


def test_bad_cells_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is still shown, the errors go to stderr, and the exit code is 2."""
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


def test_a_dry_run_of_a_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no cells yet: their number, the search space, an upper bound of tokens, and what may fail. Missing packages give
    exit code 2."""
    path = tmp_path / "s.yaml"
    path.write_text(
        f"base: {ROOT / 'jobs/quickstart.yaml'}\narray: {{type: random, samples: 20, seeds: 2, parameters: "
        "{heads: {choice: [5, 4, 2]}, layers: {int_uniform: [1, 2]}}}\nsearch: bayes"
    )
    code, out, err = call(capsys, "sweep", str(path), "--dry-run", "--storage", str(tmp_path / "runs"))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "12 cells, 6 points; 9,830,400 tokens",
        "search: bayes chooses 6 points from earlier results, each with 2 seeds: tokens, time and cost are upper bounds",
        "from heads 2, 4, 5; layers 1 to 2, whole",
        "there are no more than 6 points, array.samples is 20",
        f"{path}: model.heads: 5 does not divide width 128; try 2 or 4 or 8 (in heads5-layers2-seed17-gnguxsyw): such cells "
        "fail when they are chosen",
        "layers 4 of the base lies outside the tried range (1 to 2): the best may be worse than the base",
        "time: unknown until a cell or the base, quickstart, has run in the same storage; then from its tokens/s",
        "on this machine (4 CPUs, no GPU): 2 cells at once",
    ]
    told = strict(call(capsys, "sweep", str(path), "--dry-run", "--json", "--storage", str(tmp_path))[1])
    assert (told["cells"], told["totals"]["cells"], told["totals"]["tokens"]) == ([], 12, 12 * 819_200)
    monkeypatch.setattr("raydist.cluster.sweep.search.find_spec", lambda name: None)
    for options in (["--dry-run"], []):
        code, _, err = call(capsys, "sweep", str(path), *options, "--storage", str(tmp_path / "runs"))
        assert (code, err.splitlines()[0]) == (
            2, "raydist: search.name: bayes needs optuna and scipy, which are not installed here",
        )  # fmt: skip
        assert 'pip install "raydist[optuna]"' in err
    assert not (tmp_path / "runs").exists()


def test_a_search_that_has_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results read its cells from the log: those that finished, and those that are not valid jobs."""
    sweep = load_sweep(ROOT / "tune_sweeps/optuna.yaml")
    folder = SweepDir(tmp_path / "optuna")
    store(folder, sweep, [])
    assert strict(call(capsys, "sweep", "results", folder.uri, "--json")[1])["points"] == []
    log = SweepLog(folder)
    for number, rate in enumerate((1e-3, 1e-2, -1.0)):
        point = {"optim.lr": rate, "optim.weight_decay": 0.1, "train.global_batch": 32}
        cell = sweep.cell(point, number, number)
        valid = CellNote(number, cell.id, number, point, cell.seed)
        log.event("added", cell.id, note=valid.to_dict() if cell.problems else note(cell).to_dict())
        if cell.problems:
            log.event("failed", cell.id, cause="; ".join(cell.problems), final=True)
        else:
            log.event("started", cell.id, workers=2, gpus=0.0)
            log.event(
                "finished",
                cell.id,
                figures={"eval_loss": 3.0 - number, "tokens": 819200, "tokens_per_second": 819200.0},
            )
            folder.run(cell.id).storage.write(SPEC, dump(cell.job).encode())
    log.flush()
    told = strict(call(capsys, "sweep", "results", folder.uri, "--json")[1])
    assert [(row["status"], row["objective"]) for row in told["points"]] == [
        ("finished", 3.0), ("finished", 2.0), ("failed", None),
    ]  # fmt: skip
    assert "optim.lr: -1.0: input should be greater than 0" in told["points"][2]["cause"]
    out = tmp_path / "best.yaml"
    assert call(capsys, "sweep", "best", folder.uri, "-o", str(out))[0] == 0
    assert load(out).optim.lr == 1e-2
    assert call(capsys, "sweep", "report", folder.uri)[0] == 0
    shown = call(
        capsys, "sweep", str(ROOT / "tune_sweeps/optuna.yaml"), "--dry-run", "--json", "--storage", str(tmp_path)
    )
    assert strict(shown[1])["totals"]["hours"] == pytest.approx(24 / 2 / 3600, rel=0.01)


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
    """Exit code 2, with the remedy, and no traceback."""
    monkeypatch.chdir(ROOT)
    code, out, err = call(capsys, *arguments, "--storage", str(tmp_path))
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("raydist: ")


def test_results_in_every_form(swept: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    """By name and by path; the Parquet file for other tools is in the sweep's folder."""
    home = str(Path(swept.uri).parent)
    code, out, _ = call(capsys, "sweep", "results", "lr-batch", "--storage", home, "--json")
    told = strict(out)
    assert code == 0
    assert list(told) == ["v", "sweep", "path", "objective", "points", "counts", "totals", "best", "pareto", "analysis"]
    assert (told["best"], told["counts"]) == (4, {"finished": 9})
    assert (Path(swept.uri) / "results.parquet").stat().st_size > 0
    shown = call(capsys, "sweep", "results", swept.uri)[1].splitlines()
    assert "GPU-hours" not in "".join(shown), "there was no GPU"
    assert "cost" not in "".join(shown)
    assert shown[1].split()[:3] == ["0.003", "16", "2.0000"]
    assert call(capsys, "sweep", "results", swept.uri, "--csv")[1].count("\n") == 10
    assert call(capsys, "sweep", "results", swept.uri, "--markdown")[1].startswith("| learning_rate | batch_size |")


def test_the_best_is_ready_to_train(swept: SweepDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best cell's job is a file that loads, with a comment on its origin; or it goes to stdout."""
    out = tmp_path / "best.yaml"
    assert call(capsys, "sweep", "best", swept.uri, "-o", str(out))[0] == 0
    job = load(out)
    assert (job.name, job.optim.lr, job.train.global_batch, job.train.steps) == ("lr-batch-best", 3e-3, 16, 400)
    assert out.read_text().startswith("# The best cell of sweep lr-batch: lr0.003-batch16-")
    assert call(capsys, "sweep", "best", swept.uri)[1] == out.read_text()
    code, _, err = call(capsys, "sweep", "best", swept.uri, "-o", str(tmp_path / "no/such/folder.yaml"))
    # The error, and the remedy.
    assert (code, err.count("\n")) == (2, 2)


def test_neither_ray_nor_torch_is_loaded(swept: SweepDir) -> None:
    """Cells and results need no cluster, and import neither library; the help imports nothing heavy."""
    script = (
        "import sys; from raydist.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    loaded = {n.partition('.')[0] for n in sys.modules} & {'ray', 'torch', 'numpy', 'optuna'}\n"
        "    print(end.code, sorted(loaded))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def last(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, env=env
        )
        return done.stdout.splitlines()[-1]

    assert last("sweep", "results", swept.uri) == "0 ['numpy']"
    assert last("sweep", LR_BATCH, "--dry-run", "--storage", swept.uri) == "0 ['numpy']"
    assert last("sweep", str(ROOT / "tune_sweeps/optuna.yaml"), "--dry-run", "--storage", swept.uri) == "0 ['numpy']"
    assert last("sweep", "--help") == "0 []"
