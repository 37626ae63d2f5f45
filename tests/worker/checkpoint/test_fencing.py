"""A superseded attempt never changes the run: its commit is refused, or void if it came too late, and it deletes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint import manifest, retention
from raydist.errors import Fenced, TrainingStopped, UsageError
from raydist.run.directory import Lineage, RunDir, begin_attempt, fenced, resume_attempt
from raydist.run.log import last_attempt
from raydist.worker.checkpoint import restore

BEGIN = """
import sys
from raydist.errors import UsageError
from raydist.run.directory import RunDir, begin_attempt
run = RunDir(sys.argv[1])
run.storage.files("")
print("ready", flush=True)
for number in map(int, sys.stdin):
    try:
        begin_attempt(run, number)
        print("won", flush=True)
    except UsageError:
        print("lost", flush=True)
"""


@pytest.fixture
def cut_off(kit: Any, tmp_path: Path) -> tuple[Any, Any]:
    """Attempt 1, which committed step 10 and was superseded, and attempt 2, which resumes from there."""
    begin_attempt(RunDir(tmp_path), 1)
    resume_attempt(RunDir(tmp_path), 1, 0)
    old = kit.OneRank(tmp_path, keep=1)
    old.save(10)
    begin_attempt(old.run, 2)
    return old, kit.OneRank(tmp_path, attempt=2, keep=1)


def late_commit(kit: Any, old: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The old attempt checks the fence before the newer one begins, and its commit lands only afterwards."""
    with monkeypatch.context() as stopped:
        stopped.setattr(old.saver.committer, "refuse_if_fenced", lambda: None)
        old.save(step, kit.state(77))
    assert manifest.path(step, "MANIFEST-0001.json") in old.run.storage.files(f"checkpoints/step-{step:08d}")


def test_refused_at_the_commit(kit: Any, cut_off: tuple[Any, Any]) -> None:
    """Once a newer attempt has begun, the old one commits nothing, reports why, and leaves existing checkpoints."""
    old, new = cut_off
    old.save(20)
    with pytest.raises(Fenced, match="attempt 1 may not commit: attempt 2 has begun"):
        old.saver.wait()
    assert old.kinds()[-1] == "checkpoint_failed"
    assert old.run.committed() == [10]
    new.save(20)
    assert new.run.committed() == [20]


def test_the_look_comes_last(cut_off: tuple[Any, Any], kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that begins while the manifest is being flushed is detected: only the rename is still missing."""
    _, new = cut_off
    fsync = os.fsync

    def begin(fd: int) -> None:
        fsync(fd)
        if "MANIFEST" in os.readlink(f"/proc/self/fd/{fd}"):
            monkeypatch.undo()
            begin_attempt(RunDir(new.run.uri), 3)

    monkeypatch.setattr(os, "fsync", begin)
    new.save(20)
    with pytest.raises(Fenced, match="attempt 3 has begun"):
        new.saver.wait()
    assert new.run.committed() == [10]
    assert not [p for p in Path(new.run.uri, "checkpoints").rglob("*MANIFEST*") if "step-00000020" in str(p)]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_late_commit_is_void(kit: Any, cut_off: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """At the same step that the new attempt commits, before or after it: the new one's bytes are restored, an event names the
    late one, and the next pruning deletes it."""
    old, new = cut_off
    resume_attempt(new.run, 2, 10)
    if order == "before":
        late_commit(kit, old, monkeypatch, 20)
        assert new.run.committed() == [10], "past the step that attempt 2 went on from"
        new.save(20)
    else:
        new.save(20)
        late_commit(kit, old, monkeypatch, 20)
        assert manifest.read(new.run, 20).attempt == 2
    late_commit(kit, old, monkeypatch, 30)
    events: list[Any] = []
    found = restore.choose(new.run, on_event=events.append)
    assert found is not None
    assert (found.step, found.attempt) == (20, 2)
    into = kit.empty()
    restore.load(new.run, found, into, {})
    assert kit.same(into, kit.state(20))
    assert events[-1].kind == "checkpoint_rejected"
    assert events[-1].data["step"] == 30
    assert "attempt 1 was cut off" in events[-1].data["cause"]
    new.save(40)
    assert new.run.committed() == [40]
    assert new.run.storage.folders("checkpoints") == ["step-00000040"], "what was void is gone"


def test_a_late_commit_that_is_seen_is_one_line(
    kit: Any, cut_off: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new attempt finds it when it chooses a checkpoint, it resumes from it, and the commit stays valid."""
    old, new = cut_off
    late_commit(kit, old, monkeypatch, 20)
    found = restore.choose(new.run)
    assert found is not None
    assert (found.step, found.attempt) == (20, 1)
    resume_attempt(new.run, 2, 20)
    restore.load(new.run, found, kit.empty(), {})
    assert new.run.committed()[-1] == 20
    assert new.run.void() == []


def test_a_cut_off_attempt_deletes_nothing_of_a_later_one(kit: Any, cut_off: tuple[Any, Any]) -> None:
    """Its pruning, begun before it was superseded, spares the shards that the newer attempt is writing and has committed."""
    old, new = cut_off
    shard = "checkpoints/step-00000020/shard-00000-of-00001-0002-abcdef01.bin"
    new.run.storage.write(shard, b"in flight")
    retention.prune(old.run, 1, orphans=True, attempt=1)
    assert new.run.storage.size(shard) is not None
    retention.prune(new.run, 1, orphans=True, attempt=2)
    assert new.run.storage.size(shard) is None, "its own failed save's"


def test_numbers_ascend(tmp_path: Path) -> None:
    """A number begins once, never after a higher one; a driver continues after those that died before their first step."""
    run = RunDir(tmp_path)
    assert not fenced(run, 5), "a run without any note has no fence"
    begin_attempt(run, 1)
    begin_attempt(run, 4)
    for number in (1, 3, 4):
        with pytest.raises(UsageError, match="attempt 4 has already started"):
            begin_attempt(run, number)
    assert [fenced(run, n) for n in (1, 3, 4, 5)] == [True, True, False, True]
    assert last_attempt(run) == 4
    with pytest.raises(UsageError, match="attempt 4 has started, so attempt 1 may not continue"):
        resume_attempt(run, 1, 10)
    assert run.lineage().begun == {1: None, 4: None}


def test_two_drivers_that_begin_the_same_number(tmp_path: Path) -> None:
    """Two processes, at the same moment, twenty times: exactly one begins."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        pipes = [(p.stdin, p.stdout) for p in both]
        assert all(out is not None and out.readline() == "ready\n" for _, out in pipes)
        for number in range(1, 21):
            for given, _ in pipes:
                assert given is not None
                given.write(f"{number}\n")
                given.flush()
            words = [out.readline().strip() for _, out in pipes if out is not None]
            assert sorted(words) == ["lost", "won"], number
    finally:
        for process in both:
            process.communicate(timeout=240)
    assert sorted(RunDir(tmp_path).lineage().begun) == list(range(1, 21))


@pytest.mark.parametrize(
    ("begun", "attempt", "step", "by"),
    [
        ({}, 1, 50, None),
        ({1: 0, 2: None}, 1, 50, None),
        ({1: 0, 2: 50}, 1, 50, None),
        ({1: 0, 2: 40}, 1, 50, 2),
        ({1: 0, 2: 40, 3: 30}, 2, 50, 3),
        ({1: 0, 2: 40, 3: 30}, 1, 35, 3),
        ({1: 0, 2: 40, 3: 50}, 2, 50, None),
        ({1: 0, 2: 40, 3: 50}, 1, 45, 2),
    ],
)
def test_what_counts(begun: dict[int, int | None], attempt: int, step: int, by: int | None) -> None:
    """A checkpoint counts unless a later attempt resumed from before it."""
    assert Lineage(begun).voided_by(attempt, step) == by


def test_no_restart_heals_it() -> None:
    """A fenced attempt ends permanently: its driver must not begin a number that fences the valid one."""
    from raydist.cluster.run.root_cause import RankError, root_cause

    assert issubclass(Fenced, TrainingStopped)
    assert not root_cause([RankError(0, "Fenced", "attempt 1 may not commit")]).heals
