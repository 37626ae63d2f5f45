"""The driver's lease of a run or a sweep: a file in its folder, renewed while the driver runs. A second driver is refused.

Runs in: the driver. Must not import ray or torch.

    RUN/drivers/000007.json    {"driver": {host, pid, ...}, "key", "renewed_at", "ended", "interrupted"}
                000007.stop    a request to that driver to end the run: {"host", "pid", "at", "by"}

The newest number holds the run. A driver takes the next number if that driver has ended, has not renewed for LOST_AFTER_S, or its
process does not exist any more on this host. If several drivers take the same number, exactly one gets it where storage creates a
file once (Storage.creates_once). Other object stores keep the last write, so each driver reads the file again after `settle_s` to
check that it is its own. A driver that finds another driver's file at a renewal has lost the run. As with all leases, it may
notice that late; until then the fence (run.directory.begin_attempt) protects the run's checkpoints.

A stop request carries its driver's number, so it is for that driver only: for all its attempts, but not for the next driver.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raydist.errors import SIGNALLED, Fenced, StorageError, UsageError
from raydist.parsing import DAMAGED, parse_json
from raydist.printable import printable
from raydist.records import Status
from raydist.run.directory import DRIVERS, Folder, RunDir
from raydist.run.driver_process import LOST_AFTER_S, gone, recent, this_process
from raydist.storage import NO_FOLDER

RENEW_S = 5.0
SETTLE_S = 2.0
STOP_LOOK_S = 2.0
"""How often a driver checks for a stop request."""
_LOOK_S = 0.5
_STOP = ".stop"
_LEASE = re.compile(rf"{DRIVERS}/(\d+)\.json")
SKEW_S = 5.0
"""How far the clocks of two hosts may differ."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The newest driver of a run or a sweep, from its lease. Times are Unix seconds.

    `alive`: it has not ended, has renewed within LOST_AFTER_S of now, and its process has not exited, as far as this host can tell.
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
    """Acquired at construction, renewed by a thread, released by `release` or at the end of a `with` block.

    Raises UsageError if another driver still holds the run after `wait_s`, StorageError if the folder cannot be written. A lease
    that is damaged, or of a clock that is ahead, is not evidence of a live driver: it is free if it is not renewed for `watch_s`.
    """

    def __init__(
        self,
        run: RunDir,
        renew_s: float = RENEW_S,
        settle_s: float = SETTLE_S,
        wait_s: float = 0.0,
        watch_s: float = LOST_AFTER_S,
    ) -> None:
        self._run, self._renew_s = run, renew_s
        self._body = {"driver": this_process(), "key": uuid.uuid4().hex}
        self._lost: Fenced | None = None
        self._stop: str | None = None
        deadline = time.monotonic() + wait_s
        number, holder = self._newest()
        while self._held(number, holder, watch_s):
            if time.monotonic() > deadline:
                raise self._refused(holder or {})
            time.sleep(_LOOK_S)  # until that driver ends, or its lease expires
            number, holder = self._newest()
        self._number = number + 1
        try:
            won = run.storage.write_new(self._name(self._number), self._dumps())
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_FOLDER:
                raise UsageError(
                    f"run {run.name} cannot be stored: {error.message}", "give another --storage"
                ) from error
            raise
        if won and not run.storage.creates_once():
            time.sleep(settle_s)
        number, holder = self._newest()
        if not won or not self._own(number, holder):
            raise self._refused(holder or {})
        run.expect()
        for old in run.storage.files(DRIVERS):
            if old < self._name(self._number):
                run.storage.delete(old)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="raydist-lease", daemon=True)
        self._thread.start()

    def lost(self) -> Fenced | None:
        """The error to end with, if another driver has taken over the run; does not access storage."""
        return self._lost

    def asked_to_stop(self) -> str | None:
        """The process that has asked this driver to end the run, as text; None if there is no request. Does not access storage."""
        return self._stop

    def release(self, interrupted: bool = False) -> None:
        """Releases the lease, so that the next driver can start at once. A second call does nothing. `interrupted`: by a signal."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(self._renew_s)
        if self._lost is None and not self._thread.is_alive():
            with suppress(StorageError):  # the lease expires anyway
                self._run.storage.write(self._name(self._number), self._dumps(ended=True, interrupted=interrupted))

    def __enter__(self) -> DriverLease:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        signalled = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) in SIGNALLED
        self.release(interrupted=signalled)

    def _renew(self) -> None:
        due = time.monotonic() + self._renew_s
        while not self._over.wait(min(STOP_LOOK_S, max(0.0, due - time.monotonic()))):
            self._look_for_stop()
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._renew_s
            with suppress(StorageError):  # while storage refuses, no other driver can take the run either
                number, holder = self._newest()
                taken = holder is not None and holder["key"] != self._body["key"]
                if number > self._number or (number == self._number and taken):
                    driver = (holder or {}).get("driver", {})
                    self._lost = Fenced(
                        f"run {self._run.name}: another driver has taken over, process {driver.get('pid', '?')} on "
                        f"{driver.get('host', '?')}",
                        f"this driver had not renewed its lease for {LOST_AFTER_S:g} s, and stops",
                    )
                    return
                if number:  # 0: the folder is missing, perhaps only for a time
                    self._run.storage.write(self._name(self._number), self._dumps())

    def _look_for_stop(self) -> None:
        if self._stop is not None:
            return
        with suppress(StorageError, FileNotFoundError):
            data = self._run.storage.read(_stop_name(self._number))
            self._stop = "unknown"
            with suppress(ValueError, KeyError, TypeError):
                who = printable(parse_json(data))
                self._stop = f"{who.get('by', '`raydist stop`')}, process {who['pid']} on {who['host']}"

    def _newest(self) -> tuple[int, dict[str, Any] | None]:
        return _newest(self._run)

    def _held(self, number: int, holder: dict[str, Any] | None, watch_s: float) -> bool:
        """Whether the newest lease is another driver's, who is alive. Watches one that does not tell, for up to `watch_s`."""
        if number == 0 or (holder is not None and not _ahead(holder)):
            return holder is not None and _alive(holder)
        if holder is not None and (holder["ended"] or gone(holder["driver"])):
            return False
        before, until = _raw(self._run, number), time.monotonic() + watch_s
        while time.monotonic() < until:
            time.sleep(min(_LOOK_S, watch_s))
            if _raw(self._run, number) != before:
                return True
        return False

    def _own(self, number: int, holder: dict[str, Any] | None) -> bool:
        return number == self._number and holder is not None and holder["key"] == self._body["key"]

    def _dumps(self, ended: bool = False, interrupted: bool = False) -> bytes:
        state = {"renewed_at": time.time(), "ended": ended, "interrupted": interrupted}
        return json.dumps({**self._body, **state}).encode()

    def _refused(self, holder: dict[str, Any]) -> UsageError:
        driver = holder.get("driver", {})
        return UsageError(
            f"run {self._run.name} is being trained already, by process {driver.get('pid', '?')} on {driver.get('host', '?')}",
            f"end that one first, or give this one another --name; a driver that died is detected after {LOST_AFTER_S:g} s "
            f"(folder: {self._run.uri})",
        )

    @staticmethod
    def _name(number: int) -> str:
        return f"{DRIVERS}/{number:06d}.json"


def driven_since(folder: Folder, now: float | None = None) -> float | None:
    """Unix time since which the current driver has that run or sweep; None if it has none at `now`.

    A driver that died on another host is detected after LOST_AFTER_S. Raises StorageError.
    """
    _, holder = _newest(folder)
    return float(holder["driver"]["since"]) if holder is not None and _alive(holder, now) else None


def newest_driver(folder: Folder, now: float | None = None) -> Driver | None:
    """The newest driver of that run or sweep at `now`; None if there was none. Raises StorageError."""
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


def status_by_lease(folder: Folder, now: float | None = None) -> Status | None:
    """The status of that run or sweep as far as its newest driver tells, which may have started or ended without a record of that.
    None if it had no driver, or that died. Raises StorageError.
    """
    _, holder = _newest(folder)
    if holder is None:
        return None
    if holder["ended"]:
        return "interrupted" if holder.get("interrupted") else "stopped"
    return "running" if _alive(holder, now) else None


def ask_stop(folder: Folder, driver: Driver, by: str = "`raydist stop`") -> bool:
    """Asks that driver to end as on Ctrl-C; it checks every STOP_LOOK_S. `by`: who asks. True if this is the first request. Raises
    StorageError."""
    who = this_process()
    body = {"host": who["host"], "pid": who["pid"], "at": time.time(), "by": by}
    return folder.storage.write_new(_stop_name(driver.number), json.dumps(body).encode())


def _stop_name(number: int) -> str:
    return f"{DRIVERS}/{number:06d}{_STOP}"


def _newest(folder: Folder) -> tuple[int, dict[str, Any] | None]:
    """The highest number, 0 if there is none, and its content; None if it cannot be read."""
    numbers = [int(match[1]) for name in folder.storage.files(DRIVERS) if (match := _LEASE.fullmatch(name))]
    if not numbers:
        return 0, None
    return max(numbers), _parsed(_raw(folder, max(numbers)))


def _raw(folder: Folder, number: int) -> bytes:
    try:
        return folder.storage.read(f"{DRIVERS}/{number:06d}.json")
    except FileNotFoundError:
        return b""


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The content of a lease; None if it is damaged."""
    try:
        found = printable(parse_json(data))
        driver = {**found["driver"], "host": str(found["driver"]["host"]), "pid": int(found["driver"]["pid"])}
        known = {"key": str(found["key"]), "renewed_at": float(found["renewed_at"]), "ended": bool(found["ended"])}
        return {**found, **known, "driver": {**driver, "since": float(driver["since"])}}
    except DAMAGED:
        return None


def _ahead(holder: dict[str, Any]) -> bool:
    """Whether it was renewed at a time that is still to come: by a clock that is ahead of this host's."""
    return bool(holder["renewed_at"] > time.time() + SKEW_S)


def _alive(holder: dict[str, Any], now: float | None = None) -> bool:
    now = time.time() if now is None else now
    return not holder["ended"] and recent(holder["renewed_at"], now) and not gone(holder["driver"])
