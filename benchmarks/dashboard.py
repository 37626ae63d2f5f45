"""Cost of `raydist dashboard`: a large live run opened first and later, 50 viewers of a small one, a list of 1,000 runs.

    python benchmarks/dashboard.py [--steps 288000] [--ranks 1000] [--readings 1440] [--runs 1000] [--viewers 50] [--seconds 60]

The large run is one of 24 hours: steps of 0.3 s, and a reading of each rank a minute, as they are stored after the first hour. Its
heartbeat changes every two seconds; `large_anew` has the slowest of its openings, one a second, until its page was made twice anew.
The server is the command itself, in its own process. Its processor time is read from /proc. Viewers follow the page as its script
does: each reads one stream of what has changed. The run that trains gets a step and a reading of each of its 8 ranks twice
a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import write
from report import make, reading, record

from raydist.records import Event
from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log_writer import RunLog
from raydist.run.status import write_state
from raydist.run.telemetry_log import TelemetryLog

RANKS = 8
"""Of the run that trains."""


class Client:
    """A browser's connection. `asked`: bytes of all answers."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=600)
        self._headers = {"Cookie": f"raydist-{place.port}={url.partition('token=')[2]}"}
        self.bytes = 0

    def get(self, path: str) -> tuple[float, str]:
        """Seconds, and the body."""
        begun = time.monotonic()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read().decode()
        assert answer.status == 200, body
        self.bytes += len(body)
        return time.monotonic() - begun, body

    def watch(self, path: str, until: float) -> None:
        """As the page's script: one stream."""
        since = version(self.get(path)[1])
        self._connection.request("GET", f"{path}?since={since}", headers=self._headers)
        answer = self._connection.getresponse()
        while time.monotonic() < until:
            self.bytes += len(answer.readline())
        self._connection.close()


def version(page: str) -> str:
    """Of a page."""
    return str(re.findall(r'data-version="([^"]+)"', page)[0])


def few(home: Path, count: int) -> None:
    """Runs that have ended, each with its state."""
    for number in range(count):
        run = RunDir(home / f"run-{number:04d}")
        run.storage.write(SPEC, b"train: {steps: 10}\n")
        log = RunLog(run)
        log.event(Event("ended", time.time(), {"status": "finished", "step": 10}))
        log.close()
        figures = {"step": 10, "loss": 2.0, "eval_loss": 2.1, "tokens_per_second": 1000.0}
        write_state(run, {"status": "finished", "heartbeat_at": time.time(), "driver": this_process(), **figures})


def train(run: RunDir, stop: threading.Event) -> None:
    """Writes what a run of RANKS ranks writes."""
    run.storage.write(SPEC, b"train: {steps: 100000}\n")
    log, samples, step = RunLog(run), TelemetryLog(run), 0
    log.event(Event("attempt_started", time.time(), {"attempt": 1, "world_size": RANKS, "resume_step": 0}))
    while not stop.is_set():
        step += 1
        log.steps([record(step, RANKS, 10**9)])
        samples.add([reading(time.time(), rank, step) for rank in range(RANKS)])
        log.flush()
        samples.flush()
        beat(run, step)
        stop.wait(0.5)
    log.close()


def beat(run: RunDir, step: int) -> None:
    """The state of a run that trains."""
    state = {"status": "running", "heartbeat_at": time.time(), "driver": this_process(), "step": step, "attempt": 1}
    write_state(run, state)


def beating(run: RunDir, step: int, stop: threading.Event) -> None:
    """Until `stop`."""
    while not stop.is_set():
        beat(run, step)
        stop.wait(2.0)


def anew(client: Client, path: str, times: int) -> dict[str, Any]:
    """Opens a page once a second until it was made so many times anew."""
    waits, seen, begun = list[float](), set[str](), time.monotonic()
    while len(seen) <= times:
        wall, body = client.get(path)
        waits.append(wall)
        seen.add(version(body))
        time.sleep(1.0)
    spent = round(time.monotonic() - begun)
    return {"made": times, "seconds": spent, "openings": len(waits), "slowest_s": round(max(waits), 3)}


def opened(client: Client, name: str, path: str, server: psutil.Process) -> dict[str, Any]:
    """What a page takes, opened first and later."""
    found: dict[str, Any] = {}
    for when in ("first", "later"):
        used = _cpu(server)
        wall, body = client.get(path)
        found[f"{name}_{when}"] = {"wall_s": round(wall, 3), "cpu_s": round(_cpu(server) - used, 2)}
    return found | {f"{name}_kb": round(len(body.encode()) / 1000)}


def viewers(url: str, path: str, count: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
    """Share of a core that the server takes, and bytes per second and viewer."""
    clients = [Client(url) for _ in range(count)]
    used, begun = _cpu(server), time.monotonic()
    threads = [threading.Thread(target=client.watch, args=(path, begun + seconds)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - begun
    return {
        "viewers": count,
        "share_of_a_core": round((_cpu(server) - used) / spent, 4),
        "kb_per_second_and_viewer": round(sum(client.bytes for client in clients) / 1000 / spent / count, 1),
    }


def _cpu(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Prints and writes results/dashboard.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("steps", 288_000),
        ("ranks", 1000),
        ("readings", 1440),
        ("runs", 1000),
        ("viewers", 50),
        ("seconds", 60),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    result: dict[str, Any] = dict(vars(options))
    with tempfile.TemporaryDirectory() as folder:
        home, many = Path(folder) / "runs", Path(folder) / "many"
        make(RunDir(home / "large"), options.steps, options.ranks, options.readings)
        few(many, options.runs)
        stop = threading.Event()
        trainer = threading.Thread(target=train, args=(RunDir(home / "live"), stop))
        trainer.start()
        large = threading.Thread(target=beating, args=(RunDir(home / "large"), options.steps, stop))
        large.start()
        command = [sys.executable, "-m", "raydist", "dashboard", str(home), str(many), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        try:
            url, server = process.stdout.readline().strip(), psutil.Process(process.pid)
            client = Client(url)
            result |= opened(client, "list", "/", server)
            result["alone"] = viewers(url, "/run/0/live", 1, options.seconds, server)
            result["together"] = viewers(url, "/run/0/live", options.viewers, options.seconds, server)
            client = Client(url)  # the server has closed the idle connection
            result |= opened(client, "large", "/run/0/large", server)
            result["large_anew"] = anew(client, "/run/0/large", 2)
            first, later = (
                client.get("/run/0/large?first=1000&last=9000"),
                client.get("/run/0/large?first=1000&last=9000"),
            )
            result["large_zoomed"] = {"first_s": round(first[0], 3), "later_s": round(later[0], 3)}
        finally:
            stop.set()
            trainer.join()
            large.join()
            process.send_signal(signal.SIGTERM)
            process.wait()
            process.stdout.close()
    print(json.dumps(result, indent=1))
    print(write("dashboard", result))


if __name__ == "__main__":
    main()
