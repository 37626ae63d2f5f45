"""raydist.run.requests: requests to a live run, as files in its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.checkpoint import on_request
from raydist.errors import SaveFailed
from raydist.records import Event
from raydist.run import requests
from raydist.run.directory import REQUESTS, SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import json_line
from raydist.run.status import write_state


def test_requests_come_in_order_and_go(tmp_path: Path) -> None:
    """Requests have increasing numbers, which are not reused; the oldest comes first."""
    run = RunDir(tmp_path)
    assert requests.pending(run) == []
    one, two = requests.ask_trace(run, 3, 60.0), requests.ask_trace(run, 5, 60.0)
    assert requests.pending(run) == [one, two]
    assert [(r.number, r.steps) for r in (one, two)] == [(1, 3), (2, 5)]
    for asked in (one, two, two):
        requests.withdraw(run, asked)
    assert requests.pending(run) == []
    assert requests.ask_trace(run, 1, 60.0).number == 3, "a run that has seen 1 and 2 would not take them up again"


def test_what_a_runs_monitor_makes_of_them(tmp_path: Path) -> None:
    """Rank 0 is told traces with their steps, and checkpoints; each request is an event once, with who asks."""
    run, inbox = RunDir(tmp_path), requests.Inbox()
    assert (inbox.look(run), inbox.answer()) == ([], {})
    save, other = (requests.ask_checkpoint(run, 60.0, by) for by in ("ann", "bob"))
    trace = requests.ask_trace(run, 3, 60.0, "ann")
    assert other.number > save.number
    told = {event.data["number"]: event for event in inbox.look(run)}
    assert {(e.kind, e.data["what"], e.data["by"]) for e in told.values()} == {
        ("requested", "checkpoint", "ann"), ("requested", "checkpoint", "bob"), ("requested", "trace", "ann"),
    }  # fmt: skip
    assert told[save.number].at == save.at
    assert inbox.answer() == {"traces": [(trace.number, 3)], "saves": [save.number, other.number]}
    for asked in (trace, save):
        requests.withdraw(run, asked)
    assert (inbox.look(run), inbox.answer()) == ([], {"saves": [other.number]})


def test_one_that_nobody_waits_for_counts_no_longer(tmp_path: Path) -> None:
    """A request past its deadline is not pending, and the next request deletes it; a damaged one is not pending either."""
    run = RunDir(tmp_path)
    requests.ask_trace(run, 3, -1.0)
    assert requests.pending(run) == []
    assert len(run.storage.files(REQUESTS)) == 1
    run.storage.write(f"{REQUESTS}/trace-0009.json", b"{")
    mine = requests.ask_trace(run, 3, 60.0)
    assert requests.pending(run) == [mine]
    assert mine.until > time.time()
    assert sorted(run.storage.files(REQUESTS)) == [f"{REQUESTS}/trace-0002.json", f"{REQUESTS}/trace-0009.json"]


def test_a_damaged_request_is_none(tmp_path: Path) -> None:
    """Whatever stands in the file: ranks agree on numbers and steps in a sum, and a trace of a million steps fills the memory."""
    run, good = RunDir(tmp_path), {"v": 1, "trace": 4, "at": 1.0, "until": time.time() + 60, "by": "ann", "steps": 3}
    damaged: list[Any] = [
        *({**good, "steps": steps} for steps in (0, -1, 101, 10**30, float("inf"), float("nan"), "x", None, [3])),
        *({**good, name: value} for name in ("at", "until") for value in (float("inf"), float("nan"), None)),
        [good], "x", None, 7, {},
    ]  # fmt: skip
    for number, body in enumerate(damaged, 1):
        run.storage.write(f"{REQUESTS}/trace-{number:04d}.json", json.dumps(body).encode())
    run.storage.write(f"{REQUESTS}/trace-{10**15}.json", json.dumps(good).encode())
    assert requests.pending(run) == []
    run.storage.write(f"{REQUESTS}/trace-0040.json", json.dumps({**good, "by": "a" * 5000}).encode())
    (found,) = requests.pending(run)
    assert (found.number, found.steps, len(found.by)) == (40, 3, 200)
    requests.withdraw(run, found)
    assert requests.ask_trace(run, 3, 60.0) in requests.pending(run)


def test_parts_of_the_newest_attempt(tmp_path: Path) -> None:
    """The existing parts of the newest attempt, and the ranks whose parts are missing; parts of an earlier attempt do not
    count."""
    run = RunDir(tmp_path)
    assert requests.parts(run, 4) == ([], [])
    for attempt, rank, world in ((1, 0, 3), (1, 1, 3), (2, 1, 2)):
        run.storage.write(requests.part_name(4, attempt, rank, world), b"")
    assert requests.parts(run, 4) == ([requests.part_name(4, 2, 1, 2)], [0])
    run.storage.write(requests.part_name(4, 2, 0, 2), b"")
    assert requests.parts(run, 4) == ([requests.part_name(4, 2, rank, 2) for rank in (0, 1)], [])


def test_which_failed_saves_end_the_wait_for_a_requested_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of a step before the request, nor a step that was skipped while another save was in flight: that one is over then."""
    run = RunDir(tmp_path / "run")
    run.storage.write(SPEC, b"name: run\n")
    write_state(run, {"status": "running", "heartbeat_at": time.time(), "driver": this_process(), "step": 10})
    told: list[bytes] = []
    happens = iter([{"step": 9}, {"step": 12, "skipped": True}, {"step": 13}])

    def pause(seconds: float) -> None:
        failed = Event("checkpoint_failed", 0.0, {"rank": 0, "cause": "disk full", **next(happens)})
        told.append(json_line(failed.to_dict()))
        run.storage.write("events.jsonl", b"".join(told))

    monkeypatch.setattr(on_request, "time", SimpleNamespace(time=time.time, sleep=pause))
    with pytest.raises(SaveFailed, match="step 13: the checkpoint was not saved: disk full"):
        on_request.save_now(run, 60.0, "ann")
    assert (len(told), requests.pending(run)) == (3, [])
