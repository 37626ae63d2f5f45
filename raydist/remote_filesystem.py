"""Opens filesystems by URI with pyarrow.fs; all errors of these are OSError, and retries are limited.

Runs anywhere. Imports pyarrow inside functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from raydist.errors import UserError

if TYPE_CHECKING:
    import pyarrow.fs as pafs

_GCS_LIMIT = "retry_limit_seconds"
_GCS_LIMIT_S = 10
"""Google's client retries for 15 minutes by default, even without a network or for a bucket that does not exist. It waits twice as
long each time, and once more before it looks at the limit: 20 s. A run on storage that fails for longer goes on, as with S3.
"""
_GCS_STATUS, _GCS_RETRIED = "google::cloud::Status(", "Retry policy exhausted, with a last message of "
_SHOWN = 300
FORMS = "give a folder, or a URI such as s3://bucket/folder"
_REMEDIES = {
    "hf": "check the name (hf://datasets/OWNER/NAME/FILES) and the network; set HF_TOKEN for private or gated datasets, "
    "HF_ENDPOINT for a mirror",
    "http": "download it first, and give the file: raydist reads only filesystems, such as a folder, s3://, gs:// or "
    "hf://datasets/OWNER/NAME",
    "s3": "check the bucket's name, the network and the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role",
    "gs": "check the bucket's name, the network and the credentials: GOOGLE_APPLICATION_CREDENTIALS; gs://anonymous@BUCKET "
    "needs no credentials",
}
_REMEDIES |= {"https": _REMEDIES["http"], "gcs": _REMEDIES["gs"]}


def check_name(uri: str | os.PathLike[str]) -> str:
    """A path or URI as text. Raises UserError for one that no storage has."""
    if not isinstance(uri, str | os.PathLike):  # a script may give anything
        raise UserError(f"storage {uri!r:.60}: is not the name of a folder", FORMS)
    text = os.fspath(uri)
    if not text:  # as a path it would be the working directory
        raise UserError("the name of a storage is empty", FORMS)
    if text.startswith("file://") and not text.startswith("file:///"):
        raise UserError(f"storage {text!r}: a file:// URI has a host or a relative path", "write file:///folder")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"storage {text!r}: its name is not UTF-8", FORMS) from None
    return text


def open_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    """The filesystem of a URI, and the path in it. Raises OSError, or pyarrow's own errors, if it cannot be opened."""
    import pyarrow.fs as pafs

    if uri.startswith(("gs://", "gcs://")) and _GCS_LIMIT not in uri:
        uri += f"{'&' if '?' in uri else '?'}{_GCS_LIMIT}={_GCS_LIMIT_S}"
    try:
        filesystem, root = _from_uri(uri)
    except (ValueError, ImportError) as error:  # includes ArrowInvalid
        raise OSError(str(error)) from error
    if isinstance(filesystem, pafs.PyFileSystem):
        filesystem = pafs.PyFileSystem(_handler(filesystem.handler))
    return filesystem, root


def _from_uri(uri: str) -> tuple[pafs.FileSystem, str]:
    import pyarrow.fs as pafs

    filesystem, root = pafs.FileSystem.from_uri(uri)
    return filesystem, str(root)


def remedy(uri: str, otherwise: str) -> str:
    """What to check if that URI cannot be opened or read; `otherwise` if there is no hint for its scheme."""
    return _REMEDIES.get(uri.partition("://")[0], otherwise) if "://" in uri else otherwise


def plain(error: BaseException) -> str:
    """An error's text; of Google's client without the facts for programs, which repeat it."""
    text = str(error)
    if text.startswith(_GCS_STATUS):
        text = text.removeprefix(_GCS_STATUS).partition(" error_info={")[0].replace(_GCS_RETRIED, "")
    return text


def reason(error: BaseException) -> str:
    """An error's text in one line, shortened if it is long: some clients add pages."""
    text = " ".join(plain(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _handler(inner: Any) -> Any:
    """A handler like `inner`, of a filesystem in Python, that raises its HTTP client's and other errors as OSError."""
    import pyarrow as pa
    import pyarrow.fs as pafs

    class Handler(pafs.FSSpecHandler):  # type: ignore[misc]
        def open_input_stream(self, path: str) -> Any:
            return self.open_input_file(path)

        def open_input_file(self, path: str) -> Any:
            file = _as_os_error(self.fs.open)(path, mode="rb")
            return pa.PythonFile(_File(file), mode="r")

    for name in (
        "get_file_info",
        "get_file_info_selector",
        "create_dir",
        "delete_dir",
        "delete_file",
        "open_output_stream",
    ):
        setattr(Handler, name, _as_os_error(getattr(pafs.FSSpecHandler, name)))
    return Handler(inner.fs)


class _File:
    """An open file whose methods raise only OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return _as_os_error(found) if callable(found) else found


def _as_os_error(function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return call
