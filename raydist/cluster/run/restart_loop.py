"""The attempts of one run, from the first to the last: starts them, and decides after each what follows.

Runs in: the driver, in a thread of its own. Never imports torch; imports ray in functions only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raydist.checkpoint.mirrors import newest_attempt
from raydist.cluster.run.elasticity import Membership, NoRoom
from raydist.cluster.run.fault_injector import DriverInjector
from raydist.cluster.run.memory_checkpoints import MemoryCheckpoints
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.node_monitors import NodeMonitors
from raydist.cluster.run.recovery import History, Restart, Split, Stop, decide
from raydist.cluster.run.request import Ending, Request, worker_env
from raydist.cluster.run.root_cause import Failure
from raydist.cluster.run.worker_group import Group
from raydist.run.directory import begin_attempt
from raydist.run.log import last_attempt


@dataclass
class StopRequest:
    """What the user has asked of a run: by signals, and whether it is to end at once. `stop` is set with the first of them."""

    signals: list[int] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


class RestartLoop:
    """Use once: `run()`. `private`: all is on this host. `keeps`: the workers stay for the next run.

    `headless()`: an ending for a run whose attempt has ended because Ray's head is silent; None if it is not.
    """

    def __init__(
        self,
        request: Request,
        members: Membership,
        line: MonitorClient,
        stop_request: StopRequest,
        injector: DriverInjector | None,
        *,
        private: bool,
        keeps: bool,
        headless: Callable[[], Ending | None],
    ) -> None:
        self._request, self._members, self._line, self._stop_request = request, members, line, stop_request
        self._injector, self._private, self._keeps, self._headless = injector, private, keeps, headless
        self._spec = request.spec
        """Of the present attempt."""

    def run(self) -> Ending:
        """How the run ended. What it raises is no failure of an attempt."""
        run = self._request.run
        number, history = max(last_attempt(run), newest_attempt(run, self._spec.checkpoint.replicas)), History()
        memory_stores = (
            MemoryCheckpoints(run, private=self._private, note=self._note)
            if self._spec.snapshot_every is not None
            else None
        )
        agents = self._agents() if self._spec.observe.interval_s is not None else None
        incident: dict[str, Any] | None = None
        try:
            while True:
                group = self._gather()
                if isinstance(group, Ending):
                    return group
                number += 1
                begin_attempt(run, number)  # from now on no earlier one commits, wherever it may still be
                self._line.begin_attempt(number, self._members.team, run.newest_step())
                places = group.places(self._members.team, self._members.look)
                copies = memory_stores.job(places) if memory_stores and places else None
                if agents and places:
                    agents.watch(places.values())
                resumed = max(run.newest_step(), copies["step"] or 0 if copies else 0)
                result = group.attempt(
                    self._job(number, incident, copies), self._members.team, self._line.monitor, self._members.look
                )
                over = time.time()
                if result.failure is None:
                    value = result.value
                    if value["status"] != "interrupted" or self._stop_request.signals:
                        interrupted = self._stop_request.signals[0] if value["status"] == "interrupted" else None
                        return Ending(value["status"], value["step"], signal=interrupted)
                    if (ending := self._headless()) is not None:
                        return ending
                    incident = {"over": over, "last_step": self._line.last_step()}
                    self._members.leave()
                    continue
                last_step = self._line.last_step()
                self._members.lost(group.gone)
                # A snapshot that this attempt went on from is progress too, though no checkpoint.
                history = history.at(max(run.newest_step(), resumed))
                ending = self._after(result.failure, number, history)
                if ending is not None:
                    return ending
                history = history.then(result.failure)
                incident = {"seen": result.seen, "silent_s": result.silent_s, "over": over, "last_step": last_step}
        finally:
            self._members.close(self._keeps)
            if memory_stores is not None:
                memory_stores.close()
            if agents is not None:
                agents.close()

    def _agents(self) -> NodeMonitors:
        every = self._spec.observe.interval_s
        assert every is not None
        env = worker_env(self._spec)
        return NodeMonitors(
            self._request.run, self._line.monitor, every, private=self._private, env=env, note=self._note
        )

    def _gather(self) -> Group | Ending:
        """The group of the next attempt; an Ending if there is none."""
        found = self._members.gather()
        if found is None:
            return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[0])
        if isinstance(found, Stop):
            self._line.say("decision", action="stop", because=found.because, after_s=0.0)
            return Ending("stopped", self._request.run.newest_step(), cause=f"{found.cause} ({found.because})")
        if isinstance(found, NoRoom):
            self._line.say("decision", action="yield", because=found.because)
            return Ending("interrupted", self._request.run.newest_step(), cause=found.because)
        return found

    def _job(self, number: int, incident: dict[str, Any] | None, copies: dict[str, Any] | None) -> dict[str, Any]:
        """What every rank of an attempt is given; plain. `incident`: what ended the one before; `copies`: of
        `MemoryCheckpoints.job`."""
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
            "incident": incident,
            "before": dict(request.before(begun)) if incident is None and request.before else None,
            "memory_store": copies,
        }

    def _after(self, failure: Failure, number: int, history: History) -> Ending | None:
        """What to do after a failure: an Ending, or None to try again."""
        if self._stop_request.cancelled or (failure.kind == "aborted" and self._stop_request.signals):
            return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[-1])
        if self._injector is not None:
            self._injector.look()  # what was done to it comes first
        self._line.say(
            "failure",
            attempt=number,
            rank=failure.rank,
            fault=failure.kind,
            cause=failure.cause,
            # Of a death Ray tells a page of guesses; `cause` has what is known.
            traceback=failure.traceback if failure.kind == "user_error" else "",
            echoes=failure.echoes,
        )
        spec = self._spec
        split = Split(spec.train.global_batch, spec.train.micro_batch, self._members.team)
        known = not self._private and failure.node is not None
        elsewhere = known and self._members.room(without=failure.node) >= spec.cluster.least
        match decide(failure, history, spec.recovery, split, elsewhere=elsewhere):
            case Restart(after_s, because, micro_batch, exclude):
                told = {"after_s": after_s, "micro_batch": micro_batch, "exclude": exclude}
                self._line.say("decision", action="restart", because=because, **told)
                if exclude is not None:
                    self._members.exclude(exclude)
                if micro_batch is not None:
                    train = spec.train.model_copy(update={"micro_batch": micro_batch})
                    self._spec = spec.model_copy(update={"train": train})
                if self._stop_request.stop.wait(after_s) or self._stop_request.signals:
                    return Ending("interrupted", self._request.run.newest_step(), signal=self._stop_request.signals[0])
                return None
            case Stop(cause, because):
                self._line.say("decision", action="stop", because=because, after_s=0.0)
                who = "" if failure.rank is None else f"rank {failure.rank}: "
                return Ending(
                    "stopped",
                    self._request.run.newest_step(),
                    cause=f"{who}{cause} ({because})",
                    traceback=failure.traceback,
                )

    def _note(self, text: str) -> None:
        self._line.say("note", text=text)
