"""The script of `raydist deploy slurm`, on two hosts with Slurm's commands (tests/slurm.py).

Over a minute: the job is preempted, so Ray starts twice on both hosts.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.hosts import Hosts
from tests.slurm import Job


def test_a_preempted_job_goes_on_in_the_queue(project: Any, tmp_path: Path) -> None:
    """One Ray a node, one rank on each. Slurm announces a preemption: the run saves a checkpoint, the script puts the job back into
    the queue, and its second run resumes at that step and ends with code 0. Each step was trained once."""
    steps = 300
    sets = [f"train.steps={steps}", "checkpoint.every=null", "eval.every=null", "cluster.resources={nodes: 2, gpus: 0}"]
    sets += ["cluster.cpus_per_worker=1", "recovery.step_timeout=120"]
    options = [word for text in sets for word in ("--set", text)] + project.options("queued", hold=9)
    made = project.raydist("deploy", "slurm", "job.yaml", "--name", "queued", *options, "-o", str(tmp_path))
    assert made.returncode == 0, made.stderr
    with Hosts(2) as hosts:
        job = Job(hosts, tmp_path, Path(made.stdout.strip()), project.environment())
        assert job.asked["nodes"] == "2"

        def started(attempts: int) -> bool:
            if not (project.runs / "queued" / "events.jsonl").exists():
                return False
            return len(project.events("queued", "first_step")) == attempts

        job.until(lambda: started(1) or job.code is not None)
        assert job.code is None, job.log.read_text()
        (workers,) = project.events("queued", "workers")
        assert {worker["host"] for worker in workers["workers"]} == {"host0", "host1"}
        folders = [line.split() for line in job.folders()]
        assert [mode for mode, _ in folders] == ["700", "700"]
        assert len({name for _, name in folders}) == 1  # mktemp's
        job.signal(signal.SIGUSR1)
        job.until(lambda: "stopping: one checkpoint" in job.log.read_text())
        for worker in workers["workers"]:
            (project.root / "marks" / "queued" / f"go-{worker['host']}-{worker['pid']}").touch()
        job.until(lambda: job.runs == 2 or job.code is not None)
        (project.root / "marks" / "queued" / "go").touch()
        job.until(lambda: job.code is not None)
        assert (job.code, job.runs) == (0, 2), job.log.read_text()
        assert job.left == []
    assert [row["step"] for row in project.steps("queued")] == list(range(1, steps + 1))
    (resumed,) = project.events("queued", "resumed")
    assert 0 < resumed["step"] < steps
    assert len(project.show("queued")["attempts"]) == 2
