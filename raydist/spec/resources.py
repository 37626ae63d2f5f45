"""The section `cluster.resources`: what the nodes of a run have, and which nodes it may use.

Runs anywhere. Preflight and `raydist check` hold a cluster against it; `raydist deploy` asks Kubernetes or Slurm for it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from raydist.spec.parts import PartWithNewFields, problem

Amount = Annotated[float, Field(gt=0)]


_OF_RAY = frozenset(["CPU", "GPU", "memory", "object_store_memory", "bundle"])
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ResourcesSpec(PartWithNewFields):
    """What each node has at least. A null field is not checked."""

    new_fields = ("custom",)

    nodes: int | None = Field(
        None, ge=1, description="Nodes of the run, for raydist deploy; null: as few as hold the workers and spares."
    )
    cpus: int | None = Field(None, ge=1, description="CPUs of a node.")
    gpus: int | None = Field(None, ge=0, description="GPUs of a node; 0: none.")
    gpu: str | None = Field(
        None, min_length=1, description="Model of each GPU: a part of the name that nvidia-smi shows, such as H100."
    )
    memory_gib: Amount | None = Field(None, description="Memory of a node in GiB.")
    shm_gib: Amount | None = Field(
        None, description="Size of /dev/shm in GiB; it holds Ray's objects and the memory checkpoints."
    )
    disk_gib: Amount | None = Field(
        None, description="Free space in GiB of offload.path, else of the folder for temporary files."
    )
    network_gbit: Amount | None = Field(
        None, description="Speed in Gbit/s of the interface that has the node's address in Ray."
    )
    storage_mb_s: Amount | None = Field(
        None,
        description="MB/s that a node writes to the storage of the runs while all nodes write; measured before training.",
    )
    storage_iops: Amount | None = Field(
        None, description="Small files a second that a node writes to that storage; measured before training."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of Ray (`ray start --labels`) that a node must have; the run uses no others.",
    )
    custom: dict[str, Amount] = Field(
        default_factory=dict,
        description="Custom resources of Ray (`ray start --resources`) that each worker takes of its node, such as "
        "{fast_nvme: 1}.",
    )
    exclude: list[str] = Field(
        default_factory=list,
        description="Addresses of nodes that the run does not use, such as slow ones of raydist check.",
    )

    @model_validator(mode="after")
    def _custom_ones(self) -> ResourcesSpec:
        for name, count in self.custom.items():
            if name in _OF_RAY or not _NAME.fullmatch(name):
                raise problem(f"custom.{name}", count, "is not a custom resource", "CPUs and GPUs: cluster.cpus_per_worker, "
                              "gpus_per_worker; a name has letters, digits and _.-")  # fmt: skip
            if count > 1 and not count.is_integer():
                raise problem(f"custom.{name}", count, "is above 1 and not whole, which Ray refuses", "round it")
        return self
