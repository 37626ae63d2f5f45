"""Who drives a run, or a sweep: a lease in its folder, renewed while the driver lives, gone with it. A second driver is refused.

Runs in: the driver. Must not import ray or torch.

    RUN/drivers/000007.json    {"driver": {host, pid, ...}, "key", "renewed_at", "ended"}
                000007.stop    somebody has asked that driver to end the run: {"host", "pid", "at"} (`raydist stop`)

The newest number holds the run. A driver takes the next one if that has ended, was not renewed for LOST_AFTER_S, or its process is
gone from this host. Of many that take the same number on a file system exactly one gets it. An object store keeps the word of the
last one that wrote, so there each reads again after `settle_s` whether it is its own. Whoever finds another's word at a renewal has
lost the run. That may come late, as with all leases; what then keeps the run one line of steps is the fence
(run.directory.begin_attempt).

A stop carries its driver's number, so that it is for that driver alone: over all its attempts, and not for the next driver.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from raydist.errors import Fenced, StorageError, UsageError
from raydist.run.directory import DRIVERS, Folder, RunDir
from raydist.run.status import LOST_AFTER_S, gone, this_process

RENEW_S = 5.0
SETTLE_S = 2.0
STOP_LOOK_S = 2.0
"""How often a driver looks whether it was asked to end."""
_LOOK_S = 0.5
_STOP = ".stop"


@dataclass(frozen=True, slots=True)
class Driver:
    """The newest driver of a run, or of a sweep, as its lease tells it. Times are Unix seconds.

    `alive`: it has not ended, was renewed within LOST_AFTER_S, and its process is not gone from this host.
    """

    number: int
    host: str
    pid: int
    since: float
    renewed_at: float
    ended: bool
    alive: bool

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class DriverLease:
    """Taken by making it, renewed by a thread, given back by `release` or at the end of a `with` block.

    Raises UsageError if another driver still holds the run after `wait_s`, StorageError where the folder cannot be written.
    """

    def __init__(self, run: RunDir, renew_s: float = RENEW_S, settle_s: float = SETTLE_S, wait_s: float = 0.0) -> None:
        self._run, self._renew_s = run, renew_s
        self._body = {"driver": this_process(), "key": uuid.uuid4().hex}
        self._lost: Fenced | None = None
        self._stop: str | None = None
        deadline = time.monotonic() + wait_s
        number, holder = self._newest()
        while holder is not None and _alive(holder):
            if time.monotonic() > deadline:
                raise self._refused(holder)
            time.sleep(_LOOK_S)  # it ends in a process of its own, or is missed
            number, holder = self._newest()
        self._number = number + 1
        won = run.storage.write_new(self._name(self._number), self._dumps())
        if won and run.storage.local is None:
            time.sleep(settle_s)
        number, holder = self._newest()
        if not won or not self._own(number, holder):
            raise self._refused(holder or {})
        for old in run.storage.files(DRIVERS):
            if old < self._name(self._number):
                run.storage.delete(old)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="raydist-lease", daemon=True)
        self._thread.start()

    def lost(self) -> Fenced | None:
        """The error to end with, if another driver has taken the run over; no look at storage."""
        return self._lost

    def asked_to_stop(self) -> str | None:
        """Who has asked this driver to end the run, in words; None if nobody has. No look at storage."""
        return self._stop

    def release(self) -> None:
        """Lets the next driver start at once. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(self._renew_s)
        if self._lost is None and not self._thread.is_alive():
            with suppress(StorageError):  # it expires by itself
                self._run.storage.write(self._name(self._number), self._dumps(ended=True))

    def __enter__(self) -> DriverLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _renew(self) -> None:
        due = time.monotonic() + self._renew_s
        while not self._over.wait(min(STOP_LOOK_S, max(0.0, due - time.monotonic()))):
            self._look_for_stop()
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._renew_s
            with suppress(StorageError):  # as long as storage refuses, nobody else can take the run either
                number, holder = self._newest()
                if number > self._number or (number == self._number and not self._own(number, holder)):
                    driver = (holder or {}).get("driver", {})
                    self._lost = Fenced(
                        f"run {self._run.name}: another driver has taken over, process {driver.get('pid', '?')} on "
                        f"{driver.get('host', '?')}",
                        f"this one had not renewed its lease for {LOST_AFTER_S:g} s, and ends",
                    )
                    return
                if number:  # none at all: the folder is not there, and comes back or does not
                    self._run.storage.write(self._name(self._number), self._dumps())

    def _look_for_stop(self) -> None:
        if self._stop is not None:
            return
        with suppress(StorageError, FileNotFoundError):
            told = self._run.storage.read(_stop_name(self._number))
            self._stop = "somebody"
            with suppress(ValueError, KeyError, TypeError):
                who = json.loads(told)
                self._stop = f"process {who['pid']} on {who['host']}"

    def _newest(self) -> tuple[int, dict[str, Any] | None]:
        return _newest(self._run)

    def _own(self, number: int, holder: dict[str, Any] | None) -> bool:
        return number == self._number and holder is not None and holder["key"] == self._body["key"]

    def _dumps(self, ended: bool = False) -> bytes:
        return json.dumps({**self._body, "renewed_at": time.time(), "ended": ended}).encode()

    def _refused(self, holder: dict[str, Any]) -> UsageError:
        driver = holder.get("driver", {})
        return UsageError(
            f"run {self._run.name} is being trained already, by process {driver.get('pid', '?')} on {driver.get('host', '?')}",
            f"end that one first, or give this one another --name; a driver that is gone is missed after {LOST_AFTER_S:g} s "
            f"(folder: {self._run.uri})",
        )

    @staticmethod
    def _name(number: int) -> str:
        return f"{DRIVERS}/{number:06d}.json"


def driven_since(folder: Folder, now: float | None = None) -> float | None:
    """Since when the driver that has that run, or sweep, has it, in Unix time; None if at `now` nobody has.

    A driver that died on another host is missed after LOST_AFTER_S. Raises StorageError.
    """
    _, holder = _newest(folder)
    return float(holder["driver"]["since"]) if holder is not None and _alive(holder, now) else None


def newest_driver(folder: Folder, now: float | None = None) -> Driver | None:
    """The newest driver of that run, or sweep, as it is at `now`; None if there was none. Raises StorageError."""
    number, holder = _newest(folder)
    if holder is None:
        return None
    who = holder["driver"]
    return Driver(
        number,
        str(who["host"]),
        int(who["pid"]),
        float(who["since"]),
        float(holder["renewed_at"]),
        bool(holder["ended"]),
        _alive(holder, now),
    )


def ask_stop(folder: Folder, driver: Driver) -> bool:
    """Asks that driver to end as Ctrl-C does; it looks every STOP_LOOK_S. Whether nobody had asked before. Raises StorageError."""
    who = this_process()
    body = {"host": who["host"], "pid": who["pid"], "at": time.time()}
    return folder.storage.write_new(_stop_name(driver.number), json.dumps(body).encode())


def _stop_name(number: int) -> str:
    return f"{DRIVERS}/{number:06d}{_STOP}"


def _newest(folder: Folder) -> tuple[int, dict[str, Any] | None]:
    """The highest number, 0 if there is none, and what stands there; None if that cannot be read."""
    name = max((n for n in folder.storage.files(DRIVERS) if n.endswith(".json")), default=None)
    if name is None:
        return 0, None
    holder: dict[str, Any] | None = None
    with suppress(FileNotFoundError, ValueError):
        holder = json.loads(folder.storage.read(name))
    return int(name.rsplit("/", 1)[-1].removesuffix(".json")), holder


def _alive(holder: dict[str, Any], now: float | None = None) -> bool:
    now = time.time() if now is None else now
    return not holder["ended"] and now - holder["renewed_at"] <= LOST_AFTER_S and not gone(holder["driver"])
