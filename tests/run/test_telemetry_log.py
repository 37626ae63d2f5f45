"""Telemetry on storage: rows are read back, old ones are thinned, and a kill neither loses nor duplicates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.errors import StorageError
from raydist.run import telemetry_log
from raydist.run.directory import SAMPLES, RunDir
from raydist.run.telemetry_log import TelemetryLog, read_samples, thin
from raydist.run.telemetry_schema import COLUMNS, OPS, PHASES, is_total


def row(at: float, rank: int = 0, **values: Any) -> dict[str, Any]:
    """A reading of a rank."""
    return {"at": at, "kind": "rank", "host": "h", "node": "10.0.0.1", "rank": rank, "attempt": 1, **values}


def names(run: RunDir) -> list[str]:
    """The names of the segments."""
    return [name.rsplit("/", 1)[-1] for name in run.storage.files(SAMPLES)]


def test_all_rows_are_read_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all segments and drivers are read in order of time, also while they are written; missing columns are null."""
    monkeypatch.setattr(telemetry_log, "SEGMENT_ROWS", 4)
    monkeypatch.setattr(telemetry_log, "RAW_S", 1e12)
    run = RunDir(tmp_path / "a")
    log = TelemetryLog(run)
    for at in range(10):
        log.add([row(float(at), rank, step=at) for rank in (0, 1)])
        log.flush()
        assert read_samples(run, ["step"]).num_rows == 2 * at + 2
    again = TelemetryLog(run)
    again.add([row(10.0), {"at": 10.5, "kind": "node", "node": "10.0.0.1", "load": 0.5}])
    again.flush()
    again.flush()
    found = read_samples(run)
    assert found.column_names == list(COLUMNS)
    assert found["at"].to_pylist() == [*sorted([float(at) for at in range(10)] * 2), 10.0, 10.5]
    assert found["load"].to_pylist() == [None] * 21 + [0.5]
    assert len(names(run)) == 6
    assert read_samples(run, ["at"], since=8.0)["at"].to_pylist() == [8.0, 8.0, 9.0, 9.0, 10.0, 10.5]
    (run.storage.local / SAMPLES / names(run)[0]).write_bytes(b"not read")
    assert read_samples(run, ["at"], since=9.5).num_rows == 2


def test_what_storage_refuses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused rows are kept up to a limit: then the oldest are dropped, and the rest is written once storage works again."""
    monkeypatch.setattr(telemetry_log, "_BUFFERED", 5)
    (tmp_path / "a").mkdir()
    log = TelemetryLog(RunDir(tmp_path / "a"))
    (tmp_path / "a" / "samples").write_text("in the way")
    for at in range(8):
        log.add([row(float(at))])
        with pytest.raises(StorageError):
            log.flush()
    (tmp_path / "a" / "samples").unlink()
    log.flush()
    assert read_samples(RunDir(tmp_path / "a"), ["at"])["at"].to_pylist() == [3.0, 4.0, 5.0, 6.0, 7.0]


def segments(run: RunDir, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Writes `count` raw segments of a minute: two ranks, one row a second each."""
    monkeypatch.setattr(telemetry_log, "SEGMENT_ROWS", 1)
    monkeypatch.setattr(telemetry_log, "RAW_S", 1e12)
    log = TelemetryLog(run)
    for minute in range(count):
        seconds = range(60 * minute, 60 * minute + 60)
        log.add(
            row(float(s), rank, step=s, all_reduce_bytes=100 * s, rss_bytes=1000 + s % 2, peak_bytes=s % 7)
            for s in seconds
            for rank in (0, 1)
        )
        log.flush()


def test_old_rows_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows become one a minute and subject: of counters the last value, of peaks the maximum, of others the mean; new rows
    stay."""
    run = RunDir(tmp_path / "a")
    segments(run, monkeypatch, 5)
    thin(run, before=180.0, below=5)
    assert names(run) == ["raw-000000003.parquet", "raw-000000004.parquet", "thin-000000000-000000002.parquet"]
    found = read_samples(run, ["at", "rank", "step", "all_reduce_bytes", "rss_bytes", "peak_bytes"]).to_pylist()
    assert len(found) == 3 * 2 + 2 * 120
    old = sorted((r for r in found if r["at"] < 180), key=lambda r: (r["rank"], r["at"]))
    assert [r["at"] for r in old] == [59.0, 119.0, 179.0] * 2
    assert [r["all_reduce_bytes"] for r in old] == [5900, 11900, 17900] * 2
    assert [r["step"] for r in old] == [59, 119, 179] * 2
    assert {r["rss_bytes"] for r in old} <= {1000, 1001}
    assert {r["peak_bytes"] for r in old} == {6}
    thin(run, before=1000.0, below=4)
    assert names(run)[0] == "raw-000000004.parquet", "the open segment is not touched"


def test_several_writers_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer numbers and thins its own segments; a reader sees the rows of all, also of a slow one."""
    run = RunDir(tmp_path / "a")
    segments(run, monkeypatch, 2)
    monkeypatch.setattr(telemetry_log, "SEGMENT_ROWS", 3)
    other = TelemetryLog(run, 7)
    for at in range(6):
        other.add([row(float(at), rank=9)])
        other.flush()
    assert names(run)[:2] == ["raw-000000000.7.parquet", "raw-000000000.parquet"]
    assert read_samples(run, ["at"], since=5.0)["at"].to_pylist()[:3] == [5.0] * 3
    thin(run, before=1000.0, below=2, writer=7)
    assert names(run) == ["raw-000000000.parquet", "raw-000000001.parquet", "thin-000000000-000000001.7.parquet"]
    assert read_samples(run, ["at"]).num_rows == 241
    assert TelemetryLog(run, 7)._next == 2


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_death_while_thinning_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    """If it is killed after the thin segment was written, and some raw ones deleted, each row is read once; the next call deletes
    the rest."""
    run = RunDir(tmp_path / "a")
    segments(run, monkeypatch, 3)
    deleted: list[str] = []

    class Killed(BaseException):
        """Not an Exception, so that no code catches it."""

    delete = type(run.storage).delete

    def dies(storage: Any, name: str) -> None:
        if len(deleted) == gone:
            raise Killed
        deleted.append(name)
        delete(storage, name)

    with monkeypatch.context() as patched:
        patched.setattr(type(run.storage), "delete", dies)
        with pytest.raises(Killed):
            thin(run, before=1000.0, below=3)
    assert read_samples(run, ["at"]).num_rows == 6
    thin(run, before=1000.0, below=3)
    assert names(run) == ["thin-000000000-000000002.parquet"]
    assert read_samples(run, ["at"]).num_rows == 6
    assert TelemetryLog(run)._next == 3


def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    """StorageError with the segment's name."""
    run = RunDir(tmp_path / "a")
    log = TelemetryLog(run)
    log.add([row(1.0)])
    log.flush()
    Path(run.uri, SAMPLES, names(run)[0]).write_bytes(b"no parquet")
    with pytest.raises(StorageError, match=r"raw-000000000\.parquet"):
        read_samples(run)
    run = RunDir(tmp_path / "pages")
    log = TelemetryLog(run)
    log.add([row(1.0)])
    log.flush()
    path = tmp_path / "pages" / SAMPLES / names(run)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])  # the header of a page, for which pyarrow raises an OSError
    with pytest.raises(StorageError, match=r"cannot read .*raw-000000000\.parquet"):
        read_samples(run)


def test_names_can_be_shown(tmp_path: Path) -> None:
    """Without control characters, which another program may have written."""
    log = TelemetryLog(RunDir(tmp_path))
    log.add([row(1.0), {**row(2.0), "host": "a\x1b]0;title\x07b"}])
    log.flush()
    assert read_samples(RunDir(tmp_path))["host"].to_pylist() == ["h", "ab"]


def test_counters_say_so() -> None:
    """`is_total` is true for counters and false for other columns."""
    counters = {name for name in COLUMNS if is_total(name)}
    ranks = {f"{op}_{what}" for op in OPS for what in ("count", "bytes", "wire_bytes", "seconds", "exposed_seconds")}
    assert ranks | {f"{phase}_seconds" for phase in PHASES} | {"nic_in_bytes", "cpu_seconds"} <= counters
    assert counters.isdisjoint({"rss_bytes", "memory_total_bytes", "gpu_memory_total_bytes", "load", "at", "step"})
