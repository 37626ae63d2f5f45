"""Ray Train v2's trainer, cut to what a run of raydist needs.

Runs in: the driver, and by reference in Ray Train's controller and workers. Imports ray.train (0.8 CPU s); never torch
outside the workers. docs/adr/0003 has the figures behind each thing that is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import ray
from ray.train import Result
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.metrics import ControllerMetricsCallback, WorkerMetricsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import placement_group

from raydist.cluster.run.ray_errors import rank_error
from raydist.launch.rendezvous import hold_port, port_of

# Ray's 2 s are what an attempt lasts longer than its last step, and what a death goes unseen, on average half.
_POLL_S = "1.0"

# Of Ray Train's default callbacks, those that start an actor or do work that no run of raydist asks for.
_NOT_NEEDED = (
    DatasetsCallback,  # an actor that splits Ray Datasets; raydist/data reads its own shards
    ControllerMetricsCallback,
    WorkerMetricsCallback,
    WorkingDirectorySetupCallback,  # a chdir that would break relative paths in users' code
)


@dataclass
class TorchEnvironment(BackendConfig):
    """The environment that torchrun gives its processes, for Ray Train's workers: RANK, MASTER_ADDR and so on.

    Stands in for Ray's TorchConfig, whose import pulls torch into the driver and the controller (1 s of CPU and 75 MB
    each), and which starts the process group before the train function could choose a network interface for it.
    """

    env: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train's controller calls to set the workers up."""
        return _TorchEnvironmentBackend

    @property
    def framework(self) -> TrainingFramework:
        """For Ray Train's own records."""
        return TrainingFramework.TORCH


class _TorchEnvironmentBackend(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, TorchEnvironment)
        host, port = worker_group.execute_single(0, _rendezvous)
        common = {
            **backend_config.env,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(worker_group)),
        }
        pending = []
        for rank, worker in enumerate(worker_group.get_workers()):
            place = worker.distributed_context
            pending.append(
                worker_group.execute_single_async(
                    rank,
                    _set_environment,
                    {
                        **common,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(place.local_rank),
                        "LOCAL_WORLD_SIZE": str(place.local_world_size),
                        "NODE_RANK": str(place.node_rank),
                    },
                )
            )
        ray.get(pending)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _rendezvous() -> tuple[str, int]:
    """This node's IP, and a port that is held for rank 0 as long as this process lives."""
    held = hold_port()
    port = port_of(held)
    held.detach()
    return ray.util.get_node_ip_address(), port


class _QuietScalingPolicy(FixedScalingPolicy):
    """A fixed number of workers, without telling an autoscaler: for a Ray that has none.

    Saves the AutoscalingCoordinator, a detached actor, and a wait of 1 to 2 s for it.
    """

    def after_controller_start(self, train_run_context: Any) -> None: ...

    def _maybe_send_resource_request(self) -> None: ...

    async def before_controller_shutdown(self) -> None: ...

    def before_controller_abort(self) -> None: ...


class _NamedWorkerGroup(WorkerGroup):
    """Its resources are reserved, or waited for, under the run's name: see `trainer.run_attempt`."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        asked = worker_group_context
        made = placement_group(
            bundles=[asked.resources_per_worker] * asked.num_workers,
            strategy=asked.placement_strategy,
            name=self._train_run_context.run_config.name,
            bundle_label_selector=asked.label_selector,
        )
        return DefaultPlacementGroupHandle(made)


class _LeanWorkerGroup(_NamedWorkerGroup):
    """Workers in processes that are ready, and no SynchronizationActor."""

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._builder = worker_group_state_builder
        super()._start_impl(worker_group_state_builder)

    def _create_workers(self, *args: Any, **kwargs: Any) -> Any:
        # The barrier behind ray.train.report(), which raydist never calls. It was asked for a moment ago: end it
        # before it imports what the workers are waiting to import.
        ray.kill(self._builder.sync_actor)
        return super()._create_workers(*args, **kwargs)

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> dict[str, Any]:
        # Any runtime_env, an empty one too, asks for a new process; without one an idle process becomes the worker.
        return {}


class _Controller(TrainController):
    """Ray Train's controller, which looks more often whether the workers are done or dead.

    `minded`: the coordinator of a group of agents, and the group's number. It is told of an agent that dies, and decides what
    becomes of the others, who go on: only when all have died the group has failed.
    """

    worker_group_cls = _NamedWorkerGroup

    def __init__(self, *args: Any, start_timeout_s: float, minded: tuple[Any, int] | None, **kwargs: Any) -> None:
        self._minded = minded
        self._fallen: set[int] = set()
        # Set in its own process: by runtime_env they would cost it a new one.
        os.environ.setdefault(HEALTH_CHECK_INTERVAL_S_ENV_VAR, _POLL_S)
        os.environ[WORKER_GROUP_START_TIMEOUT_S_ENV_VAR] = str(start_timeout_s)
        os.environ[ENABLE_PREEMPTION_WATCHER_ENV_VAR] = "0"  # cluster/nodes.py minds the nodes that are drained
        super().__init__(*args, **kwargs)

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        if self._minded is None or len(status.errors) == len(status.worker_statuses):
            return status
        coordinator, group = self._minded
        for number, failure in status.errors.items():
            if number not in self._fallen:
                self._fallen.add(number)
                error = rank_error(number, failure, str(failure))
                facts = {"type_name": error.type_name, "message": error.message, "kind": error.kind}
                coordinator.fallen.remote(group, number, {**facts, "traceback": error.traceback})
            gone = replace(status.worker_statuses[number], running=False, error=None)
            status.worker_statuses[number] = gone
        return status


class _LeanController(_Controller):
    """The same, on a Ray of our own."""

    worker_group_cls = _LeanWorkerGroup


@dataclass(frozen=True, slots=True)
class Named:
    """A function by its name, `module:attribute`: imported where it is called, so the driver need not import it."""

    name: str

    def __call__(self, config: dict[str, Any]) -> Any:
        """Import it, and call it with `config`."""
        module, _, attribute = self.name.partition(":")
        return getattr(import_module(module), attribute)(config)


class Trainer(DataParallelTrainer):
    """`TorchTrainer` without torch in the driver, without helpers that this run does not need, and with a handle.

    `private`: on a Ray of our own there is no autoscaler and no other job's placement group, so the actors that look after
    those are left out. `on_controller` gets the controller's handle: to abort the attempt. `minded`: see `_Controller`.
    """

    def __init__(
        self,
        *args: Any,
        private: bool,
        on_controller: Callable[[Any], None],
        worker_env: Mapping[str, str],
        start_timeout_s: float,
        minded: tuple[Any, int] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, backend_config=TorchEnvironment(env=dict(worker_env)), **kwargs)
        self._private = private
        self._start_timeout_s, self._minded = start_timeout_s, minded
        self._on_controller = on_controller

    def _create_default_callbacks(self) -> list[Any]:
        unwanted = (*_NOT_NEEDED, PlacementGroupCleanerCallback) if self._private else _NOT_NEEDED
        return [c for c in super()._create_default_callbacks() if not isinstance(c, unwanted)]

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Result:
        # As Ray's own, but: no runtime_env where the process environment does (an idle worker can then be the
        # controller), no SIGINT handler (raydist's decides what Ctrl-C means), and the handle is handed out.
        if self._private:
            controller_init_kwargs["scaling_policy"] = _QuietScalingPolicy(self.scaling_config)
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        cls = _LeanController if self._private else _Controller
        controller = ray.remote(num_cpus=0, label_selector=here)(cls).remote(
            start_timeout_s=self._start_timeout_s, minded=self._minded, **controller_init_kwargs
        )
        self._on_controller(controller)
        ray.get(controller.run.remote())
        result: Result = ray.get(controller.get_result.remote())
        return result
