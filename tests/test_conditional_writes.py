"""A real S3 server over HTTP (moto) creates an object once, whoever checked before; a server without conditions replaces it."""

from __future__ import annotations

import socket
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.conditional_writes import creator
from raydist.errors import StorageError, UsageError
from raydist.run.directory import RunDir, begin_attempt
from raydist.storage import Storage
from tests.s3_proxy import Proxy


class Changing(Proxy):
    """A request a connection. `change` gets a request and returns what the server gets; `answer` gets a request and its answer, and
    returns what the client gets, where b"" closes the connection."""

    def __init__(self, server: str) -> None:
        self.change, self.answer = (lambda request: request), (lambda request, answer: answer)
        super().__init__(server)

    def serve(self, client: socket.socket) -> None:
        """Passes one request and its answer on."""
        request = whole(client)
        with socket.create_connection(self.server) as server:
            server.sendall(self.change(request))
            answer = b"".join(iter(lambda: server.recv(65536), b""))
        client.sendall(self.answer(request, answer))


def whole(client: socket.socket) -> bytes:
    """One request, with a header that closes the connection after its answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536) or sys.exit()
    head, _, body = data.partition(b"\r\n\r\n")
    if b"100-continue" in head.lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
    length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += client.recv(65536) or sys.exit()
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body


@pytest.fixture
def proxied(s3: Any) -> Iterator[tuple[Changing, Storage]]:
    """A proxy, and a folder behind it."""
    uri = s3.uri(f"once/{uuid.uuid4().hex}")
    server = uri.partition("endpoint_override=")[2].partition("&")[0]
    proxy = Changing(server)
    yield proxy, Storage(uri.replace(server, proxy.place))
    proxy.close()


def test_of_two_that_saw_nothing_one_writes(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked before either wrote: the server refuses the second, and the first one's file stays. So two drivers cannot
    begin the same attempt."""
    storage = Storage(s3.uri("once/two"))
    monkeypatch.setattr(Storage, "size", lambda storage, name: None)
    assert storage.write_new("note", b"first")
    assert storage.creates_once()
    assert not storage.write_new("note", b"second")
    assert storage.read("note") == b"first"

    run = RunDir(s3.uri("once/run"))
    seen = run.lineage()
    begin_attempt(run, 1)
    monkeypatch.setattr(RunDir, "lineage", lambda run: seen)
    with pytest.raises(UsageError, match="attempt 1 has already started"):
        begin_attempt(run, 1)


def test_a_lost_answer_is_no_refusal(proxied: tuple[Changing, Storage]) -> None:
    """The request is repeated, and refused because of the first one: the object has this writer's mark, so it has written it."""
    proxy, storage = proxied
    lost: list[bytes] = []

    def lose(request: bytes, answer: bytes) -> bytes:
        if request.startswith(b"PUT") and not lost:
            lost.append(request)
            return b""
        return answer

    proxy.answer = lose
    assert storage.write_new("note", b"mine")
    assert len(lost) == 1
    assert storage.read("note") == b"mine"
    assert not storage.write_new("note", b"other")


def test_writers_that_collide_try_again(proxied: tuple[Changing, Storage]) -> None:
    """409 says that another write of that name is under way: the next try is refused or succeeds."""
    proxy, storage = proxied
    answers = [b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n"]
    proxy.answer = lambda request, answer: answers.pop() if request.startswith(b"PUT") and answers else answer
    proxy.change = lambda request: request.replace(b"PUT", b"GET") if answers else request
    assert storage.write_new("note", b"mine")
    assert answers == []


@pytest.mark.parametrize("implemented", [True, False])
def test_a_server_without_conditions(proxied: tuple[Changing, Storage], implemented: bool) -> None:
    """It ignores the condition, or answers that it has none. The first write notices: the lease then waits and reads again, as on
    every store that replaces objects."""
    proxy, storage = proxied
    if implemented:
        proxy.change = lambda request: request.replace(b"If-None-Match", b"X-None-Match_")
    else:
        proxy.change = lambda request: request.replace(b"PUT", b"GET") if b"If-None-Match" in request else request
        refusal = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\n\r\n"
        proxy.answer = lambda request, answer: refusal if b"If-None-Match" in request else answer
    assert storage.write_new("note", b"first")
    assert not storage.creates_once()
    assert not storage.write_new("note", b"second"), "it looks before it writes"
    assert storage.read("note") == b"first"
    assert storage.write_new("next", b"second")
    assert storage.read("next") == b"second"


def test_an_error_of_the_server_is_one_of_storage(s3: Any) -> None:
    """A bucket that does not exist."""
    storage = Storage(s3.uri("x").replace("//key:secret@bucket/", "//key:secret@nowhere/"))
    with pytest.raises(StorageError, match=r"cannot write s3://.*nowhere/x.*note.*NoSuchBucket"):
        storage.write_new("note", b"")


def test_where_there_are_none(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of the URI that is not known here, another filesystem, and no botocore."""
    fs = Storage(s3.uri("x")).fs
    assert creator(s3.uri("x"), fs) is not None
    assert creator(f"{s3.uri('x')}&tls_ca_file_path=/x", fs) is None
    assert creator("gs://b/x", fs) is None
    monkeypatch.setitem(sys.modules, "botocore", None)
    assert creator(s3.uri("x"), fs) is None
