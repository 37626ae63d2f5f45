"""What a job file may say: one pydantic model a section, each field with its help.

Runs anywhere. The help is written here once: the JSON Schema, docs/spec.md and the error messages come from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from raydist.spec.parts import SpecValueError, problem


class Part(BaseModel):
    """A section: unknown fields are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class ModelSpec(Part):
    """What is trained: a built-in model, or the user's own."""

    name: str = Field("gpt", description="A built-in model (gpt, mlp), or package.module:attribute of your own.")
    layers: int = Field(4, ge=1, description="Number of blocks.")
    width: int = Field(128, ge=1, description="Size of the residual stream.")
    heads: int = Field(4, ge=1, description="Attention heads; must divide width.")
    kv_heads: int | None = Field(
        None, ge=1, description="Key and value heads (grouped-query attention); default: heads."
    )
    context: int = Field(128, ge=1, description="Tokens of a sample: the longest sequence the model sees.")
    hidden: int | None = Field(
        None, ge=1, description="Width of the feed-forward layer; default: the model's own choice."
    )
    qk_norm: bool = Field(False, description="Normalise queries and keys of each head.")
    tie_embeddings: bool = Field(True, description="Use one matrix for the token embedding and the output head.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability of dropping an activation while training.")
    rope_base: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    options: dict[str, Any] = Field(default_factory=dict, description="Anything your own model wants to be told.")

    @model_validator(mode="after")
    def _fits(self) -> ModelSpec:
        if self.name == "gpt":
            if self.width % self.heads:
                raise problem(
                    "heads", self.heads, f"does not divide width {self.width}", _divisors(self.width, self.heads)
                )
            if (self.width // self.heads) % 2:
                raise problem("heads", self.heads, f"makes heads of odd size {self.width // self.heads}",
                              "rotary positions need an even width / heads")  # fmt: skip
            if self.kv_heads and self.heads % self.kv_heads:
                raise problem("kv_heads", self.kv_heads, f"does not divide heads {self.heads}",
                              _divisors(self.heads, self.kv_heads))  # fmt: skip
        return self


class DataSpec(Part):
    """What it is trained on: `source` is prepared on the way, `path` was prepared before."""

    source: str | None = Field(
        None,
        description="Text to prepare before the run: python-stdlib, a file, folder, glob or URI, or package.module:attribute "
        "that gives documents.",
    )
    path: str | None = Field(None, description="A dataset that `raydist data prepare` made: a folder or a URI.")
    tokenizer: str = Field("bytes", description="For `source`: bytes, bpe:VOCAB, or the path of a tokenizer.json.")
    column: str = Field(
        "text", description="For `source`: the field of JSON lines or the column of Parquet that holds the text."
    )
    eval_fraction: float = Field(
        0.01, gt=0, lt=1, description="For `source`: share of documents held out for evaluation."
    )
    pack: bool = Field(
        False, description="Keep documents in one sample apart: block-diagonal attention, positions that start anew."
    )
    prefetch: int = Field(2, ge=1, le=1000, description="Batches made ahead by the loader's thread.")

    @model_validator(mode="after")
    def _one(self) -> DataSpec:
        if (self.source is None) == (self.path is None):
            raise problem(
                "source", self.source, "and data.path: exactly one of them is needed", "set data.source or data.path"
            )
        return self


class TrainSpec(Part):
    """How long, in which batches."""

    steps: int | None = Field(None, ge=1, description="Optimizer steps in all; or give `epochs`.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training data; or give `steps`.")
    global_batch: int = Field(
        32, ge=1, description="Sequences of one optimizer step, over all workers; never changes with their number."
    )
    micro_batch: int = Field(8, ge=1, description="Sequences of one forward and backward pass of one worker.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Everything random comes from it: initial weights, data order, dropout."
    )
    deterministic: bool = Field(False, description="Use torch's deterministic algorithms; slower on GPU.")
    compile: bool | Literal["blocks"] = Field(
        False, description="torch.compile the whole model, or each block by itself: slower start, faster steps on GPU."
    )
    checkpoint_activations: Literal["none", "full", "selective"] = Field(
        "none",
        description="Compute each block's activations again in backward instead of keeping them: all of them, or all but "
        "those of matrix products and attention.",
    )
    check_replicas: int | None = Field(
        None,
        ge=1,
        description="Steps between two looks at whether ranks that are to hold the same weights do, by hash; also before each "
        "checkpoint. 1: odd weights reach no update; null: never.",
    )
    check_gradients: int | None = Field(
        None,
        ge=1,
        description="Steps between two looks at each parameter's gradient, after the sync: does it differ between replicas, is it "
        "missing, all zero, or not finite; told, and nothing else is done; null: never.",
    )

    @model_validator(mode="after")
    def _fits(self) -> TrainSpec:
        if self.global_batch % self.micro_batch:
            raise problem("global_batch", self.global_batch,
                          f"is not a whole number of micro-batches of {self.micro_batch}",
                          _divisors(self.global_batch, self.micro_batch, "train.micro_batch"))  # fmt: skip
        if (self.steps is None) == (self.epochs is None):
            raise problem(
                "steps",
                self.steps,
                "and train.epochs: exactly one of them is needed",
                "set train.steps or train.epochs",
            )
        return self

    def total(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * steps_per_epoch))


def _short_schedule(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ScheduleSpec(Part):
    """The learning rate over the steps, after a linear warm-up."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt"] = Field(
        "cosine", description="wsd: warm-up, stable, then linear decay over the last `decay` of the steps."
    )
    warmup: float = Field(
        0.1, ge=0, description="Steps of linear warm-up: below 1 a fraction of all steps, else a number of steps."
    )
    floor: float = Field(0.1, ge=0, le=1, description="Last learning rate over the peak (linear, cosine, wsd).")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: the fraction of all steps that decays.")

    @model_validator(mode="after")
    def _fits(self) -> ScheduleSpec:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise problem("warmup", self.warmup, "is neither a fraction below 1 nor a whole number of steps",
                          f"write {self.warmup / 100:g} for {self.warmup:g} percent, or {math.ceil(self.warmup)} for steps"
                          )  # fmt: skip
        return self


class OptimSpec(Part):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = Field(
        "adamw", description="The optimizer, as torch.optim has it."
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate, at `base_batch` if `scale_lr` is set.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay; on matrices only, not on norms and biases."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    clip: float = Field(1.0, ge=0, description="Global gradient norm is cut to this; 0: never.")
    fused: bool | Literal["auto"] = Field(
        "auto", description="One kernel for the whole update, where the device has it."
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="Scale lr by global_batch / base_batch, or by its square root."
    )
    base_batch: int | None = Field(None, ge=1, description="The global batch that `lr` was tuned for.")
    schedule: Annotated[ScheduleSpec, BeforeValidator(_short_schedule)] = Field(
        default_factory=lambda: ScheduleSpec(), description="The learning rate over the steps."
    )

    @model_validator(mode="after")
    def _fits(self) -> OptimSpec:
        if self.scale_lr != "none" and self.base_batch is None:
            raise problem(
                "base_batch",
                None,
                f"is needed by scale_lr: {self.scale_lr}",
                "set the global batch that lr was tuned for",
            )
        return self


def _short_precision(value: Any) -> Any:
    return {"params": value} if isinstance(value, str) else value


class LossScaleSpec(Part):
    """fp16's dynamic loss scale."""

    initial: float = Field(2.0**16, gt=0, description="The first scale.")
    window: int = Field(1000, ge=1, description="Steps without overflow after which the scale doubles.")
    floor: float = Field(1.0, gt=0, description="A scale that would fall below this stops the run.")


class PrecisionSpec(Part):
    """In which number format the model computes; master weights and the update are fp32."""

    params: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format of forward and backward: fp32, bf16, fp16."
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format in which gradients are summed over the ranks: fp32, bf16, fp16."
    )
    loss_scale: LossScaleSpec = Field(default_factory=lambda: LossScaleSpec(), description="fp16's dynamic loss scale.")


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


class EvalSpec(Part):
    """When the held-out loss is measured."""

    every: int | None = Field(50, ge=1, description="Steps between evaluations, and at the end; null: never.")
    batches: int = Field(8, ge=1, description="Global batches of held-out samples, the same each time.")


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
        1.0, ge=0, description="Seconds before the first restart; doubles with each failure without progress."
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
    precision: Annotated[PrecisionSpec, BeforeValidator(_short_precision)] = Field(
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
                          _divisors(self.cluster.most, shard))  # fmt: skip
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


def _divisors(n: int, near: int, field: str = "") -> str:
    fits = sorted((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))[:3]
    return f"try {field + ' ' if field else ''}{' or '.join(str(d) for d in sorted(fits))}"


__all__ = ["JobSpec", "SpecValueError", "flatten"]
