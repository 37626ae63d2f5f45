"""What DeepSpeed's optimizer and scheduler become here.

Runs anywhere. A parameter that the file leaves out has the default of that optimizer or scheduler there, not raydist's:
the same file then trains the same way. One that is "auto" is the spec's.
"""

from __future__ import annotations

import difflib
from typing import Any

from raydist.spec.deepspeed.reading import Reading
from raydist.spec.training import OptimSpec, ScheduleSpec

PARAMS = "optimizer.params"
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", ADAM),
    "adamw": ("adamw", ADAM),
    "fusedadam": ("adamw", ADAM),
    "cpuadam": ("adamw", ADAM),
    "deepspeedcpuadam": ("adamw", ADAM),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
    "adafactor": ("adafactor", {"lr": 1e-2, "weight_decay": 0.0}),
    "muon": ("muon", {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0}),
}
"""type, in lower case -> optim.name, and the defaults of DeepSpeed or torch."""
TYPES = ("Adam", "AdamW", "SGD", "Adafactor", "Muon")


def optimizer(r: Reading) -> None:
    """The type and its parameters. One without a counterpart is refused: another would train another model."""
    kind = r.get("optimizer.type")
    if kind is None:
        return
    if kind.lower() not in OPTIMIZERS:
        if "optim.name" in r.nearer:
            r.lose("optimizer.type", f"{kind}: the spec has another")
            return
        near = difflib.get_close_matches(kind, TYPES, n=1)
        r.problem("optimizer.type", kind, "has no counterpart here",
                  f'did you mean "{near[0]}"?' if near else f"use one of {', '.join(TYPES)}, or say optim.name in the spec "
                  "(with --deepspeed: --set optim.name=adamw)")  # fmt: skip
        return
    name, defaults = OPTIMIZERS[kind.lower()]
    r.put("optim.name", name, "optimizer.type")
    if name == "adamw" and r.get(f"{PARAMS}.torch_adam") and r.get(f"{PARAMS}.adam_w_mode", True):
        defaults = defaults | {"weight_decay": 0.01}  # torch.optim.AdamW's own
    taken = []
    for key in ("lr", "betas", "eps", "weight_decay", "momentum"):
        field = f"{PARAMS}.{key}"
        if field in r.given and (key in defaults or (name == "muon" and key in ("betas", "eps"))):
            r.put(f"optim.{key}", r.get(field), field)
        elif key in defaults and r.absent(field):
            r.put(f"optim.{key}", defaults[key], f"the default of {kind}")
            taken.append(f"{key} {defaults[key]}")
    if taken:
        r.notes.append(f"{PARAMS}: what is not there has the default of {kind}: {', '.join(taken)}")
    if name in ("adamw", "muon"):
        _decoupled(r, kind)
    if name == "muon":
        _muon(r)


def _decoupled(r: Reading, kind: str) -> None:
    """Adam with L2 regularisation is not AdamW; without weight decay the two are one."""
    if r.get(f"{PARAMS}.adam_w_mode", True) or kind.lower() == "adamw":
        return
    decay = r.fields.get("optim.weight_decay")
    if decay is None or "optim.weight_decay" in r.nearer:
        decay = r.spec.get("optim.weight_decay", OptimSpec.model_fields["weight_decay"].default)
    if decay != 0:
        r.problem(f"{PARAMS}.adam_w_mode", False,
                  f"is L2 regularisation, and raydist's adamw decouples the weight decay, here {decay}",
                  "set adam_w_mode: true, or weight_decay: 0")  # fmt: skip


def _muon(r: Reading) -> None:
    for key in ("muon_lr", "adam_lr"):
        value = r.get(f"{PARAMS}.{key}")
        if value is not None and value != r.fields.get("optim.lr"):
            r.lose(f"{PARAMS}.{key}", "one optim.lr serves both")
    r.notes.append("optimizer.type: Muon: its update is scaled to AdamW's root mean square here: tune lr again")


def no_max_grad_norm(r: Reading) -> None:
    """DeepSpeed refuses it, too."""
    if (value := r.get(f"{PARAMS}.max_grad_norm")) is not None:
        r.problem(f"{PARAMS}.max_grad_norm", value, "is no parameter of the optimizer",
                  "write gradient_clipping at the top of the file")  # fmt: skip


SCHEDULER = "scheduler.params"
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


def scheduler(r: Reading) -> None:
    """The shape after the warm-up, the peak, and how many steps there are."""
    kind = r.get("scheduler.type")
    match kind:
        case None:
            if "optimizer.type" in r.given and not any(n.startswith("optim.schedule") for n in r.spec):
                shape = ScheduleSpec.model_fields["name"].default
                r.notes.append(f"scheduler is not set: DeepSpeed holds lr, and optim.schedule stays {shape}")
        case "WarmupLR":
            _warmup(r, "constant")
            _peak(r, "warmup_max_lr")
        case "WarmupDecayLR":
            _warmup(r, "linear")
            _peak(r, "warmup_max_lr", default=1e-3)
            r.put("optim.schedule.floor", 0.0, "scheduler.type")
            _steps(r, r.get(f"{SCHEDULER}.total_num_steps"), f"{SCHEDULER}.total_num_steps")
        case "WarmupCosineLR":
            _warmup(r, "cosine")
            if f"{SCHEDULER}.cos_min_ratio" not in r.auto:
                r.put("optim.schedule.floor", r.get(f"{SCHEDULER}.cos_min_ratio", 1e-4), f"{SCHEDULER}.cos_min_ratio")
            _steps(r, r.get(f"{SCHEDULER}.total_num_steps"), f"{SCHEDULER}.total_num_steps")
        case "OneCycle":
            _one_cycle(r)
        case "LRRangeTest":
            r.lose("scheduler.type", "LRRangeTest: optim.schedule stays the spec's")
        case _:
            if near := difflib.get_close_matches(kind, SCHEDULERS, n=1, cutoff=0.75):
                r.problem("scheduler.type", kind, "is no scheduler of DeepSpeed", f'did you mean "{near[0]}"?')
            else:
                r.lose("scheduler.type", f"{kind}: optim.schedule stays the spec's")


def _warmup(r: Reading, shape: str) -> None:
    r.put("optim.schedule.name", shape, "scheduler.type")
    name, kind = f"{SCHEDULER}.warmup_num_steps", r.get(f"{SCHEDULER}.warmup_type", "log")
    if name in r.given:
        r.put("optim.schedule.warmup", r.get(name), name)
    elif r.absent(name):
        r.put("optim.schedule.warmup", 1000, f"the default of {r.given['scheduler.type']}")
    if kind != "linear" and r.fields.get("optim.schedule.warmup") != 0:
        r.lose(f"{SCHEDULER}.warmup_type", f"{kind}: the warm-up is linear here")
    for start in ("warmup_min_lr", "warmup_min_ratio"):
        if r.get(f"{SCHEDULER}.{start}"):
            r.lose(f"{SCHEDULER}.{start}", "the warm-up starts at 0")


def _peak(r: Reading, key: str, default: float | None = None) -> None:
    """The scheduler's peak replaces the optimizer's lr, as it does in DeepSpeed."""
    source = f"{SCHEDULER}.{key}"
    peak = r.get(source)
    if peak is None and default is not None and r.absent(source):
        peak, source = default, f"the default of {r.given['scheduler.type']}"
    if peak is None:
        return
    before = r.given.get(f"{PARAMS}.lr", peak)
    if before != peak:
        r.notes.append(f"{PARAMS}.lr: {before:g} gives way to the scheduler's {peak:g}, as in DeepSpeed")
    r.put("optim.lr", peak, source)


def _steps(r: Reading, total: int | None, source: str) -> None:
    """The length of the run, if the spec has none. The schedule spans the run, whichever file gives its length."""
    if total is None:
        return
    steps, epochs = r.spec.get("train.steps"), r.spec.get("train.epochs")
    if steps is None and epochs is None:
        r.put("train.steps", total, source)
    elif steps != total:
        length = f"train.epochs {epochs}" if steps is None else f"train.steps {steps}"
        r.notes.append(f"{source}: {total}: the run keeps the spec's {length}, and the schedule spans it")


def _one_cycle(r: Reading) -> None:
    """Up to cycle_max_lr, down to cycle_min_lr: a linear schedule whose warm-up is the first half of the cycle."""
    low, high = f"{SCHEDULER}.cycle_min_lr", f"{SCHEDULER}.cycle_max_lr"
    r.problems += [f"{name}: is missing; OneCycle needs it" for name in (low, high) if r.absent(name)]
    r.put("optim.schedule.name", "linear", "scheduler.type")
    _peak(r, "cycle_max_lr")
    bottom, peak = r.get(low), r.get(high)
    if bottom is not None and peak:
        r.put("optim.schedule.floor", bottom / peak, f"{low} / cycle_max_lr")
        if bottom:
            r.notes.append(f"{low}: {bottom:g}: the cycle ends there, and starts at 0")
    first = r.get(f"{SCHEDULER}.cycle_first_step_size", 2000)
    second = r.get(f"{SCHEDULER}.cycle_second_step_size", first)
    r.put("optim.schedule.warmup", first, f"{SCHEDULER}.cycle_first_step_size")
    _steps(r, first + second, f"{SCHEDULER}.cycle_first_step_size + cycle_second_step_size")
    if r.get(f"{SCHEDULER}.decay_step_size") and r.get(f"{SCHEDULER}.decay_lr_rate"):
        r.lose(f"{SCHEDULER}.decay_lr_rate", "the schedule ends with the cycle")
    if r.get(f"{SCHEDULER}.cycle_momentum", True) and r.fields.get("optim.name", "adamw") == "adamw":
        r.lose(f"{SCHEDULER}.cycle_momentum", "true is the default: betas stay as they are")
