"""Filesystems written in Python behave like pyarrow's own: they raise OSError, and none retries forever."""

from __future__ import annotations

from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raydist import remote_filesystem
from raydist.data import sources
from raydist.errors import DataError, StorageError
from raydist.storage import Storage, refused


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory that fail as over a network: the word in a file's name selects the failure."""

    protocol = "failing"

    def info(self, path: str, **options: Any) -> Any:
        if "unreachable" in path:
            raise RuntimeError("no route\nto host")
        return super().info(path, **options)

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        file = super()._open(path, *arguments, **options)
        if "torn" in path:
            file.read = self.fail
        return file

    @staticmethod
    def fail(*_: Any) -> bytes:
        raise RuntimeError("connection reset")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:// URIs open such a filesystem."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    files = Failing()
    files.pipe({"/ok/a.txt": b"text " * 10, "/torn/a.txt": b"text " * 10})
    handler = pafs.FSSpecHandler(files)
    monkeypatch.setattr(
        remote_filesystem, "_from_uri", lambda uri: (pafs.PyFileSystem(handler), uri.removeprefix("hf:/"))
    )


@pytest.mark.usefixtures("hub")
def test_errors_of_a_filesystem_in_python() -> None:
    """Failures of a listing and of a read, also after `open`: StorageError, or DataError with what to check."""
    assert Storage("hf://ok").read("a.txt") == b"text " * 10
    with pytest.raises(StorageError, match=r"no route"):
        Storage("hf://unreachable").size("a")
    with pytest.raises(StorageError, match="connection reset"):
        Storage("hf://torn").read("a.txt")
    with pytest.raises(DataError, match=r"source hf://unreachable/x: RuntimeError: no route to host\n.*HF_ENDPOINT"):
        sources.find("hf://unreachable/x")


def test_google_s_client_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After seconds, unless the URI sets another time; other filesystems are opened unchanged."""
    opened: list[str] = []
    monkeypatch.setattr(
        remote_filesystem, "_from_uri", lambda uri: opened.append(uri) or (pafs.LocalFileSystem(), "/x"), raising=True
    )
    for uri in ("gs://b/x", "gs://b/x?scheme=http", "gs://b/x?retry_limit_seconds=5", "s3://b/x"):
        remote_filesystem.open_uri(uri)
    assert opened == [
        "gs://b/x?retry_limit_seconds=10", "gs://b/x?scheme=http&retry_limit_seconds=10", "gs://b/x?retry_limit_seconds=5",
        "s3://b/x",
    ]  # fmt: skip


def test_reasons_are_one_line() -> None:
    """And short: some clients add pages of text."""
    assert remote_filesystem.reason(OSError("a\n  b")) == "a b"
    assert len(remote_filesystem.reason(OSError("x" * 999))) == 303
    assert remote_filesystem.reason(ValueError()) == "ValueError"
    told = (
        "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork() - CURL error "
        "[6]=Could not resolve hostname error_info={reason=, domain=, metadata={gcloud-cpp.retry.function=ListObjects}})"
    )
    short = "UNAVAILABLE: PerformWork() - CURL error [6]=Could not resolve hostname"
    assert remote_filesystem.reason(OSError(told)) == short
    assert refused("list", "gs://b/x", OSError(told)).message == f"cannot list gs://b/x: {short}"
