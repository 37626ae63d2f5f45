"""Shared by all tests: file order, one torch thread per process, real gloo ranks, checks at the end of the session."""

from __future__ import annotations

import faulthandler
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
import typer.testing

from raydist import registry
from raydist.launch.fork_server import PRELOAD
from raydist.storage import Storage
from tests import forked, leftovers, needs, slow_files
from tests.hosts import WATCHFUL, Cluster, Hosts, close_templates
from tests.ports import free_ports
from tests.scheduling import WAITING, Scheduling, give_way

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile would start a pool of processes in each rank, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each rank that compiles would build and load a library for each vector instruction set of this CPU, to see whether it can: 1 s of
# processor time, and 6 s for the first one on a machine.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The tests must not run on the developer's own cluster.
os.environ.pop("RAY_ADDRESS", None)
# A background job of a shell ignores SIGINT; the processes that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A slow machine fails no test: no deadline, no health check for slow generation. With CI set, hypothesis by default uses the same
# examples each time; derandomize=False prevents that.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=False
)
hypothesis.settings.load_profile("any-machine")

# CliRunner makes all commands of an app for each call of one: 65 ms for `raydist`.
typer.testing._get_command = functools.cache(typer.testing._get_command)

SLOW = ("observe/test_monitor_actor", "cluster", "faults", "end_to_end")
"""Files and folders that start Ray or process groups; they run last, in this order, those of WAITING after all others. With `-n`
one process begins with these (tests/scheduling.py): with the longest, so that none is left when the other process has ended."""


def pytest_configure(config: pytest.Config) -> None:
    """Missing tools, slow files and leftovers are listed at the end of the session."""
    give_way(config)
    for plugin in (needs, slow_files, leftovers):
        config.pluginmanager.register(plugin, plugin.__name__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that failures show within seconds."""
    root = Path(__file__).parents[1]

    def order(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        if name in WAITING:
            return len(SLOW) + len(WAITING) - WAITING.index(name)
        return next((i + 1 for i, slow in enumerate(SLOW) if name.startswith(f"tests/{slow}")), 0)

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make no garbage, and searching for it takes a tenth of their time. What was imported stays to the end, and so do the
    tests: no later search goes through them. pytest keeps its form of the tests, which takes 7 s to make, also in containers where
    Python writes no bytecode."""
    gc.disable()
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = writes
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: assigns files to processes."""
    return Scheduling(config, log)


def pytest_unconfigure() -> None:
    """Ends what was started once for all hosts and programs."""
    close_templates()
    forked.close()


@pytest.fixture(autouse=True)
def own_code() -> Iterator[None]:
    """Commands that a test has run in this process do not decide for the next test whether own code may run."""
    yield
    registry.trust(True)


IDLE_S = 5
"""A rank that is not called for so long releases its process groups: those of eight ranks take a tenth of a core. To release them
takes as much processor time as they take in some seconds."""
STUCK_S = 300
"""A function that takes longer on a rank ends the rank's process, which prints the stacks of its threads to stderr."""


class Ranks:
    """`run(function, world, *args)` calls `function(rank, *args)` on `world` real ranks and returns the result of each.

    `function` must be at the top level of a test file; `rank` is a raydist.worker.distributed.Rank. If a rank raises, its result
    is the exception; if it is killed, the result is ChildProcessError. In both cases its process ends, which closes its connections
    as at the end of an attempt, and the next call starts a new one in its place. Other processes are kept between calls.
    Arguments and results are pickled as bytes: multiprocessing would write each tensor to a file in shared memory, which takes a
    millisecond. Ranks meet at a store of this process: torch's store in a file is polled every 10 ms, several times for each group.
    TORCH_GLOO_LAZY_INIT would save a group's connections, 30 to 190 ms a call, but a rank that sends first may then wait for ever.
    """

    def __init__(self) -> None:
        self._children: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._calls = 0

    def _grow(self, world: int) -> None:
        while len(self._children) < world:
            self._children.append(self._start())

    def _start(self) -> tuple[Any, Connection]:
        context = mp.get_context("forkserver")
        # Imported once, 4 s of CPU time; a new rank then takes milliseconds. In a long session many ranks compile, each of which
        # would import the compiler, 2 s; and many compare models with those of `transformers`, 1 s.
        some = (
            ["torch._inductor.compile_fx", "tests.worker.model.families"] if "PYTEST_XDIST_WORKER" in os.environ else []
        )
        # What the files of tests import beside the loop: a tenth of a second in each rank that replaces a killed one.
        most = ["raydist.data.prepare", "raydist.faults", "raydist.cluster.run.recovery", "tests.training"]
        context.set_forkserver_preload(["pytest", __name__, *PRELOAD, *some, *most, "tests.rank_preload"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        return process, ours

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        self._grow(world)
        place = self._place()
        for rank, (_, pipe) in enumerate(self._children[:world]):
            pipe.send_bytes(pickle.dumps((inspect.getfile(function), function.__name__, rank, world, place, args)))
        results = []
        for process, pipe in self._children[:world]:
            if not pipe.poll(STUCK_S + 20):
                self.close()  # their late answers would be taken for those of the next call
                pytest.fail("a rank's process does not answer")
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join(5)
                results.append(ChildProcessError(f"the rank's process ended with {process.exitcode}"))
            if isinstance(results[-1], BaseException):
                process.join(5)
        for number, child in enumerate(self._children):
            if not child[0].is_alive():
                self._end(child)
                # A process keeps its rank: torch caches the rank's position in the mesh.
                self._children[number] = self._start()
        return results

    def _place(self) -> tuple[int, str]:
        """The store's port, and a prefix for the keys of one call."""
        import torch.distributed as dist

        if self._store is None:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                self._store = dist.TCPStore(
                    "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
                )
        self._calls += 1
        return self._store.port, str(self._calls)

    def close(self) -> None:
        while self._children:
            self._end(self._children.pop())
        self._store = None

    def _end(self, child: tuple[Any, Connection]) -> None:
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
    from tests import rank_preload, tensor_pickle

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # On a GPU, ranks share it: see tests/gpu/README.md.
    device, backend = torch.device(os.environ.get("RAYDIST_TEST_DEVICE", "cpu")), "gloo"
    if "RAYDIST_TEST_DEVICE" in os.environ:
        from tests.gpu import staged

        staged.register()
        backend = staged.NAME
    _refuse_pickles()
    # What was imported is never searched for garbage again, which takes 0.3 s of CPU time; what training freezes must not stay.
    gc.freeze()
    gc.freeze = lambda: None
    while True:
        try:
            if not pipe.poll(IDLE_S) and len(os.listdir("/proc/self/task")) > 8:
                _forget_groups([*rank_preload.CACHES, *rank_preload.caches()])
            path, name, number, world, (port, prefix), args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        try:
            function, control = getattr(_module(path), name), None
            if world > 1:
                timeout = timedelta(seconds=120)
                store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, timeout=timeout))
                dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=timeout)
                control = dist.new_group(backend="gloo", timeout=timeout)
            rank = Rank(number, world, number, device, backend, "127.0.0.1", control, ())
            result = function(rank, *args)
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send_bytes(pickle.dumps(error.with_traceback(None)))
            os._exit(1)  # some objects of torch keep their groups, and peers wait until these are closed
        if world > 1 and dist.is_initialized():
            dist.destroy_process_group()
        pipe.send_bytes(tensor_pickle.dumps(result))
        del result
        if len(os.listdir("/proc/self/task")) > 40:
            _forget_groups([*rank_preload.CACHES, *rank_preload.caches()])
        faulthandler.cancel_dump_traceback_later()


def _refuse_pickles() -> None:
    """From now on torch's object collectives (`all_gather_object`, ...) raise, unless a test calls them itself: they unpickle."""
    from torch.distributed import distributed_c10d

    def refusing(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back and frame.f_code.co_filename.endswith(("distributed_c10d.py", "c10d_logger.py")):
                frame = frame.f_back
            if not Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
                raise AssertionError(f"{frame.f_code.co_filename}:{frame.f_lineno} sends or reads a pickle")
            return torchs(*arguments)

        return checked

    for name in ("_object_to_tensor", "_tensor_to_object"):
        setattr(distributed_c10d, name, refusing(getattr(distributed_c10d, name)))


@functools.cache
def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_target", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _forget_groups(caches: list[Any]) -> None:
    """Releases the process groups that torch's caches keep: the threads of each group wake a hundred times a second."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cached in caches:
        cached.cache_clear()
    gc.collect()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real ranks; see `Ranks`."""
    made = Ranks()
    yield made
    made.close()


class ObjectStore:
    """A real S3 server over HTTP (moto) with one bucket; `process` is the server's process."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self._place = f"127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 240
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

    def uploaded(self, path: Path, folder: str) -> str:
        """A folder in the bucket with the files of a local one."""
        for file in path.iterdir():
            Storage(self.uri(folder)).write(file.name, file.read_bytes())
        return self.uri(folder)


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectStore]:
    """An object store; if a test stopped its process, it is resumed."""
    made = ObjectStore()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow tracking server on loopback, with SQLite storage."""
    folder = tmp_path_factory.mktemp("mlflow")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with (folder / "log").open("w") as log:
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # a third of its start; unused here
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
    os.killpg(process.pid, signal.SIGKILL)  # including its workers
    process.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB in memory, which can be filled, remounted and unmounted."""
    needs.require("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "raydist-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def ray_hosts() -> Iterator[Cluster]:
    """A Ray cluster of two hosts on this machine, with one CPU each. A test that kills a node adds it again."""
    with Hosts(2) as hosts, Cluster(hosts, env=WATCHFUL) as cluster:
        yield cluster
