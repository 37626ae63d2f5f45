"""One attempt at training: a fixed number of workers, one `fit()` of Ray Train v2, one result or one root cause.

Runs in: the driver, in any thread. Never imports torch. Imports ray.train in `run_attempt` only.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from raydist.cluster.run.root_cause import Failure, root_cause
from raydist.cluster.session import Session

_attempts = itertools.count(1)
_ABORT_S = 1.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended: exactly one of `value` (what rank 0 returned) and `failure` is of use.

    `seen`: Unix time at which its failure was seen, and `silent_s`, how long the rank had shown no progress then.
    """

    failure: Failure | None
    value: Any = None
    seen: float = 0.0
    silent_s: float = 0.0


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


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What a worker is: its CPUs, its GPUs, its environment's variables. Workers of one kind can train each other's runs."""

    cpus: float
    gpus: float
    env: Mapping[str, str]


def run_attempt(
    train_fn: Callable[[dict[str, Any]], Any] | str,
    config: dict[str, Any],
    *,
    session: Session,
    run_name: str,
    workers: int,
    kind: WorkerKind,
    on_started: Callable[[Attempt], None] | None = None,
    start_timeout_s: float = 120.0,
    avoid: Collection[str] = (),
    minded: tuple[Any, int] | None = None,
    spread: bool = False,
) -> AttemptResult:
    """Run `train_fn(config)` on every rank of a new group of workers, and wait until it ends.

    `train_fn` is a function, or its name "module:attribute", which only the workers import. Before it is called each
    worker's environment holds that of its `kind` and what torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK,
    MASTER_ADDR, MASTER_PORT. The process group is not started: `torch.distributed.init_process_group("gloo")` in the
    train function does that, as under torchrun, after it chose its network interface.

    `on_started(attempt)` is called in this thread as soon as `attempt.abort()` can end it. May run in any thread: no
    signal handler is installed. What rank 0 returns (plain data) is the result's `value`.

    An exception of the train function crosses as plain facts if it has the attributes of `RankError` (rank, at,
    type_name, message, traceback, bases): raise one such from the worker, picklable and importable without torch.

    `avoid`: ids of nodes on which no worker may be placed. `minded`: see `ray_train_adapter._Controller`. `spread`: over as many
    nodes as there are, else on as few as hold them.

    `start_timeout_s` is how long to wait for the workers' resources; then the failure is a "startup_timeout".

    Never raises for a failed attempt: the result's `failure` names the root cause.
    """
    import ray
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    from raydist.cluster.run.ray_errors import rank_errors
    from raydist.cluster.run.ray_train_adapter import Named, Trainer

    attempt = Attempt()

    def started(controller: Any) -> None:
        attempt._started(controller)
        if on_started is not None:
            on_started(attempt)

    # A fresh name under the session's own directory: Ray Train finds no snapshot there to resume from.
    scratch = session.temp_dir / "attempts"
    name = f"{run_name}-{session.job_id}-{next(_attempts)}"
    resources: dict[str, float] = {"CPU": kind.cpus}
    if kind.gpus:
        resources["GPU"] = kind.gpus
    trainer = Trainer(
        Named(train_fn) if isinstance(train_fn, str) else train_fn,
        private=session.private,
        on_controller=started,
        worker_env=kind.env,
        start_timeout_s=start_timeout_s,
        minded=minded,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=kind.gpus > 0,
            resources_per_worker=resources,
            placement_strategy="SPREAD" if spread else "PACK",
            label_selector={ray._raylet.RAY_NODE_ID_KEY: f"!in({','.join(sorted(avoid))})"} if avoid else None,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(scratch),
            # Each kind of failure has its own budget in Ray Train, two of them endless. All retries are raydist's.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )
    try:
        result = trainer.fit()
    except (TrainingFailedError, RayError) as error:
        if attempt.aborted:
            return AttemptResult(Failure("aborted", None, "aborted on request"))
        return AttemptResult(root_cause(rank_errors(error)))
    finally:
        _free_placement_groups(name)
        shutil.rmtree(scratch / name, ignore_errors=True)
    return AttemptResult(None, result.return_value)


def _free_placement_groups(name: str) -> None:
    """A controller that was killed leaves its workers' resources reserved, or waited for, under its run's name.

    Ray Train's PlacementGroupCleaner knows of no group that waits, and Ray ends none before the driver.
    """
    from ray.util.placement_group import (
        PlacementGroup,
        PlacementGroupID,
        placement_group_table,
        remove_placement_group,
    )

    for group, facts in placement_group_table().items():
        if facts["name"] == name and facts["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))
