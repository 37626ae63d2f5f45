"""Submits a job, a sweep or a script to a cluster through Ray's Jobs API: what `raydist submit` does.

Runs in: the process of the command, or one of its own. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.call import check_numbers, separate
from raydist.errors import SIGNALLED, ClusterUnreachable, DataError, UsageError, UserError, WorkerFailed
from raydist.private_files import temporary_folder
from raydist.redact import redact
from raydist.run.directory import check_name, default_storage

if TYPE_CHECKING:
    from raydist.spec import JobSpec
    from raydist.spec.load import Overrides

_Given = Mapping[str, Any]
"""Options, None where they are not given."""
_AWAY_S = 600.0
"""How long a cluster may be unreachable, for example while its head restarts."""
_AGAIN_S = 2.0
_STOP_S = 120
"""How long `ray job stop` waits before it kills the driver, which saves a checkpoint first. Ray's default is 3 s."""


@separate
def submit(
    spec: str | Path,
    address: str,
    arguments: Sequence[object] = (),
    *,
    workers: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    set: Overrides | None = None,
    deepspeed: str | Path | None = None,
    name: str | None = None,
    storage: str | None = None,
    until: int | None = None,
    fresh: bool = False,
    faults: str | Path | None = None,
    working_dir: str | Path = ".",
    retries: int = 0,
    wait: bool = True,
) -> str:
    """Submits a job's or a sweep's file, or a script, to the cluster whose Jobs API is at `address`, as `raydist submit` does, and
    returns the id of the Ray job. `arguments`: the script's; the others are the command's options.

    With `wait` it follows the log, on stderr, to the job's end. Raises UserErrors if it cannot be submitted or was refused,
    WorkerFailed if it failed, InterruptedError if it was stopped.
    """
    if retries and not wait:
        raise UsageError(
            "--no-wait and --retries exclude one another",
            "--retries needs this command to keep running: leave out --no-wait",
        )
    check_numbers(workers=(workers, 1), gpus=(gpus, 0), until=(until, 1), retries=(retries, 0))
    spec = Path(spec)
    deepspeed, faults = (None if path is None else Path(path) for path in (deepspeed, faults))
    overrides = (
        [f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in set.items()]
        if isinstance(set, Mapping)
        else list(set or ())
    )
    root = Path(working_dir).resolve()
    inside = _inside(spec, root)
    kind = "run" if spec.suffix == ".py" else "sweep" if _is_sweep(spec) else "train"
    of_job = {"--deepspeed": deepspeed, "--until": until}
    of_run = {"--faults": faults, "--fresh": fresh or None}
    of_script = {"--workers": workers, "--cpus": cpus, "--gpus": gpus}
    _check_options(kind, of_job, of_run, {**of_script, "arguments after --": arguments or None})
    # Errors in the job are reported here at once, not minutes later in a log.
    needed = [inside]
    if kind == "run":
        jobs = _check_script(spec, name, (workers, cpus, gpus), overrides, faults)
    else:
        swept = kind == "sweep"
        jobs = _check_sweep(spec, overrides) if swept else _check_job(spec, overrides, deepspeed, faults)
        needed += _check_files(spec, overrides, root, swept, configured=deepspeed is not None)
    needed += _named_by(jobs, root)
    command = ["python", "-m", "raydist", kind, str(inside)]
    for text in overrides:
        command += ["--set", text]
    config = None if deepspeed is None else _inside(deepspeed, root)
    injected = None if faults is None else _inside(faults, root)
    passed = {"--deepspeed": config, "--name": name, "--storage": storage, "--until": until, "--faults": injected}
    for option, value in (passed | of_script).items():
        if value is not None:
            command += [option, str(value)]
    last = ["--", *map(str, arguments)] if arguments else []
    if secret := [redact(word) for word in command + last if redact(word) != word]:
        raise UsageError(
            f"{', '.join(secret)}: contains secrets, and everyone with access to the cluster can see a job's command",
            "leave them out, and give the nodes credentials in their environment (AWS_ACCESS_KEY_ID, an instance's role)",
        )
    needed += [path for path in (config, injected) if path is not None]
    storages = [default_storage(), *([storage] if storage else [])]
    once = ["--fresh"] if fresh else []
    return _submit(address, command, root, needed, storages, once=once, last=last, wait=wait, retries=retries)


def _check_options(kind: str, of_job: _Given, of_run: _Given, of_script: _Given) -> None:
    """Raises UsageError for options of another kind of file. `of_run`: those that a sweep does not have."""
    what, unfit, remedy = {
        "train": ("a job", of_script, "set it in the job: cluster.workers, cpus_per_worker, gpus_per_worker"),
        "sweep": ("a sweep", {**of_job, **of_run, **of_script}, "leave it out, or set it in the sweep's base"),
        "run": ("a script", of_job, "leave it out: the script's session has these"),
    }[kind]
    if wrong := [option for option, value in unfit.items() if value is not None]:
        raise UsageError(f"{', '.join(wrong)}: cannot be used with {what}", remedy)


def _is_sweep(path: Path) -> bool:
    """Whether a YAML file describes a sweep rather than one job."""
    from raydist.spec.load import read_yaml

    raw = read_yaml(path)
    return isinstance(raw, dict) and "array" in raw


def _check_job(path: Path, overrides: list[str], deepspeed: Path | None, faults: Path | None) -> list[JobSpec]:
    from raydist.spec import load

    job = load(path, overrides, deepspeed)
    if faults is not None:
        from raydist.faults import load as load_faults

        load_faults(faults, job)
    return [job]


def _check_script(
    path: Path,
    name: str | None,
    resources: tuple[int | None, float | None, float | None],
    overrides: list[str],
    faults: Path | None,
) -> list[JobSpec]:
    from raydist.api.scripts import check_script, script_faults, script_job

    check_script(path)
    job = script_job(check_name(name or path.stem), *resources, overrides)
    script_faults(faults, job)
    return [job]


def _check_sweep(path: Path, overrides: list[str]) -> list[JobSpec]:
    from raydist.spec.sweep import check, load_sweep

    sweep = load_sweep(path, overrides)
    cells = sweep.cells()
    check(sweep, cells)
    return [cell.spec for cell in cells if cell.spec is not None]


def _check_files(path: Path, overrides: list[str], root: Path, swept: bool, configured: bool) -> list[Path]:
    """The files that this file refers to, relative to `root`. Raises UserError if the driver would not find one on the cluster.

    `configured`: --deepspeed is given, which overrides the DeepSpeed file that the job names.
    """
    from raydist.spec.load import named_files, overriding, read_layers, read_yaml

    named = []
    if swept:
        base = read_yaml(path)["base"]
        named.append((f"{path}: base", base, path.parent))
        path = path.parent / base
    over = overriding(overrides)
    if configured:
        over.tree.setdefault("deepspeed", None)
    named += named_files([*read_layers(path), over])
    wrong, files = [], []
    for where, name, folder in named:
        # Paths in `--set` are relative to the working directory: on the cluster that is `root`, here the current one.
        path = root / name if where.startswith("--set") else folder / name
        files.append(Path(os.path.relpath(path, root)))
        uploaded = path.resolve().is_relative_to(root) and path.resolve() == (folder / name).resolve()
        if Path(name).is_absolute() or not uploaded:
            wrong.append(f"{where}: {name} would not be found on the cluster: only {root} is uploaded")
    if wrong:
        raise UserError(
            "\n".join(wrong),
            "give paths relative to the file that contains them, inside the working directory (see --working-dir)",
        )
    return files


def _named_by(jobs: Iterable[JobSpec], root: Path) -> list[Path]:
    """The data, weights and modules under `root` that jobs refer to; modules may also be installed on the cluster.

    Raises UserError for data or weights with a relative path that is not under `root`.
    """
    found: dict[Path, None] = {}
    for job in jobs:
        for module in (name.partition(":")[0].partition(".")[0] for name in job.own_code() if ":" in name):
            found |= {path: None for path in (Path(f"{module}.py"), Path(module)) if (root / path).exists()}
        for field, name in files_of(job).items():
            if not name.startswith(("/", "~")):
                found |= dict.fromkeys(_under(root, name, field))
    return list(found)


def files_of(job: JobSpec) -> dict[str, str]:
    """The local files and folders, and globs, of data and weights that the job names: dotted field -> name."""
    from raydist.checkpoint.hub import options_with_files
    from raydist.data.chat_template import BUILT_IN
    from raydist.data.sources import STDLIB, is_records
    from raydist.spec.script import SESSION

    source, tokenizer = job.data.source or STDLIB, job.data.tokenizer
    data = {} if job.model.name == SESSION else {"data.path": job.data.path, "model.hf": job.model.hf}
    data |= {f"model.options.{key}": name for key, name in options_with_files(job).items()}
    if not is_records(source) and source != STDLIB:
        data["data.source"] = source
    if tokenizer != "bytes" and not tokenizer.startswith("bpe:") and tokenizer not in job.own_code():
        data["data.tokenizer"] = tokenizer
    if job.data.chat_template not in BUILT_IN:
        data["data.chat_template"] = job.data.chat_template
    return {field: name for field, name in data.items() if name is not None and "://" not in name}


def _under(root: Path, name: str, field: str) -> list[Path]:
    """The files in `root` for a relative `name` in a job: a file, a folder or a glob. Raises UserError if there are none."""
    from raydist.data.sources import find

    if ".." not in Path(os.path.normpath(name)).parts:
        if (root / name).exists():
            return [Path(name)]
        with contextlib.suppress(DataError):
            return [Path(file.path).relative_to(root) for file in find(str(root / name))]
    raise UserError(
        f"{field}: {name} is not under {root}, and the cluster would look for it there",
        "put it there, or use a path that the nodes can access: an absolute path on shared storage, or a URI",
    )


def _inside(path: Path, root: Path) -> Path:
    """The path on the cluster, where `root` is the working directory. Raises UserError if it is not under `root`."""
    try:
        return path.resolve().relative_to(root)
    except ValueError:
        raise UserError(
            f"{path} is not under the working directory {root}",
            "run from the folder that contains it, or give --working-dir",
        ) from None


def _submit(
    address: str,
    words: list[str],
    root: Path,
    needed: list[Path],
    storages: list[str],
    *,
    once: list[str],
    last: list[str],
    wait: bool,
    retries: int,
) -> str:
    """Uploads the selected files of `root`, and submits the command."""
    from raydist.cluster import authentication, jobs, package

    os.environ.update(authentication.token_mode())
    authentication.reread()
    url = jobs.url_of(address)
    jobs.connect(url)  # a wrong address or token is reported before a large folder is packed
    chosen = package.select(root, storages, [str(path) for path in needed])
    with temporary_folder() as folder:
        archive = folder / "package.zip"
        size = chosen.write(archive, package.JOBS_LIMIT)
        print(chosen.describe(size), file=sys.stderr)
        return _drive(url, words, archive, once=once, last=last, wait=wait, retries=retries)


def _drive(
    url: str, words: list[str], package: Path, *, once: list[str], last: list[str], wait: bool, retries: int
) -> str:
    """Submits the command, and submits it again if its driver dies, up to `retries` times, then without the options in `once`.
    `last`: the words after all options."""
    from raydist.cluster import jobs
    from raydist.run.driver_process import LOST_AFTER_S

    job = _start(url, shlex.join(words + once + last), package)
    if not wait:
        return job
    while True:
        try:
            status, code, message = jobs.ended(url, job, _AWAY_S)
        except KeyboardInterrupt:
            print(
                f"\njob {job} continues; its log: ray job logs {job} --follow --address {url}; to stop it after a checkpoint: "
                f"ray job stop {job} --address {url}",
                file=sys.stderr,
            )
            sys.exit(130)
        if status == "SUCCEEDED":
            return job
        if code == UserError.exit_code:
            raise UserError(f"job {job} was refused", "its log says why")
        if code in SIGNALLED:
            sys.exit(code)
        if status == "STOPPED":  # on request, so it is not submitted again
            print(f"job {job} was stopped", file=sys.stderr)
            sys.exit(143)
        if code == WorkerFailed.exit_code or not retries:
            raise WorkerFailed(f"job {job} ended as {status}", message)
        print(f"job {job} ended as {status}: {message or 'its driver died'}; submitting it again", file=sys.stderr)
        # The lease of a driver that died on another host must expire first.
        again = [*words, "--wait-for-driver", str(2 * LOST_AFTER_S), *last]
        job = _start(url, shlex.join(again), package, wait_s=_AWAY_S)
        retries -= 1


def _start(url: str, entrypoint: str, package: Path, wait_s: float = 0.0) -> str:
    """Submits the job and returns its id. Retries for `wait_s` seconds while the cluster does not answer."""
    from raydist.cluster import jobs

    deadline = time.monotonic() + wait_s
    while True:
        try:
            # `exec` leaves no shell in between: the driver is Ray's child, so Ray sees it exit and reaps it.
            job = jobs.submit(url, f"exec {entrypoint}", package, {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S)})
            break
        except ClusterUnreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_AGAIN_S)
    print(f"submitted as {job}; its log: ray job logs {job} --address {url}", file=sys.stderr)
    return job
