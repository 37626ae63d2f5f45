"""Notes of injected faults: a file in the run's folder for each, written before the fault happens.

Runs anywhere: ranks write notes, the driver and `raydist show` read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from raydist.errors import StorageError
from raydist.faults.base import Fault
from raydist.parsing import DAMAGED, parse_json
from raydist.printable import printable
from raydist.run.directory import FAULTS, RunDir


def names(faults: Sequence[Fault]) -> list[str]:
    """A name for each fault, the same in every attempt and driver, even if faults are added; equal faults are numbered."""
    found: list[str] = []
    for fault in faults:
        body = json.dumps(fault.model_dump(mode="json"), sort_keys=True)
        name = f"{fault.step:08d}-{fault.fault}-{hashlib.sha256(body.encode()).hexdigest()[:8]}"
        found.append(f"{name}-{sum(n.startswith(name) for n in found) + 1}")
    return found


def note(name: str, rank: int, time: int) -> str:
    """The note's file for the `time`-th occurrence of a fault on a rank, relative to the run's folder."""
    return f"{FAULTS}/{name}-rank{rank}-{time}.json"


def done(of: str) -> str:
    """A file next to a note: the driver has injected the fault, or could not: see `failed`."""
    return f"{FAULTS}/done/{of.rpartition('/')[2]}"


def failed(run: RunDir, of: str) -> bool:
    """Whether the driver could not inject the fault of that note."""
    try:
        return bool(parse_json(run.storage.read(done(of)))["failed"])
    except (FileNotFoundError, StorageError, *DAMAGED):
        # A rank injects it, or the driver was killed before it had noted that.
        return False


def read_notes(run: RunDir, known: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Each note's name -> its content, in order of time; without the `known` ones.

    A note: fault, rank, step, attempt, at (Unix time), node_ip, by, and `asked`, the fault's fields. Raises StorageError.
    """
    names = set(run.storage.files(FAULTS)) - set(known)
    found = {name: _read(run, name) for name in names}
    return dict(sorted(found.items(), key=lambda item: float(item[1]["at"])))


def _read(run: RunDir, name: str) -> dict[str, Any]:
    try:
        made = parse_json(run.storage.read(name))
        numbers = {"step": int(made["step"]), "attempt": int(made["attempt"]), "at": float(made["at"])}
        rank = None if made["rank"] is None else int(made["rank"])
        return printable({**made, **numbers, "rank": rank, "fault": str(made["fault"])})
    except DAMAGED as error:
        raise StorageError(f"{run.uri}/{name} is damaged: {error}", "remove that file") from error
