"""Requests of users to a running job, from any shell with access to its folder: one file per request, handled by the run itself.

Runs anywhere. The requester writes the file and deletes it; the run's monitor passes open requests to rank 0, in the answer to
its next push. So a request needs no connection to the cluster, and survives a restart: the next attempt finds it.

    RUN/requests/trace-0007.json              trace the next steps on every rank; deleted when answered or given up
        traces/0007/request.json              the same, but kept, so that no number is used twice
        traces/0007/attempt-0002/rank-00003-of-00008.json.gz     the answer: one rank's trace
        traces/0007.json.gz                   the traces of all ranks in one file

If the requester was killed, its request expires at its deadline, and the next requester deletes it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raydist.parsing import parse_json
from raydist.run.directory import REQUESTS, TRACES, RunDir

VERSION = 1
MOST_STEPS = 100
"""Maximum number of steps: a larger trace cannot be opened by viewers, and needs too much memory in the rank."""
_REQUEST = re.compile(r"trace-(\d+)\.json")
_PART = re.compile(r"rank-(\d+)-of-(\d+)\.json\.gz")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request to trace the next `steps` steps. `until`: Unix time of its expiry."""

    number: int
    steps: int
    until: float


def ask_trace(run: RunDir, steps: int, timeout_s: float) -> TraceRequest:
    """Creates a request with an unused number. Raises StorageError."""
    storage, now = run.storage, time.time()
    for request in _requests(run):
        if request.until < now:
            withdraw(run, request.number)
    number = max((int(n) for n in storage.folders(TRACES) if n.isdecimal()), default=0) + 1
    while True:
        request = TraceRequest(number, steps, now + timeout_s)
        body = {"v": VERSION, "trace": number, "steps": steps, "at": now, "until": request.until}
        if storage.write_new(f"{TRACES}/{number:04d}/request.json", json.dumps(body).encode()):
            storage.write(_path(number), json.dumps(body).encode())
            return request
        number += 1


def pending(run: RunDir) -> list[TraceRequest]:
    """The requests that have not expired, oldest first. Raises StorageError."""
    now = time.time()
    return [request for request in _requests(run) if request.until >= now]


def withdraw(run: RunDir, number: int) -> None:
    """Deletes the request, because it is answered or given up. Raises StorageError."""
    run.storage.delete(_path(number))


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


def _requests(run: RunDir) -> list[TraceRequest]:
    found = []
    for name in run.storage.files(REQUESTS):
        if _REQUEST.fullmatch(_name(name)):
            try:
                body: dict[str, Any] = parse_json(run.storage.read(name))
                found.append(TraceRequest(int(body["trace"]), int(body["steps"]), float(body["until"])))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # withdrawn in the meantime, or of another version
    return sorted(found, key=lambda request: request.number)


def _path(number: int) -> str:
    return f"{REQUESTS}/trace-{number:04d}.json"


def _name(path: str) -> str:
    return PurePosixPath(path).name
