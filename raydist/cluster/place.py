"""The cluster that a command means, and the nodes that a sweep will use there: their resources, how many cells train at once.

Runs in: the driver. Imports ray inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.errors import PreflightError, UsageError
from raydist.private_files import temporary_folder

if TYPE_CHECKING:
    from raydist.cluster.session import Session
    from raydist.report.sweep.forecast import Place
    from raydist.spec import JobSpec

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def where(address: str | None) -> str:
    """The address for `open_session`: `address`, else the cluster of RAY_ADDRESS, else "local": a private Ray on this machine.
    Raises UsageError."""
    return not_empty(address) or ("auto" if os.environ.get("RAY_ADDRESS") else "local")


def not_empty(address: str | None) -> str | None:
    """The same address. Raises UsageError for an empty one: that of a variable which is not set must not mean this machine."""
    if address == "":
        raise UsageError("address: is empty", 'give "auto" or HOST:PORT, or leave it out')
    return address


def session_of(
    job: JobSpec, address: str, log_dir: Path, *, own_code: bool, **options: Any
) -> AbstractContextManager[Session]:
    """`open_session` with the job's variables. The user's own code is that of the working directory: a private Ray finds it there,
    a cluster gets it if there is any (`own_code`)."""
    from raydist.cluster.run.request import worker_env
    from raydist.cluster.session import open_session

    shipped = Path.cwd() if own_code else None
    return open_session(address, env=worker_env(job), log_dir=log_dir, working_dir=shipped, **options)


@dataclass(frozen=True, slots=True)
class Ground:
    """The nodes of a cluster, or only this machine. `nodes`: as `ray.nodes()` lists them."""

    name: str
    nodes: tuple[Mapping[str, Any], ...]
    resources: Mapping[str, float]
    """Sums over all nodes, with `accelerator_type:NAME` if Ray knows it."""

    def place(self, jobs: Iterable[JobSpec], concurrent: int | None) -> Place:
        """For the forecast: how many of these cells train at once, at most `concurrent`."""
        from raydist.cluster.preflight import gpus_per_worker
        from raydist.cluster.sweep.capacity import asked, at_once
        from raydist.report.sweep.forecast import Place

        def gpus(job: JobSpec) -> float:
            return gpus_per_worker(job, self.resources)

        known = list(jobs)
        count, problem = None, ""
        if known:
            try:
                count = at_once(self.nodes, (asked(job, gpus(job), self.nodes) for job in known), concurrent)
            except PreflightError as error:
                problem = error.message
        return Place(f"{self.name} ({self._has()})", count, problem, gpus)

    def _has(self) -> str:
        cpus, gpus = (sum(node["Resources"].get(kind, 0.0) for node in self.nodes) for kind in ("CPU", "GPU"))
        many = f", {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        return f"{_count(cpus, 'CPU')}, {_count(gpus, 'GPU')}{many}"


def look(address: str) -> Ground:
    """The nodes at `address`, which is a result of `where`. Raises UserError if there is no such cluster."""
    if address == "local":
        here = {"CPU": float(_cpus()), **({"GPU": float(gpus)} if (gpus := _gpus()) else {})}
        return Ground("this machine", ({"Resources": here, "NodeManagerAddress": ""},), here)
    from raydist.cluster import preflight
    from raydist.cluster.session import open_session

    with temporary_folder() as logs, open_session(address, env={}, log_dir=logs) as session:
        return Ground(f"the cluster at {session.address}", tuple(preflight.answering(session)), session.resources)


def _cpus() -> int:
    """CPUs of a private Ray: the machine's, or the container's limit."""
    count = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def _gpus() -> int:
    from raydist.cluster.node_facts import host_gpus

    count = len(host_gpus()[0])
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if allowed is None else min(count, len([one for one in allowed.split(",") if one.strip()]))


def _count(number: float, what: str) -> str:
    return f"no {what}" if not number else f"{number:g} {what}{'s' if number != 1 else ''}"
