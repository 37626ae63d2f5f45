"""What went wrong in a run, and what was done about it: one plain dict an incident, out of its events.

Runs anywhere. Pure. docs/report.md has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydist.records import Event
from raydist.report import text

_LOGS = "`raydist logs RUN` shows what the ranks printed"
REMEDIES = {
    "user_error": "the traceback says where",
    "worker_died": f"{_LOGS}; a SIGKILL that nobody sent is the kernel's for lack of memory: its host's log (dmesg) says so",
    "node_died": "the run goes on without it; look at the host's own log",
    "out_of_memory": "lower train.micro_batch, or take parallel.strategy: zero2 or zero3, or offload.optimizer: cpu",
    "worker_hung": "RUN/logs/attempt-* has the stacks and the collectives of every rank",
    "communication": "look at the network between these hosts: `raydist bench comm`",
    "controller_died": f"the same command goes on; {_LOGS}",
    "startup_timeout": "is there room for all workers? `raydist train` says what the cluster has",
    "startup_failed": "is there room for all workers? `raydist train` says what the cluster has",
}
_DRIVER = "the same command goes on; `raydist submit --retries 3` does so by itself"
_RESIZES = {"leave": "node leaves", "grow": "more ranks"}
KINDS: dict[str, tuple[str, str]] = {
    "non_finite": ("bad number", "a lower optim.lr, a tighter optim.clip, clean data; recovery.on_nan says what is done"),
    "loss_spike": ("loss spike", "look at the samples, lower optim.lr; recovery.spike says what is done"),
    "replica_drift": ("replicas drifted", "suspect the hardware of that rank; train.check_replicas finds it early"),
    "gradients": ("odd gradients", "a parameter that takes no part, or a broken backward pass: look at the model"),
    "data_stalled": ("data stalled", "bring the data nearer, raise data.prefetch; recovery.data_timeout is the patience"),
    "checkpoint_failed": ("checkpoint failed", "look at the storage: room, rights, speed"),
    "checkpoint_rejected": ("checkpoint corrupt", "`raydist checkpoint verify RUN`; checkpoint.replicas keeps verified copies"),
    "checkpoint_damaged": ("checkpoint damaged", "suspect the storage; checkpoint.replicas keeps verified copies that mend it"),
    "replica_failed": ("replica failed", "look at the replica's storage"),
    "trace_failed": ("trace failed", "ask again: raydist trace RUN"),
}  # fmt: skip


def found(
    events: Sequence[Event], trained: Mapping[int, int], slow: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """at, kind, severity, attempt, step, rank, cause, remedy, then, detail: in the order of time. What is not known is None.

    `trained`: the last step of each attempt, which is the `step` of what ended it. `then`: what was done about it, and what it
    cost; `detail`: a traceback. `slow`: ranks, as raydist.report.heatmap_data.slow has them, with `at`.
    """
    told: list[dict[str, Any]] = []
    attempt, ended = None, True
    for i, event in enumerate(events):
        data = event.data
        if event.kind == "attempt_started":
            if not ended:
                cause = "its driver was gone without a word"
                made = _one(events[i - 1].at, "driver lost", attempt, trained.get(attempt or 0), cause=cause)
                told.append({**made, "severity": "critical", "remedy": _DRIVER, "then": _then(events[i:])})
            attempt, ended = data["attempt"], False
        elif event.kind == "failure":
            ended = True
            told.append(_failure(event, trained.get(data["attempt"]), events[i + 1 :]))
        elif event.kind == "decision" and data["action"] in ("leave", "grow"):
            ended = True
            made = _one(event.at, _RESIZES[data["action"]], attempt, trained.get(attempt or 0), cause=data["because"])
            told.append({**made, "severity": "info", "then": _then(events[i + 1 :])})
        elif event.kind == "ended":
            ended = True
        elif event.kind == "fault":
            made = _one(event.at, "injected fault", data["attempt"], data["step"], data["rank"], text.event(event))
            told.append({**made, "severity": "info", "remedy": "asked for with --faults"})
        elif event.kind == "finding":
            made = _one(event.at, data["rule"], attempt, None, data["rank"], data["what"], data["remedy"])
            told.append({**made, "severity": data["severity"]})
        elif event.kind in KINDS:
            kind, remedy = KINDS[event.kind]
            ranks = data.get("ranks") or []
            rank = data.get("rank", _rank(ranks[0]) if len(ranks) == 1 else None)
            told.append(_one(event.at, kind, attempt, data.get("step"), rank, text.event(event), remedy))
    for one in slow:
        cause = (
            f"it computed {one['factor']:.2f} times as long as the median rank, "
            f"steps {one['first_step']:,} to {one['last_step']:,}"
        )
        remedy = "look at its host: other load, a clock held down (gpu_throttle), memory that is swapped"
        told.append(_one(one["at"], "slow rank", one["attempt"], one["first_step"], one["rank"], cause, remedy))
    return sorted(told, key=lambda one: float(one["at"]))


def _one(
    at: float,
    kind: str,
    attempt: int | None,
    step: int | None,
    rank: int | None = None,
    cause: str = "",
    remedy: str | None = None,
    then: str | None = None,
) -> dict[str, Any]:
    return {
        "at": at,
        "kind": kind,
        "severity": "warning",
        "attempt": attempt,
        "step": step,
        "rank": rank,
        "cause": cause,
        "remedy": remedy,
        "then": then,
        "detail": None,
    }


def _failure(event: Event, step: int | None, rest: Sequence[Event]) -> dict[str, Any]:
    data = event.data
    remedy = REMEDIES.get(data["fault"])
    made = _one(
        event.at, data["fault"].replace("_", " "), data["attempt"], step, data.get("rank"), data["cause"], remedy
    )
    return {
        **made,
        "severity": "critical",
        "then": _then(rest),
        "detail": (data.get("traceback") or "").strip() or None,
    }


def _then(rest: Sequence[Event]) -> str | None:
    """What came of it, up to the first step after it."""
    said: list[str] = []
    for event in rest:
        data = event.data
        if event.kind == "decision":
            said.append(text.event(event).removeprefix("decision: "))
        elif event.kind == "attempt_started":
            said.append(f"attempt {data['attempt']} on {data['world_size']} ranks")
        elif event.kind == "resumed":
            said.append(f"from step {data['step']}{' (a copy in memory)' if data.get('source') == 'memory' else ''}")
        elif event.kind == "first_step":
            again = f", {data['repeated_steps']} trained once more" if data["repeated_steps"] else ""
            said.append(f"first step after {text.span(data['seconds'])}{again}")
            break
        elif event.kind == "failure":
            said.append("failed again")
            break
        elif event.kind == "ended":
            said.append(f"the run was {data['status']}")
            break
    return "; ".join(said) or None


def _rank(one: Any) -> int | None:
    """Ranks are numbers in one kind of event, and dicts in another."""
    rank = one.get("rank") if isinstance(one, Mapping) else one
    return int(rank) if rank is not None else None
