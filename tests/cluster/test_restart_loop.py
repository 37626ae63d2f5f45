"""Between two attempts: the storage must still be the one on which the run began."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from raydist.cluster.run.restart_loop import storage_gone
from raydist.cluster.run.stop_request import StopRequest
from raydist.errors import StorageError
from raydist.run.directory import RunDir, await_attempt, begin_attempt, manifest_name, resume_attempt, step_folder


def test_an_unmounted_file_system_is_no_new_run(tmp_path: Path) -> None:
    """Without the note of its own attempt the driver does not go on, and writes nothing; it goes on once the note is back."""
    run = RunDir(tmp_path / "mount" / "run")
    begin_attempt(run, 3)
    assert storage_gone(run, 3, StopRequest(), wait_s=0.0) is None
    shutil.move(tmp_path / "mount", tmp_path / "aside")
    (tmp_path / "mount").mkdir()
    stop = StopRequest()
    stop.add(2)
    cause = storage_gone(run, 3, stop)
    assert cause is not None
    assert "does not have attempt 3 any more" in cause
    assert list((tmp_path / "mount").iterdir()) == []

    def mount() -> None:
        (tmp_path / "mount").rmdir()
        (tmp_path / "aside").rename(tmp_path / "mount")

    later = threading.Timer(0.2, mount)
    later.start()
    assert storage_gone(run, 3, StopRequest(), wait_s=60.0) is None
    later.join()


def test_a_rank_waits_for_the_note_of_its_attempt(tmp_path: Path) -> None:
    """It may be seen late; on a node without the run's file system it never is: StorageError, and nothing is written."""
    run = RunDir(tmp_path / "run")
    later = threading.Timer(0.2, begin_attempt, (run, 2))
    later.start()
    await_attempt(RunDir(run.uri), 2)
    later.join()
    (tmp_path / "not-mounted").mkdir()
    with pytest.raises(StorageError, match="not-mounted on .* does not have attempts/0002.json.* it is another folder"):
        await_attempt(RunDir(tmp_path / "not-mounted"), 2, wait_s=0.0)
    assert list((tmp_path / "not-mounted").iterdir()) == []


def test_the_first_rank_waits_for_the_newest_checkpoint(tmp_path: Path) -> None:
    """It voids what is later than the step that it resumes from, so it must see what the driver has seen; the others need not."""
    run, checkpoint = RunDir(tmp_path), step_folder(20)
    begin_attempt(run, 1)
    for step in (10, 20):
        run.storage.write(f"{step_folder(step)}/{manifest_name(1)}", b"")
    begin_attempt(run, 2)
    shutil.move(tmp_path / checkpoint, tmp_path / "aside")
    await_attempt(run, 2, wait_s=0.0)
    with pytest.raises(StorageError, match="does not have the checkpoint of step 20, which the driver has seen"):
        await_attempt(run, 2, first=True, wait_s=0.0)
    later = threading.Timer(0.2, shutil.move, (tmp_path / "aside", tmp_path / checkpoint))
    later.start()
    await_attempt(run, 2, first=True)
    later.join()


def test_the_newest_checkpoint_never_goes_back(tmp_path: Path) -> None:
    """A driver that has seen a commit does not go on from an older one, unless an attempt has voided it."""
    run = RunDir(tmp_path)
    for attempt, start, saved in ((1, 0, (10, 20)), (2, 20, (30,))):
        begin_attempt(run, attempt)
        resume_attempt(run, attempt, start)
        for step in saved:
            run.storage.write(f"{step_folder(step)}/{manifest_name(attempt)}", b"")
    stop = StopRequest()
    stop.add(2)
    assert storage_gone(run, 2, stop, committed=(2, 30)) is None
    shutil.move(tmp_path / step_folder(30), tmp_path / "aside")
    cause = storage_gone(run, 2, stop, committed=(2, 30))
    assert cause is not None
    assert "does not have the checkpoint of step 30 any more, which this driver has seen" in cause
    assert storage_gone(run, 2, stop, committed=(1, 20)) is None
    begin_attempt(run, 3)
    resume_attempt(run, 3, 20)  # step 30 was damaged
    assert storage_gone(run, 3, stop, committed=(2, 30)) is None
