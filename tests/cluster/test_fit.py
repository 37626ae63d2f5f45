"""Attempts on a real private Ray: how each kind of failure is reported, and the environment that a worker starts with.

Over a minute: each failure has its own workers on a private Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from raydist.cluster.run import ray_train_adapter
from raydist.cluster.run.fit import AbortHandle, AttemptResult
from raydist.cluster.run.supervisor import Supervisor
from raydist.cluster.run.worker_group_slot import start_coordinator
from raydist.cluster.session import Session, open_session, worker_environment
from raydist.errors import RaydistError
from raydist.run.directory import RunDir
from tests.actors import gone
from tests.processes import runs

sys.path.insert(0, str(Path(__file__).parent))
from drivers import attempt  # workers import it by PYTHONPATH


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    here = Path(__file__).parent
    logs = tmp_path_factory.mktemp("logs")
    path = [str(here), str(here.parents[1])]
    with open_session("local", env=worker_environment(), log_dir=logs, python_path=path) as opened:
        yield opened


def test_workers_find_the_environment_of_torchrun(session: Session) -> None:
    """Ranks, rendezvous and variables are set before the train function; rank 0's value is returned; torch is never imported."""
    result = attempt(session)
    assert result.failure is None
    assert result.value["rank"] == 0
    assert not result.value["torch"]
    assert result.value["env"] == {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OURS": "1",
    }
    assert result.value["cwd"] == os.getcwd()
    assert not list((session.temp_dir / "attempts").iterdir())


def test_the_driver_needs_no_torch() -> None:
    """None of the driver's imports, including Ray Train, imports torch."""
    modules = "raydist.cluster.run.supervisor, raydist.cluster.run.ray_train_adapter, raydist.cluster.preflight"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def tree(cls: type) -> list[type]:
    """A class and all its subclasses."""
    return [cls, *(d for c in cls.__subclasses__() for d in tree(c))]


def test_errors_survive_a_ray_round_trip(session: Session) -> None:
    """Each raydist error, raised in a task, is caught in the driver with its own type, message, hint and exit code."""

    @ray.remote(num_cpus=0)
    def fails(cls: type[RaydistError]) -> None:
        raise cls("where: what", "how to mend it")

    for cls in tree(RaydistError):
        with pytest.raises(cls) as caught:
            ray.get(fails.remote(cls))
        error = caught.value.cause if hasattr(caught.value, "cause") else caught.value
        assert (error.message, error.hint, error.exit_code) == ("where: what", "how to mend it", cls.exit_code)


@pytest.mark.parametrize(
    ("end", "cause", "heals"),
    [
        ({"1": "raise", "0": "wait"}, "ValueError: bad sample 17", True),
        ({"1": "told", "0": "wait"}, "NonFinite: loss is nan", False),
    ],
    ids=["raises", "tells the facts"],
)
def test_one_root_cause(session: Session, end: dict[str, str], cause: str, heals: bool) -> None:
    """Whatever the other rank then reports, the reported failure is the first rank's, with its own traceback."""
    failure = attempt(session, {"end": end}).failure
    assert failure is not None
    assert (failure.kind, failure.heals, failure.cause) == ("user_error", heals, cause)
    assert failure.rank == 1
    assert ("bad sample 17" if "17" in cause else "told") in failure.traceback


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_killed_worker_is_the_cause_not_its_peer(session: Session, tmp_path: Path, guilty: int) -> None:
    """SIGKILL of either rank: the reported cause is its death, never the lost connection that the other rank may report."""
    results: list[AttemptResult] = []
    config = {"end": {"*": "wait"}, "started": str(tmp_path)}
    thread = threading.Thread(target=lambda: results.append(attempt(session, config)))
    thread.start()
    pids = _started(tmp_path)
    os.kill(pids[guilty], signal.SIGKILL)
    thread.join(240)
    failure = results[0].failure
    assert failure is not None
    assert (failure.kind, failure.rank) == ("worker_died", guilty)
    assert failure.echoes <= 1
    assert failure.cause.startswith(f"WorkerDied: process {pids[guilty]} on ")
    assert "\n" not in failure.cause
    _gone(pids)


def test_a_worker_that_exits_is_a_death(session: Session) -> None:
    """Also if it exits at once, while Ray Train still starts the group (then the rank may be unknown)."""
    failure = attempt(session, {"end": {"1": "exit", "0": "wait"}}).failure
    assert failure is not None
    assert failure.kind == "worker_died"
    assert failure.rank in (1, None)


def test_a_killed_coordinator_is_named(session: Session, tmp_path: Path) -> None:
    """Whatever the run calls it for next, the run's cause is its process."""
    coordinator, none = start_coordinator(), cast(Any, None)
    ray.get(coordinator.reports.remote())
    # Not found by its name: a coordinator of the test before may still be exiting.
    pid = ray.get(cast(Any, coordinator).__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    while not gone(coordinator):
        time.sleep(0.02)  # until Ray knows, it says of a call only that the actor is unavailable
    attempts = cast(Any, SimpleNamespace(run=lambda: ray.get(coordinator.gathered.remote())))
    parts: dict[str, Any] = {
        "monitor": none,
        "stop_request": none,
        "elasticity": none,
        "outage": none,
        "injector": None,
        "slot": none,
    }
    supervisor = Supervisor(RunDir(tmp_path), none, attempts=attempts, **parts)
    supervisor._train()
    assert supervisor._ending is not None
    cause = f"Ray's coordinator (process {pid} on {session.node_ip}) has exited without reporting an error"
    assert supervisor._ending.cause == f"{cause}; run the same command again to continue"


def test_abort_ends_an_attempt_at_once(session: Session, tmp_path: Path) -> None:
    """Called from another thread: the workers' processes are gone, and their CPUs are free for the next attempt."""
    handle = AbortHandle()
    results: list[AttemptResult] = []

    def run() -> None:
        config = {"end": {"*": "wait"}, "started": str(tmp_path)}
        results.append(attempt(session, config, abort=handle))

    thread = threading.Thread(target=run)
    thread.start()
    pids = _started(tmp_path)
    handle.abort()
    handle.abort()
    thread.join(240)  # by themselves these workers never end
    assert not thread.is_alive()
    assert results[0].failure is not None
    assert results[0].failure.kind == "aborted"
    _gone(pids)
    assert attempt(session, cpus=1).failure is None


def test_a_killed_controller_is_told_and_leaves_nothing_reserved(session: Session, tmp_path: Path) -> None:
    """Ray Train's own actor dies: the attempt fails with that kind, and the next attempt gets all CPUs."""
    handle = AbortHandle()
    results: list[AttemptResult] = []

    def run() -> None:
        config = {"end": {"*": "wait"}, "started": str(tmp_path)}
        results.append(attempt(session, config, abort=handle))

    thread = threading.Thread(target=run)
    thread.start()
    pids = _started(tmp_path)
    ray.kill(handle._controller)
    thread.join(240)
    assert results[0].failure is not None
    assert results[0].failure.kind == "controller_died"
    _gone(pids)
    assert attempt(session, cpus=(os.cpu_count() or 2) / 2).failure is None


def test_an_attempt_that_cannot_be_placed_says_so(session: Session) -> None:
    """More workers than CPUs: the attempt fails with startup_timeout and does not hang; the next attempt gets the CPUs."""
    result = attempt(session, workers=2, cpus=(os.cpu_count() or 1) + 1, start_timeout_s=1.0)
    assert result.failure is not None
    assert result.failure.kind == "startup_timeout"
    assert attempt(session).failure is None


def _started(folder: Path, ranks: int = 2) -> list[int]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        texts = [p.read_text() for p in sorted(folder.iterdir())]
        if len(texts) == ranks and all(texts):
            return [int(t) for t in texts]
        time.sleep(0.05)
    raise TimeoutError("the workers did not start")


def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if not any(map(runs, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


def test_the_rendezvous_port_is_kept_for_torchs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """After rank 0 has chosen the port, no other socket can bind it; only torch's store, which names it, can."""
    from torch.distributed import TCPStore

    from raydist.worker.comm.rendezvous import _listener

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    host, port = ray_train_adapter._rendezvous()
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    store = TCPStore(host, port, 1, is_master=True, wait_for_workers=False, master_listen_fd=_listener(host, port))
    store.set("key", "value")
    assert store.get("key") == b"value"
