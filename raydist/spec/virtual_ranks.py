"""What does not go with `train.virtual_ranks`: each with its reason. docs/explanation/same-bits.md has the same as a table.

Runs anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydist import registry
from raydist.extension_plans import optimizer_plan, strategies, strategy_plan
from raydist.spec.parts import near_divisors, problem

if TYPE_CHECKING:
    from raydist.spec.models import JobSpec

SHAPES = (
    "train.micro_batch", "data.batching.max_tokens", "data.batching.min", "data.batching.max", "data.batching.multiple",
    "data.batching.lengths",
)  # fmt: skip
"""Fields that decide the shapes of micro-batches, and with them bits."""
ELEMENTWISE = ("adamw", "sgd")
"""Optimizers whose update of a number is known to be the same in any part of its parameter."""


def check(spec: JobSpec) -> None:
    """Raises SpecValueError for a job that cannot have the same bits at any number of workers."""
    train, parallel = spec.train, spec.parallel
    count = train.virtual_ranks
    if count is None:
        return
    name = "train.virtual_ranks"
    by_tokens = spec.data.batching is not None and spec.data.batching.global_tokens is not None
    if not by_tokens and train.global_batch % count:
        raise problem(name, count, f"does not divide train.global_batch: {train.global_batch}",
                      near_divisors(train.global_batch, count))  # fmt: skip
    part = train.global_batch // count
    if spec.data.batching is None and part % train.micro_batch:
        raise problem("train.micro_batch", train.micro_batch,
                      f"does not divide the {part} sequences of each of {name}: {count}",
                      near_divisors(part, train.micro_batch))  # fmt: skip
    sharing, each = parallel.replicas_with_experts, parallel.tensor * parallel.context
    if parallel.expert > 1 and parallel.expert % each and each % parallel.expert:
        raise problem("parallel.expert", parallel.expert, f"does not go with {name}: which replicas share experts depends on their "
                      f"number, unless it divides parallel.tensor x context: {each}, or is a multiple of it",
                      near_divisors(each, parallel.expert))  # fmt: skip
    if count % sharing:
        near = sorted({max(count // sharing, 1) * sharing, -(-count // sharing) * sharing})
        raise problem(name, count, f"is no multiple of the {sharing} replicas that share experts (parallel.expert: "
                      f"{parallel.expert})", f"try {' or '.join(map(str, near))}")  # fmt: skip
    most = spec.cluster.most // parallel.replica
    if most > count:
        replicas = "workers" if parallel.replica == 1 else "replicas of the model"
        raise problem(name, count, f"is fewer than the {most} {replicas} that the run may have (cluster.workers)",
                      "take more virtual ranks or fewer workers")  # fmt: skip
    plan = strategy_plan(parallel.strategy)
    if plan is None or not plan.parts:
        those = [s for s in strategies() if getattr(strategy_plan(s), "parts", False)]
        raise problem("parallel.strategy", parallel.strategy, f"does not sum in the order that {name} needs",
                      f"take {' or '.join(those)}, or leave virtual_ranks out")  # fmt: skip
    optimizer = optimizer_plan(spec.optim.name)
    whole = optimizer is not None and optimizer.whole_matrices
    if plan.sharded and spec.optim.name not in ELEMENTWISE and not whole:  # whole matrices are refused there anyway
        raise problem("optim.name", spec.optim.name, f"is not known to update parts of a parameter with the same bits ({name})",
                      f"take {' or '.join(ELEMENTWISE)}, or parallel.strategy: ddp")  # fmt: skip
    if train.compile and registry.described("model", spec.model.name, "experts") is not None:
        raise problem("train.compile", train.compile, f"does not go with {name} for a model with experts: each shape is compiled "
                      "for itself, and an expert has another number of rows in every pass", "set false")  # fmt: skip
    for field, value, default, why, remedy in (
        ("train.compile", "blocks" if train.compile is False else train.compile, "blocks",
         "the code of a whole model contains what its strategy does", "set blocks, or false"),
        ("comm.compress", spec.comm.compress, "none", "what a rank compresses is the sum of its own parts", "set none"),
        ("comm.every", spec.comm.every, None, "replicas that train apart depend on their number", "leave it out"),
        ("precision.reduce", spec.precision.reduce, "fp32", "sums along the tree are in fp32", "set fp32"),
        ("optim.fused", spec.optim.fused if spec.optim.name == "adamw" else "auto", "auto",
         "the kernel decides bits: it is the fused one", "set auto"),
    ):  # fmt: skip
        if value != default:
            raise problem(field, value, f"does not go with {name}: {why}", remedy)
