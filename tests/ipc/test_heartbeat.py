"""What an agent reads of its rank from outside, whatever state it is in: phase and limit, stacks, collectives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.ipc import heartbeat
from raydist.ipc.heartbeat import FIRST_STEPS, LEAST_S, Heartbeat, Reader
from raydist.ipc.stack_dump import Witness, where


@pytest.fixture
def fd() -> Iterator[int]:
    """The file of a heartbeat."""
    made = heartbeat.create()
    yield made
    os.close(made)


def test_what_is_written_is_seen(fd: int) -> None:
    """A second mapping of the file shows step, phase and the seconds in it."""
    ours, reader = Heartbeat(fd), Reader(fd)
    assert (reader.look().phase, reader.look().limit_s, reader.look().late) == ("start", None, False)
    ours.step(7)
    ours.enter("forward")
    look = reader.look()
    assert (look.step, look.phase) == (7, "forward")
    assert 0 <= look.seconds < 5
    assert reader.look().seconds > look.seconds


def test_limits(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no limit for the first steps, during compilation, and while waiting for data or storage; else it is 5 x the 99th
    percentile of the step time, at least 10 s."""
    ours, reader = Heartbeat(fd), Reader(fd)
    for _ in range(FIRST_STEPS - 1):
        ours.stepped(100.0)
        ours.enter("forward")
        assert reader.look().limit_s is None
    ours.stepped(0.1)
    assert reader.look().limit_s == LEAST_S
    for _ in range(200):
        ours.stepped(4.0)
    assert reader.look().limit_s == pytest.approx(20.0)
    for _ in range(1000):
        ours.stepped(3.0)
    assert reader.look().limit_s == pytest.approx(15.0)
    ours.compiling(True)
    assert reader.look().limit_s is None
    ours.compiling(False)
    for phase in heartbeat.PHASES:
        ours.enter(phase)
        assert (reader.look().limit_s is None) == (phase in heartbeat.UNLIMITED)
    ours.enter("backward")
    begun = time.monotonic_ns()
    monkeypatch.setattr("time.monotonic_ns", lambda: begun + 16_000_000_000)
    assert reader.look().late
    ours.enter("backward")
    assert not reader.look().late


def test_a_limit_of_the_users_own(fd: int) -> None:
    """`recovery.step_timeout` is the limit of every step but the first ones."""
    ours, reader = Heartbeat(fd, timeout_s=1.5), Reader(fd)
    ours.enter("forward")
    for _ in range(FIRST_STEPS):
        assert reader.look().limit_s is None
        ours.stepped(60.0)
    assert reader.look().limit_s == 1.5


RANK = """
import ctypes, os, socket, sys, threading, time
import torch.distributed  # as a rank has
from raydist.ipc.heartbeat import Heartbeat
from raydist.ipc.stack_dump import answer
answer({stacks}, socket.socket(fileno={control}))
Heartbeat({heartbeat})
def in_user_code():
    print("ready", flush=True)
    {body}
in_user_code()
"""


class Watched:
    """A process that runs `body`, and its witness."""

    def __init__(self, tmp_path: Path, body: str) -> None:
        self.ours, theirs = socket.socketpair()
        self.stacks, self.heartbeat = os.memfd_create("stacks"), heartbeat.create()
        fds = [theirs.fileno(), self.stacks, self.heartbeat]
        (tmp_path / "user.py").write_text(RANK.format(control=fds[0], stacks=fds[1], heartbeat=fds[2], body=body))
        self.process = subprocess.Popen(
            [sys.executable, str(tmp_path / "user.py")], pass_fds=fds, stdout=subprocess.PIPE, text=True
        )
        theirs.close()
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.witness, self.reader = Witness(self.process.pid, self.stacks, self.ours), Reader(self.heartbeat)

    def until_at(self, line: str) -> None:
        """Returns once its main thread is at that line; the process has printed "ready" in the line before."""
        while not where(self.witness.stacks(), self.reader.look().thread).endswith(line):
            assert self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()
        self.ours.close()
        os.close(self.stacks)
        os.close(self.heartbeat)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Any]:
    """watched(body): a Watched, which ends with the test."""
    made: list[Watched] = []

    def start(body: str) -> Watched:
        made.append(Watched(tmp_path, body))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_rank_that_waits(watched: Any) -> None:
    """Its stack names the user's line, not the standard library's below it; a second request works too."""
    rank = watched("threading.Event().wait()")
    for _ in range(2):
        rank.until_at("user.py:10 in in_user_code")
        assert rank.witness.collectives() == []
    while rank.witness.state() != "S":
        time.sleep(0.01)  # the request for its stack has just woken it


def test_a_rank_that_holds_the_gil(watched: Any) -> None:
    """In C code that holds the GIL no thread answers, but the stack is still written."""
    # The signal that requests the stack interrupts a sleep.
    rank = watched("while True: ctypes.PyDLL(None).sleep(1000)")
    rank.until_at("user.py:10 in in_user_code")
    while rank.witness.collectives() is not None:
        time.sleep(0.01)  # it reaches the line a moment before it holds the GIL
    rank.until_at("user.py:10 in in_user_code")


def test_a_rank_that_is_stopped_or_gone(watched: Any) -> None:
    """The kernel reports the state, and there is no stack."""
    rank = watched("threading.Event().wait()")
    os.kill(rank.process.pid, signal.SIGSTOP)
    while rank.witness.state() != "T":
        time.sleep(0.01)
    assert rank.witness.stacks() == ""
    rank.process.kill()
    rank.process.wait()
    assert rank.witness.state() == "Z"
    assert rank.witness.stacks() == ""


def test_collectives_of_real_ranks(ranks: Any) -> None:
    """Group, number and kind of the newest collectives, read from outside."""
    for found in ranks.run(recorded, 2):
        if isinstance(found, BaseException):
            raise found
        assert found[-3][2] == "gloo:scatter", "the root has sizes that others do not have"
        (group, number, what), (_, after, _) = found[-2:]
        assert after == number + 1
        assert "all_reduce" in what
        assert "[[3]]" in what
        assert group is not None


def recorded(rank: Any) -> list[list[Any]]:
    """Runs three collectives, and returns what the flight recorder has of them."""
    import torch
    import torch.distributed as dist

    from raydist.ipc.stack_dump import _collectives

    parts = [torch.ones(3), torch.ones(3)] if rank.rank == 0 else None
    dist.scatter(torch.empty(3), parts, src=0)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    return _collectives()
