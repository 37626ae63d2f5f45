"""The same loop with no Ray at all: alone, or under torchrun. For a lone GPU, for profiling, for comparing.

    python -m raydist.worker.standalone jobs/quickstart.yaml
    torchrun --nproc-per-node 2 -m raydist.worker.standalone jobs/quickstart.yaml

Runs in: each process that torchrun starts. Torch, never ray. Writes the same run folder as `raydist train`; it neither
restarts a failed rank nor watches a live one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from raydist import data
from raydist.errors import RaydistError, TrainingStopped
from raydist.records import Event
from raydist.rundir import SPEC, RunDir, check_name, default_storage
from raydist.runlog import RunLog, last_attempt
from raydist.spec import JobSpec, dump, load
from raydist.storage import Storage


class _Log:
    """Rank 0's door to the run folder: what the RunMonitor does on Ray, less the live view."""

    def __init__(self, run: RunDir, quiet: bool) -> None:
        self._log, self._quiet = RunLog(run), quiet

    def begin(self, attempt: int, resume_step: int) -> None:
        self._log.attempt(attempt, resume_step)

    def push(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> str | None:
        for raw in events:
            if raw["kind"] == "resumed":
                self._log.attempt(raw["attempt"], int(raw["step"]))
            self._log.event(Event.from_dict(raw))
        self._log.steps(records)
        if not self._quiet:
            for r in records:
                rate = r["tokens"] / r["seconds"]
                print(f"step {r['step']}  loss {r['loss']:.4f}  lr {r['lr']:.2e}  {rate:,.0f} tokens/s", file=sys.stderr)
        return None

    def durable(self) -> None:
        self._log.flush()

    def close(self) -> None:
        self._log.close()


def main(arguments: list[str] | None = None) -> int:
    """The command. Gives the exit code: 0, 2 for what was asked wrongly, 3 for a run that stopped."""
    parser = argparse.ArgumentParser(prog="python -m raydist.worker.standalone", description=__doc__.split("\n")[0])
    parser.add_argument("spec", help="a job file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the job")
    parser.add_argument("--name", help="name of the run; default: the job's")
    parser.add_argument("--storage", default=default_storage(), help="folder or URI that holds the runs")
    parser.add_argument("--until", type=int, help="end after this step, with a checkpoint")
    parser.add_argument("--allow-spec-change", action="store_true", help="resume although the spec computes other numbers")
    parser.add_argument("--json", action="store_true", help="end with the outcome as one line of JSON on stdout")
    options = parser.parse_args(arguments)
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        spec = load(options.spec, options.set)
        outcome = _run(spec, options, first)
    except RaydistError as error:
        if first or isinstance(error, TrainingStopped):
            print(f"raydist: {error}", file=sys.stderr)
        return error.exit_code
    if first and options.json:
        print(json.dumps(outcome))
    return 0


def _run(spec: JobSpec, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    from raydist.worker import setup
    from raydist.worker.loop import Door, Job, train

    run = RunDir(Storage(options.storage).at(check_name(options.name or spec.name)).uri)
    if first:
        # Before the group starts: the others wait in the rendezvous, and find the dataset there.
        dataset = data.open_or_prepare(spec.data, options.storage)
    gpus = None if spec.cluster.gpus_per_worker == "auto" else float(spec.cluster.gpus_per_worker)
    rank = setup.start(gpus=gpus, threads=max(1, int(spec.cluster.cpus_per_worker)), timeout_s=spec.recovery.timeout_s)
    if not first:
        dataset = data.open_or_prepare(spec.data, options.storage)
    attempt = last_attempt(run) + 1
    log = None
    if first:
        run.storage.write(SPEC, dump(spec).encode())
        log = _Log(run, quiet=options.json)
        log.begin(attempt, max(run.committed(), default=0))
    try:
        job = Job(spec, run, dataset, attempt, options.until, options.allow_spec_change)
        outcome = train(job, rank, Door(log.push, log.durable) if log else None).to_dict()
        if log:
            log.push([], [_event("ended", status=outcome["status"], step=outcome["step"])])
        setup.stop(rank)
        return {"run": run.name, "path": run.uri, **outcome}
    finally:
        if log:
            log.close()


def _event(kind: str, **values: Any) -> dict[str, Any]:
    import time

    return Event(kind, time.time(), values).to_dict()


if __name__ == "__main__":
    sys.exit(main())
