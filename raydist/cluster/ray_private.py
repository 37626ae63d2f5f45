"""Every private name of Ray that raydist uses, with its purpose and the reason why Ray's public API is not enough.

Runs in: the driver, `raydist submit`, and by reference in Ray Train's controller and workers. Never imports torch. Nothing of Ray
is imported before a name is used: `from raydist.cluster.ray_private import Node` imports ray._private.node, and nothing else.

No other module imports a private module of Ray. pyproject.toml allows one minor version of Ray, because a new one may move any of
these names. tests/cluster/test_ray_private.py checks all of them against the Ray that is installed; each failure says what moved
and what raydist uses it for.

"Private" is here: modules and attributes whose name begins with an underscore, and modules that Ray's API reference does not name
(ray.train.v2, ray.core).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One private name of Ray. `path`: "module:attribute", or a module.

    `used_for`: what raydist does with it. `public`: what Ray's public API lacks. `members`: the methods and attributes of it that
    raydist calls, overrides or reads; for a class, instance attributes too.
    """

    path: str
    used_for: str
    public: str
    members: tuple[str, ...] = ()


_TRAIN = "ray.train.v2._internal"
_NO_CALLBACK_CHOICE = "RunConfig.callbacks adds callbacks; no option leaves out a default one"
_NO_TIMING = "only this environment variable sets it; its name is not documented"

NAMES = {
    # --- cluster/local_ray.py: a private Ray of one node
    "Node": PrivateName(
        "ray._private.node:Node",
        "starts a private Ray without dashboard, autoscaler monitor and log monitor (0.8 s instead of 2.5 s)",
        "ray.init() and `ray start` always start them, and start the raylet only after them",
        (
            "start_api_server",
            "start_raylet",
            "get_gcs_client",
            "kill_all_processes",
            "address",
            "_session_dir",
            "_node_id",
            "_ray_params",
            "_node_ip_address",
        ),
    ),
    "RayParams": PrivateName(
        "ray._private.parameter:RayParams",
        "the options of Node; setup_worker_path has workers started by ray_worker.py",
        "ray.init() has no options for the processes to start",
    ),
    "ResourceIsolationConfig": PrivateName(
        "ray._private.resource_isolation_config:ResourceIsolationConfig",
        "a required option of Node: no cgroups for a private Ray",
        "ray.init() makes this object by itself",
    ),
    "persist_port": PrivateName(
        "ray._raylet:persist_port",
        "writes the ports of the raylet's agents before they start, so that the raylet registers without waiting for them",
        "no option tells the raylet not to wait for its agents",
    ),
    "DASHBOARD_AGENT_LISTEN_PORT_NAME": PrivateName(
        "ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME", "a file name for persist_port", "as for persist_port"
    ),
    "METRICS_AGENT_PORT_NAME": PrivateName(
        "ray._raylet:METRICS_AGENT_PORT_NAME", "a file name for persist_port", "as for persist_port"
    ),
    "METRICS_EXPORT_PORT_NAME": PrivateName(
        "ray._raylet:METRICS_EXPORT_PORT_NAME", "a file name for persist_port", "as for persist_port"
    ),
    "RUNTIME_ENV_AGENT_PORT_NAME": PrivateName(
        "ray._raylet:RUNTIME_ENV_AGENT_PORT_NAME", "a file name for persist_port", "as for persist_port"
    ),
    "services": PrivateName(
        "ray._private.services",
        "starts the raylet with ray_agent.py in place of its two agents",
        "no option tells the raylet to start its agents later, or never",
        ("start_ray_process",),
    ),
    "utils": PrivateName(
        "ray._private.utils",
        "starts the raylet without importing the dashboard's dependencies, and each process in a process group of its own",
        "as for services",
        ("get_dashboard_dependency_error", "set_kill_on_parent_death_linux"),
    ),
    "JobConfig": PrivateName(
        "ray.job_config:JobConfig",
        "keeps workers from looking for modules in the working directory before the installed packages",
        "ray.init() always adds the working directory and the script's folder",
        ("_py_driver_sys_path",),
    ),
    # --- cluster/ray_preload.py: a process that has imported Ray, from which workers are forked
    "actor": PrivateName(
        "ray.actor",
        "draws the ids of actor classes elsewhere while modules are imported",
        "Ray's generator of ids is not safe to use before a fork",
        ("ActorClassID",),
    ),
    "ActorClassID": PrivateName("ray._raylet:ActorClassID", "as for actor", "as for actor", ("from_random", "size")),
    "WorkerID": PrivateName(
        "ray._raylet:WorkerID",
        "checks that forked processes draw different ids",
        "as for actor",
        ("from_random", "binary"),
    ),
    # --- cluster/session.py, cluster/authentication.py: the driver's connection
    "Config": PrivateName(
        "ray._raylet:Config",
        "reads the authentication mode from os.environ again, for the second session of a process",
        "Ray reads it once a process, at its import",
        ("initialize",),
    ),
    "AuthenticationTokenLoader": PrivateName(
        "ray._raylet:AuthenticationTokenLoader",
        "reads the token again, for the second session of a process",
        "Ray keeps the first token that it has read",
        ("instance",),
    ),
    "init_grpc_channel": PrivateName(
        "ray._private.grpc_utils:init_grpc_channel",
        "asks the head whether it accepts the token, with Ray's own TLS settings and token",
        "ray.init() retries for 20 s and does not report why the head refuses",
    ),
    "auto_init_hook": PrivateName(
        "ray._private.auto_init_hook",
        "keeps Ray's calls from connecting to a cluster by themselves, after a session and before the next one",
        "RAY_ENABLE_AUTO_CONNECT is read at Ray's import, which is too early",
        ("enable_auto_connect",),
    ),
    "find_gcs_addresses": PrivateName(
        "ray._private.services:find_gcs_addresses",
        "lists the clusters of this host, for --address auto",
        'ray.init("auto") chooses one where several run',
    ),
    # --- cluster/nodes.py, cluster/run/fault_injector.py: the cluster's nodes
    "available_resources_per_node": PrivateName(
        "ray._private.state:available_resources_per_node",
        "the free resources of each node: how many workers have room",
        "ray.available_resources() has the sum of all nodes",
    ),
    "internal_kv_get_gcs_client": PrivateName(
        "ray.experimental.internal_kv:internal_kv_get_gcs_client",
        "the nodes that are being drained, which the run then leaves; raises if the head was started again",
        "ray.nodes() does not say which nodes are draining; get_draining_nodes aborts this process if the head was started again",
    ),
    "GcsClient": PrivateName(
        "ray._raylet:GcsClient",
        "drains a node that is about to be taken away",
        "only the command `ray drain-node` does it",
    ),
    "autoscaler_pb2": PrivateName(
        "ray.core.generated.autoscaler_pb2",
        "the reason of a drain",
        "only the command `ray drain-node` has it",
        ("DrainNodeReason",),
    ),
    "gcs_pb2": PrivateName(
        "ray.core.generated.gcs_pb2",
        "the state of a node that is being drained",
        "ray.nodes() does not say which nodes are draining",
        ("NodeSnapshot",),
    ),
    # --- cluster/package.py: what is shipped to a cluster
    "get_runtime_env_default_excludes": PrivateName(
        "ray._private.ray_constants:get_runtime_env_default_excludes",
        "the folders that Ray never ships: raydist's list of files is Ray's",
        "Ray documents the list, and has no function for it",
    ),
    "get_excludes_from_ignore_files": PrivateName(
        "ray._private.runtime_env.packaging:get_excludes_from_ignore_files",
        "what .gitignore and .rayignore exclude, as Ray reads them",
        "Ray applies them while it makes the archive, without an error for one that is too large",
    ),
    # --- cluster/run/ray_train_adapter.py, cluster/run/ray_errors.py: Ray Train
    "DataParallelTrainer": PrivateName(
        "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer",
        "the trainer without torch in the driver and the controller; gives out the controller's handle, to abort an attempt",
        "TorchTrainer imports torch; no trainer has a way to end fit() from another thread",
        ("_create_default_callbacks", "_initialize_and_run_controller", "scaling_config"),
    ),
    "TrainController": PrivateName(
        f"{_TRAIN}.execution.controller:TrainController",
        "lets the other workers go on when one is lost, and sets its own intervals",
        "Ray Train ends the whole group when it loses a worker",
        ("worker_group_cls", "_poll_workers", "abort", "run", "get_result"),
    ),
    "WorkerGroup": PrivateName(
        f"{_TRAIN}.execution.worker_group:WorkerGroup",
        "names the placement group after the run, uses idle processes as workers, and leaves out the SynchronizationActor",
        "ScalingConfig has no option for any of these",
        (
            "_create_placement_group",
            "_start_impl",
            "_create_workers",
            "_get_worker_runtime_env",
            "_train_run_context",
        ),
    ),
    "DefaultPlacementGroupHandle": PrivateName(
        f"{_TRAIN}.execution.worker_group.placement_group_handle:DefaultPlacementGroupHandle",
        "what WorkerGroup._create_placement_group returns",
        "as for WorkerGroup",
    ),
    "FixedScalingPolicy": PrivateName(
        f"{_TRAIN}.execution.scaling_policy.fixed:FixedScalingPolicy",
        "a fixed number of workers without the AutoscalingCoordinator actor, for a private Ray (1 to 2 s less)",
        "the trainer always makes its own scaling policy, which starts that actor",
        (
            "after_controller_start",
            "_maybe_send_resource_request",
            "before_controller_shutdown",
            "before_controller_abort",
        ),
    ),
    "TrainingFramework": PrivateName(
        f"{_TRAIN}.util:TrainingFramework",
        "what BackendConfig.framework must return",
        "BackendConfig is public, and this type of its property is not",
        ("TORCH",),
    ),
    "DatasetsCallback": PrivateName(
        f"{_TRAIN}.callbacks:DatasetsCallback", "is left out: it starts an actor for Ray Datasets", _NO_CALLBACK_CHOICE
    ),
    "WorkingDirectorySetupCallback": PrivateName(
        f"{_TRAIN}.callbacks:WorkingDirectorySetupCallback",
        "is left out: its chdir breaks relative paths in users' code",
        _NO_CALLBACK_CHOICE,
    ),
    "ControllerMetricsCallback": PrivateName(
        f"{_TRAIN}.callbacks.metrics:ControllerMetricsCallback",
        "is left out: its metrics are not read",
        _NO_CALLBACK_CHOICE,
    ),
    "WorkerMetricsCallback": PrivateName(
        f"{_TRAIN}.callbacks.metrics:WorkerMetricsCallback",
        "is left out: its metrics are not read",
        _NO_CALLBACK_CHOICE,
    ),
    "PlacementGroupCleanerCallback": PrivateName(
        f"{_TRAIN}.callbacks.placement_group_callback:PlacementGroupCleanerCallback",
        "is left out on a private Ray, which ends with its driver",
        _NO_CALLBACK_CHOICE,
    ),
    "ENABLE_PREEMPTION_WATCHER_ENV_VAR": PrivateName(
        f"{_TRAIN}.constants:ENABLE_PREEMPTION_WATCHER_ENV_VAR",
        "turns off Ray Train's watcher of drained nodes",
        _NO_TIMING,
    ),
    "HEALTH_CHECK_INTERVAL_S_ENV_VAR": PrivateName(
        f"{_TRAIN}.constants:HEALTH_CHECK_INTERVAL_S_ENV_VAR",
        "has the controller look at its workers every second",
        _NO_TIMING,
    ),
    "WORKER_GROUP_START_TIMEOUT_S_ENV_VAR": PrivateName(
        f"{_TRAIN}.constants:WORKER_GROUP_START_TIMEOUT_S_ENV_VAR",
        "how long the workers wait for their resources",
        _NO_TIMING,
    ),
    "WorkerHealthCheckFailedError": PrivateName(
        f"{_TRAIN}.exceptions:WorkerHealthCheckFailedError",
        "tells a worker that died from one that raised",
        "WorkerGroupError.worker_failures has these objects, and their classes are not public",
        ("health_check_failure",),
    ),
    "WorkerHealthCheckTimeoutError": PrivateName(
        f"{_TRAIN}.exceptions:WorkerHealthCheckTimeoutError",
        "tells a worker that does not answer from one that died",
        "WorkerGroupError.worker_failures has these objects, and their classes are not public",
    ),
    # --- cluster/sweep/ray_tune.py: Ray Tune without its statistics, its actors without a runtime environment
    "class_cache": PrivateName(
        "ray.tune.execution.class_cache",
        "a trial's actor gets no variables: with a runtime environment it cannot be forked, and takes 2 to 3 s of processor time",
        "Ray Tune always gives its actors a runtime environment with PL_DISABLE_FORK, for PyTorch Lightning",
        ("DEFAULT_ENV_VARS", "ENV_VARS_TO_PROPAGATE"),
    ),
    "air_usage": PrivateName(
        "ray.air._internal.usage",
        "a sweep does not count its callbacks for Ray's statistics: that imports wandb and mlflow, 1 s of a start",
        "Tuner always counts them, also where usage statistics are turned off",
        ("tag_callbacks",),
    ),
}
"""Name in this module -> the name of Ray that it stands for."""


class RayMoved(ImportError):
    """A private name of Ray that the installed version does not have."""


def resolve(name: str) -> Any:
    """The object of Ray that NAMES has under `name`. Raises RayMoved, with the version, the name and its use."""
    known = NAMES[name]
    module, _, attribute = known.path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        import ray

        path = known.path.replace(":", ".")
        raise RayMoved(f"Ray {ray.__version__}: {path} moved: used for: {known.used_for} ({error})") from error


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return resolve(name)
