"""Fails the session if the tests leave a process, a namespace, a mount, a temporary file, one in shared memory or an open port
behind.

Processes of this session are recognised by MARK in their environment, on any host. A namespace or a port lasts as long as a
process holds it; named network namespaces and ports of the test process itself are checked separately. Temporary files are in a
folder of the session (TMPDIR). Anything that existed before, or belongs to a running process of another session, is ignored. A
session within a test runs beside other tests: it checks only processes and ports.
"""

from __future__ import annotations

import contextlib
import getpass
import multiprocessing.util
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydist.ipc import mailbox
from raydist.private_files import is_private_folder
from tests.processes import command_line, runs

MARK = "RAYDIST_TEST_SESSION"
"""Environment variable; a session within a test appends to its value."""
WAIT_S, WITHIN_S = 60.0, float(os.environ.get("RAYDIST_TEST_WAIT_S", 10.0))
"""Processes that were killed, or whose parent has just exited, take a moment to exit, on a busy machine a longer one. WITHIN_S: in
a session within a test; the variable is for one that leaves a process behind on purpose."""
SHM, NAMESPACES = Path(os.environ.get("RAYDIST_TEST_SHM", "/dev/shm")), Path("/run/netns")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Child processes of the test process, which stay until it exits; so do the templates of tests/host_zygotes.py and
tests/forked.py."""
_KEY = pytest.StashKey["_Before"]()


class _Before:
    """What existed when the session began, and what the xdist processes have reported since."""

    def __init__(self) -> None:
        inner = "/" in os.environ.get(MARK, "").strip("/")
        self.within, self.wait_s = inner and "RAYDIST_TEST_SHM" not in os.environ, WITHIN_S if inner else WAIT_S
        self.files, self.mounts = _files(), _mounts()
        self.ports = _ports()
        self.temporary: Path | None = None
        self.reported: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Before any test: records the state, and sets the mark and TMPDIR in the environment that all processes inherit."""
    main = not hasattr(config, "workerinput")
    if main:
        os.environ[MARK] = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex[:12]}"
    before = config.stash[_KEY] = _Before()
    if main and not before.within:
        before.temporary = _own_temporary_folder()


def _own_temporary_folder() -> Path:
    """From now on temporary files are in this new folder; those of pytest, and compiled code, which the next session uses, stay
    where they were. The folder is deleted when this process exits."""
    usual = Path(tempfile.gettempdir())
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(usual))
    folder = Path(tempfile.mkdtemp(prefix="rdt-"))
    folder.chmod(0o711)  # some tests are another user for a moment
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        compiled = usual / f"torchinductor_{getpass.getuser()}"
        compiled.mkdir(exist_ok=True)
        (folder / compiled.name).symlink_to(compiled)
    # Lower than the priority of multiprocessing's own folder, which is in it.
    multiprocessing.util.Finalize(None, shutil.rmtree, args=[folder], kwargs={"ignore_errors": True}, exitpriority=-200)
    return folder


def _is_own(path: Path) -> bool:
    """Whether it is the link to compiled code; the folder of a TemporaryDirectory, which is deleted when this process exits, and of
    which `import wandb` makes two; or multiprocessing's, with its sockets, which Python leaves if its process is killed."""
    made = [info.args[0] for info in [*weakref.finalize._registry.values()] if info.args]  # type: ignore[attr-defined]
    own = path.is_symlink() or path.name.startswith("pymp-")
    return own or str(path) in [folder for folder in made if isinstance(folder, str)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Called in the main process when one of xdist's processes has ended."""
    node.config.stash[_KEY].reported += getattr(node, "workeroutput", {}).get("leftovers", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each xdist process checks its own ports; the main process checks everything."""
    before = session.config.stash[_KEY]
    ports = [f"port {port} of the tests' own process" for port in sorted(_ports() - before.ports)]
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["leftovers"] = ports  # type: ignore[attr-defined]
        return
    deadline = time.monotonic() + before.wait_s
    while (found := _found(before)) and time.monotonic() < deadline:
        if not before.within:
            _clear_after_killed_drivers()  # again and again: a board may have a writer that is about to exit
        time.sleep(0.1)  # they exit by themselves
    before.reported += [*ports, *found]
    if before.reported and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """The list, if there is one. Last of all, as a log is often cut to its end."""
    yield
    if left := config.stash[_KEY].reported:
        terminalreporter.section("left behind by the tests")
        for each in left:
            terminalreporter.line(each)


def _clear_after_killed_drivers() -> None:
    """Does what a start of raydist does: tests kill drivers, and after the last no other starts."""
    for path in SHM.glob(f"raydist-{os.getuid()}-board-*"):
        if is_private_folder(path) and not any(mailbox._is_written(row) for row in path.iterdir()):
            shutil.rmtree(path)


def _found(before: _Before) -> list[str]:
    left = [f"process {p.pid}: {command_line(p)}" for p in _processes()]
    if before.within:
        return left
    left += [f"mount {line}" for line in sorted(_mounts() - before.mounts)]
    if before.temporary is not None:
        left += [f"file {path}" for path in before.temporary.iterdir() if not _is_own(path)]
    new = _files() - before.files
    if new:
        held = _held()
        left += [
            f"file {path}"
            for path in sorted(new)
            if not any(name.startswith(path) for name in held) and not _written(path)
        ]
    return left


def _processes() -> Iterator[psutil.Process]:
    """Running processes of this session, except this one and its helpers."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    mine = os.getpid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == mine or not _marked(process.pid, mark) or not runs(process):
                continue
            helpers = (*HELPERS, "tests.host_zygotes", "tests.forked")
            if process.ppid() == mine and any(name in command_line(process) for name in helpers):
                continue
            if "raydist-journal" in command_line(process) and _pipes(process.pid) & _pipes(mine):
                continue  # it waits for the end of this process, which has monitors that were not closed
            yield process


def _pipes(pid: int) -> set[str]:
    """The pipes that it has open."""
    opened = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return {name for name in opened if name.startswith("pipe:")}


def _marked(pid: int, mark: bytes) -> bool:
    """Whether its environment has the mark, or one that starts with it (from a session within a test)."""
    return any(each.startswith(mark) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def _files() -> set[str]:
    """This user's files in shared memory, and the named network namespaces. Not semaphores: multiprocessing removes them when it
    exits."""
    found = set(map(str, NAMESPACES.glob("*")))
    for path in SHM.glob("*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not path.name.startswith("sem.mp-"):
                found.add(str(path))
    return found


def _written(path: str) -> bool:
    """Whether it is a mailbox (raydist/ipc/mailbox.py) of a running rank: no process keeps its files open."""
    return "-board-" in path and any(map(mailbox._is_written, Path(path).glob("*.json")))


def _held() -> set[str]:
    """Files in shared memory that some process has open, mapped, or bound as a socket; it may belong to another session."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {
                line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines() if str(SHM) in line
            }
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
    with contextlib.suppress(OSError):
        found |= {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(SHM) in line}
    return {name for name in found if name.startswith(str(SHM))}


def _mounts() -> set[str]:
    """Mounts that tests have made: their source starts with raydist-test."""
    with contextlib.suppress(OSError):
        return {line for line in Path("/proc/self/mounts").read_text().splitlines() if line.startswith("raydist-test ")}
    return set()


def _ports() -> set[int]:
    """Ports on which this process listens."""
    with contextlib.suppress(psutil.Error, OSError):
        return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return set()
