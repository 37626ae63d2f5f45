"""Storage that is full, read-only, missing or hanging: a failed save costs only itself, and too many in a row stop the run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import manifest
from raydist.errors import CheckpointError, Fenced, SavesFailed, StorageError, TrainingStopped
from raydist.run.directory import RunDir, begin_attempt, resume_attempt
from raydist.worker.checkpoint import save, shard_writer
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.save_in_flight import WRITING
from raydist.worker.checkpoint.shard_writer import ShardWriter
from raydist.worker.distributed import Rank


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def fill(folder: Path) -> Path:
    """Uses up all the space that is left."""
    room = folder / "filler"
    with open(room, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return room


def failed(one: Any) -> list[tuple[int, str]]:
    return [(e.data["step"], e.data["cause"]) for e in one.events if e.kind == "checkpoint_failed"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(kit: Any, disk: Path, asynchronous: bool) -> None:
    """Two saves fail, then there is space and the count is reset; three in a row stop the run, at the next due step."""
    one = kit.OneRank(disk / "run", asynchronous=asynchronous, keep=2, max_failures=3)
    one.save(1)
    assert one.saver.wait()
    room = fill(disk)
    one.save(2)
    one.save(3)
    one.saver.wait()
    room.unlink()
    one.save(4)
    assert one.saver.wait()
    fill(disk)
    for step in (5, 6, 7):
        one.save(step)
    with pytest.raises(SavesFailed, match="3 saves in a row failed up to step 8; .* rank 0: .*No space left") as caught:
        one.save(8)
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, TrainingStopped)
    assert caught.value.exit_code == 3
    one.saver.close()
    assert [step for step, _ in failed(one)] == [2, 3, 5, 6, 7]
    assert one.run.committed() == [1, 4]
    assert [manifest.verify(one.run, step) for step in (1, 4)] == [[], []]


def test_read_only(kit: Any, disk: Path) -> None:
    """The cause is reported, and the next save works once the file system is writable again."""
    one = kit.OneRank(disk / "run", asynchronous=True)
    one.save(1)
    one.saver.wait()
    mount("-o", "remount,ro", str(disk))
    one.save(2)
    one.saver.wait()
    mount("-o", "remount,rw", str(disk))
    one.save(3)
    assert one.saver.wait()
    one.saver.close()
    assert [(step, "Read-only file system" in cause) for step, cause in failed(one)] == [(2, True)]
    assert one.run.committed() == [1, 3]


def test_a_full_inode_table(kit: Any, disk: Path) -> None:
    """No new file, though there is space: the save costs only itself, and nothing of it is left to be read."""
    one = kit.OneRank(disk / "run", asynchronous=True)
    one.save(1)
    one.saver.wait()
    room = os.statvfs(disk)
    mount("-o", f"remount,nr_inodes={room.f_files - room.f_ffree}", str(disk))
    one.save(2)
    one.saver.wait()
    mount("-o", f"remount,nr_inodes={room.f_files}", str(disk))
    one.save(3)
    assert one.saver.wait()
    one.saver.close()
    assert [(step, "No space left on device" in cause) for step, cause in failed(one)] == [(2, True)]
    assert one.run.committed() == [1, 3]


def test_an_unmounted_folder_takes_no_checkpoint(kit: Any, disk: Path, tmp_path: Path) -> None:
    """The empty folder below is writable, but the run's folder is not there, so nothing is written there."""
    home = tmp_path / "home"
    home.mkdir()
    mount("--bind", str(disk), str(home))
    run = RunDir(home / "run")
    begin_attempt(run, 1)
    resume_attempt(run, 1, 0)
    one = kit.OneRank(home / "run")
    one.save(1)
    subprocess.run(["umount", str(home)], check=True)
    one.save(2)
    assert "its run's folder is gone; is its file system mounted?" in one.saver.wait().cause
    assert list(home.iterdir()) == []
    mount("--bind", str(disk), str(home))
    try:
        one.save(3)
        assert one.saver.wait()
        assert one.run.committed() == [1, 3]
    finally:
        subprocess.run(["umount", str(home)], check=True)


def test_a_server_that_does_not_answer(kit: Any, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An S3 server under SIGSTOP: the loop continues, a due step is skipped, and saves work again once the server continues."""
    monkeypatch.setattr(save, "PATIENCE_S", 0.1)
    one = kit.OneRank(s3.uri("runs/stopped"), asynchronous=True)
    one.save(1)
    assert one.saver.wait()
    os.kill(s3.process.pid, signal.SIGSTOP)
    try:
        assert one.save(2)
        one.saver.before_update()
        assert not one.save(3), "the server is still stopped"
    finally:
        os.kill(s3.process.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert one.save(4)
    assert one.saver.wait()
    one.saver.close()
    ((step, cause), *_) = failed(one)
    assert step == 3
    assert "passed over: the save of step 2 is still on its way" in cause
    assert one.run.committed()[-1] == 4


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every shard write hangs until the event is set; a due step waits 0.05 s."""
    may_write = threading.Event()
    write = ShardWriter._write
    monkeypatch.setattr(shard_writer.ShardWriter, "_write", lambda *a: (may_write.wait(), write(*a))[1])
    monkeypatch.setattr(save, "PATIENCE_S", 0.05)
    return may_write


def test_slow_is_no_failure_but_hanging_is(kit: Any, tmp_path: Path, hanging: threading.Event) -> None:
    """Any number of steps may be skipped before `timeout_s`; after it the third in a row stops the run."""
    one = kit.OneRank(tmp_path, asynchronous=True, timeout_s=1e6, max_failures=3)
    one.save(1)
    assert [one.save(step) for step in range(2, 7)] == [False] * 5
    hanging.set()
    assert one.saver.wait()
    hanging.clear()
    one.saver._timeout_s = 0.0
    one.save(7)
    assert [one.save(8), one.save(9)] == [False, False]
    with pytest.raises(SavesFailed, match="the save of step 7 is still on its way"):
        one.save(10)
    one.saver.close()
    assert failed(one)[-1][0] == 10, "it was not waited for again"
    hanging.set()


def test_the_end_of_a_run_does_not_hang(kit: Any, tmp_path: Path, hanging: threading.Event) -> None:
    """`wait`, a synchronous save and the last save give up after `timeout_s`, with a remedy in the error."""
    for asynchronous in (True, False):
        one = kit.OneRank(tmp_path / str(asynchronous), asynchronous=asynchronous, timeout_s=0.1)
        one.save(1)
        with pytest.raises(SavesFailed, match="step 1 is still on its way .* on rank 0 its own part") as caught:
            one.saver.start(2, kit.state(2), {}, {}, last=True)
        assert "checkpoint.timeout_s is 0.1" in caught.value.hint
        one.saver.close()
    hanging.set()


def test_storage_that_goes_after_the_commit(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later read fails, for example to find the best checkpoint, the event is still emitted."""
    one = kit.OneRank(tmp_path)

    def gone(run: RunDir, known: object) -> None:
        raise StorageError("cannot list: Input/output error")

    monkeypatch.setattr(manifest, "best", gone)
    one.save(1)
    assert one.saver.wait()
    assert one.kinds() == ["checkpoint_saved"]


def hang_on_one(rank: Rank, root: str) -> dict[str, Any]:
    """Saves step 1; at step 2 rank 1 hangs opening a pipe until all have skipped step 3; then step 4."""
    events: list[Any] = []
    saver = Saver(
        RunDir(root), rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=True, keep=10,
        attempt=1, spec_hash="", numbers={}, on_event=lambda e: events.append(e.to_dict()),
    )  # fmt: skip
    tensors = {"model/a": torch.zeros(100_000)}
    pipe, write = f"{root}/pipe", ShardWriter._write

    def slow(self: ShardWriter, parts: Any) -> Any:
        with open(pipe) as until:  # blocks in the kernel until the pipe is opened for writing
            until.read()
        return write(self, parts)

    started = [saver.start(1, tensors, {}, {})]
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "PATIENCE_S", 0.1)
        if rank.rank == 1:
            patch.setattr(ShardWriter, "_write", slow)
        started.append(saver.start(2, tensors, {}, {}))
        while rank.rank == 0 and saver._save is not None and saver._save.state() == WRITING:
            time.sleep(0.01)  # else this rank is named, too
        started.append(saver.start(3, tensors, {}, {}))
        if rank.rank == 0:
            open(pipe, "w").close()
        second = saver.wait()
    started.append(saver.start(4, tensors, {}, {}))
    last = saver.wait()
    saver.close()
    return {"started": started, "saved": [bool(second), bool(last)], "events": events}


def test_all_pass_over_for_the_one_that_hangs(ranks: Any, tmp_path: Path) -> None:
    """If one rank's storage hangs, no rank starts the next save, the event names that rank, and nothing is lost."""
    os.mkfifo(tmp_path / "pipe")
    found = ranks.run(hang_on_one, 2, str(tmp_path))
    assert [r["started"] for r in found] == [[True, True, False, True]] * 2
    assert [r["saved"] for r in found] == [[True, True]] * 2
    passed = [e for e in found[0]["events"] if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["rank"]) for e in passed] == [(3, 1)]
    assert RunDir(tmp_path).committed() == [1, 2, 4]


def fenced_off(rank: Rank, root: str) -> list[str]:
    """Attempt 1 saves after attempt 2 has begun: the result of each call."""
    run = RunDir(root)
    saver = Saver(
        run, rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=True, keep=10,
        attempt=1, spec_hash="", numbers={}, on_event=lambda e: None,
    )  # fmt: skip
    saver.start(1, {"model/a": torch.zeros(100)}, {}, {})
    assert saver._save is not None
    saver._save.done.wait()
    ended = []
    for call in (saver.before_update, saver.wait, lambda: saver.start(2, {}, {}, {})):
        try:
            call()
        except Fenced as error:
            ended.append(error.message)
    saver.close()
    return ended


def test_a_fenced_attempt_ends_at_once(ranks: Any, tmp_path: Path) -> None:
    """It is not an ordinary failed save: every rank raises Fenced before its next update, for any `max_failures`."""
    for number in (1, 2):
        begin_attempt(RunDir(tmp_path), number)
    for ended in ranks.run(fenced_off, 2, str(tmp_path)):
        assert ended == ["attempt 1 may not commit: attempt 2 has begun"] * 3
