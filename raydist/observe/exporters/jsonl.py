"""Writes a run as JSON lines, to RUN/export.jsonl or to the option `path`: for tools that read lines as they arrive.

Runs in: the run's monitor. A line is {"type": "attempt" | "step" | "event" | "samples", ...}: see docs/how-to/exporters.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from raydist.errors import UserError
from raydist.observe.exporters import BaseExporter, Facts
from raydist.paths import local_path
from raydist.run.directory import RunDir
from raydist.run.log import plain
from raydist.spec.parts import Part
from raydist.storage import append_whole, refused

FILE = "export.jsonl"
_BLOCK = 1 << 16


class Options(Part):
    """Where the lines are written."""

    path: str | None = Field(None, description="A file on this host; default: export.jsonl in the run's folder.")


class Exporter(BaseExporter):
    """Appends: a later attempt, or a later driver of the same run, continues the same file."""

    def __init__(self, facts: Facts) -> None:
        self._path = Path(facts.options["path"])
        self._buffer = bytearray()
        try:
            # Only now: later the run's folder may be unmounted.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self._path)
        except OSError as error:
            raise refused("write", self._path, error) from error

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """`path`, absolute. Raises UserError if the run is on an object store, where files cannot grow, and no path is given."""
        path = Options(**options).path
        if path is None and run.storage.local is None:
            raise UserError(
                f"a file on {run.uri.partition('://')[0]}:// cannot grow line by line",
                "give options: {path: FILE}, on this host",
            )
        return {"path": str(local_path(path).absolute() if path else Path(run.storage.path(FILE)).absolute())}

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Lines of steps after `resume_step` that were written before this line are void."""
        self._add({"type": "attempt", "attempt": number, "resume_step": resume_step, "at": at})

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """One line per step."""
        for row in rows:
            self._add({"type": "step", "at": at, **row})

    def event(self, event: Mapping[str, Any]) -> None:
        """One line."""
        self._add({"type": "event", **event})

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line for all of them."""
        self._add({"type": "samples", "rows": list(rows)})

    def flush(self) -> None:
        """Appends the buffered lines. Raises StorageError, and then none of them is in the file."""
        if not self._buffer:
            return
        try:
            append_whole(self._path, bytes(self._buffer))
        except OSError as error:
            raise refused("write", self._path, error) from error
        self._buffer.clear()

    def close(self) -> None:
        """The last flush."""
        self.flush()

    def _add(self, line: Mapping[str, Any]) -> None:
        self._buffer += json.dumps(plain(line), allow_nan=False).encode() + b"\n"


def _cut_torn_line(path: Path) -> None:
    """Removes a partial last line, which a monitor killed during a write may have left."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        end = at = file.seek(0, os.SEEK_END)
        while at > 0:
            at = max(at - _BLOCK, 0)
            file.seek(at)
            newline = file.read(min(_BLOCK, end - at)).rfind(b"\n")
            if newline >= 0:
                at += newline + 1
                break
        file.truncate(at)
