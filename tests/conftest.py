"""What all tests share: quick ones first, one torch thread a process, real gloo ranks, nothing left behind."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import multiprocessing as mp
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import hypothesis
import pytest

from tests import needs
from tests.hosts import WATCHFUL, Cluster, Hosts

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A cluster of the developer's own must not be what the tests run on.
os.environ.pop("RAY_ADDRESS", None)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background: what tests interrupt would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How fast the machine is decides on no test: neither how long an example takes, nor how long it takes to make one. Where CI is set,
# hypothesis would take the same examples each time.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=False
)
hypothesis.settings.load_profile("any-machine")

SLOW = ("observe/test_monitor_actor", "cluster", "faults", "cli/test_train", "end_to_end")
"""Files and folders that start Ray or groups of processes: they come last, in this order."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests whose tools are missing are skipped, and listed at the end."""
    config.pluginmanager.register(needs, "needs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that a mistake is known in seconds."""
    root = Path(__file__).parent

    def order(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        return next((i + 1 for i, slow in enumerate(SLOW) if name.startswith(slow)), 0)

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: what runs beside what."""
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


class Ranks:
    """`run(function, world, *args)` calls `function(rank, *args)` on `world` real ranks and gives what each returned.

    `function` stands at the top of a test file; `rank` is a raydist.worker.distributed.Rank. What a rank raises is returned as
    the exception itself. Arguments and results are pickled, plainly: multiprocessing would pass each tensor on as a file in shared
    memory, which takes a millisecond.
    """

    def __init__(self) -> None:
        self._children: list[tuple[Any, Connection]] = []

    def _grow(self, world: int) -> None:
        context = mp.get_context("spawn")
        while len(self._children) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._children.append((process, ours))

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        self._grow(world)
        with tempfile.TemporaryDirectory() as folder:
            store = f"{folder}/store"
            for rank, (_, pipe) in enumerate(self._children[:world]):
                pipe.send_bytes(pickle.dumps((inspect.getfile(function), function.__name__, rank, world, store, args)))
            results = []
            for process, pipe in self._children[:world]:
                assert pipe.poll(120), "a rank does not answer"
                try:
                    results.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    process.join(5)
                    results.append(ChildProcessError(f"the rank's process ended with {process.exitcode}"))
        for child in list(self._children):
            if not child[0].is_alive():
                self._end(child)
        return results

    def close(self) -> None:
        for child in list(self._children):
            self._end(child)

    def _end(self, child: tuple[Any, Connection]) -> None:
        self._children.remove(child)
        process, pipe = child
        pipe.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from raydist.worker.distributed import Rank

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            path, name, number, world, store, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function, control = getattr(_module(path), name), None
            if world > 1:
                timeout = timedelta(seconds=60)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(store, world), rank=number, world_size=world, timeout=timeout
                )
                control = dist.new_group(backend="gloo", timeout=timeout)
            rank = Rank(number, world, number, torch.device("cpu"), "gloo", "127.0.0.1", control, ())
            result = function(rank, *args)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        if world > 1 and dist.is_initialized():
            dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(result))
        del result
        if len(os.listdir("/proc/self/task")) > 40:
            _forget_groups()


@functools.cache
def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_target", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _forget_groups() -> None:
    """Lets go of the process groups that torch's caches keep: each has threads that wake a hundred times a second.

    And of those that training has kept from the garbage collector for good (`gc.freeze`), as if the process would not train again.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cached in gc.get_objects():
        # Not isinstance: among all objects there are proxies of some that are gone.
        if type(cached) is functools._lru_cache_wrapper and cached.__module__.startswith("torch.distributed"):
            cached.cache_clear()
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real ranks; see `Ranks`."""
    made = Ranks()
    yield made
    made.close()


class ObjectStore:
    """A real S3 protocol over HTTP, served by moto, with one bucket; `process` is the server's."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._place = f"127.0.0.1:{probe.getsockname()[1]}"
        host, port = self._place.split(":")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(Request(f"http://{self._place}/bucket", method="PUT"), timeout=5).close()
                return
            except (URLError, OSError):
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)

    def uri(self, folder: str) -> str:
        """A folder in the bucket."""
        return f"s3://key:secret@bucket/{folder}?endpoint_override={self._place}&scheme=http&region=us-east-1"


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectStore]:
    """An object store; a test that stops its process lets it go on again."""
    made = ObjectStore()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow tracking server on loopback, with SQLite behind it."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with (folder / "log").open("w") as log:
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # a third of its start, and unused here
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env, start_new_session=True)
    deadline = time.monotonic() + 240
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except (URLError, OSError):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGKILL)  # its workers too
    process.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own, in memory, which can be filled, remounted and unmounted."""
    needs.require("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "raydist-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def ray_hosts() -> Iterator[Cluster]:
    """A Ray cluster of two hosts on this machine, of one CPU each. A test that kills a node adds it again."""
    with Hosts(2) as hosts, Cluster(hosts, env=WATCHFUL) as cluster:
        yield cluster
