"""The section of a job file about communication that changes the numbers: what is sent between replicas, which way, and how often.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from raydist.extension_plans import buckets, compressor_plan, strategies, strategy_plan
from raydist.spec.parts import Extension, Part, PartWithNewFields, check_spec, near_divisors, problem

if TYPE_CHECKING:
    from raydist.spec.models import JobSpec

NONE = "none"
TORCH = "torch"
AUTO = "auto"


class OuterSpec(Part):
    """The outer optimizer of `comm.every`: SGD with Nesterov momentum, on the outer gradient."""

    lr: float = Field(
        0.7, gt=0, description="Learning rate of the outer step; 1 with momentum 0: the mean of the replicas' weights."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step.")
    blend: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="With comm.delay: the share of its own weights that a replica keeps where outer weights arrive.",
    )


class CommSpec(PartWithNewFields):
    """What is sent between the ranks."""

    new_fields = ("every", "outer", "fragments", "delay", "topology", "ring", "max_loss_increase")

    compress: Annotated[str, Extension("compressor", also=(NONE, AUTO))] = Field(
        NONE,
        description="How gradients are sent to be summed: none (in precision.reduce), a built-in compressor, or "
        "package.module:attribute of your own; with every: how outer gradients are; auto (ddp): the fastest of those whose known "
        "loss is within max_loss_increase, measured at a run's first start. docs/how-to/communication.md.",
    )
    max_loss_increase: float = Field(
        0.0,
        ge=0,
        description="With compress auto: a compressor may have had this much more loss, in nats a byte, in the training that its "
        "PLAN names. 0: none beyond the spread of seeds.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that compressor; docs/extending.md."
    )
    error_feedback: bool | None = Field(
        None,
        description="Add what a compressor loses of a gradient to the next one; null: as the compressor does by default. It keeps "
        "8 bytes a gradient on each rank.",
    )
    topology: Literal["torch", "direct", "two_level", "ring", "auto"] = Field(
        "torch",
        description="ddp: how gradients are summed. torch: by its all-reduce; direct: each rank adds up a part, received from all; "
        "two_level: within each node, then between nodes; ring: by torch's all-reduce, in the order of `ring`; auto: the "
        "fastest, measured at a run's first start.",
    )
    ring: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="With topology ring: all ranks, in the order of the ring; null: that of the fastest links, measured at a run's "
        "first start.",
    )
    every: int | None = Field(
        None,
        ge=1,
        description="Steps in which replicas train apart, each on its own part of the batches, before an outer step brings them "
        "together (local SGD, DiLoCo); null: gradients are summed in each step.",
    )
    outer: OuterSpec = Field(default_factory=OuterSpec, description="With every: the outer optimizer.")
    fragments: int = Field(
        1,
        ge=1,
        description="With every: parts of the model that are brought together one by one, at equal distances. Divides every.",
    )
    delay: int = Field(
        0,
        ge=0,
        description="With every: steps between the start of an outer step and the arrival of its result, which goes on beside "
        "training; 0: training waits. Below every / fragments.",
    )

    @model_validator(mode="after")
    def _fits(self) -> CommSpec:
        if self.ring is not None and self.topology != "ring":
            raise problem("ring", self.ring, f"has no effect with topology: {self.topology}", "set comm.topology: ring, or leave "
                          "it out")  # fmt: skip
        if self.ring is not None and sorted(self.ring) != list(range(len(self.ring))):
            raise problem(
                "ring", self.ring, f"is no order of the ranks 0 to {len(self.ring) - 1}", "name each rank once"
            )
        if self.compress == AUTO and self.options:
            raise problem("options", self.options, "belongs to one compressor, and compress: auto chooses among several",
                          "leave it out, or name the compressor")  # fmt: skip
        if self.compress != AUTO and self.max_loss_increase:
            raise problem("max_loss_increase", self.max_loss_increase, f"has no effect with compress: {self.compress}",
                          "leave it out, or set comm.compress: auto")  # fmt: skip
        for field in ("options", "error_feedback"):
            if self.compress == NONE and getattr(self, field):
                raise problem(field, getattr(self, field), "belongs to a compressor, and compress: none has none",
                              "leave it out, or set comm.compress")  # fmt: skip
        if self.compress not in (NONE, AUTO):
            check_spec("compressor", self.compress, self)
        if self.every is None:
            for field in ("outer", "fragments", "delay"):
                if getattr(self, field) != type(self).model_fields[field].get_default(call_default_factory=True):
                    raise problem(field, _shown(getattr(self, field)), "belongs to an outer step, and there is none",
                                  "set comm.every, such as 32, or leave it out")  # fmt: skip
            return self
        if self.every % self.fragments:
            raise problem("fragments", self.fragments, f"does not divide every: {self.every}",
                          near_divisors(self.every, self.fragments))  # fmt: skip
        if self.delay >= self.every // self.fragments:
            raise problem("delay", self.delay, f"is not below the {self.every // self.fragments} steps (every / fragments) after "
                          "which the next fragment starts", f"set it to {self.every // self.fragments - 1} or less")  # fmt: skip
        if self.delay == 0 and "blend" in self.outer.model_fields_set:
            raise problem("outer.blend", self.outer.blend, "has no effect without delay: replicas take the outer weights",
                          "leave it out, or set comm.delay")  # fmt: skip
        if self.compress == AUTO:
            raise problem("compress", AUTO, "does not go with comm.every: trial passes have no outer steps",
                          "name a compressor, or leave it out")  # fmt: skip
        if self.compress != NONE and not getattr(compressor_plan(self.compress), "outer", False):
            raise problem("compress", self.compress, "does not go with comm.every: it rounds too much without error feedback",
                          "take int8, bf16 or fp16, or leave it out")  # fmt: skip
        if self.error_feedback:
            raise problem("error_feedback", True, "does not go with comm.every: outer gradients have none",
                          "leave it out")  # fmt: skip
        return self

    @property
    def auto(self) -> bool:
        """Whether something is left to measurement, before the model is built."""
        return AUTO in (self.compress, self.topology)

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed; with `auto` they may be. With `every` there are outer gradients, see `rounds`."""
        return self.compress != NONE and self.every is None

    @property
    def checks_shapes(self) -> bool:
        """Whether the compressor refuses models by the shapes of their parameters."""
        return self.compresses and getattr(compressor_plan(self.compress), "checks_shapes", False)

    @property
    def rounds(self) -> bool:
        """Whether outer gradients are compressed."""
        return self.compress != NONE and self.every is not None

    @property
    def aside(self) -> bool:
        """Whether threads beside the training thread send gradients, or outer ones."""
        return self.compresses or self.topology in ("direct", "two_level") or self.delay > 0

    @property
    def feedback(self) -> bool:
        """Whether what is lost is added to the next gradient."""
        plan = compressor_plan(self.compress)
        return self.error_feedback if self.error_feedback is not None else plan is None or plan.feedback


def _shown(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Part) else value


def sent_bytes(spec: JobSpec, shapes: Sequence[Sequence[int]] = ()) -> float:
    """Of one gradient, as it is sent to be summed. An own compressor without a PLAN counts as fp32, as does auto. `shapes`: of the
    parameters, on which it depends with some compressors."""
    if not spec.comm.compresses:
        return 4.0 if spec.precision.reduce == "fp32" else 2.0
    plan = compressor_plan(spec.comm.compress)
    if plan is None:
        return 4.0
    return (plan.bits_of(spec.comm.options, shapes) if plan.bits_of else plan.bits) / 8


def check(spec: JobSpec) -> None:
    """Raises SpecValueError for what does not go with the rest of the job, except `train.virtual_ranks`."""
    _compression_fits(spec)
    _topology_fits(spec)
    _local_steps_fit(spec)


def _compression_fits(spec: JobSpec) -> None:
    comm, strategy = spec.comm, spec.parallel.strategy
    if not comm.compresses:
        return
    plan = strategy_plan(strategy)
    if plan is None or not plan.compresses:
        those = [s for s in strategies() if getattr(strategy_plan(s), "compresses", False)]
        raise problem("comm.compress", comm.compress, f"has no effect with parallel.strategy: {strategy}, which sends "
                      "gradients its own way", f"take {' or '.join(those)}, or leave comm out")  # fmt: skip
    if spec.precision.reduce != "fp32":
        raise problem("precision.reduce", spec.precision.reduce, f"and comm.compress: {comm.compress} both say how gradients "
                      "are sent", "leave one of them out")  # fmt: skip
    if spec.parallel.expert > 1:
        raise problem("comm.compress", comm.compress, f"does not go with parallel.expert: {spec.parallel.expert}: ranks with "
                      "the same experts are others than those that share all else", "leave comm out, or set parallel.expert: 1"
                      )  # fmt: skip


def _topology_fits(spec: JobSpec) -> None:
    topology, strategy, compress = spec.comm.topology, spec.parallel.strategy, spec.comm.compress
    if spec.comm.auto:
        _trials_fit(spec, "compress" if compress == AUTO else "topology")
    if topology == TORCH:
        return
    order, least, most = spec.comm.ring, spec.cluster.least, spec.cluster.most
    if order is not None and most > 1 and not least <= len(order) <= most:  # one worker sends nothing
        workers = f"{least} to {most}" if least < most else most
        raise problem("comm.ring", order, f"is an order of {len(order)} ranks, and there are {workers} (cluster.workers)",
                      "name every rank once, or leave comm.ring out to have the order measured")  # fmt: skip
    if topology == compress == AUTO:
        compress = NONE  # one of the two is chosen
    for field, value, default, why in (
        ("comm.compress", compress, NONE, "compressed gradients go directly from rank to rank"),
        ("comm.every", spec.comm.every, None, "outer steps go directly from replica to replica"),
        ("parallel.expert", spec.parallel.expert, 1, "ranks with the same experts are others than those that share all else"),
        ("train.virtual_ranks", spec.train.virtual_ranks, None, "its sums have an order of their own"),
    ):  # fmt: skip
        if value != default:
            raise problem(
                "comm.topology", topology, f"does not go with {field}: {value}: {why}", "leave one of them out"
            )
    if not buckets(strategy):
        raise problem("comm.topology", topology, f"has no effect with parallel.strategy: {strategy}, which sums gradients its "
                      f"own way", f"take {' or '.join(s for s in strategies() if buckets(s))}, or leave it out")  # fmt: skip


def _trials_fit(spec: JobSpec, field: str) -> None:
    """`comm: {compress: auto}` and `topology: auto` are measured with passes of ddp."""
    parallel = spec.parallel
    known: dict[str, tuple[Any, bool]] = {
        "parallel.strategy": (parallel.strategy, buckets(parallel.strategy)),
        "train.compile": (spec.train.compile, not spec.train.compile),
    }
    known |= {f"parallel.{a}": (n := getattr(parallel, a), n == 1) for a in ("tensor", "pipeline", "context", "expert")}
    for name, (value, fits) in known.items():
        if not fits:
            raise problem(f"comm.{field}", AUTO, f"does not go with {name}: {value}: trial passes are of ddp alone, with one "
                          "replica a rank", f"name one, or change {name}")  # fmt: skip


def _local_steps_fit(spec: JobSpec) -> None:
    every, parallel = spec.comm.every, spec.parallel
    if every is None:
        return
    plan = strategy_plan(parallel.strategy)
    if plan is None or not plan.local_steps:
        those = [s for s in strategies() if getattr(strategy_plan(s), "local_steps", False)]
        raise problem("comm.every", every, f"does not go with parallel.strategy: {parallel.strategy}, which splits the state "
                      "over the replicas that would train apart", f"take {' or '.join(those)}")  # fmt: skip
    for axis, why in (("expert", "replicas share the experts"), ("context", "replicas share sequences")):
        if getattr(parallel, axis) > 1:
            raise problem("comm.every", every, f"does not go with parallel.{axis}: {getattr(parallel, axis)}: {why}",
                          f"leave comm.every out, or set parallel.{axis}: 1")  # fmt: skip
    for field in ("optimizer", "parameters"):
        if (place := getattr(spec.offload, field)) != "none":
            raise problem("comm.every", every, f"does not go with offload.{field}: {place}: outer steps change weights "
                          "that are on the device", f"leave one of them out, or set offload.{field}: none")  # fmt: skip
    replicas = spec.cluster.most // parallel.replica
    if replicas // (plan.group(spec, replicas, 1) if plan.group is not None else 1) < 2:
        raise problem("comm.every", every, "needs two replicas or more, and cluster.workers: "
                      f"{spec.cluster.most} makes one", "take more workers, or leave comm.every out")  # fmt: skip
