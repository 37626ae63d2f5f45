"""What `raydist check` does.

Runs in: the process of the command, or one of its own. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raydist.api.call import check_numbers, separate
from raydist.api.training import check_model
from raydist.errors import DataError, StorageError, UsageError
from raydist.private_files import temporary_folder
from raydist.run.directory import default_storage
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.spec.load import Job, Overrides

_NO_JOB = {"name": "check", "data": {"source": "none"}, "train": {"steps": 1}}
"""A job of one worker."""


@separate
def check(
    spec: Job | None = None,
    *,
    set: Overrides | None = None,
    storage: str | None = None,
    address: str | None = None,
    slow: float = 0.8,
    exclude_slow: bool = False,
) -> dict[str, Any]:
    """Measures every node, each link and the storage in about a minute: what `raydist check --json` prints, with the nodes that are
    below the share `slow` of the median. `spec`: a job; its cluster.resources, and whether it fits; `exclude_slow`: also without
    those nodes. Raises UserErrors."""
    check_numbers(1, slow=(slow, 0.01))
    from raydist.cluster import check as measured
    from raydist.cluster.place import where
    from raydist.cluster.run.request import worker_env
    from raydist.cluster.session import open_session
    from raydist.spec import load
    from raydist.spec.load import source_of

    job = load(_NO_JOB if spec is None else spec, set or {})
    if spec is not None:
        with suppress(DataError):  # its data need not be here yet: the start of the run looks at them
            check_model(job, source_of(spec))
    home = _writable(Storage(storage or default_storage()))
    with (
        temporary_folder() as logs,
        open_session(where(address), env=worker_env(job), log_dir=logs) as session,
    ):
        result = measured.run(job, session, home.full_uri, slow)
        if exclude_slow and result["slow"]:
            left = measured.without_slow(job, session, result["slow"]).cluster.resources.exclude
            result["left_out"] = [ip for ip in left if ip not in job.cluster.resources.exclude]
        return result


def _writable(home: Storage) -> Storage:
    """Raises UsageError if it is not, before anything is started: so exit code 3 means a slow node."""
    mark = f".check-{uuid.uuid4().hex[:8]}"
    try:
        home.write(mark, b"")
        home.delete(mark)
    except StorageError as error:
        raise UsageError(error.message, "give a --storage that can be written") from error
    return home
