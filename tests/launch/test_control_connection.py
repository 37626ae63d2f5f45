"""Control connections: the same calls as through Ray, whatever happens to the connection; and nobody else gets in."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from raydist.cluster.run import coordinator
from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.root_cause import rank_error, root_cause
from raydist.launch import control_connection, relay
from raydist.launch.control_connection import OFFER, ControlClient, ControlServer
from raydist.launch.relay import MergedCalls

HOST = "127.0.0.1"
DIED = {"died": {"pid": 7, "node_ip": HOST, "how": "SIGKILL", "starved": "", "ordered": False}, "silent_s": 0.0}
FRAMES = {"relay": 9, "coordinator": 9}
"""Frames of the side in the run of `trained`, of which each is cut; there are more, of beats."""


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 240))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes are many, and nothing waits for long."""
    monkeypatch.setattr(coordinator, "BEATS", 1)
    monkeypatch.setattr(control_connection, "_AFTER_S", 0.0)
    monkeypatch.setattr(control_connection, "_SPREAD_S", 0.0)
    monkeypatch.setattr(control_connection, "_AGAIN_S", 0.0)
    monkeypatch.setattr(relay, "_WINDOW_S", 0.0)
    monkeypatch.setattr(relay, "_BEAT_WINDOW_S", 0.001)


class Proxy:
    """Forwards frames between a relay and the coordinator. After `frame` frames of `side`, and `part` of the next one, it forwards
    nothing any more, and closes the connections if `closes`. Later connections it refuses.
    """

    def __init__(self, side: str, frame: int, part: float, closes: bool) -> None:
        self.side, self.frame, self.part, self.closes = side, frame, part, closes
        self.port = 0
        self.seen: Counter[str] = Counter()
        self.is_cut = asyncio.Event()
        self.held = b""
        """What the frame that was cut, and what came after it, still had: not forwarded."""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        self.mine = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.is_cut.is_set():
            writer.transport.abort()
            return
        there, to = await asyncio.open_connection(HOST, self.port)
        self._writers.append(to)
        self.to_coordinator = to
        self._tasks.append(asyncio.create_task(self._forward("relay", reader, to)))
        self._tasks.append(asyncio.create_task(self._forward("coordinator", there, writer)))

    async def _forward(self, side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = await reader.readexactly(4)
                frame = size + await reader.readexactly(int.from_bytes(size, "big"))
                if side == self.side and self.seen[side] == self.frame and not self.is_cut.is_set():
                    at = round(len(frame) * self.part)
                    writer.write(frame[:at])
                    await writer.drain()
                    self.is_cut.set()
                    frame = frame[at:]
                    if self.closes:
                        for each in self._writers:
                            each.close()
                self.seen[side] += 1
                if not self.is_cut.is_set():
                    writer.write(frame)
                elif side == "relay":
                    self.held += frame
        except (EOFError, OSError):
            if self.closes or not self.is_cut.is_set():
                writer.close()


class Node:
    """The relay of a node with two agents, and these: rank 1 dies in attempt 1, ranks end well in attempt 2, or when killed."""

    def __init__(self, made: Coordinator, number: int, proxy: Proxy | None) -> None:
        self.made, self.number, self.proxy = made, number, proxy
        self.trained: Counter[tuple[int, int]] = Counter()
        self.by_ray = 0
        self.left = set[int]()
        self.client = ControlClient(self.ray)
        self.calls = MergedCalls(self.client.many)
        self.tasks = [asyncio.create_task(self.agent(number * 2 + n)) for n in range(2)]
        self.tasks += [asyncio.create_task(self.beat(number * 2 + n)) for n in range(2)]

    async def ray(self, calls: Any, lost: str) -> dict[int, Any]:
        """In place of a call of Ray."""
        self.by_ray += 1
        answers = await self.made.many(json.loads(json.dumps(calls)), lost)
        if self.proxy is not None and OFFER in answers:
            host, self.proxy.port, secret = answers[OFFER]
            answers[OFFER] = host, self.proxy.mine, secret
        return answers

    async def beat(self, agent: int) -> None:
        while agent not in self.left:
            await self.calls.call("beat", 1, agent)
            await asyncio.sleep(0.01)

    async def agent(self, agent: int) -> None:
        seen, rank, attempt, alive = 0, -1, 0, False
        offer = {"node": f"node{self.number}", "local_rank": agent % 2, "host": "h", "port": 1, "placement_group": "p"}
        while True:
            order = await self.calls.call("next", 1, agent, seen, {**offer, "port": seen})
            seen = order["number"]
            if order["do"] == "leave":
                self.left.add(agent)
                return
            if order["do"] == "train":
                rank, attempt, alive = int(order["env"]["RANK"]), order["attempt"], True
                self.trained[attempt, rank] += 1
                if attempt == 2 or rank == 1:
                    alive = False
                    report = {"outcome": {"status": "finished"}, "silent_s": 0.0} if attempt == 2 else DIED
                    await self.calls.call("ended", 1, rank, attempt, {**report, "at": 1e9})
            elif order["do"] == "kill" and alive:
                alive = False
                await self.calls.call("ended", 1, rank, attempt, {**DIED, "at": 2e9})


async def trained(proxy: Proxy | None) -> tuple[int, int]:
    """Two attempts of four ranks on two nodes; the connection of the one that has rank 1 goes through the proxy. How many messages
    each node has sent through Ray."""
    made = Coordinator(HOST)
    if proxy is not None:
        await proxy.start()
    await made.open(1, 4)
    nodes = [Node(made, number, proxy if number == 0 else None) for number in range(2)]
    await made.gathered()
    while proxy is not None and not proxy.seen["relay"] and not proxy.is_cut.is_set():
        await asyncio.sleep(0.001)  # the relay has been told where to connect
    for attempt in (1, 2):
        await made.begin(attempt, {"a": "b" * 50}, 4)
        reports = await made.result(attempt)
        errors = [error for rank, report in reports.items() if (error := rank_error(rank, report)) is not None]
        if attempt == 1:
            cause = root_cause(errors)
            assert (cause.rank, cause.kind, reports[1]["ranks"]) == (1, "worker_died", 4)
        else:
            assert not errors
            assert sorted(reports) == [0, 1, 2, 3]
    if proxy is not None and proxy.held and not proxy.closes:  # what was held on the way comes after all
        while {agent.offer["port"] for agent in made._agents.values()} != {made._order["number"]}:
            await asyncio.sleep(0.001)  # until all wait for the next order
        proxy.to_coordinator.write(proxy.held)
        await asyncio.sleep(0.01)
        assert {agent.offer["port"] for agent in made._agents.values()} == {made._order["number"]}
    assert nodes[0].trained + nodes[1].trained == Counter({(a, r): 1 for a in (1, 2) for r in range(4)})
    await made.leave()
    for node in nodes:
        await asyncio.gather(*node.tasks)
        if node.client._connecting is not None:
            await node.client._connecting
        if node.client._connection is not None:
            node.client._connection.close()
    made._control.close()
    if proxy is not None:
        await proxy.close()
    await asyncio.sleep(0.001)
    return nodes[0].by_ray, nodes[1].by_ray


def test_calls_go_over_the_connection() -> None:
    """After the first calls through Ray, which tell the relay where to connect, no other one is made through Ray."""
    proxy = Proxy("relay", 10**6, 0.0, closes=True)

    async def test() -> None:
        first, _ = await trained(proxy)
        assert first < 6
        assert proxy.seen["relay"] > FRAMES["relay"]
        assert proxy.seen["coordinator"] > FRAMES["coordinator"]

    run(test())


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "silent"])
@pytest.mark.parametrize("side", FRAMES)
def test_a_connection_that_is_cut_at_any_point(side: str, closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, within and after each frame, those of the greeting too: every rank gets every order to train once, and the cause
    of the failure is found as without it. What the coordinator receives after the call through Ray is not looked at."""
    monkeypatch.setattr(control_connection, "_ANSWER_S", 0.03)
    monkeypatch.setattr(control_connection, "_HELLO_S", 0.5)
    cut = 0
    for frame in range(FRAMES[side]):
        for part in (0.0, 0.5, 1.0):
            proxy = Proxy(side, frame, part, closes)

            async def test(proxy: Proxy = proxy) -> None:
                by_ray, _ = await trained(proxy)
                assert by_ray > 1

            run(test())
            cut += proxy.is_cut.is_set()
    assert cut > 2 * FRAMES[side]


def test_who_has_not_got_the_secret_is_refused() -> None:
    """A process that does not sign, or signs with another secret, or sends more than a greeting; and one that has the coordinator's
    port. The calls are made through Ray."""

    async def test() -> None:
        called: list[Any] = []

        async def many(calls: Any, *_: Any) -> dict[int, Any]:
            called.append(calls)
            return {0: "done"}

        server = ControlServer(HOST, many)
        host, port, secret = await server.offer() or ("", 0, "")
        frame, sign = control_connection._frame, control_connection._sign
        hellos: list[Callable[[str], bytes]] = [
            lambda asked: frame(["a", sign("another", "relay", asked, "a")]),
            lambda asked: frame(["a", sign(secret, "coordinator", asked, "a")]),
            lambda asked: frame(["a", None]),
            lambda asked: frame([["a"], "b"]),
            lambda asked: frame(None),
            lambda asked: b"\0\0\3\0" + b"\x91" * 768,
            lambda asked: (64 << 20).to_bytes(4, "big"),
            lambda asked: frame([0, [["beat", 1, 0]]]),
        ]
        for hello in hellos:
            reader, writer = await asyncio.open_connection(host, port)
            asked = await control_connection._read(reader)
            writer.write(hello(asked) + frame([0, [["beat", 1, 0]]]))
            with pytest.raises((EOFError, OSError)):
                assert await reader.readexactly(1) == b""
            writer.close()
        assert (called, server._open, server._greeting) == ([], {}, 0)

        asked_for: list[Any] = []
        ended = asyncio.Event()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame("0" * 64))
            _, signed = await control_connection._read(reader)
            writer.write(frame(signed))  # its own signature
            asked_for.append(await reader.read())
            writer.close()
            ended.set()

        taken = await asyncio.start_server(impostor, HOST, 0)

        async def by_ray(calls: Any, lost: str) -> dict[int, Any]:
            return {**await many(calls), OFFER: (HOST, taken.sockets[0].getsockname()[1], secret)}

        client = ControlClient(by_ray)
        assert await client.many([["beat", 1, 0]]) == {0: "done"}
        await ended.wait()
        assert await client.many([["beat", 1, 1]]) == {0: "done"}
        assert (asked_for, len(called)) == ([b""], 2)
        taken.close()
        server.close()

    run(test())


def test_a_call_that_cannot_be_answered_over_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too long, whose answer is, or that fails, is made through Ray."""

    async def test() -> None:
        monkeypatch.setattr(control_connection, "_LONGEST", 2000)
        by_ray: list[str] = []

        async def many(calls: Any) -> dict[int, Any]:
            if calls[0][1] == "fails":
                raise RuntimeError
            return {0: "x" * (3000 if calls[0][1] == "long answer" else 3)}

        server = ControlServer(HOST, many)

        async def ray(calls: Any, lost: str) -> dict[int, Any]:
            by_ray.append(calls[0][1][:20])
            return {0: "by Ray", OFFER: await server.offer()}

        client = ControlClient(ray)
        for what in ("fails", "long answer", "long call" * 1000):
            assert await client.many([["beat", "first"]]) == {0: "by Ray"}
            assert client._connecting is not None
            await client._connecting
            assert await client.many([["beat", "short"]]) == {0: "xxx"}
            assert await client.many([["beat", what]]) == {0: "by Ray"}
        assert by_ray == ["first", "fails", "first", "long answer", "first", "long calllong calllo"]
        server.close()

    run(test())
