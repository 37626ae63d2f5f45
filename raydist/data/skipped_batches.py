"""Global batches that are left out of training: which, and why. All others are trained once.

Runs in: rank 0's worker, which writes; anywhere for reading. Plain python.

    RUN/ledger/step-00000012.json     one file a batch, written whole, and never changed

An entry is durable before anything follows from it, so that every later attempt, at any world size, leaves the same batches
out. A file of its own for each: two writers, one of them given up, cannot lose each other's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from raydist.data.batches import Cursor
from raydist.errors import StorageError
from raydist.run.directory import LEDGER, RunDir


@dataclass(frozen=True, slots=True)
class Entry:
    """A global batch whose update was not applied: `samples` ids from (`epoch`, `offset`) of the order on, the batch of `step`.

    `samples_hash`: as in StepRecord. `action`: skip or rollback; `cause`: one line; `attempt`: the one that found it.
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
        """The inverse of `to_dict`. Raises KeyError where a field is missing; fields of later versions are passed over."""
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})

    def names(self, cursor: Cursor, samples_hash: str) -> bool:
        """Whether it is the batch at `cursor` with these samples: another order's is not."""
        return (self.epoch, self.offset, self.samples_hash) == (cursor.epoch, cursor.offset, samples_hash)


def path(step: int) -> str:
    """An entry's file, relative to the run's folder."""
    return f"{LEDGER}/step-{step:08d}.json"


def write(run: RunDir, entry: Entry) -> None:
    """Returns once the entry is durable. Raises StorageError."""
    run.storage.write(path(entry.step), json.dumps(entry.to_dict(), sort_keys=True).encode() + b"\n")


def read(run: RunDir) -> list[Entry]:
    """A run's entries, by step. Raises StorageError, naming a file that is no entry."""
    found = []
    for name in run.storage.files(LEDGER):
        try:
            found.append(Entry.from_dict(json.loads(run.storage.read(name))))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{run.uri}/{name} is no entry of the ledger: {error}", "bring it back from a copy"
            ) from error
    return sorted(found, key=lambda e: e.step)


def union(*parts: Iterable[Entry]) -> list[Entry]:
    """The entries of all parts, one a step, by step: of one that several have, the first part's."""
    every: dict[int, Entry] = {}
    for part in parts:
        for entry in part:
            every.setdefault(entry.step, entry)
    return [every[step] for step in sorted(every)]
