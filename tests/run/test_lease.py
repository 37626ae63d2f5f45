"""One driver per run: a second one is refused while the first is alive, and can start as soon as the first is known to be
dead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.conditional_writes import Creator
from raydist.errors import Fenced, UsageError
from raydist.run import lease as leases
from raydist.run.directory import RunDir, begin_attempt, fenced, resume_attempt, start_anew
from raydist.run.driver_process import LOST_AFTER_S, this_process
from raydist.run.lease import DriverLease, ask_stop, driven_since, newest_driver, status_by_lease

TAKE = """
import sys
from raydist.errors import UsageError
from raydist.run.lease import DriverLease
from raydist.run.directory import RunDir
RunDir(sys.argv[1]).storage.files("")
print("ready", flush=True)
for name in sys.stdin:
    try:
        lease = DriverLease(RunDir(sys.argv[1] + "/" + name.strip()))
        print("won", flush=True)
    except UsageError:
        print("refused", flush=True)
"""


def driver(folder: Path) -> subprocess.Popen[str]:
    """A process that takes the lease of each run whose name it reads, and keeps it; it is ready."""
    command = [sys.executable, "-c", TAKE, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str], run: str) -> None:
    assert process.stdin is not None
    process.stdin.write(run + "\n")
    process.stdin.flush()


def word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(met: Callable[[], bool]) -> None:
    """Waits until another thread has made the condition true."""
    deadline = time.monotonic() + 240
    while not met():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def body(run: RunDir, number: int) -> dict[str, Any]:
    return dict(json.loads(run.storage.read(f"drivers/{number:06d}.json")))


def put(run: RunDir, number: int, age: float = 0.0, **changes: Any) -> None:
    """Writes the lease of a driver on another host."""
    holder = {"driver": {**this_process(), "host": "elsewhere", "pid": 77}, "key": "theirs", "ended": False}
    told = {**holder, "renewed_at": time.time() - age, **changes}
    run.storage.write(f"drivers/{number:06d}.json", json.dumps(told).encode())


def test_two_drivers_at_the_same_moment(tmp_path: Path) -> None:
    """Of two processes that ask for twenty leases exactly one gets each; after the holder is killed the other gets its lease at
    once."""
    both = [driver(tmp_path) for _ in range(2)]
    try:
        for i in range(20):
            for process in both:
                tell(process, f"run-{i}")
            words = [word(process) for process in both]
            assert sorted(words) == ["refused", "won"], i
        winner, other = both if words[0] == "won" else both[::-1]
        tell(other, "run-19")
        assert word(other) == "refused"
        winner.kill()
        winner.wait()
        tell(other, "run-19")
        assert word(other) == "won", "its process is gone from this host, and 30 s have not passed"
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_the_refusal_names_who_trains(tmp_path: Path) -> None:
    """The refusal names process and host of the holder, with the exit code of a usage error; a released lease can be taken
    again."""
    run = RunDir(tmp_path / "mine")
    with DriverLease(run), pytest.raises(UsageError, match="run mine is being trained already, by process") as caught:
        DriverLease(run)
    assert caught.value.exit_code == 2
    DriverLease(run).release()
    assert run.storage.files("drivers").keys() == {"drivers/000002.json"}, (
        "released, taken again, and older ones are gone"
    )


@pytest.mark.parametrize(
    ("age", "changes", "free"),
    [
        (LOST_AFTER_S, {}, False),
        (LOST_AFTER_S + 0.1, {}, True),
        (0.0, {"ended": True}, True),
        (0.0, {"driver": this_process(2**22 + 1)}, True),
    ],
    ids=["alive", "expired", "ended", "gone from this host"],
)
def test_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, changes: dict[str, Any], free: bool
) -> None:
    """A lease of another host is held for 30 s after its last renewal, or until its driver writes that it has ended."""
    run, now = RunDir(tmp_path), float(round(time.time()))
    put(run, 4, renewed_at=now - age, **changes)
    # A write may take seconds beside other tests: the lease's own clock stands still.
    monkeypatch.setattr(leases, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic, sleep=time.sleep))
    if free:
        with DriverLease(run):
            assert not body(run, 5)["ended"]
        assert body(run, 5)["ended"]
    else:
        with pytest.raises(UsageError, match="by process 77 on elsewhere"):
            DriverLease(run)


def test_renewed_while_it_is_held_and_lost_to_a_newer_one(tmp_path: Path) -> None:
    """A held lease is renewed; the driver sees that another one has taken over, and does not change that one's lease."""
    run = RunDir(tmp_path)
    lease = DriverLease(run, renew_s=0.02)
    first = body(run, 1)["renewed_at"]
    until(lambda: body(run, 1)["renewed_at"] > first)
    assert lease.lost() is None
    put(run, 2)
    until(lambda: lease.lost() is not None)
    error = lease.lost()
    assert isinstance(error, Fenced)
    assert "another driver has taken over, process 77 on elsewhere" in error.message
    lease.release()
    assert body(run, 2)["key"] == "theirs"
    assert not body(run, 1)["ended"]


def test_storage_that_goes_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run's folder is missing the lease is not lost, and nothing is written; renewal continues when it is back."""
    run = RunDir(tmp_path / "run")
    looked = threading.Semaphore(0)
    lease = DriverLease(run, renew_s=0.02)
    newest = lease._newest

    def look() -> Any:
        looked.release()
        return newest()

    monkeypatch.setattr(lease, "_newest", look)
    (tmp_path / "run").rename(tmp_path / "away")
    for _ in range(3):
        assert looked.acquire(timeout=240)
    assert lease.lost() is None
    assert not (tmp_path / "run").exists(), "nothing is written where the run is not"
    (tmp_path / "away").rename(tmp_path / "run")
    before = body(run, 1)["renewed_at"]
    until(lambda: body(run, 1)["renewed_at"] > before)
    lease.release()


@pytest.mark.parametrize("conditional", [True, False])
def test_on_an_object_store(s3: Any, monkeypatch: pytest.MonkeyPatch, conditional: bool) -> None:
    """A held lease is refused, released, and taken by exactly one of two drivers that write the same number, with conditional
    writes and without. A driver that finds another's lease at a renewal has lost its own. A request to stop reaches the driver."""
    lock, create = threading.Lock(), Creator.create

    def atomic(creator: Creator, path: str, data: bytes) -> bool:
        with lock:  # moto checks the condition and writes in two steps; an S3 server does not
            return create(creator, path, data)

    monkeypatch.setattr(Creator, "create", atomic)
    if not conditional:
        monkeypatch.setitem(sys.modules, "botocore", None)
    run = RunDir(s3.uri(f"runs/leased-{conditional}"))
    lease = DriverLease(run, renew_s=0.05, settle_s=1e6 if conditional else 0.1)
    assert run.storage.creates_once() == conditional
    driver = newest_driver(run)
    assert driver is not None
    assert ask_stop(run, driver)
    until(lambda: lease.asked_to_stop() == f"`raydist stop`, process {os.getpid()} on {socket.gethostname()}")
    with pytest.raises(UsageError, match="is being trained already"):
        DriverLease(run)

    def lost() -> bool:
        put(run, 1)  # again and again, as the other driver renews too: a renewal of this one may have overwritten it
        return lease.lost() is not None

    until(lost)
    lease.release()
    assert body(run, 1)["key"] == "theirs"
    put(run, 1, ended=True)

    for number in (2, 3):
        won: list[DriverLease] = []
        together = threading.Barrier(2)

        def take(won: list[DriverLease] = won, together: threading.Barrier = together) -> None:
            mine = RunDir(run.full_uri)
            mine.storage.files("")
            together.wait()
            try:
                won.append(DriverLease(mine, settle_s=2.0))
            except UsageError:
                return

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert won[0]._number == number
        won[0].release()


def test_starting_anew_keeps_the_numbers(tmp_path: Path) -> None:
    """The run's old files are deleted, but its old attempt stays fenced, and checkpoints that it commits are void."""
    run = RunDir(tmp_path)
    begin_attempt(run, 1)
    resume_attempt(run, 1, 0)
    run.storage.write("checkpoints/step-00000010/MANIFEST-0001.json", b"{}")
    for name in ("spec.yaml", "notes.txt", "plots/loss.png", "export.jsonl"):
        run.storage.write(name, b"")
    old = run.lineage()
    with DriverLease(run):
        start_anew(run)
        assert run.storage.folders() == ["attempts", "drivers", "plots"], "the user's own files stay"
    assert run.storage.files() == {"notes.txt": 0}
    assert fenced(run, 1)
    assert run.committed() == []
    assert (old.voided_by(1, 10), run.lineage().voided_by(1, 10)) == (None, 2)


def test_the_heartbeat_leaves_room(tmp_path: Path) -> None:
    """Four renewals may fail before the lease expires."""
    assert 4 * leases.RENEW_S < LOST_AFTER_S


def test_since_when_it_is_driven(tmp_path: Path) -> None:
    """`driven_since` gives the time when the lease was taken; without a driver, or if it is no longer renewed, None."""
    run, before = RunDir(tmp_path), time.time()
    assert driven_since(run) is None
    with DriverLease(run):
        since = driven_since(run)
        assert since is not None
        assert before <= since <= time.time()
        assert driven_since(run, time.time() + LOST_AFTER_S + 1) is None
    assert driven_since(run) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"[" * 100_000, json.dumps({"ahead": True}).encode()],
    ids=["empty", "nothing", "list", "nested", "ahead"],
)
def test_a_lease_that_does_not_tell_is_watched(tmp_path: Path, content: bytes) -> None:
    """A damaged lease, or one of a clock that is a day ahead: the run is free if nobody renews it, and taken if somebody does."""
    run = RunDir(tmp_path)

    def write() -> None:
        if b"ahead" in content:
            put(run, 1, age=-86_400.0)
        else:
            run.storage.write("drivers/000001.json", content)

    write()
    newest = newest_driver(run)
    assert newest is None or (b"ahead" in content and not newest.alive)
    assert driven_since(run) is None
    assert status_by_lease(run) is None
    with DriverLease(run, watch_s=0.2):
        assert body(run, 2)["driver"]["pid"] == os.getpid()
    run.storage.delete("drivers/000002.json")
    put(run, 1, age=-86_400.0)
    taken = threading.Event()

    def renew() -> None:
        while not taken.wait(0.1):
            put(run, 1, age=-86_400.0)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(UsageError, match="process 77 on elsewhere"):
            DriverLease(run, watch_s=240.0)
    finally:
        taken.set()
        renewing.join()
