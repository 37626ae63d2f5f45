"""How a run's gradients went from rank to rank: the choice of `auto`, compressed bytes, and outer steps.

Runs anywhere. Plain python and pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raydist.records import Event


def sent(steps: pa.Table, events: Sequence[Event]) -> dict[str, Any]:
    """Each None where it does not apply; bytes and seconds are rank 0's, of all recorded steps.

    `chosen`: the fields and the reason of the newest attempt's choice. `compressed`: `bytes` that were sent, `saved_bytes` of what
    a ring would have sent in fp32, and the median `error`. `outer`: `local_steps`, and of outer steps that have arrived their
    number `syncs`, their `bytes`, and the `waited_seconds` in which training stood still.
    """
    chosen = next((e.data for e in reversed(events) if e.kind == "comm_chosen"), None)
    return {
        "chosen": chosen and {name: chosen[name] for name in ("compress", "topology", "bucket_mb", "because")},
        "compressed": _compressed(steps),
        "outer": _outer(steps),
    }


def _compressed(steps: pa.Table) -> dict[str, Any] | None:
    nbytes, saved, error = (_numbers(steps, name) for name in ("sent_bytes", "saved_bytes", "compression_error"))
    if not np.isfinite(nbytes).any():
        return None
    known = error[np.isfinite(error)]
    return {
        "bytes": int(np.nansum(nbytes)),
        "saved_bytes": int(np.nansum(saved)),
        "error": float(np.median(known)) if len(known) else None,
    }


def _outer(steps: pa.Table) -> dict[str, Any] | None:
    local = [value for value in steps["local_step"].to_pylist() if value is not None]
    if not local:
        return None
    seconds, nbytes = _numbers(steps, "sync_seconds"), _numbers(steps, "sync_bytes")
    # A record has the last outer step that has arrived: a new one has other seconds. With comm.delay others start in between.
    new = np.isfinite(seconds) & (seconds != np.concatenate([[np.nan], seconds[:-1]]))
    return {
        "local_steps": sum(local),
        "syncs": int(new.sum()),
        "bytes": int(nbytes[new].sum()),
        "waited_seconds": float(seconds[new].sum()),
    }


def _numbers(steps: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The column, with NaN for null."""
    found: np.ndarray[Any, np.dtype[np.float64]] = steps[name].cast("float64").to_numpy()
    return found
