"""The attempts of one run: starts each one, and decides after it what follows.

Runs in: the driver, in the attempts thread; Supervisor calls `run`. It calls Elasticity for the workers, recovery.decide after a
failure, MonitorClient for events, MemoryCheckpoints and NodeMonitors, which it starts and closes, and DriverInjector; it reads
StopRequest and HeadOutage. Never imports torch; imports ray in functions only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from raydist.checkpoint.mirrors import newest_attempt
from raydist.cluster.run.elasticity import Elasticity, NoRoom
from raydist.cluster.run.fault_injector import DriverInjector
from raydist.cluster.run.head_outage import HeadOutage
from raydist.cluster.run.memory_checkpoints import MemoryCheckpoints
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.node_monitors import NodeMonitors
from raydist.cluster.run.recovery import Budget, FixedShapes, History, Passes, Restart, Split, Stop, decide
from raydist.cluster.run.request import Ending, Request, worker_env
from raydist.cluster.run.root_cause import Failure
from raydist.cluster.run.stop_request import StopRequest
from raydist.cluster.run.worker_group import Group
from raydist.errors import HeadReplaced, StorageError
from raydist.run.directory import RunDir, begin_attempt
from raydist.run.log import last_attempt

_STORAGE_S, _LOOK_S = 60.0, 1.0
"""How long to wait for a file system that is not there between two attempts, and how often to look."""


def storage_gone(
    run: RunDir, begun: int, stop: StopRequest, wait_s: float = _STORAGE_S, committed: tuple[int, int] = (0, 0)
) -> str | None:
    """Why the run's storage is not what it was: the note of attempt `begun`, which this driver wrote, is not there, or the newest
    checkpoint is older than `committed`, the (attempt, step) of one that this driver has seen. Else None.

    An unmounted file system leaves an empty folder, which looks like a new run. Waits for it up to `wait_s`, or until `stop`.
    """
    deadline, lacking = time.monotonic() + wait_s, f"attempt {begun} any more, which this driver has started"
    while True:
        with contextlib.suppress(StorageError):
            lineage = run.lineage()
            if begun in lineage.begun:
                # A later attempt that went back, because a checkpoint was damaged, has voided it.
                if max(run.manifests(lineage), default=0) >= committed[1] or lineage.voided_by(*committed) is not None:
                    return None
                lacking = f"the checkpoint of step {committed[1]} any more, which this driver has seen"
        if time.monotonic() > deadline or stop.wait(_LOOK_S):
            return f"{run.uri} does not have {lacking}: is its file system mounted? Nothing was written there"


class RestartLoop:
    """Use once: `run()`. `private`: all is on this host. `keeps`: the workers stay for the next run."""

    def __init__(
        self,
        request: Request,
        elasticity: Elasticity,
        monitor: MonitorClient,
        stop_request: StopRequest,
        outage: HeadOutage,
        injector: DriverInjector | None,
        *,
        private: bool,
        keeps: bool,
    ) -> None:
        self._request, self._elasticity, self._monitor, self._stop_request = request, elasticity, monitor, stop_request
        self._outage, self._injector, self._private, self._keeps = outage, injector, private, keeps
        self._spec = request.spec
        """Of the present attempt."""
        self._committed = 0, 0

    def saved(self, attempt: int, step: int) -> None:
        """That attempt has committed a checkpoint. From any thread."""
        self._committed = attempt, step

    def run(self) -> Ending:
        """How the run ended. Raises what is not the failure of an attempt."""
        run = self._request.run
        self._elasticity.begin()
        number, history = max(last_attempt(run), newest_attempt(run, self._spec.checkpoint.replicas)), History()
        memory_checkpoints = (
            MemoryCheckpoints(run, private=self._private, note=self._monitor.note)
            if self._spec.snapshot_every is not None
            else None
        )
        node_monitors = self._node_monitors() if self._spec.observe.interval_s is not None else None
        incident: dict[str, Any] | None = None
        try:
            with self._headed():
                while True:
                    group = self._gather()
                    if isinstance(group, Ending):
                        return group
                    if incident is not None and (
                        cause := storage_gone(run, number, self._stop_request, committed=self._committed)
                    ):
                        return Ending("stopped", self._monitor.last_step() or 0, cause=cause)
                    number += 1
                    begin_attempt(run, number)  # an earlier attempt, wherever it still runs, can no longer commit
                    workers = self._elasticity.workers
                    self._monitor.begin_attempt(number, workers, run.newest_step())
                    places = group.places(workers, self._elasticity.look)
                    snapshot = (
                        memory_checkpoints.job(number, places, self._elasticity.gone)
                        if memory_checkpoints and places
                        else None
                    )
                    if node_monitors and places:
                        node_monitors.watch(places.values())
                    resumed = max(run.newest_step(), snapshot["step"] or 0 if snapshot else 0)
                    job = self._job(number, incident, snapshot)
                    result = group.attempt(job, workers, self._monitor.actor, self._elasticity.look)
                    over = time.time()
                    if result.failure is None:
                        value = result.value
                        if value["status"] != "interrupted" or self._stop_request.signals:
                            interrupted = self._stop_request.signals[0] if value["status"] == "interrupted" else None
                            return Ending(value["status"], value["step"], signal=interrupted)
                        if (ending := self._silent_head()) is not None:
                            return ending
                        incident = {"over": over, "last_step": self._monitor.last_step()}
                        self._elasticity.leave()
                        continue
                    if result.note:
                        self._monitor.note(result.note)
                    last_step = self._monitor.last_step()
                    self._elasticity.lost(group.gone)
                    # The snapshot that this attempt started from is progress too, though it is no checkpoint.
                    history = history.at(max(run.newest_step(), resumed))
                    ending = self._after(result.failure, number, history)
                    if ending is not None:
                        return ending
                    history = history.then(result.failure)
                    incident = {"seen": result.seen, "silent_s": result.silent_s, "over": over, "last_step": last_step}
        finally:
            self._elasticity.close(self._keeps)
            if memory_checkpoints is not None:
                memory_checkpoints.close()
            if node_monitors is not None:
                node_monitors.close()

    def _silent_head(self) -> Ending | None:
        """After a checkpoint for a head that is silent: waits until it answers. An Ending, if it does not come back or the user
        has asked the run to stop. When it has been silent for too long, the main thread ends the run.
        """
        while (ending := self._outage.ending()) is not None:
            if self._outage.dead or self._stop_request.wait(_LOOK_S):
                return ending
        return None

    @contextlib.contextmanager
    def _headed(self) -> Iterator[None]:
        """If the head was started again, this thread goes no further: most calls of Ray would abort this process. The main thread
        ends the run.
        """
        from ray.exceptions import RayError

        try:
            yield
        except HeadReplaced:
            self._outage.replaced()
        except RayError:
            if not self._outage.look_for_another():
                raise
        else:
            return
        threading.Event().wait()

    def _node_monitors(self) -> NodeMonitors:
        every = self._spec.observe.interval_s
        assert every is not None
        env, monitor = worker_env(self._spec), self._monitor
        return NodeMonitors(self._request.run, monitor.actor, every, private=self._private, env=env, note=monitor.note)

    def _gather(self) -> Group | Ending:
        """The group of the next attempt; an Ending if there is none."""
        found = self._elasticity.gather()
        if found is None:
            return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[0])
        if isinstance(found, Stop):
            self._monitor.say("decision", action="stop", because=found.because, after_s=0.0)
            return Ending("stopped", self._request.run.newest_step(), cause=f"{found.cause} ({found.because})")
        if isinstance(found, NoRoom):
            self._monitor.say("decision", action="yield", because=found.because)
            return Ending("interrupted", self._request.run.newest_step(), cause=found.because)
        return found

    def _job(self, number: int, incident: dict[str, Any] | None, snapshot: dict[str, Any] | None) -> dict[str, Any]:
        """The input of every rank of an attempt: plain data. `incident`: how the attempt before ended. `snapshot`: the result of
        `MemoryCheckpoints.job`.
        """
        request, begun = self._request, time.time()
        return {
            "spec": self._spec.model_dump(mode="json"),
            "run": request.run.full_uri,
            "dataset": request.dataset,
            "attempt": number,
            "until": request.until,
            "allow_spec_change": request.allow_spec_change,
            "faults": [fault.model_dump(mode="json") for fault in request.faults],
            "gpus": request.gpus,
            "begun": begun,
            "incident": None if incident is None else {**incident, "next": begun},
            "before": dict(request.before(begun)) if incident is None and request.before else None,
            "memory_store": snapshot,
            "script": request.script,
        }

    def _after(self, failure: Failure, number: int, history: History) -> Ending | None:
        """After a failed attempt: an Ending, or None to start the next one."""
        if self._stop_request.cancelled or (failure.kind == "aborted" and self._stop_request.signals):
            return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[-1])
        if self._injector is not None:
            self._injector.look()  # the event of an injected fault comes before the event of the failure
        self._monitor.say(
            "failure",
            attempt=number,
            rank=failure.rank,
            fault=failure.kind,
            cause=failure.cause,
            # For a death Ray's text is a page of possible reasons; `cause` has what is known.
            traceback=failure.traceback if failure.kind == "user_error" else "",
            echoes=failure.echoes,
            **({"sides": list(failure.sides)} if failure.sides else {}),
        )
        spec = self._spec
        batching, replicas = spec.data.batching, self._elasticity.workers // spec.parallel.replica
        passes: Passes = Split(spec.train.global_batch, spec.train.micro_batch, replicas)
        if batching is not None:
            passes = Budget(batching.max_tokens, spec.longest)
        if spec.train.virtual_ranks is not None:
            passes = FixedShapes(spec.train.checkpoint_activations == "full")
        known = not self._private and failure.node is not None
        elsewhere = known and self._elasticity.room(without=failure.node) >= spec.cluster.least
        match decide(failure, history, spec.recovery, passes, elsewhere=elsewhere):
            case Restart(after_s, because, micro_batch, exclude, max_tokens, recompute):
                changes: dict[str, Any] = {"after_s": after_s, "micro_batch": micro_batch, "exclude": exclude}
                if max_tokens is not None:
                    changes["max_tokens"] = max_tokens
                if recompute:
                    changes["checkpoint_activations"] = "full"
                self._monitor.say("decision", action="restart", because=because, **changes)
                if exclude is not None:
                    self._elasticity.exclude(exclude)
                if micro_batch is not None:
                    train = spec.train.model_copy(update={"micro_batch": micro_batch})
                    self._spec = spec.model_copy(update={"train": train})
                if recompute:
                    train = spec.train.model_copy(update={"checkpoint_activations": "full"})
                    self._spec = spec.model_copy(update={"train": train})
                if max_tokens is not None:
                    self._spec = spec.with_max_tokens(max_tokens)
                if self._stop_request.wait(after_s):
                    return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[0])
                return None
            case Stop(cause, because, rank):
                self._monitor.say("decision", action="stop", because=because, after_s=0.0)
                rank = failure.rank if rank is None else rank
                who = "" if rank is None else f"rank {rank}: "
                return Ending(
                    "stopped",
                    self._request.run.newest_step(),
                    cause=f"{who}{cause} ({because})",
                    traceback=failure.traceback,
                )
