"""Records that cross processes and versions: the result of a step, and the events of a run.

Runs anywhere. They are passed as versioned dicts of numbers, strings and lists of them, never as pickled classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.printable import printable

VERSION = 1

EXPORTED_ONLY = frozenset({"histograms"})
"""Kinds of events that are exported but not written to events.jsonl: they are large, and not needed in a run's history."""

NOISE_MEASURED_AT_LEAST = 20
"""Minimum number of measurements of the gradient noise scale before any conclusion."""
NOISE_FAR_BEYOND = 4.0
"""A global batch above this multiple of the noise scale is far beyond it: a sequence then contributes a fifth of its maximum."""

LISTS = ("expert_loads", "expert_bias")
"""Fields of a `StepRecord` that are large: a number for each expert of each layer."""

Status = Literal["running", "finished", "paused", "stopped", "interrupted", "lost"]
"""running; finished: its last step is done; paused: at `--until`; stopped: failed for good;
interrupted: by a signal, after a checkpoint; lost: its driver died without reporting an end."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, measured on rank 0. The names are an interface (docs/reference/records.md).

    `step` counts from 1: after step s, s updates have been applied. `loss` is the mean over the tokens of the
    global batch, in nats; `grad_norm` the global norm before clipping; `tokens` those that are counted in the loss;
    `seconds` the whole step, `data_seconds` of it spent waiting for data; `samples_hash` the xxh64 (hex) of the
    global batch's sample ids, in order, as little-endian int64; `samples`, how many of them were trained; `grad_noise_scale` the
    gradient noise scale so far, in sequences (docs/explanation/noise.md), None if unknown. Of a model with experts,
    `expert_imbalance` is the load of the fullest expert of a layer over the mean, for the worst layer, and `exchanged_bytes` what
    all ranks sent to others' experts and back; `expert_loads` are the tokens of each expert, a list for each layer in the order of
    the event `experts`, and `expert_bias` the biases with which the routers chose for these tokens, [] for a router without one;
    None in steps that `observe.expert_loads` leaves out.
    With compressed gradients, on rank 0: `residual_norm` of what error feedback keeps, None without it; `compression_error`, the
    norm of what was lost over that of what was compressed; `sent_bytes` for sums of gradients, and `saved_bytes` against fp32.
    Where replicas train apart (`comm.every`), `grad_norm` is the mean of their norms; `local_step`, whether no outer step started
    or arrived after this step; of the last one that arrived, on rank 0, `sync_seconds` that training waited for it, and
    `sync_bytes` that were sent for it.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    data_seconds: float
    world_size: int
    attempt: int
    samples_hash: str
    grad_noise_scale: float | None = None
    expert_imbalance: float | None = None
    exchanged_bytes: int | None = None
    residual_norm: float | None = None
    compression_error: float | None = None
    sent_bytes: int | None = None
    saved_bytes: int | None = None
    local_step: bool | None = None
    sync_seconds: float | None = None
    sync_bytes: int | None = None
    samples: int | None = None
    expert_loads: list[list[int]] | None = None
    expert_bias: list[list[float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of the fields, in order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def numbers(row: Mapping[str, Any]) -> int:
    """How many numbers the LISTS of a StepRecord have, as a dict."""
    return sum(len(layer) for name in LISTS for layer in row.get(name) or ())


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run: `kind` names it, `data` holds plain values, `at` is Unix time in seconds.

    Kinds: attempt_started, workers, resumed, weights_loaded, first_step, checkpoint_saved, checkpoint_failed, checkpoint_rejected,
    checkpoint_damaged, replica_saved, replica_failed, replica_used, eval, capacity, non_finite, loss_spike, replica_drift,
    gradients, data_stalled, finding, fault, failure, decision, note, histograms,
    experts, ended. docs/reference/records.md lists the data of each.
    """

    kind: str
    at: float
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.data.keys().isdisjoint(("v", "kind", "at")), (
            f"{self.kind}: data must not contain the keys v, kind, at"
        )
        object.__setattr__(self, "data", printable(self.data))  # from a rank or a file, and shown on terminals

    def to_dict(self) -> dict[str, Any]:
        """One line of events.jsonl."""
        return {"v": VERSION, "kind": self.kind, "at": self.at, **self.data}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Event:
        """The inverse of `to_dict`; keys of later versions are kept in `data`."""
        rest = {k: v for k, v in raw.items() if k not in ("v", "kind", "at")}
        return cls(printable(str(raw["kind"])), float(raw["at"]), rest)


Severity = Literal["info", "warning", "critical"]
"""info: could be improved; warning: will fail or wastes much; critical: the results are not reliable."""
FindingState = Literal["new", "changed", "over"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a rule of raydist.diagnosis: the data of an event `finding`.

    `rule`: its name; `rank`: the rank concerned, None for all; `what`: one line, with the important figures; `figures`:
    plain values by name, units in the names; `remedy`: what to do about it.

    `symptom`: what was seen, by name: causes of one symptom compete, and one finding is told; "" where the rule is alone.
    `cause`: in words. `culprit`: by kind (rank, host, node, gpu, link, file, setting, step). `evidence`: [{"figure", "value",
    "from"}]. `others`: the causes that were considered too, [{"cause", "against"}]. `confidence`: 0 to 1. `lost`: share of the
    time that it costs, 0 to 1; None if it costs none or that is not known. `state`: new, changed or over.
    """

    rule: str
    rank: int | None
    severity: Severity
    what: str
    figures: dict[str, Any]
    remedy: str
    symptom: str = ""
    cause: str = ""
    culprit: dict[str, Any] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    confidence: float | None = None
    lost: float | None = None
    state: FindingState = "new"

    @property
    def key(self) -> tuple[str, int | None, str]:
        """Equal for findings of the same symptom and culprit, whatever the figures."""
        return self.symptom or self.rule, self.rank, str(self.figures.get("kind", ""))

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, to cross processes and versions."""
        return {"v": VERSION, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Finding:
        """The inverse of `to_dict`; keys of later versions are dropped, and those that an earlier one lacks have their defaults.
        A damaged dict or list is empty."""
        made = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        for name, kind in {"figures": dict, "culprit": dict, "evidence": list, "others": list}.items():
            made[name] = made[name] if isinstance(made.get(name), kind) else kind()
        return cls(**made)

    def event(self, at: float) -> Event:
        """The finding as an event of a run, at Unix time `at`."""
        return Event("finding", at, {name: value for name, value in self.to_dict().items() if name != "v"})


def batch_far_beyond_noise(batch: int, scale: float, measured: int) -> bool:
    """Whether a global batch of `batch` sequences is far beyond the gradient noise scale (docs/explanation/noise.md).

    `scale`: the noise scale in sequences, from `measured` steps; no scale counts as less than one sequence. Both the run's finding
    and a sweep's results use this rule.
    """
    return measured >= NOISE_MEASURED_AT_LEAST and batch > NOISE_FAR_BEYOND * max(scale, 1.0)
