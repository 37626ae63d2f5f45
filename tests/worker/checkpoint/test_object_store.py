"""The same on an object store: a real S3 server over HTTP (moto)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.checkpoint import manifest, retention
from raydist.storage import Storage
from raydist.worker.checkpoint import restore
from tests.s3_proxy import Proxy


def test_save_verify_restore_and_prune(kit: Any, s3: Any) -> None:
    """Saved in the background, every byte verified; a replaced object is detected, the checkpoint before restored, old ones
    deleted."""
    one = kit.OneRank(s3.uri("runs/one"), asynchronous=True, keep=2)
    for step in (1, 2, 3):
        one.save(step)
        one.saver.before_update()
    one.saver.mark_eval(3, 1.5)
    assert one.saver.wait()
    one.saver.close()
    assert one.run.committed() == [2, 3]
    assert one.run.storage.folders("checkpoints") == ["step-00000002", "step-00000003"]
    assert [manifest.verify(one.run, step) for step in (2, 3)] == [[], []]
    assert manifest.best(one.run) == 3

    found = manifest.read(one.run, 3)
    (name,) = found.files
    data = bytearray(one.run.storage.read(manifest.path(3, name)))
    data[1000] ^= 1
    one.run.storage.write(manifest.path(3, name), bytes(data))
    (problem,) = manifest.verify(one.run, 3)
    assert name in problem
    chosen = restore.choose(one.run)
    assert chosen is not None
    assert chosen.step == 2
    assert retention.prune(one.run, 1) == [], "it is being read"
    into = kit.empty()
    restore.load(one.run, chosen, into, {})
    assert kit.same(into, kit.state(2))
    assert retention.prune(one.run, 1) == [2]
    assert one.run.storage.folders("checkpoints") == ["step-00000003"]


def test_an_upload_that_fails_leaves_no_object(s3: Any) -> None:
    """An exception in the middle of a write leaves no object of that name."""
    storage = Storage(s3.uri("half"))
    with pytest.raises(ValueError, match="in the middle"), storage.create("file") as sink:
        sink.write(b"half of it")
        raise ValueError("in the middle")
    assert not storage.exists("file")
    storage.write("file", b"all of it")
    assert storage.read("file") == b"all of it"


class Failing(Proxy):
    """`mode`: "" passes everything on, "busy" answers 503 (Slow Down), "cut" closes the connection of an upload after its first
    kilobyte."""

    BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def __init__(self, server: str) -> None:
        self.mode, self.hit = "", 0
        super().__init__(server)

    def serve(self, client: socket.socket) -> None:
        """Passes both directions on, kilobyte by kilobyte."""
        with socket.create_connection(self.server) as server:
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            passed = 0
            while data := client.recv(1024):
                if self.mode == "busy":
                    self.hit += 1
                    client.sendall(self.BUSY)
                    return
                passed += len(data)
                if self.mode == "cut" and passed > 1024:
                    self.hit += 1
                    return
                server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)


@pytest.fixture
def proxied(s3: Any, mode: str) -> Iterator[tuple[Failing, str]]:
    """A proxy, and the URI of a folder behind it."""
    uri = s3.uri(f"runs/{mode}")
    server = uri.partition("endpoint_override=")[2].partition("&")[0]
    proxy = Failing(server)
    yield proxy, uri.replace(server, proxy.place)
    proxy.close()


@pytest.mark.parametrize("mode", ["busy", "cut"])
def test_a_server_that_is_busy_or_cut_off(kit: Any, proxied: tuple[Failing, str], mode: str) -> None:
    """503 for every request, and uploads that are cut: the save fails, nothing of it is committed, and the next one works."""
    proxy, uri = proxied
    one = kit.OneRank(uri, asynchronous=True)
    one.save(1)
    assert one.saver.wait()
    proxy.mode = mode
    one.save(2)
    one.saver.wait()
    proxy.mode = ""
    assert proxy.hit > 0
    assert one.run.committed() == [1]
    one.save(3)
    assert one.saver.wait()
    one.saver.close()
    assert one.run.committed() == [1, 3]
    assert [manifest.verify(one.run, step) for step in (1, 3)] == [[], []]
