"""One attempt at training: a fixed number of workers, one `fit()` of Ray Train v2, one result or one root cause.

Runs in: the driver, in any thread. Never imports torch. Imports ray.train in `run_attempt` only.
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raydist.cluster.recovery import Failure, Kind, RankError, root_cause
from raydist.cluster.session import Session

_attempts = itertools.count(1)
_ABORT_S = 1.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended: exactly one of `value` (what rank 0 returned) and `failure` is of use."""

    failure: Failure | None
    value: Any = None


class Attempt:
    """A running attempt, seen from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller: Any = None
        self.aborted = False

    def abort(self) -> None:
        """End it at once: workers are killed, and `run_attempt` returns a failure of kind "aborted".

        Safe from any thread and from a signal handler's thread; a second call does nothing.
        """
        import ray

        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            controller = self._controller
        if controller is None:
            return
        # Asked first, because it frees the workers' placement group; the answer never comes: the actor exits.
        done, _ = ray.wait([controller.abort.remote()], timeout=_ABORT_S)
        if not done:
            ray.kill(controller)

    def _started(self, controller: Any) -> None:
        import ray

        with self._lock:
            self._controller = controller
            late = self.aborted
        if late:
            ray.kill(controller)


def run_attempt(
    train_fn: Callable[[dict[str, Any]], Any] | str,
    config: dict[str, Any],
    *,
    session: Session,
    run_name: str,
    workers: int,
    cpus_per_worker: float,
    gpus_per_worker: float,
    env: Mapping[str, str],
    on_started: Callable[[Attempt], None] | None = None,
    start_timeout_s: float = 120.0,
) -> AttemptResult:
    """Run `train_fn(config)` on every rank of a new group of workers, and wait until it ends.

    `train_fn` is a function, or its name "module:attribute", which only the workers import. Before it is called each
    worker's environment holds `env` and what torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK,
    MASTER_ADDR, MASTER_PORT. The process group is not started: `torch.distributed.init_process_group("gloo")` in the
    train function does that, as under torchrun, after it chose its network interface.

    `on_started(attempt)` is called in this thread as soon as `attempt.abort()` can end it. May run in any thread: no
    signal handler is installed. What rank 0 returns (plain data) is the result's `value`.

    An exception of the train function crosses as plain facts if it has the attributes of `RankError` (rank, at,
    type_name, message, traceback, bases): raise one such from the worker, picklable and importable without torch.

    `start_timeout_s` is how long to wait for the workers' resources; then the failure is a "startup_timeout".

    Never raises for a failed attempt: the result's `failure` names the root cause.
    """
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    from raydist.cluster.raytrain import Named, Trainer

    attempt = Attempt()

    def started(controller: Any) -> None:
        attempt._started(controller)
        if on_started is not None:
            on_started(attempt)

    # A fresh name under the session's own directory: Ray Train finds no snapshot there to resume from.
    scratch = session.temp_dir / "attempts"
    name = f"{run_name}-{session.job_id}-{next(_attempts)}"
    resources: dict[str, float] = {"CPU": cpus_per_worker}
    if gpus_per_worker:
        resources["GPU"] = gpus_per_worker
    trainer = Trainer(
        Named(train_fn) if isinstance(train_fn, str) else train_fn,
        private=session.private,
        on_controller=started,
        worker_env=env,
        start_timeout_s=start_timeout_s,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(scratch),
            # Each kind of failure has its own budget in Ray Train, two of them endless. All retries are raydist's.
            failure_config=FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
        ),
    )
    try:
        result = trainer.fit()
    except (TrainingFailedError, RayError) as error:
        if attempt.aborted:
            return AttemptResult(Failure("aborted", None, "aborted on request"))
        return AttemptResult(root_cause(list(_errors(error))))
    finally:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return AttemptResult(None, result.return_value)


def _errors(error: BaseException) -> Iterator[RankError]:
    """What each rank ended with, as far as Ray Train tells."""
    from ray.train import ControllerError
    from ray.train.v2.api.exceptions import PreemptionError, WorkerGroupError

    if isinstance(error, WorkerGroupError) and error.worker_failures:
        for rank, failure in sorted(error.worker_failures.items()):
            yield _rank_error(rank, failure, str(error))
    elif isinstance(error, ControllerError):
        yield _controller_error(error.controller_failure)
    elif isinstance(error, PreemptionError):
        ranks = error.preemption_info.preempted_ranks
        yield RankError(None, "Preempted", f"the nodes of ranks {ranks} are being taken away", kind="node_died")
    else:
        yield RankError(None, type(error).__name__, str(error), kind="controller_died")


def _controller_error(cause: BaseException) -> RankError:
    from ray.exceptions import RayActorError

    if isinstance(cause, RayActorError):  # a worker that died while the group was still being started
        return _death(None, str(cause))
    kinds: dict[str, Kind] = {
        "WorkerGroupStartupTimeoutError": "startup_timeout",
        "WorkerGroupStartupFailedError": "startup_failed",
        "InsufficientClusterResourcesError": "startup_failed",
    }
    return RankError(
        None, type(cause).__name__, str(cause), kind=kinds.get(type(cause).__name__, "controller_died")
    )


def _rank_error(rank: int, failure: BaseException, told: str) -> RankError:
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import (
        WorkerHealthCheckFailedError,
        WorkerHealthCheckTimeoutError,
    )

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
        traceback=str(getattr(failure, "traceback", told)),
        at=getattr(failure, "at", None),
        bases=tuple(getattr(failure, "bases", [c.__name__ for c in type(failure).__mro__])),
    )


def _death(rank: int | None, text: str) -> RankError:
    """From Ray's many lines on a dead actor to one that says who, where and what is known of why."""
    found = {k: v for k, v in re.findall(r"^\s*(pid|ip): (\S+)$", text, re.MULTILINE)}
    who = f"process {found.get('pid', '?')} on {found.get('ip', '?')}"
    lower = text.lower()
    if "node running low on memory" in lower:
        return RankError(rank, "OutOfMemory", f"{who} was killed by Ray: its node ran low on memory", text, kind="out_of_memory")
    if re.search(r"node (has )?died|node was terminated|node is dead|node failure", lower):
        return RankError(rank, "NodeDied", f"the node of {who} is gone", text, kind="node_died")
    why = "SIGKILL, the kernel's out-of-memory killer, or a crash"
    if (code := re.search(r"exit code[ :]+(-?\d+)", lower)) and code[1] != "0":
        why = f"exit code {code[1]}"
    return RankError(rank, "WorkerDied", f"{who} ended without a word ({why})", text, kind="worker_died")
