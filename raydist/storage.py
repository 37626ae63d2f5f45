"""A folder on storage: local disk, NFS, or any URI that pyarrow.fs supports (s3, gs, hdfs, ...).

Runs anywhere. A file written here is complete or absent: locally a temporary file is flushed to the disk and
renamed; an object store shows an object only after its upload.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from raydist import conditional_writes, remote_filesystem
from raydist.errors import StorageError, UserError
from raydist.paths import local_path
from raydist.redact import redact
from raydist.sinks import Sink, write_whole

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs as pafs

_TEMPORARY = ".tmp-"
_SILLY_RENAMED = re.compile(r"\.nfs[0-9a-f]{24}")
"""A deleted file that a process here has open, on NFS: gone when that process closes it; deleting it is an error (EBUSY)."""
_LIST_TRIES = 10
GONE = "its run's folder is gone; is its file system mounted?"
MOST_READ = 1 << 30
"""Bytes of a file that `read` reads at once; tensors and tokens are read in pieces."""

NO_FOLDER = frozenset(
    [
        errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT,
        errno.EINVAL,
    ]
)  # fmt: skip
"""Errors of a path at which no folder can be made, however often it is tried."""


def inside(name: str) -> str:
    """Returns `name`, perhaps read from a file, if it stays within the folder to which it is relative. Raises ValueError."""
    if name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise ValueError(f"the name {name!r} leads out of its folder")
    return name


class Storage:
    """A folder, by path or URI. Names are relative to it, with `/` between the parts, and cannot lead out of it: see `inside`.

    `uri` can be shown and stored: it contains no secrets. `full_uri` opens the folder again, also in another process: keep it in
    memory only.

    Every method raises StorageError, with the place and the operating system's reason.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        # Imported here, because it takes a quarter of a second, and `raydist --help` needs no storage.
        import pyarrow as pa
        import pyarrow.fs as pafs

        self._type = pafs.FileType
        text = remote_filesystem.check_name(uri)
        self.local: Path | None = None
        self.private = False
        """Whether this folder, if it is local and is created, is for its user alone (mode 0700).

        Files and folders that are created in it have no permissions for others that it does not have itself.
        """
        self.marks: tuple[Path, ...] = ()
        """Where none of these paths exists, this local folder's file system is not mounted: nothing is written. () if unknown."""
        try:
            if "://" in text and not text.startswith("file://"):
                (self.fs, self.root), self.full_uri = remote_filesystem.open_uri(text), text.rstrip("/")
            else:
                self.local = local_path(text.removeprefix("file://")).absolute()
                self.fs, self.root, self.full_uri = pafs.LocalFileSystem(), str(self.local), str(self.local)
        except (pa.ArrowInvalid, OSError) as error:
            hint = remote_filesystem.remedy(text, remote_filesystem.FORMS)
            # Not `from error`: its text contains the URI as given, and a traceback would show it.
            raise UserError(f"storage {text!r}: {remote_filesystem.reason(error)}", hint) from None
        self.uri = redact(self.full_uri)

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.full_uri,)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def at(self, name: str) -> Storage:
        """The folder `name` inside this one, with the same marks."""
        self._checked(name)
        if self.local is not None:
            inner = Storage(self.local / name)
            inner.marks = self.marks
            return inner
        scheme, mark, rest = self.full_uri.partition("?")
        return Storage(f"{scheme}/{name}{mark}{rest}")

    def above(self) -> Storage:
        """The folder that contains this one."""
        if self.local is not None:
            return Storage(self.local.parent)
        place, mark, rest = self.full_uri.partition("?")
        return Storage(f"{place.rpartition('/')[0]}{mark}{rest}")

    def path(self, name: str = "") -> str:
        """The filesystem's path of `name`."""
        return str(PurePosixPath(self.root) / self._checked(name)) if name else self.root

    def _checked(self, name: str) -> str:
        try:
            return inside(name)
        except ValueError as error:
            raise StorageError(f"{self.uri}: {error}") from None

    def _local_path(self, name: str) -> Path:
        return Path(self.path(name))

    @contextmanager
    def create(self, name: str, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        """A new file, complete and durable once the block ends without an error; otherwise it does not exist.

        Creates missing folders. An existing file of that name is replaced atomically; on an object store it is deleted if
        the block raises. `check` is called as late as possible before the file gets its name: locally when all of it is on the
        disk, on an object store before the upload. If it raises, there is no file.
        """
        try:
            if self.local is not None:
                with self._create_local(self._local_path(name), check) as sink:
                    yield sink
            else:
                if check is not None:
                    check()
                with self._create_remote(self.path(name)) as stream:
                    yield stream
        except OSError as error:
            raise self._failed("write", name, error) from error

    @contextmanager
    def _create_remote(self, path: str) -> Iterator[Sink]:
        with self.fs.open_output_stream(path, compression=None) as stream:
            try:
                yield stream
            except BaseException:
                # pyarrow cannot abort an upload: closing creates an object of the bytes so far, which is then deleted.
                with suppress(OSError):
                    stream.close()
                    self.fs.delete_file(path)
                raise

    @contextmanager
    def _create_local(self, path: Path, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        part = self._part(path)
        try:
            with open(part, "xb", buffering=0, opener=opener) as file:
                yield file
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        # The rename must be flushed too, or a power failure may undo it.
        _sync_folder(path.parent)

    def _part(self, path: Path) -> Path:
        """The temporary name of a file until it is complete. Creates its folder, durably."""
        self._make_folder_of(path)
        return path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")

    def appendable(self, name: str) -> Path:
        """The path of a local file to append to, with `opener`. Creates its folder. Raises OSError."""
        path = self._local_path(name)
        self._make_folder_of(path)
        return path

    def append(self, name: str, data: bytes, *, sync: bool = False) -> None:
        """Appends to a file of a local folder: see `append_whole`."""
        try:
            append_whole(self.appendable(name), data, sync=sync)
        except OSError as error:
            raise self._failed("write", name, error) from error

    def _make_folder_of(self, path: Path) -> None:
        made = [folder for folder in path.parents if not folder.exists()]
        if self.marks and not any(mark.exists() for mark in self.marks):
            # Created again, it would be below the mount point of a file system that was unmounted.
            raise FileNotFoundError(GONE)
        for folder in reversed(made):  # not `parents=True`: it may be unmounted now
            folder.mkdir(self._folder_mode(folder), exist_ok=True)
        if self.private and self.local is not None:
            self.marks = self.marks or (self.local,)
        for folder in made:
            _sync_folder(folder.parent)

    def _folder_mode(self, folder: Path) -> int:
        """With which it is created, not changed to: another rank creates files in it at once, with the folder's permissions."""
        if not self.private or self.local is None or self.local not in (folder, *folder.parents):
            return 0o777
        return 0o700 if folder == self.local else 0o700 | self.local.stat().st_mode & 0o077

    def write(self, name: str, data: bytes | memoryview, check: Callable[[], object] | None = None) -> None:
        """Writes a small file, atomically. `check`: see `create`."""
        with self.create(name, check) as sink:
            write_whole(sink, data)

    def write_new(self, name: str, data: bytes) -> bool:
        """Writes a small file, unless the name exists; returns whether it was written.

        On a file system this is atomic (a hard link, on NFS too): of several writers exactly one gets True. So it is on S3, if
        botocore is installed and the server has conditional writes: see `creates_once`. pyarrow has no such operation: on other
        object stores two writers that check at the same moment both get True.
        """
        if self.local is None:
            if self.size(name) is not None:
                return False
            creator = conditional_writes.creator(self.full_uri, self.fs)
            if creator is None:
                self.write(name, data)
                return True
            try:
                return creator.create(self.path(name), data)
            except OSError as error:
                raise self._failed("write", name, error) from error
        path = self._local_path(name)
        try:
            part = self._part(path)
            try:
                with open(part, "xb", buffering=0, opener=opener) as file:
                    write_whole(file, data)
                    os.fsync(file.fileno())
                conditional_writes.link(part, path)
            finally:
                part.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed("write", name, error) from error
        return True

    def creates_once(self) -> bool:
        """Whether the last `write_new` was atomic. False also before the first one to an object store."""
        if self.local is not None:
            return True
        creator = conditional_writes.creator(self.full_uri, self.fs)
        return creator is not None and creator.honoured.get(self.root.partition("/")[0], False)

    def read(self, name: str) -> bytes:
        """A whole file. Raises FileNotFoundError if it is missing, for callers that expect this."""
        try:
            self._check_kind(name, MOST_READ)
            with self.fs.open_input_stream(self.path(name), compression=None) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", name, error) from error

    def open(self, name: str) -> pa.NativeFile:
        """Opens a file for reading at any position. Raises FileNotFoundError if it is missing."""
        try:
            self._check_kind(name)
            return self.fs.open_input_file(self.path(name))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("open", name, error) from error

    def _check_kind(self, name: str, most: int = 1 << 62) -> None:
        """Opening a FIFO waits for its writer, and a device may have no end. Raises OSError."""
        if self.local is not None:
            facts = os.stat(self._local_path(name))
            if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
                raise StorageError(f"cannot read {self.uri}/{name}: it is not a regular file", "remove it")
            if facts.st_size > most:
                raise StorageError(
                    f"cannot read {self.uri}/{name}: it has more than {most >> 30} GiB, the limit", "move it away"
                )

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""
        info = self._info(name)
        return int(info.size) if info.type == self._type.File else None

    def is_folder(self) -> bool:
        """Whether it is there, and a folder."""
        return bool(self._info("").type == self._type.Directory)

    def exists(self, name: str = "") -> bool:
        """Whether there is a file or a folder of that name."""
        return bool(self._info(name).type != self._type.NotFound)

    def _info(self, name: str) -> pafs.FileInfo:
        try:
            return self.fs.get_file_info(self.path(name))
        except OSError as error:
            raise self._failed("read", name, error) from error

    def files(self, folder: str = "", *, recursive: bool = False, unfinished: bool = False) -> dict[str, int]:
        """Files in a folder -> bytes; names relative to this Storage. Unfinished files are left out, unless `unfinished`."""
        return {n: int(i.size) for n, i in self._list(folder, recursive, unfinished) if i.type == self._type.File}

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        return sorted(PurePosixPath(n).name for n, i in self._list(folder, False) if i.type == self._type.Directory)

    def _list(self, folder: str, recursive: bool, unfinished: bool = False) -> Iterator[tuple[str, pafs.FileInfo]]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self.path(folder), recursive=recursive, allow_not_found=True)
        for tries in range(_LIST_TRIES):
            try:
                infos = self.fs.get_file_info(selector)
                break
            except OSError as error:
                # pyarrow raises this for a folder that was created or deleted during the listing; never for a missing folder.
                if not isinstance(error, FileNotFoundError) or tries == _LIST_TRIES - 1:
                    raise self._failed("list", folder, error) from error
        for info in sorted(infos, key=lambda i: i.path):
            if _SILLY_RENAMED.fullmatch(info.base_name):
                continue
            if unfinished or not info.base_name.startswith(_TEMPORARY):
                yield str(PurePosixPath(info.path).relative_to(self.root)), info

    def delete(self, name: str) -> None:
        """Deletes a file or a whole folder; does nothing if it does not exist."""
        try:
            info = self._info(name)
            if info.type == self._type.Directory:
                self.fs.delete_dir(self.path(name))
            elif info.type == self._type.File:
                self.fs.delete_file(self.path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed("delete", name, error) from error

    def delete_empty(self, folder: str) -> None:
        """Deletes a folder if it is empty."""
        if self.local is None:
            if not self.files(folder, recursive=True):
                self.delete(folder)
            return
        try:
            os.rmdir(self._local_path(folder))
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise self._failed("delete", folder, error) from error

    def _failed(self, verb: str, name: str, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        return refused(verb, f"{self.uri}/{name}", error)


def refused(verb: str, where: str | Path, error: OSError) -> StorageError:
    """The error for a file that cannot be written, deleted or read."""
    return StorageError(
        f"cannot {verb} {where}: {os.strerror(error.errno) if error.errno else remote_filesystem.plain(error)}", ""
    )


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: a file that is created has no permissions for others that its folder does not have."""
    others = os.stat(os.path.dirname(path) or ".").st_mode & 0o066
    return os.open(path, flags, mode=0o600 | others)


def append_whole(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Appends to a local file all of `data` or, if it raises OSError, nothing: a retry then repeats no bytes. `sync`: flushes to
    disk.
    """
    with open(path, "ab", buffering=0, opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            write_whole(file, data)
            if sync:
                os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)  # a full disk took a part
            raise


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
