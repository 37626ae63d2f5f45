"""One `fit()` of Ray Train v2 with a fixed number of workers: one result, or one root cause.

Runs in: the driver, in any thread. Group (worker_group.py) and `raydist bench` call it. Never imports torch. Imports ray.train in
`run_attempt` only.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.cluster import nodes
from raydist.cluster.run.root_cause import Failure, root_cause
from raydist.cluster.session import Session
from raydist.spec.resources import ResourcesSpec

_attempts = itertools.count(1)
_ABORT_S = 1.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended: with the `value` that rank 0 returned, or with a `failure`.

    `seen`: the Unix time at which the failure was detected. `silent_s`: how long the rank had then made no progress. `note`: what
    the user is to know beside the failure.
    """

    failure: Failure | None
    value: Any = None
    seen: float = 0.0
    silent_s: float = 0.0
    note: str = ""


class AbortHandle:
    """Ends one `run_attempt` from another thread. Make it first, and pass it to `run_attempt`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller: Any = None
        self.aborted = False

    def abort(self) -> None:
        """Ends the attempt at once: its workers are killed, and `run_attempt` returns a failure of kind "aborted".

        From any thread, also before the attempt has started. A second call does nothing.
        """
        import ray

        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            controller = self._controller
        if controller is None:
            return
        # Not killed at once, because abort() frees the workers' placement group. It gives no answer: the actor exits.
        done, _ = ray.wait([controller.abort.remote()], timeout=_ABORT_S)
        if not done:
            ray.kill(controller)

    def started(self, controller: Any) -> None:
        """For `run_attempt`: the controller's handle. Kills the controller if the attempt was aborted before."""
        import ray

        with self._lock:
            self._controller = controller
            late = self.aborted
        if late:
            ray.kill(controller)


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A worker's resources, such as {"CPU": 8.0, "GPU": 1.0}, its environment variables, and the nodes on which it may be. A run
    can use the workers of another run if they are of the same kind."""

    each: Mapping[str, float]
    env: Mapping[str, str]
    asked: ResourcesSpec = field(default_factory=ResourcesSpec)


def run_attempt(
    train_fn: Callable[[dict[str, Any]], Any] | str,
    config: dict[str, Any],
    *,
    session: Session,
    run_name: str,
    workers: int,
    kind: WorkerKind,
    abort: AbortHandle | None = None,
    start_timeout_s: float = 120.0,
    avoid: Collection[str] = (),
    places: Sequence[str] = (),
    coordinator: tuple[Any, int] | None = None,
    spread: bool = False,
) -> AttemptResult:
    """Runs `train_fn(config)` on every rank of a new group of workers, and waits until it ends.

    `train_fn`: a function, or its name "module:attribute", which only the workers import. When it is called, the environment of
    each worker has the variables of its `kind` and those of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK,
    MASTER_ADDR, MASTER_PORT. There is no process group yet: the train function chooses its network interface, and then calls
    `torch.distributed.init_process_group`, as under torchrun.

    `abort`: ends the attempt from another thread. `run_attempt` may run in any thread: it installs no signal handler. What rank 0
    returns (plain data) is the result's `value`.

    An exception of the train function arrives as plain data if it has the attributes of `RankError` (rank, at, type_name, message,
    traceback, bases): the worker must raise one that can be pickled, and imported without torch.

    `avoid`: ids of nodes without workers. `places`: the id of each worker's node; empty: Ray chooses, `spread`: as many nodes as
    possible, otherwise as few as possible. `coordinator`: see `ray_train_adapter._Controller`.

    `start_timeout_s`: how long to wait for the workers' resources; after that the failure is a "startup_timeout".

    Never raises for a failed attempt: the result's `failure` names the root cause.
    """
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

    from raydist.cluster.run.ray_errors import rank_errors
    from raydist.cluster.run.ray_train_adapter import Named, Trainer

    handle = abort or AbortHandle()
    # A new name, in the session's own directory: Ray Train finds no state there to resume from.
    scratch = session.temp_dir / "attempts"
    name = f"{run_name}-{session.job_id}-{next(_attempts)}"
    trainer = Trainer(
        Named(train_fn) if isinstance(train_fn, str) else train_fn,
        private=session.private,
        on_controller=handle.started,
        worker_env=kind.env,
        start_timeout_s=start_timeout_s,
        coordinator=coordinator,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=kind.each.get("GPU", 0.0) > 0,
            resources_per_worker={name: count for name, count in kind.each.items() if count},
            placement_strategy="SPREAD" if spread else "PACK",
            label_selector=_selector(avoid, places),
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(scratch),
            # Ray Train has a limit of retries for each kind of failure, two of them infinite. Here only raydist retries.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )
    try:
        result = trainer.fit()
    except (TrainingFailedError, RayError) as error:
        if handle.aborted:
            return AttemptResult(Failure("aborted", None, "aborted on request"))
        return AttemptResult(root_cause(rank_errors(error)))
    finally:
        if session.private or not nodes.head_replaced():
            _free_placement_groups(name)
        shutil.rmtree(scratch / name, ignore_errors=True)
    return AttemptResult(None, result.return_value)


def _selector(avoid: Collection[str], places: Sequence[str]) -> dict[str, str] | list[dict[str, str]] | None:
    if places:
        return [{nodes.NODE_ID_LABEL: node} for node in places]
    return {nodes.NODE_ID_LABEL: f"!in({','.join(sorted(avoid))})"} if avoid else None


def _free_placement_groups(name: str) -> None:
    """Removes the placement groups of that name: a controller that was killed does not remove its own.

    Ray Train's PlacementGroupCleaner does not remove a group that still waits for resources, and Ray removes none before the
    driver ends.
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
