"""The incidents of a run and the reactions to them: one plain dict per incident, from the run's events.

Runs anywhere. Pure. docs/how-to/report.md has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydist.records import Event
from raydist.report import text

_LOGS = "`raydist logs RUN` shows what the ranks printed"
REMEDIES = {
    "user_error": "the traceback shows where",
    "worker_died": f"{_LOGS}; an unexpected SIGKILL usually comes from the kernel's OOM killer: see the host's log (dmesg)",
    "node_died": "the run continues without it; check the host's own log",
    "out_of_memory": "lower train.micro_batch, or use parallel.strategy: zero2 or zero3, or offload.optimizer: cpu",
    "worker_hung": "RUN/logs/attempt-* contains the stacks and the collectives of every rank",
    "communication": "check the network between these hosts: `raydist bench comm`",
    "controller_died": f"the same command resumes the run; {_LOGS}",
    "startup_timeout": "check that the cluster has room for all workers; `raydist train` prints its resources",
    "startup_failed": "check that the cluster has room for all workers; `raydist train` prints its resources",
}
_DRIVER = "the same command resumes the run; `raydist submit --retries 3` does so automatically"
_RESIZES = {"leave": "node leaves", "grow": "more ranks"}
KINDS: dict[str, tuple[str, str]] = {
    "non_finite": ("bad number", "lower optim.lr or optim.clip, or clean the data; recovery.on_nan sets the reaction"),
    "loss_spike": ("loss spike", "check the samples, lower optim.lr; recovery.spike sets the reaction"),
    "replica_drift": ("replicas drifted", "check the hardware of that rank; train.check_replicas detects it early"),
    "gradients": ("odd gradients", "check the model for an unused parameter or a broken backward pass"),
    "data_stalled": ("data stalled", "move the data closer, raise data.prefetch; recovery.data_timeout sets the limit"),
    "checkpoint_failed": ("checkpoint failed", "check the storage: free space, permissions, speed"),
    "checkpoint_rejected": ("checkpoint corrupt", "`raydist checkpoint verify RUN`; checkpoint.replicas keeps verified copies"),
    "checkpoint_damaged": ("checkpoint damaged", "check the storage; checkpoint.replicas keeps verified copies that repair it"),
    "replica_failed": ("replica failed", "check the replica's storage"),
    "trace_failed": ("trace failed", "try again: raydist trace RUN"),
}  # fmt: skip


def found(events: Sequence[Event], trained: Mapping[int, int]) -> list[dict[str, Any]]:
    """Incidents ordered by time: at, kind, severity, attempt, step, rank, cause, remedy, then, detail. Unknown values are None.

    `trained`: the last step of each attempt, which is the `step` of the failure that ended it. `then`: the reaction and its cost;
    `detail`: a traceback.
    """
    incidents: list[dict[str, Any]] = []
    attempt, ended = None, True
    for i, event in enumerate(events):
        data = event.data
        if event.kind == "attempt_started":
            if not ended:
                cause = "its driver exited without reporting an error"
                made = _one(events[i - 1].at, "driver lost", attempt, trained.get(attempt or 0), cause=cause)
                incidents.append({**made, "severity": "critical", "remedy": _DRIVER, "then": _then(events[i:])})
            attempt, ended = data["attempt"], False
        elif event.kind == "failure":
            ended = True
            incidents.append(_failure(event, trained.get(data["attempt"]), events[i + 1 :]))
        elif event.kind == "decision" and data["action"] in ("leave", "grow"):
            ended = True
            made = _one(event.at, _RESIZES[data["action"]], attempt, trained.get(attempt or 0), cause=data["because"])
            incidents.append({**made, "severity": "info", "then": _then(events[i + 1 :])})
        elif event.kind == "ended":
            ended = True
        elif event.kind == "fault":
            made = _one(event.at, "injected fault", data["attempt"], data["step"], data.get("rank"), text.event(event))
            incidents.append({**made, "severity": "info", "remedy": "requested with --faults"})
        elif event.kind == "finding" and data.get("state") == "over":
            before = next(
                (one for one in reversed(incidents) if (one["kind"], one["rank"]) == (data["rule"], data["rank"])), None
            )
            if before is not None:
                before["then"] = f"over after {text.span(event.at - before['at'])}"
        elif event.kind == "finding":
            made = _one(event.at, data["rule"], attempt, None, data.get("rank"), data["what"], data["remedy"])
            incidents.append({**made, "severity": data["severity"]})
        elif event.kind in KINDS:
            kind, remedy = KINDS[event.kind]
            ranks = data.get("ranks") or []
            rank = data.get("rank", _rank(ranks[0]) if len(ranks) == 1 else None)
            incidents.append(_one(event.at, kind, attempt, data.get("step"), rank, text.event(event), remedy))
    return sorted(incidents, key=lambda one: float(one["at"]))


def _one(
    at: float,
    kind: str,
    attempt: int | None,
    step: int | None,
    rank: int | None = None,
    cause: str = "",
    remedy: str | None = None,
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
        "then": None,
        "detail": None,
    }


def _failure(event: Event, step: int | None, rest: Sequence[Event]) -> dict[str, Any]:
    data = event.data
    fault = data.get("fault") or "failure"
    remedy = REMEDIES.get(fault)
    made = _one(event.at, fault.replace("_", " "), data["attempt"], step, data.get("rank"), data["cause"], remedy)
    return {
        **made,
        "severity": "critical",
        "then": _then(rest),
        "detail": (data.get("traceback") or "").strip() or None,
    }


def _then(rest: Sequence[Event]) -> str | None:
    """The reactions to it, up to the first step after it."""
    reactions: list[str] = []
    for event in rest:
        data = event.data
        if event.kind == "decision":
            reactions.append(text.event(event).removeprefix("decision: "))
        elif event.kind == "attempt_started":
            reactions.append(f"attempt {data['attempt']} on {data['world_size']} ranks")
        elif event.kind == "resumed":
            reactions.append(
                f"from step {data['step']}{' (a copy in memory)' if data.get('source') == 'memory' else ''}"
            )
        elif event.kind == "first_step":
            again = f", {data['repeated_steps']} trained once more" if data["repeated_steps"] else ""
            reactions.append(f"first step after {text.span(data['seconds'])}{again}")
            break
        elif event.kind == "failure":
            reactions.append("failed again")
            break
        elif event.kind == "ended":
            reactions.append(f"the run was {data['status']}")
            break
    return "; ".join(reactions) or None


def _rank(one: Any) -> int | None:
    """Ranks are numbers in one kind of event, and dicts in another."""
    rank = one.get("rank") if isinstance(one, Mapping) else one
    return int(rank) if rank is not None else None
