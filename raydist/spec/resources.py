"""The section `cluster.resources`: what the nodes of a run have, and which nodes it may use.

Runs anywhere. Preflight and `raydist check` hold a cluster against it; `raydist deploy` asks Kubernetes or Slurm for it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raydist.spec.parts import Part

Amount = Annotated[float, Field(gt=0)]


class ResourcesSpec(Part):
    """What each node has at least. A null field is not checked."""

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
    exclude: list[str] = Field(
        default_factory=list,
        description="Addresses of nodes that the run does not use, such as slow ones of raydist check.",
    )
