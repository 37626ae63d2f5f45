"""Trains for a given time with a fault a minute, and measures whether the processes of the run grow.

    python benchmarks/soak.py [--minutes 20] [--every 60] [--runs 2] [--warm-up 180] [--seed 1]

Two gloo ranks on this machine, the job of chaos.py, a private Ray. From outside, by random: a rank, an agent, or the run's monitor
is killed (SIGKILL) or stopped for some seconds (SIGSTOP), the coordinator, the GCS or the raylet is stopped for some seconds. At
the end the driver gets a SIGTERM, saves, and ends.

Every 5 seconds, of the driver, the monitor, the coordinator, the agents, the fork servers, the ranks and Ray's own processes:
private memory (USS), open descriptors and threads, the mean over the processes of a role. After the warm-up a line is fitted to
each (Theil-Sen: the median of the slopes of all pairs, which restarted processes do not bend).

Checked: the slope of memory of the driver, the monitor, the agents and the ranks is below 1 MiB a minute, of descriptors and
threads below one in ten minutes; the run goes on after every fault; each step has one row; nothing is left behind. Memory slopes
mean little in runs of a few minutes: allocators still grow.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import JOB, RAYDIST
from common import write

from raydist.ipc import mailbox
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from raydist.run.status import last_word

SAMPLE_S = 5.0
STOPPED_S = 5.0
PROGRESS_S = 600.0
"""How long the next checkpoint after a fault may take."""
MEMORY_MIB, NUMBER = 1.0, 0.1
"""Limits of the slopes, by minute."""
OURS = ("driver", "monitor", "agent", "rank")
"""Roles that the limits apply to."""
ROLES = {
    "gcs": re.compile(r"/gcs_server\b"),
    "raylet": re.compile(r"/raylet/raylet\b"),
    "monitor": re.compile(r"^ray::RunMonitor"),
    "coordinator": re.compile(r"^ray::Coordinator"),
    "agent": re.compile(r"^ray::.*RayTrainWorker"),
    "fork server": re.compile(r"raydist\.launch\.zygote"),
}


class Sample(NamedTuple):
    """Means over the processes of a role at one time."""

    minute: float
    memory_mib: float
    descriptors: float
    threads: float


def role(process: psutil.Process) -> str:
    """The role of a process of the run; "" for others. A rank is forked by a fork server, which the zygote has forked."""
    line = " ".join(process.cmdline())
    found = next((name for name, pattern in ROLES.items() if pattern.search(line)), "")
    above = 0
    while found == "fork server" and (parent := process.parent()) is not None:
        if not ROLES["fork server"].search(" ".join(parent.cmdline())):
            break
        process, above = parent, above + 1
    return "rank" if above >= 2 else found


def by_role(driver: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The processes of the run."""
    found: dict[str, list[psutil.Process]] = {"driver": [driver]}
    for process in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.setdefault(role(process), []).append(process)
    return found


def shared_memory(driver: psutil.Process, run: RunDir) -> set[Path]:
    """The names that the run has now in /dev/shm, where other runs on this host have theirs."""
    journals = (path for path in Path("/dev/shm").glob("raydist-*-journal-*") if run.uri in path.read_text()[:2000])
    bells = (Path(c.laddr) for c in driver.net_connections("unix") if str(c.laddr).startswith("/dev/shm/raydist-"))
    return {mailbox.folder(run.uri), *journals, *(bell.parent for bell in bells)}


class Sampler:
    """Samples the processes below `driver` until `close`."""

    def __init__(self, driver: psutil.Process) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._driver, self._begun, self._ended = driver, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            minute = (time.monotonic() - self._begun) / 60
            with suppress(psutil.NoSuchProcess):
                for name, processes in by_role(self._driver).items():
                    rows = []
                    for process in processes:
                        with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
                            if process.status() != psutil.STATUS_ZOMBIE:
                                uss = process.memory_full_info().uss / 2**20
                                rows.append((uss, process.num_fds(), process.num_threads()))
                    if rows:
                        self.samples.setdefault(name, []).append(Sample(minute, *np.mean(rows, axis=0).tolist()))


def slope(minutes: np.ndarray, values: np.ndarray) -> float:
    """The median of the slopes of all pairs of points."""
    i, j = np.triu_indices(len(minutes), 1)
    return float(np.median((values[j] - values[i]) / (minutes[j] - minutes[i])))


def slopes(samples: dict[str, list[Sample]], after: float) -> dict[str, dict[str, float]]:
    """Role -> of memory, descriptors and threads the first and the last values and the slope by minute, after the warm-up."""
    found = {}
    for name, rows in sorted(samples.items()):
        table = np.array([row for row in rows if row.minute >= after])
        if name and len(table) > 10:
            columns = zip(Sample._fields[1:], table[:, 1:].T, strict=True)
            found[name] = {
                key: value
                for field, column in columns
                for key, value in (
                    (f"{field}_first", float(np.median(column[:5]))),
                    (f"{field}_last", float(np.median(column[-5:]))),
                    (f"{field}_a_minute", slope(table[:, 0], column)),
                )
            }
    return found


FAULTS: dict[str, list[signal.Signals]] = {
    "rank": [signal.SIGKILL, signal.SIGSTOP],
    "agent": [signal.SIGKILL, signal.SIGSTOP],
    "monitor": [signal.SIGKILL, signal.SIGSTOP],
    "coordinator": [signal.SIGSTOP],
    "gcs": [signal.SIGSTOP],
    "raylet": [signal.SIGSTOP],
}
"""Role -> what happens to one of its processes. A stopped one is continued after STOPPED_S, unless it was killed meanwhile."""


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits until it is true, at most PROGRESS_S, while the driver runs."""
    deadline = time.monotonic() + PROGRESS_S
    while process.poll() is None and time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.2)
    return False


def soak(folder: Path, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One run: faults, slopes and checks."""
    name = f"soak-{number}"
    run, rng = RunDir(folder / name), random.Random(options.seed + number)
    command = [RAYDIST, "train", "job.yaml", "--name", name, "--storage", str(folder), "--address", "local"]
    with open(folder / f"{name}.err", "w") as err:
        process: subprocess.Popen[str] = subprocess.Popen(
            [*command, "--set", "train.steps=100000000"],
            cwd=folder,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
    driver = psutil.Process(process.pid)
    stuck: list[str] = []
    if not until(lambda: run.exists() and run.newest_step() > 0, process):
        stuck.append("start")
    sampler, begun = Sampler(driver), time.monotonic()
    happened: list[dict[str, Any]] = []
    kinds = [(name, number) for name, numbers in FAULTS.items() for number in numbers]
    order: list[tuple[str, signal.Signals]] = []
    while not stuck and time.monotonic() - begun < 60 * options.minutes:
        time.sleep(max(0.0, begun + options.every * (len(happened) + 1) - time.monotonic()))
        if not order:
            order = rng.sample(kinds, len(kinds))  # each kind once before any comes again
        what, sent = order.pop()
        found = by_role(driver).get(what, [])
        if not found or process.poll() is not None:
            stuck.append(f"no {what}")
            break
        victim, step = rng.choice(found), run.newest_step()
        print(f"{time.monotonic() - begun:6.0f} s  step {step}: {sent.name} to the {what}", flush=True)
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(sent)
            if sent == signal.SIGSTOP:
                time.sleep(STOPPED_S)
                victim.send_signal(signal.SIGCONT)
        at = time.monotonic()
        if not until(lambda step=step: run.newest_step() > step, process):  # type: ignore[misc]
            stuck.append(f"{sent.name} to the {what}")
        happened.append({"to": what, "signal": sent.name, "step": step, "next_checkpoint_s": time.monotonic() - at})
    sampler.close()
    shared = shared_memory(driver, run) if process.poll() is None else set()
    below = driver.children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    rows = read_steps(run)["step"].to_pylist()
    found_slopes = slopes(sampler.samples, options.warm_up / 60)
    state = last_word(run) or {}
    checks = {
        "every fault was survived": not stuck and len(happened) > 0,
        "ended by SIGTERM, resumable": process.returncode == 143 and state.get("status") == "interrupted",
        "each step has one row": rows == list(range(1, len(rows) + 1)) and len(rows) > 0,
        "nothing runs 10 s after the end": not alive,
        "no file in /dev/shm or /tmp left": len(shared) >= 2
        and not any(path.exists() for path in shared)
        and not [path for path in Path(tempfile.gettempdir()).glob("raydist-*") if path != folder],
    }
    for who in OURS:
        of = found_slopes.get(who, {})
        checks[f"memory of the {who} is flat"] = of.get("memory_mib_a_minute", np.inf) < MEMORY_MIB
        checks[f"descriptors and threads of the {who} are flat"] = (
            max(of.get("descriptors_a_minute", np.inf), of.get("threads_a_minute", np.inf)) < NUMBER
        )
    if not all(list(checks.values())[:3]):
        print((folder / f"{name}.err").read_text()[-3000:], stuck, process.returncode, state.get("status"))
    return {
        "steps": len(rows),
        "attempts": sum(event.kind == "attempt_started" for event in read_events(run)),
        "faults": happened,
        "roles": found_slopes,
        "checks": checks,
    }


def main() -> None:
    """Runs them, prints and writes the results. Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of one run")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one fault to the next")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--warm-up", type=float, default=180.0, help="seconds that no line is fitted to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; default: benchmarks/results")
    options = parser.parse_args()
    # Orphaned processes become children of this one, so that all are counted.
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("RAY_ADDRESS", None)
    results = []
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        folder = Path(home)
        os.environ["TMPDIR"] = tempfile.tempdir = home  # of this run alone
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        for number in range(1, options.runs + 1):
            results.append(soak(folder, options, number))
    for number, result in enumerate(results, 1):
        print(f"\nrun {number}: {result['steps']} steps, {len(result['faults'])} faults, {result['attempts']} attempts")
        print(
            f"{'':12s} {'MiB':>7s} {'a minute':>9s} {'descriptors':>12s} {'a minute':>9s} {'threads':>8s} {'a minute':>9s}"
        )
        for name, of in result["roles"].items():
            print(
                f"{name:12s} {of['memory_mib_last']:7.1f} {of['memory_mib_a_minute']:+9.3f} {of['descriptors_last']:12.1f} "
                f"{of['descriptors_a_minute']:+9.3f} {of['threads_last']:8.1f} {of['threads_a_minute']:+9.3f}"
            )
        for check, holds in result["checks"].items():
            print(f"{'ok' if holds else 'FAILED':7s}{check}")
    told = {"minutes": options.minutes, "every_s": options.every, "warm_up_s": options.warm_up, "seed": options.seed}
    print(write("soak", {**told, "runs": results}, *([options.out] if options.out else [])))
    sys.exit(0 if all(all(result["checks"].values()) for result in results) else 1)


if __name__ == "__main__":
    main()
