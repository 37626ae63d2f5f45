"""The same training loop without Ray: one process, or under torchrun. For a single GPU, for profiling and for comparisons.

    python -m raydist.launch.standalone jobs/quickstart.yaml
    torchrun --nproc-per-node 2 -m raydist.launch.standalone jobs/quickstart.yaml

Runs in: each process that torchrun starts. Imports torch, never ray. Writes the same run folder as `raydist train`; it neither
restarts a failed rank nor monitors a running one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any

from raydist import data
from raydist.checkpoint import hub
from raydist.checkpoint.mirrors import newest_attempt
from raydist.errors import RaydistError, StorageError, TrainingStopped
from raydist.launch.zygote import leave
from raydist.records import Event
from raydist.run import requests
from raydist.run.directory import SPEC, RunDir, await_attempt, begin_attempt, check_name, default_storage
from raydist.run.driver_process import this_process
from raydist.run.lease import DriverLease
from raydist.run.log import last_attempt
from raydist.run.log_writer import RunLog
from raydist.run.status import write_state
from raydist.spec import JobSpec, load, stored
from raydist.storage import Storage

HEARTBEAT_S = 2.0


class FolderLog:
    """Rank 0's channel to the run folder: like the RunMonitor on Ray, without the live view. Runs in the reporter's thread."""

    def __init__(self, run: RunDir, lease: DriverLease, attempt: int, world_size: int, quiet: bool) -> None:
        self._run, self._lease, self._log, self._quiet = run, lease, RunLog(run), quiet
        # Keeps earlier records up to the newest checkpoint, until `resumed` reports where this run continues.
        self._log.attempt(attempt, run.newest_step())
        self._state: dict[str, Any] = {
            "driver": this_process(),
            "attempt": attempt,
            "world_size": world_size,
            "workers": [],
        }
        self._stored, self._stopping = 0.0, False
        self._inbox = requests.Inbox()
        self._store("running")

    def push(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, Any]:
        """Writes records and events. Returns the answer for the loop: a command, and what users request."""
        for raw in events:
            if raw["kind"] == "resumed":
                self._log.attempt(raw["attempt"], int(raw["step"]))
            elif raw["kind"] == "workers":
                self._state["workers"] = raw["workers"]
            elif raw["kind"] == "eval":
                self._state["eval_loss"] = raw["loss"]
            self._log.event(Event.from_dict(raw))
        self._log.steps(records)
        for r in records:
            rate = r["tokens"] / r["seconds"]
            self._state |= {"step": r["step"], "loss": r["loss"], "tokens_per_second": rate}
            if not self._quiet:
                print(
                    f"step {r['step']}  loss {r['loss']:.4f}  lr {r['lr']:.2e}  {rate:,.0f} tokens/s", file=sys.stderr
                )
        if time.monotonic() - self._stored > HEARTBEAT_S:
            self.durable()
            self._store("running")
            with contextlib.suppress(StorageError):
                for event in self._inbox.look(self._run):
                    self._log.event(event)
        return {"command": "stop" if self._asked_to_stop() else None, **self._inbox.answer()}

    def _asked_to_stop(self) -> bool:
        who = self._lease.asked_to_stop()
        if who is not None and not self._stopping:
            self._stopping = True
            self._log.event(Event("requested", time.time(), {"what": "stop", "number": 0, "by": who}))
        return self._stopping

    def durable(self) -> None:
        """Returns once all that was pushed is written."""
        self._log.flush()

    def end(self, status: str, step: int) -> None:
        """Writes the final event and status."""
        self._log.event(Event("ended", time.time(), {"status": status, "step": step}))
        self._log.close()
        self._store(status)

    def _store(self, status: str) -> None:
        write_state(self._run, {"status": status, "heartbeat_at": time.time(), **self._state})
        self._stored = time.monotonic()


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code: 0, 2 for wrong input, 3 for a run that stopped."""
    parser = argparse.ArgumentParser(prog="python -m raydist.launch.standalone", description=__doc__.split("\n")[0])
    parser.add_argument("spec", help="a job file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the job")
    parser.add_argument("--name", help="name of the run; default: the job's")
    parser.add_argument("--storage", help="folder or URI that holds the runs")
    parser.add_argument("--until", type=int, help="end after this step, with a checkpoint")
    parser.add_argument(
        "--allow-spec-change",
        action="store_true",
        help="resume even if the changed spec computes other numbers than before",
    )
    parser.add_argument("--json", action="store_true", help="end with the outcome as one line of JSON on stdout")
    options = parser.parse_args(arguments)
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        options.storage = options.storage or default_storage()
        spec = load(options.spec, options.set) if first else load(options.spec, options.set, warn=lambda line: None)
        outcome = _run(spec, options, first)
    except RaydistError as error:
        if first or isinstance(error, TrainingStopped):
            print(f"raydist: {error}", file=sys.stderr)
        return error.exit_code
    if first and options.json:
        print(json.dumps(outcome))
    return 0  # also when interrupted: torchrun would restart a process that exits with an error


def _run(spec: JobSpec, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    from raydist.worker import distributed
    from raydist.worker.attempt import Job, MonitorChannel
    from raydist.worker.loop import train

    run = RunDir(Storage(options.storage).at(check_name(options.name or spec.name)))
    lease = None
    if first:
        # Before the process group starts: the other ranks wait in the rendezvous, then find the weights, the dataset and the
        # attempt.
        spec = hub.local(spec, options.storage)
        dataset = data.open_or_prepare(spec.data, options.storage)
        lease = DriverLease(run)  # if it is lost, the next commit raises Fenced
        attempt = max(last_attempt(run), newest_attempt(run, spec.checkpoint.replicas)) + 1
        run.storage.write(SPEC, stored(spec).encode())
        begin_attempt(run, attempt)
    gpus = None if spec.cluster.gpus_per_worker == "auto" else float(spec.cluster.gpus_per_worker)
    rank = distributed.start(
        gpus=gpus, threads=max(1, int(spec.cluster.cpus_per_worker)), timeout_s=spec.recovery.timeout_s
    )
    if not first:
        spec = hub.local(spec, options.storage, present=True)
        dataset, attempt = data.open_or_prepare(spec.data, options.storage), run.lineage().newest
        await_attempt(run, attempt or 1)
    log = FolderLog(run, lease, attempt, rank.world_size, quiet=options.json) if lease else None
    job = Job(spec, run, dataset, attempt, options.until, options.allow_spec_change)
    try:
        outcome = train(job, rank, MonitorChannel(log.push, log.durable) if log else None)
    except BaseException:
        # Report why the run stopped, not that the final status could not be stored.
        with contextlib.suppress(StorageError):
            if log:
                log.end("stopped", 0)
        raise
    else:
        if log:
            log.end(outcome.status, outcome.step)
    finally:
        if lease:
            lease.release()
    distributed.stop(rank)
    return {"run": run.name, "path": run.uri, **outcome.to_dict()}


if __name__ == "__main__":
    leave(main())
