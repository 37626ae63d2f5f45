"""Global batches that are left out of training, and the reason. All others are trained once.

Runs in: rank 0's worker, which writes; anywhere for reading. Plain python.

    RUN/ledger/step-00000012.json     one file per batch, written as a whole, and never changed

An entry is durable before it has any effect, so that every later attempt, at any world size, skips the same batches. Each entry
has its own file: two writers, one of an abandoned attempt, cannot overwrite each other's entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from raydist.data.batches import Cursor
from raydist.errors import StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.run.directory import LEDGER, RunDir


@dataclass(frozen=True, slots=True)
class Entry:
    """A global batch whose update was not applied: the batch of `step`, `samples` ids from (`epoch`, `offset`) of the order on.

    `samples_hash`: as in StepRecord. `action`: skip or rollback; `cause`: one line; `attempt`: the attempt that recorded it.
    """

    step: int
    epoch: int
    offset: int
    samples: int
    samples_hash: str
    action: str
    cause: str
    attempt: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Entry:
        """The inverse of `to_dict`. Raises KeyError if a field is missing; unknown fields of later versions are ignored."""
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})

    def names(self, cursor: Cursor, samples_hash: str) -> bool:
        """Whether it is the batch at `cursor` with these samples; false for another order."""
        return (self.epoch, self.offset, self.samples_hash) == (cursor.epoch, cursor.offset, samples_hash)


def path(step: int) -> str:
    """An entry's file, relative to the run's folder."""
    return f"{LEDGER}/step-{step:08d}.json"


def write(run: RunDir, entry: Entry) -> None:
    """Returns once the entry is durable. Raises StorageError."""
    run.storage.write(path(entry.step), json.dumps(entry.to_dict(), sort_keys=True).encode() + b"\n")


def read(run: RunDir) -> list[Entry]:
    """A run's entries, by step. Raises StorageError with the name of an invalid file."""
    found = []
    for name in run.storage.files(LEDGER):
        try:
            found.append(Entry.from_dict(parse_json(run.storage.read(name))))
        except DAMAGED as error:
            raise StorageError(
                f"{run.uri}/{name} is not a valid entry of the ledger: {error}", "restore it from a copy"
            ) from error
    return sorted(found, key=lambda e: e.step)


def union(*parts: Iterable[Entry]) -> list[Entry]:
    """The entries of all parts, one per step, by step; the first part wins."""
    every: dict[int, Entry] = {}
    for part in parts:
        for entry in part:
            every.setdefault(entry.step, entry)
    return [every[step] for step in sorted(every)]
