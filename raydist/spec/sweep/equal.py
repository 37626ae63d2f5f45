"""What a cell changes besides its parameters, to be trainable and comparable: steps, cadences, held-out batches, micro-batch.

Runs anywhere. Pure: base and parameters -> fields and, where it is not what the file says, a word on each.

**equal: tokens.** The steps are the fewest that train at least the base's tokens, steps x global_batch x context: less than
one step too many. eval.every, checkpoint.every and a warmup in steps are scaled alike and rounded, to fall on the same tokens.
What guards a run step by step (recovery.snapshot_every, train.check_replicas, ...) stays. A base with `epochs` has equal tokens as
it is: there only the cadences are scaled.

**Held-out text.** eval.batches counts global batches, so the number of them is scaled, rounded up: all cells are measured on the
base's samples, and on less than one batch of further ones.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from raydist.spec.models import JobSpec
from raydist.spec.sweep.space import Point

DECIDES = ("train.steps", "train.epochs")
"""What `equal: tokens` decides on."""


def adjusted(base: JobSpec, point: Point, equal: Literal["tokens", "steps"]) -> tuple[dict[str, Any], list[str]]:
    """Fields -> values of one cell that its parameters do not set; and notes. ({}, []) for values that make no job."""
    batch = point.get("train.global_batch", base.train.global_batch)
    context = point.get("model.context", base.model.context)
    micro = point.get("train.micro_batch", base.train.micro_batch)
    if not all(isinstance(n, int) and n >= 1 for n in (batch, context, micro)):
        return {}, []
    fields: dict[str, Any] = {}
    notes: list[str] = []
    before, now = base.train.global_batch * base.model.context, batch * context
    if equal == "tokens" and now != before:
        if base.train.steps is not None:
            fields["train.steps"] = -(-base.train.steps * before // now)
        cadences: dict[str, Any] = {"eval.every": base.eval.every, "checkpoint.every": base.checkpoint.every}
        if base.optim.schedule.warmup >= 1 and "optim.schedule" not in point:
            cadences["optim.schedule.warmup"] = int(base.optim.schedule.warmup)
        fields |= {name: max(1, round(n * before / now)) for name, n in cadences.items() if isinstance(n, int)}
    if now != before and base.eval.every is not None and "eval.batches" not in point:
        fields["eval.batches"] = -(-base.eval.batches * before // now)
        if (base.eval.batches * before) % now:
            measured, wanted = fields["eval.batches"] * now, base.eval.batches * before
            notes.append(
                f"measured on {measured:,} held-out tokens, the base on {wanted:,}: global batches of {batch} do not fit"
            )
    if base.data.batching is None and batch % micro and "train.micro_batch" not in point:
        fields["train.micro_batch"] = _micro_batch(batch, micro, point.get("cluster.workers", base.cluster.workers))
        notes.append(f"train.micro_batch is {fields['train.micro_batch']}, for {micro} does not divide {batch}")
    return {name: value for name, value in fields.items() if name not in point}, notes


def _micro_batch(batch: int, most: int, workers: Any) -> int:
    """The largest, up to `most`, that divides a worker's share of the batch; of all of it where there are no equal shares."""
    count = workers[-1] if isinstance(workers, list | tuple) else workers
    even = isinstance(count, int) and count >= 1 and batch % count == 0
    return max(d for d in range(1, most + 1) if (batch // count if even else batch) % d == 0)


def tokens(job: JobSpec) -> int | None:
    """Tokens that a job trains on, as they are compared: steps x global_batch x context. None for a job in epochs."""
    if job.train.steps is None:
        return None
    return math.prod((job.train.steps, job.train.global_batch, job.model.context))
