"""raydist.run.log: written rows and events are read back, each step once, also after a kill and while being written."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.errors import StorageError
from raydist.records import Event, StepRecord
from raydist.run import log as run_log
from raydist.run.directory import EVENTS, METRICS, RunDir
from raydist.run.log import (
    FIELDS,
    SCHEMA,
    SINGLE,
    last_attempt,
    merge,
    newest_loads,
    read_events,
    read_segments,
    read_steps,
)
from raydist.run.log_writer import COMBINED_BYTES, SEGMENT_NUMBERS, SEGMENT_ROWS, RunLog


def record(step: int, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    row = StepRecord(
        step, 1 / step, 1e-3, 0.5, 4096, 0.25, 0.01, 2, attempt, f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"
    )
    return {**row.to_dict(), **changes}


def written(run: RunDir) -> list[tuple[int, int]]:
    """(step, attempt) of the rows that are read."""
    table = read_steps(run)
    return list(zip(table["step"].to_pylist(), table["attempt"].to_pylist(), strict=True))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a-run")


def test_schema_is_that_of_step_records(run: RunDir) -> None:
    """The columns are StepRecord's fields, in order, each with a description; the file has a schema version."""
    assert list(FIELDS) == [f.name for f in dataclasses.fields(StepRecord)]
    log = RunLog(run)
    log.steps([record(1)])
    log.close()
    schema = pq.read_schema(run.storage.path(f"{METRICS}/attempt-0001-000000.parquet"))
    assert schema.metadata[b"raydist.schema_version"] == str(run_log.SCHEMA_VERSION).encode()
    assert all(schema.field(name).metadata[b"description"] for name in FIELDS)
    assert read_steps(run).schema.equals(SCHEMA)


@settings(max_examples=20, deadline=None)
@given(
    losses=st.lists(st.floats(width=64), min_size=1, max_size=20),
    tokens=st.integers(0, 2**62),
    digest=st.integers(0, 2**64 - 1),
)
def test_floats_and_hashes_come_back_bit_for_bit(
    losses: list[float], tokens: int, digest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A float64 is read back with the same 64 bits (subnormals, -0.0 and inf too), and so are large counts and hashes."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    log = RunLog(run)
    log.steps([record(i, loss=x, tokens=tokens, samples_hash=f"{digest:016x}") for i, x in enumerate(losses, 1)])
    log.close()
    table = read_steps(run)
    back = table["loss"].to_pylist()
    assert [math.isnan(x) for x in back] == [math.isnan(x) for x in losses]
    same = [
        (struct.pack("<d", a), struct.pack("<d", b)) for a, b in zip(back, losses, strict=True) if not math.isnan(b)
    ]
    assert all(a == b for a, b in same)
    assert set(table["tokens"].to_pylist()) == {tokens}
    assert set(table["samples_hash"].to_pylist()) == {f"{digest:016x}"}


def test_what_is_not_known_is_null(run: RunDir) -> None:
    """A noise scale that is None, or that a row of an earlier version lacks, is None; others are the same bits. A segment without
    the column gives None too, also when it is merged with newer ones."""
    log = RunLog(run)
    scales = [None, 1 / 3, None, 0.0, *(None if s % 3 else s / 7 for s in range(20))]
    rows = [record(s, grad_noise_scale=scale) for s, scale in enumerate(scales, 1)]
    del rows[2]["grad_noise_scale"]
    log.steps(rows)
    log.close()
    assert read_steps(run)["grad_noise_scale"].to_pylist() == scales
    path = run.storage.path(f"{METRICS}/attempt-0001-000000.parquet")
    pq.write_table(pq.read_table(path).drop_columns("grad_noise_scale"), path)
    assert read_steps(run)["grad_noise_scale"].to_pylist() == [None] * len(scales)
    log = RunLog(run)
    log.attempt(2, 10)
    log.steps([record(11, 2, grad_noise_scale=8.0)])
    log.close()
    assert read_steps(run)["grad_noise_scale"].to_pylist() == [None] * 10 + [8.0]
    assert read_steps(run).schema.equals(SCHEMA)


def test_figures_of_experts(run: RunDir) -> None:
    """Each in its column's type; null in steps without experts."""
    log = RunLog(run)
    log.steps([record(1), record(2, expert_imbalance=1.5, exchanged_bytes=2**53 + 1), record(3, exchanged_bytes=0)])
    log.close()
    assert read_steps(run)["expert_imbalance"].to_pylist() == [None, 1.5, None]
    assert read_steps(run)["exchanged_bytes"].to_pylist() == [None, 2**53 + 1, 0]


def test_loads_and_biases_of_experts(run: RunDir) -> None:
    """Lists of lists of any lengths, with the same bits; null in steps without. Also merged with rows that a restart replaced and
    with a segment of a version without these columns. A load that is no whole number is refused, as is one of more than 32 bits."""
    loads = [None, [[3, 0, 2**31 - 1], [7]], [[], [1, 2]], None, [[0] * 3, [5]]]
    bias = [None, [[0.5, -1 / 3, 1e-3], []], None, None, [[0.0] * 3, []]]
    made = [record(s, expert_loads=a, expert_bias=b) for s, (a, b) in enumerate(zip(loads, bias, strict=True), 1)]
    log = RunLog(run)
    log.steps(made)
    for wrong, kind in (([[1.5]], TypeError), ([[2**31]], OverflowError), ([3], TypeError)):
        with pytest.raises(kind):
            log.steps([record(6, expert_loads=wrong)])
    log.flush()
    single = np.float32(-1 / 3)
    bias[1] = [[0.5, float(single), float(np.float32(1e-3))], []]
    assert read_steps(run)["expert_loads"].to_pylist() == loads
    assert read_steps(run)["expert_bias"].to_pylist() == bias
    assert newest_loads(run) == (5, loads[4])
    log.attempt(2, 3)
    log.steps([record(4, 2, expert_loads=loads[1])])
    log.close()
    assert read_steps(run)["expert_loads"].to_pylist() == [*loads[:3], loads[1]]
    path = run.storage.path(f"{METRICS}/attempt-0001-000000.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["expert_loads", "expert_bias"]), path)
    assert read_steps(run)["expert_loads"].to_pylist() == [None] * 3 + [loads[1]]
    assert read_steps(run).schema.equals(SCHEMA)
    assert read_steps(run, SINGLE).schema.names == list(SINGLE)
    assert read_steps(run, ["loss"]).to_pylist() == [{"step": s, "loss": 1 / s} for s in range(1, 5)]


def test_many_experts_end_a_segment(run: RunDir) -> None:
    """Whatever the pushes: a segment of SEGMENT_NUMBERS loads and biases is complete, and steps without them count by rows."""
    wide = [list(range(SEGMENT_NUMBERS // 8))] * 2
    rows = [record(s, expert_loads=wide if s % 2 else None) for s in range(1, 22)]
    log = RunLog(run)
    log.steps(rows[:3])
    log.steps(rows[3:])
    log.close()
    assert [s.rows.num_rows for s in read_segments(run, SINGLE)] == [7, 8, 6]
    assert [s.rows.num_rows for s in read_segments(run, ("expert_loads",), newest=2)] == [8, 6]
    assert read_steps(run)["expert_loads"].to_pylist() == [row["expert_loads"] for row in rows]
    assert newest_loads(run) == (21, wide)


def test_local_steps_are_booleans(run: RunDir) -> None:
    """Null without outer steps."""
    values = [None, True, False, *(s % 3 == 0 for s in range(10))]
    log = RunLog(run)
    log.steps([record(s, local_step=value) for s, value in enumerate(values, 1)])
    log.close()
    assert read_steps(run)["local_step"].to_pylist() == values


def test_a_new_run_has_nothing(run: RunDir) -> None:
    """A run without files gives empty results with the right schema."""
    assert read_steps(run).schema.equals(SCHEMA)
    assert (read_steps(run).num_rows, read_events(run), read_segments(run), last_attempt(run)) == (0, [], [], 0)


def test_restart_replaces_rows(run: RunDir) -> None:
    """Attempt 2 resumes from step 50 of 70: rows 51 to 70 are void at once, and are replaced by those of attempt 2."""
    log = RunLog(run)
    log.attempt(1, 0)
    log.steps(record(s) for s in range(1, 71))
    log.flush()
    log.attempt(2, 50)
    log.flush()
    assert written(run) == [(s, 1) for s in range(1, 51)]
    log.steps(record(s, 2) for s in range(51, 56))
    log.close()
    assert written(run) == [(s, 1) for s in range(1, 51)] + [(s, 2) for s in range(51, 56)]


def test_fallback_below_the_announced_step(run: RunDir) -> None:
    """The driver announced step 50, but the worker resumed from 20: this is known from a later announcement or from the rows."""
    log = RunLog(run)
    log.steps(record(s) for s in range(1, 71))
    log.attempt(2, 50)
    log.attempt(2, 20)
    log.steps([record(21, 2)])
    log.attempt(2, 50)
    log.attempt(3, 60)
    log.steps([record(11, 3)])
    log.close()
    assert written(run) == [(s, 1) for s in range(1, 11)] + [(11, 3)]


def test_announced_too_low_is_mended_before_the_first_step(run: RunDir) -> None:
    """A resume step that was announced too low, even if stored, loses no row if it is corrected before the first step."""
    log = RunLog(run)
    log.steps(record(s) for s in range(1, 6))
    log.attempt(2, 0)
    log.flush()
    log.attempt(2, 5)
    log.steps([record(6, 2)])
    log.close()
    assert written(run) == [(s, 1) for s in range(1, 6)] + [(6, 2)]


def test_late_and_repeated_rows_are_dropped(run: RunDir) -> None:
    """A push that is repeated, also out of order, and one of a previous attempt, change nothing."""
    log = RunLog(run)
    log.attempt(1, 0)
    first = [record(s) for s in range(1, 4)]
    assert [r["step"] for r in log.steps([*first, record(4)])] == [1, 2, 3, 4]
    assert log.steps(first) == []
    log.attempt(2, 3)
    log.steps([record(4, 2)])
    assert log.steps([record(5, 1)]) == []
    log.close()
    assert written(run) == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_bad_record_leaves_the_log_as_it_was(run: RunDir) -> None:
    """A push with a record that lacks a field or has a wrong type is refused as a whole; nothing else is lost."""
    log = RunLog(run)
    log.steps([record(1)])
    with pytest.raises(KeyError):
        log.steps([record(2), {"step": 3, "attempt": 1}])
    with pytest.raises(TypeError):
        log.steps([record(2), record(3, step=3.5)])
    log.steps([record(2)])
    log.close()
    assert written(run) == [(1, 1), (2, 1)]


def test_two_drivers_in_sequence(run: RunDir) -> None:
    """A second driver changes no file of the first, continues the attempt numbers, and its rows replace those it trains again."""
    first = RunLog(run)
    first.attempt(1, 0)
    first.steps(record(s) for s in range(1, 31))
    first.event(Event("note", 1.0, {"text": "one"}))
    first.close()
    before = {name: run.storage.read(name) for name in run.storage.files(METRICS)}
    assert last_attempt(run) == 1
    second = RunLog(run)
    second.attempt(2, 20)
    second.steps(record(s, 2) for s in range(21, 26))
    second.event(Event("note", 2.0, {"text": "two"}))
    second.close()
    assert {name: run.storage.read(name) for name in before} == before
    assert written(run) == [(s, 1) for s in range(1, 21)] + [(s, 2) for s in range(21, 26)]
    assert [e.data["text"] for e in read_events(run)] == ["one", "two"]
    assert last_attempt(run) == 2


def test_drivers_that_number_their_attempts_anew(run: RunDir) -> None:
    """The order of writing decides, not the attempt's number: a second driver's attempt 1 is newer than the first's 3."""
    first = RunLog(run)
    first.attempt(3, 0)
    first.steps(record(s, 3) for s in range(1, 11))
    first.close()
    second = RunLog(run)
    second.attempt(1, 4)
    second.steps([record(5, 1)])
    second.close()
    assert written(run) == [(s, 3) for s in range(1, 5)] + [(5, 1)]


def test_100k_steps_in_bounded_memory(run: RunDir) -> None:
    """Segments have at most 10,000 rows; stored segments are not kept in memory; all rows are read back in order."""
    log = RunLog(run)
    for start in range(1, 100_001, 2_500):
        log.steps(record(s) for s in range(start, start + 2_500))
        log.flush()
        assert sum(part.num_rows for segment in log._segments for part in segment.parts) <= SEGMENT_ROWS
    log.close()
    assert [s.rows.num_rows for s in read_segments(run)] == [SEGMENT_ROWS] * 10
    assert read_steps(run)["step"].to_pylist() == list(range(1, 100_001))


def test_a_flush_copies_little(run: RunDir) -> None:
    """The open segment is kept in few batches, and none grows beyond twice the size from which on it is not copied any more: a
    thread that flushes keeps the pages of its copies (25 MiB after 9,600 rows from eight threads, with copies of the whole
    segment; 5 with these)."""
    log = RunLog(run)
    for start in range(1, SEGMENT_ROWS, 40):
        log.steps(record(s) for s in range(start, start + 40))
        log.flush()
    sizes = [part.nbytes for part in log._segments[-1].parts]
    assert max(sizes) < 2 * COMBINED_BYTES
    assert all(size >= COMBINED_BYTES for size in sizes[:-1])
    assert written(run) == [(s, 1) for s in range(1, SEGMENT_ROWS + 1)]


def test_one_push_over_several_segments(run: RunDir) -> None:
    """A push larger than a segment is split; a restart inside a later segment voids the right rows."""
    log = RunLog(run)
    log.steps(record(s) for s in range(1, 2 * SEGMENT_ROWS + 11))
    log.attempt(2, SEGMENT_ROWS + 3)
    log.steps([record(SEGMENT_ROWS + 4, 2)])
    log.close()
    steps = written(run)
    assert [step for step, _ in steps] == list(range(1, SEGMENT_ROWS + 5))
    assert steps[-1] == (SEGMENT_ROWS + 4, 2)
    assert [s.rows.num_rows for s in read_segments(run)] == [SEGMENT_ROWS, SEGMENT_ROWS, 10, 1]


def test_torn_last_line_of_events(run: RunDir) -> None:
    """An incomplete last line is not read; the next driver cuts it off before its own first line."""
    log = RunLog(run)
    log.event(Event("note", 1.0, {"text": "whole"}))
    log.close()
    path = Path(run.storage.path(EVENTS))
    with path.open("ab") as file:
        file.write(b'{"v": 1, "kind": "no')
    assert [e.data["text"] for e in read_events(run)] == ["whole"]
    again = RunLog(run)
    again.event(Event("note", 2.0, {"text": "next"}))
    again.close()
    assert [e.data["text"] for e in read_events(run)] == ["whole", "next"]


def test_damage_is_told_not_hidden(run: RunDir) -> None:
    """A damaged line in the middle, or a segment that is no Parquet file, raises StorageError with its location."""
    log = RunLog(run)
    log.steps([record(1)])
    log.close()
    Path(run.storage.path(EVENTS)).write_bytes(b'{"kind": "note", "at": 1}\n{"kin\n{"kind": "note", "at": 2}\n')
    with pytest.raises(StorageError, match=r"events.jsonl: line 2"):
        read_events(run)
    Path(run.storage.path(f"{METRICS}/attempt-0001-000000.parquet")).write_bytes(b"PAR1 no more")
    with pytest.raises(StorageError, match=r"attempt-0001-000000.parquet"):
        read_steps(run)


def test_on_an_object_store(run: RunDir) -> None:
    """Where files cannot be appended to, each flush writes all of events.jsonl, including the lines of an earlier driver."""
    for folder in (METRICS, ""):
        Path(run.storage.path(folder)).mkdir(parents=True, exist_ok=True)
    # The same code path as for a URI: an arrow filesystem without a local path.
    run.storage.local = None
    for number in (1, 2):
        log = RunLog(run)
        for text in ("a", "b"):
            log.event(Event("note", float(number), {"text": text}))
            log.steps([record(number, number)])
            log.flush()
    assert [(e.at, e.data["text"]) for e in read_events(run)] == [(1.0, "a"), (1.0, "b"), (2.0, "a"), (2.0, "b")]
    assert written(run) == [(1, 1), (2, 2)]


def test_events_are_strict_json(run: RunDir) -> None:
    """NaN and infinities become null, so that any JSON reader can read events.jsonl; an event keeps unknown keys."""
    log = RunLog(run)
    log.event(
        Event("eval", 1.5, {"step": 3, "loss": math.nan, "tokens": 9, "best": False, "later": [1, (2, math.inf)]})
    )
    log.close()
    line = json.loads(run.storage.read(EVENTS), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line == {
        "v": 1, "kind": "eval", "at": 1.5, "step": 3, "loss": None, "tokens": 9, "best": False, "later": [1, [2, None]]
    }  # fmt: skip


def test_refused_append_is_kept_whole(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills up in the middle of a line, flush raises StorageError and leaves no partial line; the next flush writes
    all."""
    log = RunLog(run)
    log.event(Event("note", 1.0, {"text": "before"}))
    log.flush()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log.event(Event("note", 2.0, {"text": "while"}))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            log.flush()
    assert Path(run.storage.path(EVENTS)).read_bytes().count(b"\n") == 1
    log.flush()
    assert [e.data["text"] for e in read_events(run)] == ["before", "while"]


def test_refused_segments_are_kept(run: RunDir) -> None:
    """While metrics/ cannot be written no row is lost, over several segments; afterwards all are written."""
    Path(run.storage.path()).mkdir(parents=True)
    obstacle = Path(run.storage.path(METRICS))
    log = RunLog(run)
    obstacle.write_text("a file where the folder should be")
    log.steps(record(s) for s in range(1, SEGMENT_ROWS + 2))
    with pytest.raises(StorageError, match=METRICS):
        log.flush()
    log.steps([record(SEGMENT_ROWS + 2)])
    with pytest.raises(StorageError):
        log.flush()
    obstacle.unlink()
    log.flush()
    assert len(written(run)) == SEGMENT_ROWS + 2


_WRITER = """
import sys
from raydist.records import Event, StepRecord
from raydist.run.directory import RunDir
from raydist.run.log_writer import RunLog
log = RunLog(RunDir(sys.argv[1]))
log.attempt(int(sys.argv[2]), int(sys.argv[3]))
step = int(sys.argv[3])
while True:
    for _ in range(40):
        step += 1
        log.steps([StepRecord(step, 1 / step, 1e-3, 0.5, 8, 0.1, 0.0, 1, int(sys.argv[2]), "0" * 16).to_dict()])
        log.event(Event("note", float(step), {"text": "x" * 200, "step": step}))
    log.flush()
    print(step, flush=True)
"""


def test_killed_writer_leaves_readable_files(run: RunDir, tmp_path: Path) -> None:
    """After SIGKILL during a write, for five drivers in a row, each row that was flushed is read once, and no file is damaged."""
    script = tmp_path / "writer.py"
    script.write_text(_WRITER)
    resume = 0
    for attempt in range(1, 6):
        command = [sys.executable, str(script), str(run.storage.path()), str(attempt), str(resume)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
            assert writer.stdout is not None
            flushed = [int(writer.stdout.readline()) for _ in range(1 + attempt % 3)]
            # The writer is in its next flush, or about to start it; the exact place differs between attempts.
            writer.send_signal(signal.SIGKILL)
            flushed += [int(line) for line in writer.stdout]
        steps = read_steps(run)["step"].to_pylist()
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= flushed[-1]
        told = [e.data["step"] for e in read_events(run) if e.at > resume]
        assert set(range(resume + 1, flushed[-1] + 1)) <= set(told)
        resume = flushed[-1] - 7


def test_reading_while_writing(run: RunDir) -> None:
    """A reader sees all steps from 1 to some step without gaps, never fewer than before; events likewise."""
    log, done = RunLog(run), threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for start in range(1, 30_001, 250):
                log.steps(record(s) for s in range(start, start + 250))
                log.event(Event("note", float(start), {}))
                log.flush()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen, lines, rounds = 0, 0, 0
    while not done.is_set() or not rounds:
        steps = read_steps(run)["step"]
        assert len(steps) >= seen
        assert not len(steps) or (steps[0].as_py(), steps[-1].as_py()) == (1, len(steps))
        events = len(read_events(run))
        assert events >= lines
        seen, lines, rounds = len(steps), events, rounds + 1
    thread.join()
    assert not failed
    assert read_steps(run)["step"].to_pylist() == list(range(1, 30_001))


def test_rows_that_come_during_a_flush(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows pushed during a flush are not in the file being written; the next flush writes them."""
    log = RunLog(run)
    log.steps([record(1)])
    create = run.storage.create

    def busy(name: str, *more: Any) -> Any:
        log.steps([record(2)])
        return create(name, *more)

    with monkeypatch.context() as patched:
        patched.setattr(run.storage, "create", busy)
        log.flush()
    assert written(run) == [(1, 1)]
    log.flush()
    assert written(run) == [(1, 1), (2, 1)]


def test_steps_and_flush_from_several_threads(run: RunDir) -> None:
    """Rows that were pushed before a flush began are on storage when it returns, also with flushes in other threads."""
    log = RunLog(run)
    stop = threading.Event()

    def flush() -> None:
        while not stop.is_set():
            log.flush()

    others = [threading.Thread(target=flush) for _ in range(2)]
    for other in others:
        other.start()
    for start in range(1, 2_001, 100):
        log.steps(record(s) for s in range(start, start + 100))
        log.flush()
        assert read_steps(run)["step"][-1].as_py() == start + 99
    stop.set()
    for other in others:
        other.join()
    assert written(run) == [(s, 1) for s in range(1, 2_001)]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Attempts as (number, resume step, steps trained, whether a new driver runs it), each resuming from an existing step."""
    found, last = [], 0
    for number in range(1, draw(st.integers(1, 6)) + 1):
        resume = draw(st.integers(0, last))
        trained = draw(st.integers(0, 6))
        found.append((number, resume, trained, draw(st.booleans())))
        last = resume + trained
    return found


@settings(max_examples=40, deadline=None)
@given(history=histories())
def test_any_history_gives_one_row_a_step(
    history: list[tuple[int, int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any sequence of restarts, with one driver or several, the rows equal a list that is cut at each resume step."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    log, expected = RunLog(run), []
    for number, resume, trained, new_driver in history:
        if new_driver:
            log.close()
            log = RunLog(run)
        log.attempt(number, resume)
        log.steps(record(s, number) for s in range(resume + 1, resume + trained + 1))
        expected = expected[:resume] + [(s, number) for s in range(resume + 1, resume + trained + 1)]
    log.close()
    assert written(run) == expected
    assert merge(read_segments(run)).equals(read_steps(run))
