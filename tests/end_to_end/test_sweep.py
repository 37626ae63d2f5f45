"""`raydist sweep` with real cells: reused workers, a killed rank, a bug, schedulers that stop a cell, limits, and a killed
driver.

Over a minute: 14 commands; two are processes of their own, whose driver is killed or whose Ray has GPUs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
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
from tests import forked
from tests.end_to_end.conftest import Project
from tests.end_to_end.sweeps import Sweeps, until
from tests.processes import command_line

TOKENS, SEED = 8 * 16, 3


@pytest.fixture(scope="module")
def sweeps(project: Project) -> Iterator[Sweeps]:
    """The sweeps of one user. An interrupted sweep leaves actors that end with its driver, so the warm driver is ended here."""
    yield Sweeps(project)
    project.close()


def test_one_cell_after_another(sweeps: Sweeps) -> None:
    """Two at a time, on two groups of workers that are started once: a cell whose rank is killed restarts inside its run and ends
    with the bits of one that was not; a cell with a bug is tried twice, its cause is recorded, and the others are trained. Each
    cell has its row for TensorBoard, and the sweep has its page."""
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
    assert sorted(rows) == sorted(sweeps.cells("one")), "one row a cell, beside its event files"
    assert folder.size("report.html")
    below = {mark.name.rpartition("-")[2] for mark in sweeps.marks("one").glob("*-below-*")}
    # One, if the second group's workers were ready only after all cells were trained.
    assert len(below) <= 2, "one process forks all ranks of a worker, also after a kill or an error"


def test_a_lack_of_memory(sweeps: Sweeps) -> None:
    """Memory runs out once in the whole sweep: that cell restarts with half the micro-batch, and keeps it when it is tried again
    after a bug; the next cell, with the same shapes, starts with it."""
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
    """hyperband: in the bracket that halves, the second cell is worse at its rung, and is stopped in a step that would never end;
    its worker trains the third one. That one is as bad, but in the bracket that halves no cell, and is trained to its end. asha
    is one such bracket, and median stops a cell in the same way; tests/cluster/sweep/schedulers has each scheduler's decisions."""
    brackets = Hyperband([4 * TOKENS], 2)

    def of(bracket: int, model: str, rate: float) -> dict[str, Any]:
        """A cell of that bracket, with about that learning rate."""
        points = ({"model.name": model, "optim.lr": rate * (1 + n / 1000)} for n in range(100))
        return next(p for p in points if brackets.bracket(cell_id("hyperband", p, SEED, False)) == bracket)

    cells = [of(0, "cells:sound", 1e-2), of(0, "cells:waiting", 1e-8), of(1, "cells:sound", 1e-8)]
    sweeps.write("hyperband", cells, 1, scheduler={"name": "hyperband", "rungs": [4 * TOKENS], "reduction": 2})
    sweeps.run("hyperband")
    assert [brackets.bracket(cell) for cell in sweeps.cells("hyperband")] == [0, 0, 1]
    states = fold(sweeps.folder("hyperband").events())
    assert [states[cell].status for cell in sweeps.cells("hyperband")] == ["finished", "stopped", "finished"]
    stopped = sweeps.cells("hyperband")[1]
    assert states[stopped].cause == "hyperband at 512 tokens"
    assert [e.data["tokens"] for e in sweeps.events("hyperband", stopped, "report")] == [4 * TOKENS]
    assert len(sweeps.losses("hyperband", stopped)) < 12
    below = [mark.name.rpartition("-")[2] for mark in sweeps.marks("hyperband").glob("*-below-*")]
    assert (len(below), len(set(below))) == (3, 1), "one worker has trained all three"


def test_killed_and_started_again(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    """optuna chooses four points. SIGKILL of the driver while the second trains: it is lost, and the same command leaves the
    finished first as it is, and resumes the lost one from its checkpoint; two interrupts end the sweep at once, with exit code 130.
    The next command finishes it, and chooses two more. SIGKILL of the sampler while the third trains: the fourth point is the same
    as without the kill. The four are in the results; `sweep best` prints a job that can be trained; a further command changes
    nothing. The same bits: tests/end_to_end/test_nodes.py."""
    ranges = [{"learning_rate": {"log_uniform": [1e-4, 1e-1]}}]
    search = {"array": {"type": "random", "samples": 4}, "search": "optuna"}
    sweeps.write("again", ranges, 1, model="cells:later", **search)
    marks = sweeps.marks("again")

    def processes() -> int:
        return len(list(marks.glob("later-*")))

    process = sweeps.start("again")
    until(process, lambda: sweeps.folder("again").exists() and len(sweeps.cells("again")) == 2)
    first, second = sweeps.cells("again")
    run = sweeps.folder("again").run(second)
    until(process, lambda: run.committed() == [4])
    assert processes() == 2
    children = process.processes()
    os.kill(process.inner, signal.SIGKILL)
    psutil.wait_procs(children, timeout=120)
    process.communicate(timeout=300)
    before = tree(sweeps, "again", first)
    told = json.loads(sweeps.project.warm("sweep", "results", "again", "--json").stdout)
    assert told["counts"] == {"finished": 1, "lost": 1}

    second_try = sweeps.warm_start("again")
    until(second_try, lambda: processes() == 3)
    second_try.send_signal(signal.SIGINT)
    while "stopping" not in second_try.stderr.readline():
        assert second_try.poll() is None
    second_try.send_signal(signal.SIGINT)
    _, err = second_try.communicate(timeout=300)
    assert second_try.returncode == 130, err
    assert fold(sweeps.folder("again").events())[second].status == "paused"
    (marks / "go").touch()

    again = sweeps.warm_start("again", "--json")
    until(again, lambda: len(sweeps.cells("again")) == 3)
    samplers: list[psutil.Process] = []

    def one_sampler() -> bool:
        """Whether that of the second try has exited."""
        children = again.processes()
        samplers[:] = [child for child in children if "ray::Sampler" in command_line(child)]
        return len(samplers) == 1

    until(again, one_sampler)
    samplers[0].kill()
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    told = json.loads(out)
    cells = sweeps.cells("again")
    assert cells[:2] == [first, second]
    monkeypatch.syspath_prepend(sweeps.project.root)  # the folder of the user's own model
    assert expected(sweeps, "again") == [note.parameters for note in sweeps.folder("again").cells()]
    assert len(set(cells)) == 4
    assert tree(sweeps, "again", first) == before
    assert len(sweeps.events("again", first, "started")) == 1
    assert sweeps.run_events("again", second, "resumed")[0]["step"] == 4
    assert told["counts"] == {"finished": 4}
    assert sorted(row["cells"][0] for row in told["points"]) == sorted(cells)
    losses = {cell: sweeps.losses("again", cell) for cell in cells}
    assert all(len(steps) == 12 for steps in losses.values())
    assert len({row["parameters"]["optim.lr"] for row in told["points"]}) == 4
    done = sweeps.project.warm("sweep", "best", "again")
    assert yaml.safe_load(done.stdout)["optim"]["lr"] == told["points"][told["best"]]["parameters"]["optim.lr"]
    before = tree(sweeps, "again", second)
    sweeps.run("again")
    assert (sweeps.cells("again"), tree(sweeps, "again", second)) == (cells, before)


def expected(sweeps: Sweeps, name: str) -> list[Any]:
    """The points that one sampler gives when it is asked in the order of the sweep's log."""
    sweep = load_sweep(sweeps.project.root / f"{name}.yaml")
    sampler = Sampler(sweep.axes, sweep.spec.search, sweep.spec.objective.better)
    history, found = History(sweep.spec.objective.metric), []
    for event in sweeps.folder(name).events():
        if event.kind == "added":
            found.append(sampler.ask(history.results(1)))
        history.note(event)
    return found


def test_an_interrupt_and_a_limit(sweeps: Sweeps) -> None:
    """Two cells that would train for hours, one at a time. SIGTERM: the cell in training makes a checkpoint and ends; the other
    does not start. limits.hours, over all starts, does the same, with exit code 0; the next command has nothing to do."""
    sweeps.write("hours", [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}], 1)
    process = sweeps.warm_start("hours", "--set", "train.steps=100000")
    until(process, lambda: sweeps.folder("hours").exists())
    first, second = sweeps.cells("hours")
    run = sweeps.folder("hours").run(first)
    until(process, run.committed)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    states = fold(sweeps.folder("hours").events())
    assert states[first].status == "paused"
    assert second not in states
    assert states[first].figures["steps"] == run.committed()[-1]
    reached, events = run.committed()[-1], sweeps.folder("hours").events()
    # Three times as long as the first start took, to its first checkpoint and its end; a third of it is used up.
    limit = float(f"{(3 * (events[-1].at - events[0].at) + 5) / 3600:.3g}")
    file = sweeps.project.root / "hours.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "limits": {"hours": limit}}))
    for _ in range(2):
        done = sweeps.project.warm("sweep", "hours.yaml", "--set", "train.steps=100000", "--json")
        assert done.returncode == 0, done.stderr
        states = fold(sweeps.folder("hours").events())
        assert (states[first].status, states[first].cause) == ("paused", f"limits.hours is {limit:g}")
        assert states[first].figures["steps"] == run.committed()[-1] > reached
        assert second not in states
        ended = [event for event in sweeps.folder("hours").events() if event.kind == "ended"]
        assert (ended[-1].data["status"], ended[-1].data["cause"]) == ("paused", f"limits.hours is {limit:g}")


def test_a_limit_of_gpu_hours(sweeps: Sweeps) -> None:
    """On a Ray that assumes two GPUs: at the limit the cell that holds one makes a checkpoint and ends, the other does not start;
    hours and their cost are in the results. The count goes on in the next command: tests/cluster/sweep/test_budget.py."""
    limits = {"gpu_hours": 1e-5, "cost_per_gpu_hour": 2.5}
    sweeps.write("gpus", [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}], 1, "cells:unhurried", limits=limits)
    command = ["tests.end_to_end.without_gpus", "sweep", "gpus.yaml", "--json"]
    env = sweeps.project.environment() | {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 2})}
    done = forked.run(command, env, cwd=sweeps.project.root)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    first, second = sweeps.cells("gpus")
    states = fold(sweeps.folder("gpus").events())
    assert (states[first].status, states[first].cause) == ("paused", "limits.gpu_hours is 1e-05")
    assert states[first].figures["steps"] == sweeps.folder("gpus").run(first).committed()[-1]
    assert second not in states
    assert [event.data["gpus"] for event in sweeps.events("gpus", first, "started")] == [1.0]
    totals = told["totals"]
    assert 1e-5 < totals["gpu_hours"] == totals["seconds"] / 3600
    assert totals["cost"] == 2.5 * totals["gpu_hours"]


def test_cells_take_turns_and_the_worse_goes_on_from_the_better(sweeps: Sweeps) -> None:
    """pbt: two cells that would train for hours, with room for one. Each is paused for the other after an interval, and resumes in
    its next turn from a checkpoint: the better one from its own; the worse one from the other's, with the other's learning rate or
    one near it. tests/cluster/sweep/test_ray_tune.py copies between cells that train at once."""
    cells = [{"learning_rate": 1e-2}, {"learning_rate": 1e-8}]
    scheduler = {"name": "pbt", "every": 4 * TOKENS, "quantile": 0.5, "resample": 0}
    sweeps.write("pbt", cells, 1, scheduler=scheduler)
    process = sweeps.warm_start("pbt", "--set", "train.steps=100000")
    until(process, lambda: sweeps.folder("pbt").exists())
    better, worse = sweeps.cells("pbt")

    def started() -> list[Event]:
        return [event for event in sweeps.folder("pbt").events() if event.kind == "started"]

    until(process, lambda: len(started()) >= 4 and sweeps.events("pbt", worse, "exploited"))
    told = sweeps.events("pbt", worse, "exploited")[0].data
    run = sweeps.folder("pbt").run(worse)
    until(process, lambda: max(run.committed(), default=0) > told["step"])
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert [event.data["cell"] for event in started()[:4]] == [better, worse, better, worse]
    assert [event.data["tokens"] > 0 for event in started()[:4]] == [False, False, True, True]
    assert sweeps.events("pbt", better, "paused")[0].data["because"].startswith("pbt at ")
    assert told["source"] == better
    assert told["changes"]["optim.lr"][0] == 1e-8
    resumed = [event["step"] for event in sweeps.run_events("pbt", worse, "resumed")]
    assert told["step"] in resumed
    rate = yaml.safe_load((run.storage.local / "spec.yaml").read_text())["optim"]["lr"]  # type: ignore[operator]
    # The newest copy may wait for its turn.
    assert rate in [event.data["changes"]["optim.lr"][1] for event in sweeps.events("pbt", worse, "exploited")]
    states = fold(sweeps.folder("pbt").events())
    assert states[worse].lineage[0]["source"] == better


def tree(sweeps: Sweeps, name: str, cell: str) -> dict[str, str]:
    """Hash of each file of a cell's run, without its row in HPARAMS, which the next driver writes if the last one was killed."""
    root = sweeps.project.runs / name / "runs" / cell
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".row")
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
