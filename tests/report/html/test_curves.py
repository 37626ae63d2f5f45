"""raydist.report.html.curves: what is drawn of samples, and for a model with experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from raydist.report.html import run as page
from raydist.report.html.curves import View
from raydist.report.run_metrics import report
from raydist.run.directory import RunDir
from tests.report import story


def drawn(run: RunDir, view: View | None = None) -> dict[str, Any]:
    """The data of the charts of section Training, by title."""
    made = page.parts(report(run), view)["training"]
    data = re.findall(r'<script type="application/json">(.*?)</script>', made)
    return dict(zip(re.findall(r'data-name="(.*?)"', made), map(json.loads, data), strict=True))


def test_experts(tmp_path: Path) -> None:
    """Imbalance and exchanged bytes over steps, and the newest recorded loads over the mean of their layer, as powers of two; an
    idle expert has no colour. A model without experts has none of them."""
    told = [*story.events(), story.event(8, "experts", layers={"blocks.0.mlp": 4, "blocks.1.mlp": 4})]
    more = {"expert_imbalance": 1.25, "exchanged_bytes": 3 << 20, "expert_loads": [[4, 0, 8, 4], [4] * 4]}
    rows = [{**row, **more} for row in story.steps(1, 200, 1)]
    found = drawn(story.write(RunDir(tmp_path / "experts"), told, [(1, 0, rows)]))
    assert set(found["Imbalance of experts"]["series"][0]["y"]) == {1.25}
    assert set(found["Exchange of experts"]["series"][0]["y"]) == {3}
    loads = found["Loads of experts"]
    assert (loads["rows"], loads["values"]) == (["blocks.0.mlp", "blocks.1.mlp"], [[0, None, 1, 0], [0] * 4])
    plain = drawn(story.write(RunDir(tmp_path / "plain"), story.events(), [(1, 0, story.steps(1, 200, 1))]))
    assert not [name for name in plain if "xperts" in name]


def test_samples_a_second(tmp_path: Path) -> None:
    """Of each step, by its own number of samples; beside it another run. Records without them have no such chart, and no such curve
    beside others."""
    rows = story.steps(1, 50, 1)
    run = story.write(RunDir(tmp_path / "new"), story.events(), [(1, 0, rows)])
    plain = [{name: value for name, value in row.items() if name != "samples"} for row in rows]
    old = story.write(RunDir(tmp_path / "old"), story.events(), [(1, 0, plain)])
    (line,) = drawn(run)["Throughput in samples"]["series"]
    assert line["y"] == [*[16] * 24, 4, *[16] * 24, 4]
    assert "Throughput in samples" not in drawn(old)
    beside = View(beside={"other": report(run).steps, "earlier": report(old).steps})
    found = drawn(run, beside)
    assert [one["name"] for one in found["Throughput in samples"]["series"]] == ["new", "other"]
    assert [one["name"] for one in found["Throughput"]["series"]] == ["new", "other", "earlier"]
