"""How `raydist sweep FILE` ends when its cells have ended: its output, its files, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raydist.cli import main as cli
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.spec.sweep import load_sweep, store

QUICKSTART = Path(__file__).parents[2] / "jobs/quickstart.yaml"
Done = Callable[..., tuple[SweepDir, list[str]]]


@pytest.fixture
def done(tmp_path: Path) -> Done:
    """Makes a sweep of four cells, two learning rates with two seeds; the cells in `failed` have failed, the others have
    finished."""

    def make(*failed: int) -> tuple[SweepDir, list[str]]:
        path = tmp_path / "four.yaml"
        path.write_text(f"base: {QUICKSTART}\narray: {{parameters: {{lr: [1.0e-3, 1.0e-2]}}, seeds: 2}}\n")
        sweep = load_sweep(path)
        folder, cells = SweepDir(tmp_path / "four"), sweep.cells()
        store(folder, sweep, cells)
        log = SweepLog(folder)
        for cell in cells:
            log.event("started", cell.id, workers=2, gpus=0.0)
            if cell.index in failed:
                log.event("failed", cell.id, cause=f"rank {cell.index}: KeyError:\n'x'", final=True)
            else:
                log.event("finished", cell.id, figures={"eval_loss": 2.0 + cell.index, "tokens": 819200})
        log.flush()
        return folder, [cell.id for cell in cells]

    return make


def again(capsys: pytest.CaptureFixture[str], folder: SweepDir, *options: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `raydist sweep` for a sweep whose cells have all ended."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["sweep", f"{folder.uri}.yaml", "--storage", str(Path(folder.uri).parent), *options])
    told = capsys.readouterr()
    return int(caught.value.code or 0), told.out, told.err


def test_the_results_are_shown(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the conclusions on stdout, the page in the folder, its path on stderr; with --json only the object."""
    folder, _ = done()
    page = Path(folder.uri) / "report.html"
    code, out, err = again(capsys, folder)
    assert code == 0
    assert out.splitlines()[0].split()[:2] == ["learning_rate", "seeds"]
    assert "\nbest: learning_rate 0.001: eval_loss 3.0000 (95% interval" in out
    assert err == f"all results on one page: {page}\n"
    assert page.read_bytes()[:15].lower() == b"<!doctype html>"
    assert (Path(folder.uri) / "results.parquet").exists()
    assert json.loads(again(capsys, folder, "--json")[1])["counts"] == {"finished": 4}


def test_cells_that_failed_come_last(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    """If some have failed, the exit code is 0, and the last lines name these cells, not only their points, with the cause,
    once."""
    folder, cells = done(1, 3)
    code, out, err = again(capsys, folder)
    assert code == 0
    assert err.splitlines()[-3:] == [
        "2 of 4 cells failed:",
        f"  {cells[1]}: rank 1: KeyError: 'x'",
        f"  {cells[3]}: rank 3: KeyError: 'x'",
    ]
    assert "KeyError" not in out


def test_a_sweep_of_which_nothing_came(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    """If all cells have failed, the table is still shown, and the exit code is 3 with the first cell's cause."""
    folder, cells = done(0, 1, 2, 3)
    code, out, err = again(capsys, folder)
    assert code == 3
    assert "no cell has finished yet" in out
    said, hint = err.splitlines()[-2:]
    assert said == (
        "raydist: sweep four: none of its 4 cells has finished; 4 failed, the first one because of rank 0: KeyError: 'x'"
    )
    assert folder.run(cells[0]).uri in hint


def test_what_cannot_be_written(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    """If the page and results.parquet cannot be written, the sweep ends as usual, with one line for each."""
    folder, _ = done()
    for name in ("report.html", "results.parquet"):
        (Path(folder.uri) / name / "in the way").mkdir(parents=True)
    code, out, err = again(capsys, folder)
    assert code == 0
    assert "\nbest: learning_rate 0.001" in out
    assert [line.partition(" was not updated: StorageError: ")[0] for line in err.splitlines()] == [
        "raydist: results.parquet",
        "raydist: report.html",
    ]
