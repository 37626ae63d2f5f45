"""Starts a run's monitor as an actor.

Runs in: the driver. Imports ray in functions only; must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydist.observe.run_monitor import DEFAULT_EXPORTERS, INTERVAL_S, RunMonitor
from raydist.run.driver_process import this_process


def start_monitor(
    run_uri: str,
    *,
    interval_s: float = INTERVAL_S,
    exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS,
    spec: Mapping[str, Any] | None = None,
) -> Any:
    """Starts the run's monitor as an actor: zero CPUs, on this process's node, ends with this process. Returns its handle at once.

    Needs a running Ray. `ray.get(handle.snapshot.remote())` waits until it is up, and raises errors of its constructor.
    """
    return placed(RunMonitor).remote(run_uri, this_process(), interval_s, exporters, spec)


def placed(monitor: type[RunMonitor]) -> Any:
    """The actor class of a monitor, with its options: `.remote(...)` starts it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return ray.remote(monitor).options(
        num_cpus=0,
        # flush may wait for storage: pushes and snapshots run in parallel.
        max_concurrency=8,
        # Ray restarts a killed monitor; it continues its records with the next push.
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )
