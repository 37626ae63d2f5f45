"""Opens the Ray that a run uses: a private one that starts and ends with the run, or an existing cluster.

Runs in: the driver. Imports ray only when a session is opened; never torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from raydist.checkpoint.memory_layout import SHM
from raydist.cluster import authentication, head_monitor, nodes, package, private_head, ray_output, ray_worker
from raydist.cluster.head_monitor import speaks_grpc
from raydist.errors import ClusterUnreachable, UserError
from raydist.launch.fork_server import start_zygote
from raydist.private_files import temporary_folder
from raydist.run.directory import default_storage

_OBJECT_STORE_BYTES = 128 * 1024 * 1024
_AGAIN_S = 1.0
"""Between two tries to reach a cluster that is starting."""
_RAYS = "r"
"""Ray's temporary folder in the session's."""
_LONGEST_BASE = 107 - len("/raydist-12345678/r/session_2026-01-02_03-04-05_678901_1234567/sockets/plasma_store")
_PRIVATE_RAY = {
    # The raylet connects to its object store while the store is still starting. If it is too early (half of the starts
    # here), it sleeps a whole second before it tries again. Same total timeout, in smaller steps.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # How long the GCS and the raylet may take to start: by default 30 s, which a busy machine may need.
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    # Ray gives its workers niceness 15, to protect its own processes. That costs 2% of a step on a fully loaded host.
    "RAY_worker_niceness": "0",
    # Ray's statistics about itself are for its dashboard and state API, which a private Ray does not have.
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # After 60 s without its GCS Ray would exit this process, without a message: cluster/private_head.py watches it instead.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
_NO_METRICS = {
    # The same for Prometheus metrics, unless the run exports to Prometheus.
    "RAY_enable_metrics_collection": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
_DRIVER = {
    # After 60 s without the head Ray would exit this process abruptly; cluster/head_monitor.py watches the head instead.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
_OF_OTHERS = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_ID", "RAY_RAYLET_PID")
"""What this process has where it runs in a job or a worker of another Ray."""
_LEFT_BY_RAY = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_ADDRESS")
_TOKEN = secrets.token_hex(32)  # for this process's private Ray: no other user of the host can run code in it


@dataclass(frozen=True, slots=True)
class Session:
    """An open connection to Ray.

    `address` is HOST:PORT of the cluster's head, also for a private Ray. `resources` are the totals of the cluster,
    such as {"CPU": 8.0, "GPU": 4.0}. `temp_dir` is Ray's temporary folder on this host. `job_id` is Ray's job id in hex.
    """

    address: str
    private: bool
    node_ip: str
    resources: dict[str, float]
    temp_dir: Path
    job_id: str
    processes: Mapping[str, int] = field(default_factory=dict)
    """Of a private Ray: "GCS", "raylet" and "zygote", from which Ray's workers are forked -> pid."""


def worker_environment(threads: int = 1) -> dict[str, str]:
    """Variables that each worker needs for speed; `threads`: threads of its math libraries.

    They must be set when the process starts, because OpenMP reads them then: pass them to `open_session(env=...)`.
    """
    return {
        # Ray sets OMP_NUM_THREADS to the CPUs of a task, but does not set it for actors without CPUs.
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


@contextlib.contextmanager
def open_session(
    address: str,
    *,
    env: Mapping[str, str],
    log_dir: Path,
    python_path: Sequence[str] = (),
    working_dir: Path | None = None,
    metrics_port: int | None = None,
    ranks: bool = False,
    wait_s: float = 0.0,
) -> Iterator[Session]:
    """Connects this process to Ray for the `with` block. Open it in the main thread, before you install signal handlers.

    `address`: "local" starts a private Ray on this host, independent of any other; all its processes end with the
    block, or when this process ends in any way. "auto" (or "") connects to RAY_ADDRESS (which `ray job submit` sets),
    else to the cluster that runs on this host. HOST:PORT connects to that cluster.

    `env` reaches every worker: a private Ray inherits it, a cluster gets it in the runtime_env. `python_path` is prepended to the
    workers' PYTHONPATH; a private Ray's also find modules in the working directory. `working_dir` is shipped to a cluster's nodes
    (a Ray job has its own). `metrics_port`: port for a private Ray's Prometheus metrics, 0 for any free port; None: no metrics.
    `ranks`: whether models will be trained; a private Ray then starts a zygote for the ranks (raydist/launch/zygote.py).

    Ray's output goes to files in `log_dir` (driver.log; a private Ray's logs to ray/).
    Raises UserError within seconds if there is no such cluster; one that does not answer is asked again for `wait_s` seconds.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    _disable_auto_init()
    variables = dict(env)
    if python_path:
        inherited = os.environ.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join([*python_path, *([inherited] if inherited else [])])
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_output.into_file(log_dir / "driver.log"))
        if address == "local":
            yield stack.enter_context(_private(variables, log_dir, metrics_port, env if ranks else None))
        else:
            found = _within(wait_s, lambda: _attached(_find_cluster(address), variables, working_dir))
            yield stack.enter_context(found)


@contextlib.contextmanager
def _within(wait_s: float, attach: Callable[[], contextlib.AbstractContextManager[Session]]) -> Iterator[Session]:
    """The session of `attach`, which is tried again for so many seconds while the cluster cannot be reached: it is starting."""
    until = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                session = stack.enter_context(attach())
                break
            except ClusterUnreachable:
                if time.monotonic() >= until:
                    raise
            time.sleep(_AGAIN_S)
        yield session


def _disable_auto_init() -> None:
    """Stops Ray's calls from connecting automatically.

    Ray Data leaves threads behind that go on polling metrics after the session. Each poll would connect this process
    again, to the cluster that has just ended; and Ray's client exits a process that has lost its raylet.
    """
    from raydist.cluster.ray_private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


@contextlib.contextmanager
def _private(
    env: Mapping[str, str], log_dir: Path, metrics_port: int | None, ranks: Mapping[str, str] | None
) -> Iterator[Session]:
    if not SHM.is_dir():
        raise UserError(
            f"{SHM} does not exist here, and Ray keeps its objects there",
            f"mount it: mount -t tmpfs tmpfs {SHM} (docker and compose have it by default; --shm-size is its size)",
        )
    no_metrics = _NO_METRICS if metrics_port is None else {}
    variables = {**_PRIVATE_RAY, **no_metrics, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN, **env}
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(_temp_dir())
        temp = own / _RAYS
        stack.callback(_keep_logs, temp, log_dir / "ray")
        if ranks is not None:
            zygote = start_zygote(own, ranks)  # first, because its imports take longest
            stack.callback(zygote.close)
            variables |= zygote.variables
        stack.callback(_back_to_earlier_token)  # runs after os.environ is restored
        # An outer cluster's RAY_ADDRESS would take precedence over ours wherever Ray looks for "the" cluster.
        stack.enter_context(_environment(variables, without=_OF_OTHERS))
        workers = ray_worker.start_zygote(own, env)
        stack.callback(workers.close)
        stack.enter_context(_environment(workers.variables))
        import ray

        authentication.reread()
        _warm_up()
        from raydist.cluster import local_ray

        started = local_ray.running(temp, object_store_bytes=_OBJECT_STORE_BYTES, metrics_port=metrics_port)
        node = stack.enter_context(started)
        job = local_ray.job_without_folders()
        context = ray.init(address=node.address, log_to_driver=False, configure_logging=False, job_config=job)
        processes = local_ray.pids(node)
        stack.callback(_leave_private, processes)
        os.environ["RAY_ADDRESS"] = node.address
        opened = _session(context.address_info, private=True, temp=temp)
        yield replace(opened, processes={**processes, private_head.ZYGOTE: workers.pid})


def _back_to_earlier_token() -> None:
    """Not where the head is lost: Ray's client is still connected, and one of its threads would print the head's refusal."""
    if not head_monitor.lost:
        authentication.reread()


def _leave_private(processes: Mapping[str, int]) -> None:
    """Disconnects, unless a process that would have to answer has exited or been stopped."""
    if not head_monitor.lost and all(map(private_head.well, processes.values())):
        _shut_down()
    else:
        head_monitor.lost = True


def _warm_up() -> None:
    """Imports Ray Train in a thread while Ray's processes start: the main thread mostly waits for them."""
    # It registers fork hooks in pairs. If the thread did so while this one forks, only the second of a pair would run.
    import_module("concurrent.futures.thread")
    threading.Thread(target=import_module, args=("raydist.cluster.run.ray_train_adapter",), daemon=True).start()


@contextlib.contextmanager
def _attached(address: str, env: Mapping[str, str], working_dir: Path | None) -> Iterator[Session]:
    # PlacementGroupCleaner, an actor of Ray Train, connects to "the" cluster of its host: RAY_ADDRESS names it.
    runtime_env: dict[str, Any] = {"env_vars": {**env, "RAY_ADDRESS": address}}
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    # Inside `ray job submit` both the job and we set variables: ours take precedence, the job's working_dir stays.
    variables = {**_DRIVER, "RAY_ADDRESS": address, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(variables))
        import ray

        stack.enter_context(_environment(authentication.check_head(address)))
        authentication.reread()
        with temporary_folder() as folder:
            if working_dir is not None and not in_job:
                archive = folder / "package.zip"
                package.select(working_dir, [default_storage()]).write(archive, package.HEAD_LIMIT)
                runtime_env["working_dir"] = str(archive)
            try:
                context = ray.init(
                    address=address, log_to_driver=False, configure_logging=False, runtime_env=runtime_env
                )
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                ray.shutdown()
                raise _refused(address, " ".join(str(error).split())) from error
        try:
            info = context.address_info
            yield _session(info, private=False, temp=Path(info["session_dir"]).parent)
        finally:
            if not head_monitor.lost and head_monitor.answers(address) and not nodes.head_replaced():
                _shut_down()
            else:
                head_monitor.lost = True


def _session(info: Mapping[str, Any], *, private: bool, temp: Path) -> Session:
    import ray

    return Session(
        address=info["gcs_address"],
        private=private,
        node_ip=info["node_ip_address"],
        resources={k: float(v) for k, v in ray.cluster_resources().items()},
        temp_dir=temp,
        job_id=ray.get_runtime_context().get_job_id(),
    )


def _find_cluster(address: str) -> str:
    """HOST:PORT of the cluster that `address` stands for. Raises UserError if no Ray head answers there."""
    found = address
    if address in ("", "auto"):
        found = os.environ.get("RAY_ADDRESS", "")
        if found in ("", "auto"):
            from raydist.cluster.ray_private import find_gcs_addresses

            running = sorted(find_gcs_addresses())
            if not running:
                raise UserError(
                    "no Ray cluster runs on this host, and RAY_ADDRESS is not set",
                    "start one with `ray start --head`, or use --address local or --address HOST:PORT",
                )
            if len(running) > 1:
                raise UserError(
                    f"several Ray clusters run on this host: {', '.join(running)}",
                    "choose one with --address HOST:PORT",
                )
            found = running[0]
    scheme, _, place = found.rpartition("://")
    host, _, port = place.rpartition(":")
    if scheme in ("http", "https"):
        raise UserError(
            f"{found} is the address of a dashboard, not of a cluster's head",
            "use HOST:PORT, as `ray start --head` prints it (port 6379 by default); for http://HOST:8265 use `raydist submit`",
        )
    if scheme or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f'"{address}" is not the address of a Ray cluster', "use local, auto or HOST:PORT (port 6379 by default)"
        )
    try:
        if not speaks_grpc(host.strip("[]"), int(port)):
            raise _unreachable(found, "the server there is not a Ray head")
    except OSError as error:
        raise _unreachable(found, error.strerror or str(error)) from None
    return found


def _unreachable(address: str, why: str) -> ClusterUnreachable:
    return ClusterUnreachable(
        f"cannot connect to the Ray cluster at {address}: {why}",
        "check the address, and that the cluster is running: `ray status --address HOST:PORT`",
    )


def _refused(address: str, why: str) -> UserError:
    """The error for a head that answers and accepts the token, when this process still cannot become a driver of the cluster."""
    if "ersion mismatch" in why:
        return UserError(
            f"cannot connect to the Ray cluster at {address}: {why}",
            "install those versions of Ray and Python here, or use `raydist submit`, which trains with the cluster's versions",
        )
    return _unreachable(address, why)


@contextlib.contextmanager
def _temp_dir() -> Iterator[Path]:
    """A new directory, mode 0700. Its path is short: those of the sockets in it may have at most 107 bytes.

    Ray makes its own temporary folder writable for all users, and its sockets ask for no token: it gets a folder in this one.
    """
    base = Path(tempfile.gettempdir())
    with temporary_folder(base if len(str(base)) <= _LONGEST_BASE else Path("/tmp")) as temp:
        (temp / _RAYS).mkdir()
        yield temp


def _keep_logs(temp: Path, kept: Path) -> None:
    """Copies Ray's logs, which it makes readable for all users, with the permissions of the folder that they go to."""
    for logs in temp.glob("session_2*/logs"):
        shutil.copytree(logs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
        allowed = kept.parent.stat().st_mode & 0o777
        for path in (kept, *kept.rglob("*")):
            path.chmod(allowed if path.is_dir() else allowed & 0o666)


@contextlib.contextmanager
def _environment(env: Mapping[str, str], without: Sequence[str] = ()) -> Iterator[None]:
    """Sets `env` in os.environ and removes the names of `without`, for the block."""
    saved = {k: os.environ.get(k) for k in (*env, *without, *_LEFT_BY_RAY)}
    os.environ.update(env)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in saved:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in saved.items() if value is not None})


def _shut_down() -> None:
    """Disconnects. Messages that Ray has buffered, and prints now, go to its log."""
    import ray

    if not head_monitor.quiet():
        return
    held = io.StringIO()
    with contextlib.redirect_stdout(held):
        ray.shutdown()
    if held.getvalue():
        logging.getLogger("ray").warning(held.getvalue())
