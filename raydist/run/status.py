"""state.json: the last state written by a run's monitor, with a heartbeat; and the run's status derived from it.

Runs in: the run's monitor, and every reader. Must not import ray or torch.
"""

from __future__ import annotations

import json
import time
from typing import Any, get_args

from raydist.errors import StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.printable import printable
from raydist.records import Status
from raydist.redact import redact
from raydist.run.directory import SPEC, STATE, RunDir
from raydist.run.driver_process import LOST_AFTER_S, gone, recent
from raydist.run.lease import status_by_lease
from raydist.run.log import plain

VERSION = 1
_INTEGERS = frozenset({"step", "attempt", "world_size", "exchanged_bytes"})
_NUMBERS = frozenset(
    {"loss", "eval_loss", "tokens_per_second", "mfu", "expert_imbalance", "seconds_per_step", "data_share"}
)


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

    If no monitor has written yet: only {"status"}. `now` is Unix time. Assumes that the hosts' clocks agree within a few seconds.
    Raises StorageError.
    """
    now = time.time() if now is None else now
    state = last_word(run)
    status = _status(state, now) if state is not None else "lost"
    if status == "lost":  # as far as its monitor tells: a driver has none while it starts
        status = status_by_lease(run, now) or ("running" if state is None and _is_new(run, now) else "lost")
    return {**(state or {}), "status": status}


def _is_new(run: RunDir, now: float) -> bool:
    """Whether its spec was written in the last LOST_AFTER_S seconds."""
    mtime = run.storage.fs.get_file_info(run.storage.path(SPEC)).mtime
    return mtime is not None and now - mtime.timestamp() < LOST_AFTER_S


def _status(state: dict[str, Any], now: float) -> Status:
    status: Status = state["status"]
    if status != "running":
        return status
    return "running" if recent(state["heartbeat_at"], now) and not gone(state["driver"]) else "lost"
