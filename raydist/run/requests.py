"""What a user asks of a run that trains, from any shell that reaches its folder: a file each, taken up by the run itself.

Runs anywhere. Who asks writes the file and takes it away again; the run's monitor hands what is there to rank 0, with the answer to
its next push. So a request needs no connection to the cluster, and a restart loses none: the next attempt finds it still there.

    RUN/requests/trace-0007.json              trace the next steps on every rank; gone when it is answered or given up
        traces/0007/request.json              the same, and stays: no number comes twice
        traces/0007/attempt-0002/rank-00003-of-00008.json.gz     the answer: a rank's own trace
        traces/0007.json.gz                   all ranks' in one file

A request whose asker was killed stops counting at its own deadline, and the next asker removes it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raydist.run.directory import REQUESTS, TRACES, RunDir

VERSION = 1
MOST_STEPS = 100
"""More events than those of so many steps no viewer opens, and no rank should have to hold."""
_REQUEST = re.compile(r"trace-(\d+)\.json")
_PART = re.compile(r"rank-(\d+)-of-(\d+)\.json\.gz")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Trace the next `steps` steps. `until`: Unix time after which nobody waits for it any more."""

    number: int
    steps: int
    until: float


def ask_trace(run: RunDir, steps: int, timeout_s: float) -> TraceRequest:
    """A new request, with a number that no other of this run has or had. Raises StorageError."""
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
    """The requests that somebody still waits for, oldest first. Raises StorageError."""
    now = time.time()
    return [request for request in _requests(run) if request.until >= now]


def withdraw(run: RunDir, number: int) -> None:
    """The request counts no longer: it is answered, or given up. Raises StorageError."""
    run.storage.delete(_path(number))


def part_name(number: int, attempt: int, rank: int, world_size: int) -> str:
    """Where a rank leaves its part of trace `number`, relative to the run."""
    return f"{TRACES}/{number:04d}/attempt-{attempt:04d}/rank-{rank:05d}-of-{world_size:05d}.json.gz"


def merged_name(number: int) -> str:
    """Where the whole trace is, relative to the run."""
    return f"{TRACES}/{number:04d}.json.gz"


def parts(run: RunDir, number: int) -> tuple[list[str], list[int]]:
    """The parts that the newest attempt has left so far, by rank, and the ranks whose part is yet to come. Raises StorageError.

    ([], []) before the first one: how many there will be is known from any of them.
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
                body: dict[str, Any] = json.loads(run.storage.read(name))
                found.append(TraceRequest(int(body["trace"]), int(body["steps"]), float(body["until"])))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # withdrawn meanwhile, or of another version
    return sorted(found, key=lambda request: request.number)


def _path(number: int) -> str:
    return f"{REQUESTS}/trace-{number:04d}.json"


def _name(path: str) -> str:
    return PurePosixPath(path).name
