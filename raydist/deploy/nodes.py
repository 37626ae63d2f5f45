"""How many nodes a job needs, and what each of them has: from `cluster`, for every kind of deployment.

Runs anywhere. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from raydist.errors import UserError
from raydist.spec import JobSpec

SAVE_S = 30
"""Seconds that a node has for a checkpoint, at least, before it is taken away."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """`most` nodes, with `least` of which the run still continues; each has these CPUs and GPUs, and GiB of memory and /dev/shm.

    `custom`: its custom resources of Ray. `grace_s`: seconds that a node needs to save a checkpoint before it is taken away.
    """

    least: int
    most: int
    cpus: int
    gpus: int
    memory_gib: float | None
    shm_gib: float | None
    custom: Mapping[str, int]
    grace_s: int

    @classmethod
    def of(cls, job: JobSpec) -> Nodes:
        """The nodes of this job. Raises UserError if `cluster` does not say how many workers a node holds."""
        cluster, has = job.cluster, job.cluster.resources
        each = cluster.gpus_per_worker
        if each == "auto" and has.gpus is None:
            raise UserError(
                "cluster.resources.gpus: null does not say how many GPUs a node has",
                "set it, such as --set cluster.resources.gpus=8; 0 for nodes without GPUs",
            )
        gpus = has.gpus if has.gpus is not None else 0
        per_gpu = (1.0 if gpus else 0.0) if each == "auto" else float(each)
        if per_gpu and not gpus:
            raise UserError(
                f"cluster.resources.gpus: {has.gpus if has.gpus is not None else 'null'}, but each worker has {per_gpu:g} GPUs "
                "(cluster.gpus_per_worker)",
                "set it to the GPUs of a node, such as --set cluster.resources.gpus=8",
            )
        workers = cluster.most + cluster.spares
        if has.nodes is not None:
            holds = math.ceil(workers / has.nodes)
        elif per_gpu:
            holds = int(gpus / per_gpu)
        elif has.cpus is not None:
            holds = int(has.cpus / cluster.cpus_per_worker)
        else:
            raise UserError(
                "cluster.resources: neither nodes, gpus nor cpus says how many workers a node holds",
                "set one of them, such as --set cluster.resources.nodes=2",
            )
        together = job.parallel.together
        # As many nodes as the job says must hold all workers: there the number is rounded up.
        holds = min(holds + (-holds % together if has.nodes is not None else -(holds % together)), workers)
        cpus = has.cpus or math.ceil(holds * cluster.cpus_per_worker)
        fits = min(int(cpus / cluster.cpus_per_worker), int(gpus / per_gpu) if per_gpu else holds)
        if not holds or fits < holds:
            raise UserError(
                f"cluster.resources: a node of {cpus} CPUs and {gpus} GPUs holds {fits} workers of {cluster.cpus_per_worker:g} "
                f"CPUs and {per_gpu:g} GPUs; the job needs {max(holds, together)} on each",
                "raise nodes, cpus or gpus of cluster.resources, or lower cluster.cpus_per_worker",
            )
        most = has.nodes or math.ceil(workers / holds)
        return cls(
            least=min(math.ceil(cluster.least / holds), most),
            most=most,
            cpus=cpus,
            gpus=gpus,
            memory_gib=has.memory_gib,
            shm_gib=has.shm_gib,
            custom={name: math.ceil(count * holds) for name, count in has.custom.items()},
            grace_s=SAVE_S + math.ceil(job.checkpoint.timeout_s),
        )

    @property
    def start(self) -> dict[str, str]:
        """Options of `ray start` on such a node, without their dashes."""
        asked = {"num-cpus": str(self.cpus), "num-gpus": str(self.gpus)}
        return asked | ({"resources": json.dumps(self.custom)} if self.custom else {})
