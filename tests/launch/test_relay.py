"""The relay of a node's agents: their calls are one message, and an agent whose relay is stopped or gone calls directly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.launch import relay, zygote
from raydist.launch.relay import Link, MergedCalls, Relay

RELAY = """
import asyncio, sys, threading
from raydist.launch import relay
async def many(calls):
    if calls[0][0] == "next":
        print("next\\n" * len(calls), end="", flush=True)
        await asyncio.Event().wait()
    return {place: ["merged", *call] for place, call in enumerate(calls)}
relay.Relay("\\0" + sys.argv[1], many)
print("ready", flush=True)
threading.Event().wait()
"""


def direct(method: str, *given: Any, timeout_s: float | None) -> Any:
    """Stands for a call of Ray: says that it was not merged."""
    return ["direct", method, *given]


async def refused(calls: list[list[Any]]) -> dict[int, Any]:
    """No call arrives here: the node has a relay already."""
    raise AssertionError(calls)


@pytest.fixture
def other() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The key of a node, and the process that has its relay."""
    key = uuid.uuid4().hex
    address = Link.address_of(key).removeprefix("\0")
    with subprocess.Popen([sys.executable, "-c", RELAY, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield key, process
        process.kill()


def test_calls_at_the_same_time_are_one_message() -> None:
    """Each caller gets its own answer. A call without an answer is made again, and no other call waits for it."""
    sent: list[list[str]] = []
    ordered = asyncio.Event()

    async def many(calls: list[list[Any]]) -> dict[int, Any]:
        sent.append([method for method, *_ in calls])
        if calls[0][0] == "next" and len(sent) > 2:
            await ordered.wait()
        first = 4 if len(sent) == 1 else len(calls)
        return {place: (method, *given) for place, (method, *given) in enumerate(calls[:first])}

    async def test() -> None:
        calls = MergedCalls(many)
        found = await asyncio.gather(*(calls.call("next", 1, number) for number in range(8)))
        assert found == [("next", 1, number) for number in range(8)]
        assert sent == [["next"] * 8, ["next"] * 4]
        waiting = asyncio.create_task(calls.call("next", 1, 0))
        assert await calls.call("ended", 1, 3) == ("ended", 1, 3)
        assert not waiting.done()
        ordered.set()
        assert await waiting == ("next", 1, 0)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_agents_of_a_node_use_the_first_ones_relay(other: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of another group, nor one of another user."""
    monkeypatch.setattr(relay, "_SILENT_S", 240.0)
    key, _ = other
    link = Link(direct, refused, key)
    assert link.call("ended", 1, {"rank": 3}) == ["merged", "ended", 1, {"rank": 3}]
    assert Link(direct, refused, None).call("ended", 1) == ["direct", "ended", 1]
    with pytest.raises(OSError, match="in use"):
        Relay(Link.address_of(key), refused)
    link.drop()
    assert link.call("beat", 1) == ["direct", "beat", 1]
    monkeypatch.setattr(zygote, "peer_uid", lambda connection: os.getuid() + 1)
    assert Link(direct, refused, key).call("ended", 1) == ["direct", "ended", 1]


def test_a_name_whose_owner_accepts_nobody() -> None:
    """As another user may take it, before there is a relay or a zygote of the run: an agent does not wait for it."""
    key, found = uuid.uuid4().hex, list[Any]()
    address = Link.address_of(key)

    def connect() -> None:
        found.append(Link(direct, refused, key).call("beat", 1))
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                zygote.connect(connection, address)
            except OSError as error:
                found.append(error.errno)

    with socket.socket(socket.AF_UNIX) as owner, contextlib.ExitStack() as waiting:
        owner.bind(address)
        owner.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = waiting.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(address)
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(240)
        assert found == [["direct", "beat", 1], errno.EAGAIN]


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_relay_that_is_stopped_or_killed(
    end: signal.Signals, other: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New calls go to the coordinator directly; so does one that waits in the relay, and one whose agent gives the relay up."""
    monkeypatch.setattr(relay, "_SILENT_S", 240.0)  # a relay that waits for a processor is no stopped one
    key, process = other
    links = [Link(direct, refused, key) for _ in range(3)]
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda link=link: answers.append(link.call("next", 1))) for link in links[:2]]
    for thread in threads:
        thread.start()
    assert [process.stdout.readline() for _ in threads] == ["next\n"] * 2  # both calls are there
    links[0].drop()
    threads[0].join(60)
    assert answers == [["direct", "next", 1]]
    if end is signal.SIGSTOP:
        monkeypatch.undo()
    process.send_signal(end)
    threads[1].join(60)
    assert answers == 2 * [["direct", "next", 1]]
    assert links[2].call("beat", 2) == ["direct", "beat", 2]
    process.kill()
    process.wait()
    links[1].connect()
    assert links[1]._connection is None
