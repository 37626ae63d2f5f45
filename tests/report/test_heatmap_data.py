"""Readings of ranks over a run, and the grids that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.report import heatmap_data, telemetry_reader
from raydist.report.run_metrics import report
from raydist.report.telemetry_reader import COLUMNS, Readings, gather
from raydist.run.directory import RunDir
from raydist.run.telemetry_log import parts, table
from tests.report import story
from tests.report.story import GIB, T, reading


def gathered(rows: list[dict[str, Any]], seconds: float = 10.0) -> Readings:
    """The readings, from segments of seven rows."""
    whole = table(rows).select(COLUMNS)
    return gather([whole.slice(i, 7) for i in range(0, whole.num_rows, 7)], seconds, 2)


def test_rows_of_ranks_only_in_their_order() -> None:
    """Readings are sorted, whatever the order of the rows; rows of nodes and GPUs are left out."""
    rows = [reading(at, rank, 1, at, at) for at in (3, 1, 2) for rank in (1, 0)]
    found = gathered([*rows, {"at": T, "kind": "node", "node": "n", "host": "h"}])
    assert [(track.rank, track.host, track.at.tolist()) for track in found.tracks] == [
        (rank, f"h{rank}", [T + 1, T + 2, T + 3]) for rank in (0, 1)
    ]
    assert gathered([]).tracks == []


def test_a_long_run_keeps_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters stay exact; of memory the maximum is kept, even if it is a single reading."""
    monkeypatch.setattr(telemetry_reader, "KEPT", 40)
    spike = {"rss_bytes": 9 * GIB}
    rows = [reading(at, rank, 1, at, at, **(spike if at == 501 else {})) for at in range(1, 1001) for rank in (0, 1)]
    found = gathered(rows, seconds=1000.0)
    assert 38 <= sum(len(track.at) for track in found.tracks) <= 44
    for track in found.tracks:
        assert track.step[-1] == 1000
        assert track.counter("data")[-1] == pytest.approx(100.0)
        assert track.values["rss_bytes"].max() == 9 * GIB
    grown = found.grown(1, 1, 1, 1000)
    assert grown is not None
    assert (grown["until"], grown["compute"], grown["exposed"]) == pytest.approx((1000, 700.0, 200.0))


def test_what_grew_in_some_steps_of_an_attempt() -> None:
    """Between two steps; from the attempt's first step on; not past the last reading."""
    found = gathered([reading(at, rank, 2, 50 + at, at) for at in range(1, 21) for rank in (0, 1)])
    assert found.grown(2, 51, 61, 65)["data"] == pytest.approx(0.5)  # type: ignore[index]
    assert found.grown(2, 51, 51, 65)["compute"] == pytest.approx(0.7 * 15)  # type: ignore[index]
    assert found.grown(2, 51, 61, 99)["until"] == 70  # type: ignore[index]
    assert found.grown(2, 51, 71, 99) is None
    assert found.grown(1, 1, 1, 99) is None


def test_memory_is_of_the_gpu_where_there_is_one() -> None:
    """Otherwise it is the memory of torch's allocator, and without that the process's."""
    rows = [reading(1, 0, 1, 1, 1), reading(2, 0, 1, 2, 2)]
    assert gathered(rows).memory() == "rss_bytes"
    rows[1]["reserved_bytes"] = 5
    assert gathered(rows).memory() == "reserved_bytes"
    rows[0]["gpu_process_bytes"] = 7
    assert gathered(rows).memory() == "gpu_process_bytes"


def test_memory_over_time(tmp_path: Path) -> None:
    """Each cell has the maximum; cells without readings are empty: before the first step, and during recovery."""
    name, grid = report(story.story(RunDir(tmp_path / "a"))).memory  # type: ignore[misc]
    assert (name, grid.values.shape[0], grid.rows, grid.edges[0], grid.edges[-1]) == (
        "rss_bytes",
        2,
        ["0", "1"],
        0.0,
        253.0,
    )
    middle = (grid.edges[:-1] + grid.edges[1:]) / 2
    assert np.isnan(grid.values[:, middle < 9]).all()
    assert np.isnan(grid.values[:, (middle > 96) & (middle < 101)]).all()
    known = grid.values[:, (middle > 12) & (middle < 58)]
    assert np.isfinite(known).all()
    assert (known[0] == GIB).all()
    assert np.nanmax(grid.values) == GIB + (200 << 20)


def test_a_slow_rank_is_seen(tmp_path: Path) -> None:
    """0.8 s and 0.6 s of compute per step; of two ranks the faster one is the reference."""
    found = report(story.story(RunDir(tmp_path / "a")))
    assert found.slowness is not None
    inside = found.slowness.values[:, 1:-1]
    assert inside[0] == pytest.approx(1.0)
    assert inside[1] == pytest.approx(0.8 / 0.6)


def test_steps_trained_twice_show_the_newest_attempt() -> None:
    """Rank 1 was slow only in the attempt that failed."""
    rows = [reading(at, rank, 1, at, at) for at in range(1, 101) for rank in (0, 1)]
    rows += [{**reading(200 + at, 0, 2, at, at), "rank": rank} for at in range(1, 101) for rank in (0, 1)]
    grid = heatmap_data.slowness(gathered(rows), 100)
    assert grid is not None
    assert np.nanmax(grid.values) == pytest.approx(1.0)


def test_shares_over_time() -> None:
    """Of each second 0.6 s of rank 0 are compute, 0.3 s exposed, 0.1 s data; rank 1 does nothing from second 51 on. Where readings
    of two attempts have a gap, cells are empty."""
    rows = [reading(at, rank, 1, at, min(at, 50) if rank else at) for at in range(101) for rank in (0, 1)]
    rows += [reading(200 + at, rank, 2, 100 + at, at) for at in range(101) for rank in (0, 1)]
    found = heatmap_data.shares(gathered(rows, 300.0), T, T + 300)
    assert found is not None
    for name, share in (("compute", (0.6, 0.8)), ("exposed", (0.3, 0.1)), ("data", (0.1, 0.1))):
        grid = found[name]
        middle = (grid.edges[:-1] + grid.edges[1:]) / 2
        assert (grid.rows, grid.edges[-1], len(middle)) == (["0", "1"], 300.0, 100)
        assert np.isnan(grid.values[:, (middle > 102) & (middle < 198)]).all()
        trained = (middle < 48) | (middle > 202)
        for rank in (0, 1):
            assert grid.values[rank, trained] == pytest.approx(share[rank])
        later = (middle > 54) & (middle < 98)
        assert grid.values[0, later] == pytest.approx(share[0])
        assert grid.values[1, later] == pytest.approx(0.0)
    assert heatmap_data.shares(gathered(rows[:2]), T, T + 300) is None, "one reading of a rank"
    assert heatmap_data.shares(gathered(rows[:4]), T, T + 300) is None, "two, which cover less than half of a cell"
    assert heatmap_data.shares(gathered([]), 0.0, 9.0) is None


def test_a_thousand_ranks_share_rows() -> None:
    """The highest value of a row's ranks is shown, and the row names these ranks."""
    values = np.ones((1000, 3))
    values[777, 1] = 5.0
    grid = heatmap_data.Grid(np.arange(4.0), values, [str(rank) for rank in range(1000)]).grouped()
    assert (grid.group, grid.values.shape, grid.rows[0], grid.rows[-1]) == (8, (125, 3), "0-7", "992-999")
    assert np.argwhere(grid.values == 5.0).tolist() == [[97, 1]]
    assert grid.rows[97] == "776-783"


def test_one_rank_has_nobody_to_be_slower_than() -> None:
    """Without other ranks, steps or readings there is no grid."""
    rows = [reading(at, 0, 1, at, at) for at in range(1, 9)]
    assert heatmap_data.slowness(gathered(rows), 8) is None
    assert heatmap_data.slowness(gathered([]), 8) is None
    assert heatmap_data.memory(gathered([]), 0.0, 9.0) is None


def test_segments_come_one_at_a_time(tmp_path: Path) -> None:
    """`telemetry_log.parts` returns the rows of `read_samples`, with the requested columns."""
    run = story.story(RunDir(tmp_path / "a"))
    (part,) = parts(run, ("rank", "at"))
    assert (part.column_names, part.num_rows) == (["rank", "at"], len(story.readings()))
