"""One attempt at training: a fixed number of workers, one `fit()` of Ray Train v2, one result or one root cause.

Runs in: the driver, in any thread. Never imports torch. Imports ray.train in `run_attempt` only.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=name, storage_path=str(scratch), failure_config=FailureConfig(max_failures=0)
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
    from ray.train.v2.api.exceptions import WorkerGroupError

    if isinstance(error, WorkerGroupError) and error.worker_failures:
        for rank, failure in sorted(error.worker_failures.items()):
            yield _rank_error(rank, failure)
    elif isinstance(error, ControllerError):
        yield _controller_error(error.controller_failure)
    else:
        yield RankError(None, type(error).__name__, str(error), kind="controller_died")


def _controller_error(cause: BaseException) -> RankError:
    kinds: dict[str, Kind] = {
        "WorkerGroupStartupTimeoutError": "startup_timeout",
        "WorkerGroupStartupFailedError": "startup_failed",
        "InsufficientClusterResourcesError": "startup_failed",
    }
    return RankError(
        None, type(cause).__name__, str(cause), kind=kinds.get(type(cause).__name__, "controller_died")
    )


def _rank_error(rank: int, failure: BaseException) -> RankError:
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
        traceback=str(getattr(failure, "traceback", "")),
        at=getattr(failure, "at", None),
        bases=tuple(getattr(failure, "bases", [c.__name__ for c in type(failure).__mro__])),
    )


def _death(rank: int, text: str) -> RankError:
    """From Ray's many lines on a dead actor to one."""
    lower = text.lower()
    if "memory" in lower and "running low on memory" in lower:
        return RankError(rank, "OutOfMemory", _line(text, "memory"), text, kind="out_of_memory")
    if "node has died" in lower or "node was terminated" in lower or "node died" in lower:
        return RankError(rank, "NodeDied", _line(text, "node"), text, kind="node_died")
    return RankError(rank, "WorkerDied", _line(text, "exit detail") or _line(text, "died"), text, kind="worker_died")


def _line(text: str, word: str) -> str:
    return next((s.strip() for s in text.splitlines() if word in s.lower()), "")


def remove_scratch(session: Session) -> None:
    """Delete what attempts left in the session's directory."""
    shutil.rmtree(Path(session.temp_dir) / "attempts", ignore_errors=True)
