"""Which settings of a job fit in the memory of its devices, by the planner: before it runs, and after a rank ran out of memory.

Runs in: the user's process; `settings` in one of its own, which runs no code of the user's. Imports torch inside functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from raydist.api.call import Call
from raydist.diagnosis import Examination, figure
from raydist.errors import RaydistError
from raydist.records import Event
from raydist.report import text
from raydist.run.directory import RunDir

if TYPE_CHECKING:
    from raydist.planner.advice import Pick
    from raydist.planner.facts import Machine
    from raydist.records import Finding
    from raydist.spec import JobSpec

OVER = 0.9
"""Of what the planner forecasts for a job that should have fitted and did not: settings that need less are sought."""


def fitting(job: JobSpec, machine: Machine) -> tuple[int | None, Pick | None]:
    """Bytes that the fullest device needs with the job's own strategy, None if it has no plan; and the cheapest settings that fit.
    Raises UserErrors."""
    from raydist.api.planning import progress
    from raydist.planner.advice import advise
    from raydist.planner.vocabulary import vocabulary

    words = vocabulary(job.data)
    with progress() as measuring:
        from raydist.planner.measure import Planner

        planner = Planner(job, words, machine.device, measuring)
        advice = advise(job, machine, planner.model(), planner.measure)
    own = next((row.estimate for row in advice.rows if row.strategy == job.parallel.strategy), None)
    return own.total if own else None, advice.pick


def settings(run: str, attempt: int, memory: int, device: Literal["cuda", "cpu"]) -> dict[str, Any]:
    """Of an attempt that ran out of `memory` bytes of a device: `needed` and `usable` bytes, and `set`, which fits and then needs
    `total`. Plain values. Raises UserErrors."""
    from raydist.planner.facts import Machine
    from raydist.run.log import read_events

    folder = RunDir(run)
    events = read_events(folder)
    job, nodes = _job_of(folder, events, attempt), _nodes_of(events, attempt)
    machine = Machine(nodes.total(), max(nodes.values()), device, memory)
    needed, pick = fitting(job, machine)
    if needed is not None and machine.usable is not None and needed <= machine.usable:
        _, pick = fitting(job, machine.with_usable(int(OVER * needed)))
    found = {"set": pick.changes, "total": pick.estimate.total} if pick is not None and pick.changes else {}
    return {"needed": needed, "usable": machine.usable, **found}


def say_what_fits(run: RunDir, made: Examination) -> None:
    """Puts into the findings of ranks that ran out of memory which settings fit; and into `blind` why that is not known."""
    for one in made.found:
        kind, _, attempt = str(one.finding.figures.get("kind", "")).partition(" ")
        if one.finding.rule != "stopped" or kind != "out_of_memory" or _of_script(run):
            continue
        try:
            device, memory = _memory(run, one.finding)
            if memory is None:
                raise RaydistError("no telemetry has the memory of its device")
            given = {"run": run.full_uri, "attempt": int(attempt), "memory": memory, "device": device}
            found = Call(f"{__name__}:settings", given, trusted=False).wait()
        except RaydistError as error:
            made.blind.append(f"which settings fit, after attempt {attempt} ran out of memory: {error.message}")
            continue
        if found is not None:
            one.finding = _with(one.finding, found)


def _with(finding: Finding, found: dict[str, Any]) -> Finding:
    source = "planner: `raydist plan`"
    evidence = [
        figure("bytes that the fullest device needs as the job ran", float(found["needed"] or "nan"), source),
        figure("bytes of a device that training can use", float(found["usable"]), source),
    ]
    usable = text.size(found["usable"])
    if "set" not in found:
        remedy = (
            f"use more devices, or larger ones: by the planner no setting needs less than the {usable} that one has"
        )
        return replace(finding, remedy=remedy, evidence=[*finding.evidence, *evidence])
    changes = ", ".join(f"{name}: {value}" for name, value in found["set"].items())
    evidence.append(figure(f"the same with {changes}", float(found["total"]), source))
    now = f"; as it ran it needs {text.size(found['needed'])}" if found["needed"] is not None else ""
    if found["needed"] is not None and found["needed"] <= found["usable"]:
        now += ", so something else took memory, too"
    remedy = f"set {changes}: by the planner the fullest device then needs {text.size(found['total'])} of {usable}{now}"
    culprit = {**finding.culprit, "setting": next(iter(found["set"]))}
    return replace(finding, remedy=remedy, culprit=culprit, evidence=[*finding.evidence, *evidence])


def _of_script(run: RunDir) -> bool:
    from raydist.spec import read_stored
    from raydist.spec.script import SESSION

    try:
        return read_stored(run.storage).model.name == SESSION
    except (RaydistError, FileNotFoundError):
        return True


def _job_of(run: RunDir, events: Sequence[Event], attempt: int) -> JobSpec:
    """The job with what decisions have changed before that attempt."""
    from raydist.spec import read_stored

    job = read_stored(run.storage)
    for event in events:
        if event.kind == "attempt_started" and event.data["attempt"] == attempt:
            break
        if event.kind == "decision":
            names = ("micro_batch", "checkpoint_activations")
            changes = {f"train.{name}": value for name in names if (value := event.data.get(name)) is not None}
            job = job.with_fields(changes)
            if (tokens := event.data.get("max_tokens")) is not None:
                job = job.with_max_tokens(tokens)
    return job


def _nodes_of(events: Sequence[Event], attempt: int) -> Counter[str]:
    """Ranks of each node in that attempt."""
    found, now = Counter({"": 1}), 0
    for event in events:
        if event.kind == "attempt_started":
            now = event.data["attempt"]
        elif event.kind == "workers" and now == attempt:
            found = Counter(str(one["node_ip"]) for one in event.data["workers"])
    return found


def _memory(run: RunDir, finding: Finding) -> tuple[Literal["cuda", "cpu"], int | None]:
    """Of the device of the rank that failed: its kind, and its bytes; on a CPU a rank's part of its node. None: not known."""
    import pyarrow.compute as pc

    from raydist.run.telemetry_log import read_samples

    rows = read_samples(run, ("kind", "node", "rank", "gpu_memory_total_bytes", "memory_total_bytes"))
    gpus = rows.filter(pc.equal(rows["kind"], "gpu"))
    if gpus.num_rows:
        return "cuda", pc.min(gpus["gpu_memory_total_bytes"]).as_py()
    node = finding.culprit.get("node")
    if node is not None:
        rows = rows.filter(pc.equal(rows["node"], node))
    total = pc.min(rows["memory_total_bytes"]).as_py()
    ranks = pc.count_distinct(rows["rank"]).as_py()
    return "cpu", None if total is None else total // max(ranks, 1)
