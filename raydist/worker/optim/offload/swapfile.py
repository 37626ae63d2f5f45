"""A scratch file that is deleted with its process, read and written without the page cache.

Runs in: each train worker. Torch, never ray.

There are two ways to access the bytes. The update uses O_DIRECT (`read`, `write`). A checkpoint reads, and a restore writes,
through tensors over a shared mapping of the file (`tensor`), which need no memory except the page cache. Call `sync` between the
two: no byte may be in use through both at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raydist.errors import StorageError, UserError
from raydist.worker.optim.offload import swap_space
from raydist.worker.optim.offload.layout import PAGE

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_libc = ctypes.CDLL(None)
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class SwapFile:
    """`nbytes` zeros (a multiple of PAGE) in an unnamed file of the folder `folder`, which is deleted with this process.

    `tag` names the rank in messages. Raises UserError if the folder or its disk is unusable, and then leaves no file.
    `direct`: whether reads and writes bypass the page cache. File systems without O_DIRECT (EINVAL) use buffered I/O.
    """

    def __init__(self, folder: str, nbytes: int, tag: str) -> None:
        assert nbytes > 0
        assert nbytes % PAGE == 0
        swap_space.check(folder, nbytes)
        self.where = f"{folder} (swap file of {tag})"
        self._fd = _open_nameless(folder, tag)
        self.close: Callable[[], object] = weakref.finalize(self, os.close, self._fd)
        """Closes the file. Its disk space is free when the last tensor over it is freed, too."""
        try:
            _allocate(self._fd, folder, nbytes)
            self.direct = _past_cache(self._fd)
            self._map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            self.close()
            raise

    def tensor(self, offset: int, shape: Sequence[int]) -> Tensor:
        """The fp32 values from byte `offset` on, as a tensor over the file itself, to read and write in place."""
        if not math.prod(shape):
            return torch.empty(shape)
        return torch.frombuffer(self._map, dtype=torch.float32, count=math.prod(shape), offset=offset).view(shape)

    def sync(self) -> None:
        """Writes changes made through tensors to the file, and makes later reads through tensors come from the file.

        Drops the mapping's pages: after a checkpoint they are as large as the state. Cheap if no page was used.
        """
        _write_back(self._fd)
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`. Raises StorageError, which names file and offset, also if the file is too short."""
        self._move(os.preadv, "read", memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        """Writes all of `memory`. Raises StorageError, which names file and offset."""
        self._move(os.pwritev, "write", memory, offset)

    def _move(self, call: Callable[[int, list[memoryview], int], int], what: str, memory: memoryview, at: int) -> None:
        done = 0
        while done < len(memory):
            where = f"{self.where}: {what} of {len(memory) - done} bytes at offset {at + done}"
            try:
                moved = call(self._fd, [memory[done:]], at + done)
            except OSError as error:
                raise StorageError(f"{where}: {error.strerror}", _DISK) from error
            if moved == 0:
                raise StorageError(f"{where}: the file ends there", _DISK)
            done += moved


_DISK = "check the disk of that node (dmesg, smartctl); training resumes from the last checkpoint"


def _write_back(fd: int) -> None:
    """Writes all dirty pages of the page cache to the disk. fdatasync would also flush the disk's own cache, after every update."""
    # Linux does this before each direct read; some user-space and network file systems do not.
    call = getattr(_libc, "sync_file_range", None)
    if call is None or call(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_AND_WAIT):
        os.fdatasync(fd)


def _open_nameless(folder: str, tag: str) -> int:
    """A new file without a directory entry, so that it is deleted even after SIGKILL."""
    if _O_TMPFILE:
        try:
            return os.open(folder, _O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise UserError(f"offload.path: {folder}: {error.strerror}", "name another folder") from error
    path = os.path.join(folder, f"raydist-swap-{tag}-{uuid.uuid4().hex}")
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise UserError(f"offload.path: {folder}: {error.strerror}", "name another folder") from error
    os.unlink(path)  # while it is still empty
    return fd


def _allocate(fd: int, folder: str, nbytes: int) -> None:
    """Allocates all blocks now, so that a disk that fills up later cannot stop an update."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(fd, 0)  # so that the message counts the blocks allocated so far as free
            raise swap_space.no_room(folder, nbytes) from error
        raise UserError(
            f"offload.path: {folder}: could not allocate {nbytes:,} bytes: {error.strerror}", "name another folder"
        ) from error


def _past_cache(fd: int) -> bool:
    """Enables O_DIRECT, tries a read, and disables it again if the file system does not support it."""
    if not _O_DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT)
        with mmap.mmap(-1, PAGE) as block:
            os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True
