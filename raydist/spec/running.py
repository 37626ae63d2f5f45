"""The sections of a job file that do not change its numbers: memory, checkpoints, recovery, observation, cluster.

Runs anywhere. Each field's description is written here once; see raydist/spec/models.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist.spec.parallel import MOST_WORKERS
from raydist.spec.parts import Extension, Part, PartWithNewFields, problem, short_name
from raydist.spec.resources import ResourcesSpec


class OffloadSpec(Part):
    """State that is kept outside the device's memory."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where the optimizer's state is kept and its update is computed: cpu in host memory, nvme in a file.",
    )
    parameters: Literal["none", "cpu"] = Field(
        "none", description="zero3, hsdp: where each rank's shard of the parameters is kept between uses."
    )
    path: str | None = Field(
        None, description="nvme: a folder on each node's fast local disk; each rank keeps one scratch file in it."
    )
    chunk_mb: float = Field(8.0, gt=0, description="nvme: MiB of optimizer state that are read or written at once.")

    @model_validator(mode="after")
    def _fits(self) -> OffloadSpec:
        if self.optimizer == "nvme" and self.path is None:
            raise problem(
                "path", None, "is needed by optimizer: nvme", "name a folder on a fast local disk of each node"
            )
        return self


class CheckpointSpec(PartWithNewFields):
    """When the state is saved."""

    new_fields = ("mtbf_h",)

    every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        50,
        description="Steps between checkpoints; auto: as many as lose the least time, from the measured cost of a save and mtbf_h; "
        "null: only at the end.",
    )
    keep: int = Field(
        3,
        ge=1,
        description="Committed checkpoints to keep, besides the best; older ones are deleted after the next commit.",
    )
    asynchronous: bool = Field(
        True, description="Write in the background; the loop waits only while the state is copied."
    )
    replicas: list[str] = Field(
        default_factory=list,
        description="Folders or URIs that hold runs, as --storage does: each gets a verified copy of every committed checkpoint, "
        "in the background, which a restart uses if the first one is damaged or missing.",
    )
    verify_every: int | None = Field(
        None,
        ge=1,
        description="Commits between two verifications of all checkpoints, byte by byte, in the background; a damaged one is "
        "named, and repaired from a good copy; null: never.",
    )
    max_failures: int = Field(
        3, ge=1, description="Saves in a row that fail before the run stops; until then the next due step tries again."
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a save may take. After that, each step that is due and cannot save because of it is a failure, "
        "and the end of a run no longer waits for it.",
    )
    mtbf_h: float = Field(
        50_000.0,
        gt=0,
        description="every: auto: mean hours between two failures of one worker and its share of the machine; of N workers one "
        "fails every mtbf_h / N hours.",
    )


class SpikeSpec(Part):
    """When a loss counts as a spike."""

    factor: float | None = Field(
        None,
        gt=1,
        description="A loss above this many times the median is a spike, which on_nan handles; null: no loss is one.",
    )
    window: int = Field(
        100, ge=2, description="The number of last trained losses for the median; with fewer, no loss is a spike."
    )


class RecoverySpec(Part):
    """What happens after a failure."""

    max_failures: int = Field(
        3, ge=-1, description="Failures without progress in between before the run stops; -1: no limit."
    )
    backoff_s: float = Field(
        1.0,
        ge=0,
        description="Seconds before the second restart without progress in between; doubles with each further one. The first "
        "restart is immediate.",
    )
    backoff_cap_s: float = Field(60.0, ge=0, description="The longest wait before a restart, in seconds.")
    snapshot_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto",
        description="Steps between copies of the state in the nodes' memory, for restarts; auto: as often as costs 1% of the time, "
        "measured, and none with offload.optimizer: nvme; null: none.",
    )
    step_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that a rank may spend in one phase of a step before the attempt is ended as hung; "
        "null: max(10, 5 x the 99th percentile of the steps so far).",
    )
    wait_for_nodes: float = Field(
        600.0,
        ge=0,
        description="Seconds to wait for nodes while there is room for fewer workers than the run needs; then it stops.",
    )
    wait_for_spare_s: float = Field(
        0.0,
        ge=0,
        description="cluster.workers: [least, most]: seconds to wait for all workers before the run continues with fewer.",
    )
    head_timeout: float = Field(
        40.0,
        gt=0,
        le=55,
        description="On a cluster: seconds that Ray's head may be silent before the run ends; after half of them the ranks save a "
        "checkpoint. Ray's own processes end after 60.",
    )
    timeout_s: float = Field(1800.0, gt=0, description="Seconds that a collective may take before the attempt fails.")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient that is not finite is never applied. stop: the run ends; skip: the step is left out; "
        "rollback: continue from the newest checkpoint, and leave that batch out.",
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
        description="After running out of memory: stop, or continue with at most half the micro-batch and more accumulation; with "
        "train.virtual_ranks the micro-batch stays, and activations are recomputed.",
    )
    data_timeout: float | Literal["auto"] | None = Field(
        "auto",
        description="Seconds without a batch after which the loader is restarted at its cursor, twice at most; auto: a sixth "
        "of timeout_s, so that it runs again before the other ranks time out; null: never.",
    )

    @model_validator(mode="after")
    def _fits(self) -> RecoverySpec:
        if not isinstance(self.data_timeout, str) and self.data_timeout is not None:
            if self.data_timeout <= 0:
                raise problem(
                    "data_timeout",
                    self.data_timeout,
                    "is not a positive number of seconds",
                    "give seconds, auto, or null for never",
                )
            if 3 * self.data_timeout >= self.timeout_s:
                raise problem("data_timeout", self.data_timeout,
                              f"leaves no time for two restarts before the other ranks time out after {self.timeout_s:g} s",
                              f"give less than {self.timeout_s / 3:g}, or raise recovery.timeout_s")  # fmt: skip
        return self

    @property
    def data_patience(self) -> float | None:
        """Seconds that a rank waits for its loader; None: for ever."""
        return self.timeout_s / 6 if self.data_timeout == "auto" else self.data_timeout


class ExporterSpec(Part):
    """Where steps, events and measurements go besides the run's folder."""

    name: Annotated[str, Extension("exporter")] = Field(
        description="A built-in exporter, or package.module:attribute of your own."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that exporter; docs/how-to/exporters.md."
    )


class HookSpec(Part):
    """Code of your own that the run calls at its steps, evaluations and checkpoints."""

    name: Annotated[str, Extension("hook")] = Field(
        description="package.module:attribute of your own; docs/extending.md."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The options of that hook.")
    ranks: Literal["first", "all"] = Field("first", description="The ranks that call it: rank 0, or each one.")
    on_error: Literal["stop", "report"] = Field(
        "stop",
        description="An exception of the hook ends the run with that cause, or is noted once while the run continues.",
    )


class ObserveSpec(PartWithNewFields):
    """What is measured besides the steps."""

    new_fields = ("expert_loads",)

    interval_s: float | None = Field(
        1.0, ge=0.1, description="Seconds between measurements of memory, communication, GPUs and hosts; null: none."
    )
    memory_history: int = Field(
        0,
        ge=0,
        description="GPUs: the number of latest allocations and frees that torch records with their lines of code, for the "
        "snapshot after running out of memory, about 2 us each; 0: the snapshot has blocks without lines of code.",
    )
    exporters: list[Annotated[ExporterSpec, BeforeValidator(short_name)]] = Field(
        default_factory=lambda: [ExporterSpec(name="tensorboard")],
        description="Where steps, events and measurements go besides the run's folder: a list of names, or of the fields below.",
    )
    histograms: int | None = Field(
        None,
        ge=1,
        description="Steps between two histograms of every weight and gradient, for the exporters, and two sizes of every layer's "
        "output; the doctor judges both; null: none.",
    )
    expert_loads: int | None = Field(
        1,
        ge=1,
        description="Steps between two records of the tokens and the bias of every expert, in the table of steps; null: none. The "
        "imbalance of each step is recorded anyway.",
    )
    grad_noise: int | None = Field(
        10,
        ge=1,
        description="Steps between two measurements of the gradient noise scale, the batch size above which a larger one "
        "adds little; null: none.",
    )


class ClusterSpec(PartWithNewFields):
    """The resources that the run uses."""

    new_fields = ("resources",)

    workers: int | tuple[int, int] = Field(
        1,
        description="Train workers: one process each, one GPU each where there are any. [least, most]: as many as there "
        "is room for; the run continues with fewer when a node is lost, and grows again.",
    )
    spares: int = Field(
        0,
        ge=0,
        le=MOST_WORKERS,
        description="Additional workers with torch loaded, to replace those on a lost node.",
    )
    cpus_per_worker: float = Field(
        1.0, gt=0, description="CPUs reserved for each worker; also its torch threads on CPU."
    )
    gpus_per_worker: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="GPUs of each worker; auto: 1 where the cluster has enough, else 0."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers.")
    resources: ResourcesSpec = Field(
        default_factory=lambda: ResourcesSpec(), description="What the nodes have; docs/how-to/deploy.md."
    )

    @model_validator(mode="after")
    def _orders(self) -> ClusterSpec:
        if self.most > MOST_WORKERS:
            raise problem("workers", self.most, f"is more than {MOST_WORKERS:,}, the limit", "give fewer")
        if not 1 <= self.least <= self.most:
            raise problem(
                "workers", self.workers, "is not a valid number of workers", "give one, or [least, most], from 1 up"
            )
        gpus = self.gpus_per_worker
        if isinstance(gpus, float) and gpus > 1 and not gpus.is_integer():
            raise problem("gpus_per_worker", gpus, "is above 1 and not whole, which Ray refuses", "round it")
        for name, value in self.env.items():
            if not name or {"=", "\0"} & {*name} or "\0" in value:
                what = "is a variable that no process can have: a name is not empty, and has no =; neither it nor a value has a NUL"
                raise problem("env", name, what, "leave it out")
        return self

    def each(self, gpus: float) -> dict[str, float]:
        """Ray's resources of each worker: {"CPU": 8.0, "GPU": 1.0}. `gpus`: per worker."""
        return {"CPU": self.cpus_per_worker, "GPU": gpus, **self.resources.custom}

    @property
    def least(self) -> int:
        """The fewest workers that the run may have."""
        return self.workers[0] if isinstance(self.workers, tuple) else self.workers

    @property
    def most(self) -> int:
        """The most workers that it takes."""
        return self.workers[1] if isinstance(self.workers, tuple) else self.workers
