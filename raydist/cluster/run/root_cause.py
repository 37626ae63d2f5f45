"""What an attempt died of: of all that its ranks ended with, the one error that explains the others.

Runs anywhere. Pure: no ray, no torch, no clock, no I/O; tested as a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raydist import errors

Kind = Literal[
    "user_error",
    "worker_died",
    "node_died",
    "out_of_memory",
    "worker_hung",
    "communication",
    "controller_died",
    "startup_timeout",
    "startup_failed",
    "rollback",
    "aborted",
]
"""user_error: the train function raised; worker_died: its process is gone; worker_hung: it no longer answers Ray;
communication: nothing but lost peers is known; startup_*: workers never ran; rollback: the ranks want to go on from a checkpoint,
without a batch or with sound weights; aborted: we asked for it."""

Repeats = Literal["unknown", "on_rank", "on_all"]
"""Whether the next attempt would meet the same error, as it begins alike: on_rank: one rank says so, and its host may be to blame;
on_all: every rank that has raised says the same, rank 0 among them."""

_DEATHS: tuple[Kind, ...] = ("node_died", "out_of_memory", "worker_died", "worker_hung")

# What a rank says when a peer is gone. An echo: true, but never the cause while a better one is there.
_PEER_LOST_TYPES = frozenset(
    [
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "EOFError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "DistError",
    ]
)
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|closed by peer|broken pipe|remote process exited"
    r"|(time|timed) ?out|end of file|no route to host|socket (closed|error)"
    r"|nccl communicator was aborted|unhandled system error|watchdog|recvbytes|sendbytes",
    re.IGNORECASE,
)
_PEER_LOST_SPEAKERS = frozenset(
    {"CheckpointError", "RuntimeError", "OSError", "TimeoutError", "SystemError", "Exception"}
)


@dataclass(frozen=True, slots=True)
class RankError:
    """What one rank ended with. `at` is Unix time in seconds on that rank's host, None where nobody saw it.

    `type_name` and `message` are the exception's; `bases` names its base classes, so that a subclass of an error that
    no restart can heal is known as one. `traceback` is text. `stage`: see `raydist.worker.metrics.startup_timing.Startup.doing`.
    """

    rank: int | None
    type_name: str
    message: str
    traceback: str = ""
    at: float | None = None
    kind: Kind = "user_error"
    bases: tuple[str, ...] = ()
    stage: str = ""

    @property
    def cause(self) -> str:
        """One line: type and message."""
        line = next((s.strip() for s in self.message.splitlines() if s.strip()), "")
        return f"{self.type_name}: {line}" if self.type_name and line else self.type_name or line


@dataclass(frozen=True, slots=True)
class Failure:
    """The one root cause of a failed attempt. `echoes` counts the other ranks that failed because of it. `node`: where the rank
    was, Ray's id; None where that is not known.
    """

    kind: Kind
    rank: int | None
    cause: str
    traceback: str = ""
    echoes: int = 0
    heals: bool = True
    """False: restarting cannot help (a wrong spec, a graph mismatch, a loss that is not finite)."""
    node: str | None = None
    repeats: Repeats = "unknown"
    stage: str = ""
    """Of the rank that is to blame: see RankError."""

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for failures that are the same but for numbers (steps, pids, addresses)."""
        return self.kind, _but_numbers(self.cause)


def _names(*roots: type[BaseException]) -> frozenset[str]:
    found: set[str] = set()
    todo = list(roots)
    while todo:
        cls = todo.pop()
        found.add(cls.__name__)
        todo += cls.__subclasses__()
    return frozenset(found)


# WorkerFailed means "a rank died and the budget is spent": the one TrainingStopped that says nothing of its cause.
_NEVER_HEALS = _names(errors.UserError, errors.TrainingStopped, errors.SpecChanged) - {"WorkerFailed"}


def is_echo(error: RankError) -> bool:
    """Whether this is what a rank says because a peer is gone, and nothing of its own."""
    if error.kind != "user_error":
        return error.kind == "communication"
    if not _NEVER_HEALS.isdisjoint({error.type_name, *error.bases}):
        return False
    if error.type_name in _PEER_LOST_TYPES:
        return True
    return error.type_name in _PEER_LOST_SPEAKERS and _PEER_LOST.search(error.message) is not None


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)


def _no_memory(error: RankError) -> bool:
    """Python's and numpy's MemoryError, torch's OutOfMemoryError, and what torch's CPU allocator and cuBLAS say."""
    if not {"MemoryError", "OutOfMemoryError"}.isdisjoint({error.type_name, *error.bases}):
        return True
    return error.type_name == "RuntimeError" and _NO_MEMORY.search(error.message) is not None


# What of an exception that is raised before the first step may be gone the next time: devices, links, files, the web.
_MAY_GO_AWAY_TYPES = frozenset(
    [
        "OSError",  # ConnectionError, TimeoutError and requests' errors among them
        "AcceleratorError",
        "DistError",
        "HTTPError",  # httpx's, which are no OSError
        "TransportError",
        "RpcError",
        "InjectedError",  # each once in a run
    ]
)
_MAY_GO_AWAY = re.compile(
    r"\b(cuda|cudnn|cublas|cusparse|cufft|nccl|rccl|hip|gloo|mpi|driver|device-side|socket|network)\b"
    r"|\b(connect\w*|store|time[sd]? ?out|timeout)\b"
    r"|CU(DNN|BLAS)_STATUS|resource temporarily|too many open files",
    re.IGNORECASE,
)
# What Python itself says of a mistake in the code, whatever words its message has.
_OF_CODE = frozenset(["TypeError", "NameError", "AttributeError", "ImportError", "SyntaxError", "NotImplementedError"])
_OF_A_PATH = frozenset(["FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "PermissionError"])
_LAST_FRAME = re.compile(r'^ +File ".*$', re.MULTILINE)


def _but_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|[0-9a-f]{24,}|\d+(\.\d+)?", "#", text)


def _raised_as(error: RankError) -> tuple[str, str, str]:
    """Type, message and the line that raised: what ranks that meet the same error have in common."""
    frames = _LAST_FRAME.findall(error.traceback)
    return error.type_name, _but_numbers(error.message), frames[-1] if frames else ""


def repeats(error: RankError, found: Sequence[RankError]) -> Repeats:
    """Whether another attempt would meet `error`, the cause of all that was `found`. Pure.

    Before an attempt's first step is done a rank has done nothing but run the user's code on what a run begins with. So an
    exception of that code comes again, unless it tells of a device, a link, a file or the web. In the first step it must be the
    same on all ranks that raised; and a file that one rank lacks may be missing on one host only.
    """
    if error.kind != "user_error" or not error.stage or _no_memory(error) or is_echo(error):
        return "unknown"
    own = [e for e in found if e.kind == "user_error" and not is_echo(e)]
    same = any(e.rank == 0 for e in own) and len({_raised_as(e) for e in own}) == 1
    names = {error.type_name, *error.bases}
    if error.stage == "build" and same and not _OF_A_PATH.isdisjoint(names):
        return "on_all"
    if not _MAY_GO_AWAY_TYPES.isdisjoint(names):
        return "unknown"
    if names.isdisjoint(_OF_CODE) and _MAY_GO_AWAY.search(error.message):
        return "unknown"
    if error.stage == "build":
        return "on_all" if same else "on_rank"
    return "on_all" if same else "unknown"


def root_cause(found: Sequence[RankError]) -> Failure:
    """The one error that explains the others. `found` must not be empty.

    An exception of a rank's own explains both lost peers and peers that aborted, so it goes first; then a process that
    died; then, if nothing else is known, the first to complain of a lost peer. Among equals the earliest, then the
    lowest rank.
    """

    def weight(error: RankError) -> tuple[int, float, int]:
        if error.kind == "user_error" and not is_echo(error):
            order = 0
        elif error.kind in _DEATHS:
            order = 1 + _DEATHS.index(error.kind)
        elif is_echo(error):
            order = 20
        else:
            order = 10
        return order, error.at if error.at is not None else float("inf"), -1 if error.rank is None else error.rank

    first = min(found, key=weight)
    kind: Kind = "communication" if first.kind == "user_error" and is_echo(first) else first.kind
    if kind == "user_error" and _no_memory(first):
        kind = "out_of_memory"
    elif first.type_name == errors.Rollback.__name__:
        kind = "rollback"
    return Failure(
        kind=kind,
        rank=first.rank,
        cause=first.cause,
        traceback=first.traceback,
        echoes=len(found) - 1,
        heals=_NEVER_HEALS.isdisjoint({first.type_name, *first.bases}),
        repeats=repeats(first, found),
        stage=first.stage,
    )
