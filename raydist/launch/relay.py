"""The calls that the agents of one node make to the coordinator: those made at about the same time are one message of Ray.

Runs in: each Ray Train worker, in threads. Imports neither ray nor torch: the agent passes the calls of Ray.

    agents of a node --Link--> Relay, in the first of them --many([call, call, ...])--> Coordinator

With many nodes that message goes over a connection of the relay's own instead (control_connection.py).

A call of Ray takes the coordinator about 0.3 ms, whatever it does. With a beat a second from every agent one process could
therefore serve about 2,000 agents; with eight agents on a node it serves eight times as many. An agent whose relay does not answer,
or has exited, calls the coordinator itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from raydist.launch.zygote import connect, peer_uid

_WINDOW_S = 0.02
_BEAT_WINDOW_S = 0.5
"""How long the first of some calls waits for the others. The agents of a node beat at the same times (agent.py)."""
_ALIVE_S = 0.5
_SILENT_S = 2.5
"""The relay tells every agent that it lives, so often; after so long without it, calls go elsewhere. Short enough that a beat that
waited in a stopped relay still comes within 4 s, the shortest time that the coordinator allows."""
_LONGEST = 64 << 20
Many = Callable[[list[list[Any]]], Awaitable[Any]]


@dataclass(slots=True)
class _Call:
    method: str
    given: Sequence[Any]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MergedCalls:
    """Calls of the coordinator, in one event loop. `many`: calls `Coordinator.many`."""

    def __init__(self, many: Many) -> None:
        self._many = many
        self._waiting: dict[float, list[_Call]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def call(self, method: str, *given: Any) -> Any:
        """The coordinator's answer. Raises what `many` raises."""
        call = _Call(method, given)
        self._add(call)
        return await call.answer

    def _add(self, call: _Call) -> None:
        window = _BEAT_WINDOW_S if call.method == "beat" else _WINDOW_S
        # A call of `next` may wait for long, and no other call may wait for it.
        key = -1.0 if call.method == "next" else window
        waiting = self._waiting.setdefault(key, [])
        waiting.append(call)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_later(window, self._send, key)

    def _send(self, key: float) -> None:
        task = asyncio.get_running_loop().create_task(self._sent(self._waiting.pop(key)))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sent(self, calls: list[_Call]) -> None:
        calls = [call for call in calls if not call.answer.done()]
        if not calls:
            return
        try:
            answers = await self._many([[call.method, *call.given] for call in calls])
        except Exception as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for number, call in enumerate(calls):
            if number not in answers:
                self._add(call)
            elif not call.answer.done():
                call.answer.set_result(answers[number])


class Relay:
    """Serves the agents of a node until this process exits. Raises OSError if the node has a relay at that address."""

    def __init__(self, address: str, many: Many) -> None:
        self._many = many
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address)
            self._listener.listen(256)
        except OSError:
            self._listener.close()
            raise
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="raydist-relay", daemon=True).start()

    async def _serve(self) -> None:
        self._calls = MergedCalls(self._many)
        server = await asyncio.start_unix_server(self._connected, sock=self._listener, limit=_LONGEST)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending = {asyncio.create_task(self._alive(writer))}
        try:
            if peer_uid(writer.get_extra_info("socket")) != os.getuid():
                return
            while line := await reader.readline():
                number, method, given = json.loads(line)
                task = asyncio.create_task(self._answer(writer, number, method, given))
                pending.add(task)
                task.add_done_callback(pending.discard)
        except (OSError, ValueError):  # the agent has exited
            pass
        finally:
            for task in pending:
                task.cancel()
            writer.close()

    async def _alive(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(_line(-1, "alive", None))
            await asyncio.sleep(_ALIVE_S)

    async def _answer(self, writer: asyncio.StreamWriter, number: int, method: str, given: Sequence[Any]) -> None:
        try:
            line = _line(number, "answer", await self._calls.call(method, *given))
        except Exception as error:
            line = _line(number, "error", f"{type(error).__name__}: {error}")
        writer.write(line)
        with contextlib.suppress(OSError):
            await writer.drain()


class RelayLost(Exception):
    """The relay has exited, is stopped, or could not reach the coordinator."""


class _Connection:
    """To the node's relay. Raises OSError if there is none, or it is a process of another user."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._closed = False
        self._heard = 0.0
        try:
            connect(self._socket, address)
        except OSError:
            self._socket.close()
            raise
        threading.Thread(target=self._receive, name="raydist-link", daemon=True).start()

    def call(self, method: str, given: Sequence[Any], timeout_s: float | None) -> Any:
        """The coordinator's answer. Raises RelayLost, and TimeoutError."""
        number, answer, begun = next(self._numbers), Future[Any](), time.monotonic()
        self._pending[number] = answer
        try:
            self._send(_line(number, method, given))
            while not wait([answer], _ALIVE_S).done:
                now = time.monotonic()
                if now - max(self._heard, begun) > _SILENT_S:
                    raise RelayLost
                if timeout_s is not None and now - begun > timeout_s:
                    raise TimeoutError(f"{method}: no answer in {timeout_s:.0f} s")
            return answer.result()
        finally:
            self._pending.pop(number, None)

    def _send(self, line: bytes) -> None:
        if self._closed:
            raise RelayLost
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as error:
            raise RelayLost from error

    def close(self) -> None:
        """All pending calls raise RelayLost. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        with self._socket, contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._heard = time.monotonic()
                number, kind, value = json.loads(line)
                answer = self._pending.get(number)
                if answer is None:
                    continue
                if kind == "answer":
                    answer.set_result(value)
                elif kind == "error":
                    answer.set_exception(RelayLost(value))
        self._closed = True
        for answer in list(self._pending.values()):
            if not answer.done():
                answer.set_exception(RelayLost())


class Link:
    """An agent's calls of the coordinator, from any thread. `key`: the same for the agents of one node and group; None: it is the
    only one, and needs no relay. `direct(method, *arguments, timeout_s)`: calls the coordinator without the relay. `many`: see
    `MergedCalls`.
    """

    def __init__(self, direct: Callable[..., Any], many: Many, key: str | None) -> None:
        self._direct = direct
        self._address = ""
        self._relay: Relay | None = None
        self._connection: _Connection | None = None
        if key is not None:
            self._address = self.address_of(key)
            with contextlib.suppress(OSError):  # another agent has it
                self._relay = Relay(self._address, many)
        self.connect()

    @staticmethod
    def address_of(key: str) -> str:
        """The socket of the node's relay: an abstract one, which leaves no file behind."""
        return f"\0raydist-{os.getuid()}-relay-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def connect(self) -> None:
        """Uses the node's relay, if there is one, from now on."""
        if self._address and self._connection is None:
            with contextlib.suppress(OSError):
                self._connection = _Connection(self._address)

    def drop(self) -> None:
        """Pending and later calls go to the coordinator directly."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def call(self, method: str, *given: Any, timeout_s: float | None = None) -> Any:
        """The answer of the coordinator's method. Raises TimeoutError, and what `direct` raises."""
        connection = self._connection
        if connection is not None:
            try:
                return connection.call(method, given, timeout_s)
            except RelayLost:
                if self._connection is connection:
                    self.drop()
        return self._direct(method, *given, timeout_s=timeout_s)


def _line(number: int, kind: str, value: Any) -> bytes:
    return json.dumps([number, kind, value]).encode() + b"\n"
