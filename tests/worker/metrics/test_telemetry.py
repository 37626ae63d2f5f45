"""A rank's readings, written to the mailbox of its node."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raydist.ipc import mailbox
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event
from raydist.run.telemetry_schema import COLUMNS, PHASES
from raydist.worker.distributed import Rank
from raydist.worker.metrics.telemetry import Telemetry
from tests.training import alone


def until(run_uri: str, node: str, rank: int, step: int, **more_than: float) -> dict[str, Any]:
    """The mailbox row of a rank, once it has reached that step, and each of these columns has a larger value."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for row in mailbox.read(run_uri, node):
            above = all(row.get(name, 0.0) > value for name, value in more_than.items())
            if row["rank"] == rank and row["step"] >= step and above:
                return row
        time.sleep(0.01)
    raise AssertionError("it never came")


def watched(rank: Rank, run_uri: str) -> Any:
    """Two steps of one all-reduce each: the row after each, and the rows left at the end."""
    heartbeat, rows = Heartbeat(), []
    with Telemetry(run_uri, rank, 3, heartbeat, 0.1, lambda event: None) as telemetry:
        telemetry.sources.append(lambda: {"rss_bytes": 7, "allocated_bytes": None})
        for step in (1, 2):
            heartbeat.step(step)
            heartbeat.enter("backward")
            dist.all_reduce(torch.ones(1000))
            spent = rows[-1]["backward_seconds"] if rows else 0.0
            # A row may have been made in this step before its all-reduce.
            rows.append(
                until(run_uri, rank.node_ip, rank.rank, step, all_reduce_count=step - 1, backward_seconds=spent)
            )
    dist.barrier()
    return rows, [row["rank"] for row in mailbox.read(run_uri, rank.node_ip)]


def test_the_newest_reading_is_on_the_mailbox(ranks: Any, tmp_path: Path) -> None:
    """Each rank has a row with known columns; counters grow; at the end no row is left."""
    for rank, ((first, second), left) in enumerate(ranks.run(watched, 2, str(tmp_path))):
        assert {*first, *second} - set(mailbox.PRIVATE) <= COLUMNS.keys()
        assert Path(f"/proc/{first['pid']}").exists()
        assert (second["kind"], second["rank"], second["attempt"], second["step"]) == ("rank", rank, 3, 2)
        assert second["all_reduce_bytes"] == 8000
        assert second["all_reduce_count"] == 2
        assert second["rss_bytes"] == 7
        assert "allocated_bytes" not in second
        assert second["backward_seconds"] > first["backward_seconds"] > 0
        assert {f"{phase}_seconds" for phase in PHASES} <= second.keys()
        assert left == []
    assert not mailbox.folder(str(tmp_path)).exists()


def test_the_first_row_is_there_before_the_first_interval(tmp_path: Path) -> None:
    """Totals are judged by what they gain: without this row, what happens in the first interval would not count."""
    with Telemetry(str(tmp_path), alone(), 1, Heartbeat(), 3600.0, lambda event: None):
        row = until(str(tmp_path), alone().node_ip, 0, 0)
    assert row["held_seconds"] == row["forward_seconds"] == 0.0


def test_a_mailbox_that_cannot_be_written_costs_a_note(tmp_path: Path) -> None:
    """One note, and no other effect."""
    told: list[Event] = []
    heard = threading.Event()
    place = mailbox.folder(str(tmp_path))
    place.symlink_to(tmp_path)
    try:
        with Telemetry(str(tmp_path), alone(), 1, Heartbeat(), 0.1, lambda e: (told.append(e), heard.set())[0]):
            assert heard.wait(240)
    finally:
        place.unlink()
    assert [e.kind for e in told] == ["note"]
    assert "not this user's folder" in told[0].data["text"]


def broken(rank: Rank, run_uri: str) -> Any:
    """Three all-reduces; the time of the second one cannot be taken. Returns the result, the notes and the count."""
    told: list[Event] = []
    heard = threading.Event()
    with Telemetry(run_uri, rank, 1, Heartbeat(), 0.1, lambda e: (told.append(e), heard.set())[0]) as telemetry:
        assert telemetry._comm is not None
        x = torch.ones(10)
        dist.all_reduce(x)
        telemetry._comm._clocks["cpu"].now = lambda: 1 / 0  # type: ignore[method-assign]
        dist.all_reduce(x)
        dist.all_reduce(x)
        assert heard.wait(240)
        count = telemetry.row()["all_reduce_count"]
    return x[0].item(), [e.data["text"] for e in told], count


def test_a_meter_that_breaks_costs_a_note(ranks: Any, tmp_path: Path) -> None:
    """The collectives give the same results, and counting stops."""
    for rank, (value, told, count) in enumerate(ranks.run(broken, 2, str(tmp_path))):
        assert value == 8.0
        assert told == [f"rank {rank} has stopped counting communication: ZeroDivisionError: division by zero"]
        assert count == 1


def test_nothing_is_measured_unless_it_is_asked_for(ranks: Any, tmp_path: Path) -> None:
    """With `observe.interval_s: null` torch is unchanged."""
    assert ranks.run(unwatched, 2, str(tmp_path)) == [(True, 0), (True, 0)]


def unwatched(rank: Rank, run_uri: str) -> Any:
    """Whether torch's own wait is in place, and how many telemetry threads run."""
    original = dist.Work.wait
    with Telemetry(run_uri, rank, 1, Heartbeat(), None, lambda event: None) as telemetry:
        with telemetry.around_backward(0):
            dist.all_reduce(torch.ones(1))
        named = [t.name for t in threading.enumerate() if t.name == "raydist-telemetry"]
        return dist.Work.wait is original, len(named)


def test_its_thread_uses_the_rank_s_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for events. A new thread has the first GPU, where such a call would take memory for each rank of the node."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    telemetry = Telemetry(str(tmp_path), alone(), 1, Heartbeat(), 3600.0, lambda event: None)
    telemetry._rank = replace(alone(), device=torch.device("cuda", 1))
    with telemetry:
        pass
    assert used == [torch.device("cuda", 1)]
