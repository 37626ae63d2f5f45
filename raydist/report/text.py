"""Numbers and events as text for people. Pure functions.

Runs anywhere. Imports nothing heavy: no rich, no pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydist.records import Event

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float | None) -> str:
    """Bytes: `512 B`, `12.3 MiB`, or `-`."""
    if count is None:
        return "-"
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def span(seconds: float) -> str:
    """A time: `12 ms`, `0.41 s`, `1:32`, `2:05:10`, `3d 4:00:00`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if whole >= 3600 else f"{minutes}:{rest:02d}"
    return f"{days}d {clock}" if days else clock


def quantity(value: float, unit: str) -> str:
    """A figure of raydist.report.profile: `83%`, `1.2 GiB/s`, `12.3 MiB`, `310 W`, `61 C`."""
    if unit == "share":
        return f"{value:.0%}"
    if unit.startswith("bytes"):
        return size(value) + unit.removeprefix("bytes")
    return f"{value:.0f} {unit}"


def loss(value: float | None) -> str:
    """A loss in nats, or `-`."""
    return "-" if value is None else f"{value:.4f}"


def rate(value: float | None) -> str:
    """Tokens per second, or `-`."""
    return "-" if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of something, or a dash."""
    return "-" if share is None else f"{share:.0%}"


def speed(bytes_per_second: float | None) -> str:
    """A bandwidth, or a dash."""
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def figures(snapshot: dict[str, Any], total_steps: int | None) -> dict[str, str]:
    """The live figures of `RunMonitor.snapshot()`, by label, in the order of display. Unknown ones are left out."""
    record = snapshot.get("record") or {}
    shown: dict[str, str] = {}
    if record:
        shown["loss"] = loss(record["loss"])
    if snapshot.get("eval_loss") is not None:
        shown["eval"] = loss(snapshot["eval_loss"])
    if record:
        shown["lr"] = f"{record['lr']:.2e}"
        shown["grad norm"] = "-" if record["grad_norm"] is None else f"{record['grad_norm']:.3g}"
    if snapshot.get("tokens_per_second") is not None:
        shown["tokens/s"] = rate(snapshot["tokens_per_second"])
    if snapshot.get("mfu") is not None:
        shown["MFU"] = f"{snapshot['mfu']:.1%}"
    if snapshot.get("data_share") is not None:
        shown["data wait"] = f"{snapshot['data_share']:.1%}"
    if total_steps and snapshot.get("seconds_per_step") is not None:
        shown["ETA"] = span(max(0, total_steps - snapshot["step"]) * snapshot["seconds_per_step"])
    return shown


def progress(step: int, total_steps: int | None) -> str:
    """`step 12/200`, or `step 12` if the end is not known."""
    return f"step {step}/{total_steps}" if total_steps else f"step {step}"


def line(snapshot: dict[str, Any], total_steps: int | None) -> str:
    """The live figures as one plain line."""
    parts = [f"{label} {value}" for label, value in figures(snapshot, total_steps).items()]
    return "  ".join([progress(snapshot["step"], total_steps), *parts])


def event(what: Event) -> str:
    """An event as one line, without a failure's traceback. An event of another version is shown as its raw data."""
    try:
        return _line(what)
    except (KeyError, TypeError, ValueError):
        return f"{what.kind} {what.data}"


def _line(what: Event) -> str:
    data = what.data
    match what.kind:
        case "attempt_started":
            ranks = f"{data['world_size']} worker{'s' if data['world_size'] != 1 else ''}"
            start = f"from step {data['resume_step']}" if data["resume_step"] else "from the start"
            return f"attempt {data['attempt']}: {ranks}, {start}"
        case "workers":
            each = [f"rank {w['rank']} on {w['host']} ({w['node_ip']}, pid {w['pid']})" for w in data["workers"]]
            return "workers: " + ", ".join(each[:8]) + (f" and {len(each) - 8} more" if len(each) > 8 else "")
        case "resumed":
            memory = data.get("source") == "memory"
            path = " (a copy in memory)" if memory else f" ({data['path']})" if "path" in data else ""
            return f"resumed from step {data['step']}{path}"
        case "weights_loaded":
            return f"started from the weights of run {data['run']} at step {data['step']} ({data['source']})"
        case "first_step":
            seconds, stages = added_up({**data.get("before", {}), **data["stages"]})
            again = f"; {data['repeated_steps']} steps trained once more" if data["repeated_steps"] else ""
            return f"step {data['step']}, the first of attempt {data['attempt']}, after {seconds}: {stages}{again}"
        case "checkpoint_saved":
            took = f"in {span(data['seconds'])}, training stopped for {span(data['stall_seconds'])}"
            return f"checkpoint at step {data['step']}: {size(data['bytes'])} {took}{_best(data)}"
        case "checkpoint_failed":
            return f"checkpoint at step {data['step']} failed{_rank(data)}: {data['cause']}"
        case "checkpoint_rejected":
            return f"checkpoint at step {data['step']} is not used: {data['file']}: {data['cause']}"
        case "checkpoint_damaged":
            then = f"repaired from {data['mended_from']}" if data["mended_from"] else "and there is no good copy of it"
            return f"checkpoint at step {data['step']} was damaged, {then}: {data['file']}: {data['cause']}"
        case "replica_saved":
            return (
                f"replica {data['replica']} has step {data['step']}: {size(data['bytes'])} in {span(data['seconds'])}"
            )
        case "replica_failed":
            return f"replica {data['replica']}: {data['cause']}"
        case "replica_used":
            return f"step {data['step']} is loaded from the replica {data['replica']}"
        case "eval":
            return f"eval at step {data['step']}: loss {loss(data['loss'])} on {data['tokens']:,} tokens{_best(data)}"
        case "capacity":
            return f"MFU is relative to {data['peak_flops'] / 1e12:,.0f} TFLOP/s, the peak of all devices"
        case "pipeline":
            stages = f"pipeline of {len(data['blocks'])} stages on {data['ranks']} ranks, {data['micro_batches']} micro-batches"
            better = " or ".join(f"{one['set']} makes it {one['bubble']:.0%}" for one in data["better"])
            return f"{stages}: ranks wait {data['bubble']:.0%} of the passes' time{better and '; ' + better}"
        case "comm_chosen":
            return f"comm: auto: {data['because']}"
        case "non_finite":
            return f"{data['cause']}: {_ACTIONS[data['action']]}"
        case "loss_spike":
            spike = f"step {data['step']}: loss {loss(data['loss'])}, the median before is {loss(data['median'])}"
            return f"{spike}: {_ACTIONS[data['action']]}"
        case "requested":
            return f"{_REQUESTS.get(data['what'], data['what'])} requested by {data['by'] or 'unknown'}"
        case "trace_started":
            last = data["first_step"] + data["steps"] - 1
            return f"trace {data['trace']}: steps {data['first_step']} to {last} on {data['world_size']} ranks"
        case "trace_failed":
            return f"trace {data['trace']} failed{_rank(data)}: {data['cause']}"
        case "replica_drift":
            more = f" and {data['count'] - len(data['tensors'])} more" if data["count"] > len(data["tensors"]) else ""
            drifted = f"{_ranks(data['ranks'])} drifted in {', '.join(data['tensors'])}{more}"
            return f"step {data['step']}: {drifted}: {_REPAIRS[data['action']]}"
        case "gradients":
            more = data["count"] - len(data["problems"])
            problems = "; ".join(map(_gradient, data["problems"])) + (f"; and {more} more" if more else "")
            return f"step {data['step']}: the gradient of {problems}"
        case "finding":
            if data.get("state") == "over":
                return f"over: {data['what']}"
            return f"{data['what']}: {data['remedy']}"
        case "data_stalled":
            where = data["where"].partition("\n")[0]
            then = "the rank stops the attempt" if data["final"] else "its loader is restarted"
            return f"step {data['step']}, rank {data['rank']}: no batch for {span(data['seconds'])}, in {where}: {then}"
        case "fault":
            return (
                f"injected at step {data['step']}, rank {data['rank']}: {data['fault']}{_fault_fields(data['asked'])}"
            )
        case "failure":
            return f"attempt {data['attempt']} failed{_rank(data)}: {data['cause']}"
        case "decision":
            wait = f" in {span(data['after_s'])}" if data.get("after_s") else ""
            micro = f" with micro-batch {data['micro_batch']}" if data.get("micro_batch") else ""
            micro = f" with max_tokens {data['max_tokens']:,}" if data.get("max_tokens") else micro
            return f"decision: {data['action']}{micro}{wait}: {data['because']}"
        case "note":
            return str(data["text"])
        case "histograms":
            return f"histograms of step {data['step']}: {len(data['weights'])} parameters"
        case "experts":
            return f"{len(data['layers'])} layers with experts"
        case "expert_loads":  # of a run of an earlier version
            return f"step {data['step']}: the fullest expert has {data['imbalance']:.2f} times the mean load"
        case "ended":
            cause = f": {data['cause']}" if data.get("cause") else ""
            return f"{data['status']} at step {data['step']}{cause}"
    raise KeyError(what.kind)


def added_up(stages: Mapping[str, float]) -> tuple[str, str]:
    """The sum of some times, and each that is not zero, by name. The rounded times add up to the rounded sum."""
    total = sum(stages.values())
    digits = 2 if total < 1 else 1 if total < 60 else 0
    parts, before, after = [], 0.0, 0.0
    for name, seconds in stages.items():
        before, after = after, after + seconds
        shown = round(after, digits) - round(before, digits)
        if round(shown, digits) > 0:
            parts.append(f"{'Ray' if name == 'ray' else name.replace('_', ' ')} {shown:.{digits}f} s")
    return f"{total:.{digits}f} s", ", ".join(parts)


_REQUESTS = {"stop": "stop", "checkpoint": "checkpoint", "trace": "trace"}
_ACTIONS = {
    "stop": "the run stops",
    "skip": "the step is skipped",
    "rollback": "the run rolls back and skips the batch",
}


_REPAIRS = {
    "repair": "repaired from the other ranks",
    "rollback": "there is no majority, so the run rolls back",
    "stop": "too often on that hardware, so the run stops",
}


_PROBLEMS = {"missing": "is missing", "zero": "is all zero", "not_finite": "is not finite", "differs": "differs"}


def _gradient(problem: dict[str, Any]) -> str:
    """One problem of an event `gradients`."""
    norms = f" (norms {problem['least']:.4g} to {problem['most']:.4g})" if "least" in problem else ""
    return f"{problem['parameter']} {_PROBLEMS[problem['problem']]} on {_ranks(problem['ranks'])}{norms}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _fault_fields(fault: dict[str, Any]) -> str:
    """A fault's own fields, without those that are shown elsewhere."""
    own = [f"{k} {v}" for k, v in fault.items() if k not in ("fault", "rank", "step", "times") and v is not None]
    return f" ({', '.join(own)})" if own else ""


def _best(data: dict[str, Any]) -> str:
    return " (best so far)" if data.get("best") else ""


def _rank(data: dict[str, Any]) -> str:
    return "" if data.get("rank") is None else f", rank {data['rank']}"
