"""Ray Train v2's trainer, reduced to what a run of raydist needs.

Runs in: the driver, and by reference in Ray Train's controller and workers. Imports ray.train (0.8 CPU s); never torch
outside the workers. docs/adr/0003 has the measured cost of each part that is left out; ray_private.py lists Ray's private names.
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
from ray.util.placement_group import placement_group

from raydist.cluster.nodes import NODE_ID_LABEL
from raydist.cluster.ray_private import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
    ControllerMetricsCallback,
    DataParallelTrainer,
    DatasetsCallback,
    DefaultPlacementGroupHandle,
    FixedScalingPolicy,
    PlacementGroupCleanerCallback,
    TrainController,
    TrainingFramework,
    WorkerGroup,
    WorkerMetricsCallback,
    WorkingDirectorySetupCallback,
)
from raydist.cluster.run.ray_errors import rank_error
from raydist.ipc import RENDEZVOUS_SECRET
from raydist.launch.rendezvous import hold_port, new_secret, port_of

# Ray's default is 2 s. An attempt ends at the next poll after its last step, and a dead worker is detected then.
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
    """Gives Ray Train's workers the environment variables of torchrun: RANK, MASTER_ADDR and so on.

    Replaces Ray's TorchConfig, which imports torch into the driver and the controller (1 s of CPU and 75 MB each), and starts the
    process group before the train function can choose a network interface.
    """

    env: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that sets up the workers, in Ray Train's controller."""
        return _TorchEnvironmentBackend

    @property
    def framework(self) -> TrainingFramework:
        """For Ray Train's own usage records."""
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
            RENDEZVOUS_SECRET: new_secret(),
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
    """This node's IP, and a port that stays bound for rank 0 as long as this process lives."""
    host = ray.util.get_node_ip_address()
    held = hold_port(host)
    port = port_of(held)
    held.detach()
    return host, port


class _QuietScalingPolicy(FixedScalingPolicy):
    """A fixed number of workers, without requests to an autoscaler: a private Ray has none.

    So there is no AutoscalingCoordinator, a detached actor, and no wait of 1 to 2 s for it.
    """

    def after_controller_start(self, train_run_context: Any) -> None: ...

    def _maybe_send_resource_request(self) -> None: ...

    async def before_controller_shutdown(self) -> None: ...

    def before_controller_abort(self) -> None: ...


class _NamedWorkerGroup(WorkerGroup):
    """Its placement group has the run's name: `fit._free_placement_groups` finds it by that."""

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
    """Uses idle Ray processes as workers, and has no SynchronizationActor."""

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._builder = worker_group_state_builder
        super()._start_impl(worker_group_state_builder)

    def _create_workers(self, *args: Any, **kwargs: Any) -> Any:
        # The barrier of ray.train.report(), which raydist never calls. Ray has just started this actor: it is killed before
        # its imports compete with those of the workers.
        ray.kill(self._builder.sync_actor)
        return super()._create_workers(*args, **kwargs)

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> dict[str, Any]:
        # With any runtime_env, an empty one too, Ray starts a new process; without one it uses an idle process.
        return {}


class _Controller(TrainController):
    """Ray Train's controller, which polls the workers more often.

    `coordinator`: the handle of the coordinator of a group of agents, and the group's number. The controller reports a dead
    agent to it, and the other agents stay: the group has failed only when all agents have died. None: the first dead worker ends
    the group.
    """

    worker_group_cls = _NamedWorkerGroup

    def __init__(self, *args: Any, start_timeout_s: float, coordinator: tuple[Any, int] | None, **kwargs: Any) -> None:
        self._coordinator = coordinator
        self._reported: set[int] = set()
        # Set in this process: with runtime_env Ray would start a new process for the controller.
        os.environ.setdefault(HEALTH_CHECK_INTERVAL_S_ENV_VAR, _POLL_S)
        os.environ[WORKER_GROUP_START_TIMEOUT_S_ENV_VAR] = str(start_timeout_s)
        os.environ[ENABLE_PREEMPTION_WATCHER_ENV_VAR] = "0"  # cluster/nodes.py finds drained nodes
        super().__init__(*args, **kwargs)

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        if self._coordinator is None or len(status.errors) == len(status.worker_statuses):
            return status
        coordinator, group = self._coordinator
        for number, failure in status.errors.items():
            if number not in self._reported:
                self._reported.add(number)
                error = rank_error(number, failure, str(failure))
                facts = {"type_name": error.type_name, "message": error.message, "kind": error.kind}
                coordinator.agent_died.remote(group, number, {**facts, "traceback": error.traceback})
            gone = replace(status.worker_statuses[number], running=False, error=None)
            status.worker_statuses[number] = gone
        return status


class _LeanController(_Controller):
    """The same, on a private Ray."""

    worker_group_cls = _LeanWorkerGroup


@dataclass(frozen=True, slots=True)
class Named:
    """A function by its name, `module:attribute`: only the process that calls it imports it."""

    name: str

    def __call__(self, config: dict[str, Any]) -> Any:
        """Imports it, and calls it with `config`."""
        module, _, attribute = self.name.partition(":")
        return getattr(import_module(module), attribute)(config)


class Trainer(DataParallelTrainer):
    """`TorchTrainer` without torch in the driver, and without the helper actors that raydist does not need.

    `private`: a private Ray has no autoscaler and no other job's placement group, so the actors for these are left out.
    `on_controller` gets the controller's handle, which can abort the attempt. `coordinator`: see `_Controller`.
    """

    def __init__(
        self,
        *args: Any,
        private: bool,
        on_controller: Callable[[Any], None],
        worker_env: Mapping[str, str],
        start_timeout_s: float,
        coordinator: tuple[Any, int] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, backend_config=TorchEnvironment(env=dict(worker_env)), **kwargs)
        self._private = private
        self._start_timeout_s, self._coordinator = start_timeout_s, coordinator
        self._on_controller = on_controller

    def _create_default_callbacks(self) -> list[Any]:
        unwanted = (*_NOT_NEEDED, PlacementGroupCleanerCallback) if self._private else _NOT_NEEDED
        return [c for c in super()._create_default_callbacks() if not isinstance(c, unwanted)]

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Result:
        # As Ray's own method, but without runtime_env (so an idle process can become the controller) and without a SIGINT
        # handler (the supervisor handles Ctrl-C); and it gives out the controller's handle.
        if self._private:
            controller_init_kwargs["scaling_policy"] = _QuietScalingPolicy(self.scaling_config)
        here = {NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
        cls = _LeanController if self._private else _Controller
        controller = ray.remote(num_cpus=0, label_selector=here)(cls).remote(
            start_timeout_s=self._start_timeout_s, coordinator=self._coordinator, **controller_init_kwargs
        )
        self._on_controller(controller)
        ray.get(controller.run.remote())
        result: Result = ray.get(controller.get_result.remote())
        return result
