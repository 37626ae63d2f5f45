"""A sweep's folder: its cells, and the log of their events, which a kill does not damage."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.errors import RunNotFound, StorageError
from raydist.records import Event
from raydist.run import sweep_directory
from raydist.run.sweep_directory import CellNote, SweepDir, SweepLog, resolve_sweep
from raydist.run.sweep_state import DONE, Stretch, fold


def cell(index: int) -> CellNote:
    return CellNote(index, f"c{index}", index, {"optim.lr": 0.1 * index}, 17, 100, 12800)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """A sweep of three cells without events."""
    folder = SweepDir(tmp_path / "a-sweep")
    folder.write("base: base.yaml\n", "name: x\n", [cell(i) for i in range(3)])
    return folder


def test_events_come_back_in_order_over_drivers(sweep: SweepDir) -> None:
    """Each driver writes its own segment, and readers see the flushed events, in order."""
    assert sweep.events() == []
    first = SweepLog(sweep)
    told = [first.event("began", cells=3), first.event("started", "c0", workers=2, gpus=0.0)]
    first.flush()
    first.event("finished", "c0")  # not flushed: its driver is killed
    second = SweepLog(sweep)
    told.append(second.event("started", "c0", workers=2, gpus=0.0))
    second.flush()
    told.append(second.event("finished", "c0", figures={"loss": 2.5}))
    second.flush()
    second.flush()
    assert sweep.events() == told
    assert sorted(sweep.storage.files("events")) == ["events/000001.jsonl", "events/000002.jsonl"]


def test_segments_are_sealed(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log is split into files of a bounded size, so that an object store rewrites at most one of them."""
    monkeypatch.setattr(sweep_directory, "SEGMENT_LINES", 10)
    log = SweepLog(sweep)
    for count in (3, 25, 2):
        told = [log.event("queued", f"c{i}") for i in range(count)]
        log.flush()
        assert sweep.events()[-count:] == told
    assert [len(sweep.storage.read(name).splitlines()) for name in sorted(sweep.storage.files("events"))] == [
        10,
        10,
        10,
    ]


WRITER = """
import sys
from raydist.run.sweep_directory import SweepDir, SweepLog
log, number = SweepLog(SweepDir(sys.argv[1])), 0
while True:
    log.event("queued", f"c{number}")
    log.flush()
    print(number, flush=True)
    number += 1
"""


def test_a_killed_driver_loses_nothing_that_was_flushed(sweep: SweepDir) -> None:
    """After SIGKILL each event whose flush returned is read, in order, and no incomplete line."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, sweep.uri], stdout=subprocess.PIPE, text=True, env=env
    ) as driver:
        assert driver.stdout is not None
        while int(driver.stdout.readline()) < 20:
            pass
        driver.send_signal(signal.SIGKILL)
        last = [20, *map(int, driver.stdout.read().split())][-1]
    told = [event.data["cell"] for event in sweep.events()]
    assert told == [f"c{i}" for i in range(len(told))]
    assert len(told) > last


def test_a_torn_line_is_left_out_and_a_damaged_one_named(sweep: SweepDir) -> None:
    """An incomplete last line is ignored; a damaged line before it raises StorageError with its number."""
    log = SweepLog(sweep)
    log.event("queued", "c0")
    log.flush()
    path = Path(sweep.uri) / "events/000001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"v": 1, "kind": "que')
    assert [e.kind for e in sweep.events()] == ["queued"]
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(StorageError, match=r"events/000001\.jsonl: line 1 is not an event"):
        sweep.events()


def test_a_full_disk_is_told_and_mended(sweep: SweepDir) -> None:
    """A refused write leaves no partial line, and its events are written once there is space."""
    log = SweepLog(sweep)
    log.event("queued", "c0")
    log.flush()
    size = (Path(sweep.uri) / "events/000001.jsonl").stat().st_size
    log.event("failed", "c0", cause="x" * 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [e.kind for e in sweep.events()] == ["queued"]
    assert (Path(sweep.uri) / "events/000001.jsonl").stat().st_size == size
    log.flush()
    assert [e.kind for e in sweep.events()] == ["queued", "failed"]


def test_cells_that_a_search_adds(sweep: SweepDir) -> None:
    """Cells that a search adds come after the first ones."""
    log = SweepLog(sweep)
    log.event("added", "c3", note=cell(3).to_dict())
    log.flush()
    assert [c.id for c in sweep.cells()] == ["c0", "c1", "c2", "c3"]
    assert sweep.cells()[3] == cell(3)
    assert sweep.run("c3").uri == f"{sweep.uri}/runs/c3"


def test_no_such_sweep(sweep: SweepDir) -> None:
    """RunNotFound for a sweep that does not exist, with the existing ones if there are any."""
    home = str(Path(sweep.uri).parent)
    assert resolve_sweep("a-sweep", home).uri == sweep.uri
    assert resolve_sweep(sweep.uri).uri == sweep.uri
    with pytest.raises(RunNotFound, match="a-sweep"):
        resolve_sweep("another", home)
    with pytest.raises(RunNotFound, match="no sweep was found"):
        resolve_sweep("a-sweep", f"{home}/a-sweep/runs")


def story(*events: tuple[str, dict[str, object]]) -> list[Event]:
    """Events of cell c, one a second."""
    return [Event(kind, float(at), {"cell": "c", **data}) for at, (kind, data) in enumerate(events)]


START = ("started", {"workers": 2, "gpus": 2.0})


def test_what_became_of_a_cell() -> None:
    """A cell fails, is retried with half the micro-batch, its driver is killed, it resumes, and finishes."""
    events = story(
        ("queued", {}), START, ("failed", {"cause": "out of memory", "final": False}),
        ("retried", {"because": "out of memory", "micro_batch": 4}), START, START, ("finished", {"figures": {"loss": 2.0}}),
    )  # fmt: skip
    states = [fold(events[:n]).get("c") for n in range(len(events) + 1)]
    assert [s and s.status for s in states] == [
        None,
        "waiting",
        "running",
        "waiting",
        "waiting",
        "running",
        "running",
        "finished",
    ]
    assert states[3] is not None
    assert (states[3].cause, states[3].failures) == ("out of memory", 1)
    last = states[-1]
    assert last is not None
    assert (last.micro_batch, last.cause, last.figures, last.failures) == (4, None, {"loss": 2.0}, 1)
    assert last.stretches == [Stretch(1, 2, 2.0, 2), Stretch(4, 2, 2.0, None), Stretch(5, 2, 2.0, 6)]


@pytest.mark.parametrize(
    ("kind", "data", "status"),
    [
        ("stopped", {"because": "rung"}, "stopped"),
        ("paused", {"because": "rung"}, "paused"),
        ("failed", {"cause": "rung", "final": True}, "failed"),
    ],
)
def test_how_a_cell_ends_early(kind: str, data: dict[str, object], status: str) -> None:
    """A cell that the scheduler stopped, or that failed for good, is done; one that was paused is not."""
    state = fold(story(START, (kind, data)))["c"]
    assert (state.status, state.cause) == (status, "rung")
    assert (state.status in DONE) is (status != "paused")


def test_an_end_told_twice_is_the_first() -> None:
    """A second end event does not change the time at which the cell's workers ended."""
    state = fold(story(START, ("failed", {"cause": "x"}), ("stopped", {"because": "the sweep ends"})))["c"]
    assert state.stretches == [Stretch(0, 2, 2.0, 1)]


def test_lineage_and_later_kinds() -> None:
    """Exploits are kept in order; an event kind of a later version changes nothing."""
    exploit = ("exploited", {"source": "d", "step": 5, "tokens": 640, "changes": {"optim.lr": [1, 2]}})
    state = fold(story(START, exploit, ("celebrated", {})))["c"]
    assert state.status == "running"
    assert state.lineage == [{"source": "d", "step": 5, "tokens": 640, "changes": {"optim.lr": [1, 2]}, "at": 1.0}]
