"""`raydist trace`, `checkpoint now`, `stop` and `logs` from a second shell, on a run of `raydist train` on a private Ray."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from raydist.dashboard.announced import announced
from raydist.storage import Storage


def test_a_live_run_is_traced_and_stopped(project: Any) -> None:
    """`checkpoint now` saves one that is not due. A trace of a running run has two steps of both ranks in one file. `raydist stop`
    ends the run like Ctrl-C: a checkpoint of the step in which the signal arrived, status interrupted, exit code 130; a second
    `stop` prints that there is nothing to stop. Each request is an event. `logs` has the output of both ranks. On an ended run
    `trace` gives one line and exit code 2; the same `train` command resumes it. With `--dashboard` it prints the address of the
    page, once; without, that of a dashboard that shows the storage."""
    command = [
        "train",
        "job.yaml",
        "--name",
        "traced",
        "--json",
        *project.options("traced"),
        "--set",
        "checkpoint.every=1000000",
    ]
    before = []
    process = project.start(*command, "--dashboard", "--set", "train.steps=100000")
    assert process.stderr is not None
    for line in process.stderr:
        before.append(line.strip())
        if "the first of attempt 1" in line:
            break
    (page,) = [line for line in before if "live page" in line]
    assert re.search(r": http://127\.0\.0\.1:\d+/run/0/traced\?token=[\w-]{43}$", page)
    saved = project.raydist("checkpoint", "now", "traced", "--json")
    done = project.raydist("trace", "traced", "--steps", "2", "--json")
    stopped = project.raydist("stop", "traced")
    _, rest = process.communicate(timeout=300)
    assert saved.returncode == 0, saved.stderr
    assert done.returncode == 0, done.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert "`raydist stop`, process" in rest
    assert "stop requested by" in rest
    asked = [(e["what"], e["by"].partition(",")[0]) for e in project.events("traced", "requested")]
    assert asked == [
        ("checkpoint", "`raydist checkpoint now`"), ("trace", "`raydist trace`"), ("stop", "`raydist stop`"),
    ]  # fmt: skip
    assert "interrupted after step" in rest
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert told["last_step"] == told["first_step"] + 1
    for rank in told["ranks"]:
        assert 0 < rank["compute"] < 1
        assert 0 < rank["exposed"] <= rank["communication"] < 1
    events = json.loads(gzip.decompress(Path(told["path"]).read_bytes()))["traceEvents"]
    for number in (0, 1):
        names = {e["name"] for e in events if e["pid"] == number}
        assert {"forward", "backward", "optimizer", "data wait", f"step {told['last_step']}"} <= names
        assert any(name.startswith("all_reduce bucket 0") for name in names)
    assert process.returncode == 130
    shown = project.show("traced")
    assert shown["status"] == "interrupted"
    step = shown["steps"]
    assert [one["step"] for one in shown["checkpoints"]] == [json.loads(saved.stdout)["step"], step], "none is due"
    assert shown["checkpoints"][-1]["step"] == step > told["last_step"], "it went on"
    assert stopped.stdout.startswith(f"run traced: interrupted at step {step}, with a checkpoint of step {step};")
    assert "there is nothing to stop" in project.raydist("stop", "traced").stdout
    lines = project.raydist("logs", "traced").stdout.splitlines()
    assert {f"[rank {rank}] the model of rank {rank}" for rank in (0, 1)} <= set(lines)
    done = project.raydist("trace", "traced")
    assert done.returncode == 2
    assert done.stderr.startswith("raydist: run traced is interrupted")
    (project.root / "marks" / "traced" / "go").touch()
    with announced([Storage(project.runs)], "http://127.0.0.1:1"):
        done = project.warm(*command, "--set", "train.steps=100000", "--until", str(step + 2))
    assert done.returncode == 0, done.stderr
    assert "raydist: its live page: http://127.0.0.1:1/run/0/traced\n" in done.stderr
    assert project.show("traced")["steps"] == step + 2
