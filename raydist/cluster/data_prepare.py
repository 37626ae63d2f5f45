"""Prepares the blocks of a corpus in parallel with Ray Data, on a private Ray or on a cluster.

Runs in: the process of `raydist data prepare`; each block is made in a task of Ray Data. Imports ray only once
there are blocks to make; never torch. raydist/data defines how a block is made and its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from raydist.cluster.place import not_empty
from raydist.cluster.session import open_session
from raydist.data.shards import Made
from raydist.data.sources import Block
from raydist.errors import RaydistError, StorageError, error_from
from raydist.private_files import temporary_folder

_ENV = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A task has one CPU, so its libraries must not start one thread per core."""

_ALONE = 2
"""Fewer blocks than this are made in this process, unless a cluster is requested: starting Ray takes longer."""


class RayMap:
    """A `map_files` for `raydist.data.prepare`, as a context manager. Ray starts when there are blocks to make.

    `address`: None or "local" starts a private Ray, "auto" or HOST:PORT uses a cluster. With None, a single block is
    made in this process, without Ray.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = not_empty(address)
        self._stack = contextlib.ExitStack()
        self._started = False

    def __enter__(self) -> RayMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, at)

    def __call__(self, make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterator[Made]:
        """Yields the result of `make` for each block, in the order of completion; re-raises a RaydistError of `make`."""
        if not blocks or (self.address is None and len(blocks) < _ALONE):
            return map(make, blocks)
        if not self._started:
            # Only once: `prepare` may make a small corpus twice, see its threshold.
            self._started = True
            self._start()
        return _map(make, blocks)

    def _start(self) -> None:
        logs = self._stack.enter_context(temporary_folder()) / "logs"
        self._stack.push(_keep_if_failed(logs))
        self._stack.enter_context(open_session(self.address or "local", env=_ENV, log_dir=logs))


def _keep_if_failed(logs: Path) -> Callable[..., None]:
    """After an error of Ray, keeps a copy of its logs: they may contain the reason, and a note on the error names the copy."""

    def end(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, RaydistError) and logs.is_dir():
            kept = shutil.copytree(logs, tempfile.mkdtemp(prefix="ray-logs-"), dirs_exist_ok=True)
            error.add_note(f"Ray's logs: {kept}")

    return end


def _map(make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterator[Made]:
    import ray.data

    # Its records go to the parent logger "ray", which the session writes to a file instead of the terminal.
    logger = logging.getLogger("ray.data")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = ray.data.from_items([{"block": b.to_json()} for b in blocks], override_num_blocks=len(blocks))
    with contextlib.closing(iter(rows.map(_Task(make), num_cpus=1).iter_rows())) as made:
        for row in made:
            if row["error"]:
                raise error_from((row["error"], row["message"], row["hint"]), StorageError)
            yield Made.from_json(row["made"])


class _Task:
    """Maps one row of Ray Data: a block to its result, both as JSON. A RaydistError is returned as a value: so the
    user sees it without Ray's wrapping, and Ray does not retry a task that cannot succeed."""

    def __init__(self, make: Callable[[Block], Made]) -> None:
        self._make = make

    @property
    def __name__(self) -> str:
        return "prepare"

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        try:
            made = self._make(Block.from_json(row["block"])).to_json()
        except RaydistError as error:
            return {"made": "", "error": type(error).__name__, "message": error.message, "hint": error.hint}
        return {"made": made, "error": "", "message": "", "hint": ""}
