"""`raydist.train` and `raydist.sweep` from a script and from a notebook, on a private Ray.

Over a minute: it starts five drivers, two of them from a notebook's kernel.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import yaml

import raydist
from raydist.errors import DataError
from raydist.spec import load
from tests.exact import weights

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_a_run_goes_on_alone_until_it_is_stopped(project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait=False` returns with a live driver, or raises its error; `save` makes a checkpoint, and `stop` leaves one of the last
    step. Both are verified, and the weights are exported."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("RAYDIST_STORAGE", str(project.runs))
    given = {"model.name": "gpt", "train.steps": 100_000, "checkpoint.every": 100_000}
    run = raydist.train("job.yaml", set=given, name="from-python", wait=False)
    assert run.status == "running"
    assert not run.ended()
    deadline = time.monotonic() + 240
    while len(run.steps()) < 2:
        assert time.monotonic() < deadline
        assert not run.ended()
        time.sleep(0.2)
    saved = run.save()
    run.stop()
    assert run.ended()
    assert run.status == "interrupted"
    assert [one["step"] for one in run.checkpoints] == sorted({saved, run.show()["steps"]})
    assert all(one["good"] for one in run.verify())
    assert (Path(run.export(str(tmp_path / "weights"), dtype="bf16")) / "config.json").exists()
    with pytest.raises(DataError, match="nowhere"):
        raydist.train("job.yaml", set={"data.path": "nowhere", "model.name": "gpt"}, name="no-data", wait=False)


def test_its_live_page(project: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`dashboard=True` prints the address of the run's page, with its token, while the call waits. The job is a JobSpec."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("RAYDIST_STORAGE", str(project.runs))
    job = load("job.yaml", {"model.name": "gpt", "train.steps": 2, "checkpoint.every": 2})
    assert raydist.train(job, name="shown", dashboard=True).status == "finished"
    assert re.search(r"http://127\.0\.0\.1:\d+/run/0/shown\?token=[\w-]{43}\n", capsys.readouterr().err)


def test_a_sweep(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait=False` returns with a live driver, which `stop` ends after a checkpoint of the cell that trains. By virtual ranks a
    cell on one or two workers, as there is room, has the losses and weights of one worker, to the bit."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("RAYDIST_STORAGE", str(project.runs))
    cells = [
        {"cluster.workers": workers, "train.steps": steps} for workers, steps in ((1, 6), ([1, 2], 6), (1, 100_000))
    ]
    array = {"type": "list", "parameters": cells, "concurrent": 1}
    Path("from-python-cells.yaml").write_text(yaml.safe_dump({"base": "job.yaml", "equal": "steps", "array": array}))
    numpys = {"train.virtual_ranks": np.int64(2), "optim.lr": np.float32(1e-2)}
    made = raydist.sweep("from-python-cells.yaml", set={"model.name": "gpt", **numpys}, wait=False)
    deadline = time.monotonic() + 240
    while len(runs := made.runs) < 3 or not len(runs[made.folder.cells()[2].id].steps()):
        assert time.monotonic() < deadline
        assert not made.ended()
        time.sleep(0.2)
    made.stop()
    assert made.ended()
    one, several, last = (made.runs[cell.id] for cell in made.folder.cells())
    assert [run.status for run in (one, several, last)] == ["finished", "finished", "interrupted"]
    assert [last.show()["steps"]] == [saved["step"] for saved in last.checkpoints][-1:]
    for run, workers in ((one, 1), (several, 2)):
        assert run.steps()["world_size"].to_pylist() == [workers] * 6
    for column in ("loss", "grad_norm"):
        assert one.steps()[column].equals(several.steps()[column])
    assert weights(one.folder, 6) == weights(several.folder, 6)
    assert made.show()["counts"] == {"finished": 2, "paused": 1}
    assert made.results().num_rows == 3
    assert made.best().train.steps == 6


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell of examples/notebook.ipynb runs in a kernel, in a folder of its own; the run is drawn while it trains."""
    monkeypatch.setenv("RAYDIST_STORAGE", str(tmp_path / "runs"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    first, *others = [cell for cell in book.cells if cell.cell_type == "code"]
    frames = [o for o in first.outputs if "<iframe srcdoc=" in o.get("data", {}).get("text/html", "")]
    assert len(frames) == 2, "the live one, and the run itself"
    texts = [cell.outputs[-1]["data"]["text/plain"] for cell in others]
    assert texts[-2] == "('finished', 80)"
    assert texts[-1] == f"'{tmp_path}/report.html'"
    assert (tmp_path / "report.html").stat().st_size > 10_000
