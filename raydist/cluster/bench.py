"""Runs a benchmark function in ranks on Ray. They are placed like a job's workers, and the first Ctrl-C ends them.

Runs in: the driver. Never imports torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from raydist.cluster import nodes, preflight
from raydist.cluster.run.fit import AbortHandle, AttemptResult, run_attempt
from raydist.cluster.run.request import worker_kind
from raydist.cluster.run.root_cause import Failure
from raydist.cluster.run.supervisor import handling
from raydist.cluster.session import Session
from raydist.errors import PreflightError, WorkerFailed
from raydist.spec import JobSpec

_LOOK_S = 0.2


def workers(session: Session) -> int:
    """Ranks to measure with if no job gives the number: one per GPU, else one per node; at least two."""
    return max(int(session.resources.get("GPU", 0)) or sum(node["Alive"] for node in nodes.listed()), 2)


def run(function: str, config: Mapping[str, Any], job: JobSpec, session: Session, *, spread: bool) -> dict[str, Any]:
    """Calls `function` ("module:attribute") with `config` and `gpus` (per rank), in as many ranks as the job's maximum of workers.

    Returns what rank 0 returned. Call it in the main thread. Raises PreflightError if the ranks do not fit on the cluster,
    WorkerFailed with the root cause if one fails, and SystemExit with 129, 130 or 143 if a signal ended it.
    """
    count = job.cluster.most
    asked = job.with_fields({"cluster.workers": count})
    there = preflight.usable_nodes(asked, session)
    problems = preflight.check_resources(asked, [node["Resources"] for node in there])
    if problems:
        raise PreflightError("\n".join(problems))
    gpus = preflight.gpus_per_worker(asked, session.resources)
    abort = AbortHandle()
    ended: list[AttemptResult | BaseException] = []
    signals: list[int] = []

    def attempt() -> None:
        try:
            result = run_attempt(
                function,
                {**config, "gpus": gpus},
                session=session,
                run_name="bench",
                workers=count,
                kind=worker_kind(job, gpus),
                abort=abort,
                avoid=nodes.unusable(job.cluster.resources),
                spread=spread,
            )
            ended.append(result)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=attempt, name="raydist-bench", daemon=True)
    with handling(lambda number, frame: signals.append(number)):
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if signals:
                abort.abort()
    if signals:
        print("raydist: interrupted; no result was kept", file=sys.stderr)
        sys.exit(128 + signals[0])
    (outcome,) = ended
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome.failure is not None:
        raise _failed(outcome.failure)
    return dict(outcome.value)


def _failed(failure: Failure) -> WorkerFailed:
    rank = "" if failure.rank is None else f"rank {failure.rank}: "
    return WorkerFailed(f"the measurement failed: {rank}{failure.cause}", failure.traceback.strip())
