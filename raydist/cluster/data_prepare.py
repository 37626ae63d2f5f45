"""Blocks of a corpus made by Ray Data, on a private Ray or on a cluster.

Runs in: the process of `raydist data prepare`; the blocks are made in Ray Data's tasks. Imports ray only once
there are blocks to make; never torch. What is made, and its bytes, is raydist/data's own affair: here it is
only carried out in parallel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from raydist import errors
from raydist.cluster.session import open_session
from raydist.data.shards import Made
from raydist.data.sources import Block
from raydist.errors import RaydistError, StorageError

_ENV = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A task has one CPU: the libraries in it must not each take all of them."""

_ALONE = 2
"""Fewer blocks than this are made at once, here, unless a cluster is asked for: Ray takes longer to start."""


class RayMap:
    """A `map_files` for `raydist.data.prepare`, as a context manager: Ray starts when it has blocks to make.

    `address`: None or "local" starts a private Ray, "auto" or HOST:PORT uses a cluster; None does neither for
    one block.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self._stack = contextlib.ExitStack()
        self._started = False

    def __enter__(self) -> RayMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, at)

    def __call__(self, make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterator[Made]:
        """Yields what `make` returns for each block, as they come; raises what it raises, if that is
        raydist's own."""
        if not blocks or (self.address is None and len(blocks) < _ALONE):
            return map(make, blocks)
        if not self._started:
            # Once: a small corpus may be made twice, see prepare's threshold.
            self._started = True
            self._start()
        return _map(make, blocks)

    def _start(self) -> None:
        logs = Path(tempfile.mkdtemp(prefix="raydist-logs-"))
        self._stack.push(_keep_if_failed(logs))
        place = self.address or "local"
        path = [os.getcwd()] if place == "local" else []
        self._stack.enter_context(open_session(place, env=_ENV, log_dir=logs, python_path=path))


def _keep_if_failed(logs: Path) -> Callable[..., None]:
    """Removes Ray's logs, but for an error that is Ray's: then they may say why, and the error names them."""

    def end(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, RaydistError):
            shutil.rmtree(logs, ignore_errors=True)
        else:
            error.add_note(f"Ray's logs: {logs}")

    return end


def _map(make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterator[Made]:
    import ray.data

    # To the "ray" logger above it, which the session sends to a file, not to the user's screen.
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
                raise _error(row["error"], row["message"], row["hint"])
            yield Made.from_json(row["made"])


class _Task:
    """One row of Ray Data: a block in, what it became out, as text. An error of raydist's is a value, so that
    the user sees it and nothing of Ray's around it, and so that Ray does not try again what cannot
    succeed."""

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


def _error(name: str, message: str, hint: str) -> RaydistError:
    kind = getattr(errors, name, StorageError)
    error: RaydistError = kind(message, hint)
    return error
