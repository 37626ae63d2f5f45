"""Requests of users to a running job, from any shell with access to its folder: one file per request, handled by the run itself.

Runs anywhere. The requester writes the file and deletes it; the run's monitor passes open requests to rank 0, in the answer to
its next push. So a request needs no connection to the cluster, and survives a restart: the next attempt finds it.

    RUN/requests/checkpoint-1790000000000.json   save after the next step; deleted when answered or withdrawn
                 trace-0007.json              trace the next steps on every rank; likewise
        traces/0007/request.json              the same, but kept, so that no number is used twice
        traces/0007/attempt-0002/rank-00003-of-00008.json.gz     the answer: one rank's trace
        traces/0007.json.gz                   the traces of all ranks in one file

If the requester was killed, its request expires at its deadline, and the next requester deletes it.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, cast

from raydist.parsing import DAMAGED, LINE_BYTES, NAME, parse_json
from raydist.records import Event
from raydist.run.directory import REQUESTS, TRACES, RunDir

What = Literal["trace", "checkpoint"]
VERSION = 1
MOST_STEPS = 100
"""Maximum number of steps: a larger trace cannot be opened by viewers, and needs too much memory in the rank."""
_REQUEST = re.compile(r"(trace|checkpoint)-(\d{1,15})\.json")
"""So many digits, because ranks agree on a trace's number in a sum of float64."""
_PART = re.compile(r"rank-(\d+)-of-(\d+)\.json\.gz")


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a checkpoint, or to trace the next `steps` steps. `at`, `until`: Unix times of it and of its expiry; `by`: who
    asks."""

    what: What
    number: int
    at: float
    until: float
    by: str
    steps: int = 0


def ask_trace(run: RunDir, steps: int, timeout_s: float, by: str = "") -> Request:
    """Creates a request with an unused number. Raises StorageError."""
    storage, now = run.storage, _tidied(run)
    number = max((int(n) for n in storage.folders(TRACES) if n.isdecimal()), default=0) + 1
    while True:
        request = Request("trace", number, now, now + timeout_s, by, steps)
        body = _body(request)
        if storage.write_new(f"{TRACES}/{number:04d}/request.json", body):
            storage.write(_path(request), body)
            return request
        number += 1


def ask_checkpoint(run: RunDir, timeout_s: float, by: str = "") -> Request:
    """Creates a request, whose number no other has: the Unix time in milliseconds. Raises StorageError."""
    now = _tidied(run)
    number = int(now * 1000)
    while True:
        request = Request("checkpoint", number, now, now + timeout_s, by)
        if run.storage.write_new(_path(request), _body(request)):
            return request
        number += 1


def pending(run: RunDir) -> list[Request]:
    """The requests that have not expired, of each kind the oldest first. Raises StorageError."""
    now = time.time()
    return [request for request in _requests(run) if request.until >= now]


def withdraw(run: RunDir, request: Request) -> None:
    """Deletes the request, because it is answered or withdrawn. Raises StorageError."""
    run.storage.delete(_path(request))


class Inbox:
    """A run's open requests, as the process sees them that answers its rank 0. One thread looks."""

    def __init__(self) -> None:
        self._open: list[Request] = []

    def look(self, run: RunDir) -> list[Event]:
        """Reads them. Returns an event for each new one. Raises StorageError."""
        before, self._open = self._open, pending(run)
        return [
            Event("requested", new.at, {"what": new.what, "number": new.number, "by": new.by})
            for new in self._open
            if new not in before
        ]

    def answer(self) -> dict[str, Any]:
        """For rank 0, the oldest first: `traces`, (number, steps) of each, and `saves`, numbers; only what there is."""
        now = self._open
        found = {
            "traces": [(one.number, one.steps) for one in now if one.what == "trace"],
            "saves": [one.number for one in now if one.what == "checkpoint"],
        }
        return {name: each for name, each in found.items() if each}


def part_name(number: int, attempt: int, rank: int, world_size: int) -> str:
    """The file of a rank's part of trace `number`, relative to the run."""
    return f"{TRACES}/{number:04d}/attempt-{attempt:04d}/rank-{rank:05d}-of-{world_size:05d}.json.gz"


def merged_name(number: int) -> str:
    """The file of the whole trace, relative to the run."""
    return f"{TRACES}/{number:04d}.json.gz"


def parts(run: RunDir, number: int) -> tuple[list[str], list[int]]:
    """The parts that the newest attempt has written so far, by rank, and the ranks whose part is missing. Raises StorageError.

    ([], []) before the first part: each part's name has the number of parts.
    """
    attempts = run.storage.folders(f"{TRACES}/{number:04d}")
    found: dict[int, str] = {}
    world = 0
    for name in run.storage.files(f"{TRACES}/{number:04d}/{attempts[-1]}") if attempts else ():
        if match := _PART.fullmatch(_name(name)):
            found[int(match[1])], world = name, int(match[2])
    return [found[rank] for rank in sorted(found)], [rank for rank in range(world) if rank not in found]


def _tidied(run: RunDir) -> float:
    """Deletes the requests that have expired. Returns the time."""
    now = time.time()
    for request in _requests(run):
        if request.until < now:
            withdraw(run, request)
    return now


def _requests(run: RunDir) -> list[Request]:
    found = []
    for name in run.storage.files(REQUESTS):
        if match := _REQUEST.fullmatch(_name(name)):
            what = cast(What, match[1])
            try:
                body: dict[str, Any] = parse_json(run.storage.read(name), LINE_BYTES)
                steps = int(body["steps"]) if what == "trace" else 0
                at, until = float(body["at"]), float(body["until"])
                if (what == "trace" and not 1 <= steps <= MOST_STEPS) or not (
                    math.isfinite(at) and math.isfinite(until)
                ):
                    continue
                found.append(Request(what, int(match[2]), at, until, str(body.get("by", ""))[:NAME], steps))
            except (*DAMAGED, FileNotFoundError):
                continue  # withdrawn in the meantime, of another version, or damaged
    return sorted(found, key=lambda request: (request.what, request.number))


def _body(request: Request) -> bytes:
    body = {"v": VERSION, request.what: request.number, "at": request.at, "until": request.until, "by": request.by}
    return json.dumps(body | ({"steps": request.steps} if request.what == "trace" else {})).encode()


def _path(request: Request) -> str:
    return f"{REQUESTS}/{request.what}-{request.number:04d}.json"


def _name(path: str) -> str:
    return PurePosixPath(path).name
