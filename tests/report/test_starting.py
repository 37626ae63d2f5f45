"""raydist.report.starting and the console before the first step: what is shown, when, and that the times add up."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.report.console import Console
from raydist.report.starting import Starting, process_start
from raydist.run.directory import RunDir
from raydist.worker.metrics import startup_timing
from raydist.worker.metrics.startup_timing import Startup, waited
from tests.report.test_console import snapshot


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def use(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' stages are measured with that clock: a busy machine may take a second from one line to the next."""
    monkeypatch.setattr(startup_timing, "time", SimpleNamespace(monotonic=clock, time=clock))


def waiting(**changes: Any) -> dict[str, Any]:
    """The monitor's snapshot before the first step."""
    unknown = dict.fromkeys(
        ("record", "checkpoint", "eval_loss", "tokens_per_second", "seconds_per_step", "data_share")
    )
    return snapshot(0, **{**unknown, "failures": 0, "attempt": 1, **changes})


def test_process_start_counts_the_imports() -> None:
    """It is before the first line of a new process, and after its creation."""
    before = time.time()
    code = "import time; begun = time.time(); from raydist.report.starting import process_start; print(process_start(), begun)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    started, begun = map(float, done.stdout.split())
    assert before - 0.05 <= started < begun
    assert process_start() < before


def test_piped_a_line_a_stage_with_the_seconds_so_far(tmp_path: Path) -> None:
    """The driver's stages at once, the ranks' from the monitor, each once, with its begin; none after a step."""
    stream, clock = io.StringIO(), Clock()
    with Starting(begun=999.5, stream=stream, clock=clock) as starting:
        starting.stage("job")
        assert stream.getvalue() == "[  0.5 s] reading the job\n"
        clock.now = 1002.0
        starting.stage("ray", "connecting to Ray")
        clock.now = 1005.0
        starting.stage("workers")
        with Console(200, RunDir(tmp_path / "r"), stream=stream, starting=starting) as console:
            console.update(waiting(attempt=0, stages=[]))
            console.update(waiting(stages=[("import", 1006.0)]))
            console.update(waiting(stages=[("import", 1006.0), ("rendezvous", 1006.5), ("build", 1007.0)]))
            console.update(snapshot(1))
            console.update(waiting(attempt=2, stages=[("import", 1020.0)]))
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == ["[  2.5 s] connecting to Ray", "[  5.5 s] starting the workers"]
    assert lines[3] == f"run r: {tmp_path / 'r'}"
    assert lines[4:7] == [
        "[  6.5 s] importing torch on the workers",
        "[  7.0 s] connecting the workers",
        "[  7.5 s] building the model",
    ]
    assert [line.split("  ")[0] for line in lines[7:]] == ["step 1/200"]


def test_stages_add_up_to_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cover the time from the process's start to the attempt's begin. The event has them beside its own stages, whose sum
    does not change."""
    clock = Clock()
    starting = Starting(begun=999.25, stream=io.StringIO(), clock=clock)
    for name, seconds in (("job", 0.5), ("data", 2.0), ("ray", 4.0)):
        starting.stage(name)
        clock.now += seconds
    before = starting.seconds(clock.now)
    assert before == pytest.approx({"job": 1.25, "data": 2.0, "ray": 4.0})
    assert sum(before.values()) == pytest.approx(clock.now - 999.25)
    told: list[str] = []
    use(clock, monkeypatch)
    startup = Startup(clock.now - 3, before=before, tell=told.append)
    for stage in ("schedule", "import", "rendezvous", "build", "load", "first_step"):
        startup.done(stage)
    assert told == ["import", "rendezvous", "build", "load", "first_step"]
    event = startup.first_step_data(0)
    assert event["before"] == {"job": 1.25, "data": 2.0, "ray": 4.0}
    assert event["seconds"] == pytest.approx(sum(event["stages"].values())) == pytest.approx(3)
    assert "before" not in Startup(None, {"over": 1.0, "next": 2.0, "last_step": 3}).first_step_data(0)


@pytest.mark.parametrize("off", [-3600.0, 0.0, 3600.0])
def test_the_clocks_of_two_hosts(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of a recovery are those of good clocks, if the rank's host is an hour off; the clock may jump in between."""
    clock = Clock()
    use(clock, monkeypatch)
    seen = clock.now - 60
    incident = {"seen": seen, "silent_s": 5.0, "over": seen + 1, "next": seen + 3, "last_step": 7}
    elapsed = waited(clock.now - 20 - off, 19.5)
    startup = Startup(clock.now - elapsed, incident)
    startup.done("schedule")
    stages = startup.first_step_data(4)["stages"]
    assert stages == pytest.approx({"detect": 5, "tear_down": 1, "decide": 2, "schedule": 19.5 if off else 20})


def test_on_a_terminal_the_spinner_gives_way(tmp_path: Path) -> None:
    """The spinner appears at once, is then part of the panel, and disappears with the first step; the cursor is restored."""
    stream, clock = io.StringIO(), Clock()
    with Starting(begun=999.5, tty=True, stream=stream, clock=clock) as starting:
        starting.stage("job")
        assert re.search(r"reading the job.*0\.5 s", stream.getvalue())
        starting.note("raydist: a [word]")
        with Console(200, RunDir(tmp_path / "r"), tty=True, stream=stream, starting=starting) as console:
            console.update(waiting(stages=[("build", 1007.0)]))
            clock.now = 1008.0
            deadline = time.monotonic() + 240
            while "8.5 s" not in stream.getvalue():  # redrawn by itself
                assert time.monotonic() < deadline
                time.sleep(0.02)
            console.update(snapshot(1))
            drawn = len(stream.getvalue())
            assert "building the model" in stream.getvalue()
    shown = stream.getvalue()
    assert "raydist: a [word]" in shown
    assert "building the model" not in shown[drawn:]
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_an_early_error_leaves_no_spinner() -> None:
    """The line is erased before the error is shown."""
    stream = io.StringIO()

    def fail() -> None:
        with Starting(tty=True, stream=stream) as starting:
            starting.stage("job")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert stream.getvalue().endswith("\x1b[2K")
    assert "\x1b[?25h" in stream.getvalue()
