"""What a job file may say: one pydantic model a section, each field with its help.

Runs anywhere. The help is written once: the JSON Schema, docs/spec.md and the error messages come from it. Here are the whole,
and what its sections ask of one another; the sections are in training.py and running.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist.spec.parts import Part, SpecValueError, near_divisors, problem
from raydist.spec.running import (
    CheckpointSpec,
    ClusterSpec,
    ExporterSpec,
    ObserveSpec,
    OffloadSpec,
    ParallelSpec,
    RecoverySpec,
    SpikeSpec,
)
from raydist.spec.training import (
    DataSpec,
    EvalSpec,
    LossScaleSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    ScheduleSpec,
    TrainSpec,
    short_precision,
)


class JobSpec(Part):
    """One training job."""

    numbers_exclude: ClassVar[tuple[str, ...]] = (
        "name", "train.micro_batch", "train.compile", "train.checkpoint_activations", "train.check_replicas",
        "train.check_gradients", "parallel", "offload", "checkpoint", "eval", "recovery", "observe", "cluster", "data.prefetch",
        "data.source", "data.path", "optim.fused", "deepspeed",
    )  # fmt: skip
    """Fields that leave the numbers alone, or change them within float tolerance only; the data counts by its fingerprint."""

    name: str = Field(
        "run", description="Name of the run, and of its folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
    )
    deepspeed: str | None = Field(
        None,
        description="A DeepSpeed JSON file, relative to this one, whose fields count below this file's own; docs/deepspeed.md.",
    )
    model: ModelSpec = Field(default_factory=ModelSpec, description="What is trained.")
    data: DataSpec = Field(description="What it is trained on.")
    train: TrainSpec = Field(description="How long, in which batches.")
    optim: OptimSpec = Field(default_factory=lambda: OptimSpec(), description="The optimizer and its learning rate.")
    precision: Annotated[PrecisionSpec, BeforeValidator(short_precision)] = Field(
        default_factory=lambda: PrecisionSpec(), description="fp32, bf16 or fp16, or the fields below."
    )
    parallel: ParallelSpec = Field(
        default_factory=lambda: ParallelSpec(), description="How the work is split over the workers."
    )
    offload: OffloadSpec = Field(
        default_factory=lambda: OffloadSpec(), description="What lives outside the device's memory."
    )
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec(), description="When the state is saved.")
    eval: EvalSpec = Field(default_factory=lambda: EvalSpec(), description="When the held-out loss is measured.")
    recovery: RecoverySpec = Field(default_factory=lambda: RecoverySpec(), description="What a failure costs.")
    observe: ObserveSpec = Field(
        default_factory=lambda: ObserveSpec(), description="What is watched beside the steps; docs/observe.md."
    )
    cluster: ClusterSpec = Field(
        default_factory=lambda: ClusterSpec(), description="What the run takes of the cluster."
    )

    @model_validator(mode="after")
    def _fits(self) -> JobSpec:
        steps, warmup = self.train.steps, self.optim.schedule.warmup
        if steps is not None and warmup >= 1 and warmup > steps:
            raise problem(
                "optim.schedule.warmup",
                warmup,
                f"is longer than the run of {steps} steps",
                "write a fraction, such as 0.1",
            )
        if self.cluster.most > self.train.global_batch:
            raise problem("cluster.workers", self.cluster.workers,
                          f"is more than the {self.train.global_batch} sequences of a global batch",
                          "raise train.global_batch or take fewer workers")  # fmt: skip
        strategy, shard = self.parallel.strategy, self.parallel.shard
        if shard is not None and strategy == "hsdp" and self.cluster.least < self.cluster.most:
            raise problem("cluster.workers", self.cluster.workers, f"may be a number that {shard} does not divide",
                          "give one number of workers, or no parallel.shard")  # fmt: skip
        if shard is not None and strategy == "hsdp" and self.cluster.most % shard:
            raise problem("parallel.shard", shard, f"does not divide the {self.cluster.workers} workers",
                          near_divisors(self.cluster.most, shard))  # fmt: skip
        if self.offload.parameters == "cpu" and strategy in ("ddp", "zero1", "zero2"):
            raise problem("offload.parameters", "cpu", f"needs sharded parameters, and {strategy} keeps them whole",
                          "set parallel.strategy: zero3 or hsdp")  # fmt: skip
        if self.offload.optimizer != "none" and self.optim.name != "adamw":
            raise problem("offload.optimizer", self.offload.optimizer, f"is not there for optim.name: {self.optim.name}",
                          "use adamw, or offload.optimizer: none")  # fmt: skip
        if self.offload.optimizer == "nvme" and self.train.check_replicas is not None:
            raise problem("train.check_replicas", self.train.check_replicas,
                          "would read the optimizer's whole state back from offload.optimizer: nvme",
                          "set it to null, or offload.optimizer: cpu")  # fmt: skip
        return self

    @property
    def snapshot_every(self) -> int | Literal["auto"] | None:
        """recovery.snapshot_every; auto takes none where memory is so scarce that the optimizer's state is on disk."""
        every = self.recovery.snapshot_every
        return None if every == "auto" and self.offload.optimizer == "nvme" else every

    def numbers(self, fingerprint: str) -> dict[str, Any]:
        """The fields that change the numbers, as a flat dict of dotted names: what a resumed run must agree on.

        `fingerprint` is the dataset's, which stands for where it came from.
        """
        return {"data.fingerprint": fingerprint} | {
            name: value
            for name, value in flatten(self.model_dump(mode="json")).items()
            if not any(name == x or name.startswith(x + ".") for x in self.numbers_exclude)
        }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> one dict with dotted names; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


__all__ = [
    "CheckpointSpec",
    "ClusterSpec",
    "DataSpec",
    "EvalSpec",
    "ExporterSpec",
    "JobSpec",
    "LossScaleSpec",
    "ModelSpec",
    "ObserveSpec",
    "OffloadSpec",
    "OptimSpec",
    "ParallelSpec",
    "Part",
    "PrecisionSpec",
    "RecoverySpec",
    "ScheduleSpec",
    "SpecValueError",
    "SpikeSpec",
    "TrainSpec",
    "flatten",
]
