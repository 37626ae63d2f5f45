"""A folder on storage: local disk, NFS, or any URI that pyarrow.fs knows (s3, gs, hdfs, ...).

Runs anywhere. What is written through here is whole or absent: locally a temporary file is flushed to the disk and
renamed; an object store shows an object only once its upload has ended.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from raydist import remote_filesystem
from raydist.errors import StorageError, UserError
from raydist.redact import redact

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs as pafs

_TEMPORARY = ".tmp-"
_LIST_TRIES = 10


class Sink(Protocol):
    """What `Storage.create` gives: bytes go in, in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Takes bytes; gives how many of them."""
        ...


class Storage:
    """A folder, by path or URI. Names are relative to it, with `/` between the parts.

    `uri` is what people may see, and files may hold: secrets are left out. `full_uri` opens it again, in another process too: it
    stays in memory.

    Every method raises StorageError, naming the place and the operating system's reason.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        # Here, not above: it takes a quarter of a second, and `raydist --help` needs no storage.
        import pyarrow as pa
        import pyarrow.fs as pafs

        self._type = pafs.FileType
        text = os.fspath(uri)
        self.local: Path | None = None
        try:
            if "://" in text and not text.startswith("file://"):
                self.fs, self.root = remote_filesystem.open_uri(text)
                self.full_uri = text.rstrip("/")
            else:
                self.local = Path(text.removeprefix("file://")).expanduser().absolute()
                self.fs, self.root, self.full_uri = pafs.LocalFileSystem(), str(self.local), str(self.local)
        except (pa.ArrowInvalid, OSError) as error:
            # Not `from error`: its text has the URI as it was given, and a traceback shows it.
            hint = remote_filesystem.remedy(text, "give a folder, or a URI such as s3://bucket/folder")
            raise UserError(f"storage {text!r}: {remote_filesystem.reason(error)}", hint) from None
        self.uri = redact(self.full_uri)

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.full_uri,)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def at(self, name: str) -> Storage:
        """The folder `name` inside this one."""
        scheme, mark, rest = self.full_uri.partition("?")
        return Storage(f"{scheme}/{name}{mark}{rest}")

    def path(self, name: str = "") -> str:
        """`name` as the filesystem spells it."""
        return str(PurePosixPath(self.root) / name) if name else self.root

    @contextmanager
    def create(self, name: str, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        """A new file, in place and durable once the block ends without an error; nothing is left of it otherwise.

        Folders are made on the way. An existing file of that name is replaced in one step; on an object store it is gone if
        the block raises. `check` is called as late as can be before the file has its name: locally when all of it is on the
        disk, on an object store before the upload. What it raises leaves no file.
        """
        try:
            if self.local is not None:
                with self._create_local(self.local / name, check) as sink:
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
                # pyarrow cannot abandon an upload: closing makes an object of what came so far, and then it goes.
                with suppress(OSError):
                    stream.close()
                    self.fs.delete_file(path)
                raise

    @contextmanager
    def _create_local(self, path: Path, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        part = self._part(path)
        try:
            with open(part, "xb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        # The rename itself must reach the disk too, or a power cut may undo it.
        _sync_folder(path.parent)

    def _part(self, path: Path) -> Path:
        """The name that a file has until it is whole. Makes its folder, durably."""
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in made:
            _sync_folder(folder.parent)
        return path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")

    def write(self, name: str, data: bytes, check: Callable[[], object] | None = None) -> None:
        """One small file, atomically. `check`: see `create`."""
        with self.create(name, check) as sink:
            _put(sink, data)

    def write_new(self, name: str, data: bytes) -> bool:
        """One small file, unless there is one of that name; whether it was written.

        On a file system the look and the write are one (a hard link, on NFS too): of many writers exactly one gets True. An
        object store has no such thing in pyarrow: two writers that look at the same moment both get True.
        """
        if self.local is None:
            if self.size(name) is not None:
                return False
            self.write(name, data)
            return True
        path = self.local / name
        try:
            part = self._part(path)
            try:
                with open(part, "xb", buffering=0) as file:
                    _put(file, data)
                    os.fsync(file.fileno())
                os.link(part, path)
            finally:
                part.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed("write", name, error) from error
        return True

    def read(self, name: str) -> bytes:
        """A whole file. A missing one raises FileNotFoundError, which is for callers that expect it."""
        try:
            with self.fs.open_input_stream(self.path(name), compression=None) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", name, error) from error

    def open(self, name: str) -> pa.NativeFile:
        """A file for reading at any position. A missing one raises FileNotFoundError."""
        try:
            return self.fs.open_input_file(self.path(name))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("open", name, error) from error

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        info = self._info(name)
        return int(info.size) if info.type == self._type.File else None

    def exists(self, name: str = "") -> bool:
        """Whether there is a file or a folder of that name."""
        return bool(self._info(name).type != self._type.NotFound)

    def _info(self, name: str) -> pafs.FileInfo:
        try:
            return self.fs.get_file_info(self.path(name))
        except OSError as error:
            raise self._failed("read", name, error) from error

    def files(self, folder: str = "", *, recursive: bool = False, unfinished: bool = False) -> dict[str, int]:
        """Files under a folder -> bytes; names relative to this Storage. Unfinished ones are left out, unless asked for."""
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
                # pyarrow says this of a folder that came, or went, while it looked; never of one that is not there.
                if not isinstance(error, FileNotFoundError) or tries == _LIST_TRIES - 1:
                    raise self._failed("list", folder, error) from error
        for info in sorted(infos, key=lambda i: i.path):
            if unfinished or not info.base_name.startswith(_TEMPORARY):
                yield str(PurePosixPath(info.path).relative_to(self.root)), info

    def delete(self, name: str) -> None:
        """Removes a file or a whole folder; one that is not there is fine."""
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
        """Removes a folder that holds nothing; any other stays."""
        if self.local is None:
            if not self.files(folder, recursive=True):
                self.delete(folder)
            return
        try:
            os.rmdir(self.local / folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise self._failed("delete", folder, error) from error

    def _failed(self, verb: str, name: str, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        reason = os.strerror(error.errno) if error.errno else str(error)
        return StorageError(f"cannot {verb} {self.uri}/{name}: {reason}", "")


def _put(sink: Sink, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[sink.write(rest) or len(rest) :]


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
