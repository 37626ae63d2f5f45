"""`raydist trace`, on runs whose ranks the test plays: what it waits for, and how it gives up."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import trace
from raydist.errors import RaydistError, RunNotFound, TraceFailed, UsageError
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event
from raydist.run import requests
from raydist.run.directory import REQUESTS, SPEC, RunDir
from tests.report.test_trace import on_cpu, part


class Live:
    """A running run, as seen from its folder; `play` calls a function with the number of the next request."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "a-run")
        self.run.storage.write(SPEC, b"name: a-run\n")
        self.monitor = RunMonitor(self.run.uri, interval_s=0.01, exporters=[])
        self._threads: list[threading.Thread] = []

    def play(self, answer: Callable[[int], None]) -> None:
        before = self._asked()  # the monitor may not have seen yet that a request was removed

        def wait() -> None:
            while not (new := self._asked() - before):
                time.sleep(0.01)
            answer(min(new))

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def _asked(self) -> set[int]:
        return {number for number, _ in self.monitor.push([], []).get("traces", [])}

    def say(self, kind: str, **data: Any) -> None:
        self.monitor.push([], [Event(kind, time.time(), data).to_dict()])

    def leave(self, number: int, attempt: int, *ranks: int) -> None:
        """Writes the parts of these ranks, of two."""
        for rank in ranks:
            made = gzip.compress(json.dumps(part(rank, on_cpu(0.0, 0.0), trace=number, attempt=attempt)).encode())
            self.run.storage.write(requests.part_name(number, attempt, rank, 2), made)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        self.monitor.end("finished")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    yield made
    made.close()


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(trace.trace)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)


def test_a_trace(live: Live, tmp_path: Path) -> None:
    """Parts of an attempt that was cut off are not used; the merged file is in the run and at -o's path; the request is
    removed."""

    def answer(number: int) -> None:
        live.say("trace_started", trace=number, attempt=1, first_step=5, steps=1, world_size=2)
        live.leave(number, 1, 0)
        live.say("trace_failed", trace=number, rank=1, attempt=1, cause="the attempt ended")
        live.leave(number, 2, 1, 0)

    live.play(answer)
    done = call(live.run.uri, "--steps", "1", "--json", "--out", str(tmp_path / "t.json"))
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert (told["trace"], told["attempt"], told["path"]) == (1, 2, f"{live.run.uri}/traces/0001.json.gz")
    assert gzip.decompress(Path(told["path"]).read_bytes()) == (tmp_path / "t.json").read_bytes()
    assert live.run.storage.files(REQUESTS) == {}


def test_what_keeps_it_from_coming(live: Live) -> None:
    """A rank that fails, ranks that do not answer, a run that ends in the meantime: one line each, and the request is removed."""

    def refuse(number: int) -> None:
        live.say("trace_failed", trace=number, rank=1, attempt=1, cause="RuntimeError: a profiler is on")

    live.play(refuse)
    with pytest.raises(TraceFailed, match="rank 1 could not be traced: RuntimeError: a profiler is on"):
        call(live.run.uri)
    with pytest.raises(TraceFailed, match="a-run has not started the trace in 1 s"):
        call(live.run.uri, "--timeout", "1")

    def half(number: int) -> None:
        live.leave(number, 1, 0)
        live.say("trace_started", trace=number, attempt=1, first_step=5, steps=3, world_size=2)
        live.monitor.end("finished")

    live.play(half)
    with pytest.raises(TraceFailed, match="a-run is now finished; no trace from rank 1"):
        call(live.run.uri)
    assert live.run.storage.files(REQUESTS) == {}
    with pytest.raises(UsageError, match="a-run is finished"):
        call(live.run.uri)


def test_no_such_run(tmp_path: Path) -> None:
    """RunNotFound, as for other commands; from a shell there is no traceback, and the exit code is 2."""
    with pytest.raises(RunNotFound):
        call("never", "--storage", str(tmp_path))
    command = [sys.executable, "-m", "raydist", "trace", "never", "--storage", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("raydist: no run 'never'")
    assert "Traceback" not in done.stderr
    assert issubclass(TraceFailed, RaydistError)
