"""The incidents of a run, with the reaction and the remedy."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from raydist.cluster.run.root_cause import Kind
from raydist.records import Event
from raydist.report import incidents
from tests.report import story
from tests.report.story import T, begun, event, failed, first
from tests.report.test_text import EVENTS


def test_the_story() -> None:
    """In order of time, each with its attempt, step and rank, if known."""
    found = incidents.found(story.events(), {1: 80, 2: 200})
    assert [
        (one["at"] - T, one["kind"], one["attempt"], one["step"], one["rank"], one["severity"]) for one in found
    ] == [
        (70.0, "leak", 1, None, 1, "warning"),
        (94.5, "injected fault", 1, 81, 1, "info"),
        (96.0, "worker died", 1, 80, 1, "critical"),
        (98.0, "checkpoint corrupt", 2, 60, None, "warning"),
    ]
    leak, _, death, corrupt = found
    assert (leak["cause"], leak["remedy"]) == (story.LEAK.what, story.LEAK.remedy)
    assert death["cause"] == "killed by SIGKILL"
    assert death["then"] == (
        "restart: failure 1 (of 3); attempt 2 on 2 ranks; from step 50; first step after 7.5 s, 30 trained once more"
    )
    assert "dmesg" in death["remedy"]
    assert "shard-0.bin" in corrupt["cause"]


def test_a_driver_that_was_lost() -> None:
    """A lost driver writes no event: the attempt of the next driver shows it. A driver that ended by itself was not lost."""
    told = [begun(0, 1), first(3, 1, 1, 3.0), event(5, "note", text="x"), begun(60, 2, 5), first(64, 2, 6, 4.0)]
    (lost,) = incidents.found(told, {1: 9})
    assert (lost["at"] - T, lost["kind"], lost["attempt"], lost["step"]) == (5.0, "driver lost", 1, 9)
    assert lost["then"] == "attempt 2 on 2 ranks; first step after 4 s"
    assert incidents.found([begun(0, 1), event(9, "ended", status="paused", step=5), begun(60, 2, 5)], {}) == []


def test_a_node_that_left() -> None:
    """It is an incident, but not a lost driver."""
    told = [begun(0, 1), event(5, "decision", action="leave", because="a notice"), begun(9, 2, 50)]
    assert [(one["kind"], one["severity"]) for one in incidents.found(told, {})] == [("node leaves", "info")]


def test_a_failure_that_led_to_the_end() -> None:
    """The incident says that the run ended, and has the traceback."""
    raised = failed(9, 1, "ValueError: no")
    raised.data["traceback"] = "Traceback\n  line\n"
    told = [begun(0, 1), raised, event(10, "decision", action="stop", because="it would fail again", after_s=0.0),
            event(11, "ended", status="stopped", step=5, cause="ValueError: no")]  # fmt: skip
    (found,) = incidents.found(told, {})
    assert (found["detail"], found["then"]) == ("Traceback\n  line", "stop: it would fail again; the run was stopped")


@pytest.mark.parametrize(("kind", "data"), [(kind, data) for kind, data, _ in EVENTS if kind in incidents.KINDS])
def test_every_kind_is_told(kind: str, data: dict[str, Any]) -> None:
    """An event of every kind, as the project writes it, has a cause and a remedy."""
    (found,) = incidents.found([Event(kind, T, data)], {})
    assert found["cause"]
    assert found["remedy"]
    assert found["rank"] is None or isinstance(found["rank"], int)


def test_every_failure_has_a_remedy() -> None:
    """Except failures that the run caused itself."""
    assert set(get_args(Kind)) - {"rollback", "aborted"} == set(incidents.REMEDIES)
