"""The Saver with one rank: its files, when the loop waits, and the effects of a failure."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from raydist.checkpoint import manifest
from raydist.errors import CheckpointError, StorageError
from raydist.storage import Storage
from raydist.worker.checkpoint import memory_saver, restore, save, shard_writer, staging
from raydist.worker.checkpoint.commit import Committer
from raydist.worker.checkpoint.staging import Stage


def shard_bytes(folder: Path, step: int) -> list[bytes]:
    return [p.read_bytes() for p in sorted(folder.glob(f"checkpoints/step-{step:08d}/shard-*"))]


def loaded(kit: Any, one: Any, step: int | None = None) -> dict[str, torch.Tensor]:
    found = restore.choose(one.run, step=step)
    assert found is not None
    into = kit.empty()
    restore.load(one.run, found, into, {})
    return into


def test_asynchronous_equals_synchronous(kit: Any, tmp_path: Path) -> None:
    """The same shard bytes, tensors and plain values in both modes; loading gives the saved values."""
    made = []
    for name, asynchronous in (("sync", False), ("async", True)):
        one = kit.OneRank(tmp_path / name, asynchronous=asynchronous)
        for step in (1, 2):
            one.save(step)
        assert one.saver.wait()
        one.saver.close()
        found = manifest.read(one.run, 2)
        assert kit.same(loaded(kit, one), kit.state(2))
        (files,) = [[f.xxh3 for f in found.files.values()]]
        made.append((shard_bytes(tmp_path / name, 2), files, found.plain, found.numbers, found.spec_hash))
    assert made[0] == made[1]


def test_state_is_that_of_start(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`before_update` blocks the update until the copy is done, and no longer: the write continues during the next step."""
    may_copy, may_write = threading.Event(), threading.Event()
    copy, write = Stage.copy, shard_writer.ShardWriter._write
    monkeypatch.setattr(Stage, "copy", lambda *a: (may_copy.wait(), copy(*a))[1])
    monkeypatch.setattr(shard_writer.ShardWriter, "_write", lambda *a: (may_write.wait(), write(*a))[1])
    one = kit.OneRank(tmp_path, asynchronous=True)
    live = kit.state(1)
    one.save(1, live)
    staged, waiting = one.saver._save.staged, threading.Event()
    wait = staged.wait
    monkeypatch.setattr(staged, "wait", lambda: (waiting.set(), wait())[1])
    updated = threading.Event()

    def loop() -> None:
        one.saver.before_update()
        for tensor in live.values():
            tensor.zero_()
        updated.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert waiting.wait(240)
    assert not updated.wait(0.05), "the update waits for the copy"
    may_copy.set()
    thread.join()
    assert one.run.committed() == [], "the update did not wait for the write"
    assert one.saver.poll() is None
    may_write.set()
    assert one.saver.wait()
    assert kit.same(loaded(kit, one), kit.state(1))
    assert one.saver.poll().stalled >= 0.04


def test_one_in_flight(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next `start` waits until the previous save has ended."""
    may_write, writing = threading.Event(), threading.Semaphore(0)
    write = shard_writer.ShardWriter._write

    def slow(*arguments: Any) -> Any:
        writing.release()
        may_write.wait()
        return write(*arguments)

    monkeypatch.setattr(shard_writer.ShardWriter, "_write", slow)
    one = kit.OneRank(tmp_path, asynchronous=True)
    one.save(1)
    second = threading.Thread(target=one.save, args=(2,))
    second.start()
    assert writing.acquire(timeout=240)
    assert not writing.acquire(timeout=0.05), "one is being written, and one only"
    may_write.set()
    second.join()
    one.saver.close()
    assert one.run.committed() == [1, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_costs_no_checkpoint(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """It is reported with rank and cause, raises nothing in the loop, keeps the checkpoint before, and the next save works. If the
    loop waits for the commit, the events say that it did."""
    one = kit.OneRank(tmp_path, asynchronous=asynchronous)
    one.save(1)
    one.saver.wait()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        one.save(2)
        one.saver.before_update()
        result = one.saver.wait()
    assert (result.committed, result.failed_rank, bool(result)) == (False, 0, False)
    assert "No space left on device" in result.cause
    assert one.run.committed() == [1]
    one.save(3)
    assert one.saver.wait()
    one.saver.close()
    assert one.run.committed() == [1, 3]
    assert one.kinds() == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
    assert one.events[1].data["step"] == 2
    waited = [event.data["stall_seconds"] / event.data["seconds"] for event in (one.events[0], one.events[2])]
    assert asynchronous or waited == pytest.approx([1.0, 1.0], rel=0.5)
    assert one.run.storage.folders("checkpoints") == ["step-00000001", "step-00000003"], "what it left is gone"


def _no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_copy_that_fails_fails_the_save_only(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the buffer cannot be allocated, `before_update` returns, and the result has the reason."""

    def no_memory(self: Stage, nbytes: int) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(Stage, "reserve", no_memory)
    one = kit.OneRank(tmp_path, asynchronous=True)
    one.save(1)
    one.saver.before_update()
    assert one.saver.wait().cause == "MemoryError: no room for the copy"


def test_before_commit_comes_first(kit: Any, tmp_path: Path) -> None:
    """It is called when the shards exist and the manifest does not; an exception in it fails the save. What
    it gives is in the manifest."""
    seen: list[Any] = []

    def before(step: int) -> dict[str, Any]:
        seen.append((step, len(shard_bytes(tmp_path, 1)), one.run.committed()))
        return {"more": [step]}

    one = kit.OneRank(tmp_path, before_commit=before)
    one.save(1)
    assert seen == [(1, 1, [])]
    found = manifest.read(one.run, 1)
    assert found.plain["more"] == [1]

    def refuse(step: int) -> None:
        raise RuntimeError("metrics are not durable")

    other = kit.OneRank(tmp_path / "other", before_commit=refuse)
    other.save(1)
    assert other.saver.wait().cause == "RuntimeError: metrics are not durable"
    assert other.run.committed() == []


def test_saving_a_step_again_never_breaks_what_is_there(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save of a committed step writes new files and replaces the manifest; if it fails, the first one stays valid."""
    one = kit.OneRank(tmp_path)
    one.save(1)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        one.save(1, kit.state(9))
    assert manifest.verify(one.run, 1) == []
    assert kit.same(loaded(kit, one), kit.state(1))
    one.save(1, kit.state(9))
    assert kit.same(loaded(kit, one), kit.state(9))
    assert len(shard_bytes(tmp_path, 1)) == 1, "the first one's shard is swept"


def test_eval_loss_before_and_after_the_commit(kit: Any, tmp_path: Path) -> None:
    """`mark_eval` counts before and after the commit: the best checkpoint is kept longer than newer ones."""
    one = kit.OneRank(tmp_path, keep=1, asynchronous=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None)):
        one.save(step)
        if loss is not None:
            one.saver.mark_eval(step, loss)
    one.saver.wait()
    assert one.run.committed() == [2, 3]
    one.saver.mark_eval(3, 0.5)
    assert manifest.best(one.run) == 3
    one.save(4)
    one.saver.wait()
    one.saver.close()
    assert one.run.committed() == [3, 4]


def test_what_cannot_be_saved_is_said_at_once(kit: Any, tmp_path: Path) -> None:
    """Values that are not plain, and sparse tensors: CheckpointError from `start`, naming them."""
    one = kit.OneRank(tmp_path)
    with pytest.raises(CheckpointError, match="plain: not plain data"):
        one.save(1, model=object())
    with pytest.raises(CheckpointError, match="model/s: a tensor of layout torch.sparse_coo"):
        one.save(1, {"model/s": torch.zeros(3).to_sparse()})


def test_prepare_makes_the_buffer_that_the_save_uses(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save waits for the buffer that `prepare` is allocating, and allocates none; neither does the next one."""
    made: list[int] = []
    may_make = threading.Event()
    pages = staging._pages
    monkeypatch.setattr(staging, "_pages", lambda n: (made.append(n), may_make.wait(), pages(n))[2])
    one = kit.OneRank(tmp_path, asynchronous=True)
    one.saver.prepare(kit.state(1), kit.own(1))
    one.save(1)
    may_make.set()
    one.save(2)
    one.saver.close()
    assert len(made) == 1
    assert kit.same(loaded(kit, one), kit.state(2))


def test_a_shard_holds_nothing_of_the_save_before(kit: Any, tmp_path: Path) -> None:
    """The reused buffer has only the new content, also between the tensors: the same state gives the same file."""
    one, other = kit.OneRank(tmp_path / "one"), kit.OneRank(tmp_path / "other")
    one.save(1, {"model/a": torch.ones(1000)})
    small = {"model/a": torch.ones(3), "model/b": torch.ones(5)}
    one.save(2, small)
    other.save(2, small)
    assert shard_bytes(tmp_path / "one", 2) == shard_bytes(tmp_path / "other", 2)


class Refusing(io.FileIO):
    """A file on a file system that accepts the flag O_DIRECT, and then refuses each write."""

    def write(self, data: Any) -> int:
        if fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not like this")
        return super().write(data)


@pytest.mark.parametrize("refused", ["never", "flag", "write"])
@pytest.mark.parametrize("size", [1, 4096, 4097, 3 * 4096 + 64])
def test_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refused: str) -> None:
    """Past the page cache or, where the file system refuses that, through it: the file has the bytes in order."""
    stage = Stage(torch.device("cpu"))
    stage.reserve(4 * 4096)
    data = os.urandom(size)
    stage.memory[:size] = data
    if refused == "flag":
        control = fcntl.fcntl

        def einval(fd: int, command: int, flags: int = 0) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no such flag here")
            return control(fd, command, flags)

        monkeypatch.setattr(shard_writer.fcntl, "fcntl", einval)
    with (Refusing if refused == "write" else io.FileIO)(tmp_path / "file", "xb") as sink:
        out = shard_writer._PastCache(sink)
        out.write(stage.memory[:size])
        out.write(memoryview(b"tail"))
    assert (tmp_path / "file").read_bytes() == data + b"tail"


def test_a_full_disk_is_no_reason_for_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only EINVAL means that the file system has no O_DIRECT; any other error is raised."""
    stage = Stage(torch.device("cpu"))
    stage.reserve(4096)

    def full(self: Any, block: memoryview) -> None:
        _no_space(0)

    monkeypatch.setattr(shard_writer._PastCache, "_write_all", full)
    with pytest.raises(StorageError, match="No space left"), Storage(tmp_path).create("file") as sink:
        shard_writer._PastCache(sink).write(stage.memory)


def test_the_documented_way_without_raydist(kit: Any, tmp_path: Path) -> None:
    """The lines in docs/explanation/checkpoints.md that read a tensor with numpy alone give that tensor."""
    text = (Path(__file__).parents[3] / "docs/explanation/checkpoints.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    one = kit.OneRank(tmp_path)
    tensors = {"model/embedding.weight": torch.randn(9, 4), "model/other": torch.ones(3)}
    one.save(200, tensors)
    found: dict[str, Any] = {}
    exec(code.replace("RUN/", f"{tmp_path}/"), found)
    assert found["whole"].tolist() == tensors["model/embedding.weight"].tolist()


CUDA = torch.device("cuda", 1)


def test_threads_of_saves_use_the_state_s_device(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has the first GPU, where a call of CUDA would take memory for each rank of the node."""
    one = kit.OneRank(tmp_path)
    one.save(1)
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device)))
    stage = one.saver._stage
    assert stage is not None
    stage.device = CUDA
    one.save(2)
    one.saver.prepare(kit.state(3), kit.own(3))
    one.saver.close()
    assert used == [("raydist-checkpoint", CUDA), ("raydist-checkpoint-buffer", CUDA)]


def test_as_many_bytes_are_pinned_as_are_copied(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would pin the next power of two. Memory that cannot be pinned is used as it is, and has a note."""
    pinned: list[int] = []
    codes = iter([0, 0, 2, 2])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(staging, "pin", lambda memory, device: (pinned.append(memory.nbytes), next(codes))[1])
    stages = [Stage(torch.device("cpu")), memory_saver.Slot(torch.device("cpu"), tmp_path, tmp_path / "slot")]
    for stage in stages:
        stage.device, stage._stream = CUDA, cast(Any, "a stream")
        stage.reserve(3 * 4096)
        assert not stage.unpinned
    for stage in stages:
        stage.reserve(5 * 4096)
        assert stage.unpinned.startswith("20,480 bytes for copies of the state could not be pinned (CUDA error 2)")
        assert len(stage.memory) == 5 * 4096
    assert pinned == [3 * 4096] * 2 + [5 * 4096] * 2
    one = kit.OneRank(tmp_path / "run", asynchronous=True)
    one.save(1)
    one.saver.wait()
    one.saver._stage.unpinned = "not pinned"
    for step in (2, 3):
        one.save(step)
        one.saver.wait()
    assert [event.data["text"] for event in one.events if event.kind == "note"] == ["not pinned"]


def test_a_manifest_that_nobody_could_read_is_not_committed(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before stays, and the save has failed, with the remedy."""
    one = kit.OneRank(tmp_path, asynchronous=True)
    one.save(1)
    one.saver.wait()
    monkeypatch.setattr(manifest, "MOST_BYTES", 100)
    one.save(2)
    one.saver.wait()
    assert one.run.committed() == [1]
    (failed,) = (event for event in one.events if event.kind == "checkpoint_failed")
    assert "nobody reads more than 100 bytes" in failed.data["cause"]


def test_checkpoints_that_are_deleted_slowly_fail_no_save(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As thousands of files on an object store: steps in between are passed over, and at the end nobody waits for it."""
    may, delete = threading.Event(), Committer.delete_old
    monkeypatch.setattr(Committer, "delete_old", lambda *given: (may.wait(240), delete(*given))[1])
    monkeypatch.setattr(save, "PATIENCE_S", 0.01)
    one = kit.OneRank(tmp_path, asynchronous=True, timeout_s=0.0, max_failures=1)
    one.save(1)
    while not one.run.committed() or not one.saver._save.result:
        time.sleep(0.01)
    assert not one.save(2)
    (failed,) = (event.data for event in one.events if event.kind == "checkpoint_failed")
    assert "the save of step 1 is done, but old ones are still being deleted" in failed["cause"]
    assert one.saver.wait()
    one.saver.close(0.01)
    may.set()
    assert one.kinds().count("checkpoint_failed") == 1
