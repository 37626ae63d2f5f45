"""The learning rate of each step, a pure function of the step, so that a resumed run needs no scheduler state; and its peak.

Runs anywhere: plain python.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raydist.errors import UserError

if TYPE_CHECKING:
    from raydist.spec import OptimSpec, ScheduleSpec


def warmup_steps(total_steps: int, schedule: ScheduleSpec) -> int:
    """Steps of linear warm-up: `warmup` is a fraction of all steps below 1, else a number of steps."""
    if schedule.warmup < 1:
        return round(schedule.warmup * total_steps)
    return min(int(schedule.warmup), total_steps)


def lr_at(step: int, total_steps: int, schedule: ScheduleSpec, peak: float) -> float:
    """Learning rate of update number `step`, from 1 to `total_steps`.

    With W steps of warm-up it is peak * step / W up to step W, where it is exactly `peak`. After that:
    constant: peak. linear, cosine: down to floor * peak at the last step. wsd: peak until the last `decay` of all
    steps, then linear to floor * peak. inverse-sqrt: peak * sqrt(W / step), with W at least 1.
    """
    assert 1 <= step <= total_steps, f"step {step} of {total_steps}"
    warmup = warmup_steps(total_steps, schedule)
    if step <= warmup:
        return peak * (step / warmup)  # in this order, the last warm-up step has exactly the peak
    match schedule.name:
        case "constant":
            return peak
        case "inverse-sqrt":
            return peak * math.sqrt(max(warmup, 1) / step)
        case "linear":
            return peak * _down(_fraction(step, warmup, total_steps), schedule.floor)
        case "cosine":
            done = _fraction(step, warmup, total_steps)
            return peak * _down(0.5 - 0.5 * math.cos(math.pi * done), schedule.floor)
        case "wsd":
            stable = max(warmup, total_steps - round(schedule.decay * total_steps))
            if step <= stable:
                return peak
            return peak * _down(_fraction(step, stable, total_steps), schedule.floor)


def peak_lr(spec: OptimSpec, global_batch: int) -> float:
    """`lr`, scaled from `base_batch` to `global_batch` by the rule `scale_lr`.

    linear: Goyal et al. 2017, for SGD. sqrt: Malladi et al. 2022, for Adam and similar ones. Raises UserError without `base_batch`.
    """
    if spec.scale_lr == "none":
        return spec.lr
    if spec.base_batch is None:
        raise UserError(
            f"optim.scale_lr: {spec.scale_lr} has no optim.base_batch", "set the global batch that lr was tuned for"
        )
    ratio = global_batch / spec.base_batch
    return spec.lr * (ratio if spec.scale_lr == "linear" else math.sqrt(ratio))


def _fraction(step: int, first: int, last: int) -> float:
    """The fraction of the way from `first` to `last`, in (0, 1]."""
    return (step - first) / (last - first)


def _down(done: float, floor: float) -> float:
    """Linear from 1 at 0 to `floor` at 1, exact at both ends."""
    return floor * done + (1.0 - done)
