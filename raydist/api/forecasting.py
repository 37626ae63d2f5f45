"""What `raydist sweep FILE --dry-run` does: the cells of a sweep, and how long they will take.

Runs in: the process of the command, or one of its own. Imports ray inside functions; never torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.call import separate
from raydist.run.directory import default_storage
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.spec.load import Overrides


@separate
def forecast(
    spec: str | Path, *, set: Overrides | None = None, name: str | None = None, storage: str | None = None,
    address: str | None = None, device: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The cells of a sweep and their estimated time, as `raydist sweep FILE --dry-run --json` prints them; trains nothing.

    `device`: the GPU to estimate for, such as "h100"; None: the slowest at `address`, else this machine's. The others are as for
    `sweep`. Raises SpecError if the file or a cell is wrong.
    """
    return estimate(spec, set, name, storage, address, device)


def estimate(
    spec: str | Path, set: Overrides | None, name: str | None, storage: str | None, address: str | None, device: str | None,
    show: Callable[[dict[str, Any]], None] = lambda estimate: None,
) -> dict[str, Any]:  # fmt: skip
    """`forecast`, which `show` gets, too: before it raises SpecError for a cell that is wrong."""
    from raydist.api.speed import estimate_speed
    from raydist.api.sweep_training import check_cells
    from raydist.cluster import place
    from raydist.report.sweep import forecast
    from raydist.spec.sweep import load_sweep

    sweep = load_sweep(spec, set or (), name)
    cells = sweep.cells()
    known = forecast.paces(Storage(storage or default_storage()), sweep, cells)
    address = place.where(address)
    nodes = place.look(address) if device is None or address != "local" else None  # None: it will run on other machines
    pace = estimate_speed(device, None if nodes is None or address == "local" else nodes.resources)
    able = sweep.scouts() if sweep.spec.search.chooses else cells
    jobs = [cell.spec for cell in able if cell.spec is not None]
    here = None if nodes is None else nodes.place(jobs, sweep.spec.array.concurrent)
    made = forecast.tell(sweep, cells, known, pace, here)
    show(made)
    check_cells(sweep, cells)
    return made
