"""Ranks that are forked: how they end is known, and nothing of them outlives those above them. With a zygote and without."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydist.launch.fork_server import VARIABLES, ForkServer, Process
from raydist.launch.zygote import Zygote
from tests.processes import runs

HERE = str(Path(__file__).parents[2])


def child(end: str) -> str:
    """Source of a module whose `run(fd)` answers one message with its pid and environment, then ends as `end` says."""
    return f"""
import json, os, signal, subprocess, sys, time
from multiprocessing.connection import Connection

def run(fd):
    connection = Connection(fd)
    order = json.loads(connection.recv_bytes())
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    told = dict(pid=os.getpid(), helper=helper.pid, port=os.environ["PORT"], malloc=os.environ["GLIBC_TUNABLES"])
    connection.send_bytes(json.dumps(told).encode())
    {end}
    return 0
"""


@pytest.fixture
def zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """zygote(): one that imports `preload`, where this process finds it."""
    made: list[Zygote] = []

    def start(preload: str = "preload") -> Zygote:
        made.append(Zygote(tmp_path, {"THREADS": "1"}, VARIABLES, "raydist.launch.fork_server:serve", [preload]))
        for name, value in {**made[-1].variables, "THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(params=["alone", "zygote"])
def server(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any) -> Iterator[Any]:
    """server(end): a fork server whose ranks end so, in a tenth of the time that torch's import takes."""
    made: list[ForkServer] = []

    def start(end: str) -> ForkServer:
        # Stands in for raydist.launch.rank_main, under its name: what is forked, not what it then does, is looked at here.
        (tmp_path / "stand_in.py").write_text(child(end))
        (tmp_path / "preload.py").write_text(
            "import sys, stand_in\nsys.modules['raydist.launch.rank_main'] = stand_in\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        if request.param == "zygote":
            zygote()
        made.append(ForkServer(["preload"]))
        return made[-1]

    yield start
    for one in made:
        one.close()


def fork(server: ForkServer, port: str = "1") -> tuple[Process, dict[str, Any]]:
    """A rank, and what it says of itself."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = server.fork([theirs.fileno()], {"PORT": port})
        connection = Connection(ours.detach())
    connection.send_bytes(json.dumps({}).encode())
    return process, json.loads(connection.recv_bytes())


def gone(*pids: int) -> None:
    """Waits until none of them runs any more."""
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("return 0", "exit code 0"),
        ("os._exit(3)", "exit code 3"),
        ("raise ValueError", "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
    ],
)
def test_how_a_rank_ended(server: Any, end: str, how: str) -> None:
    """Exit codes and signals by name; what it had started itself is gone with it; the next one starts from the same server."""
    ranks = server(end)
    for port in ("1", "2"):
        process, told = fork(ranks, port)
        assert (told["pid"], told["port"], told["malloc"]) == (process.pid, port, "glibc.malloc.hugetlb=1")
        assert process.ended.wait(20)
        assert process.how == how
        gone(told["helper"])


def test_killed_and_stopped_ranks(server: Any) -> None:
    """SIGKILL from here or from anybody, of a running or a stopped one; killing the dead does nothing."""
    ranks = server("time.sleep(1000)")
    for stopped in (False, True):
        process, told = fork(ranks)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        ranks.kill(process)
        assert process.ended.wait(20)
        assert process.how == "SIGKILL"
        gone(told["helper"])
        ranks.kill(process)
    process, _ = fork(ranks)
    os.kill(process.pid, signal.SIGKILL)
    assert process.ended.wait(20)
    assert process.how == "SIGKILL"


def test_the_server_takes_its_ranks_along(server: Any) -> None:
    """Killed, even one that is stopped goes with it; who waits for it is told, and who asks for another."""
    ranks = server("time.sleep(1000)")
    process, told = fork(ranks)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    assert process.ended.wait(20)
    assert process.how == "its fork server is gone"
    gone(told["pid"])
    os.kill(told["helper"], signal.SIGKILL)
    known = ": exit code -9" if isinstance(ranks._server, subprocess.Popen) else ""  # else it is nobody's child
    with pytest.raises(ChildProcessError, match=f"fork server is gone{known}$"):
        fork(ranks)


def test_a_killed_agent_takes_all_along(server: Any, tmp_path: Path) -> None:
    """Whoever started the server is killed: server and ranks end, a stopped rank too."""
    server("time.sleep(1000)").close()  # for the files
    code = """
import os, psutil, signal, sys
from tests.launch.test_fork_server import fork
from raydist.launch.fork_server import ForkServer
server = ForkServer(["preload"])
(one, told), (two, _) = fork(server), fork(server)
os.kill(two.pid, signal.SIGSTOP)
print(psutil.Process(one.pid).ppid(), one.pid, two.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join([str(tmp_path), HERE])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    gone(*map(int, done.stdout.split()))


def test_a_preload_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation: what the import said, not that a server is gone."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('libtorch is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer(["broken"])
    with pytest.raises(ChildProcessError, match="RuntimeError: libtorch is not there"):
        fork(server)
    server.close()


def counting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the modules for ranks that return at once; the file that gets a line for each process that imports them."""
    (folder / "stand_in.py").write_text(child("print('a word', os.getcwd(), flush=True)"))
    told = folder / "imports"
    (folder / "preload.py").write_text(
        f"import os, sys, stand_in\nsys.modules['raydist.launch.rank_main'] = stand_in\nopen({str(told)!r}, 'a').write('.')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return told


def test_one_import_for_all_servers_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any, capfd: Any
) -> None:
    """Each server has its own agent's environment, folder and output; one goes with its agent, not with the zygote."""
    imports = counting(tmp_path, monkeypatch)
    shared = zygote()
    servers = []
    for number in range(2):
        place = tmp_path / f"agent-{number}"
        place.mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setenv("GLIBC_TUNABLES", f"agent.{number}")
        servers.append(ForkServer(["preload"]))
        process, told = fork(servers[-1])
        assert told["malloc"] == f"agent.{number}"
        assert process.ended.wait(20)
        assert capfd.readouterr().out == f"a word {place}\n"
    shared.close()
    process, _ = fork(servers[0])
    assert process.ended.wait(20)
    assert process.how == "exit code 0"
    assert imports.read_text() == "."
    for one in servers:
        one.close()


def test_a_server_of_its_own_where_the_zygote_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any
) -> None:
    """Other variables, which libraries read once; other modules; a zygote that was killed."""
    imports = counting(tmp_path, monkeypatch)
    (tmp_path / "another.py").write_text("import preload\n")
    shared = zygote()
    fork_once(["preload"])
    assert imports.read_text() == "."
    fork_once(["another"])
    assert imports.read_text() == ".."
    monkeypatch.setenv("THREADS", "2")
    fork_once(["preload"])
    assert imports.read_text() == "..."
    monkeypatch.setenv("THREADS", "1")
    shared._process.kill()
    shared._process.wait()
    fork_once(["preload"])
    assert imports.read_text() == "...."


def fork_once(preload: list[str]) -> None:
    """A server that lives for one rank."""
    server = ForkServer(preload)
    process, _ = fork(server)
    assert process.ended.wait(20)
    server.close()


def test_a_killed_driver_takes_its_zygote_along(tmp_path: Path) -> None:
    """However the driver ends: the kernel closes its end of the socket."""
    code = f"""
import os, pathlib, signal
from raydist.launch.zygote import Zygote
made = Zygote(pathlib.Path({str(tmp_path)!r}), {{}}, {{}}, "raydist.launch.fork_server:serve", [])
print(made._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    gone(int(done.stdout))


def test_a_zygote_whose_imports_fail_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any) -> None:
    """As a server of its own would."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('libtorch is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    zygote("broken")
    server = ForkServer(["broken"])
    with pytest.raises(ChildProcessError, match="RuntimeError: libtorch is not there"):
        fork(server)
    server.close()


def test_what_ranks_are_forked_from_is_sound() -> None:
    """With all that is preloaded: one thread, no CUDA context, no Ray."""
    code = """
import importlib, os, sys, threading
from raydist.launch.fork_server import PRELOAD
for name in PRELOAD:
    importlib.import_module(name)
import torch
assert "ray" not in sys.modules
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
assert set(names) <= {"jemalloc_bg_thd"}, names  # pyarrow's; jemalloc sees to it in its fork handlers
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE)
