"""How a run's time is divided: every second counts once, by definitions that a table of small runs tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.records import Event
from raydist.report import goodput
from raydist.report.run_metrics import report
from raydist.run.directory import RunDir
from tests.report import story
from tests.report.story import T, begun, event, failed, first, reading, steps


def test_every_second_is_in_one_part(tmp_path: Path) -> None:
    """A run with a fault, repeated steps, an evaluation and a checkpoint."""
    told = report(story.story(RunDir(tmp_path / "a"))).facts
    assert told["parts"] == pytest.approx(story.PARTS)
    assert told["wall_seconds"] == pytest.approx(253.0) == sum(story.PARTS.values())
    assert told["goodput"] == pytest.approx(200 / 253)
    # Steps of 100 tokens, and of the last 50 two with 4 samples, the others with 16.
    assert told["samples_per_second"] == pytest.approx(told["tokens_per_second"] * (48 * 16 + 2 * 4) / 5000)


def divided(
    tmp_path: Path,
    told: list[Event],
    *attempts: tuple[int, int, list[dict[str, Any]]],
    rows: Any = (),
    status: str = "finished",
) -> dict[str, float]:
    """The parts that are not 0, and `paused`."""
    found = report(story.write(RunDir(tmp_path / "a"), told, attempts, rows, status)).facts
    parts = {name: round(seconds, 6) for name, seconds in found["parts"].items() if seconds}
    return parts | ({"paused": found["paused_seconds"]} if found["paused_seconds"] else {})


FIRST = [begun(0, 1), first(3, 1, 1, 3.0)]
"""Step 1 begins at second 2."""


@pytest.mark.parametrize(
    ("told", "attempts", "expected"),
    [
        # No step has ended yet.
        ([begun(0, 1), event(7, "note", text="x")], [], {"startup": 7}),
        # The first attempt did not start, the second one did.
        ([begun(0, 1), failed(5, 1), begun(6, 2), first(9, 2, 1, 3.0), event(18, "ended", status="finished", step=10)],
         [(2, 0, steps(1, 10, 2))], {"startup": 6, "recovery": 2, "unknown": 9, "data": 1}),
        # The user paused it for 100 s, which are in no part. The next attempt is a startup, not a recovery.
        ([*FIRST, event(12, "ended", status="paused", step=10), begun(112, 2, 10), first(117, 2, 11, 5.0),
          event(126, "ended", status="finished", step=20)],
         [(1, 0, steps(1, 10, 1)), (2, 10, steps(11, 20, 2))],
         {"startup": 2 + 4, "data": 2, "unknown": 18, "paused": 100}),
        # The driver was killed after step 10, and restarted 50 s later: steps 6 to 10 are repeated.
        ([*FIRST, begun(62, 2, 5), first(65, 2, 6, 3.0), event(74, "ended", status="finished", step=15)],
         [(1, 0, steps(1, 10, 1)), (2, 5, steps(6, 15, 2))],
         {"startup": 2, "recovery": 50 + 2 + 5, "data": 1.5, "unknown": 13.5}),
        # It failed for good.
        ([*FIRST, failed(15, 1), event(20, "ended", status="stopped", step=10)], [(1, 0, steps(1, 10, 1))],
         {"startup": 2, "data": 1, "unknown": 9, "recovery": 8}),
        # A failure during repeated steps: that whole attempt is recovery.
        ([*FIRST, failed(13, 1), begun(14, 2, 5), first(15, 2, 6, 3.5, again=5), failed(18, 2), begun(19, 3, 5),
          first(20, 3, 6, 3.5, again=5), event(30, "ended", status="finished", step=15)],
         [(1, 0, steps(1, 10, 1)), (2, 5, steps(6, 8, 2)), (3, 5, steps(6, 15, 3))],
         {"startup": 2, "data": 1.5, "unknown": 13.5, "recovery": 12, "other": 1}),
        # The repeated steps contain an evaluation of 4 s, which was also done before.
        ([*FIRST, failed(13, 1), begun(14, 2, 5), first(15, 2, 6, 3.0, again=5), event(21, "eval", step=8, loss=1.0, tokens=1),
          event(28, "ended", status="finished", step=15)],
         [(1, 0, steps(1, 10, 1)), (2, 5, steps(6, 15, 2))],
         {"startup": 2, "data": 1.5, "unknown": 13.5, "recovery": 11}),
        # The last two records of attempt 1 were lost with rank 0: its steps 9 and 10 are known from the repeated ones.
        ([*FIRST, failed(13, 1), begun(14, 2, 5), first(15, 2, 6, 3.0, again=5), event(24, "ended", status="finished", step=15)],
         [(1, 0, steps(1, 8, 1)), (2, 5, steps(6, 15, 2))],
         {"startup": 2, "data": 1.3, "unknown": 11.7, "other": 2, "recovery": 7}),
        # A node was taken away: not a fault, but a new startup.
        ([*FIRST, event(11, "decision", action="leave", because="a notice"), begun(14, 2, 10), first(16, 2, 11, 2.0),
          event(25, "ended", status="finished", step=20)],
         [(1, 0, steps(1, 10, 1)), (2, 10, steps(11, 20, 2))], {"startup": 2 + 3, "data": 2, "unknown": 18}),
        # Without monitoring: only the data wait in rank 0's records and the stall in a checkpoint's event are known.
        ([*FIRST, event(8, "checkpoint_saved", step=5, bytes=1, seconds=2.0, stall_seconds=1.5),
          event(15, "ended", status="finished", step=10)],
         [(1, 0, steps(1, 10, 1))], {"startup": 2, "data": 1, "unknown": 9, "checkpoint": 1.5, "other": 1.5}),
    ],
    ids=["young", "never up", "paused", "driver lost", "stopped", "failed again", "evaluated again", "records lost", "left",
         "not monitored"],
)  # fmt: skip
def test_spans(
    tmp_path: Path, told: list[Event], attempts: list[tuple[int, int, list[dict[str, Any]]]], expected: dict[str, float]
) -> None:
    """Each span begins where the previous one ends."""
    assert divided(tmp_path, told, *attempts) == pytest.approx(expected)


def test_what_was_not_read_is_unknown(tmp_path: Path) -> None:
    """The ranks were read until step 6 of 10; the time of the other four is unknown."""
    rows = [reading(2 + step, rank, 1, step, step) for step in range(1, 7) for rank in (0, 1)]
    told = [*FIRST, event(12, "ended", status="finished", step=10)]
    found = divided(tmp_path, told, (1, 0, steps(1, 10, 1)), rows=rows)
    assert found == pytest.approx({"startup": 2, "compute": 0.7 * 6, "exposed": 0.2 * 6, "data": 0.1 * 6, "unknown": 4})


def test_a_run_that_trains_is_known_until_its_last_word(tmp_path: Path) -> None:
    """It is known until the run's heartbeat."""
    told = [*FIRST, event(9, "note", text="x")]
    assert divided(tmp_path, told, (1, 0, steps(1, 7, 1)), status="running") == pytest.approx(
        {"startup": 2, "data": 0.7, "unknown": 6.3}
    )


def test_without_an_attempt_there_is_no_time() -> None:
    """This holds for a loop that ran without a driver, under torchrun."""
    assert goodput.spans([Event("ended", T, {"status": "finished", "step": 1})], [], T) == []
    assert goodput.goodput(dict.fromkeys(goodput.PARTS, 0.0)) is None
