"""A measurement in ranks on Ray: placed as a job's workers are, and ended by the first Ctrl-C.

Runs in: the driver. Never imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from raydist.cluster import preflight
from raydist.cluster.run.fit import Attempt, AttemptResult, run_attempt
from raydist.cluster.run.request import worker_kind
from raydist.cluster.run.root_cause import Failure
from raydist.cluster.run.supervisor import handling
from raydist.cluster.session import Session
from raydist.errors import PreflightError, WorkerFailed
from raydist.spec import JobSpec

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal ended it."""

    signal: int


def workers(session: Session) -> int:
    """How many ranks to measure where no job says it: one a GPU, else one a node; two at least."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    return max(int(session.resources.get("GPU", 0)) or nodes, 2)


def run(
    function: str, config: Mapping[str, Any], job: JobSpec, session: Session, *, spread: bool
) -> dict[str, Any] | Interrupted:
    """Calls `function` ("module:attribute") with `config` and `gpus`, a rank's, in as many ranks as the job's most workers.

    Gives what rank 0 returned. Call it in the main thread. Raises PreflightError where they do not fit, WorkerFailed with the
    root cause where one fails.
    """
    count = job.cluster.most
    asked = job.model_copy(update={"cluster": job.cluster.model_copy(update={"workers": count})})
    problems = preflight.check_resources(asked, [n["Resources"] for n in ray.nodes() if n["Alive"]])
    if problems:
        raise PreflightError("\n".join(problems))
    gpus = preflight.gpus_per_worker(asked, session.resources)
    running: list[Attempt] = []
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
                on_started=running.append,
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
            if signals and running:
                running[0].abort()
    if signals:
        return Interrupted(signals[0])
    (how,) = ended
    if isinstance(how, BaseException):
        raise how
    if how.failure is not None:
        raise _failed(how.failure)
    return dict(how.value)


def _failed(failure: Failure) -> WorkerFailed:
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return WorkerFailed(f"the measurement failed: {who}{failure.cause}", failure.traceback.strip())
