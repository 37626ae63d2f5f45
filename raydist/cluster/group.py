"""A group of Ray Train workers: one agent a rank, below which attempt after attempt can run.

Runs in: the driver, in the thread that runs the attempts; the group's own `fit()` waits in another. Never imports torch.

A rank's process that dies costs no worker: its agent starts the next one. An agent that dies, or a node, costs the group: Ray
Train ends all of it, and the next attempt takes a new one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raydist.cluster.conductor import rank_error
from raydist.cluster.recovery import Failure, is_echo, root_cause
from raydist.cluster.session import Session
from raydist.cluster.trainer import Attempt, AttemptResult, run_attempt

_LOOK_S = 0.1
_LEAVE_S = 10.0
_groups = itertools.count(1)


class Group:
    """Started as soon as it is made. `size` workers, each with those resources and `env`.

    `on_started(handle)` is called once `handle.abort()` can end it.
    """

    def __init__(
        self,
        *,
        session: Session,
        conductor: Any,
        monitor: Any,
        run_name: str,
        size: int,
        cpus: float,
        gpus: float,
        env: Mapping[str, str],
        on_started: Callable[[Attempt], None],
    ) -> None:
        import ray

        self._conductor = conductor
        number = next(_groups)
        ray.get(conductor.open.remote(number, size))
        self._result: AttemptResult | None = None

        def fit() -> None:
            self._result = run_attempt(
                "raydist.worker.entry:agent",
                {"conductor": conductor, "monitor": monitor, "group": number},
                session=session,
                run_name=run_name,
                workers=size,
                cpus_per_worker=cpus,
                gpus_per_worker=gpus,
                env=env,
                on_started=on_started,
            )

        self._thread = threading.Thread(target=fit, name="raydist-group", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether another attempt can run in it."""
        return self._thread.is_alive()

    def places(self) -> dict[int, str]:
        """Rank -> Ray's id of its node, once all are there; {} if the group has ended."""
        try:
            return {rank: offer["node"] for rank, offer in self._wait(self._conductor.places.remote()).items()}
        except _GroupEnded:
            return {}

    def attempt(self, number: int, job: Mapping[str, Any]) -> AttemptResult:
        """One attempt: from the ranks' start until all of them have ended. `job` is plain. Never raises for a failed one."""
        try:
            self._wait(self._conductor.begin.remote(number, dict(job)))
            reports = self._wait(self._conductor.result.remote(number))
        except _GroupEnded:
            return self._lost()
        failure = _cause(reports)
        if failure is None:
            return AttemptResult(None, reports[0]["outcome"])
        first = min((r for r in reports.values() if "outcome" not in r), key=lambda r: r["at"])
        return AttemptResult(failure, seen=first["at"], silent_s=first["silent_s"])

    def end(self) -> None:
        """Lets all agents go; returns once Ray has their resources back."""
        if self.alive:
            self._conductor.leave.remote()
        self._thread.join(_LEAVE_S)

    def _wait(self, ref: Any) -> Any:
        import ray

        while True:
            done, _ = ray.wait([ref], timeout=_LOOK_S)
            if done:
                return ray.get(ref)
            if not self.alive:
                raise _GroupEnded

    def _lost(self) -> AttemptResult:
        """The group has ended in the middle of an attempt. A rank's own error explains that better than its worker's end."""
        import ray

        assert self._result is not None
        known = _cause(ray.get(self._conductor.reports.remote()), but_echoes=True)
        ended = self._result.failure or Failure("controller_died", None, "the workers left in the middle of an attempt")
        return AttemptResult(ended if known is None or ended.kind == "aborted" else known, seen=time.time())


class _GroupEnded(Exception):
    """Ray Train's `fit` has returned."""


def _cause(reports: Mapping[int, Mapping[str, Any]], but_echoes: bool = False) -> Failure | None:
    errors = [error for rank, report in sorted(reports.items()) if (error := rank_error(rank, report)) is not None]
    if but_echoes:
        errors = [error for error in errors if not is_echo(error)]
    return root_cause(errors) if errors else None
