"""Workers of a private Ray that are forked instead of started, and the stand-in of its agents."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import ray_agent, ray_worker
from raydist.launch.rendezvous import hold_port
from tests import needs
from tests.sockets import taken

WORKER = """
import json, os, random, signal, sys, threading
import numpy
from ray._raylet import ActorClassID, WorkerID
import ray.actor
facts = {
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "variable": os.environ["OURS"], "torch": "torch" in sys.modules,
    "modules": [name for name in ("ray.train", "raydist.launch.agent") if name in sys.modules],
    "drawn": [random.random(), float(numpy.random.random()), WorkerID.from_random().hex()],
    "last": sys.path[-1],
    "alone": os.getpgrp() == os.getpid(), "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "threads": threading.active_count(), "classes": ray.actor.ActorClassID is ActorClassID,
}
with open(sys.argv[-1], "w") as file:
    json.dump(facts, file)
raise SystemExit(7)
"""
SETUP = """
import json, os, sys
with open(sys.argv[-1], "w") as file:
    json.dump([os.environ["PYTHONPATH"].split(":")[-1], *sys.argv[1:]], file)
"""
PLAIN = ["--node-id=1", "--language=PYTHON", "--serialized-runtime-env-context={}", "--worker-id=2"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """started(out, *options): runs the script as the raylet does, and returns what the worker has written."""
    monkeypatch.setenv("OURS", "1")
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "default_worker.py").write_text(WORKER)
    (workers / "setup_worker.py").write_text(SETUP)

    def start(out: str, *options: str) -> Any:
        command = [
            sys.executable,
            ray_worker.__file__,
            str(workers / "default_worker.py"),
            *options,
            str(tmp_path / out),
        ]
        subprocess.run(command, check=True)
        until(lambda: (tmp_path / out).exists() and (tmp_path / out).read_text())
        return json.loads((tmp_path / out).read_text())

    return start


def until(true: Callable[[], object]) -> None:
    """Waits for another process."""
    while not true():
        time.sleep(0.01)


def test_forked_workers(tmp_path: Path, started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker finds what it would in a process of its own: arguments, path, environment, signals, process group; and what the
    zygote has imported, without torch. No two draw the same numbers, or the same ids of Ray. One with a runtime environment, one in
    another environment, and one whose zygote has exited, are started by Ray's own script. All of them find modules in the working
    directory."""
    zygote = ray_worker.start_zygote(tmp_path, {"OURS": "1"})
    try:
        for name, value in zygote.variables.items():
            monkeypatch.setenv(name, value)
        first, second = started("first", *PLAIN), started("second", *PLAIN)
        expected = {
            "name": "__main__",
            "path": str(tmp_path / "workers"),
            "last": os.getcwd(),
            "variable": "1",
            "torch": False,
            "threads": 1,
        }
        expected |= {
            "alone": True,
            "interrupted": True,
            "classes": True,
            "modules": ["ray.train", "raydist.launch.agent"],
        }
        assert {key: first[key] for key in expected} == expected
        assert first["argv"][1:] == ["--node-id=1", "--worker-id=2", str(tmp_path / "first")]
        assert [a for a, b in zip(first["drawn"], second["drawn"], strict=True) if a == b] == []
        prepared = [*PLAIN, '--serialized-runtime-env-context={"env_vars": {"A": "b"}}']
        assert started("prepared", *prepared)[2:-1] == prepared
        monkeypatch.setenv("OURS", "2")
        assert started("other", *PLAIN)[2:-1] == PLAIN
        monkeypatch.setenv("OURS", "1")
    finally:
        zygote.close()
    late = started("late", *PLAIN)
    assert (late[0], late[2:-1]) == (os.getcwd(), PLAIN)


def test_a_zygote_that_cannot_import(
    tmp_path: Path, started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts the workers by itself."""
    monkeypatch.setattr(ray_worker, "PRELOAD", ("no_such_module",))
    zygote = ray_worker.start_zygote(tmp_path, {})
    try:
        known = json.loads(zygote.variables[ray_worker.VARIABLE])
        known["preload"] = ["raydist.cluster.ray_preload"]  # the script's own
        monkeypatch.setenv(ray_worker.VARIABLE, json.dumps(known))
        assert started("out", *PLAIN)[2:-1] == PLAIN
    finally:
        zygote.close()


AGENT = """
import os, socket, sys, time
out, host, port = sys.argv[1:]
while not os.path.exists(out + ".go"):
    open(out, "w").write("x")
    time.sleep(0.01)
with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:  # as Ray's
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen()
    server.accept()[0].sendall(os.path.basename(sys.path[0]).encode())
    time.sleep(600)
"""


class StandIn:
    """ray_agent.py for an agent that writes a file, and listens once there is another one. `asked`: whether a connection was
    accepted and closed."""

    def __init__(self, host: str, out: Path) -> None:
        self.held = hold_port(host)  # as the driver does
        self.place = self.held.getsockname()[:2]
        (out.parent / "agent").mkdir()
        script = out.parent / "agent" / "main.py"
        script.write_text(AGENT)
        agent = [sys.executable, "-u", str(script), str(out), *map(str, self.place)]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", ray_agent.__file__, *map(str, self.place), *agent],
            env={**os.environ, "RAY_RAYLET_PID": str(os.getpid())},
        )

    def asked(self, user: int) -> bool:
        # Each module that a connection needs is imported before: the other user may not read them.
        code = "import encodings.idna, os, socket, sys; os.setuid(int(sys.argv[3])); "
        code += "assert not socket.create_connection(sys.argv[1:3]).recv(1)"
        command = [sys.executable, "-I", "-S", "-c", code, *map(str, self.place), str(user)]
        assert self.process.poll() is None
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[[str], StandIn]]:
    """stand_in(host): its agent writes tmp_path/out."""
    made: list[StandIn] = []

    def start(host: str) -> StandIn:
        made.append(StandIn(host, tmp_path / "out"))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        one.held.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_agent_starts_when_it_is_asked(tmp_path: Path, stand_in: Callable[[str], StandIn], host: str) -> None:
    """The process becomes the agent when this user connects to its port. Until the agent listens there, another user cannot."""
    waiting = stand_in(host)
    until(lambda: waiting.asked(os.getuid()))
    until((tmp_path / "out").exists)
    if needs.NEEDS["second user"].there():
        assert taken(host, waiting.place[1]) == ""
    (tmp_path / "out.go").touch()

    def answer() -> bytes:
        with suppress(ConnectionRefusedError), socket.create_connection(waiting.place) as connection:
            return connection.recv(10)
        return b""

    until(lambda: answer() == b"agent")


def test_another_user_starts_no_agent(tmp_path: Path, stand_in: Callable[[str], StandIn]) -> None:
    """Such a connection is closed, and the port stays taken."""
    needs.require("second user")
    waiting = stand_in("127.0.0.1")
    until(lambda: waiting.asked(65534))
    until(lambda: waiting.asked(65534))
    assert not (tmp_path / "out").exists()
    until(lambda: waiting.asked(os.getuid()))
    until((tmp_path / "out").exists)
