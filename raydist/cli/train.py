"""`raydist train`: trains one job to its end, on a private Ray or on a cluster.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside the command; never torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydist.cli import options
from raydist.cli.place import where
from raydist.errors import RunNotFound, UsageError, UserError
from raydist.run.directory import LOGS, SPEC, RunDir, check_name, default_storage, start_anew
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.cluster.session import Session
    from raydist.data.dataset import TokenDataset
    from raydist.faults import Fault
    from raydist.report.starting import Starting
    from raydist.run.lease import DriverLease
    from raydist.spec import JobSpec


def train(
    spec: Annotated[Path, typer.Argument(help="The job: a YAML file.", show_default=False)],
    overrides: options.Overrides = None,
    deepspeed: options.DeepSpeed = None,
    name: options.Name = None,
    storage: options.Storage = None,
    address: options.Address = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only resume an existing run.")] = False,
    fresh: options.Fresh = False,
    until: options.Until = None,
    allow_spec_change: Annotated[
        bool,
        typer.Option("--allow-spec-change", help="Resume even if the changed spec computes other numbers than before."),
    ] = False,
    faults: options.Faults = None,
    wait_for_driver: options.WaitForDriver = 0.0,
    wait_for_nodes: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long to wait for the cluster to start, and for nodes to join while it has too few for the job.",
        ),
    ] = 0.0,
    exclude_slow: Annotated[
        bool,
        typer.Option(
            "--exclude-slow", help="Measure the nodes first, as `raydist check` does, and leave out the slow ones."
        ),
    ] = False,
    dashboard: options.Dashboard = False,
    as_json: options.LastJson = False,
) -> None:
    """Train a job to its end. The same command again resumes it."""
    if resume and fresh:
        raise UsageError(
            "--resume and --fresh exclude one another", "give one of them, or neither to resume an existing run"
        )
    from raydist.report.starting import Starting

    with Starting() as starting:
        starting.stage("job")  # before the imports that follow, which take seconds
        from raydist.checkpoint import hub, source
        from raydist.cluster import preflight
        from raydist.observe.exporters import resolve
        from raydist.run.lease import DriverLease
        from raydist.spec import load
        from raydist.spec.script import SESSION

        job = load(spec, overrides or [], deepspeed, lambda line: starting.note(f"raydist: {line}"))
        if job.model.name == SESSION:
            raise UserError(
                f"{spec}: model.name: {SESSION}: a script with a loop of its own made this run",
                "continue it with that script: `raydist run SCRIPT --name NAME`, or torchrun (docs/how-to/own-loop.md)",
            )
        injected = _faults(faults, job)
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
        starting.stage("run")
        with DriverLease(run, wait_s=wait_for_driver) as lease:
            if fresh and run.exists():
                start_anew(run)
            if message := _already(run, job, dataset.fingerprint, total, until, allow_spec_change):
                starting.note(message)
            else:
                supervise(
                    job,
                    run,
                    lease,
                    starting,
                    address=address,
                    faults=injected,
                    exporters=exporters,
                    dataset=dataset.storage.full_uri,
                    total=total,
                    until=until,
                    allow_spec_change=allow_spec_change,
                    wait_for_nodes=wait_for_nodes,
                    exclude_slow=exclude_slow,
                    dashboard=dashboard,
                )
    from raydist.report.summary import show

    shown = show(run)
    if as_json:
        print(json.dumps(shown))
    else:
        print_end(shown, dataset)


def print_end(shown: dict[str, Any], dataset: TokenDataset | None) -> None:
    """Prints the end of a run in a few lines: status, folder and losses."""
    print(f"run {shown['run']}: {shown['status']} at step {shown['steps']}, in {shown['path']}")
    if shown["loss"] is not None:
        print(f"train loss {shown['loss']:.4f}, {shown['tokens_per_second']:,.0f} tokens/s")
    if shown["eval_loss"] is not None and dataset is not None:
        index = dataset.index
        unigram = f"; its byte unigram: {index.unigram_nats:.4f}" if dataset.tokenizer.name == "bytes" else ""
        print(f"eval loss {shown['eval_loss']:.4f} nats per token of the held-out text{unigram}")


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


def _faults(path: Path | None, job: JobSpec) -> tuple[Fault, ...]:
    from raydist.faults import load

    return load(path, job) if path is not None else ()


def supervise(
    job: JobSpec,
    run: RunDir,
    lease: DriverLease,
    starting: Starting,
    *,
    address: str | None,
    faults: tuple[Fault, ...],
    exporters: list[dict[str, Any]],
    dataset: str | None = None,
    total: int | None = None,
    until: int | None = None,
    allow_spec_change: bool = False,
    wait_for_nodes: float = 0.0,
    exclude_slow: bool = False,
    dashboard: bool = False,
    script: Mapping[str, Any] | None = None,
) -> None:
    """Trains until the run ends. `dataset` and `total`, its steps: None with a `script`, a Script's fields, which has its own.
    `dashboard`: its page is served meanwhile; otherwise that of a dashboard of its storage is named, if one runs."""
    from raydist.dashboard.announced import link
    from raydist.dashboard.beside import beside

    pages = beside(run, starting.note) if dashboard else contextlib.nullcontext()
    if not dashboard and (page := link(run)) is not None:
        starting.note(f"raydist: its live page: {page}")
    place = where(address)
    starting.stage("ray", None if place == "local" else "connecting to Ray")
    from raydist.cluster import preflight
    from raydist.cluster.run.request import Request, raise_if_stopped, worker_env
    from raydist.cluster.run.supervisor import Supervisor
    from raydist.cluster.session import open_session
    from raydist.observe.exporters import metrics_port
    from raydist.report.console import Console
    from raydist.spec import stored

    cwd = Path.cwd()
    run.storage.write(SPEC, stored(job).encode())
    with (
        pages,
        run_logs(run) as log_dir,
        open_session(
            place,
            env=worker_env(job),
            log_dir=log_dir,
            python_path=[str(cwd)] if place == "local" else [],
            working_dir=cwd if job.own_code() else None,
            metrics_port=metrics_port(exporters),
            ranks=True,
            wait_s=wait_for_nodes,
        ) as session,
    ):
        starting.stage("check")
        session = preflight.joined(job, session, wait_for_nodes) if wait_for_nodes else session
        preflight.check(job, session, run.full_uri, dataset)
        if exclude_slow and not session.private:
            job = _without_slow(job, session, run, starting)
        gpus = preflight.gpus_per_worker(job, session.resources)
        starting.stage("workers")
        request = Request(
            job, run, dataset or "", gpus, until, allow_spec_change, faults, exporters, starting.seconds, script
        )
        with Console(total, run, starting=starting) as console:
            ending = Supervisor.build(request, session, console, lost=lease.lost, asked=lease.asked_to_stop).run()
    raise_if_stopped(ending, run)
    if ending.signal is not None:
        print(f"interrupted after step {ending.step}; the same command resumes it", file=sys.stderr)
        raise typer.Exit(130 if ending.signal == signal.SIGINT else 143)


def _without_slow(job: JobSpec, session: Session, run: RunDir, starting: Starting) -> JobSpec:
    """The job without the nodes that are slow now, which are named."""
    from raydist.cluster.bench import Interrupted
    from raydist.cluster.check import without_slow
    from raydist.report.check import said

    starting.note("raydist: measuring the nodes")
    found = without_slow(job, session, run.full_uri)
    if isinstance(found, Interrupted):
        raise typer.Exit(128 + found.signal)
    left, slow = found
    for each in slow:
        starting.note(f"raydist: left out: {said(each)}")
    return left


@contextlib.contextmanager
def run_logs(run: RunDir) -> Iterator[Path]:
    """The folder for Ray's log files: inside the run's folder if that is local, else a temporary one, copied there at the end."""
    if run.storage.local is not None:
        yield run.storage.appendable(f"{LOGS}/driver.log").parent
        return
    with tempfile.TemporaryDirectory(prefix="raydist-logs-") as folder:
        try:
            yield Path(folder)
        finally:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    run.storage.write(f"{LOGS}/{path.relative_to(folder)}", path.read_bytes())
