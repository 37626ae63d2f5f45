"""`raydist.open` and what it returns, from folders alone."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

import raydist
from raydist.api import runs as api_runs
from raydist.api import start as api_start
from raydist.errors import DataError, RunNotFound, SpecError, TrainingStopped, UsageError, UserError
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, Finding, StepRecord
from raydist.report.text import size
from raydist.run import driver_process
from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.lease import DriverLease
from raydist.run.log import json_line
from raydist.run.status import write_state
from raydist.run.sweep_directory import CellNote, SweepDir, SweepLog
from raydist.spec import JobSpec
from raydist.spec.script import SESSION


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    """A run of three steps with an evaluation and a finding, finished."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"name: a-run\n")
    monitor = RunMonitor(run.uri, interval_s=60.0)
    monitor.begin_attempt(1, 2, 0)
    steps = [StepRecord(s, 1 / s, 1e-3, 1.0, 100, 0.1, 0.0, 2, 1, f"{s:016x}").to_dict() for s in (1, 2, 3)]
    found = Finding("leak", 1, "warning", "memory grows", {"mib_per_hour": 3.0}, "look for a list that grows")
    monitor.push(steps, [])
    monitor.push(
        [], [Event("eval", time.time(), {"step": 3, "loss": 2.5, "tokens": 64}).to_dict(), found.event(2.0).to_dict()]
    )
    monitor.end("finished")
    return run


def test_a_finished_run(folder: RunDir) -> None:
    """Steps, events, findings, checkpoints, a page, and how it looks in a notebook."""
    run = raydist.open(folder.uri)
    assert isinstance(run, raydist.Run)
    assert (run.name, run.uri, run.status) == ("a-run", folder.uri, "finished")
    assert run.steps()["loss"].to_pylist() == [1.0, 1 / 2, 1 / 3]
    assert run.steps(["loss"]).column_names == ["step", "loss"]
    with pytest.raises(UsageError, match="steps have no column 'lost'"):
        run.steps(["lost"])
    assert [e.data["loss"] for e in run.events("eval")] == [2.5]
    assert len(run.events()) > len(run.events("eval"))
    assert [(f["rule"], f["rank"], f["at"]) for f in run.findings()] == [("leak", 1, 2.0)]
    assert run.checkpoints == []
    assert run.watch()["status"] == "finished"
    assert list(run.logs()) == []
    for wrong, what in (({"attempt": 99}, "attempt 99"), ({"attempt": 0}, "attempt 0"), ({"rank": 2}, "rank 2")):
        with pytest.raises(UsageError, match=f"run a-run has no {what}"):
            run.logs(**wrong)
    assert Path(run.report()).read_text().startswith("<!doctype html>")
    page = str(Path(folder.uri).parent / "page.html")
    assert run.report(page) == run.report(Path(page)) == page
    with pytest.raises(UsageError, match="3 is not the name of a file"):
        run.report(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is a folder"):
        run.report(str(Path(folder.uri).parent))
    assert run.wait() is run
    assert run.stop() is run
    assert set(run.doctor()) == {"findings", "looked", "blind"}
    assert run.verify() == []
    for only_training in (run.save, run.trace):
        with pytest.raises(UsageError, match="a-run is finished"):
            only_training()
    assert repr(run).startswith("<raydist run a-run: finished at step 3, ")
    shown = run._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "Loss" in shown
    assert "<script" not in shown, "the page is quoted as an attribute"


def test_the_doctor_says_which_setting_fits(tmp_path: Path) -> None:
    """Of a rank that ran out of memory: which settings fit by the planner, with both forecasts, after those that a decision had
    changed; what is missing for it, of a run without telemetry; and nothing of the planner's for a user's own loop."""
    train = {"steps": 10, "global_batch": 64, "micro_batch": 32}
    spec = JobSpec.model_validate(
        {"data": {"source": "any"}, "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 512},
         "train": train, "optim": {"lr": 1e-3}, "cluster": {"workers": 2}}
    )  # fmt: skip
    of_script = spec.model_copy(update={"model": spec.model.model_copy(update={"name": SESSION})})
    found = []
    for name, job, telemetry in (("a-run", spec, True), ("blind", spec, False), ("own", of_script, True)):
        run = RunDir(tmp_path / name)
        run.storage.write(SPEC, json.dumps(job.model_dump(mode="json")).encode())
        monitor = RunMonitor(run.uri, interval_s=60.0)
        who = {"at": time.time(), "host": "h", "node": "10.0.0.1"}
        rows = [{**who, "kind": "node", "memory_total_bytes": 2 * (2**29 + 100 * 2**20)},
                *({**who, "kind": "rank", "rank": r, "attempt": 2, "step": 3} for r in range(2))]  # fmt: skip
        workers = [{"rank": r, "host": "h", "node_ip": "10.0.0.1", "device": "cpu"} for r in range(2)]
        failure = {"fault": "out_of_memory", "rank": 1, "cause": "no memory", "traceback": "", "echoes": 1}
        monitor.begin_attempt(1, 2, 0)
        monitor.push(
            [], [Event("decision", time.time(), {"action": "restart", "because": "", "micro_batch": 16}).to_dict()]
        )
        monitor.begin_attempt(2, 2, 0)
        monitor.push([], [Event("workers", time.time(), {"workers": workers}).to_dict()])
        if telemetry:
            monitor.observe(rows)
        monitor.push([], [Event("failure", time.time(), {"attempt": 2, **failure}).to_dict()])
        monitor.end("stopped")
        told = raydist.Run(run).doctor()
        (one,) = [one for one in told["findings"] if one["rule"] == "stopped"]
        found.append((one, told["blind"]))
    (fits, _), (unknown, blind), (own, _) = found
    figures = {one["figure"]: one["value"] for one in fits["evidence"] if one["from"].startswith("planner")}
    needed, usable, then = figures.values()
    assert usable == pytest.approx(100 * 2**20, rel=1e-3)
    assert needed > usable >= then > needed / 16
    assert fits["remedy"].startswith("set train.")
    assert f"by the planner the fullest device then needs {size(then)} of 100.0 MiB; as it ran" in fits["remedy"]
    assert fits["culprit"]["setting"].startswith("train.")
    assert "`raydist doctor RUN` says which fits" in unknown["remedy"]
    assert any("after attempt 2 ran out of memory: no telemetry" in line for line in blind)
    assert own["remedy"] == "lower the session's micro_batch, or use the session's strategy: zero2 or zero3"


def test_listed_and_deleted(folder: RunDir) -> None:
    """As `raydist runs --json` and `raydist rm` do it; a run that trains stays."""
    storage = str(Path(folder.uri).parent)
    assert [(row["run"], row["status"], row["path"]) for row in raydist.list_runs(storage)] == [
        ("a-run", "finished", folder.uri)
    ]
    run = raydist.open("a-run", storage)
    lease = DriverLease(folder)
    with pytest.raises(UsageError, match="run a-run is running"):
        run.delete()
    lease.release()
    run.delete()
    assert raydist.list_runs(storage) == []


def test_no_run(tmp_path: Path) -> None:
    """The error of the command."""
    with pytest.raises(RunNotFound, match="no run or sweep 'b'"):
        raydist.open("b", str(tmp_path))


def test_waiting_for_a_run_of_another_process(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` returns when its driver ends it, and raises what stopped it; `stop` asks that driver."""
    monkeypatch.setattr(api_runs, "POLL_S", 0.02)
    run = raydist.open(folder.uri)
    assert isinstance(run, raydist.Run)
    lease = DriverLease(folder)
    assert not run.ended()
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.1 s"):
        run.wait(timeout=0.1)
    run.stop(wait=False)
    lease._look_for_stop()
    assert lease.asked_to_stop() is not None

    ended = Event("ended", time.time(), {"status": "stopped", "cause": "rank 1: boom"})

    def end() -> None:
        write_state(folder, {"status": "stopped", "heartbeat_at": time.time(), "driver": this_process()})
        folder.storage.write("events.jsonl", json_line(ended.to_dict()))
        lease.release()

    thread = threading.Timer(0.2, end)
    thread.start()
    with pytest.raises(TrainingStopped, match="a-run: rank 1: boom"):
        run.wait()
    thread.join()


def test_waiting_for_a_sweep_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` returns when its driver ends it; it raises if none of its cells has finished, or if the driver died."""
    monkeypatch.setattr(api_runs, "POLL_S", 0.02)
    folder = SweepDir(tmp_path / "tuned")
    folder.write("", "", [CellNote(i, f"c{i}", i, {}, 0) for i in range(2)])
    sweep = raydist.open(folder.uri)
    assert isinstance(sweep, raydist.Sweep)
    lease = DriverLease(RunDir(folder.storage))
    with pytest.raises(TimeoutError, match=r"sweep tuned has not ended in 0\.1 s"):
        sweep.wait(timeout=0.1)

    def end(kind: str, **data: object) -> None:
        log = SweepLog(folder)
        for cell in ("c0", "c1"):
            log.event(kind, cell, **data)
        log.flush()
        lease.release()

    for kind, data, error in (
        ("failed", {"cause": "boom", "final": True}, "none of its 2 cells has finished; 2 failed, the first one because of boom"),
        ("finished", {}, None),
    ):  # fmt: skip
        thread = threading.Timer(0.1, end, (kind,), data)
        thread.start()
        with pytest.raises(TrainingStopped, match=error) if error else nullcontext():
            assert sweep.wait(timeout=240) is sweep
        thread.join()
        lease = DriverLease(RunDir(folder.storage))
    monkeypatch.setattr(driver_process, "LOST_AFTER_S", -1.0)
    with pytest.raises(TrainingStopped, match="sweep tuned: its driver died"):
        sweep.wait()
    lease.release()


def test_own_code_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found here as by the run's driver, which then meets the next error; this process's path stays as it was. A dict may
    extend a file, too."""
    (tmp_path / "hook_of_this_folder.py").write_text("class Hook:\n    def __init__(self, facts): ...\n")
    job = {"name": "a", "data": {"path": "nowhere"}, "train": {"steps": 1}, "hooks": ["hook_of_this_folder:Hook"]}
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(SpecError, match='no module "hook_of_this_folder"'):
        raydist.train(job, storage=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    (tmp_path / "base.yaml").write_text("data: {path: nowhere}\ntrain: {steps: 1}\n")
    with pytest.raises(DataError, match="nowhere"):
        raydist.train({"name": "a", "extends": "base.yaml", "hooks": job["hooks"]}, storage=str(tmp_path))
    assert sys.path == before


def test_own_code_in_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call takes the working directory off the path while another one needs it there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])

    def call(_: int) -> bool:
        with api_start.own_code():
            time.sleep(0.0001)
            return str(tmp_path) in sys.path

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(200)))
    assert str(tmp_path) not in sys.path


def test_a_wrong_job_is_an_error_here(tmp_path: Path) -> None:
    """Of a file, a dict and a field that is set: SpecError with file, field and remedy, before any process starts."""
    job = tmp_path / "job.yaml"
    job.write_text("model: {name: gpt}\ndata: {source: text}\ntrain: {steps: 1}\n")
    for spec, given, text in (
        (job, {"optim.lrr": 1}, "set optim.lrr: optim.lrr: .*did you mean"),
        (job, "optim.lr=1", "set: 'optim.lr=1' is text; write set={'optim.lr': 3e-4}"),
        (job, {1: 2}, "set 1: 1: unknown field"),
        (job, 3, "set: 3 is no dict; write set="),
        (None, {}, "spec: None is not a job; give a YAML file"),
        ({1: 1}, {}, "spec: 1 is not the name of a field"),
        (str(tmp_path / "jbo.yaml"), {}, "no such file"),
        ({"model": {"name": "gtp"}, "data": {"source": "text"}, "train": {"steps": 1}}, {}, "spec: model.name: .*gpt"),
        ({"train": {"steps": -1}}, {}, "train.steps"),
    ):
        with pytest.raises(SpecError, match=text):
            raydist.train(spec, set=given, storage=str(tmp_path))
    for wrong, text in (
        ({"until": "5"}, "until='5': is not a number of at least 1"),
        ({"name": 3}, "run name 3"),
        ({"storage": 3}, "storage 3: is not the name of a folder"),
    ):
        with pytest.raises(UserError, match=text):
            raydist.train(job, **{"storage": str(tmp_path), **wrong})
    for call, text in (
        (raydist.run_script, "script: None is not the name of a file"),
        (raydist.sweep, "sweep: None is not"),
    ):
        with pytest.raises(UsageError, match=text):
            call(None)
    own = {
        "data": {"source": str(tmp_path / "text")},
        "train": {"steps": 1},
        "cluster": {"workers": 2},
        "eval": {"every": None},
    }
    (tmp_path / "text").write_text("a line of text\n" * 200)
    for name, pipeline, text in (
        ("row", {"chunks": 3}, r"6 stages \(pipeline x chunks\), and the model has 4 blocks"),
        ("Own", {}, r"Own has no stage\(first, last\)"),
    ):
        model = {"name": f"tests.ownmodels:{name}", "layers": 2, "context": 8}
        mesh = {"pipeline": 2, **pipeline}
        with pytest.raises(UserError, match=f"spec: .*{text}"):
            raydist.train({**own, "model": model, "parallel": mesh, "name": "own"}, storage=str(tmp_path))
        assert not (tmp_path / "own").exists()
    for options, text in (
        ({"dashboard": True, "wait": False}, "dashboard=True with wait=False"),
        ({"until": 0}, "until=0: is not a number of at least 1"),
        ({"wait_for_driver": float("inf")}, "wait_for_driver=inf: is not a number of at least 0"),
    ):
        with pytest.raises(UsageError, match=text):
            raydist.train(job, storage=str(tmp_path), **options)
    assert not (tmp_path / "gpt").exists()
