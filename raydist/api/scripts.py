"""Trains a user's own script, which has a session of raydist.own: what `raydist run` and the process of `raydist.run_script` do.

Runs in: the driver. Imports ray inside functions; never torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.training import Ended, supervise
from raydist.errors import UserError
from raydist.parsing import LINE_BYTES, read_file
from raydist.report.starting import Starting
from raydist.run.directory import SPEC, RunDir, check_name, default_storage, start_anew
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.faults import Fault
    from raydist.spec import JobSpec
    from raydist.spec.load import Overrides


def call(**options: Any) -> int:
    """`run` in a process of its own: the exit code."""
    return run(**options).code


def run(
    script: str | Path, arguments: Sequence[str], *, workers: int | None, cpus: float | None, gpus: float | None,
    set: Overrides | None, name: str | None, storage: str | None, address: str | None, fresh: bool, faults: str | Path | None,
    wait_for_driver: float, dashboard: bool,
) -> Ended:  # fmt: skip
    """Trains with a script to its end, or a signal: see `raydist.run_script`, and its errors."""
    script = Path(script)
    check_script(script)
    with Starting() as starting:
        starting.stage("job")  # before the imports that follow, which take seconds
        from raydist.cluster import preflight
        from raydist.cluster.place import where
        from raydist.observe.exporters import resolve
        from raydist.run.lease import DriverLease

        at = RunDir(Storage(storage or default_storage()).at(check_name(name or script.stem)))
        job = script_job(at.name, workers, cpus, gpus, set or (), None if fresh else _before(at))
        injected = script_faults(faults, job)
        local = where(address) == "local"
        preflight.check_early(job, local=local)
        exporters = resolve([e.model_dump() for e in job.observe.exporters], at)
        started = {
            "path": str(script.resolve()) if local else _inside(script),
            "arguments": arguments,
            "folder": str(Path.cwd()) if local else None,
        }
        starting.stage("run")
        with DriverLease(at, wait_s=wait_for_driver) as lease:
            if fresh and at.exists():
                start_anew(at)
            code = supervise(
                job, at, lease, starting, address=address, faults=injected, exporters=exporters, dashboard=dashboard, script=started
            )  # fmt: skip
    return Ended(at, code)


def check_script(script: Path) -> None:
    """Raises UserError if it is not a Python script."""
    if script.suffix in (".yaml", ".yml"):  # one may compile
        raise UserError(f"{script}: is not a Python script", f"for a job: `raydist train {script}`")
    try:
        compile(read_file(script, LINE_BYTES), str(script), "exec")
    except OSError as error:
        raise UserError(
            f"{script}: {error.strerror}", "give a Python script: raydist run train.py --workers 2"
        ) from None
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # the last two: of an expression that is nested too deeply
        why = f"is not a Python script: {str(error) or 'nested too deeply'}"
        raise UserError(f"{script}: {why}", "give a Python script: raydist run train.py --workers 2") from None
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UserError(f"{script}: {line}{error.msg}", "correct the script") from None


def script_job(
    name: str,
    workers: int | None,
    cpus: float | None,
    gpus: float | None,
    overrides: Overrides,
    before: JobSpec | None = None,
) -> JobSpec:
    """The job of a script, with the command's options. `before`: that of its last session. Raises SpecError."""
    from raydist.spec.script import launched

    asked = {"workers": workers, "cpus_per_worker": cpus, "gpus_per_worker": gpus}
    given = {field: value for field, value in asked.items() if value is not None}
    return launched(name, given, overrides, before)


def _before(at: RunDir) -> JobSpec | None:
    """The job of the last session of that run. Raises UserError for a run that is not a script's."""
    from raydist.spec import read_stored
    from raydist.spec.script import SESSION

    if not at.exists():
        return None
    job = read_stored(at.storage, SPEC)
    if job.model.name != SESSION:
        raise UserError(
            f"run {at.name}: a job made it, with model {job.model.name}",
            f"continue it with `raydist train {at.uri}/{SPEC}`, or give this script another --name",
        )
    return job


def script_faults(path: str | Path | None, job: JobSpec) -> tuple[Fault, ...]:
    """The faults of a file. Raises UserError for one that a script's run cannot have."""
    from raydist.faults import SlowData, StuckData, load

    found = load(path, job) if path is not None else ()
    for fault in found:
        if isinstance(fault, SlowData | StuckData):
            raise UserError(
                f"{path}: {fault.fault}: is for raydist's own loader, and a script's session reads its samples itself",
                "leave it out, or let the script's dataset wait",
            )
    return found


def _inside(script: Path) -> str:
    """The script's path in the working directory, which is shipped to the cluster."""
    try:
        return str(script.resolve().relative_to(Path.cwd()))
    except ValueError:
        raise UserError(
            f"{script}: is outside the working directory, which is shipped to the cluster",
            "start the command in the folder of the script",
        ) from None
