"""One TCP connection from each node's relay to the coordinator, for runs with so many nodes that calls of Ray would take too long.

Runs in: the relay of each node (ControlClient) and the coordinator (ControlServer), each in its event loop. Imports neither ray nor
torch.

    relay --Ray: many(calls, name of the last connection)--> coordinator --answers, and where to connect--> relay
    relay <---- a random number ---------------------------- coordinator
    relay ----- the connection's name, signed -------------> coordinator --signed--> relay
    relay ----- number, calls -----------------------------> coordinator --number, answers--> relay

The coordinator needs about 0.6 ms of processor time for a call of Ray, and half of that for the same call over a connection
(docs/adr/0008-agents.md). Ray's calls are always possible, and nothing depends on a connection:

- Nothing is lost: when a connection is cut, refused or does not answer, the calls that wait for an answer are made through Ray.
- Nothing comes late: they say which connection has failed, and the coordinator reads no more from that one before it looks at them.
- A call may be made twice, as when a relay is lost (relay.py). The coordinator's methods for agents allow that.

Both sides sign the random numbers of both with a secret that the coordinator sends through Ray: a process that has not got it is
refused, and so is one that has taken the coordinator's port. What follows is neither signed nor encrypted, like Ray's own messages.
Frames are MessagePack after their length in 4 bytes. Before a relay has signed, the coordinator reads one frame of `_HELLO` bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import random
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgpack

from raydist.launch.rendezvous import new_secret

Calls = Sequence[Sequence[Any]]
Offer = tuple[str, int, str]
"""Where the coordinator listens, and the secret."""
OFFER = -1
"""The place of the offer among the answers to a call of Ray."""
_HELLO, _LONGEST = 1024, 64 << 20
"""The longest frame before and after the relay has signed."""
_HELLO_S = 5.0
_GREETING = 2048
"""Connections that may be there at the same time and have not signed yet."""
_ANSWER_S = 2.5
"""As long as an agent waits for a sign of its relay (relay.py): a beat that waited so long still comes in time. The answer to
`next` may take any time; the other calls find out that its connection does not work any more."""
_AFTER_S, _SPREAD_S, _AGAIN_S = 5.0, 5.0, 20.0
"""Relays connect so long after the coordinator's offer, when their attempt has started, and not all at once, but within the second
time; between two tries they wait once or twice the third."""


class ConnectionLost(Exception):
    """The connection is cut or does not answer, or the coordinator could not answer this call over it."""


def _frame(value: Any) -> bytes:
    """Raises TypeError, ValueError and OverflowError."""
    data = msgpack.packb(value, unicode_errors="surrogatepass")
    return len(data).to_bytes(4, "big") + data


async def _read(reader: asyncio.StreamReader, longest: int = _LONGEST) -> Any:
    """Raises EOFError, OSError and ValueError."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > longest:
        raise ValueError(f"a frame of {size} bytes")
    data = await reader.readexactly(size)
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


def _sign(secret: str, side: str, asked: str, name: str) -> str:
    return hmac.digest(secret.encode(), f"{side} {asked} {name}".encode(), "sha256").hex()


def _is(signed: Any, secret: str, side: str, asked: str, name: str) -> bool:
    return isinstance(signed, str) and hmac.compare_digest(signed.encode(), _sign(secret, side, asked, name).encode())


class ControlServer:
    """The coordinator's side. `host`: the address of this host on which it listens. `many(calls)`: answers by their place."""

    def __init__(self, host: str, many: Callable[[Calls], Awaitable[dict[int, Any]]]) -> None:
        self._host, self._many = host, many
        self._secret = new_secret()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._greeting = 0
        self._open: dict[str, asyncio.StreamWriter] = {}

    async def through_ray(self, calls: Calls, name: str, offer: bool) -> dict[int, Any]:
        """The answers to calls that come through Ray, as the connection of that name has failed; "": there was none. `offer`: they
        also say where to connect.
        """
        self.cut(name)
        answers = await self._many(calls)
        if offer and (found := await self.offer()) is not None:
            answers[OFFER] = found
        return answers

    async def offer(self) -> Offer | None:
        """Listens from now on. None: it cannot."""
        async with self._starting:
            if self._server is None and self._host:
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
                try:
                    self._server = await asyncio.start_server(self._connected, self._host, 0, backlog=4096)
                except OSError:
                    self._host = ""
        if self._server is None:
            return None
        return self._host, self._server.sockets[0].getsockname()[1], self._secret

    def cut(self, name: str) -> None:
        """Reads no more of that connection."""
        if (writer := self._open.pop(name, None)) is not None:
            writer.transport.abort()

    def close(self) -> None:
        """Cuts all connections, and listens no more."""
        if self._server is not None:
            self._server.close()
        for name in list(self._open):
            self.cut(name)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, running = "", set[asyncio.Task[None]]()
        try:
            name = await self._greeted(reader, writer)
            while name in self._open:
                number, calls = await _read(reader)
                if name in self._open:
                    task = asyncio.create_task(self._answer(writer, number, calls))
                    running.add(task)
                    task.add_done_callback(running.discard)
        except (OSError, EOFError, ValueError, TypeError, RecursionError):  # the relay has exited, or it is none
            pass
        finally:
            for task in running:
                task.cancel()
            self._open.pop(name, None)
            writer.transport.abort()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The connection's name. Raises ValueError for one that has not signed, and TimeoutError."""
        if self._greeting >= _GREETING:
            raise ValueError("too many connections that have not signed")
        self._greeting += 1
        try:
            async with asyncio.timeout(_HELLO_S):
                asked = new_secret()
                writer.write(_frame(asked))
                name, signed = await _read(reader, _HELLO)
        finally:
            self._greeting -= 1
        if not _is(signed, self._secret, "relay", asked, name) or name in self._open:
            raise ValueError("not signed with this run's secret")
        self._open[name] = writer
        writer.write(_frame(_sign(self._secret, "coordinator", asked, name)))
        return str(name)

    async def _answer(self, writer: asyncio.StreamWriter, number: int, calls: Calls) -> None:
        try:
            frame = _frame([number, await self._many(calls)])
        except Exception:  # the relay makes the call through Ray, which tells it the error
            frame = b""
        writer.write(frame if 0 < len(frame) <= _LONGEST else _frame([number, None]))
        with contextlib.suppress(OSError):
            await writer.drain()


class _Connection:
    """An open connection of a relay. `name`: by which the coordinator knows it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[int, Any]]] = {}
        self._closed = False
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def open(cls, host: str, port: int, secret: str) -> _Connection:
        """Raises OSError, EOFError, ValueError, and TimeoutError."""
        async with asyncio.timeout(_HELLO_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                asked, name = await _read(reader, _HELLO), new_secret()
                writer.write(_frame([name, _sign(secret, "relay", asked, name)]))
                if not _is(await _read(reader, _HELLO), secret, "coordinator", asked, name):
                    raise ValueError("another process has the coordinator's port")
            except BaseException:
                writer.transport.abort()
                raise
        return cls(reader, writer, name)

    async def call(self, calls: Calls) -> dict[int, Any]:
        """The coordinator's answers. Raises ConnectionLost."""
        if self._closed:
            raise ConnectionLost
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        try:
            frame = _frame([number, calls])
        except (TypeError, ValueError, OverflowError) as error:
            raise ConnectionLost from error
        if len(frame) > _LONGEST:
            raise ConnectionLost
        self._pending[number] = answer
        try:
            self._writer.write(frame)
            async with asyncio.timeout(None if calls[0][0] == "next" else _ANSWER_S):
                return await answer
        except TimeoutError as error:
            self.close()
            raise ConnectionLost from error
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """All calls that wait for an answer raise ConnectionLost."""
        self._closed = True
        self._task.cancel()
        self._writer.transport.abort()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost())

    async def _receive(self) -> None:
        try:
            while True:
                number, answers = await _read(self._reader)
                answer = self._pending.get(number)
                if answer is None or answer.done():
                    continue
                if answers is None:
                    answer.set_exception(ConnectionLost())
                else:
                    answer.set_result(dict(answers))
        except (OSError, EOFError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        finally:
            self.close()


class ControlClient:
    """The relay's side. `ray_many(calls, name)`: calls `Coordinator.many` through Ray."""

    def __init__(self, ray_many: Callable[[Calls, str], Awaitable[Any]]) -> None:
        self._ray_many = ray_many
        self._connection: _Connection | None = None
        self._lost = ""
        """The name of the last connection."""
        self._connecting: asyncio.Task[None] | None = None
        self._not_before = 0.0

    async def many(self, calls: Calls) -> dict[int, Any]:
        """The answers to these calls by their place, over the connection if there is one. Raises what `ray_many` raises."""
        lost = self._lost
        if (connection := self._connection) is not None:
            try:
                return await connection.call(calls)
            except ConnectionLost:
                lost = connection.name
                self._drop(connection)
        answers = dict(await self._ray_many(calls, lost))
        offer = answers.pop(OFFER, None)
        # Never two connections: what waits on one that is silent, and is not the present one, would wait for ever.
        connecting = self._connecting is not None and not self._connecting.done()
        if offer is not None and self._connection is None and not connecting and time.monotonic() >= self._not_before:
            self._connecting = asyncio.create_task(self._connect(*offer))
        return answers

    def _drop(self, connection: _Connection) -> None:
        connection.close()
        if self._connection is connection:
            self._connection, self._lost = None, connection.name

    async def _connect(self, host: str, port: int, secret: str) -> None:
        await asyncio.sleep(_AFTER_S + random.random() * _SPREAD_S)
        self._not_before = time.monotonic() + _AGAIN_S * (1.0 + random.random())
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, RecursionError):
            self._connection = await _Connection.open(host, port, secret)
