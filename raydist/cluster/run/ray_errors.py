"""Converts the exceptions of Ray Train to plain data: which rank ended with which error.

Runs in: the driver and Ray Train's controller. Imports ray.train; never torch.
"""

from __future__ import annotations

import re

from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, PreemptionError, WorkerGroupError

from raydist.cluster.ray_private import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from raydist.cluster.run.root_cause import Kind, RankError


def rank_errors(error: BaseException) -> list[RankError]:
    """The error of each rank, as far as Ray Train reports them; one error without a rank if it reports none."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        return [rank_error(rank, failure, str(error)) for rank, failure in sorted(error.worker_failures.items())]
    if isinstance(error, ControllerError):
        return [_controller_error(error.controller_failure)]
    if isinstance(error, PreemptionError):
        ranks = error.preemption_info.preempted_ranks
        return [RankError(None, "Preempted", f"the nodes of ranks {ranks} are being drained", kind="node_died")]
    return [RankError(None, type(error).__name__, str(error), kind="controller_died")]


def _controller_error(cause: BaseException) -> RankError:
    if isinstance(cause, RayActorError):  # a worker died while the group was starting
        return _death(None, str(cause))
    kinds: dict[str, Kind] = {
        "WorkerGroupStartupTimeoutError": "startup_timeout",
        "WorkerGroupStartupFailedError": "startup_failed",
        "InsufficientClusterResourcesError": "startup_failed",
    }
    return RankError(None, type(cause).__name__, str(cause), kind=kinds.get(type(cause).__name__, "controller_died"))


def rank_error(rank: int, failure: BaseException, traceback: str) -> RankError:
    """The error of one worker. `traceback`: for a `failure` that has none."""
    if isinstance(failure, WorkerHealthCheckTimeoutError):
        return RankError(rank, "WorkerHung", str(failure), kind="worker_hung")
    if isinstance(failure, WorkerHealthCheckFailedError):
        failure = failure.health_check_failure
    if isinstance(failure, RayActorError):
        return _death(rank, str(failure))
    return RankError(
        rank=int(getattr(failure, "rank", rank)),
        type_name=str(getattr(failure, "type_name", type(failure).__name__)),
        message=str(getattr(failure, "message", failure)),
        traceback=str(getattr(failure, "traceback", traceback)),
        at=getattr(failure, "at", None),
        bases=tuple(getattr(failure, "bases", [c.__name__ for c in type(failure).__mro__])),
    )


def lost(error: RayError) -> str:
    """For a run's cause: what of Ray the driver has lost when its call raised `error`. An actor's process, if it was that."""
    text = str(error).strip()
    found = dict(re.findall(r"^\s*(class_name|pid|ip): (\S+)$", text, re.MULTILINE))
    if isinstance(error, RayActorError) and found.keys() == {"class_name", "pid", "ip"}:
        who = f"{found['class_name'].lower()} (process {found['pid']} on {found['ip']})"
        return f"Ray's {who} has exited without reporting an error"
    return f"the cluster no longer answers ({type(error).__name__}: {(text.splitlines() or [''])[0]})"


def _death(rank: int | None, text: str) -> RankError:
    """Reduces Ray's long text about a dead actor to one line: the process, its node, and the known reason."""
    found = {k: v for k, v in re.findall(r"^\s*(pid|ip): (\S+)$", text, re.MULTILINE)}
    who = f"process {found.get('pid', '?')} on {found.get('ip', '?')}"
    lower = text.lower()
    if "node running low on memory" in lower:
        return RankError(
            rank, "OutOfMemory", f"{who} was killed by Ray: its node ran low on memory", text, kind="out_of_memory"
        )
    if re.search(r"node (has )?died|node was terminated|node is dead|node failure", lower):
        return RankError(rank, "NodeDied", f"the node of {who} is gone", text, kind="node_died")
    why = "SIGKILL, the kernel's out-of-memory killer, or a crash"
    if (code := re.search(r"exit code[ :]+(-?\d+)", lower)) and code[1] != "0":
        why = f"exit code {code[1]}"
    return RankError(rank, "WorkerDied", f"{who} exited without reporting an error ({why})", text, kind="worker_died")
