"""Forked ranks: the cause of their exit is known, and they exit with their server and agent. With a zygote and without."""

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

from raydist.launch import fork_server
from raydist.launch import zygote as zygotes
from raydist.launch.fork_server import VARIABLES, ForkServer, Process
from raydist.launch.zygote import Zygote
from tests import needs
from tests.processes import runs
from tests.sockets import ATTACK

HERE = str(Path(__file__).parents[2])


def child(end: str) -> str:
    """Source of a module whose `run(fd)` answers one message with its pid and environment, then executes `end`."""
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
    """zygote(preload): a zygote that imports `preload`, and the environment by which this process finds it."""
    made: list[Zygote] = []

    def start(preload: str = "preload") -> Zygote:
        made.append(
            Zygote(str(tmp_path / "zygote"), {"THREADS": "1"}, VARIABLES, "raydist.launch.fork_server:serve", [preload])
        )
        for name, value in {**made[-1].variables, "THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(params=["alone", "zygote"])
def server(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any) -> Iterator[Any]:
    """server(end): a fork server whose ranks execute `end`; it starts in a tenth of the time of torch's import."""
    made: list[ForkServer] = []

    def start(end: str) -> ForkServer:
        # In place of raydist.launch.rank_main: the test is about forking, not about what a rank does.
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


def fork(server: ForkServer, port: str = "1", mailbox: Path | None = None) -> tuple[Process, dict[str, Any]]:
    """Forks a rank; returns it with its own answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = server.fork([theirs.fileno()], {"PORT": port}, mailbox)
        connection = Connection(ours.detach())
    connection.send_bytes(json.dumps({}).encode())
    return process, json.loads(connection.recv_bytes())


def gone(*pids: int) -> None:
    """Waits until none of the processes runs."""
    deadline = time.monotonic() + 240
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
    """Exit codes and signals are named; processes that the rank started exit with it; the server then starts the next rank."""
    ranks = server(end)
    for port in ("1", "2"):
        process, told = fork(ranks, port)
        assert (told["pid"], told["port"], told["malloc"]) == (process.pid, port, "glibc.malloc.hugetlb=1")
        assert process.ended.wait(240)
        assert process.how == how
        gone(told["helper"])


def test_killed_and_stopped_ranks(server: Any) -> None:
    """`kill` ends running and stopped ranks, and does nothing to a dead one; a SIGKILL from elsewhere is named too."""
    ranks = server("time.sleep(1000)")
    for stopped in (False, True):
        process, told = fork(ranks)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        ranks.kill(process)
        assert process.ended.wait(240)
        assert process.how == "SIGKILL"
        gone(told["helper"])
        ranks.kill(process)
    process, _ = fork(ranks)
    os.kill(process.pid, signal.SIGKILL)
    assert process.ended.wait(240)
    assert process.how == "SIGKILL"


def test_the_server_takes_its_ranks_along(server: Any) -> None:
    """When the server is killed its ranks exit, stopped ones too; callers that wait for a rank, or fork another, get the
    cause."""
    ranks = server("time.sleep(1000)")
    process, told = fork(ranks)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    assert process.ended.wait(240)
    assert process.how == "its fork server exited"
    gone(told["pid"])
    os.kill(told["helper"], signal.SIGKILL)
    known = ": exit code -9" if isinstance(ranks._server, subprocess.Popen) else ""  # else it is not our child
    with pytest.raises(ChildProcessError, match=f"fork server exited{known}$"):
        fork(ranks)
    again = ranks.living()
    try:
        assert again is not ranks
        assert again.living() is again
        process, told = fork(again)
        again.kill(process)
        assert process.ended.wait(240)
        gone(told["helper"])
    finally:
        again.close()


def test_a_killed_agent_takes_all_along(server: Any, tmp_path: Path) -> None:
    """When the agent is killed its server and ranks exit, a stopped rank too; their mailboxes are deleted."""
    server("time.sleep(1000)").close()  # writes the modules
    code = """
import os, psutil, signal, sys
from pathlib import Path
from tests.launch.test_fork_server import fork
from raydist.launch.fork_server import ForkServer
server = ForkServer(["preload"])
mailbox = Path(sys.argv[1], "10.0.0.1-00000.json")
(one, told), (two, _) = fork(server), fork(server, mailbox=mailbox)
mailbox.parent.mkdir()
mailbox.touch()
os.kill(two.pid, signal.SIGSTOP)
print(psutil.Process(one.pid).ppid(), one.pid, two.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join([str(tmp_path), HERE])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "board")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    gone(*map(int, done.stdout.split()))
    assert not (tmp_path / "board").exists()


def test_a_preload_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preload that fails is reported with the exception of its import."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('libtorch is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer(["broken"])
    with pytest.raises(ChildProcessError, match="RuntimeError: libtorch is not there"):
        fork(server)
    server.close()


def counting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes modules for ranks that return at once; returns the file that gets a dot from each process that imports them."""
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
    """All servers of a zygote share one import, each with its agent's environment, folder and output; a server survives the
    zygote."""
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
        assert process.ended.wait(240)
        assert capfd.readouterr().out == f"a word {place}\n"
    shared.close()
    process, _ = fork(servers[0])
    assert process.ended.wait(240)
    assert process.how == "exit code 0"
    assert imports.read_text() == "."
    for one in servers:
        one.close()


def test_a_server_of_its_own_where_the_zygote_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any
) -> None:
    """With other environment variables or other modules, or after the zygote was killed, a server imports by itself."""
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


def test_the_agents_of_a_cluster_s_node_share_a_zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first agent starts the zygote, the others use it; another group has its own; a process of another user is not used."""
    imports = counting(tmp_path, monkeypatch)
    monkeypatch.setattr(fork_server, "PRELOAD", ("preload",))
    monkeypatch.setenv("THREADS", "1")
    monkeypatch.setenv(zygotes.VARIABLE, "")  # restored at the end
    key = str(tmp_path)
    first = fork_server.share_zygote(key, {"THREADS": "1"})
    assert first is not None
    fork_once(["preload"])
    assert fork_server.share_zygote(key, {"THREADS": "1"}) is None
    fork_once(["preload"])
    assert imports.read_text() == "."
    with monkeypatch.context() as other:
        other.setattr(zygotes, "peer_uid", lambda connection: os.getuid() + 1)
        fork_once(["preload"])
    assert imports.read_text() == ".."
    second = fork_server.share_zygote(f"{key} group 2", {"THREADS": "1"})
    assert second is not None
    fork_once(["preload"])
    assert imports.read_text() == "..."
    second.close()
    first.close()
    again = fork_server.share_zygote(key, {"THREADS": "1"})
    assert again is not None, "the address of one that has ended is free"
    again.close()


def test_what_another_user_orders_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may connect to a cluster's zygote, which has an abstract name. The same order of this user is carried out."""
    needs.require("second user")
    counting(tmp_path, monkeypatch)
    monkeypatch.setattr(fork_server, "PRELOAD", ("preload",))
    monkeypatch.setenv(zygotes.VARIABLE, "")  # restored at the end
    made = fork_server.share_zygote(str(tmp_path), {})
    assert made is not None
    fork_once(["preload"])  # it accepts connections from now on
    address = json.loads(made.variables[zygotes.VARIABLE])["path"].replace("\0", "@")

    def got(user: int) -> list[str]:
        asked = json.dumps({"user": user, "unix": [address], "paths": [], "pids": [], "tcp": []})
        done = subprocess.run([sys.executable, "-c", ATTACK, asked], capture_output=True, text=True, check=True)
        return list(json.loads(done.stdout))

    assert got(65534) == []
    assert got(os.getuid()) == [f"run a process by {address}", f"hear {address}"]
    made.close()


def test_a_zygote_keeps_nothing_of_a_requester_that_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any
) -> None:
    """Ray's workers are requested by a process that does not wait for them: no descriptor stays, which later ones would inherit."""
    counting(tmp_path, monkeypatch)
    shared = zygote()
    fork_once(["preload"])
    before = psutil.Process(shared.pid).num_fds()
    for _ in range(3):
        os.kill(shared.pid, signal.SIGSTOP)  # so that the requester is gone before the answer
        ours, theirs = socket.socketpair()
        with ours, theirs:
            forked = zygotes.fork(theirs, os.environ, ["preload"])
            assert forked is not None
            forked.close()
        os.kill(shared.pid, signal.SIGCONT)
    fork_once(["preload"])
    assert psutil.Process(shared.pid).num_fds() == before


def fork_once(preload: list[str]) -> None:
    """A server that forks one rank."""
    server = ForkServer(preload)
    process, _ = fork(server)
    assert process.ended.wait(240)
    server.close()


def test_a_killed_driver_takes_its_zygote_along(tmp_path: Path) -> None:
    """When the driver is killed its zygote exits, because the kernel closes the driver's end of the socket."""
    code = f"""
import os, pathlib, signal
from raydist.launch.zygote import Zygote
made = Zygote({str(tmp_path / "zygote")!r}, {{}}, {{}}, "raydist.launch.fork_server:serve", [])
print(made._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    gone(int(done.stdout))


def test_a_zygote_whose_imports_fail_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Any) -> None:
    """A zygote whose imports fail is reported with the exception, like a server without a zygote."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('libtorch is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    zygote("broken")
    server = ForkServer(["broken"])
    with pytest.raises(ChildProcessError, match="RuntimeError: libtorch is not there"):
        fork(server)
    server.close()


def test_what_ranks_are_forked_from_is_sound() -> None:
    """After all preloads the process has one thread, no CUDA context and no Ray."""
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
