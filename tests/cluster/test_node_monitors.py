"""Node monitors on a real Ray: they use no CPUs, are pinned to their node and restart after a kill. Nothing waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raydist.cluster.run import monitor_client as client_module
from raydist.cluster.run import node_monitors as agents_module
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.node_monitors import NodeMonitors
from raydist.cluster.session import open_session, worker_environment
from raydist.ipc import mailbox
from raydist.observe import node_monitor as node_module
from raydist.observe.aggregator import Aggregator
from raydist.observe.hardware.nvml import Gpus
from raydist.observe.node_monitor import NodeMonitor
from raydist.run.directory import ATTEMPTS, SAMPLES, RunDir
from raydist.run.telemetry_log import read_samples
from tests.actors import gone

ROOT = Path(__file__).parents[2]
RANK = """
import os, select, sys, time
from raydist.ipc.mailbox import Mailbox

place, step = Mailbox(sys.argv[1], sys.argv[2], 0), 0
while not select.select([sys.stdin], [], [], 0.02)[0]:
    step += 1
    place.write({"monotonic": time.monotonic(), "rank": 0, "attempt": 1, "step": step, "pid": os.getpid()})
print(step)
"""


class Monitor:
    """Takes rows as the run's monitor does, and returns them; while `hold` is set, it does not answer."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._exported: list[dict[str, Any]] = []
        self._begun: list[tuple[int, int, int]] = []
        self._free = threading.Event()
        self._free.set()

    def observe(self, rows: list[dict[str, Any]], sent: float) -> None:
        self._free.wait()
        self._rows += rows

    def begin_attempt(self, number: int, world_size: int, step: int) -> None:
        self._begun.append((number, world_size, step))

    def begun(self) -> list[tuple[int, int, int]]:
        return self._begun

    def push(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        self._events += events

    def export(self, rows: list[dict[str, Any]]) -> None:
        self._exported += rows

    def exported(self) -> list[dict[str, Any]]:
        return self._exported

    def events(self) -> list[dict[str, Any]]:
        return self._events

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self._rows if row["kind"] == kind]

    def hold(self, yes: bool) -> None:
        (self._free.clear if yes else self._free.set)()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts Ray with one node; the node's id."""
    with open_session(
        "local", env=worker_environment(), log_dir=tmp_path_factory.mktemp("logs"), python_path=[str(ROOT)]
    ):
        yield ray.get_runtime_context().get_node_id()


@pytest.fixture
def monitor(node: str) -> Iterator[Any]:
    made = ray.remote(Monitor).options(num_cpus=0, max_restarts=-1, max_concurrency=4).remote()
    yield made
    ray.kill(made)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes a reading 50 times a second, as a rank does."""
    command = [sys.executable, "-c", RANK, str(tmp_path), address()]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.communicate("\n")


def address() -> str:
    return ray.nodes()[0]["NodeManagerAddress"]


def until(true: Callable[[], Any], timeout_s: float = 240.0) -> Any:
    """Waits for something that another process does."""
    deadline = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return found


def pid_of(actor: Any) -> int:
    """0 while the actor is not alive."""
    try:
        return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=10))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return 0


def kill(actor: Any) -> int:
    pid = int(until(lambda: pid_of(actor)))  # 0 would be this process, and all of its group
    os.kill(pid, signal.SIGKILL)
    return pid


def be_patient(actor: Any, module: str) -> None:
    """It waits for a minute, when it is closed, until its last rows have arrived: a busy machine may need more than its 2 s."""
    ray.get(actor.__ray_call__.remote(lambda self: setattr(sys.modules[module], "_ARRIVE_S", 60.0)))


def test_a_runs_monitor_that_hangs_is_replaced_and_ends_with_the_run(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when an attempt begins: Ray starts another one, which learns of the attempt. After the run it ends, though its
    handle was sent to node monitors."""
    monkeypatch.setattr(client_module, "_HANGS_S", 0.5)
    actor = ray.remote(Monitor).options(num_cpus=0, max_restarts=-1, max_concurrency=4).remote()
    client = MonitorClient(actor)
    agents = NodeMonitors(RunDir(tmp_path), actor, 0.1, private=False, env={}, note=lambda text: None)
    agents.watch([node])
    pid = until(lambda: pid_of(actor))
    os.kill(pid, signal.SIGSTOP)
    client.begin_attempt(2, 4, 7)
    assert ray.get(actor.begun.remote()) == [(2, 4, 7)]
    assert pid_of(actor) != pid
    agents.close()
    client.close()
    until(lambda: gone(actor))


def test_killed_agents_and_monitors_cost_rows_only(
    node: str, monitor: Any, rank: subprocess.Popen[str], tmp_path: Path
) -> None:
    """After a SIGKILL of either one, rows continue and the rank is not affected; at the end no actor or folder remains."""
    told: list[str] = []
    agents = NodeMonitors(RunDir(tmp_path), monitor, 0.1, private=False, env={}, note=told.append)
    agents.watch([node, node])
    agents.watch([node])
    ((_, agent),) = agents._monitors.values()
    (row,) = until(lambda: ray.get(monitor.seen.remote("rank"))[:1])
    assert row["rss_bytes"] > 1 << 20
    assert (row["node"], row["rank"]) == (address(), 0)
    assert ray.get(agent.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())) == node
    until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])  # its monitor reserves none

    pid = kill(agent)
    again = until(lambda: pid_of(agent) not in (pid, 0) and time.time())
    until(lambda: any(row["at"] > again for row in ray.get(monitor.seen.remote("rank"))))
    kill(monitor)
    killed = time.time()

    def back() -> bool:
        try:
            return any(row["at"] > killed for row in ray.get(monitor.seen.remote("node")))
        except ray.exceptions.RayActorError:
            return False

    until(back)
    out, _ = rank.communicate("\n")
    assert int(out) > row["step"]
    assert rank.returncode == 0
    agents.close()
    until(lambda: gone(agent))  # it may answer once more before it ends
    assert not mailbox.folder(str(tmp_path)).exists()
    note = Gpus().note()  # of this machine
    until(lambda: len(told) == (note is not None))
    assert told == ([f"{address()}: {note}"] if note else [])


def test_a_monitor_that_does_not_answer(monitor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings continue, and the newest ones are kept, up to a limit; later they are sent at once, in order."""
    monkeypatch.setattr(node_module, "_KEPT", 4)
    ray.get(monitor.hold.remote(True))
    agent = NodeMonitor(str(tmp_path), address(), monitor, 0.02, str(tmp_path))
    until(lambda: len(agent._unsent) == 4)
    (oldest, *_) = agent._unsent
    until(lambda: agent._unsent[0] is not oldest)
    ray.get(monitor.hold.remote(False))
    rows = until(lambda: len(seen := ray.get(monitor.seen.remote("node"))) > 6 and seen)
    agent.close()
    times = [row["at"] for row in rows]
    assert times == sorted(set(times))
    assert oldest[0]["at"] not in times
    assert len(agent._unsent) <= 4


def test_what_was_read_last_arrives(monitor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node monitor sends its last readings, both those in flight and those not sent yet, before it closes: it may be ended
    then."""
    monkeypatch.setattr(node_module, "_ARRIVE_S", 60.0)
    ray.get(monitor.hold.remote(True))
    agent = NodeMonitor(str(tmp_path), address(), monitor, 0.02, str(tmp_path))
    until(lambda: agent._call is not None and len(agent._unsent) > 1)
    closing = threading.Thread(target=agent.close)
    closing.start()
    agent._thread.join()
    newest = agent._unsent[-1][0]["at"]
    ray.get(monitor.hold.remote(False))
    closing.join()
    assert ray.get(monitor.seen.remote("node"))[-1]["at"] == newest


def test_nodes_past_the_first_ones_have_a_aggregator(
    node: str, monitor: Any, rank: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are stored in segments of their own, also after a SIGKILL of the aggregator; the monitor gets the newest ones at
    the end."""
    monkeypatch.setattr(agents_module, "NODES", 1)
    monkeypatch.setattr(agents_module, "_CLOSE_S", 60.0)
    (tmp_path / ATTEMPTS).mkdir()  # of a run that has begun
    run = RunDir(tmp_path)
    agents = NodeMonitors(run, monitor, 0.1, private=False, env={}, note=lambda text: None)
    agents._numbers["10.9.9.9"] = 0  # another node is the first one
    agents.watch([node])
    ((_, aggregator),) = agents._aggregators.values()
    stored = until(lambda: (found := read_samples(run, ["at", "kind", "rank"]).to_pylist()) and found)
    pid = kill(aggregator)
    again = until(lambda: pid_of(aggregator) not in (pid, 0) and time.time())
    until(lambda: any(r["at"] > again and r["kind"] == "rank" for r in read_samples(run, ["at", "kind"]).to_pylist()))
    ((_, agent),) = agents._monitors.values()
    be_patient(agent, NodeMonitor.__module__)
    be_patient(aggregator, Aggregator.__module__)
    agents.close()
    rows = read_samples(run, ["at", "kind", "rank"]).to_pylist()
    assert rows[: len(stored)] == stored
    assert {row["kind"] for row in rows} >= {"node", "rank"}
    assert {path.name.split(".")[1] for path in (tmp_path / SAMPLES).iterdir()} == {"1"}
    assert ray.get(monitor.seen.remote("node")) == []
    newest = max(row["at"] for row in rows if row["kind"] == "node")
    assert any(row["at"] == newest for row in ray.get(monitor.exported.remote()))


def test_nodes_that_the_run_has_left(node: str, monitor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its monitors end, though the run continues. If the node returns, it is monitored again and its segments continue."""
    monkeypatch.setattr(agents_module, "NODES", 1)
    (tmp_path / ATTEMPTS).mkdir()  # of a run that has begun
    run = RunDir(tmp_path)
    told: list[str] = []
    agents = NodeMonitors(run, monitor, 0.05, private=False, env={}, note=told.append)
    agents._numbers["10.9.9.9"] = 0  # another node is the first one
    agents.watch([node])
    ((_, agent),) = agents._monitors.values()
    ((_, aggregator),) = agents._aggregators.values()
    until(lambda: read_samples(run, ["at"]).num_rows > 2)
    agents.watch([])
    until(lambda: gone(aggregator) and gone(agent))
    rows = read_samples(run, ["at"])["at"].to_pylist()
    agents.watch([node])
    until(lambda: read_samples(run, ["at"]).num_rows > len(rows) + 2)
    agents.close()
    assert read_samples(run, ["at"])["at"].to_pylist()[: len(rows)] == rows
    assert set(told) <= {f"{address()}: {Gpus().note()}"}


def test_on_a_private_ray_the_driver_does_it(node: str, monitor: Any, tmp_path: Path) -> None:
    """The driver writes the same rows without an actor; after `close` there are no more."""
    agents = NodeMonitors(RunDir(tmp_path), monitor, 0.05, private=True, env={}, note=lambda text: None)
    agents.watch([node])
    ((_, agent),) = agents._monitors.values()
    assert isinstance(agent, NodeMonitor)
    until(lambda: len(ray.get(monitor.seen.remote("node"))) > 1)
    agents.close()
    assert not agent._thread.is_alive()


def test_a_node_that_is_gone(node: str, monitor: Any, tmp_path: Path) -> None:
    """A node that is gone gets no node monitor; the others get theirs."""
    told: list[str] = []
    agents = NodeMonitors(RunDir(tmp_path), monitor, 60.0, private=True, env={}, note=told.append)
    agents.watch(["f" * 56, node])
    assert [place for place, _ in agents._monitors.values()] == [node]
    # Its id has changed: the node was lost and has returned.
    lost = agents._monitors[address()][1]
    agents._monitors[address()] = "f" * 56, lost
    agents.watch([node])
    assert [(place, agent is lost) for place, agent in agents._monitors.values()] == [(node, False)]
    lost.close()
    agents.close()
    assert not [text for text in told if "not watched: " in text]
