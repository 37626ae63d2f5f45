"""The run's monitor: gathers steps and events, stores them, keeps the heartbeat, and hands the driver's word to rank 0.

Runs in: one zero-CPU actor, owned by the driver and on its node. Must not import torch or pandas. Imports ray in
`placed` only: `RunMonitor` is a plain class.

    rank 0's side thread --push(records, events)--> RunMonitor --> metrics/*.parquet, events.jsonl, state.json; exporters
                         <--{"command", "traces"}-      ^   ^----- requests/*.json
    the nodes' agents    -------observe(rows)-----------|          samples/*.parquet        (of more than 64 nodes: aggregator.py)
                                          driver: begin_attempt, command, snapshot, end

No call waits for storage but `flush` and `end`: a thread writes every `interval_s`. What storage refuses is kept and tried again.
Until it is stored it is in this host's memory too (write_ahead_log.py), for the monitor that comes back should this one be killed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from raydist.diagnosis import Diagnosis
from raydist.errors import StorageError
from raydist.observe.exporter_threads import ExporterThreads
from raydist.observe.summary import LiveView
from raydist.observe.write_ahead_log import WriteAheadLog
from raydist.records import EXPORTED_ONLY, Event, Status
from raydist.redact import redact
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.run.log import RunLog
from raydist.run.status import last_word, this_process, write_state
from raydist.run.telemetry_log import TelemetryLog

INTERVAL_S = 2.0
_RETRY_S = 0.5
_EVENTS_KEPT = 1000
_ROWS_KEPT = 100_000
_SETTLE_S, _CLOSE_S = 5.0, 10.0
"""How long the end of a run waits for exporters: before its last word, and after."""
_NO_JOURNAL = "if this run's monitor is killed, the records of the moment before are lost"
DEFAULT_EXPORTERS: Sequence[Mapping[str, Any]] = ({"name": "tensorboard", "options": {}},)


class RunMonitor:
    """See the module. Its methods may be called from several threads at once.

    `run_uri`: the run's folder. `driver`: what `this_process()` gives in the driver. `exporters`: as
    `raydist.observe.exporters.resolve` gives them. `spec`: the resolved job, plain, which they are told.
    The constructor writes the first state.json, so that storage which cannot be written is known at once: StorageError.
    """

    def __init__(
        self,
        run_uri: str,
        driver: Mapping[str, Any] | None = None,
        interval_s: float = INTERVAL_S,
        exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = RunDir(run_uri)
        self._driver = dict(driver or this_process())
        self._interval_s = interval_s
        self._lock = threading.Lock()
        """Guards the view and what follows; never held while storage works."""
        self._view = LiveView()
        self._status: Status = "running"
        self._command: str | None = None
        self._traces: list[tuple[int, int]] = []
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS_KEPT)
        self._seen = 0
        self._storage_error: str | None = None
        self._refused_since: float | None = None

        self._before = last_word(self._run) or {}
        if self._before.get("driver") == self._driver:
            # This one stands in for a monitor of the same driver that was killed.
            self._status = self._before["status"]
            self._view.begin_attempt(*(self._before[name] for name in ("attempt", "world_size", "step")))
            self._view.workers = self._before["workers"]
        self._log = RunLog(self._run)
        self._journal: WriteAheadLog | None = None
        told, no_journal = [], ""
        try:
            self._journal = WriteAheadLog(run_uri, self._driver)
            told = self._journal.left()
        except OSError as error:
            no_journal = str(error)
        self._samples = TelemetryLog(self._run)
        self._diagnosis = Diagnosis()
        self._unjudged: deque[Mapping[str, Any]] = deque(maxlen=_ROWS_KEPT)
        self._storing = threading.Lock()
        """One writer of state.json at a time, so that an old word never follows a newer one."""
        self._store_state()
        self._outlets = ExporterThreads(self._run, exporters, redact(dict(spec or {})), self._note)
        self._recall(told)
        if no_journal:
            self._note(f"{_NO_JOURNAL}: {no_journal}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="raydist-monitor", daemon=True)
        self._thread.start()

    # --- from the driver

    def begin_attempt(self, number: int, world_size: int, resume_step: int) -> None:
        """Attempt `number` starts on `world_size` ranks from `resume_step`. Wait for it before the workers start.

        Numbers ascend within a run, over its drivers too: go on from `run.log.last_attempt(run)`.
        """
        with self._lock:
            self._status = "running"  # of a run that goes on below the same driver it may be another
        self._begin(number, world_size, resume_step)
        self._write_down(attempt=[number, world_size, resume_step])
        data = {"attempt": number, "world_size": world_size, "resume_step": resume_step}
        self._take(Event("attempt_started", time.time(), data))

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """The ranks of this attempt: [{"rank", "host", "node_ip", "pid"}]. Rank 0 may push the event `workers` instead."""
        self._take(Event("workers", time.time(), {"workers": [dict(worker) for worker in workers]}))

    def capacity(self, flops_per_token: float, peak_flops: float) -> None:
        """For the MFU: the model's FLOPs a token, and the peak FLOP/s of all workers' devices together."""
        with self._lock:
            self._view.capacity(flops_per_token, peak_flops)

    def command(self, command: str | None) -> None:
        """What every later push is answered with: "stop", or None."""
        with self._lock:
            self._command = command

    def snapshot(self, after: int = 0) -> dict[str, Any]:
        """The run as it is now, for the live display.

        What `LiveView.snapshot` has, and: status; command; storage_error (None, or what storage said last); events: those
        past number `after`, as dicts, the last 1000 at most; next: the number to ask after the next time.
        """
        with self._lock:
            return {
                **self._view.snapshot(),
                "status": self._status,
                "command": self._command,
                "storage_error": self._storage_error,
                "events": [event for number, event in self._recent if number > after],
                "next": self._seen,
            }

    def end(self, status: Status, timeout_s: float = 30.0, **data: Any) -> None:
        """The last word: event `ended`, everything durable, the terminal status in state.json. A second call does nothing.

        Raises StorageError where storage still refuses after `timeout_s`.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            step = self._view.step
        self._outlets.settle(_SETTLE_S)
        self._take(Event("ended", time.time(), {"status": status, "step": step, **data}))
        try:
            self.flush(timeout_s)
        finally:
            # Not before: the thread would store it as the last word, with events still to come.
            with self._lock:
                self._status = status
        self._retried(self._store_state, timeout_s)
        self._thread.join()
        self._outlets.close(_CLOSE_S)
        if self._journal is not None:
            self._journal.close()
        try:
            self._samples.flush()
        except Exception as error:  # samples are no truth
            self._refused(error)

    # --- from rank 0

    def push(self, records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Steps (StepRecord.to_dict()) and events (Event.to_dict()), each in order. Gives {"command": None or "stop"}, and while
        somebody waits for traces (raydist/run/requests.py) "traces": their (number, steps), oldest first.

        Returns at once: nothing is durable before `flush`. KeyError where a record lacks a field.
        """
        for event in events:
            self._take(Event.from_dict(dict(event)))
        new = self._steps(records)
        if new:
            self._write_down(steps=new)
        with self._lock:
            return {"command": self._command, **({"traces": self._traces} if self._traces else {})}

    def stage(self, attempt: int, name: str, at: float) -> None:
        """What that attempt does now, before its first step: a stage of raydist/worker/metrics/startup_timing.py; `at`: Unix
        time."""
        with self._lock:
            self._view.stage(attempt, name, at)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Returns once all that was pushed before this call is durable. Rank 0 calls it before it commits a checkpoint.

        Storage that refuses is tried again for `timeout_s`; then StorageError, and what was not written is kept.
        """
        self._retried(self._flush, timeout_s)

    # --- from the nodes' agents

    def observe(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Readings: columns of raydist.run.telemetry_schema, null ones left out. Returns at once."""
        self._samples.add(rows)
        self._unjudged.extend(rows)
        self._outlets.samples(rows)

    def export(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Readings that a aggregator has stored: for exporters only."""
        self._outlets.samples(rows)

    # --- inside

    def _take(self, event: Event) -> None:
        if event.kind not in EXPORTED_ONLY:  # those are numbers, and many
            event = Event(event.kind, event.at, redact(event.data))
        if self._log.heard(event):
            return
        self._show(event)  # first: what is no event of its kind is refused whole
        self._log.event(event)
        if event.kind not in EXPORTED_ONLY:
            self._write_down(event=event.to_dict())

    def _show(self, event: Event) -> None:
        """To all but the log."""
        if event.kind == "resumed":
            self._resume_at(None, int(event.data["step"]))
        if event.kind == "capacity":
            self.capacity(event.data["flops_per_token"], event.data["peak_flops"])
        with self._lock:
            self._view.event(event.kind, event.data)
        self._outlets.event(event.to_dict())
        if event.kind in EXPORTED_ONLY:
            return
        with self._lock:
            self._seen += 1
            self._recent.append((self._seen, event.to_dict()))

    def _begin(self, number: int, world_size: int, resume_step: int) -> None:
        with self._lock:
            self._view.begin_attempt(number, world_size, resume_step)
        self._resume_at(number, resume_step)

    def _steps(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Those that are new."""
        new = self._log.steps(records)
        if new:
            with self._lock:
                self._view.records(new)
            self._outlets.steps(new, time.time())
        return new

    def _write_down(self, **told: Any) -> None:
        """For the monitor that comes after this one, should this one be killed. After the log has taken it."""
        if (journal := self._journal) is None:
            return
        try:
            journal.add(told)
        except OSError as error:
            journal.close()
            self._journal = None
            self._note(f"{_NO_JOURNAL}: {error}")

    def _recall(self, told: Sequence[Mapping[str, Any]]) -> None:
        """What the one before this one had been told, and may not have stored."""
        self._log.recall(Event.from_dict(dict(line["event"])) for line in told if "event" in line)
        for line in told:
            if "attempt" in line:
                self._begin(*line["attempt"])
            elif "steps" in line:
                self._steps(line["steps"])
            else:
                self._show(Event.from_dict(dict(line["event"])))

    def _flush(self) -> None:
        journal = self._journal
        mark = journal.mark() if journal is not None else 0
        self._log.flush()
        if journal is not None:
            with suppress(OSError):  # no memory for what is left of it: it stays whole until the next time
                journal.stored(mark)

    def _note(self, text: str) -> None:
        self._take(Event("note", time.time(), {"text": text}))

    def _resume_at(self, number: int | None, step: int) -> None:
        with self._lock:
            number = self._view.attempt if number is None else number
        self._outlets.attempt(number, step, time.time())
        self._log.attempt(number, step)

    def _retried(self, store: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return store()
            except StorageError as error:
                self._refused(error)
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _write(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._look_for_requests()
            try:
                self._outlets.wake()  # first: they do without this storage
                self._flush()
                self._store_state()
                self._samples.flush()
                self._judge()
                self._accepted()
            except Exception as error:  # a watcher must not die of what it watches; the next round tries again
                self._refused(error)

    def _judge(self) -> None:
        """All rules over the rows that have come since."""
        rows = [self._unjudged.popleft() for _ in range(len(self._unjudged))]
        for finding in self._diagnosis.observe(rows):
            self._take(finding.event(time.time()))

    def _look_for_requests(self) -> None:
        with suppress(StorageError):  # who waits for an answer says in the end that none came
            found = [(request.number, request.steps) for request in requests.pending(self._run)]
            with self._lock:
                self._traces = found

    def _store_state(self) -> None:
        with self._storing:
            with self._lock:
                view = self._view.snapshot()
                names = ("attempt", "world_size", "workers", "step", "eval_loss", "tokens_per_second")
                state = {
                    "status": self._status,
                    "heartbeat_at": time.time(),
                    "driver": self._driver,
                    **{name: view[name] for name in names},
                    "loss": view["record"]["loss"] if view["record"] else None,
                    "storage_error": self._storage_error,
                }
            if state["step"] and state["eval_loss"] is None:
                state["eval_loss"] = self._before.get("eval_loss")
            write_state(self._run, state)

    def _refused(self, error: Exception) -> None:
        with self._lock:
            self._storage_error = redact(f"{type(error).__name__}: {error}")
            self._refused_since = self._refused_since or time.monotonic()

    def _accepted(self) -> None:
        with self._lock:
            if self._refused_since is None:
                return
            seconds, reason = time.monotonic() - self._refused_since, self._storage_error
            self._storage_error = self._refused_since = None
        self._note(f"records could not be written for {seconds:.0f} s: {reason}")


def start_monitor(
    run_uri: str,
    *,
    interval_s: float = INTERVAL_S,
    exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS,
    spec: Mapping[str, Any] | None = None,
) -> Any:
    """The run's monitor as an actor: zero CPUs, on this process's node, gone with this process. Returns its handle at once.

    Ray is started. `ray.get(handle.snapshot.remote())` waits until it is up, and raises what its constructor raised.
    """
    return placed(RunMonitor).remote(run_uri, this_process(), interval_s, exporters, spec)


def placed(monitor: type[RunMonitor]) -> Any:
    """That class as a monitor's actor: `.remote(...)` starts it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return ray.remote(monitor).options(
        num_cpus=0,
        # flush may wait for storage: pushes and snapshots go on beside it.
        max_concurrency=8,
        # One that was killed comes back, and takes up its records from the next push on.
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )
