"""The root cause of a failed attempt: of the errors of all ranks, the one that explains the others.

Runs anywhere. Pure: no ray, no torch, no clock, no I/O; tested as a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raydist import errors
from raydist.cluster.run.agents import KILLED, NOT_KILLED
from raydist.diagnosis._hang import RankView, judge
from raydist.run.lease import SKEW_S

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
"""user_error: the train function raised; worker_died: the process of a rank or agent exited; worker_hung: a rank makes no
progress, or a worker does not answer Ray; communication: only lost peers are known; startup_*: the workers never ran; rollback:
the ranks want to resume from a checkpoint, to skip a batch or to replace bad weights; aborted: on request."""

Repeats = Literal["unknown", "on_rank", "on_all"]
"""Whether the next attempt would raise the same error. on_rank: one rank raised it, and its host may be the cause; on_all: every
rank that has raised, rank 0 among them, raised the same one."""

_DEATHS: tuple[Kind, ...] = ("node_died", "out_of_memory", "worker_died", "worker_hung")

# The errors that a rank raises when it has lost a peer: echoes, which are never the root cause if there is another error.
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
_PEER_LOST_CARRIERS = frozenset(
    {"CheckpointError", "RuntimeError", "OSError", "TimeoutError", "SystemError", "Exception"}
)


@dataclass(frozen=True, slots=True)
class RankError:
    """How one rank ended. `at`: Unix time in seconds on that rank's host; None: not known.

    `type_name` and `message` are the exception's; `bases` has the names of its base classes, so that subclasses of an error that no
    restart can repair are recognised. `traceback` is text. `stage`: see `raydist.worker.metrics.startup_timing.Startup.doing`.
    `sides`: of a rank that hangs, see `raydist.diagnosis._hang.Verdict`.
    """

    rank: int | None
    type_name: str
    message: str
    traceback: str = ""
    at: float | None = None
    kind: Kind = "user_error"
    bases: tuple[str, ...] = ()
    stage: str = ""
    sides: Sequence[Mapping[str, Any]] = ()

    @property
    def cause(self) -> str:
        """One line: type and message."""
        line = next((s.strip() for s in self.message.splitlines() if s.strip()), "")
        return f"{self.type_name}: {line}" if self.type_name and line else self.type_name or line


@dataclass(frozen=True, slots=True)
class Failure:
    """The root cause of a failed attempt. `echoes`: how many other ranks failed because of it. `node`: Ray's id of the rank's node;
    None: not known.
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
    """The stage of the rank in `rank`: see RankError, and for `sides`."""
    sides: Sequence[Mapping[str, Any]] = ()

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for failures that differ only in numbers (steps, pids, addresses)."""
        return self.kind, _but_numbers(self.cause)


def hung(views: Mapping[int, Mapping[str, Any]], now: Mapping[str, float]) -> dict[int, dict[str, Any]]:
    """The report of the rank that makes the others wait; {} if none does. `views`: the fields of RankView of each rank. `now`: `at`
    and `seen`.
    """
    verdict = judge({rank: RankView(**view) for rank, view in views.items()})
    if verdict.rank is None:
        return {}
    silent = views[verdict.rank]["seconds"]
    return {verdict.rank: {"hung": verdict.why, "sides": verdict.sides, "silent_s": silent, **now}}


def rank_error(rank: int, report: Mapping[str, Any]) -> RankError | None:
    """The error of a rank's report; None if the rank ended without one."""
    if "outcome" in report:
        return None
    if "error" in report:
        error = report["error"]
        return RankError(**{**error, "bases": tuple(error["bases"])})
    if "hung" in report:
        return RankError(rank, "RankHung", report["hung"], at=report["at"], kind="worker_hung", sides=report["sides"])
    if "lost" in report:
        return RankError(**report["lost"])
    died = report["died"]
    if died["ordered"]:
        return RankError(rank, KILLED, "the attempt had failed", at=report["at"], kind="communication")
    if died["starved"]:
        return RankError(rank, "OutOfMemory", died["starved"], at=report["at"], kind="out_of_memory")
    message = f"process {died['pid']} on {died['node_ip']} exited without reporting an error ({died['how']})"
    return RankError(rank, "WorkerDied", message, at=report["at"], kind="worker_died")


class Reports:
    """How the ranks of one attempt have ended.

    `ended`: these ranks. `kept`: rank -> report, without those that cannot be the root cause: of the ranks that lost a peer, of
    those whose process died, and of those that were killed for it, only the first one's, with their number as `ranks`.
    `failed`: whether a rank has failed; `cause_known`: not only by losing a peer; `raised`: so, and with an exception.
    """

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.kept: dict[int, dict[str, Any]] = {}
        self.failed = self.cause_known = self.raised = False
        self._first: dict[str, tuple[float, int]] = {}
        """Of each such kind the first rank: when, and which."""

    def add(self, rank: int, report: dict[str, Any]) -> None:
        """The first report of a rank counts."""
        if rank in self.ended:
            return
        self.ended.add(rank)
        error = rank_error(rank, report)
        if error is None:
            self.kept[rank] = report
            return
        echo = is_echo(error)
        self.failed = True
        self.cause_known |= not echo
        self.raised |= not echo and "error" in report
        if not echo and "died" not in report:
            self.kept[rank] = report
            return
        kind = error.type_name if _of_ours(error) else "echo" if echo else error.kind
        this = (math.inf if error.at is None else error.at), rank
        ranks = 1
        if (first := self._first.get(kind)) is not None:
            before = self.kept.pop(first[1])
            ranks += before["ranks"]
            if first < this:
                this, report = first, before
        self._first[kind], self.kept[this[1]] = this, {**report, "ranks": ranks}


def by_this_clock(report: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A rank's report that comes now. If the clock of its host is wrong, all its times are moved by as much: the earliest report is
    the cause, and the time that a failure takes is counted from it.
    """
    off = now - report["at"]
    if abs(off) <= SKEW_S:
        return dict(report)
    error = {"error": {**report["error"], "at": report["error"]["at"] + off}} if "error" in report else {}
    return {**report, **error, "at": now}


def _names(*roots: type[BaseException]) -> frozenset[str]:
    found: set[str] = set()
    todo = list(roots)
    while todo:
        cls = todo.pop()
        found.add(cls.__name__)
        todo += cls.__subclasses__()
    return frozenset(found)


# WorkerFailed is raised when no restart is left: the one TrainingStopped that a restart may repair.
_NEVER_HEALS = _names(errors.UserError, errors.TrainingStopped, errors.SpecChanged) - {"WorkerFailed"}


def _of_ours(error: RankError) -> bool:
    """Whether the rank was killed because another one had failed: by the clock of its host that may be earlier."""
    return error.kind == "communication" and error.type_name in (KILLED, NOT_KILLED)


def is_echo(error: RankError) -> bool:
    """Whether the rank reports only that it has lost a peer."""
    if error.kind != "user_error":
        return error.kind == "communication"
    if not _NEVER_HEALS.isdisjoint({error.type_name, *error.bases}):
        return False
    if error.type_name in _PEER_LOST_TYPES:
        return True
    return error.type_name in _PEER_LOST_CARRIERS and _PEER_LOST.search(error.message) is not None


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)


def _no_memory(error: RankError) -> bool:
    """Whether it is Python's or numpy's MemoryError, torch's OutOfMemoryError, or an error of torch's CPU allocator or cuBLAS."""
    if not {"MemoryError", "OutOfMemoryError"}.isdisjoint({error.type_name, *error.bases}):
        return True
    return error.type_name == "RuntimeError" and _NO_MEMORY.search(error.message) is not None


# Exceptions before the first step that the next attempt may not raise: of devices, links, files and the web.
_TRANSIENT_TYPES = frozenset(
    [
        "OSError",  # ConnectionError, TimeoutError and requests' errors among them
        "AcceleratorError",
        "DistError",
        "HTTPError",  # of httpx: not a subclass of OSError
        "TransportError",
        "RpcError",
        "InjectedError",  # each is injected once in a run
    ]
)
_TRANSIENT = re.compile(
    r"\b(cuda|cudnn|cublas|cusparse|cufft|nccl|rccl|hip|gloo|mpi|driver|device-side|socket|network)\b"
    r"|\b(connect\w*|store|time[sd]? ?out|timeout)\b"
    r"|CU(DNN|BLAS)_STATUS|resource temporarily|too many open files",
    re.IGNORECASE,
)
# Python raises these for mistakes in the code, so their message does not count.
_OF_CODE = frozenset(["TypeError", "NameError", "AttributeError", "ImportError", "SyntaxError", "NotImplementedError"])
_OF_A_PATH = frozenset(["FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "PermissionError"])
_LAST_FRAME = re.compile(r'^ +File ".*$', re.MULTILINE)


def _but_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|[0-9a-f]{24,}|\d+(\.\d+)?", "#", text)


def _raised_as(error: RankError) -> tuple[str, str, str]:
    """Type, message and the line that raised: equal on ranks with the same error."""
    frames = _LAST_FRAME.findall(error.traceback)
    return error.type_name, _but_numbers(error.message), frames[-1] if frames else ""


def repeats(error: RankError, found: Sequence[RankError]) -> Repeats:
    """Whether another attempt would raise `error`, the root cause of `found`. Pure.

    Before its first step is done, a rank has only run the user's code on the run's initial state. So an exception of that code
    will be raised again, unless it is about a device, a link, a file or the web. In the first step it must be the same on all
    ranks that raised. A file that one rank lacks may be missing on one host only.
    """
    if error.kind != "user_error" or not error.stage or _no_memory(error) or is_echo(error):
        return "unknown"
    own = [e for e in found if e.kind == "user_error" and not is_echo(e)]
    same = any(e.rank == 0 for e in own) and len({_raised_as(e) for e in own}) == 1
    names = {error.type_name, *error.bases}
    if error.stage == "build" and same and not _OF_A_PATH.isdisjoint(names):
        return "on_all"
    if not _TRANSIENT_TYPES.isdisjoint(names):
        return "unknown"
    if names.isdisjoint(_OF_CODE) and _TRANSIENT.search(error.message):
        return "unknown"
    if error.stage == "build":
        return "on_all" if same else "on_rank"
    return "on_all" if same else "unknown"


def root_cause(found: Sequence[RankError]) -> Failure:
    """The error that explains the others. `found` must not be empty.

    In this order: an exception that is not about a lost peer, because it explains lost and aborted peers; a process that died; the
    first report of a lost peer. Among equals the earliest, then the lowest rank.
    """

    def weight(error: RankError) -> tuple[int, float, int]:
        if _of_ours(error):
            order = 30
        elif error.kind == "user_error" and not is_echo(error):
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
        sides=first.sides,
    )
