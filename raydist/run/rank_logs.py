"""The output of each rank of a run, in the run's folder: file names, and reading. raydist/launch/rank_output.py writes it.

Runs anywhere. Must not import ray or torch.

    RUN/logs/attempt-0002/rank-00003.log          output of rank 3 in attempt 2, stdout and stderr together
                          rank-00003.0002.log     its continuation, on an object store, which cannot append
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from raydist.errors import UsageError
from raydist.run.directory import LOGS, RunDir

TAIL_BYTES = 1 << 16
"""Bytes at the end of a rank's output that `tail` reads."""
_LONGEST = 1 << 20
_PART = re.compile(r"rank-(\d+)(?:\.(\d+))?\.log")


def name(attempt: int, rank: int, part: int = 1) -> str:
    """A file of that rank's output, relative to the run. Parts count from 1."""
    return f"{LOGS}/attempt-{attempt:04d}/rank-{rank:05d}{'' if part == 1 else f'.{part:04d}'}.log"


def tail(run: RunDir, attempt: int, rank: int) -> str:
    """The end of a rank's output in an attempt, in whole lines, at most TAIL_BYTES; empty if it wrote none. Raises StorageError."""
    parts = {}
    for path, size in run.storage.files(f"{LOGS}/attempt-{attempt:04d}").items():
        match = _PART.fullmatch(PurePosixPath(path).name)
        if match and int(match[1]) == rank:
            parts[int(match[2] or 1)] = path, size
    found, cut = b"", False
    for _, (path, size) in sorted(parts.items(), reverse=True):
        missing = TAIL_BYTES - len(found)
        if missing <= 0:
            cut = True
            break
        with run.storage.open(path) as source:
            source.seek(max(size - missing, 0))
            found = bytes(source.read(missing)) + found
        cut = size > missing
    return (found.partition(b"\n")[2] if cut else found).decode(errors="replace")


def reader(run: RunDir, attempt: int | None, rank: int | None) -> Reader:
    """Of an attempt, by default the newest, and of one rank or of all. Raises UsageError if there was none such."""
    from raydist.run.log import last_attempt  # it imports pyarrow
    from raydist.run.status import read_state

    newest = last_attempt(run)
    number = newest if attempt is None else attempt
    if not (number == newest or 1 <= number < newest):
        raise UsageError(f"run {run.name} has no attempt {number}", f"the newest is {newest}")
    world = read_state(run).get("world_size") if number == newest else None
    if rank is not None and world and rank >= world:
        raise UsageError(f"run {run.name} has no rank {rank}", f"it has {world}, counted from 0")
    return Reader(run, number, rank)


@dataclass(slots=True)
class _Rank:
    part: int = 1
    offset: int = 0
    rest: bytes = b""


@dataclass(slots=True)
class Reader:
    """Reads one attempt's lines as they are written. `rank`: only that rank."""

    run: RunDir
    attempt: int
    rank: int | None = None
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def read(self, last: bool = False) -> Iterator[tuple[int, str]]:
        """(rank, line) of the new lines since the previous call, rank by rank. `last`: also lines without a newline at the end.

        Raises StorageError.
        """
        sizes: dict[int, dict[int, int]] = {}
        for path, size in self.run.storage.files(f"{LOGS}/attempt-{self.attempt:04d}").items():
            match = _PART.fullmatch(PurePosixPath(path).name)
            if match and self.rank in (None, int(match[1])):
                sizes.setdefault(int(match[1]), {})[int(match[2] or 1)] = size
        for rank, parts in sorted(sizes.items()):
            at = self._ranks.setdefault(rank, _Rank())
            for part, size in sorted(parts.items()):
                if part < at.part or (part == at.part and size <= at.offset):
                    continue
                start = at.offset if part == at.part else 0
                data = self._bytes(name(self.attempt, rank, part), start)
                at.part, at.offset = part, start + len(data)
                *lines, at.rest = (at.rest + data).split(b"\n")
                if len(at.rest) > _LONGEST:  # a line without an end: what is joined again at each read stays small
                    lines, at.rest = [*lines, at.rest], b""
                yield from ((rank, line.decode(errors="replace")) for line in lines)
            if last and at.rest:
                yield rank, at.rest.decode(errors="replace")
                at.rest = b""

    def _bytes(self, path: str, start: int) -> bytes:
        try:
            with self.run.storage.open(path) as source:
                source.seek(start)
                return bytes(source.read())
        except FileNotFoundError:
            return b""
