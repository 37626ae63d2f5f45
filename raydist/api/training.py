"""Trains one job to its end, on a private Ray or on a cluster: what `raydist train` and the process of `raydist.train` do.

Runs in: the driver. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import registry
from raydist.api.call import Call
from raydist.errors import RunNotFound, UsageError, UserError
from raydist.planner.vocabulary import vocabulary
from raydist.private_files import temporary_folder
from raydist.report.starting import Starting
from raydist.run.directory import LOGS, SPEC, RunDir, check_name, default_storage, start_anew
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.cluster.session import Session
    from raydist.data.dataset import TokenDataset
    from raydist.faults import Fault
    from raydist.run.lease import DriverLease
    from raydist.spec import JobSpec
    from raydist.spec.load import Job, Overrides


@dataclass(frozen=True, slots=True)
class Ended:
    """How the driver of a run ended: with exit code 0, or 129, 130 or 143 if a signal interrupted it. A script has no `dataset`."""

    run: RunDir
    code: int
    dataset: TokenDataset | None = None


def call(**options: Any) -> int:
    """`train` in a process of its own: the exit code."""
    return train(**options).code


def train(
    spec: Job, *, set: Overrides | None, deepspeed: str | Path | None, name: str | None, storage: str | None, address: str | None,
    resume: bool, fresh: bool, until: int | None, allow_spec_change: bool, faults: str | Path | None, wait_for_driver: float,
    wait_for_nodes: float, exclude_slow: bool, dashboard: bool,
) -> Ended:  # fmt: skip
    """Trains a job to its end, or a pause, or a signal: see `raydist.train`, and its errors."""
    if resume and fresh:
        raise UsageError(
            "--resume and --fresh exclude one another", "give one of them, or neither to resume an existing run"
        )
    with Starting() as starting:
        starting.stage("job")  # before the imports that follow, which take seconds
        from raydist.checkpoint import hub, source
        from raydist.cluster import preflight
        from raydist.cluster.place import where
        from raydist.faults import load as load_faults
        from raydist.observe.exporters import resolve
        from raydist.run.lease import DriverLease
        from raydist.spec import load
        from raydist.spec.load import source_of
        from raydist.spec.script import SESSION

        job = load(spec, set or (), deepspeed, lambda line: starting.note(f"raydist: {line}"))
        if job.model.name == SESSION:
            raise UserError(
                f"{source_of(spec)}: model.name: {SESSION}: a script with a loop of its own made this run",
                "continue it with that script: `raydist run SCRIPT --name NAME`, or torchrun (docs/how-to/own-loop.md)",
            )
        injected = load_faults(faults, job) if faults is not None else ()
        home = storage or default_storage()
        run = RunDir(Storage(home).at(check_name(name or job.name)))
        if resume and not run.exists():
            raise RunNotFound(
                f"nothing to resume at {run.uri}", "leave out --resume to start it, or check --name and --storage"
            )
        job = hub.local(source.pinned(job, run, home, fresh), home)
        preflight.check_early(job, local=where(address) == "local")
        exporters = resolve([e.model_dump() for e in job.observe.exporters], run)
        starting.stage("data")
        dataset, total = _data(job, home, starting)
        check_model(job, source_of(spec), dataset.vocab_size)
        starting.stage("run")
        with DriverLease(run, wait_s=wait_for_driver) as lease:
            if fresh and run.exists():
                start_anew(run)
            if message := _already(run, job, dataset.fingerprint, total, until, allow_spec_change):
                starting.note(message)
                return Ended(run, 0, dataset)
            code = supervise(
                job, run, lease, starting, address=address, faults=injected, exporters=exporters, dataset=dataset.storage.full_uri,
                total=total, until=until, allow_spec_change=allow_spec_change, wait_for_nodes=wait_for_nodes,
                exclude_slow=exclude_slow, dashboard=dashboard,
            )  # fmt: skip
        return Ended(run, code, dataset)


def check_model(job: JobSpec, source: str, vocab_size: int | None = None) -> None:
    """What workers refuse once they have the model, in a process of its own: neither the spec nor this process, which never imports
    torch, knows the blocks of a model of one's own, or any parameters. `vocab_size`: None for that of the job's tokenizer.

    Raises UserError, which names `source`; DataError.
    """
    if job.comm.checks_shapes or (job.parallel.pipeline > 1 and registry.is_own(job.model.name)):
        words = vocabulary(job.data) if vocab_size is None else vocab_size
        given = {"spec": job, "vocab_size": words, "source": source}
        Call("raydist.planner.early:check", given, tied=False).wait()


def _data(job: JobSpec, home: str, starting: Starting) -> tuple[TokenDataset, int]:
    """The dataset, prepared if necessary, and the number of optimizer steps of the whole run."""
    from raydist.data import open_or_prepare
    from raydist.data.dataset import TokenDataset
    from raydist.data.samples import batches_of, held_out_samples, training_samples
    from raydist.report.preparing import data_progress

    with data_progress(starting.hide) as report:
        dataset = TokenDataset(open_or_prepare(job.data, home, report))
    if not dataset.index.has_block_hashes:
        starting.note(
            f"raydist: {dataset.uri} has no hashes of blocks, as an older version prepared it: a changed byte is not noticed "
            "while training; `raydist data verify` finds it"
        )
    job.model.rows(dataset.vocab_size)
    samples = training_samples(job, dataset)
    if job.eval.every is not None:
        held_out_samples(job, dataset, samples)  # here an error takes seconds, not the start of the workers
    batches = batches_of(job, samples, dataset.fingerprint)
    return dataset, job.train.total(batches.steps_per_epoch)


def _already(
    run: RunDir, job: JobSpec, fingerprint: str, total: int, until: int | None, allow_spec_change: bool
) -> str | None:
    """A message if nothing is left to train, else None. Raises SpecChanged for a run with other numbers, or with more steps, and
    UserError for adapters whose base has changed."""
    from raydist.checkpoint import base_weights, manifest
    from raydist.run.status import read_state
    from raydist.worker.checkpoint import numbers

    steps = run.committed() if run.exists() else []
    if not steps:
        return None
    newest = manifest.read_newest(run)
    if newest is None:
        return None
    changed = numbers.check(run.name, newest, job.numbers(fingerprint), total, allow_spec_change)
    if read_state(run)["status"] == "finished" and (not changed or newest.step >= total):
        return f"run {run.name} is finished: {newest.step} steps, in {run.uri}"
    if until is not None and newest.step >= until:
        return f"run {run.name} is at step {newest.step} already, in {run.uri}"
    base_weights.check_early(job, newest)
    return None


def supervise(
    job: JobSpec, run: RunDir, lease: DriverLease, starting: Starting, *, address: str | None, faults: tuple[Fault, ...],
    exporters: list[dict[str, Any]], dataset: str | None = None, total: int | None = None, until: int | None = None,
    allow_spec_change: bool = False, wait_for_nodes: float = 0.0, exclude_slow: bool = False, dashboard: bool = False,
    script: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Trains until the run ends, and returns the exit code of `Ended`. `dataset` and `total`, its steps: None with a `script`, a
    Script's fields, which has its own. `dashboard`: its page is served meanwhile; otherwise that of a dashboard of its storage is
    named, if one runs."""
    from raydist.dashboard.announced import link
    from raydist.dashboard.beside import beside

    pages = beside(run, starting.note) if dashboard else contextlib.nullcontext()
    if not dashboard and (page := link(run)) is not None:
        starting.note(f"raydist: its live page: {page}")
    from raydist.cluster.place import session_of, where

    place = where(address)
    starting.stage("ray", None if place == "local" else "connecting to Ray")
    from raydist.cluster import node_facts, preflight
    from raydist.cluster.run.request import Request, raise_if_stopped
    from raydist.cluster.run.supervisor import Supervisor
    from raydist.observe.exporters import metrics_port
    from raydist.report.console import Console
    from raydist.spec import stored

    run.storage.write(SPEC, stored(job).encode())
    with (
        pages,
        run_logs(run) as log_dir,
        session_of(
            job,
            place,
            log_dir,
            own_code=bool(job.own_code()),
            metrics_port=metrics_port(exporters),
            ranks=True,
            wait_s=wait_for_nodes,
        ) as session,
    ):
        starting.stage("check")
        session = preflight.joined(job, session, wait_for_nodes) if wait_for_nodes else session
        has = preflight.check(job, session, run.full_uri, dataset)
        for line in node_facts.notes(job.cluster.resources, has):
            starting.note(f"raydist: {line}")
        if exclude_slow:
            job = _without_slow(job, session, run, starting)
        gpus = preflight.gpus_per_worker(job, session.resources)
        starting.stage("workers")
        request = Request(
            job, run, dataset or "", gpus, until, allow_spec_change, faults, exporters, starting.seconds, script
        )
        with Console(total, run, starting=starting) as console:
            ending = Supervisor.build(request, session, console, lost=lease.lost, asked=lease.asked_to_stop).run()
    raise_if_stopped(ending, run)
    if ending.signal is None:
        return 0
    print(f"interrupted after step {ending.step}; the same command resumes it", file=sys.stderr)
    return 128 + ending.signal


def _without_slow(job: JobSpec, session: Session, run: RunDir, starting: Starting) -> JobSpec:
    """The job without the nodes that are slow now, which are named."""
    from raydist.cluster import check
    from raydist.report.check import said

    if session.private:
        starting.note(
            "raydist: --exclude-slow: there are no other nodes than this machine; give --address of a cluster"
        )
        return job
    starting.note("raydist: measuring the nodes")
    slow = check.run(job, session, run.full_uri)["slow"]
    left = check.without_slow(job, session, slow)
    for each in slow:
        starting.note(f"raydist: left out: {said(each)}")
    return left


@contextlib.contextmanager
def run_logs(run: RunDir) -> Iterator[Path]:
    """The folder for Ray's log files: inside the run's folder if that is local, else a temporary one, copied there at the end."""
    if run.storage.local is not None:
        yield run.storage.appendable(f"{LOGS}/driver.log").parent
        return
    with temporary_folder() as folder:
        logs = folder / LOGS
        try:
            yield logs
        finally:
            for path in sorted(logs.rglob("*")):
                if path.is_file():
                    run.storage.write(f"{LOGS}/{path.relative_to(logs)}", path.read_bytes())
