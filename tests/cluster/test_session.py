"""Private sessions, attaching to a running cluster, and the processes and files that remain when a driver ends.

Over a minute: most tests start a Ray of their own, because its start and its end are what they check.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydist.cluster import head_monitor
from raydist.cluster import session as session_module
from raydist.cluster.session import open_session, worker_environment
from raydist.errors import ClusterUnreachable, UserError
from tests.processes import runs

HERE = Path(__file__).parent
DRIVER = HERE / "drivers.py"
UNWANTED = (
    "dashboard.py", "monitor.py", "ray::DashboardAgent",
    "PlacementGroupCleaner", "PreemptionWatcher", "DatasetManager", "AutoscalingCoordinator",
)  # fmt: skip


class Driver:
    """A process of drivers.py, in a process group of its own; `children` has every process that it has started."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": path, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        self.children: dict[int, psutil.Process] = {}

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {self.process.stderr and self.process.stderr.read()}"
        self.watch()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def write(self, **config: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(config) + "\n")
        self.process.stdin.flush()

    def watch(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.children[child.pid] = child

    def command_lines(self) -> list[str]:
        """Command lines of the processes that run now (Ray's processes set theirs to their role)."""
        lines = []
        for process in self.children.values():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return lines

    def end(self, timeout: float = 120) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return out, err

    def assert_nothing_left(self) -> None:
        """Each process that this driver has started is gone (or a zombie, until its parent reaps it)."""
        _, alive = psutil.wait_procs(
            list(self.children.values()), timeout=120
        )  # a busy machine takes long to kill them
        left = [process for process in alive if runs(process)]
        assert not left, left


@pytest.fixture
def drivers() -> Iterator[Callable[..., Driver]]:
    """Starts drivers; at the end kills their remaining processes."""
    started: list[Driver] = []

    def start(*args: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Driver:
        started.append(Driver(*args, env=env, cwd=cwd))
        return started[-1]

    yield start
    for driver in started:
        for process in driver.children.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if driver.process.poll() is None:
            driver.process.kill()
        driver.process.communicate()


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A temporary directory used only by the sessions of this test. Its path is short, because of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def test_a_private_ray_beside_another_serves_and_leaves_nothing(drivers: Callable[..., Driver], tmp_path: Path) -> None:
    """Two at the same time both train. Neither starts a dashboard, a monitor, a log monitor or other processes that runs do not
    need (this checks the patches of local_ray.py); workers are forked. A third driver uses the first one's by RAY_ADDRESS, as in a
    Ray job: variables reach its workers, for which the first one's Ray starts its runtime-env agent, and the cluster outlives it.
    Each ends all its processes, removes its files, prints nothing and keeps its logs."""
    both = [drivers("private", str(tmp_path / name)) for name in "ab"]
    told = [driver.read() for driver in both]
    assert told[0]["address"] != told[1]["address"]
    for driver in both:
        driver.write()
    values = [driver.read() for driver in both]
    for n, driver in enumerate(both):
        assert values[n]["cause"] is None
        parent = psutil.Process(values[n]["value"]["parent"])
        assert parent.pid in driver.children, "the worker was not started by this driver's own Ray"
        assert "raydist.cluster.ray_worker" in " ".join(parent.cmdline()), "the worker was not forked"
        lines = driver.command_lines()
        assert all(any(name in line for line in lines) for name in ("gcs_server", "raylet"))
        for unwanted in (*UNWANTED, "ray::RuntimeEnvAgent"):
            assert not any(unwanted in line for line in lines), unwanted
    env = {"RAY_AUTH_TOKEN": told[0]["token"], "RAY_ADDRESS": told[0]["address"]}
    (tmp_path / "code").mkdir()
    guest = drivers("attach", "auto", str(tmp_path / "guest"), env=env, cwd=tmp_path / "code")
    answer = guest.read()
    assert (answer["private"], answer["address"], answer["cause"]) == (False, told[0]["address"], None)
    assert answer["value"]["env"]["MKL_NUM_THREADS"] == "1"
    assert answer["value"]["env"]["OURS"] == "1"
    guest.end()
    assert guest.process.returncode == 0
    both[0].watch()
    assert any("ray::RuntimeEnvAgent" in line for line in both[0].command_lines()), (
        "the guest's workers have an environment"
    )
    both[0].write()
    assert both[0].read()["cause"] is None
    for n, driver in enumerate(both):
        out, err = driver.end()
        assert (driver.process.returncode, out, err) == (0, "", "")
        driver.assert_nothing_left()
        assert not Path(told[n]["temp"]).exists()
        assert (tmp_path / "ab"[n] / "driver.log").is_file()
        assert list((tmp_path / "ab"[n] / "ray").glob("worker-*.err"))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_private_ray_dies_with_its_driver(
    drivers: Callable[..., Driver], tmp_path: Path, own_tmp: str, sent: signal.Signals
) -> None:
    """Also workers in the middle of a step; and its files are deleted.

    A next session ends with an error: os.environ, stdout, stderr and descriptor 2 are as before. A thread that outlives it (Ray
    Data leaves one that polls) gets an error from Ray, which alone would start or join a cluster.
    """
    driver = drivers("private", str(tmp_path / "logs"), env={"TMPDIR": own_tmp})
    temp = Path(driver.read()["temp"])
    workers = tmp_path / "started"
    workers.mkdir()
    driver.write(end={"*": "wait"}, started=str(workers))
    _wait(lambda: len([p for p in workers.iterdir() if p.read_text()]) == 2)
    driver.watch()
    driver.process.send_signal(sent)
    driver.end()
    driver.assert_nothing_left()
    _wait(lambda: not temp.exists())
    if sent == signal.SIGTERM:
        return
    import ray

    before = dict(os.environ), sys.stdout, sys.stderr, os.fstat(2).st_ino

    def block() -> None:
        with open_session("local", env=worker_environment(3), log_dir=tmp_path / "next"):
            assert ray.nodes()
            os.write(2, b"native words\n")
            raise KeyError(os.environ["OMP_NUM_THREADS"])

    with pytest.raises(KeyError, match="3"):
        block()
    assert (dict(os.environ), sys.stdout, sys.stderr, os.fstat(2).st_ino) == before
    assert "native words" in (tmp_path / "next" / "driver.log").read_text()
    with pytest.raises(ray.exceptions.RaySystemError, match="not been started"):
        ray.nodes()
    assert not ray.is_initialized()


def test_ray_is_not_shut_down_below_a_thread_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's end waits for it; if it does not return, the process leaves without Ray's shutdown, in which such a call may
    end the process by SIGSEGV. Ray's own threads, which its shutdown ends, are not waited for."""
    import ray

    downs: list[str] = []
    monkeypatch.setattr(ray, "shutdown", lambda: downs.append("down"))
    monkeypatch.setattr(head_monitor, "QUIET_S", 0.1)
    monkeypatch.setattr(head_monitor, "lost", False)
    namespace: dict[str, Any] = {"__name__": "ray.actor"}
    exec("def call(called, returns):\n    called.release()\n    returns.wait()", namespace)
    called, returns = threading.Semaphore(0), threading.Event()
    threads = [
        threading.Thread(target=namespace["call"], args=[called, returns], name=n)
        for n in ("ray_listen", "raydist-abort")
    ]
    threads[0].start()
    assert called.acquire(timeout=240)
    session_module._shut_down()
    assert (downs, head_monitor.lost) == (["down"], False)
    threads[1].start()
    assert called.acquire(timeout=240)
    session_module._shut_down()
    assert (downs, head_monitor.lost) == (["down"], True)
    returns.set()
    for thread in threads:
        thread.join()


def test_a_signal_to_the_process_group_reaches_the_driver_alone_and_an_actor_that_does_not_end_is_ended(
    drivers: Callable[..., Driver], tmp_path: Path
) -> None:
    """SIGINT and SIGTERM to the whole process group, as a terminal and `timeout` send them: only the driver receives them; Ray
    and the workers continue. An actor hangs at exit, as Ray's own shutdown sometimes does: it is killed, and no process remains."""
    driver = drivers("private", str(tmp_path / "logs"))
    driver.read()
    workers, go = tmp_path / "started", tmp_path / "go"
    workers.mkdir()
    driver.write(end={"*": "file"}, file=str(go), started=str(workers), bystander=str(tmp_path / "bystander"))
    _wait(lambda: len([p for p in workers.iterdir() if p.read_text()]) == 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(driver.process.pid, number)
        assert driver.read() == {"interrupted": True}
    _wait(lambda: (tmp_path / "bystander").exists())
    go.touch()
    answer = driver.read()
    assert answer["cause"] is None
    assert answer["value"]["pid"] == int((workers / "0").read_text())
    driver.end()
    driver.assert_nothing_left()


@pytest.mark.parametrize("what", ["nothing", "mute", "http", "no address"])
def test_a_cluster_that_is_not_there_is_one_error_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Refused connection, no answer, the dashboard's port, or not an address: each is one error, before ray.init(), which would
    retry for 20 s."""
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("it retries"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = "there" if what == "no address" else f"127.0.0.1:{port}"
        if what == "nothing":
            server.close()
        if what == "http":
            threading.Thread(target=_answer, args=(server,), daemon=True).start()
        with pytest.raises(UserError) as caught, open_session(address, env={}, log_dir=tmp_path):
            pass
    assert address in caught.value.message
    assert caught.value.hint


def _answer(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_auto_without_a_cluster_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No RAY_ADDRESS and no cluster on this host: the hint names the possible remedies."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    import ray._private.services as services

    monkeypatch.setattr(services, "find_gcs_addresses", set)
    with pytest.raises(UserError, match="no Ray cluster"), open_session("auto", env={}, log_dir=tmp_path):
        pass


def test_a_host_without_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error before anything is started: Ray would fail in the middle of its start."""
    monkeypatch.setattr(session_module, "SHM", tmp_path / "shm")
    opened = open_session("local", env={}, log_dir=tmp_path)
    with pytest.raises(UserError, match="does not exist here") as caught, opened:
        pass
    assert "mount -t tmpfs" in caught.value.hint


def _wait(until: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_cluster_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer yet is tried again for that long; an error that stays one, such as a wrong token, is not, and
    without a time there is one try."""
    monkeypatch.setattr(session_module, "_AGAIN_S", 0.0)
    tries: list[str] = []

    @contextlib.contextmanager
    def attach(error: UserError | None) -> Iterator[Any]:
        tries.append("")
        if error is not None and len(tries) < 3:
            raise error
        yield "the session"

    with session_module._within(600.0, lambda: attach(ClusterUnreachable("not yet"))) as found:
        assert (found, len(tries)) == ("the session", 3)
    for error, wait_s in ((UserError("the token is wrong"), 600.0), (ClusterUnreachable("not there"), 0.0)):
        tries.clear()
        with pytest.raises(type(error)), session_module._within(wait_s, lambda error=error: attach(error)):
            pass
        assert len(tries) == 1
