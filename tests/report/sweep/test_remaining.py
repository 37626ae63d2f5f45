"""The time and cost that a running sweep still needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raydist.dashboard import sweep_page
from raydist.report.sweep.remaining import Running, reckon, tell
from raydist.run.directory import RunDir
from raydist.run.lease import DriverLease
from tests.report.sweep.conftest import Swept, train

H = 3600.0


@pytest.mark.parametrize(
    ("ended", "running", "later", "expected"),
    [
        ([], [Running(10.0, None, 1.0)], [0.0], None),  # nobody tells a pace yet
        ([H], [], [0.0], None),  # nothing runs
        ([H], [Running(0.0, None, 2.0)], [], (H, 2.0)),  # without a step: as those that have ended
        ([H], [Running(2 * H, None, 2.0)], [], (0.0, 0.0)),  # it has taken longer than they
        ([], [Running(H, 3 * H, 1.0)], [0.0], (7 * H, 7.0)),  # nothing has ended: as those that run
        ([H], [Running(0.0, 3 * H, 1.0), Running(0.0, H, 3.0)], [0.0, 0.0], (3 * H, 10.0)),  # the second place takes both
        ([H, 3 * H], [Running(0.0, H, 0.0)], [0.5 * H], (2.5 * H, 0.0)),  # a paused cell has done a part; no GPU
    ],
)  # fmt: skip
def test_reckoned(
    ended: list[float], running: list[Running], later: list[float], expected: tuple[float, float] | None
) -> None:
    """From the pace of running cells and the mean of ended ones, over as many places as cells run."""
    assert reckon(ended, running, later) == expected


@pytest.mark.parametrize(("limits", "most"), [("", False), (", hours: 9", True)])
def test_of_a_sweep_and_on_its_page(swept: Callable[..., Swept], limits: str, most: bool) -> None:
    """The cells that have not ended, at the price of the sweep; nothing without a driver, or once all have ended."""
    made = swept(f"array: {{parameters: {{lr: [1, 2, 3, 4]}}}}\nlimits: {{cost_per_gpu_hour: 3600{limits}}}")
    assert tell(made.folder) is None
    lease = DriverLease(RunDir(made.folder.uri))
    made.finish(0, 2.5)
    made.start(1)
    train(made.folder.run(made.cells[1].id), made.cells[1], [4.0] * 10, 1.5, "running")
    left = tell(made.folder)
    assert left is not None
    assert (left.cells, left.most) == (3, most)
    assert left.seconds > 0.0
    assert left.gpu_hours == pytest.approx(left.seconds * 2.0 / 3600), "one cell after the other, each with two GPUs"
    assert left.cost == left.gpu_hours * 3600
    page = sweep_page.page(made.folder, 0)
    assert [*page.parts][:3] == ["head", "remaining", "words"]
    assert "3 cells have not ended: about " in page.parts["remaining"]
    assert ("UTC at the latest." in page.parts["remaining"]) == most
    for cell in (1, 2, 3):
        made.finish(cell, 2.5)
    assert tell(made.folder) is None
    assert "remaining" not in sweep_page.page(made.folder, 0).parts
    lease.release()
    made.start(2)
    assert tell(made.folder) is None
