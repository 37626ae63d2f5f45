"""A private Ray of one node that starts only the processes that a training run uses.

Runs in: the driver. Subclasses Ray's `Node`, on which `ray.init()` and `ray start` are built: neither can leave out the dashboard,
the autoscaler's monitor and the log monitor, or start the raylet before they are up. The raylet's agents start when they are asked
for (ray_agent.py), and its workers are forked from a process that has imported Ray (ray_worker.py). docs/adr/0003 has what each of
these saves. Ray may move `Node` (ray_private.py): tests/cluster/test_session.py runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from raydist.cluster import head_monitor, ray_agent, ray_worker
from raydist.cluster.ray_private import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    Config,
    Node,
    RayParams,
    ResourceIsolationConfig,
    persist_port,
    services,
    utils,
)

_REGISTER_S = 30.0
_NOT_SERVED = -1  # what Ray's minimal install writes for a port without a listener


RUNTIME_ENV_AGENT, DASHBOARD_AGENT = "--runtime_env_agent_command=", "--dashboard_agent_command="
"""The raylet's options with the commands of its agents."""


class _Head(Node):
    metrics = False

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Starts nothing. No one needs the dashboard: a private Ray has no Jobs API, and Ray Train's cleaner is left out."""

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        agents = (RUNTIME_ENV_AGENT,) if self.metrics else (RUNTIME_ENV_AGENT, DASHBOARD_AGENT)
        with prepared_agents(self, on_demand=agents, metrics=self.metrics):
            super().start_raylet(*args, **kwargs)
        # Node.__init__ then checks whether the node has registered; if not, it checks again only after a second.
        client = self.get_gcs_client()
        deadline = time.monotonic() + _REGISTER_S
        while not client.get_all_node_info(timeout=_REGISTER_S) and time.monotonic() < deadline:
            time.sleep(0.005)


class _MeasuredHead(_Head):
    metrics = True


@contextlib.contextmanager
def prepared_agents(node: Any, *, on_demand: Collection[str], metrics: bool) -> Iterator[None]:
    """Within the block the node's raylet is started: it does not wait for its agents, and starts those of `on_demand` later.

    By itself it registers only after its agents have written their ports, which takes 0.5 s of imports, and ends if that takes
    30 s. Only metrics need the dashboard's agent, and the runtime-env agent gets its port from us.
    """
    names = [DASHBOARD_AGENT_LISTEN_PORT_NAME]
    if not metrics:
        names += [METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME]
    for name in names:
        persist_port(node._session_dir, node._node_id, name, _NOT_SERVED)
    port = node._ray_params.runtime_env_agent_port = _free_port(node._node_ip_address)
    persist_port(node._session_dir, node._node_id, RUNTIME_ENV_AGENT_PORT_NAME, port)
    ports = {RUNTIME_ENV_AGENT: port, DASHBOARD_AGENT: 0}
    with _on_demand(node._node_ip_address, {agent: ports[agent] for agent in on_demand}):
        yield


@contextlib.contextmanager
def _on_demand(host: str, agents: Mapping[str, int]) -> Iterator[None]:
    """Within the block a raylet is started with ray_agent.py in place of its agents. `agents`: the raylet's option with the agent's
    command -> the agent's port."""
    start, dependency_error = services.start_ray_process, utils.get_dashboard_dependency_error

    def starting(command: list[str], *args: Any, **options: Any) -> Any:
        for number, text in enumerate(command):
            for option, port in agents.items():
                if text.startswith(option):
                    stand_in = [sys.executable, "-I", "-S", ray_agent.__file__, host, str(port)]
                    command[number] = f"{option}{subprocess.list2cmdline(stand_in)} {text.removeprefix(option)}"
        return start(command, *args, **options)

    services.start_ray_process = starting
    if DASHBOARD_AGENT in agents:
        # To choose an option of the dashboard's agent, it would import what the dashboard needs: 0.3 s of CPU time.
        utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        services.start_ray_process, utils.get_dashboard_dependency_error = start, dependency_error


@contextlib.contextmanager
def running(temp_dir: Path, *, object_store_bytes: int, metrics_port: int | None = None) -> Iterator[Any]:
    """Starts the processes, waits until the node has registered, and ends them all with the block.

    `metrics_port`: port for Prometheus metrics, 0 for any free port; None: no metrics.

    The kernel kills them when the calling thread ends (PR_SET_PDEATHSIG), so call it in the main thread.
    """
    Config.initialize("")  # reads the token that os.environ has now
    with _own_process_groups():
        node = (_Head if metrics_port is None else _MeasuredHead)(
            RayParams(
                no_monitor=True,
                include_log_monitor=False,
                include_dashboard=False,
                dashboard_agent_listen_port=0,  # Ray's default is a fixed port, which a cluster on this host may need
                metrics_export_port=metrics_port,
                object_store_memory=object_store_bytes,
                temp_dir=str(temp_dir),
                setup_worker_path=ray_worker.__file__,
                resource_isolation_config=ResourceIsolationConfig(enable_resource_isolation=False),
                _system_config={},
            ),
            head=True,
            shutdown_at_exit=False,
            spawn_reaper=True,
            ray_init_cluster=True,
        )
    try:
        with _killed_with_us(temp_dir):
            yield node
    finally:
        # Where the head is lost, this process leaves at once, and they are killed then: without its raylet Ray's client would
        # end this process with exit code 1, before the cause is reported.
        if not head_monitor.lost:
            try:
                node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
            finally:
                _sweep(temp_dir)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Within the block each of Ray's processes gets a process group: a signal to that of this process (`timeout 1h raydist train`,
    the shell's `kill %1`) is for this process alone, which then needs them to end the run with a checkpoint."""
    fate = utils.set_kill_on_parent_death_linux

    def apart() -> None:
        os.setpgid(0, 0)
        fate()

    utils.set_kill_on_parent_death_linux = apart
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = fate


def pids(node: Any) -> dict[str, int]:
    """ "GCS" and "raylet" -> the pid of its process, a child of this one."""
    running = node.all_processes
    return {"GCS": running["gcs_server"][0].process.pid, "raylet": running["raylet"][0].process.pid}


def _sweep(temp_dir: Path) -> None:
    """Kills the remaining processes of a Ray whose raylet is gone: sometimes an actor hangs forever in its own shutdown.

    Every process of a Ray has files of its temporary folder open. So may a user's `tail -f`: the command line must match, too.
    """
    inside = f"{temp_dir}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            of_ray = _OF_RAY.search((process / "cmdline").read_bytes()) and process.name != str(os.getpid())
            if of_ray and any(_target(fd).startswith(inside) for fd in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)


def _target(fd: Path) -> str:
    """What a descriptor of a process names; "" if it has just been closed."""
    try:
        return os.readlink(fd)
    except OSError:
        return ""


_OF_RAY = re.compile(rb"^ray::|/ray/|raydist.cluster.ray_worker")

# The same as `_sweep`, in shell. It runs several rounds: a raylet that is still alive replaces each killed worker.
_CLEANER = """
read _
for round in 1 2 3 4 5; do
  for line in $(grep -slaE '^ray::|/ray/|raydist.cluster.ray_worker' /proc/[0-9]*/cmdline); do
    process="${line%/cmdline}"
    ls -l "$process/fd" 2>/dev/null | grep -qF " -> $1/" && kill -9 "${process#/proc/}"
  done
  sleep 0.1
done
"""


_CLEANERS: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def _killed_with_us(temp_dir: Path) -> Iterator[None]:
    """If this process ends within the block, or with its head lost, all Ray processes with open files in that folder are killed.

    The kernel kills the head and the raylet. But the raylet's two agents go on for over a minute, trying to report to the
    head that the raylet is gone. Workers exit once init becomes their parent, and under a sub-reaper (a container's first
    process, systemd's user manager) it never does. So a shell waits for EOF on a pipe whose other end only this process holds.
    """
    command = ["/bin/sh", "-c", _CLEANER, "raydist-cleaner", str(temp_dir)]
    cleaner = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        if head_monitor.lost:
            _CLEANERS.append(cleaner)  # its pipe stays open until this process ends
        else:
            with cleaner:
                cleaner.kill()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
