"""Stops each process of a run and of its private Ray for a minute with SIGSTOP, in real time, and says what the run does.

    python benchmarks/stopped.py [--seconds 60] [--of agent monitor coordinator gcs raylet]

Two gloo ranks on this machine, the job of chaos.py. One after the other, an agent, the monitor, the coordinator, the GCS and the
raylet are stopped, and continued after the given time if they still exist. A driver that ends is started again with the same
command. docs/explanation/faults.md says beforehand what a run does, by the default limits:

    agent                       is given up after 8 s; another one takes its place, and the run continues
    monitor                     is killed after 10 s; Ray starts it again, and the run continues
    coordinator, GCS, raylet    recovery.head_timeout (40 s): exit code 3 with that cause; the same command resumes the run

Checked: just that; after each end and the last one no process runs 10 s later; each step has one row; no file is left in /dev/shm
or /tmp. Printed: the seconds until the driver ended, and until the next checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import JOB, RAYDIST
from common import write
from soak import PROGRESS_S, by_role, shared_memory, until

from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps

ENDS = {"coordinator": "Ray's coordinator", "gcs": "Ray's GCS", "raylet": "Ray's raylet"}
"""What ends the run by the default limits -> what the cause must name."""
ORDER = ("agent", "monitor", *ENDS)


class Trained:
    """The run's driver, which is started again when it ends."""

    def __init__(self, folder: Path) -> None:
        self.run, self._folder = RunDir(folder / "stopped"), folder
        self.below: dict[int, psutil.Process] = {}
        self.shared: set[Path] = set()
        self.start()

    def start(self) -> None:
        """Starts it, and waits for a new checkpoint."""
        command = [
            RAYDIST,
            "train",
            "job.yaml",
            "--name",
            "stopped",
            "--storage",
            str(self._folder),
            "--address",
            "local",
        ]
        command += ["--set", "train.steps=100000000"]
        with open(self._folder / "err", "w") as err:
            self.driver = subprocess.Popen(command, cwd=self._folder, text=True, stdout=subprocess.DEVNULL, stderr=err)
        before = self.run.newest_step() if self.run.exists() else 0
        assert self.saved_after(before), (self._folder / "err").read_text()

    def saved_after(self, step: int) -> bool:
        """Waits for a checkpoint of a later step; False if the driver ends first."""
        return until(lambda: self.run.exists() and self.run.newest_step() > step, self.driver)

    def look(self) -> None:
        """Remembers what runs below the driver, and its names in shared memory."""
        driver = psutil.Process(self.driver.pid)
        self.below |= {each.pid: each for each in driver.children(recursive=True)}
        self.shared |= shared_memory(driver, self.run)


def stop(trained: Trained, what: str, seconds: float, rng: random.Random) -> dict[str, Any]:
    """What the run does while the process is stopped, and after."""
    victim = rng.choice(by_role(psutil.Process(trained.driver.pid))[what])
    trained.look()
    victim.send_signal(signal.SIGSTOP)
    begun, ended = time.monotonic(), None
    while time.monotonic() - begun < seconds:
        if ended is None and trained.driver.poll() is not None:
            ended = time.monotonic() - begun
        time.sleep(0.1)
    there = victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE
    if there:
        victim.send_signal(signal.SIGCONT)
    before, at = trained.run.newest_step(), time.monotonic()
    went_on = ended is None and trained.saved_after(before)
    found: dict[str, Any] = {
        "to": what,
        "ended_s": ended if went_on or ended is not None else time.monotonic() - begun,
        "exit_code": trained.driver.poll(),
        "cause": "" if went_on else read_events(trained.run)[-1].data.get("cause", ""),
        "replaced_or_ended": not there,
        "next_checkpoint_s": time.monotonic() - at if went_on else None,
    }
    if not went_on:
        assert trained.driver.poll() is not None, f"nothing for {PROGRESS_S:.0f} s after {what}"
        _, alive = psutil.wait_procs(list(trained.below.values()), timeout=10)
        found["left"] = [" ".join(each.cmdline())[:80] for each in alive]
        trained.start()
    return found


def as_told(found: dict[str, Any]) -> bool:
    """Whether that is what the docs say."""
    if found["to"] in ENDS:
        return found["exit_code"] == 3 and ENDS[found["to"]] in found["cause"] and not found["left"]
    return found["exit_code"] is None and bool(found["replaced_or_ended"])


def main() -> None:
    """Runs, prints and writes the results. Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--of", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Orphaned processes become children of this one, so that all are counted.
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("RAY_ADDRESS", None)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="stopped-") as home:
        folder = Path(home)
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        os.environ["TMPDIR"] = tempfile.tempdir = home  # of this run alone
        trained = Trained(folder)
        found = []
        for what in options.of:
            found.append(stop(trained, what, options.seconds, rng))
            print(found[-1], flush=True)
        trained.look()
        trained.driver.send_signal(signal.SIGTERM)
        trained.driver.wait()
        _, alive = psutil.wait_procs(list(trained.below.values()), timeout=10)
        rows = read_steps(trained.run)["step"].to_pylist()
        checks = {
            **{f"{one['to']}: as the docs say": as_told(one) for one in found},
            "each step has one row": rows == list(range(1, len(rows) + 1)) and len(rows) > 0,
            "nothing runs 10 s after the end": not alive,
            "no file in /dev/shm or /tmp left": len(trained.shared) >= 2
            and not any(path.exists() for path in trained.shared)
            and not list(folder.glob("raydist-*")),
        }
    for check, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED':7s}{check}")
    print(write("stopped", {"seconds": options.seconds, "steps": len(rows), "stopped": found, "checks": checks}))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
