"""`raydist trace` on a run that `raydist train` drives on Ray, as a user has them: two shells, one folder."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any


def test_a_live_run_is_traced(project: Any) -> None:
    """Two steps of both ranks in one file, while the run goes on. SIGINT ends it with a checkpoint of the step that it came in,
    status interrupted and exit code 130; once it is over, a trace is one line and exit code 2."""
    command = ["train", "job.yaml", "--name", "traced", "--json", *project.options("traced")]
    process = project.start(*command, "--set", "train.steps=100000")
    assert process.stderr is not None
    for line in process.stderr:
        if "the first of attempt 1" in line:
            break
    done = project.raydist("trace", "traced", "--steps", "2", "--json")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
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
    assert shown["checkpoints"][-1]["step"] == shown["steps"] > told["last_step"], "it went on"
    done = project.raydist("trace", "traced")
    assert done.returncode == 2
    assert done.stderr.startswith("raydist: run traced is interrupted")
