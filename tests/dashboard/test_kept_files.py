"""What the dashboard reads again of a folder that changes: the bytes are counted where they leave the file system."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raydist.dashboard import kept_files, run_page
from raydist.dashboard.kept_files import SETTLED_S, KeptFiles, KeptStorage
from raydist.records import Event
from raydist.run.directory import EVENTS, METRICS, SAMPLES, RunDir
from raydist.run.log import read_events, read_steps
from raydist.run.log_writer import RunLog
from raydist.run.telemetry_log import TelemetryLog
from raydist.storage import Storage
from tests.report import story


class Counted:
    """A file system, or a file of one, and the bytes that are read of each file."""

    def __init__(self, real: Any, read: Counter[str], name: str = "") -> None:
        self._real, self._read, self._name = real, read, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def open_input_stream(self, path: str, **options: Any) -> Counted:
        return Counted(self._real.open_input_stream(path, **options), self._read, path)

    def open_input_file(self, path: str) -> Counted:
        return Counted(self._real.open_input_file(path), self._read, path)

    def read(self, *most: int) -> bytes:
        data: bytes = self._real.read(*most)
        self._read[Path(self._name).name] += len(data)
        return data

    def read_buffer(self, *most: int) -> Any:
        return pa.py_buffer(self.read(*most))

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._real.close()


def watched(folder: Path, most: int = kept_files.MOST_BYTES) -> tuple[RunDir, Counter[str]]:
    """The run of that folder as the dashboard reads it, and the bytes that are read of each of its files."""
    place, read = Storage(folder), Counter[str]()
    place.fs = Counted(place.fs, read)
    return RunDir(KeptStorage(place, KeptFiles(most))), read


def age(run: RunDir, seconds: float = 2 * SETTLED_S) -> dict[str, int]:
    """Makes all segments that old; returns their sizes."""
    found = {**run.storage.files(METRICS), **run.storage.files(SAMPLES)}
    assert run.storage.local is not None
    for name in found:
        os.utime(run.storage.local / name, (time.time() - seconds,) * 2)
    return {Path(name).name: size for name, size in found.items()}


def seen(run: RunDir) -> dict[str, Any]:
    """What a page shows, without the times at which it was made."""
    found = run_page.read(run)
    now = {name: value for name, value in found.now.items() if name != "at"}
    facts = {name: value for name, value in found.report.facts.items() if name != "made_at"}
    return {"facts": facts, "now": now, "steps": found.report.steps.to_pylist(), "attempt": found.attempt}


def test_only_what_has_changed_is_read_again(tmp_path: Path) -> None:
    """Each segment once, then none; then what a writer has added, of events their end. The page is that of a folder read whole."""
    plain = story.story(RunDir(tmp_path / "run"))
    sizes = age(plain)
    run, read = watched(tmp_path / "run")
    first = seen(run)
    assert {name: read[name] for name in sizes} == sizes
    read.clear()
    assert repr(seen(run)) == repr(first)
    assert not read.keys() & sizes.keys()
    # Events are many, so that their end is less than they are.
    log, samples = RunLog(plain), TelemetryLog(plain)
    for number in range(1500):
        log.event(Event("note", story.T + 254 + number, {"what": f"{number} of a user"}))
    log.close()
    seen(run)
    read.clear()
    before = plain.storage.size(EVENTS) or 0
    log = RunLog(plain)
    log.attempt(3, 200)
    log.steps(story.steps(201, 220, 3))
    log.event(story.event(600, "eval", step=200, loss=1.5, tokens=64))
    log.close()
    samples.add([story.reading(610, 0, 3, 201, 1)])
    samples.flush()
    again = seen(run)
    assert again["facts"]["steps"] == 220
    assert again["facts"]["eval_loss"] == 1.5
    assert repr(again) == repr(seen(plain))
    new = {**plain.storage.files(METRICS), **plain.storage.files(SAMPLES)}
    assert read.keys() & sizes.keys() == set()
    assert {name for name in read if name.endswith(".parquet")} == {Path(name).name for name in new} - sizes.keys()
    added, times = (plain.storage.size(EVENTS) or 0) - before, 5
    assert 0 < read[EVENTS] < times * kept_files._OVERLAP + added < before


def test_what_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """Events that were repaired, a segment of the same size, and a folder with another run: as they are now. A segment that has
    changed in the last minute is read each time, because object stores tell times in whole seconds."""
    plain = story.story(RunDir(tmp_path / "run"))
    age(plain, 0.0)
    run, read = watched(tmp_path / "run")
    for _ in range(2):
        read.clear()
        read_steps(run)
        assert read
    age(plain)
    read_steps(run)
    read_events(run)
    path = next(tmp_path.glob(f"run/{METRICS}/*-000001.parquet"))
    damaged = bytearray(path.read_bytes())
    path.write_bytes(bytes(damaged).replace(b"\x00", b"\x01", 1))
    os.utime(path, (time.time() - 3 * SETTLED_S,) * 2)
    read.clear()
    run.storage.files(METRICS)
    assert run.storage.read(f"{METRICS}/{path.name}") == path.read_bytes() != damaged
    for text in (b'{"half', b"", (tmp_path / f"run/{EVENTS}").read_bytes()[::-1]):
        (tmp_path / f"run/{EVENTS}").write_bytes(text)
        assert run.storage.read(EVENTS) == text
    (tmp_path / f"run/{EVENTS}").unlink()
    assert read_events(run) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept stays while it is used; what was not used for a while makes room; what is larger than all is not kept."""
    kept = KeptFiles(10)
    for name in "abc":
        kept.keep(("run", name), b"1234", 1)
    assert [kept.get(("run", name), 1) for name in "abc"] == [b"1234", b"1234", None]
    assert kept.get(("run", "a"), 2) is None
    assert kept.get(("other", "a"), 1) is None
    kept.keep(("run", "a"), b"12345678", 2)
    assert [kept.get(("run", name), 2) for name in "ab"] == [None, None]
    monkeypatch.setattr(kept_files, "UNUSED_S", 0.0)
    kept.keep(("run", "a"), b"12345678", 2)
    assert [kept.get(("run", "a"), 2), kept.get(("run", "b"), 1)] == [b"12345678", None]
    kept.keep(("run", "d"), b"12345678901", 1)
    assert kept.get(("run", "d"), 1) is None
