"""`raydist sweep` with real cells: kept workers, a death, a bug, a scheduler that stops one, and a driver that is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
import yaml

from raydist.cluster.sweep.sampler import Sampler
from raydist.cluster.sweep.schedulers.hyperband import Hyperband
from raydist.cluster.sweep.search import History
from raydist.records import Event
from raydist.run.sweep_state import fold
from raydist.spec.sweep import load_sweep
from raydist.spec.sweep.cells import cell_id
from tests.end_to_end.conftest import Project
from tests.end_to_end.sweeps import Sweeps, until

TOKENS, SEED = 8 * 16, 3


@pytest.fixture(scope="module")
def sweeps(project: Project) -> Sweeps:
    """Those of one user."""
    return Sweeps(project)


def test_one_cell_after_another(sweeps: Sweeps) -> None:
    """Two at a time, on two slots of workers that are started once: a cell whose process is killed goes on inside its run and ends
    with the bits of one that was not; a cell with a bug is tried twice, its cause is known, and the others are trained. Each has
    its row for TensorBoard, and the sweep its page."""
    cells = [
        {"model.name": "cells:broken", "learning_rate": 1e-3},
        {"model.name": "cells:dying", "learning_rate": 3e-3},
        {"model.name": "cells:sound", "learning_rate": 3e-3},
        {"model.name": "cells:sound", "learning_rate": 1e-2},
    ]
    sweeps.write("one", cells, 2, limits={"failures_per_cell": 1})
    told = sweeps.run("one")
    assert {status: count for status, count in told["counts"].items() if count} == {"finished": 3, "failed": 1}
    broken, dying, sound, last = sweeps.cells("one")
    states = fold(sweeps.folder("one").events())
    assert [states[cell].status for cell in (broken, dying, sound, last)] == ["failed", *["finished"] * 3]
    assert "KeyError: " in str(states[broken].cause)
    assert "a bug in the user's model" in str(states[broken].cause)
    assert [e.data["final"] for e in sweeps.events("one", broken, "failed")] == [False, True]
    assert len(sweeps.events("one", dying, "started")) == 1
    run = sweeps.folder("one").run(dying)
    attempts = [json.loads(line) for line in (run.storage.local / "events.jsonl").read_text().splitlines()]  # type: ignore[operator]
    assert [e["attempt"] for e in attempts if e["kind"] == "attempt_started"] == [1, 2]
    assert sweeps.losses("one", dying) == sweeps.losses("one", sound) != sweeps.losses("one", last)
    assert len(sweeps.losses("one", dying)) == 12
    folder = sweeps.folder("one").storage
    rows = [name.split("/")[1] for name in folder.files("runs", recursive=True) if name.endswith(".row")]
    assert sorted(rows) == sorted(sweeps.cells("one")), "one row a cell, beside its curves"
    assert folder.size("report.html")
    below = {mark.name.rpartition("-")[2] for mark in sweeps.marks("one").glob("*-below-*")}
    # One slot, where the other has taken so long to start that all was done.
    assert len(below) <= 2, "each slot's ranks are forked by one process, whatever becomes of them"


def test_a_lack_of_memory(sweeps: Sweeps) -> None:
    """Memory runs out once in the whole sweep: the cell that it meets goes on with half the micro-batch, and has it too when it
    is tried again after a bug; the next cell, which is like it, begins with it."""
    cells = [{"model.name": "cells:hungry", "learning_rate": rate} for rate in (3e-3, 1e-2)]
    sweeps.write("memory", cells, 1, limits={"failures_per_cell": 1})
    told = sweeps.run("memory")
    assert told["counts"] == {"finished": 2}
    first, second = sweeps.cells("memory")
    assert [e.data["micro_batch"] for e in sweeps.events("memory", first, "retried")] == [1]
    assert [e.data.get("micro_batch") for e in sweeps.events("memory", first, "started")] == [None, 1]
    assert [e.data.get("micro_batch") for e in sweeps.events("memory", second, "started")] == [1]
    causes = {cell: [e["fault"] for e in sweeps.run_events("memory", cell, "failure")] for cell in (first, second)}
    assert causes == {first: ["out_of_memory", *["user_error"] * 3], second: []}


def test_a_scheduler_stops_a_cell(sweeps: Sweeps) -> None:
    """asha: the second cell is worse at its rung, and is ended where it is, in a step that would last for ever; its worker
    trains the third one."""
    cells = [
        {"model.name": "cells:sound", "learning_rate": 1e-2},
        {"model.name": "cells:waiting", "learning_rate": 1e-8},
        {"model.name": "cells:sound", "learning_rate": 1.1e-2},
    ]
    sweeps.write("asha", cells, 1, scheduler={"name": "asha", "rungs": [4 * TOKENS], "reduction": 2})
    sweeps.run("asha")
    first, stopped, last = sweeps.cells("asha")
    states = fold(sweeps.folder("asha").events())
    assert [states[cell].status for cell in (first, stopped)] == ["finished", "stopped"]
    assert "asha" in str(states[stopped].cause)
    assert [e.data["tokens"] for e in sweeps.events("asha", stopped, "report")] == [4 * TOKENS]
    assert len(sweeps.losses("asha", stopped)) < 12
    assert len(list(sweeps.marks("asha").glob("*-below-*"))) == 3
    assert len({mark.name.rpartition("-")[2] for mark in sweeps.marks("asha").glob("*-below-*")}) == 1
    assert states[last].status in ("finished", "stopped")


def test_brackets(sweeps: Sweeps) -> None:
    """hyperband: of the cells of the bracket that halves the second is worse at its rung, and is ended in a step that would last
    for ever; the third is as bad, in the bracket that halves no cell, and is trained to its end."""
    brackets = Hyperband([4 * TOKENS], 2)

    def of(bracket: int, model: str, rate: float) -> dict[str, Any]:
        """A cell of that bracket, with about that rate."""
        points = ({"model.name": model, "optim.lr": rate * (1 + n / 1000)} for n in range(100))
        return next(p for p in points if brackets.bracket(cell_id("hyperband", p, SEED, False)) == bracket)

    cells = [of(0, "cells:sound", 1e-2), of(0, "cells:waiting", 1e-8), of(1, "cells:sound", 1e-8)]
    sweeps.write("hyperband", cells, 1, scheduler={"name": "hyperband", "rungs": [4 * TOKENS], "reduction": 2})
    sweeps.run("hyperband")
    assert [brackets.bracket(cell) for cell in sweeps.cells("hyperband")] == [0, 0, 1]
    states = fold(sweeps.folder("hyperband").events())
    assert [states[cell].status for cell in sweeps.cells("hyperband")] == ["finished", "stopped", "finished"]
    assert states[sweeps.cells("hyperband")[1]].cause == "hyperband at 512 tokens"


def test_worse_than_the_median(sweeps: Sweeps) -> None:
    """median: the fourth cell is worse than the others were at its first look, and is ended in a step that would last for ever."""
    cells: list[dict[str, Any]] = [{"learning_rate": rate} for rate in (1e-2, 1.1e-2, 1.2e-2)]
    cells.append({"model.name": "cells:waiting", "learning_rate": 1e-8})
    for cell in cells[:3]:
        cell["model.name"] = "cells:sound"
    sweeps.write("median", cells, 1, scheduler={"name": "median", "every": 4 * TOKENS, "grace": 4 * TOKENS})
    sweeps.run("median")
    states = fold(sweeps.folder("median").events())
    *others, last = (states[cell] for cell in sweeps.cells("median"))
    assert [other.status for other in others] == ["finished"] * 3
    assert (last.status, last.cause) == ("stopped", "median at 512 tokens")


def test_killed_and_started_again(sweeps: Sweeps) -> None:
    """SIGKILL to the driver: the cell that trained is lost; the same command leaves the finished one alone and goes on with it
    from its checkpoint; two interrupts end it at once, with exit code 130; its losses are those of an undisturbed one."""
    cells = [
        {"model.name": "cells:sound", "learning_rate": 3e-3},
        {"model.name": "cells:waiting", "learning_rate": 3e-3},
    ]
    sweeps.write("again", cells, 1)
    marks = sweeps.marks("again")
    process = sweeps.start("again")
    until(process, lambda: sweeps.folder("again").exists())
    first, second = sweeps.cells("again")
    run = sweeps.folder("again").run(second)
    until(process, lambda: run.committed() == [4])
    assert len(list(marks.glob("waiting-*"))) == 1
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(children, timeout=60)
    process.communicate(timeout=60)
    before = tree(sweeps, "again", first)
    told = json.loads(sweeps.project.raydist("sweep", "results", "again", "--json").stdout)
    assert told["counts"] == {"finished": 1, "lost": 1}

    process = sweeps.start("again")
    until(process, lambda: len(list(marks.glob("waiting-*"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert fold(sweeps.folder("again").events())[second].status == "paused"
    (marks / "go").touch()

    sweeps.run("again")
    states = fold(sweeps.folder("again").events())
    assert [states[cell].status for cell in (first, second)] == ["finished", "finished"]
    assert tree(sweeps, "again", first) == before
    assert len(sweeps.events("again", first, "started")) == 1
    assert sweeps.losses("again", second) == sweeps.losses("again", first)
    resumed = [json.loads(line) for line in (run.storage.local / "events.jsonl").read_text().splitlines()]  # type: ignore[operator]
    assert next(e["step"] for e in resumed if e["kind"] == "resumed") == 4
    before = tree(sweeps, "again", second)
    sweeps.run("again")
    assert tree(sweeps, "again", second) == before


def test_a_search_that_is_killed(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    """optuna chooses four points. SIGKILL to the driver while the second trains: the same command leaves the first one alone, goes
    on with the second, and chooses two more. SIGKILL to the sampler while the third trains: the fourth is what it would have been.
    The four are in the results, the best is ready to train."""
    ranges = [{"learning_rate": {"log_uniform": [1e-4, 1e-1]}}]
    sweeps.write("search", ranges, 1, array={"type": "random", "samples": 4}, search="optuna")
    process = sweeps.start("search")
    until(process, lambda: sweeps.folder("search").exists() and len(sweeps.cells("search")) == 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(children, timeout=60)
    process.communicate(timeout=60)
    first, second = sweeps.cells("search")
    before = tree(sweeps, "search", first)

    process = sweeps.start("search", "--json")
    until(process, lambda: len(sweeps.cells("search")) == 3)
    children = psutil.Process(process.pid).children(recursive=True)
    (sampler,) = [child for child in children if child.is_running() and "ray::Sampler" in " ".join(child.cmdline())]
    sampler.kill()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    told = json.loads(out)
    cells = sweeps.cells("search")
    assert cells[:2] == [first, second]
    monkeypatch.syspath_prepend(sweeps.project.root)  # where the user's own model is
    assert expected(sweeps, "search") == [note.parameters for note in sweeps.folder("search").cells()]
    assert len(set(cells)) == 4
    assert tree(sweeps, "search", first) == before
    assert len(sweeps.events("search", first, "started")) == 1
    assert told["counts"] == {"finished": 4}
    assert sorted(row["cells"][0] for row in told["points"]) == sorted(cells)
    losses = {cell: sweeps.losses("search", cell) for cell in cells}
    assert all(len(steps) == 12 for steps in losses.values())
    assert len({row["parameters"]["optim.lr"] for row in told["points"]}) == 4
    done = sweeps.project.raydist("sweep", "best", "search")
    assert yaml.safe_load(done.stdout)["optim"]["lr"] == told["points"][told["best"]]["parameters"]["optim.lr"]
    sweeps.run("search")
    assert sweeps.cells("search") == cells


def expected(sweeps: Sweeps, name: str) -> list[Any]:
    """The points that a sampler gives which is asked, one after another, what the sweep's log has."""
    sweep = load_sweep(sweeps.project.root / f"{name}.yaml")
    sampler = Sampler(sweep.axes, sweep.spec.search, sweep.spec.objective.better)
    history, found = History(sweep.spec.objective.metric), []
    for event in sweeps.folder(name).events():
        if event.kind == "added":
            found.append(sampler.ask(history.told(1)))
        history.note(event)
    return found


def test_an_interrupt_and_a_limit(sweeps: Sweeps) -> None:
    """Two cells that would train for hours, one at a time. SIGTERM: the one that trains makes a checkpoint and ends; the one that
    waits is left waiting. limits.hours, over all starts, does the same, with exit code 0; then the command has nothing to do."""
    sweeps.write("hours", [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}], 1)
    process = sweeps.project.start("sweep", "hours.yaml", "--set", "train.steps=100000")
    until(process, lambda: sweeps.folder("hours").exists())
    first, second = sweeps.cells("hours")
    run = sweeps.folder("hours").run(first)
    until(process, run.committed)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    states = fold(sweeps.folder("hours").events())
    assert states[first].status == "paused"
    assert second not in states
    assert states[first].figures["steps"] == run.committed()[-1]
    reached, events = run.committed()[-1], sweeps.folder("hours").events()
    # Three times what a start takes on this machine, to its first checkpoint and its end: of that one is over.
    limit = float(f"{(3 * (events[-1].at - events[0].at) + 5) / 3600:.3g}")
    file = sweeps.project.root / "hours.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "limits": {"hours": limit}}))
    for _ in range(2):
        done = sweeps.project.raydist("sweep", "hours.yaml", "--set", "train.steps=100000", "--json")
        assert done.returncode == 0, done.stderr
        states = fold(sweeps.folder("hours").events())
        assert (states[first].status, states[first].cause) == ("paused", f"limits.hours is {limit:g}")
        assert states[first].figures["steps"] == run.committed()[-1] > reached
        assert second not in states
        ended = [event for event in sweeps.folder("hours").events() if event.kind == "ended"]
        assert (ended[-1].data["status"], ended[-1].data["cause"]) == ("paused", f"limits.hours is {limit:g}")


DRIVER = """
from raydist.cli.main import main
from raydist.cluster.run.restart_loop import RestartLoop

job = RestartLoop._job
RestartLoop._job = lambda self, *about: {**job(self, *about), "gpus": 0.0}
main()
"""
"""`raydist` whose ranks are told that they have no GPU."""


def test_a_limit_of_gpu_hours(sweeps: Sweeps) -> None:
    """On a Ray that takes this machine to have two GPUs: a cell that holds one makes a checkpoint and ends at the limit, the other
    waits; hours and their cost are in the results. With a higher limit the same command goes on, and counts on."""

    def run(limit: float) -> dict[str, Any]:
        limits = {"gpu_hours": limit, "cost_per_gpu_hour": 2.5}
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "limits": limits}))
        command = [sys.executable, "-c", DRIVER, "sweep", file.name, "--json"]
        env = sweeps.project.environment() | {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 2})}
        done = subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    sweeps.write("gpus", [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}], 1)
    file = sweeps.project.root / "gpus.yaml"
    told = run(1e-5)
    first, second = sweeps.cells("gpus")
    states = fold(sweeps.folder("gpus").events())
    assert (states[first].status, states[first].cause) == ("paused", "limits.gpu_hours is 1e-05")
    assert states[first].figures["steps"] == sweeps.folder("gpus").run(first).committed()[-1]
    assert second not in states
    assert [event.data["gpus"] for event in sweeps.events("gpus", first, "started")] == [1.0]
    totals = told["totals"]
    assert 1e-5 < totals["gpu_hours"] == totals["seconds"] / 3600
    assert totals["cost"] == 2.5 * totals["gpu_hours"]

    told = run(10.0)
    assert told["counts"] == {"finished": 2}
    assert sweeps.events("gpus", first, "started")[1].data["tokens"] > 0
    assert [len(sweeps.losses("gpus", cell)) for cell in (first, second)] == [12, 12]
    assert told["totals"]["gpu_hours"] > totals["gpu_hours"]
    assert told["totals"]["cost"] == pytest.approx(2.5 * told["totals"]["gpu_hours"])


def test_the_worse_goes_on_from_the_better(sweeps: Sweeps) -> None:
    """pbt: of two cells that would train for hours the worse ends where it is, and its run goes on from the other's checkpoint,
    with a rate that is the other's or next to it."""
    cells = [{"learning_rate": 1e-2}, {"learning_rate": 1e-8}]
    scheduler = {"name": "pbt", "every": 8 * TOKENS, "quantile": 0.5, "resample": 0}
    sweeps.write("pbt", cells, 2, scheduler=scheduler)
    process = sweeps.project.start("sweep", "pbt.yaml", "--set", "train.steps=100000")
    until(process, lambda: sweeps.folder("pbt").exists())
    better, worse = sweeps.cells("pbt")
    until(process, lambda: sweeps.events("pbt", worse, "exploited"))
    told = sweeps.events("pbt", worse, "exploited")[0].data
    assert told["source"] == better
    assert told["changes"]["optim.lr"][0] == 1e-8
    run = sweeps.folder("pbt").run(worse)
    until(process, lambda: max(run.committed(), default=0) > told["step"])
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    events = [json.loads(line) for line in (run.storage.local / "events.jsonl").read_text().splitlines()]  # type: ignore[operator]
    assert told["step"] in [e["step"] for e in events if e["kind"] == "resumed"]
    (*_, newest) = sweeps.events("pbt", worse, "exploited")
    rate = yaml.safe_load((run.storage.local / "spec.yaml").read_text())["optim"]["lr"]  # type: ignore[operator]
    assert [rate] == newest.data["changes"]["optim.lr"][1:]
    states = fold(sweeps.folder("pbt").events())
    assert states[worse].lineage[0]["source"] == better


def test_cells_take_turns(sweeps: Sweeps) -> None:
    """pbt: two cells that would train for hours, where one fits. Each makes room for the other after an interval, whether or not
    it is to copy it, and goes on from a checkpoint when it is its turn again."""
    scheduler = {"name": "pbt", "every": 4 * TOKENS, "resample": 0}
    sweeps.write("turns", [{"learning_rate": 1e-2}, {"learning_rate": 1.1e-2}], 1, scheduler=scheduler)
    process = sweeps.project.start("sweep", "turns.yaml", "--set", "train.steps=100000")
    until(process, lambda: sweeps.folder("turns").exists())

    def started() -> list[Event]:
        return [event for event in sweeps.folder("turns").events() if event.kind == "started"]

    until(process, lambda: len(started()) >= 4)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    one, two = sweeps.cells("turns")
    assert [event.data["cell"] for event in started()[:4]] == [one, two, one, two]
    assert [event.data["tokens"] > 0 for event in started()[:4]] == [False, False, True, True]
    yields = [event.data["because"] for event in sweeps.events("turns", one, "paused")]
    assert yields[0].startswith("pbt at ")


def tree(sweeps: Sweeps, name: str, cell: str) -> dict[str, str]:
    """Every file of a cell's run -> its hash; less its row in HPARAMS, which the next driver adds where one was killed."""
    root = sweeps.project.runs / name / "runs" / cell
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".row")
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
