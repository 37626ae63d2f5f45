"""The fields of a job file: one pydantic model a section, each field with its description.

Runs anywhere. A description is written once: the JSON Schema, docs/reference/spec.md and the error messages use it. This file has
the whole job, and the checks across sections; the sections are in training.py and running.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from raydist import registry
from raydist.extension_plans import StrategyPlan, optimizer_plan, strategies, strategy_plan
from raydist.redact import redact
from raydist.spec import comm, mesh, virtual_ranks
from raydist.spec.comm import CommSpec
from raydist.spec.parallel import ParallelSpec
from raydist.spec.parts import PartWithNewFields, check_spec, problem, short_name
from raydist.spec.running import (
    CheckpointSpec,
    ClusterSpec,
    HookSpec,
    ObserveSpec,
    OffloadSpec,
    RecoverySpec,
)
from raydist.spec.training import (
    DataSpec,
    EvalSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    TrainSpec,
    short_precision,
)
from raydist.spec.validate import named

_FEW = 8
"""Padded lengths of micro-batches, where the model is compiled."""


class JobSpec(PartWithNewFields):
    """One training job."""

    new_fields = ("comm", "init_from", "hooks")

    numbers_exclude: ClassVar[tuple[str, ...]] = (
        "name", "train.micro_batch", "train.compile", "train.checkpoint_activations", "train.check_replicas",
        "train.check_gradients", "parallel", "offload", "checkpoint", "eval", "recovery", "observe", "cluster", "data.prefetch",
        "data.source", "data.path", "optim.fused", "deepspeed", "model.hf", "init_from", "hooks", "data.batching.max_tokens",
        "data.batching.min", "data.batching.max", "data.batching.multiple", "data.batching.lengths",
    )  # fmt: skip
    """Fields that do not change the numbers, or only within float tolerance. The data is compared by its fingerprint."""

    name: str = Field(
        "run", description="Name of the run, and of its folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
    )
    deepspeed: str | None = Field(
        None,
        description="A DeepSpeed JSON file, relative to this one. Fields of this file win; docs/how-to/deepspeed.md.",
    )
    model: ModelSpec = Field(default_factory=ModelSpec, description="The model.")
    init_from: str | None = Field(
        None,
        description="Start from the weights of another run: its name, folder or URI, or RUN/checkpoints/step-N; neither its "
        "optimizer nor its step; docs/how-to/pretrained.md.",
    )
    data: DataSpec = Field(description="The training data.")
    train: TrainSpec = Field(description="Length, batches, loss, and how the passes are computed.")
    optim: OptimSpec = Field(default_factory=lambda: OptimSpec(), description="The optimizer and its learning rate.")
    precision: Annotated[PrecisionSpec, BeforeValidator(short_precision)] = Field(
        default_factory=lambda: PrecisionSpec(), description="fp32, bf16 or fp16, or the fields below."
    )
    parallel: ParallelSpec = Field(
        default_factory=lambda: ParallelSpec(), description="How the work is split over the workers."
    )
    comm: CommSpec = Field(
        default_factory=lambda: CommSpec(), description="What is sent between the ranks; docs/how-to/communication.md."
    )
    offload: OffloadSpec = Field(
        default_factory=lambda: OffloadSpec(), description="State that is kept outside the device's memory."
    )
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec(), description="When the state is saved.")
    eval: EvalSpec = Field(
        default_factory=lambda: EvalSpec(), description="When the loss on held-out text is computed."
    )
    recovery: RecoverySpec = Field(default_factory=lambda: RecoverySpec(), description="What happens after a failure.")
    observe: ObserveSpec = Field(
        default_factory=lambda: ObserveSpec(),
        description="What is measured besides the steps; docs/reference/observe.md.",
    )
    hooks: tuple[Annotated[HookSpec, BeforeValidator(short_name)], ...] = Field(
        (),
        description="Code of your own that the run calls, and that changes nothing: a list of names, or of the fields below; "
        "docs/extending.md.",
    )
    cluster: ClusterSpec = Field(default_factory=lambda: ClusterSpec(), description="The resources that the run uses.")

    def own_code(self) -> list[str]:
        """What it names of the user's own code, as `package.module:attribute`: extensions, the tokenizer, the source of records."""
        names = [each.name for each in named(type(self), self.model_dump(mode="json"))]
        return [
            name
            for name in dict.fromkeys((*names, self.data.tokenizer, self.data.source or ""))
            if registry.is_own(name)
        ]

    @field_validator("train")
    @classmethod
    def _train_fits(cls, train: TrainSpec, info: ValidationInfo) -> TrainSpec:
        data = info.data.get("data")  # None if it has a problem of its own
        train.check(by_tokens=data is None or data.batching is not None)
        return train

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
        if (check := registry.described("model", self.model.name, "check_job")) is not None:
            check(self)
        mesh.check(self)
        self._batching_fits()
        if self._by_tokens is None and self.cluster.most // self.parallel.replica > self.train.global_batch:
            what = (
                "is more"
                if self.parallel.replica == 1
                else f"makes {self.cluster.most // self.parallel.replica} replicas, more"
            )
            raise problem("cluster.workers", self.cluster.workers,
                          f"{what} than the {self.train.global_batch} sequences of a global batch",
                          "raise train.global_batch or take fewer workers")  # fmt: skip
        strategy, plan = self.parallel.strategy, strategy_plan(self.parallel.strategy)
        check_spec("parallel", strategy, self)
        comm.check(self)
        virtual_ranks.check(self)
        if self.offload.parameters == "cpu" and plan is not None and "parameters" not in plan.sharded:
            sharding = [s for s in strategies() if "parameters" in getattr(strategy_plan(s), "sharded", ())]
            raise problem("offload.parameters", "cpu", f"needs sharded parameters, and {strategy} keeps them whole",
                          f"set parallel.strategy: {' or '.join(reversed(sharding))}")  # fmt: skip
        self._optimizer_fits(plan)
        if self.offload.optimizer == "nvme" and self.train.check_replicas is not None:
            raise problem("train.check_replicas", self.train.check_replicas,
                          "would read the optimizer's whole state back from offload.optimizer: nvme",
                          "set it to null, or offload.optimizer: cpu")  # fmt: skip
        return self

    def _optimizer_fits(self, strategy: StrategyPlan | None) -> None:
        optimizer, parallel, offload = optimizer_plan(self.optim.name), self.parallel, self.offload.optimizer
        data_ranks = self.cluster.most * parallel.context // parallel.replica  # a strategy splits nothing on one
        if (
            strategy is not None
            and strategy.sharded
            and optimizer is not None
            and optimizer.whole_matrices
            and data_ranks > 1
        ):
            raise problem("optim.name", self.optim.name,
                          f"works on whole matrices, and parallel.strategy: {parallel.strategy} gives each rank some rows of them",
                          "use adamw or sgd, or parallel.strategy: ddp")  # fmt: skip
        if offload != "none" and not (optimizer is not None and optimizer.offload):
            raise problem("offload.optimizer", offload, f"does not go with optim.name: {self.optim.name}",
                          "use adamw, or offload.optimizer: none")  # fmt: skip
        if offload != "none" and self.optim.fused is False:
            raise problem("optim.fused", False, f"does not go with offload.optimizer: {offload}: an offloaded update is always one "
                          "fused kernel on the CPU", "set optim.fused: auto")  # fmt: skip
        scale = self.precision.loss_scale
        if self.precision.params == "fp16" and scale.initial < scale.floor:
            raise problem("precision.loss_scale.initial", scale.initial, f"is below floor: {scale.floor:g}",
                          "raise initial or lower floor")  # fmt: skip

    def _batching_fits(self) -> None:
        batching = self.data.batching
        if batching is None:
            return
        if self.data.pack:
            raise problem("data.pack", True, "separates the documents of a row, and with data.batching a row has one",
                          "leave one of them out")  # fmt: skip
        ranks = self.parallel.tensor * self.parallel.context
        if batching.longest is not None and batching.longest > self.model.context:
            raise problem("data.batching.longest", batching.longest, f"is above model.context: {self.model.context}",
                          f"set it to at most {self.model.context}, or raise model.context")  # fmt: skip
        if batching.longest is not None and batching.longest % ranks:
            raise problem("data.batching.longest", batching.longest,
                          f"is no multiple of the {ranks} ranks that share a sequence (parallel.context x tensor)",
                          f"set it to {max(batching.longest // ranks, 1) * ranks}")  # fmt: skip
        if self.longest < 1:
            raise problem("data.batching.max_tokens", batching.max_tokens,
                          f"has {batching.max_tokens // batching.min} tokens for each of min: {batching.min} sequences, fewer "
                          f"than the {ranks} ranks that share a sequence (parallel.context x tensor)",
                          f"set it to {batching.min * ranks} or more")  # fmt: skip
        replicas, size = self.cluster.most // self.parallel.replica, batching.global_tokens
        if size is not None and size < self.longest:
            raise problem("data.batching.global_tokens", size, f"is less than the longest sequence has: {self.longest}",
                          "raise it, or set data.batching.longest")  # fmt: skip
        if size is not None and size < replicas:
            raise problem("data.batching.global_tokens", size, f"is less than one token for each of {replicas} replicas",
                          "raise it, or take fewer workers")  # fmt: skip
        if size is not None and self.optim.scale_lr != "none":
            raise problem("optim.scale_lr", self.optim.scale_lr, "scales by sequences, and data.batching.global_tokens has tokens",
                          "set optim.lr itself, or train.global_batch in place of global_tokens")  # fmt: skip

    @property
    def _by_tokens(self) -> int | None:
        """Tokens of a global batch; None if it is counted in sequences."""
        return self.data.batching.global_tokens if self.data.batching is not None else None

    @property
    def longest(self) -> int:
        """Tokens of the longest row: with data.batching a multiple of the ranks that share one, else model.context."""
        batching = self.data.batching
        if batching is None:
            return self.model.context
        if batching.longest is not None:
            return batching.longest
        ranks = self.parallel.tensor * self.parallel.context
        return min(self.model.context, batching.max_tokens // batching.min) // ranks * ranks

    def with_max_tokens(self, max_tokens: int) -> JobSpec:
        """The job with another data.batching.max_tokens, at least `longest`, and the same samples."""
        assert self.data.batching is not None
        fields = {"max_tokens": max_tokens, "longest": self.longest, "min": 1}
        return self.with_fields({f"data.batching.{name}": value for name, value in fields.items()})

    def with_fields(self, changes: Mapping[str, Any]) -> JobSpec:
        """The job with other values of these fields (section.field), which are not checked."""
        job = self
        for name, new in changes.items():
            job = _changed(job, name.split("."), new)
        return job

    @property
    def largest_pass(self) -> tuple[int, int]:
        """(rows, tokens of a row) of the micro-batch that needs the most memory; with data.batching the longest rows or, where one
        more row of shorter ones makes more tokens, these."""
        batching, length = self.data.batching, self.longest
        if batching is None:
            return self.train.micro_batch, length
        most = batching.max or batching.max_tokens
        rows = min(max(batching.max_tokens // length, 1), most)
        more = min(rows + 1, most)
        shorter = batching.max_tokens // more // self.row_multiple * self.row_multiple
        return max((rows, length), (more, min(shorter, length)), key=lambda shape: shape[0] * shape[1])

    def batches(self, ranks: int) -> tuple[int, int]:
        """(sequences per micro-batch, micro-batches per step) on the replica with the most, as data/batches.py distributes them.

        `ranks`: of the whole run. With data.batching of the largest micro-batch, as if all were: documents are not known here.
        """
        batching, replicas = self.data.batching, ranks // self.parallel.replica
        if batching is not None:
            rows, length = self.largest_pass
            step = (
                -(-batching.global_tokens // length) if batching.global_tokens is not None else self.train.global_batch
            )
            return rows, -(-step // (replicas * rows))
        most = -(-self.train.global_batch // replicas)
        count = -(-most // self.train.micro_batch)
        return -(-most // count), count

    @property
    def row_multiple(self) -> int:
        """With data.batching, of what padded lengths are multiples, except `longest`."""
        assert self.data.batching is not None
        return math.lcm(self.data.batching.multiple, self.parallel.tensor * self.parallel.context)

    @property
    def few_lengths(self) -> int | None:
        """With data.batching, the number of different padded lengths; None: any multiple."""
        assert self.data.batching is not None
        return self.data.batching.lengths or (_FEW if self.train.compile else None)

    @property
    def snapshot_every(self) -> int | Literal["auto"] | None:
        """recovery.snapshot_every; with auto there are none where the optimizer's state is on disk, for lack of memory."""
        every = self.recovery.snapshot_every
        return None if every == "auto" and self.offload.optimizer == "nvme" else every

    def numbers(self, fingerprint: str) -> dict[str, Any]:
        """The fields that change the numbers, as a flat dict of dotted names: a resumed run must have the same values.

        `fingerprint` is the dataset's. It replaces the dataset's source and path. Without secrets: manifests have it, and other
        credentials of a URI change no number.
        """
        sequences = {"data.batching.longest": self.longest} if self.data.batching is not None else {}
        exclude = self.numbers_exclude
        if self.train.virtual_ranks is not None:  # the shapes of micro-batches change bits
            exclude = tuple(x for x in exclude if x not in virtual_ranks.SHAPES)
        # As with `parallel`, the way of the sums changes rounding alone.
        plain = self.with_fields({"comm.topology": comm.TORCH, "comm.ring": None})
        return {"data.fingerprint": fingerprint, **sequences} | {
            name: redact(sequences.get(name, value))
            for name, value in flatten(plain.model_dump(mode="json")).items()
            if not any(name == x or name.startswith(x + ".") for x in exclude)
        }


def _changed(part: Any, names: list[str], new: Any) -> Any:
    name, *rest = names
    return part.model_copy(update={name: _changed(getattr(part, name), rest, new) if rest else new})


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> one dict with dotted names; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
