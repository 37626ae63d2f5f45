"""raydist.observe.exporters.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.errors import StorageError, UserError
from raydist.observe.exporters import Facts
from raydist.observe.exporters.jsonl import FILE, Exporter
from raydist.run.directory import RunDir

Rows = Callable[..., list[dict[str, Any]]]


def made(run: RunDir, **options: Any) -> Exporter:
    return Exporter(Facts(run, Exporter.resolve(options, run)))


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_line_each(run: RunDir, rows: Rows) -> None:
    """Attempts, steps and events are one line each, and so are the samples of one call, in order; NaN becomes null."""
    out = made(run)
    out.attempt(1, 0, 1.0)
    out.steps([{**row, "loss": float("nan")} for row in rows(range(1, 3))], 2.0)
    out.event({"v": 1, "kind": "note", "at": 3.0, "text": "hello"})
    out.samples([{"kind": "rank", "rank": 0}, {"kind": "rank", "rank": 1}])
    out.close()
    found = lines(run.storage.path(FILE))
    assert [line["type"] for line in found] == ["attempt", "step", "step", "event", "samples"]
    assert found[0] == {"type": "attempt", "attempt": 1, "resume_step": 0, "at": 1.0}
    assert (found[2]["step"], found[2]["loss"], found[2]["at"]) == (2, None, 2.0)
    assert (found[3]["kind"], found[3]["text"]) == ("note", "hello")
    assert [row["rank"] for row in found[4]["rows"]] == [0, 1]


@pytest.mark.parametrize("torn", [10, 200_000])
def test_a_torn_line_goes_and_the_rest_stays(run: RunDir, rows: Rows, tmp_path: Path, torn: int) -> None:
    """The incomplete last line of a killed monitor is cut off, whatever its length; the next monitor appends after the last
    complete line."""
    path = tmp_path / "deep" / "run.jsonl"
    first = made(run, path=str(path))
    first.steps(rows(range(1, 1001)), 1.0)
    first.close()
    with path.open("ab") as file:
        file.write(b"x" * torn)
    second = made(run, path=str(path))
    second.steps(rows(range(1001, 1002)), 1.0)
    second.close()
    assert [line["step"] for line in lines(path)] == list(range(1, 1002))


def test_what_was_refused_is_written_later(run: RunDir, rows: Rows, disk: Path) -> None:
    """On a full disk flush raises StorageError and leaves no incomplete line; once there is space, each row is written once."""
    path, ballast = disk / "run.jsonl", disk / "ballast"
    out = made(run, path=str(path))
    out.steps(rows(range(1, 2)), 1.0)
    out.flush()
    ballast.write_bytes(b"x" * (16 * 2**20 - 2**16))
    out.steps(rows(range(2, 2000)), 1.0)
    with pytest.raises(StorageError, match="No space"):
        out.flush()
    assert len(lines(path)) == 1
    ballast.unlink()
    out.flush()
    assert [line["step"] for line in lines(path)] == list(range(1, 2000))


def test_a_run_on_an_object_store_needs_a_path(run: RunDir) -> None:
    """A file on an object store cannot grow: `resolve` refuses it before the run starts, and the hint names `path`."""
    run.storage.local = None
    with pytest.raises(UserError, match="cannot grow") as caught:
        Exporter.resolve({}, run)
    assert "path" in caught.value.hint
    assert Exporter.resolve({"path": "/x/y.jsonl"}, run) == {"path": "/x/y.jsonl"}
