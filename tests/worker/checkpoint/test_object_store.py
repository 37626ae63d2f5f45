"""The same on an object store: a real S3 server over HTTP (moto)."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

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
    """`mode`: "" passes everything on, "cut" closes the connection of an upload after its first kilobyte. "busy" answers 503 (Slow
    Down) to every request, "throttled" to some, which the client sends again; "expired": the credentials are no longer valid."""

    ANSWERS: ClassVar = {"busy": ("503 Slow Down", "SlowDown"), "expired": ("403 Forbidden", "ExpiredToken")}

    def __init__(self, server: str) -> None:
        self.mode, self.hit, self.draws = "", 0, random.Random(1)
        super().__init__(server)

    def serve(self, client: socket.socket) -> None:
        """Passes both directions on, kilobyte by kilobyte."""
        with socket.create_connection(self.server) as server:
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            passed = 0
            while data := client.recv(1024):
                starts = data.startswith((b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE "))
                mode = "busy" if self.mode == "throttled" and starts and self.draws.random() < 0.3 else self.mode
                if mode in self.ANSWERS:
                    self.hit += 1
                    status, code = self.ANSWERS[mode]
                    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the test</Message></Error>"
                    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
                    client.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
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


@pytest.mark.parametrize("mode", ["busy", "cut", "expired"])
def test_a_server_that_is_busy_or_cut_off(kit: Any, proxied: tuple[Failing, str], mode: str) -> None:
    """503 for every request, uploads that are cut, credentials that have expired: the save fails, nothing of it is committed, and
    the next one works."""
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
    (failed,) = (event for event in one.events if event.kind == "checkpoint_failed")
    assert mode != "expired" or "ExpiredToken" in failed.data["cause"], failed.data["cause"]


@pytest.mark.parametrize("mode", ["throttled"])
def test_a_server_that_throttles_costs_time_only(kit: Any, proxied: tuple[Failing, str], mode: str) -> None:
    """503 for about a third of all requests: the save is committed, and can be read."""
    proxy, uri = proxied
    one = kit.OneRank(uri, asynchronous=True)
    proxy.mode = mode
    one.save(1)
    assert one.saver.wait()
    one.saver.close()
    assert proxy.hit > 0
    assert manifest.verify(one.run, 1) == []
    chosen = restore.choose(one.run)
    assert chosen is not None
    assert chosen.step == 1
