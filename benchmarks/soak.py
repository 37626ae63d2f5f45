"""Trains for a given time with a fault a minute, and measures whether the processes of the run grow.

    python benchmarks/soak.py [--minutes 20] [--every 60] [--runs 2] [--seed 1] [--leak MIB]

Two gloo ranks on this machine, the job of chaos.py, a private Ray. From outside, by random: a rank, an agent, or the run's monitor
is killed (SIGKILL) or stopped for some seconds (SIGSTOP), the coordinator, the GCS or the raylet is stopped for some seconds. Every
second run has only the stops that no rank is ended for: its processes live to its end, when the driver gets a SIGTERM and saves.

Every 5 seconds, of each process of the driver, the monitor, the coordinator, the agents, the fork servers, the ranks and Ray:
private memory (USS), open descriptors and threads. growth.py has the rule by which processes that live for minutes are judged: each
counts from two minutes after its own start, if it then lives for eight, and processes of one role are also compared with each other
at the same age.

Checked: both rates of the memory of the driver, the monitor, the agents and the ranks are below 1 MiB a minute, of descriptors and
threads below one in ten minutes, and each role had a process that lived for long enough; the run goes on after every fault; each
step has one row; nothing is left behind.

At the end `raydist runs --json` lists 5,000 runs, three times: the fastest takes less than 2 s of a processor.

With `--leak 2` a hook in each rank keeps 2 MiB more every minute: the result must be that the memory of the rank is not flat, and
the exit code is 1 if it is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import JOB, RAYDIST
from common import write
from growth import Life, Sample, rates

from raydist.ipc import mailbox
from raydist.run.directory import SPEC, STATE, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import read_events, read_steps
from raydist.run.status import VERSION, last_word

SAMPLE_S = 5.0
STOPPED_S = 5.0
PROGRESS_S = 600.0
"""How long the next checkpoint after a fault may take."""
RUNS, LISTED_S = 5000, 2.0
"""Runs that are listed, and in what time."""
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


LEAK = """
import time


class Hook:
    def __init__(self, facts):
        self.rate, self.begun, self.kept = facts.options["mib_a_minute"], time.monotonic(), bytearray()

    def on_step(self, record):
        due = int((time.monotonic() - self.begun) / 60 * self.rate * 2**20)
        self.kept += b"\\1" * (due - len(self.kept))
"""


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
        self._lives: dict[tuple[int, float], Life] = {}
        self._driver, self._begun, self._ended = driver, time.time(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> dict[str, list[Life]]:
        """Ends the thread; the processes of each role, in the order of their starts."""
        self._ended.set()
        self._thread.join()
        found: dict[str, list[Life]] = {}
        for life in sorted(self._lives.values(), key=lambda life: life.started):
            found.setdefault(life.role, []).append(life)
        return found

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with suppress(psutil.NoSuchProcess):
                for name, processes in by_role(self._driver).items():
                    for process in processes if name else ():
                        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                            self._sample(name, process)

    def _sample(self, name: str, process: psutil.Process) -> None:
        started = process.create_time()
        with process.oneshot():
            if process.status() != psutil.STATUS_ZOMBIE:
                uss, age = process.memory_full_info().uss / 2**20, (time.time() - started) / 60
                life = self._lives.setdefault((process.pid, started), Life(name, (started - self._begun) / 60))
                life.role = name  # a worker of Ray takes its name from the actor that it becomes
                life.samples.append(Sample(age, uss, process.num_fds(), process.num_threads()))


FAULTS: dict[str, list[signal.Signals]] = {
    "rank": [signal.SIGKILL, signal.SIGSTOP],
    "agent": [signal.SIGKILL, signal.SIGSTOP],
    "monitor": [signal.SIGKILL, signal.SIGSTOP],
    "coordinator": [signal.SIGSTOP],
    "gcs": [signal.SIGSTOP],
    "raylet": [signal.SIGSTOP],
}
"""Role -> what happens to one of its processes. A stopped one is continued after STOPPED_S, unless it was killed meanwhile: a rank
is, as it hangs."""


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
    end = begun + 60 * options.minutes
    happened: list[dict[str, Any]] = []
    kinds = [(role, sent) for role, signals in FAULTS.items() for sent in signals
             if number % 2 or (sent == signal.SIGSTOP and role != "rank")]  # fmt: skip
    order: list[tuple[str, signal.Signals]] = []
    while not stuck and time.monotonic() < end:
        due = begun + options.every * (len(happened) + 1)
        time.sleep(max(0.0, min(due, end) - time.monotonic()))
        if due > end:
            break
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
    lives = sampler.close()
    shared = shared_memory(driver, run) if process.poll() is None else set()
    below = driver.children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    rows = read_steps(run)["step"].to_pylist()
    roles = {who: rates(of) for who, of in sorted(lives.items())}
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
        of = roles.get(who, {})
        checks[f"memory of the {who} is flat"] = flat(of, "memory_mib", MEMORY_MIB)
        checks[f"descriptors and threads of the {who} are flat"] = all(
            flat(of, what, NUMBER) for what in ("descriptors", "threads")
        )
    if not all(list(checks.values())[:3]):
        print((folder / f"{name}.err").read_text()[-3000:], stuck, process.returncode, state.get("status"))
    return {
        "steps": len(rows),
        "attempts": sum(event.kind == "attempt_started" for event in read_events(run)),
        "faults": happened,
        "roles": roles,
        "lives": {who: [told(life) for life in lives.get(who, ())] for who in OURS},
        "checks": checks,
    }


def listing(folder: Path) -> tuple[float, float]:
    """Seconds, and processor seconds, of the fastest of three `raydist runs` over RUNS runs that have ended."""
    state = {
        "v": VERSION,
        "status": "finished",
        "heartbeat_at": time.time(),
        "driver": this_process(),
        "step": 7,
        "attempt": 1,
    }
    told = json.dumps({**state, "world_size": 2, "loss": 1.5, "eval_loss": None, "tokens_per_second": 1e5})
    for number in range(RUNS):
        run = folder / f"run-{number:04d}"
        run.mkdir(parents=True)
        (run / SPEC).write_text("name: run\n")
        (run / STATE).write_text(told)
    found = []
    for _ in range(3):
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [RAYDIST, "runs", "--storage", str(folder), "--json"]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((time.monotonic() - begun, busy))
        assert len(listed) == RUNS
    return min(found)


def flat(of: dict[str, float | int | None], what: str, limit: float) -> bool:
    """Whether the rates that are known are below the limit."""
    return all((rate := of.get(f"{what}{kind}_a_minute")) is None or rate < limit for kind in ("", "_inherited"))


def told(life: Life) -> dict[str, Any]:
    """A process in the results: its start, and its memory at each whole minute of its age, in MiB."""
    by_minute = {int(sample.age): round(sample.memory_mib, 1) for sample in reversed(life.samples)}
    return {"started_minute": round(life.started, 2), "memory_mib": dict(sorted(by_minute.items()))}


def main() -> None:
    """Runs them, prints and writes the results. Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of one run")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one fault to the next")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", type=float, default=0.0, metavar="MIB", help="what each rank keeps every minute")
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
        (folder / "leaking.py").write_text(LEAK)
        hook = {"name": "leaking:Hook", "ranks": "all", "options": {"mib_a_minute": options.leak}}
        (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "hooks": [hook] if options.leak else []}))
        for number in range(1, options.runs + 1):
            results.append(soak(folder, options, number))
        listed_s, listed_cpu_s = listing(folder / "many")
    for number, result in enumerate(results, 1):
        print(f"\nrun {number}: {result['steps']} steps, {len(result['faults'])} faults, {result['attempts']} attempts")
        print(f"{'a minute, inside | inherited':28s}{'MiB':>20s}{'descriptors':>20s}{'threads':>20s}")
        for name, of in result["roles"].items():
            cells = [
                " | ".join(
                    "-" if (rate := of[f"{what}{kind}_a_minute"]) is None else f"{rate:+.3f}"
                    for kind in ("", "_inherited")
                )
                for what in Sample._fields[1:]
            ]
            print(f"{name:12s}{of['processes']:6d} processes" + "".join(f"{cell:>20s}" for cell in cells))
        for check, holds in result["checks"].items():
            print(f"{'ok' if holds else 'FAILED':7s}{check}")
    judged = all(any(of["roles"].get(who, {}).get("memory_mib_a_minute") is not None for of in results) for who in OURS)
    print(f"\n{'ok' if judged else 'FAILED':7s}each role had a process that lived for long enough")
    listed = listed_cpu_s < LISTED_S  # which other programs on the processors do not change
    cost = f"{listed_cpu_s:.2f} s of a processor, {listed_s:.2f} s in all"
    print(f"{'ok' if listed else 'FAILED':7s}raydist runs lists {RUNS:,} runs: {cost}")
    asked = {
        "minutes": options.minutes,
        "every_s": options.every,
        "seed": options.seed,
        "leak_mib_a_minute": options.leak,
        "runs_listed": RUNS,
        "listed_s": listed_s,
        "listed_cpu_s": listed_cpu_s,
        "judged": judged,
    }
    name = "soak_leak" if options.leak else "soak"
    print(write(name, {**asked, "runs": results}, *([options.out] if options.out else [])))
    if options.leak:
        sys.exit(0 if any(not result["checks"]["memory of the rank is flat"] for result in results) else 1)
    sys.exit(0 if judged and listed and all(all(result["checks"].values()) for result in results) else 1)


if __name__ == "__main__":
    main()
