"""What Ray itself does with 64 to 256 nodes: seconds to place and start a group of workers, and to replace it when a node is lost.

    python benchmarks/ray_nodes.py [--nodes 16 64 128 256]

A private Ray with so many more raylets on this machine, as Ray's `Cluster` utility starts them, each with 8 GPUs that do not exist.
raydist's own `run_attempt` runs Ray Train's `fit` with one worker for each node, which has all its GPUs and imports no torch. All
processes share this machine's cores. To fit into its memory, workers are forked from one process, and stand-ins take the place of
the agents of each raylet, as on every private Ray of raydist. A size for which there is no memory is left out, with the reason.

"nodes": from the start of the first raylet until Ray lists all nodes. "placement group": until one with all GPUs of all nodes is
ready. "workers": from `fit` until the function runs on all of them. "lost node": from the SIGKILL of a raylet and its workers until
Ray lists the node as dead. "restart": from the abort of the group until the function runs on all workers of a new one, on the other
nodes. `cpu_s`: processor seconds of all processes until then, of which `gcs_s` are the GCS's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, remove_placement_group

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.cluster import local_ray, ray_worker
from raydist.cluster.ray_private import Node, RayParams
from raydist.cluster.run.fit import AbortHandle, AttemptResult, WorkerKind, run_attempt
from raydist.cluster.session import Session, open_session, worker_environment

GPUS = 8
NODE_MIB, LEFT_MIB = 130, 3000
"""What a node takes, with its worker, and what other processes of this machine may need."""
WAIT_S = 600.0


class Gate:
    """Where the workers report that they run, and wait until they may end."""

    def __init__(self) -> None:
        self.here = 0

    async def joined(self) -> None:
        """A worker runs."""
        self.here += 1

    async def count(self) -> int:
        """Workers that run."""
        return self.here


def hold(config: dict[str, Any]) -> None:
    """The function of each worker: until its group is aborted."""
    ray.get(config["gate"].joined.remote())
    threading.Event().wait()


def until(true: Callable[[], bool], what: str) -> None:
    """Waits for Ray."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


def available_mib() -> int:
    """Of this machine's memory."""
    return psutil.virtual_memory().available >> 20


class Worker(Node):  # type: ignore[misc]
    """One more node of a private Ray, with a raylet and the stand-ins of its agents."""

    def start_raylet(self, *given: Any, **named: Any) -> None:
        """As that of the private Ray's head."""
        agents = (local_ray.RUNTIME_ENV_AGENT, local_ray.DASHBOARD_AGENT)
        with local_ray.prepared_agents(self, on_demand=agents, metrics=False):
            super().start_raylet(*given, **named)


def add_node(gcs: str) -> Any:
    """Starts a node, and returns when it has registered."""
    asked = RayParams(
        gcs_address=gcs,
        num_cpus=1,
        num_gpus=GPUS,
        object_store_memory=80 << 20,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=0,
        include_log_monitor=False,
        setup_worker_path=ray_worker.__file__,
    )
    return Worker(asked, head=False, shutdown_at_exit=False, spawn_reaper=False)


def alive() -> set[str]:
    """Ids of the nodes with GPUs that Ray lists as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")}


class Clock:
    """Seconds and processor seconds of Ray's processes between two moments."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.begin()

    def begin(self) -> None:
        """From now."""
        self._at, self._cpu = time.monotonic(), self._spent()

    def end(self, what: str) -> None:
        """Until now; the next begins."""
        spent = self._spent()
        self.found[what] = {
            "seconds": round(time.monotonic() - self._at, 2),
            "cpu_s": round(sum(spent.values()) - sum(self._cpu.values()), 2),
            "gcs_s": round(spent["gcs"] - self._cpu["gcs"], 2),
        }
        print("   ", what, self.found[what], flush=True)
        self.begin()

    def _spent(self) -> dict[str, float]:
        found = dict.fromkeys(("gcs", "others"), 0.0)
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended
                role = "gcs" if process.name() == "gcs_server" else "others"
                found[role] += sum(process.cpu_times()[:2])
        return found


class Fit:
    """One `fit` with a worker on each of these nodes. The constructor returns when all of them run the function."""

    def __init__(self, session: Session, workers: int, avoid: set[str]) -> None:
        self.gate = ray.remote(Gate).options(num_cpus=0).remote()
        self._abort = AbortHandle()
        self.result: AttemptResult | None = None
        self._thread = threading.Thread(target=self._run, args=(session, workers, avoid))
        self._thread.start()
        until(lambda: self.result is not None or ray.get(self.gate.count.remote()) == workers, "workers that run")
        assert self.result is None, self.result

    def _run(self, session: Session, workers: int, avoid: set[str]) -> None:
        self.result = run_attempt(
            "ray_nodes:hold",
            {"gate": self.gate},
            session=session,
            run_name="nodes",
            workers=workers,
            kind=WorkerKind({"GPU": float(GPUS)}, {}),
            abort=self._abort,
            avoid=avoid,
            start_timeout_s=WAIT_S,
        )

    def end(self) -> None:
        """Aborts it."""
        self._abort.abort()
        self._thread.join()


def measured(count: int, session: Session) -> dict[str, Any]:
    """The figures of `count` nodes."""
    clock, before = Clock(), available_mib()
    gcs = session.address
    nodes: list[Any] = []
    try:
        while len(nodes) < count:
            nodes.append(add_node(gcs))
        until(lambda: len(alive()) == count, "nodes")
        clock.end("nodes")
        group = placement_group([{"GPU": float(GPUS)}] * count)
        ray.get(group.ready())
        clock.end("placement group")
        remove_placement_group(group)
        clock.begin()
        fit = Fit(session, count, set())
        clock.end("workers")
        clock.found["mib_a_node"] = {"available_before": before, "taken": round((before - available_mib()) / count)}
        known = alive()
        nodes.pop().kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        until(lambda: len(alive()) == count - 1, "a dead node")
        clock.end("lost node")
        fit.end()
        fit = Fit(session, count - 1, known - alive())
        clock.end("restart")
        fit.end()
        return clock.found
    finally:
        for node in nodes:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)


def main() -> None:
    """Prints the figures of each size, writes results/ray_nodes.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256])
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for count in options.nodes:
        needs = count * NODE_MIB + LEFT_MIB
        if available_mib() < needs:
            found[str(count)] = {"left out": f"needs {needs} MiB of memory, {available_mib()} are available"}
            print(count, found[str(count)], flush=True)
            continue
        print(count, flush=True)
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
            here = str(Path(__file__).parent)
            with open_session(
                "local", env=worker_environment(), log_dir=Path(folder, "logs"), python_path=[here]
            ) as session:
                found[str(count)] = measured(count, session)
        path = write("ray_nodes", {"load": os.getloadavg(), "nodes": found})
        print(path)


if __name__ == "__main__":
    main()
