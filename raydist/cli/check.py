"""`raydist check`: whether a cluster is fit to train on, before there is a job: each node, each link and the storage.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside the command; never torch.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options
from raydist.cli.output import measurement_interrupted
from raydist.cli.place import where
from raydist.errors import StorageError, UsageError
from raydist.run.directory import default_storage
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.spec import JobSpec


def check(
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="A job file: its cluster.resources, and whether it fits. None is needed.", show_default=False
        ),
    ] = None,
    overrides: options.Overrides = None,
    storage: options.Storage = None,
    address: options.Address = None,
    share: Annotated[
        float, typer.Option("--slow", min=0.01, max=1, help="A node below this share of the median is slow.")
    ] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure every node, each link and the storage in about a minute; name the slow nodes. Exits with 3 if there is one."""
    from raydist.cluster import bench
    from raydist.cluster import check as measured
    from raydist.cluster.run.request import worker_env
    from raydist.cluster.session import open_session

    job = _job(spec, overrides or [])
    home = _writable(Storage(storage or default_storage()))
    with (
        tempfile.TemporaryDirectory(prefix="raydist-logs-") as logs,
        open_session(where(address), env=worker_env(job), log_dir=Path(logs)) as session,
    ):
        result = measured.run(job, session, home.full_uri, share)
    if isinstance(result, bench.Interrupted):
        raise measurement_interrupted(result)
    if as_json:
        print(json.dumps(result))
    else:
        from raydist.report.check import show

        show(result)
    if result["slow"] or result["differs"]:
        raise typer.Exit(3)


def _writable(home: Storage) -> Storage:
    """Raises UsageError if it is not, before anything is started: so exit code 3 means a slow node."""
    mark = f".check-{uuid.uuid4().hex[:8]}"
    try:
        home.write(mark, b"")
        home.delete(mark)
    except StorageError as error:
        raise UsageError(error.message, "give a --storage that can be written") from error
    return home


def _job(spec: Path | None, overrides: list[str]) -> JobSpec:
    """The job of the file; without one, a job of one worker."""
    from raydist.spec import load, merge, parse
    from raydist.spec.load import overriding

    if spec is not None:
        return load(spec, overrides)
    over = overriding(overrides)
    return parse(merge({"name": "check", "data": {"source": "none"}, "train": {"steps": 1}}, over.tree), over.origin)
