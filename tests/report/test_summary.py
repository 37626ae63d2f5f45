"""raydist.report.summary: the objects of `show` and `runs`, from the run folder only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint.manifest import path
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.report import summary
from raydist.run.directory import SPEC, STATE, RunDir, manifest_name
from raydist.run.driver_process import this_process
from raydist.run.log_writer import RunLog
from raydist.run.status import write_state
from tests.report.conftest import STARTUP
from tests.s3_proxy import Counting

Trained = Callable[..., tuple[RunDir, RunMonitor]]


def test_show_while_it_trains(trained: Trained) -> None:
    """The whole object, exactly: repeated steps count once, and an eval after the resume step does not count."""
    run, _ = trained()
    told, killed = summary.show(run), "rank 1: killed by SIGKILL"
    assert told.pop("tokens_per_second") == pytest.approx(1000.0), "the slow first step of the attempt does not count"
    assert told == {
        "run": "a-run",
        "path": run.uri,
        "status": "running",
        "steps": 80,
        "loss": 1 / 80,
        "eval_loss": 2.5,
        "attempts": [
            {"number": 1, "world_size": 2, "first_step": 1, "last_step": 70, "startup": None, "cause": killed},
            {"number": 2, "world_size": 1, "first_step": 51, "last_step": 80, "startup": STARTUP, "cause": None},
        ],
        "checkpoints": [{"step": 50, "bytes": 1024, "best": True}, {"step": 80, "bytes": 2000, "best": False}],
        "faults": [{"fault": "kill", "rank": 1, "step": 71, "attempt": 1, "at": 4.0}],
        "workers": [{"rank": 0, "host": "h", "node_ip": "10.0.0.1", "pid": 7}],
    }


@pytest.mark.parametrize(
    ("status", "data", "cause"),
    [
        ("finished", {}, None),
        ("paused", {}, "paused"),
        ("interrupted", {}, "interrupted"),
        ("stopped", {"cause": "NaN in the loss"}, "NaN in the loss"),
    ],
)
def test_show_after_the_end(trained: Trained, status: str, data: dict[str, str], cause: str | None) -> None:
    """The status at the end, no workers, and the cause that ended the last attempt."""
    run, watch = trained()
    watch.end(status, **data)  # type: ignore[arg-type]
    told = summary.show(run)
    assert (told["status"], told["workers"], told["attempts"][-1]["cause"]) == (status, [], cause)


def test_show_of_a_lost_run(trained: Trained) -> None:
    """Without its driver the run is lost, without workers, and the attempt has that cause; the next driver's attempts follow."""
    run, _ = trained()
    state = json.loads(run.storage.read(STATE))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    run.storage.write(STATE, json.dumps({**state, "driver": this_process(gone.pid)}).encode())
    told = summary.show(run)
    assert (told["status"], told["workers"]) == ("lost", [])
    assert told["attempts"][1]["cause"] == "its driver exited without reporting an error"
    second = RunMonitor(run.uri, interval_s=60.0)
    second.begin_attempt(3, 2, 80)
    second.flush()
    causes = [attempt["cause"] for attempt in summary.show(run)["attempts"]]
    assert causes == ["rank 1: killed by SIGKILL", "its driver exited without reporting an error", None]
    assert summary.show(run)["attempts"][2]["first_step"] is None


def test_show_of_a_run_that_has_done_nothing(tmp_path: Path) -> None:
    """Every key exists, with None and empty lists."""
    run = RunDir(tmp_path / "new")
    run.storage.write(SPEC, b"name: new\n")
    assert summary.show(run) == {
        "run": "new", "path": run.uri, "status": "running", "steps": 0, "loss": None, "eval_loss": None,
        "tokens_per_second": None, "attempts": [], "checkpoints": [], "faults": [], "workers": [],
    }  # fmt: skip


def test_show_without_a_monitor(tmp_path: Path) -> None:
    """A run of worker.standalone has records but no state.json: its last event gives the status."""
    run = RunDir(tmp_path / "alone")
    run.storage.write(SPEC, b"name: alone\n")
    log = RunLog(run)
    log.attempt(1, 0)
    log.steps([StepRecord(1, 3.0, 1e-3, 1.0, 10, 2.0, 0.1, 4, 1, "0" * 16).to_dict()])
    log.event(Event("ended", 1.0, {"status": "paused", "step": 1}))
    log.close()
    told = summary.show(run)
    assert (told["status"], told["steps"], told["tokens_per_second"]) == ("paused", 1, 5.0)
    alone = {"number": 1, "world_size": 4, "first_step": 1, "last_step": 1, "startup": None, "cause": None}
    assert told["attempts"] == [alone]
    assert [r["status"] for r in summary.runs(str(tmp_path))] == ["paused"]


def test_a_damaged_manifest_is_shown(trained: Trained) -> None:
    """The other data is still shown: the checkpoint's bytes are None, and it is not the best."""
    run, _ = trained()
    run.storage.write(path(50, manifest_name(1)), b"{}")
    assert summary.show(run)["checkpoints"] == [
        {"step": 50, "bytes": None, "best": False},
        {"step": 80, "bytes": 2000, "best": True},
    ]


def test_runs_lists_what_show_tells(trained: Trained, tmp_path: Path) -> None:
    """By name, with show's figures; folders that are not runs, hidden folders and files are skipped."""
    first, watch = trained("b-run")
    watch.end("finished")
    second, _ = trained("a-run")
    for folder in (".data", "no-run"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".data" / SPEC).write_text("")
    (tmp_path / "file").write_text("")
    listed = summary.runs(str(tmp_path))
    assert [r["run"] for r in listed] == ["a-run", "b-run"]
    for run, told in zip((second, first), listed, strict=True):
        whole = summary.show(run)
        assert told == {key: whole[key] for key in told}


def test_steps_have_the_fields_of_step_records(trained: Trained) -> None:
    """One dict per step, ascending, equal to the pushed records."""
    run, _ = trained()
    rows = list(summary.steps(run))
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert [row["attempt"] for row in rows] == [1] * 50 + [2] * 30
    assert StepRecord(**rows[6]) == StepRecord(7, 1 / 7, 1e-3, 0.5, 100, 0.1, 0.01, 2, 1, f"{7:016x}")


def test_a_list_takes_four_requests_a_run(s3: Any) -> None:
    """On an object store, besides those that list the folders: so 10,000 runs are 40,000 requests, 32 at a time."""
    uri = s3.uri("many")
    server = uri.partition("endpoint_override=")[2].partition("&")[0]

    def asked(runs: int) -> int:
        for number in range(runs):
            run = RunDir(uri.replace("/many?", f"/many/run-{number}?"))
            run.storage.write(SPEC, b"name: a-run\n")
            write_state(
                run, {"status": "finished", "heartbeat_at": 1.0, "driver": this_process(), "step": 3, "loss": 2.0}
            )
        with closing(Counting(server)) as proxy:
            rows = summary.runs(uri.replace(server, proxy.place))
        assert [(row["status"], row["steps"]) for row in rows] == [("finished", 3)] * runs
        return proxy.requests

    few, many = asked(2), asked(8)
    assert 0 < many - few <= 4 * 6
