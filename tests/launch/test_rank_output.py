"""A rank's output is stored completely in the run's folder, however the rank ends, also if storage fails for a while;
`raydist logs` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import logs
from raydist.errors import StorageError, UsageError
from raydist.launch import rank_output
from raydist.launch.rank_output import Output
from raydist.run import rank_logs
from raydist.run.directory import ATTEMPTS, SPEC, RunDir, begin_attempt
from raydist.run.driver_process import this_process
from raydist.run.rank_logs import Reader
from raydist.run.status import write_state


@pytest.fixture(autouse=True)
def begun(tmp_path: Path) -> None:
    """A driver has begun the run of most tests."""
    (tmp_path / ATTEMPTS).mkdir()


def printed(run: RunDir, attempt: int, rank: int, code: str, interval_s: float = 0.02) -> Output:
    """Runs `code` with its output in the run, waits for the exit, and stores the output."""
    made = Output(run.full_uri, attempt, rank, interval_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=made.fd, stderr=made.fd)
    made.begin()
    process.wait()
    made.wait(240)
    return made


def text(run: RunDir, attempt: int = 1, rank: int = 0) -> str:
    """The stored output of a rank."""
    return run.storage.read(rank_logs.name(attempt, rank)).decode()


def test_both_streams_to_the_last_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """stdout and stderr are stored, also an incomplete line of a killed process; they also go to the agent's own stdout."""
    code = "import os, sys; print('out', flush=True); sys.stderr.write('err\\nhalf'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    printed(RunDir(tmp_path), 1, 0, code)
    assert text(RunDir(tmp_path)) == "out\nerr\nhalf"
    assert capfd.readouterr().out == "out\nerr\nhalf"


def test_a_rank_that_prints_nothing_leaves_nothing(tmp_path: Path) -> None:
    """A rank without output leaves neither file nor folder."""
    printed(RunDir(tmp_path / "run"), 1, 0, "pass")
    assert not (tmp_path / "run").exists()


def test_secrets_are_taken_out(tmp_path: Path) -> None:
    """Secrets are removed from the stored output."""
    printed(RunDir(tmp_path), 1, 0, "print('s3://key:hidden@bucket/x')")
    assert text(RunDir(tmp_path)) == "s3://bucket/x\n"


def test_storage_that_refuses_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that storage refuses is tried again, also after the rank's exit, and is stored once."""
    tries = iter(range(10))
    put = Output._put

    def refusing(self: Output, data: bytes) -> None:
        if next(tries) < 2:
            raise StorageError("cannot write", "")
        put(self, data)

    monkeypatch.setattr(Output, "_put", refusing)
    printed(RunDir(tmp_path), 1, 0, "print('a'); print('b')")
    assert text(RunDir(tmp_path)) == "a\nb\n"


def test_a_rank_never_waits_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If storage hangs, the rank continues to print; the newest output is kept, and a line says how much is missing."""
    monkeypatch.setattr(rank_output, "WAITING_BYTES", 1000)
    go, begun, put = threading.Event(), threading.Event(), Output._put

    def hanging(self: Output, data: bytes) -> None:
        begun.set()
        assert go.wait(240)
        put(self, data)

    monkeypatch.setattr(Output, "_put", hanging)
    made = Output(str(tmp_path), 1, 0, 0.02)
    code = "import sys; print('first', flush=True); sys.stdin.readline()\nfor i in range(1000): print(f'{i:09}')"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=made.fd, text=True)
    made.begin()
    assert begun.wait(240)
    process.communicate("\n", timeout=240)
    go.set()
    made.wait(240)
    lines = text(RunDir(tmp_path)).splitlines()
    assert lines[:2] == ["first", "[raydist: 9000 bytes are missing here: storage did not take them in time]"]
    assert lines[2:] == [f"{i:09}" for i in range(900, 1000)]


def test_a_progress_bar(tmp_path: Path) -> None:
    """Its states are stored while it runs, although no line ends; what was dropped before one ends is reported."""
    made = Output(str(tmp_path), 1, 0)
    made._waiting += b"\r 10%\r 2"
    assert made._take() == b"\r 10%\r"
    made._dropped = 3
    assert made._take() == b""
    made._waiting += b"0%\n"
    assert made._take() == b"[raydist: 3 bytes are missing here: storage did not take them in time]\n 20%\n"
    assert made._take() == b""
    made.abandon()


def test_a_flood_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's file has a maximum size, and its last line says so."""
    monkeypatch.setattr(rank_output, "MOST_BYTES", 100)
    printed(RunDir(tmp_path), 1, 0, "for i in range(1000): print(i)", interval_s=60.0)
    assert text(RunDir(tmp_path)).splitlines()[-1].startswith("[raydist: more than")


def test_on_an_object_store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store the file is written in parts, each rewritten until it is full; a reader reads them as one, also while
    they grow."""
    monkeypatch.setattr(rank_output, "PART_BYTES", 20)
    run = RunDir(s3.uri("printed"))
    made, reader = Output(run.full_uri, 1, 3, 0.02), Reader(run, 1)
    code = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=made.fd, text=True)
    made.begin()
    assert process.stdin is not None
    for i in range(6):
        process.stdin.write(f"line {i}\n")
        process.stdin.flush()
        deadline = time.monotonic() + 240
        while not (new := list(reader.read())):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert new == [(3, f"line {i}")]
    process.communicate(timeout=240)
    made.wait(240)
    assert len(run.storage.files("logs", recursive=True)) == 2
    assert list(Reader(run, 1).read()) == [(3, f"line {i}") for i in range(6)]


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    """Each line is read once; an incomplete line is read when its newline is there, or at the end."""
    run = RunDir(tmp_path)
    path = tmp_path / rank_logs.name(1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a\nb")
    reader = Reader(run, 1)
    assert list(reader.read()) == [(0, "a")]
    with path.open("ab") as file:
        file.write(b"c\nd")
    assert list(reader.read()) == [(0, "bc")]
    assert list(reader.read()) == []
    assert list(reader.read(last=True)) == [(0, "d")]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run with two attempts of two ranks."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"")
    state = {"status": "finished", "heartbeat_at": 0.0, "driver": this_process(), "step": 3, "world_size": 2}
    write_state(run, state)
    for attempt in (1, 2):
        begin_attempt(run, attempt)
        for rank in (0, 1):
            printed(run, attempt, rank, f"print('attempt {attempt}')\nfor i in range(3): print(i)")
    return run


def call(*arguments: str) -> Any:
    """Runs the command; its exceptions propagate."""
    app = typer.Typer()
    app.command()(logs.logs)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_the_command(run: RunDir) -> None:
    """The command prints the newest attempt, rank by rank, or what its options choose; wrong options are refused."""
    whole = [f"[rank {rank}] {line}" for rank in (0, 1) for line in ("attempt 2", "0", "1", "2")]
    assert call(run.uri).stdout.splitlines() == whole
    assert call(run.uri, "--rank", "1", "--attempt", "1", "--tail", "1").stdout == "[rank 1] 2\n"
    first, *_ = call(run.uri, "--rank", "0", "--json").stdout.splitlines()
    assert json.loads(first) == {"attempt": 2, "rank": 0, "line": "attempt 2"}
    for arguments, message in (
        (("--rank", "2"), "no rank 2"),
        (("--attempt", "3"), "no attempt 3"),
        (("--follow", "--attempt", "1"), "exclude one another"),
    ):
        with pytest.raises(UsageError, match=message):
            call(run.uri, *arguments)


def test_nothing_was_printed(run: RunDir) -> None:
    """If no rank printed, a message on stderr names the other logs."""
    begin_attempt(run, 3)
    run.storage.write("logs/driver.log", b"x")
    done = call(run.uri)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no rank has printed anything in attempt 3 of run a-run" in done.stderr
    assert "also contains attempt-0001, attempt-0002, driver.log" in done.stderr


def test_follows_to_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """--follow prints new lines, across attempts, until the run has ended."""
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    monkeypatch.setattr(logs, "_NEXT_S", 0.05)
    monkeypatch.setattr(logs, "_LATE_S", 0.05)
    state = {"heartbeat_at": time.time(), "driver": this_process(), "step": 3, "world_size": 2}
    write_state(run, {**state, "status": "running"})
    stages = iter(
        [
            lambda: printed(run, 2, 0, "print('more')"),
            lambda: begin_attempt(run, 3),
            lambda: printed(run, 3, 1, "print('anew')"),
            lambda: write_state(run, {**state, "status": "finished"}),
        ]
    )
    sleeps = 0

    def sleep(seconds: float) -> None:
        nonlocal sleeps
        sleeps += 1
        if sleeps % 20 == 0:
            next(stages, lambda: None)()

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=sleep))
    lines = call(run.uri, "--follow", "--tail", "1").stdout.splitlines()
    assert lines == ["[rank 0] 2", "[rank 1] 2", "[rank 0] more", "[rank 1] anew"]
