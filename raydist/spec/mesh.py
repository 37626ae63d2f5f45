"""Whether a job's mesh fits its model, its optimizer and its workers: parallel.tensor, context, pipeline, expert.

Runs anywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raydist import registry
from raydist.extension_plans import optimizer_plan
from raydist.spec.parts import SpecValueError, near_divisors, problem

if TYPE_CHECKING:
    from raydist.spec.models import JobSpec


def check(job: JobSpec) -> None:
    """Raises SpecValueError."""
    _tensor(job)
    _context(job)
    _pipeline(job)
    _experts(job)
    _replicas(job)


def _tensor(job: JobSpec) -> None:
    tensor = job.parallel.tensor
    if tensor == 1:
        return
    _ask_model(job, "tensor", ("with rules how it is split", "has none", "check_tensor and tensor_rules"), tensor)
    if job.model.context % tensor:
        raise problem("parallel.tensor", tensor, f"does not divide model.context {job.model.context}",
                      near_divisors(job.model.context, tensor))  # fmt: skip
    if job.cluster.spares % job.parallel.together:  # an odd spare would shift the ranks behind it to another node
        raise problem("cluster.spares", job.cluster.spares, f"is no multiple of parallel.tensor: {tensor}",
                      f"set it to a multiple of {tensor}, so that tensor groups stay on one node")  # fmt: skip
    optimizer = optimizer_plan(job.optim.name)
    if optimizer is not None and optimizer.whole_matrices:
        raise problem("parallel.tensor", tensor, f"splits matrices, and optim.name: {job.optim.name} needs whole ones",
                      "use adamw, or set 1")  # fmt: skip


def _context(job: JobSpec) -> None:
    parallel = job.parallel
    context, ranks = parallel.context, parallel.context * parallel.tensor
    if context == 1:
        return
    _ask_model(
        job, "context", ("that shares sequences", "does not declare it", "check_context"), parallel.tensor, context
    )
    if job.model.context % ranks:
        times = f"times tensor: {parallel.tensor} " if parallel.tensor > 1 else ""
        raise problem("parallel.context", context, f"{times}does not divide model.context {job.model.context}",
                      f"set model.context to a multiple of {ranks}, or take fewer ranks")  # fmt: skip


def _ask_model(job: JobSpec, axis: str, words: tuple[str, str, str], *sizes: int) -> None:
    """Raises SpecValueError if the model cannot be split so. `words`: what it needs, that it has none, what to add."""
    needs, lacks, add = words
    check = registry.described("model", job.model.name, f"check_{axis}")
    if check is None:
        raise problem(f"parallel.{axis}", sizes[-1], f"needs a model {needs}; {job.model.name} {lacks}",
                      f"add {add} to the model (docs/reference/models.md), or set 1")  # fmt: skip
    try:
        check(job.model, *sizes)
    except SpecValueError as error:  # its field is relative to the model
        raise problem(f"model.{error.field}", error.value, error.what, error.remedy) from None


def _pipeline(job: JobSpec) -> None:
    parallel = job.parallel
    pipeline, stages, cut = parallel.pipeline, parallel.stages, parallel.pipeline_cut
    if pipeline == 1:
        for field, value in (("chunks", parallel.chunks != 1), ("pipeline_cut", cut is not None)):
            if value:
                raise problem(f"parallel.{field}", getattr(parallel, field), "needs stages on several ranks",
                              f"set parallel.pipeline: 2 or more, or leave {field} out")  # fmt: skip
        return
    if cut is not None and len(cut) != stages:
        raise problem("parallel.pipeline_cut", cut, f"has {len(cut)} numbers for {stages} stages (pipeline x chunks)",
                      "give the number of blocks of each stage")  # fmt: skip
    if job.model.name in registry.names("model"):  # of others only the worker knows the blocks
        layers = job.model.layers
        if stages > layers:
            raise problem("parallel.pipeline", pipeline,
                          f"makes {stages} stages (pipeline x chunks), and the model has {layers} blocks (model.layers)",
                          "take fewer stages or more layers")  # fmt: skip
        if cut is not None and sum(cut) != layers:
            raise problem("parallel.pipeline_cut", cut, f"has {sum(cut)} blocks in all, and the model has {layers}",
                          "give the number of blocks of each stage")  # fmt: skip
    if job.train.compile is True:
        raise problem("train.compile", True, "compiles the whole model, and with parallel.pipeline no rank has it",
                      "set train.compile: blocks")  # fmt: skip


def _experts(job: JobSpec) -> None:
    expert = job.parallel.expert
    if expert == 1:
        return
    count = registry.described("model", job.model.name, "experts")
    if count is None:
        raise problem("parallel.expert", expert, f"needs a model with experts, and {job.model.name} has none",
                      "set 1, or take a model whose file has `experts` (docs/reference/models.md)")  # fmt: skip
    if count(job.model) % expert:
        raise problem("parallel.expert", expert, f"does not divide the {count(job.model)} experts of a layer",
                      near_divisors(count(job.model), expert))  # fmt: skip
    optimizer = optimizer_plan(job.optim.name)
    if optimizer is not None and optimizer.whole_matrices:
        raise problem("parallel.expert", expert, f"needs an optimizer that works element by element, not {job.optim.name}",
                      "use adamw, or set 1")  # fmt: skip


def _replicas(job: JobSpec) -> None:
    parallel, cluster = job.parallel, job.cluster
    for workers in sorted({cluster.least, cluster.most}):
        if workers % parallel.unit == 0:
            continue
        if workers % parallel.replica == 0:
            raise problem("parallel.expert", parallel.expert,
                          f"does not divide the {workers // parallel.pipeline} workers of a stage",
                          f"set cluster.workers to a multiple of {parallel.unit}")  # fmt: skip
        axes = [axis for axis in ("pipeline", "context", "tensor") if getattr(parallel, axis) > 1]
        axis, *others = axes
        size = getattr(parallel, axis)
        if not others:
            what = f"does not divide the {workers} workers"
            remedy = near_divisors(math.gcd(cluster.least, cluster.most), size)
        else:
            times = " ".join(f"times {other}: {getattr(parallel, other)}" for other in others)
            what = f"{times} does not divide the {workers} workers"
            remedy = f"set cluster.workers to a multiple of {parallel.replica}"
        raise problem(f"parallel.{axis}", size, what, remedy)
