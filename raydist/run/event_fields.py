"""The types of the data of events, as readers of events.jsonl and of a sweep's events/ rely on them.

Runs anywhere. docs/reference/records.md has the meaning of each field. A line with another type is damaged: its readers could
otherwise fail far from the cause. Unknown kinds and fields are of later versions, and are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_MOST = 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _is_course(value: Any) -> bool:
    """metric -> a list of [step, tokens, workers' hours, value]."""
    return isinstance(value, Mapping) and all(
        isinstance(rows, list) and all(isinstance(row, list) and len(row) == 4 and all(map(_is_number, row)) for row in rows)
        for rows in value.values()
    )  # fmt: skip


def _are_figures(value: Any) -> bool:
    known = ("steps", "tokens", "loss", "eval_loss", "tokens_per_second", "grad_noise_scale")
    return (
        isinstance(value, Mapping)
        and all(value.get(name) is None or _is_number(value[name]) for name in known)
        and _is_course(value.get("course", {}))
    )


def _are_changes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(
        _is_integer(one.get("rank")) if isinstance(one, Mapping) else _is_integer(one) for one in value
    )


def _are_workers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


_Check = Callable[[Any], bool]
_TYPES: dict[str, tuple[str, _Check]] = {
    "number": ("a number", _is_number),
    "integer": ("an integer", _is_integer),
    "text": ("text", lambda value: isinstance(value, str)),
    "mapping": ("a mapping", lambda value: isinstance(value, Mapping)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "numbers": ("a mapping of numbers", _are_numbers),
    "figures": ("a cell's figures", _are_figures),
    "changes": ("a mapping of pairs", _are_changes),
    "ranks": ("a list of ranks", _are_ranks),
    "workers": ("a list of mappings", _are_workers),
}
FIELDS: dict[str, dict[str, str]] = {
    "attempt_started": {"attempt": "integer", "world_size": "integer", "resume_step": "integer"},
    "workers": {"workers": "workers"},
    "resumed": {"step": "integer"},
    "first_step": {"attempt": "integer", "step": "integer", "seconds": "number", "stages": "numbers", "repeated_steps": "integer",
                   "before": "numbers?", "steps_per_epoch": "integer?"},
    "checkpoint_saved": {"step": "integer", "bytes": "integer", "seconds": "number", "stall_seconds": "number"},
    "checkpoint_failed": {"step": "integer?", "rank": "integer?"},
    "checkpoint_rejected": {"step": "integer?"},
    "checkpoint_damaged": {"step": "integer?"},
    "replica_failed": {"step": "integer?"},
    "capacity": {"flops_per_token": "number", "peak_flops": "number"},
    "eval": {"step": "integer", "loss": "number?"},
    "experts": {"layers": "numbers"},
    "non_finite": {"step": "integer?", "ranks": "ranks?"},
    "loss_spike": {"step": "integer?", "ranks": "ranks?"},
    "replica_drift": {"step": "integer?", "ranks": "ranks?"},
    "gradients": {"step": "integer?", "ranks": "ranks?"},
    "finding": {"rule": "text", "rank": "integer?", "severity": "text", "what": "text", "remedy": "text"},
    "data_stalled": {"step": "integer?", "rank": "integer?"},
    "trace_failed": {"rank": "integer?"},
    "fault": {"fault": "text", "rank": "integer?", "step": "integer", "attempt": "integer"},
    "failure": {"attempt": "integer", "rank": "integer?", "cause": "text", "fault": "text?", "traceback": "text?",
                "sides": "workers?"},
    "decision": {"action": "text", "because": "text"},
    "ended": {"status": "text", "cause": "text?"},
    # of a sweep's cells
    "started": {"cell": "text", "workers": "integer?", "gpus": "number?", "micro_batch": "integer?"},
    "finished": {"cell": "text", "figures": "figures?"},
    "stopped": {"cell": "text", "figures": "figures?", "because": "text?"},
    "paused": {"cell": "text", "figures": "figures?", "because": "text?"},
    "failed": {"cell": "text", "figures": "figures?", "cause": "text?"},
    "retried": {"cell": "text", "because": "text?", "micro_batch": "integer?"},
    "exploited": {"cell": "text", "source": "text", "step": "integer", "changes": "changes"},
    "report": {"cell": "text", "value": "number?"},
    "added": {"note": "mapping"},
}  # fmt: skip
"""Kind -> field -> type. `?`: it may be missing, or null. All others are necessary."""


def check(kind: str, at: float, data: Mapping[str, Any]) -> None:
    """Raises ValueError for an event whose data readers cannot use."""
    if not math.isfinite(at) or abs(at) > _MOST:
        raise ValueError(f"its time is {at}")
    for name, kinds in FIELDS.get(kind, {}).items():
        value = data.get(name)
        if value is None:
            if not kinds.endswith("?") and name not in data:
                raise ValueError(f"{kind} without {name}")
            if kinds.endswith("?"):
                continue
        label, fits = _TYPES[kinds.rstrip("?")]
        if not fits(value):
            raise ValueError(f"{name} of {kind} is {value!r:.60}, not {label}")
