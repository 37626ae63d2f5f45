"""Files and folders of this user alone, also in shared places (/tmp, /dev/shm) where other users may put any name.

Runs anywhere. In a shared place every user may create any name that does not exist: a link to another file, a FIFO whose opening
waits for ever, a folder with such files. So a name is used only if what stands there is this user's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "raydist-"
_CLEANER = 'read _; for try in 1 2 3 4 5 6 7 8 9 10; do rm -rf -- "$1" && break; sleep 0.2; done'
"""Waits until the other end of its pipe is closed, or its process has ended, whose children may still write to the folder."""


def open_private(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of this user's own regular file; with O_CREAT in `flags` it is created with mode 0600. Never waits for a writer.

    Follows no link. Raises FileNotFoundError, or PermissionError (an OSError) for anything that is not such a file.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(file)
        raise PermissionError(f"{path} is not a regular file of this user")
    return file


def is_private_folder(path: str | os.PathLike[str]) -> bool:
    """Whether it is a folder, no link to one, of this user, and no other user can write to it."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def make_private_folder(path: Path) -> None:
    """Creates it with mode 0700 if it does not exist. Raises PermissionError if it is not private, OSError if it cannot be made."""
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_private_folder(path):
        raise PermissionError(f"{path} is not this user's folder, or others may write to it")


@contextlib.contextmanager
def temporary_folder(base: Path | None = None) -> Iterator[Path]:
    """A new folder, mode 0700, deleted at the end of the block; in `base`, by default where the system has temporary files. Its
    file `lock` is locked meanwhile. Raises OSError if it cannot be made.

    If this process is killed, a shell that waits for its end deletes it; if that is killed too, the next call: the lock is free.
    """
    base = base or Path(tempfile.gettempdir())
    for stale in base.glob(_PREFIX + 8 * "?"):
        with contextlib.suppress(OSError):
            if is_private_folder(stale):
                _remove_unused(stale)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with (folder / "lock.new").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock.new").rename(folder / "lock")  # others see the lock file only once it is locked
        quiet = subprocess.DEVNULL
        command = ["/bin/sh", "-c", _CLEANER, "raydist-cleaner", str(folder)]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
            ):  # the end of the block closes the pipe, and waits for it
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # if it was killed


def _remove_unused(folder: Path) -> None:
    """Deletes the folder if its lock is free. Raises OSError if it has none, or it is in use."""
    with os.fdopen(open_private(folder / "lock", os.O_WRONLY), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
