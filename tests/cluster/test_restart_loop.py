"""Between two attempts: the storage must still be the one on which the run began."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from raydist.cluster.run.restart_loop import storage_gone
from raydist.cluster.run.stop_request import StopRequest
from raydist.run.directory import RunDir, begin_attempt


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
