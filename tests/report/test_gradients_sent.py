"""What the report says of gradients that were not sent by torch's all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.report.html.run import render
from raydist.report.run_metrics import report
from raydist.run.directory import RunDir
from tests.report import story


def run_of(place: Path, told: list[Any], rows: list[dict[str, Any]]) -> RunDir:
    """A run of one attempt."""
    return story.write(RunDir(place), [story.begun(0, 1), *told], [(1, 0, rows)])


def test_outer_steps_are_counted_once(tmp_path: Path) -> None:
    """Every four steps, with a delay of one: a record has the last one that has arrived, also while the next is on its way."""
    rows = story.steps(1, 10, 1)
    for row in rows:
        step = row["step"]
        row["local_step"] = step % 4 not in (0, 1) or step == 1
        if step >= 5:  # started after step 4, and 8
            row["sync_seconds"], row["sync_bytes"] = (0.25, 1000) if step < 9 else (0.5, 1000)
    made = report(run_of(tmp_path / "run", [], rows))
    assert made.facts["gradients"] == {
        "chosen": None,
        "compressed": None,
        "outer": {"local_steps": 6, "syncs": 2, "bytes": 2000, "waited_seconds": 0.75},
    }
    assert (
        "6 local steps, 2 outer steps that arrived; for these rank 0 sent 2.0 KiB and waited 0.75 s."
        in render(made).decode()
    )


def test_compressed_bytes_and_the_choice(tmp_path: Path) -> None:
    """Sums over all steps; the choice of the newest attempt."""
    rows = story.steps(1, 4, 1)
    for row, error in zip(rows, (0.01, 0.02, 0.03, 0.05), strict=True):
        row.update(sent_bytes=1024, saved_bytes=3072, compression_error=error)
    way = {"compress": "int8", "topology": "torch", "ring": None, "bucket_mb": 1.0, "seconds": {}}
    told = [story.event(at, "comm_chosen", because=f"reason {at}", **way) for at in (1, 2)]
    made = report(run_of(tmp_path / "run", told, rows))
    found = made.facts["gradients"]
    assert found["chosen"] == {"compress": "int8", "topology": "torch", "bucket_mb": 1.0, "because": "reason 2"}
    assert found["compressed"] == {"bytes": 4096, "saved_bytes": 12288, "error": pytest.approx(0.025)}
    assert found["outer"] is None
    page = render(made).decode()
    assert "Chosen by trial passes: reason 2." in page
    assert "rank 0 sent 4.0 KiB, 25.0% of a ring in fp32; half of the steps lost more than 2.5%" in page
