"""What says that a fault has happened: a file in the run's folder, written before it does.

Runs anywhere: ranks write notes, the driver and `raydist show` read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from raydist.faults.kinds import Fault
from raydist.run.directory import FAULTS, RunDir


def names(faults: Sequence[Fault]) -> list[str]:
    """A name for each, the same in every attempt and driver, whatever is added to the file: those of equal ones are numbered."""
    found: list[str] = []
    for fault in faults:
        body = json.dumps(fault.model_dump(mode="json"), sort_keys=True)
        name = f"{fault.step:08d}-{fault.fault}-{hashlib.sha256(body.encode()).hexdigest()[:8]}"
        found.append(f"{name}-{sum(n.startswith(name) for n in found) + 1}")
    return found


def note(name: str, rank: int, time: int) -> str:
    """Where a fault's `time`-th happening on a rank is noted, relative to the run's folder."""
    return f"{FAULTS}/{name}-rank{rank}-{time}.json"


def done(of: str) -> str:
    """Beside a note: that the driver has done what it says."""
    return f"{FAULTS}/done/{of.rpartition('/')[2]}"


def read_notes(run: RunDir, known: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Each note's name -> what it says, in the order in which it happened; without the `known` ones.

    A note: fault, rank, step, attempt, at (Unix time), node_ip, by, and `asked`, the fault's fields. Raises StorageError.
    """
    names = set(run.storage.files(FAULTS)) - set(known)
    found = {name: json.loads(run.storage.read(name)) for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1]["at"]))
