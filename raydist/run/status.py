"""state.json: the last state written by a run's monitor, with a heartbeat; and the run's status derived from it.

Runs in: the run's monitor, and every reader. Must not import ray or torch.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, get_args

from raydist.errors import StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.printable import printable
from raydist.records import Status
from raydist.redact import redact
from raydist.run.directory import SPEC, STATE, RunDir
from raydist.run.log import plain

VERSION = 1
_INTEGERS = frozenset({"step", "attempt", "world_size", "exchanged_bytes"})
_NUMBERS = frozenset(
    {"loss", "eval_loss", "tokens_per_second", "mfu", "expert_imbalance", "seconds_per_step", "data_share"}
)
LOST_AFTER_S = 30.0
"""A run with status "running" and a heartbeat older than this is lost."""


def this_process(pid: int | None = None) -> dict[str, Any]:
    """A driver's identity in state.json: {"host", "pid", "pids", "since"}.

    `pids` identifies the pid namespace; `since`, the Unix time of this call, distinguishes drivers with the same pid.
    """
    driver = {"host": socket.gethostname(), "pid": os.getpid() if pid is None else pid}
    return {**driver, "pids": _pid_namespace(), "since": time.time()}


def write_state(run: RunDir, state: dict[str, Any]) -> None:
    """Replaces state.json atomically. Raises StorageError."""
    run.storage.write(STATE, json.dumps({"v": VERSION, **plain(redact(state))}, allow_nan=False).encode())


def last_word(run: RunDir) -> dict[str, Any] | None:
    """The content of state.json, which may be outdated; None if no monitor has written it. Raises StorageError."""
    try:
        state = printable(parse_json(run.storage.read(STATE)))
        driver = state["driver"]
        facts = {
            "status": _known_status(state["status"]),
            "heartbeat_at": float(state["heartbeat_at"]),
            "driver": {**driver, "host": str(driver["host"]), "pid": int(driver["pid"])},
        }
        for name in _INTEGERS & state.keys():
            facts[name] = None if state[name] is None and name != "step" else int(state[name])
        for name in _NUMBERS & state.keys():
            facts[name] = None if state[name] is None else float(state[name])
        workers = [dict(worker) for worker in state.get("workers") or []]
        return {**state, **facts, "workers": workers}
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        raise StorageError(
            f"{run.uri}/{STATE} is damaged: {error}", "remove the file: the next start writes it"
        ) from error


def _known_status(status: str) -> str:
    if status not in get_args(Status):
        raise ValueError(f"no status {status!r:.40}")
    return status


def read_state(run: RunDir, now: float | None = None) -> dict[str, Any]:
    """The content of state.json, but with the current "status": a run whose driver has died is "lost".

    If no monitor has written yet: only {"status"}, "running" if spec.yaml was written in the last LOST_AFTER_S seconds.
    `now` is Unix time. Assumes that the hosts' clocks agree within a few seconds. Raises StorageError.
    """
    now = time.time() if now is None else now
    state = last_word(run)
    if state is None:
        mtime = run.storage.fs.get_file_info(run.storage.path(SPEC)).mtime
        fresh = mtime is not None and now - mtime.timestamp() < LOST_AFTER_S
        return {"status": "running" if fresh else "lost"}
    return {**state, "status": _status(state, now)}


def _status(state: dict[str, Any], now: float) -> Status:
    status: Status = state["status"]
    if status != "running":
        return status
    if now - state["heartbeat_at"] > LOST_AFTER_S:
        return "lost"
    return "lost" if gone(state["driver"]) else "running"


def gone(driver: dict[str, Any]) -> bool:
    """Whether a driver from `this_process` ran on this host and its process has exited. False if it ran on another host."""
    here = driver.get("pids") == _pid_namespace() and driver["host"] == socket.gethostname()
    return here and not _alive(int(driver["pid"]))


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def _pid_namespace() -> str:
    """Identifies the pid namespace of this process: containers may have the same host name but different processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
