"""A run as JSON lines, in RUN/export.jsonl or at the option `path`: for whatever reads lines as they come.

Runs in: the run's monitor. A line is {"type": "attempt" | "step" | "event" | "samples", ...}: see docs/exporters.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.errors import StorageError, UserError
from raydist.observe.exporters import BaseExporter, Facts, only
from raydist.run.directory import RunDir
from raydist.run.log import plain

FILE = "export.jsonl"
_BLOCK = 1 << 16


class Exporter(BaseExporter):
    """Appends: a later attempt, and a later driver of the same run, go on in the same file."""

    def __init__(self, facts: Facts) -> None:
        self._path = Path(facts.options["path"])
        self._buffer = bytearray()
        try:
            _cut_torn_line(self._path)
        except OSError as error:
            raise _refused(self._path, error) from error

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """`path`, absolute. Raises UserError where the run is not on a file system and none is given: its files do not grow."""
        only(options, ("path",))
        path = options.get("path")
        if path is not None and not isinstance(path, str):
            raise UserError(f"path: {path!r} is no path", "give the path of a file")
        if path is None and run.storage.local is None:
            raise UserError(
                f"a file on {run.uri.partition('://')[0]}:// cannot grow line by line",
                "give options: {path: FILE}, on this host",
            )
        return {"path": str(Path(path).expanduser().absolute() if path else Path(run.storage.path(FILE)).absolute())}

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Lines of steps past `resume_step` that stand before this one are void."""
        self._add({"type": "attempt", "attempt": number, "resume_step": resume_step, "at": at})

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """A line each."""
        for row in rows:
            self._add({"type": "step", "at": at, **row})

    def event(self, event: Mapping[str, Any]) -> None:
        """A line."""
        self._add({"type": "event", **event})

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line for all of them."""
        self._add({"type": "samples", "rows": list(rows)})

    def flush(self) -> None:
        """Appends what was given. Raises StorageError, and then nothing of it is in the file."""
        if not self._buffer:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                rest = memoryview(bytes(self._buffer))
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    os.ftruncate(file.fileno(), size)  # a full disk took a part
                    raise
        except OSError as error:
            raise _refused(self._path, error) from error
        self._buffer.clear()

    def close(self) -> None:
        """The last flush."""
        self.flush()

    def _add(self, line: Mapping[str, Any]) -> None:
        self._buffer += json.dumps(plain(line), allow_nan=False).encode() + b"\n"


def _cut_torn_line(path: Path) -> None:
    """A monitor that was killed while it wrote may have left a line without its end."""
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


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {os.strerror(error.errno or 0)}", "")
