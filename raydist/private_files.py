"""Files and folders in shared places (/tmp, /dev/shm) that no other user of the host could have put there.

Runs anywhere. There every user may create any name that does not exist: a link to another file, a FIFO whose opening waits for
ever, a folder with such files. So a name is used only if what stands there is this user's own.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
