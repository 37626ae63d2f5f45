"""The run's monitor: collects and stores steps and events, writes the heartbeat, and passes the driver's commands to rank 0.

Runs in: one zero-CPU actor, owned by the driver and on its node (monitor_actor.py). Must not import torch, pandas or ray:
`RunMonitor` is a plain class.

    rank 0's side thread --push(records, events)--> RunMonitor --> metrics/*.parquet, events.jsonl, state.json; exporters
                         <--{"command", "traces", ..}-  ^   ^----- requests/*.json
    node monitors        -------observe(rows)-----------|          samples/*.parquet        (more than 64 nodes: aggregator.py)
                                          driver: begin_attempt, command, snapshot, end

Only `flush` and `end` wait for storage: a thread writes every `interval_s`. If storage refuses a write, the data is kept and
written again later. Until then it is also in this host's memory (write_ahead_log.py), so that a restarted monitor still has it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raydist.diagnosis import Diagnosis, sizes
from raydist.errors import StorageError
from raydist.observe.exporter_threads import ExporterThreads
from raydist.observe.node_clocks import NodeClocks, Row
from raydist.observe.summary import LiveView
from raydist.observe.write_ahead_log import EARLIER, WriteAheadLog
from raydist.records import EXPORTED_ONLY, Event, Status
from raydist.redact import redact, remember
from raydist.run import requests
from raydist.run.directory import NOTE_S, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import SINGLE
from raydist.run.log_writer import RunLog
from raydist.run.status import last_word, write_state
from raydist.run.telemetry_log import TelemetryLog

INTERVAL_S = 2.0
_RETRY_S = 0.5
_EVENTS_KEPT = 1000
_ROWS_KEPT = 100_000
_SETTLE_S, _CLOSE_S = 5.0, 10.0
"""How long the end of a run waits for exporters: before the event `ended`, and after it."""
_NO_JOURNAL = "if this run's monitor is killed, the records of the moment before are lost"
DEFAULT_EXPORTERS: Sequence[Mapping[str, Any]] = ({"name": "tensorboard", "options": {}},)


class RunMonitor:
    """See the module. Its methods may be called from several threads at once.

    `run_uri`: the run's folder. `driver`: the result of `this_process()` in the driver. `exporters`: the result of
    `raydist.observe.exporters.resolve`. `spec`: the resolved job as plain data, for the exporters.
    The constructor writes the first state.json; if storage cannot be written, it raises StorageError at once. A monitor that
    replaces a killed one waits up to NOTE_S for the run's folder, which may be unmounted: it must not begin new records there.
    """

    def __init__(
        self,
        run_uri: str,
        driver: Mapping[str, Any] | None = None,
        interval_s: float = INTERVAL_S,
        exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        self._driver = dict(driver or this_process())
        self._write_ahead_log: WriteAheadLog | None = None
        entries, no_journal, last = [], "", None
        with suppress(StorageError):  # of a monitor that replaces a killed one it is waited for below
            last = (last_word(RunDir(run_uri)) or {}).get("driver")
        try:
            self._write_ahead_log = WriteAheadLog(run_uri, self._driver, last)
            entries = self._write_ahead_log.left()
        except OSError as error:
            no_journal = str(error)
        self._run = RunDir(run_uri).expect(
            NOTE_S if self._write_ahead_log is not None and self._write_ahead_log.continued else 0.0
        )
        self._interval_s = interval_s
        self._lock = threading.Lock()
        """Guards the view and the fields below; never held during storage I/O."""
        self._view = LiveView()
        self._status: Status = "running"
        self._command: str | None = None
        self._inbox = requests.Inbox()
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS_KEPT)
        self._seen = 0
        self._storage_error: str | None = None
        self._refused_since: float | None = None

        self._before = last_word(self._run) or {}
        if self._before.get("driver") == self._driver:
            # This actor replaces a monitor of the same driver that was killed.
            self._status = self._before["status"]
            self._view.begin_attempt(*(self._before[name] for name in ("attempt", "world_size", "step")))
            self._view.workers = self._before["workers"]
        self._log = RunLog(self._run)
        self._samples = TelemetryLog(self._run)
        # Two: a clock may be wrong for one process alone, as by an injected jump.
        self._clocks, self._rank_clocks = NodeClocks(), NodeClocks()
        self._diagnosis = Diagnosis(spec=spec)
        self._undiagnosed: deque[Mapping[str, Any]] = deque(maxlen=_ROWS_KEPT)
        self._undiagnosed_steps: deque[Mapping[str, Any]] = deque(maxlen=_ROWS_KEPT)
        self._undiagnosed_events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._broken_rules: set[str] = set()
        self._storing = threading.Lock()
        """Only one thread writes state.json at a time, so that an old state never replaces a newer one."""
        self._store_state()
        remember((spec or {}).get("cluster", {}).get("env", {}))
        self._exporters = ExporterThreads(self._run, exporters, redact(dict(spec or {})), self._note)
        self._recall(entries)
        if no_journal:
            self._note(f"{_NO_JOURNAL}: {no_journal}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="raydist-monitor", daemon=True)
        self._thread.start()

    # --- from the driver

    def begin_attempt(self, number: int, world_size: int, resume_step: int) -> None:
        """Attempt `number` starts on `world_size` ranks from `resume_step`. Wait for this call before the workers start.

        Numbers increase within a run, also across its drivers: continue from `run.log.last_attempt(run)`.
        """
        with self._lock:
            self._status = "running"  # a run resumed by the same driver may have another status
        self._begin(number, world_size, resume_step)
        self._journal_add(attempt=[number, world_size, resume_step])
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
        """Sets the answer to every later push: "stop", or None."""
        with self._lock:
            self._command = command

    def snapshot(self, after: int = 0) -> dict[str, Any]:
        """The run's current state, for the live display.

        The keys of `LiveView.snapshot`, and: status; command; storage_error (None, or the newest storage error); events: those
        after number `after`, as dicts, at most the last 1000; next: the `after` of the next call.
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
        """Ends the run: writes event `ended`, makes everything durable, writes the final status. A second call does nothing.

        Raises StorageError if storage still refuses after `timeout_s`.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            step = self._view.step
        self._exporters.settle(_SETTLE_S)
        self._take(Event("ended", time.time(), {"status": status, "step": step, **data}))
        try:
            self.flush(timeout_s)
        finally:
            # Not earlier: the thread would store it as the final status while events are still to come.
            with self._lock:
                self._status = status
        self._retried(self._store_state, timeout_s)
        self._thread.join()
        self._exporters.close(_CLOSE_S)
        if self._write_ahead_log is not None:
            self._write_ahead_log.close()
        try:
            self._samples.flush()
        except Exception as error:  # samples may be lost
            self._refused(error)

    # --- from rank 0

    def push(
        self, records: Sequence[Row], events: Sequence[Row], sent: float | None = None, node: str = ""
    ) -> dict[str, Any]:
        """Steps (StepRecord.to_dict()) and events (Event.to_dict()), each in order. Returns {"command": None or "stop"}, and what
        users request (raydist.run.requests.Inbox). `sent`: Unix time, by the clock of the rank, on `node`; None: by this one.

        Returns at once: nothing is durable before `flush`. Raises KeyError if a record lacks a field.
        """
        ahead = self._rank_clocks.ahead(node, sent) if sent is not None else 0.0
        for event in map(Event.from_dict, map(dict, events)):
            self._take(replace(event, at=event.at - ahead) if ahead else event)
        new = self._steps(records)
        if new:
            self._journal_add(steps=new)
        with self._lock:
            return {"command": self._command, **self._inbox.answer()}

    def stage(self, attempt: int, name: str) -> None:
        """The attempt's current startup stage (raydist/worker/metrics/startup_timing.py), which has just begun."""
        with self._lock:
            self._view.stage(attempt, name, time.time())

    def flush(self, timeout_s: float = 30.0) -> None:
        """Returns once everything pushed before this call is durable. Rank 0 calls it before it commits a checkpoint.

        If storage refuses, it tries again for `timeout_s`; then it raises StorageError, and the unwritten data is kept.
        """
        self._retried(self._flush, timeout_s)

    # --- from the node monitors

    def observe(self, rows: Sequence[Mapping[str, Any]], sent: float | None = None) -> None:
        """Telemetry rows of a node: columns of raydist.run.telemetry_schema, nulls left out. `sent`: Unix time, by its clock.
        Returns at once.
        """
        rows = self._clocks.correct(rows, sent)
        self._samples.add(rows)
        self._undiagnosed.extend(rows)
        self._exporters.samples(rows)

    def export(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Telemetry rows that an aggregator has stored: for exporters only."""
        self._exporters.samples(rows)

    # --- private

    def _take(self, event: Event) -> None:
        if event.kind not in EXPORTED_ONLY:  # those are numbers, and many of them
            event = Event(event.kind, event.at, redact(event.data))
        if self._log.is_duplicate(event):
            return
        self._show(event)  # first: it raises for a malformed event, before the log has it
        self._log.event(event)
        if event.kind not in EXPORTED_ONLY:
            self._journal_add(event=event.to_dict())

    def _show(self, event: Event) -> None:
        """Passes the event to everything except the log."""
        if event.kind == "resumed":
            self._resume_at(None, int(event.data["step"]))
        if event.kind == "capacity":
            self.capacity(event.data["flops_per_token"], event.data["peak_flops"])
        with self._lock:
            self._view.event(event.kind, event.data)
        self._exporters.event(event.to_dict())
        if event.kind == "histograms":  # large: the rules get what they need of it
            self._undiagnosed_events.append(sizes(event))
        if event.kind in EXPORTED_ONLY:
            return
        if event.kind != "finding":
            self._undiagnosed_events.append(event)
        with self._lock:
            self._seen += 1
            self._recent.append((self._seen, event.to_dict()))

    def _begin(self, number: int, world_size: int, resume_step: int) -> None:
        with self._lock:
            self._view.begin_attempt(number, world_size, resume_step)
        self._resume_at(number, resume_step)

    def _steps(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows that are new."""
        new = self._log.steps(records)
        if new:
            with self._lock:
                self._view.records([{name: row[name] for name in SINGLE} for row in new])
            self._undiagnosed_steps.extend(new)
            self._exporters.steps(new, time.time())
        return new

    def _journal_add(self, **entry: Any) -> None:
        """Keeps the entry for the monitor that replaces this one if this one is killed. Call it after the log has the entry."""
        if (write_ahead := self._write_ahead_log) is None:
            return
        try:
            write_ahead.add(entry)
        except OSError as error:
            write_ahead.close()
            self._write_ahead_log = None
            self._note(f"{_NO_JOURNAL}: {error}")

    def _recall(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the entries that a killed monitor received and may not have stored."""
        events = [line.get("event") or line.get(EARLIER) for line in entries]
        self._log.recall(Event.from_dict(dict(event)) for event in events if event)
        for line in entries:
            if "attempt" in line:
                self._begin(*line["attempt"])
            elif "steps" in line:
                self._steps(line["steps"])
            elif "event" in line:  # not those of another driver: only the log gets them
                self._show(Event.from_dict(dict(line["event"])))

    def _flush(self) -> None:
        write_ahead = self._write_ahead_log
        mark = write_ahead.mark() if write_ahead is not None else 0
        self._log.flush()
        if write_ahead is not None:
            with suppress(OSError):  # no memory to rewrite it: it stays as it is until the next flush
                write_ahead.stored(mark)

    def _note(self, text: str) -> None:
        self._take(Event("note", time.time(), {"text": text}))

    def _resume_at(self, number: int | None, step: int) -> None:
        with self._lock:
            number = self._view.attempt if number is None else number
        self._exporters.attempt(number, step, time.time())
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
                self._exporters.wake()  # first: they do not need this storage
                self._diagnose()
                self._flush()
                self._store_state()
                self._samples.flush()
                self._accepted()
            except Exception as error:  # must not end the monitor; the next round tries again
                self._refused(error)

    def _diagnose(self) -> None:
        """Applies all rules to the rows, steps and events that arrived since the last call."""
        rows, steps = _taken(self._undiagnosed), _taken(self._undiagnosed_steps)
        for finding in self._diagnosis.observe(rows, steps, _taken(self._undiagnosed_events)):
            self._take(finding.event(time.time()))
        for rule in self._diagnosis.problems.keys() - self._broken_rules:
            self._broken_rules.add(rule)
            self._note(f"the rule {rule} has failed and is not used any more: {self._diagnosis.problems[rule]}")

    def _look_for_requests(self) -> None:
        with suppress(StorageError):  # the requester reports it when its wait times out
            for event in self._inbox.look(self._run):
                self._take(event)

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
                    **{
                        name: (view["record"] or {}).get(name)
                        for name in ("loss", "expert_imbalance", "exchanged_bytes", "sync_bytes", "sync_seconds")
                    },
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


def _taken(queue: deque[Any]) -> list[Any]:
    """Empties a queue to which other threads append."""
    return [queue.popleft() for _ in range(len(queue))]
