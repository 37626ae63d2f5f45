"""docs/how-to/sweeps.md is an interface: it documents the JSON and the events of a sweep."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from raydist.report.sweep import forecast
from raydist.report.sweep.results import STATUSES, tell
from raydist.run.sweep_state import fold
from tests.report.sweep.conftest import Swept
from tests.run.test_sweep_directory import story

DOCS = (Path(__file__).parents[3] / "docs/how-to/sweeps.md").read_text()


def test_every_key_stands_in_the_docs(swept: Callable[..., Swept]) -> None:
    """Keys of the forecast and the results, of their rows, totals and analysis; and every status."""
    made = swept("array: {parameters: {lr: [1, 2]}, seeds: 2}")
    for cell in range(4):
        made.finish(cell, 2.0)
    ahead, told = forecast.tell(made.sweep, made.cells, []), tell(made.folder)
    keys = {*ahead, *ahead["cells"][0], *ahead["totals"], *told, *told["points"][0], *told["totals"], *told["analysis"]}
    assert {key for key in keys if f"`{key}`" not in DOCS} == set()
    assert all(status in DOCS for status in STATUSES)


def test_every_documented_kind_is_understood() -> None:
    """Each documented kind with a cell changes its state, or is known to change nothing."""
    table = DOCS[DOCS.index("| kind | data |") :]
    kinds = re.findall(r"^\| `(\w+)` \|", table, re.M)
    after = {kind: fold(story(("started", {}), (kind, {"note": {}})))["c"] for kind in kinds}
    before = fold(story(("started", {})))["c"]
    quiet = {"queued", "added", "report"} & set(kinds)
    assert {kind for kind, state in after.items() if state == before} == quiet
