"""`raydist trace`, `stop` and `logs` on a run that `raydist train` drives on Ray, as a user has them: two shells, one folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def test_a_live_run_is_traced_and_stopped(project: Any) -> None:
    """Two steps of both ranks in one file, while the run goes on. `raydist stop` ends it as Ctrl-C does: a checkpoint of the step
    that it came in, status interrupted, exit code 130; once more, it says that there is nothing to stop. What both ranks printed is
    there. Once it is over, a trace is one line and exit code 2, and the same command goes on, without the stop."""
    command = ["train", "job.yaml", "--name", "traced", "--json", *project.options("traced")]
    process = project.start(*command, "--set", "train.steps=100000")
    assert process.stderr is not None
    for line in process.stderr:
        if "the first of attempt 1" in line:
            break
    done = project.raydist("trace", "traced", "--steps", "2", "--json")
    stopped = project.raydist("stop", "traced")
    _, rest = process.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert "asks this run to end" in rest
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
    assert shown["checkpoints"][-1]["step"] == step > told["last_step"], "it went on"
    assert stopped.stdout.startswith(f"run traced: interrupted at step {step}, with a checkpoint of step {step};")
    assert "there is nothing to stop" in project.raydist("stop", "traced").stdout
    lines = project.raydist("logs", "traced").stdout.splitlines()
    assert {f"[rank {rank}] the model of rank {rank}" for rank in (0, 1)} <= set(lines)
    done = project.raydist("trace", "traced")
    assert done.returncode == 2
    assert done.stderr.startswith("raydist: run traced is interrupted")
    (project.root / "marks" / "traced" / "go").touch()
    done = project.raydist(*command, "--set", "train.steps=100000", "--until", str(step + 2))
    assert done.returncode == 0, done.stderr
    assert project.show("traced")["steps"] == step + 2
