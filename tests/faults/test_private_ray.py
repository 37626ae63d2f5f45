"""The central processes of a private Ray are killed and stopped, with real signals: the run goes on, or ends with the cause.

Over a minute: three drivers, each with a Ray of its own, because two of the signals end it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from raydist.faults import KillProcess
from tests import forked
from tests.faults.conftest import GPT, write
from tests.processes import command_line, runs

END_S = 300
PROCESSES = {
    "GCS": "/gcs/gcs_server",
    "raylet": "/raylet/raylet",
    "coordinator": "ray::Coordinator",
    "monitor": "ray::RunMonitor",
}


class Trained:
    """A run in a driver of its own, whose Ray has started: before the run's first step, which comes seconds later.

    `central`: pids of Ray's own processes by their name.
    """

    def __init__(self, project: Any, name: str, *options: str) -> None:
        self.project, self.name = project, name
        job = [*GPT, "--set", "train.steps=1000000", "--set", "checkpoint.every=20", "--set", "eval.every=1000000"]
        self.process: forked.Program = project.start("train", "job.yaml", "--name", name, *job, *options)
        self.below: set[psutil.Process] = set()
        self.central: dict[str, int] = {}
        self.until(self._has_started)

    def _has_started(self) -> bool:
        self.look()
        for process in sorted(self.below, key=lambda each: (each.create_time(), each.pid)):
            for name in ("GCS", "raylet"):
                if PROCESSES[name] in command_line(process):
                    self.central.setdefault(name, process.pid)  # what it forks has its command line until it executes
        return len(self.central) == 2

    def look(self) -> None:
        """Notes the processes that run below the driver."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.below.update(self.process.processes())

    def until_saved(self) -> None:
        """Waits for a checkpoint."""
        self.until(lambda: bool(list((self.project.runs / self.name).glob("checkpoints/step-*/MANIFEST-*"))))
        self.look()

    def until(self, true: Callable[[], bool]) -> None:
        """Waits for it while the run goes on."""
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.2)  # each look at the processes takes milliseconds

    def pid(self, name: str) -> int:
        """Of a central process."""
        mark = PROCESSES[name]
        return next(p.pid for p in self.process.processes() if mark in command_line(p))

    def step(self) -> int:
        """The newest committed checkpoint."""
        return max(
            int(p.parent.name[5:]) for p in (self.project.runs / self.name).glob("checkpoints/step-*/MANIFEST-*")
        )

    def ended(self) -> tuple[int, str]:
        """Its exit code and stderr; nothing of it is left."""
        _, err = self.process.communicate(timeout=END_S)
        _, alive = psutil.wait_procs(list(self.below), timeout=120)
        assert not [process for process in alive if runs(process)], err
        assert "Traceback" not in err, err
        assert self.project.show(self.name)["status"] == "stopped", f"exit code {self.process.returncode}: {err}"
        return self.process.returncode, err


@pytest.mark.parametrize("name", ["GCS", "raylet"])
def test_killed(project: Any, name: Any) -> None:
    """By a fault of rank 1, the raylet by the kernel for lack of memory. Exit code 3 with the cause. Without the GCS the ranks save
    a checkpoint first.
    """
    fault = KillProcess(rank=1, step=45, process=name.lower(), lack_of_memory=name == "raylet")
    run = Trained(project, f"killed-{name.lower()}", *write(project, f"killed-{name.lower()}", [fault]))
    while run.process.poll() is None:
        run.look()
        time.sleep(0.2)  # the fault may come at any time
    pid, before = run.central[name], 40
    code, err = run.ended()
    assert code == 3
    cause = f"Ray's {name} (process {pid}) has exited, killed by SIGKILL"
    if name == "raylet":
        cause += f": the kernel killed process {pid} for lack of memory; it used "
    assert cause in err, err
    assert "; run the same command again to continue" in err
    assert run.step() > before if name == "GCS" else run.step() >= before
    assert "killed by SIGKILL" in project.show(run.name)["attempts"][-1]["cause"]


def test_stopped(project: Any) -> None:
    """All of them for some seconds: the run goes on. The monitor for longer: it is replaced. The coordinator for good: SIGTERM ends
    the run with exit code 3 and that cause.
    """
    run = Trained(project, "frozen")
    run.until_saved()
    pids = [run.pid(name) for name in PROCESSES]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)  # what is tested: for how long
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    before = run.step()
    run.until(lambda: run.step() > before)
    assert [run.pid(name) for name in PROCESSES] == pids
    os.kill(pids[-1], signal.SIGSTOP)
    run.until(lambda: not psutil.pid_exists(pids[-1]))
    before = run.step()
    run.until(lambda: run.step() > before)
    coordinator = run.pid("coordinator")
    os.kill(coordinator, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    code, err = run.ended()
    assert code == 3, err
    assert f"Ray's coordinator (process {coordinator}) has been stopped, as by SIGSTOP" in err
