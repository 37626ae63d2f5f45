"""The sections of a job file that say how it is run, and leave its numbers alone: ranks, memory, checkpoints, faults, watching.

Runs anywhere. Each field's help is written here once; see raydist/spec/models.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist.spec.parts import Part, problem


class ParallelSpec(Part):
    """How the work is split over the workers."""

    strategy: str = Field(
        "ddp",
        description="A built-in strategy (ddp, zero1, zero2, zero3, hsdp), or package.module:attribute of your own.",
    )
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        None,
        description="ddp: size of a gradient bucket in MiB; auto: the faster of torch's and what the link asks for, measured at a "
        "run's first start (docs/bench.md); null: torch's.",
    )
    shard: int | None = Field(
        None, ge=1, description="hsdp: ranks that share one copy of the state; default: those of a node."
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        "auto",
        description="zero3, hsdp: drop a block's gathered parameters after its forward pass and gather them again in backward; "
        "auto: all blocks but the last.",
    )
    prefetch: int = Field(1, ge=0, description="zero3, hsdp: blocks whose parameters are gathered ahead of their use.")


class OffloadSpec(Part):
    """What lives outside the device's memory."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where the optimizer's state lives and its update is computed: cpu in host memory, nvme in a file.",
    )
    parameters: Literal["none", "cpu"] = Field(
        "none", description="zero3, hsdp: where each rank's shard of the parameters lives between uses."
    )
    path: str | None = Field(
        None, description="nvme: a folder on each node's fast local disk; each rank keeps one scratch file in it."
    )
    chunk_mb: float = Field(8.0, gt=0, description="nvme: MiB of optimizer state that are read or written at a time.")

    @model_validator(mode="after")
    def _fits(self) -> OffloadSpec:
        if self.optimizer == "nvme" and self.path is None:
            raise problem(
                "path", None, "is needed by optimizer: nvme", "name a folder on a fast local disk of each node"
            )
        return self


class CheckpointSpec(Part):
    """When the state is saved."""

    every: int | None = Field(50, ge=1, description="Steps between checkpoints; null: only at the end.")
    keep: int = Field(
        3, ge=1, description="Committed checkpoints to keep, besides the best; older ones go after the next commit."
    )
    asynchronous: bool = Field(True, description="Write in the background; the loop stops only to copy the state.")
    replicas: list[str] = Field(
        default_factory=list,
        description="Folders or URIs that hold runs, as --storage does: each gets a verified copy of every committed checkpoint, "
        "in the background, which a restart uses where the first one is bad or gone.",
    )
    verify_every: int | None = Field(
        None,
        ge=1,
        description="Commits between two looks at every byte of all checkpoints, in the background; a bad one is named, and mended "
        "from where it is good; null: never.",
    )
    max_failures: int = Field(
        3, ge=1, description="Saves in a row that fail before the run stops; until then the next due step tries again."
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a save may be on its way. Past them each due step that it keeps from saving is a failure, and "
        "the end of a run no longer waits for it.",
    )


class SpikeSpec(Part):
    """When a loss counts as a spike."""

    factor: float | None = Field(
        None,
        gt=1,
        description="A loss above this many times the median is one, and on_nan says what is done; null: none is.",
    )
    window: int = Field(
        100, ge=2, description="Losses that the median is taken of: the last trained ones; fewer are no measure."
    )


class RecoverySpec(Part):
    """What a failure costs."""

    max_failures: int = Field(
        3, ge=-1, description="Failures without progress in between before the run stops; -1: no limit."
    )
    backoff_s: float = Field(
        1.0,
        ge=0,
        description="Seconds before the second restart without progress in between; doubles with each further one. The first "
        "restart is at once.",
    )
    backoff_cap_s: float = Field(60.0, ge=0, description="The longest wait before a restart, in seconds.")
    snapshot_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto",
        description="Steps between copies of the state in the nodes' memory, which a restart goes on from; auto: as often as costs "
        "1% of the time, measured, and none with offload.optimizer: nvme; null: none.",
    )
    step_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that a rank may be in one phase of a step before the attempt is ended as hung; "
        "null: max(10, 5 x the 99th percentile of the steps so far).",
    )
    wait_for_nodes: float = Field(
        600.0,
        ge=0,
        description="Seconds to wait for nodes while fewer workers than the run needs find room; then it stops.",
    )
    wait_for_spare_s: float = Field(
        0.0,
        ge=0,
        description="cluster.workers: [least, most]: seconds to wait for all workers before going on with fewer.",
    )
    head_timeout: float = Field(
        40.0,
        gt=0,
        le=55,
        description="On a cluster: seconds that Ray's head may be silent before the run ends; after half of it the ranks are asked "
        "for a checkpoint. Ray's own processes end after 60.",
    )
    timeout_s: float = Field(1800.0, gt=0, description="Seconds that a collective may take before the attempt fails.")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient that is not finite is never applied. stop: the run ends; skip: the step is left out; "
        "rollback: go on from the newest checkpoint, and leave the batch out when its turn comes again.",
    )
    max_skips: int = Field(
        10, ge=1, description="on_nan: skip: steps in a row that may be left out before the run stops."
    )
    max_rollbacks: int = Field(
        3, ge=0, description="Rollbacks of the whole run before it stops: on_nan: rollback, and train.check_replicas."
    )
    spike: SpikeSpec = Field(default_factory=lambda: SpikeSpec(), description="When a loss counts as a spike.")
    on_oom: Literal["stop", "shrink_micro_batch"] = Field(
        "shrink_micro_batch",
        description="After running out of memory: stop, or go on with at most half the micro-batch and more accumulation.",
    )
    data_timeout: float | Literal["auto"] | None = Field(
        "auto",
        description="Seconds without a batch after which the loader is started again at its cursor, twice at most; auto: a sixth "
        "of timeout_s, so that it is mended before the other ranks give up; null: never.",
    )

    @model_validator(mode="after")
    def _fits(self) -> RecoverySpec:
        if not isinstance(self.data_timeout, str) and self.data_timeout is not None:
            if self.data_timeout <= 0:
                raise problem(
                    "data_timeout", self.data_timeout, "is no time to wait", "give seconds, auto, or null for never"
                )
            if 3 * self.data_timeout >= self.timeout_s:
                raise problem("data_timeout", self.data_timeout,
                              f"leaves no time for two restarts before the other ranks give up after {self.timeout_s:g} s",
                              f"give less than {self.timeout_s / 3:g}, or raise recovery.timeout_s")  # fmt: skip
        return self

    @property
    def data_patience(self) -> float | None:
        """Seconds that a rank waits for its loader; None: for ever."""
        return self.timeout_s / 6 if self.data_timeout == "auto" else self.data_timeout


def _short_exporter(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ExporterSpec(Part):
    """Where steps, events and samples go besides the run's folder."""

    name: str = Field(
        description="A built-in exporter (tensorboard, jsonl, prometheus, mlflow), or package.module:attribute of your own."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="What that exporter is told; docs/exporters.md.")


class ObserveSpec(Part):
    """What is watched beside the steps."""

    interval_s: float | None = Field(
        1.0, ge=0.1, description="Seconds between readings of memory, communication, GPUs and hosts; null: none."
    )
    memory_history: int = Field(
        0,
        ge=0,
        description="GPUs: newest allocations and frees that torch remembers with their lines of code, for the snapshot after "
        "running out of memory, about 2 us each; 0: the snapshot has blocks without lines.",
    )
    exporters: list[Annotated[ExporterSpec, BeforeValidator(_short_exporter)]] = Field(
        default_factory=lambda: [ExporterSpec(name="tensorboard")],
        description="Where steps, events and samples go besides the run's folder: names (tensorboard, jsonl, prometheus, mlflow, "
        "package.module:attribute), or the fields below.",
    )
    histograms: int | None = Field(
        None,
        ge=1,
        description="Steps between two histograms of every weight and gradient, for the exporters; null: none.",
    )
    grad_noise: int | None = Field(
        10,
        ge=1,
        description="Steps between two measurements of the gradient noise scale, the batch size beyond which more of it adds "
        "little; null: none.",
    )


class ClusterSpec(Part):
    """What the run takes of the cluster."""

    workers: int | tuple[int, int] = Field(
        1,
        description="Train workers: one process each, one GPU each where there are any. [least, most]: as many as find room; "
        "the run goes on with fewer when a node is lost, and grows again.",
    )
    spares: int = Field(
        0,
        ge=0,
        description="More workers that are held ready, with torch loaded, to take the place of those on a lost node.",
    )
    cpus_per_worker: float = Field(
        1.0, gt=0, description="CPUs reserved for each worker; also its torch threads on CPU."
    )
    gpus_per_worker: float | Literal["auto"] = Field(
        "auto", description="GPUs of each worker; auto: 1 where the cluster has enough, else 0."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers.")

    @model_validator(mode="after")
    def _orders(self) -> ClusterSpec:
        if not 1 <= self.least <= self.most:
            raise problem("workers", self.workers, "is no number of workers", "give one, or [least, most], from 1 up")
        return self

    @property
    def least(self) -> int:
        """The fewest workers that the run may have."""
        return self.workers[0] if isinstance(self.workers, tuple) else self.workers

    @property
    def most(self) -> int:
        """The most workers that it takes."""
        return self.workers[1] if isinstance(self.workers, tuple) else self.workers
