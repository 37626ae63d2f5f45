"""A private Ray of one node, with the processes that a training run uses and no others.

Runs in: the driver. Subclasses `ray._private.node.Node`, on which `ray.init()` and `ray start` are built, because neither
lets one leave out the dashboard, the autoscaler's monitor and the log monitor, nor start the raylet before they are up.
It takes 0.8 s to a connected driver instead of 2.5 s, and 2 CPU seconds less (docs/adr/0003). Ray's internals may move:
tests/cluster/test_session.py fails when they do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._raylet import (  # type: ignore[attr-defined]  # compiled
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    Config,
    persist_port,
)

_REGISTER_S = 30.0
_NOT_SERVED = -1  # what Ray's minimal install writes for a port that nobody listens on


class _Head(Node):
    metrics = False

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Nothing here asks the dashboard: a private Ray has no jobs API, and Ray Train's cleaner is left out."""

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        # The raylet registers once its agents have written their ports, 0.5 s of imports later. Nobody here asks the
        # dashboard's agent, unless for metrics, and the other one gets its port from us: so the raylet need not wait for either.
        names = [DASHBOARD_AGENT_LISTEN_PORT_NAME]
        if not self.metrics:
            names += [METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME]
        for name in names:
            persist_port(self._session_dir, self._node_id, name, _NOT_SERVED)
        self._ray_params.runtime_env_agent_port = _free_port(self._node_ip_address)
        persist_port(
            self._session_dir, self._node_id, RUNTIME_ENV_AGENT_PORT_NAME, self._ray_params.runtime_env_agent_port
        )
        super().start_raylet(*args, **kwargs)
        # Node.__init__ asks next whether the node has registered, and if not, again a whole second later.
        client = self.get_gcs_client()
        deadline = time.monotonic() + _REGISTER_S
        while not client.get_all_node_info(timeout=_REGISTER_S) and time.monotonic() < deadline:
            time.sleep(0.005)


class _MeasuredHead(_Head):
    metrics = True


@contextlib.contextmanager
def running(temp_dir: Path, *, object_store_bytes: int, metrics_port: int | None = None) -> Iterator[Any]:
    """Start the processes, wait until the node has registered, and end them all with the block.

    `metrics_port`: where metrics are served, 0 for any free port; None: nowhere.

    They also die with the thread that calls this (the kernel's doing), so call it in the main thread.
    """
    Config.initialize("")  # the token that os.environ holds by now
    node = (_Head if metrics_port is None else _MeasuredHead)(
        RayParams(
            no_monitor=True,
            include_log_monitor=False,
            include_dashboard=False,
            dashboard_agent_listen_port=0,  # Ray's default is a fixed one: a cluster on this host may need it
            metrics_export_port=metrics_port,
            object_store_memory=object_store_bytes,
            temp_dir=str(temp_dir),
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
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        _sweep(temp_dir)


def _sweep(temp_dir: Path) -> None:
    """Kills what is left of a Ray whose raylet is gone: now and then an actor hangs in its own shutdown, for good.

    Every process of a Ray has files of its temporary folder open, but so may have a user's `tail -f`.
    """
    inside = f"{temp_dir}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            of_ray = _OF_RAY.search((process / "cmdline").read_bytes()) and process.name != str(os.getpid())
            if of_ray and any(os.readlink(fd).startswith(inside) for fd in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)


_OF_RAY = re.compile(rb"^ray::|/ray/")

# The same as `_sweep`, without Python. In rounds, for a raylet that is still alive starts a new worker for each that is gone.
_CLEANER = """
read _
for round in 1 2 3 4 5; do
  for process in /proc/[0-9]*; do
    ls -l "$process/fd" 2>/dev/null | grep -qF " -> $1/" && grep -qaE '^ray::|/ray/' "$process/cmdline" &&
      kill -9 "${process#/proc/}"
  done
  sleep 0.1
done
"""


@contextlib.contextmanager
def _killed_with_us(temp_dir: Path) -> Iterator[None]:
    """Should this process be killed within the block, then so are all of Ray's whose files are in that folder.

    The kernel takes the head and the raylet along. The raylet's two agents would go on for over a minute, trying to tell the
    head that the raylet is gone; and workers end once init has become their parent, which under a sub-reaper (a container's
    first process, systemd's user manager) it never does. A shell waits for the end of a pipe that only this process holds.
    """
    command = ["/bin/sh", "-c", _CLEANER, "raydist-cleaner", str(temp_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as cleaner:
        try:
            yield
        finally:
            cleaner.kill()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
