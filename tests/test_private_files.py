"""What another user of the host puts into /tmp or /dev/shm is neither read, nor followed, nor waited for, nor deleted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raydist.checkpoint import memory_layout
from raydist.cluster import session
from raydist.ipc import mailbox
from raydist.observe import write_ahead_log
from raydist.observe.write_ahead_log import WriteAheadLog
from raydist.private_files import is_private_folder, make_private_folder, open_private, temporary_folder
from raydist.run.driver_process import this_process

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def in_time(call: Callable[[], object]) -> None:
    """Calls it in a thread. It must return: opening a FIFO waits for its other end, for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(240)
    assert not thread.is_alive(), "it waits for a FIFO"


def test_only_an_own_regular_file_is_opened(tmp_path: Path) -> None:
    """Not a FIFO, a link, a folder or another user's file; a new file is readable for its user only."""
    own = tmp_path / "own"
    os.close(open_private(own, os.O_RDWR | os.O_CREAT))
    assert own.stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "link", "folder"):
        with pytest.raises(OSError, match=r"regular file|symbolic|No such device"):
            open_private(tmp_path / name, os.O_RDWR if name == "fifo" else os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        open_private(tmp_path / "none")
    if os.geteuid() == 0:
        os.chown(own, NOBODY, -1)
        with pytest.raises(PermissionError, match="not a regular file of this user"):
            open_private(own)


def test_only_an_own_folder_that_others_cannot_write_is_private(tmp_path: Path) -> None:
    """A link to one is not; nor is one with write access for others, which has to be made private first."""
    make_private_folder(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "open", "none"):
        assert not is_private_folder(tmp_path / name)
    with pytest.raises(PermissionError, match="others may write"):
        make_private_folder(tmp_path / "open")
    if os.geteuid() == 0:
        os.chown(tmp_path / "own", NOBODY, -1)
        with pytest.raises(PermissionError, match="not this user's folder"):
            make_private_folder(tmp_path / "own")


@root
def test_what_another_user_has_planted_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIFOs, links and folders under all names that a starting run looks at: nothing waits, and all of them are left alone."""
    for module in (memory_layout, write_ahead_log, mailbox):
        monkeypatch.setattr(module, "SHM", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("kept")
    os.mkfifo(target / "lock")
    run, uid = "file:///a/run", os.geteuid()
    planted = [tmp_path / f"raydist-{uid}-journal-a.jsonl"]
    os.mkfifo(planted[0])
    for folder, name in [
        (f"raydist-{uid}-0123456789abcdef", "lock"),
        ("raydist-evil1234", "lock"),
        (mailbox.folder(run).name, "x-00000.json"),
    ]:
        place = tmp_path / folder
        place.mkdir()
        os.mkfifo(place / name)
        planted += [place / name, place]
    for folder in (f"raydist-{uid}-fedcba9876543210", "raydist-link1234"):
        (tmp_path / folder).symlink_to(target)
        planted.append(tmp_path / folder)
    for path in planted:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def start() -> None:
        memory_layout.remove_unused()
        WriteAheadLog(run, this_process()).close()
        assert list(mailbox.read(run, "x")) == []
        mailbox.clear(run, "x")
        mailbox.clear_stale()
        with session._temp_dir() as temp:
            assert temp.stat().st_mode & 0o777 == 0o700
        done.append(True)

    done: list[bool] = []
    in_time(start)
    assert done
    assert all(os.path.lexists(path) for path in planted)
    assert sorted(os.listdir(target)) == ["lock", "precious"]
    with pytest.raises(PermissionError):
        mailbox.Mailbox(run, "x", 0)
    with pytest.raises(PermissionError):
        memory_layout.Use(str(tmp_path / f"raydist-{uid}-0123456789abcdef"))


def _in_use(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a temporary folder with a file, until its stdin is closed."""
    code = "from raydist.private_files import *; import sys\nwith temporary_folder(Path(sys.argv[1])) as folder:\n"
    code += " (folder / 'file').touch(); print(folder, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, str(base)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_temporary_folder_outlives_no_process(tmp_path: Path) -> None:
    """It is deleted when its process ends or is killed; if whoever deletes it was killed as well, by the next process that makes
    one. Those in use stay."""
    (ends, first), (killed, second), (both, third), (lives, fourth) = (_in_use(tmp_path) for _ in range(4))
    try:
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (first, second, third, fourth))
        ends.communicate()
        assert not first.exists()
        (cleaner,) = psutil.Process(both.pid).children()
        cleaner.kill()
        for process in (both, killed):
            process.kill()
        deadline = time.monotonic() + 240
        while second.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        both.wait()
        assert third.exists()
        with temporary_folder(tmp_path):
            assert not third.exists()
            assert (fourth / "file").exists()
    finally:
        for process in (killed, both, lives):
            process.kill()
            process.communicate()


def test_every_temporary_folder_is_one_of_these() -> None:
    """In the modules of raydist. Else a killed process leaves one behind."""
    others = {
        "private_files.py": "here",
        "worker/checkpoint/export.py": "beside the folder that is exported",
        "observe/warm_monitors.py": "in Ray's folder",
        "cluster/data_prepare.py": "logs that an error message names",
    }
    root = Path(session.__file__).parents[1]
    makes = re.compile(r"\b(mkdtemp|TemporaryDirectory)\(")
    assert {str(p.relative_to(root)) for p in root.rglob("*.py") if makes.search(p.read_text())} == set(others)
