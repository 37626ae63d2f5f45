"""raydist.observe.summary: the figures of the live view."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.observe.summary import WINDOW, LiveView, rates


def row(step: int, seconds: float = 0.5, attempt: int = 1) -> dict[str, Any]:
    return {
        "step": step, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "seconds": seconds,
        "data_seconds": 0.1, "world_size": 2, "attempt": attempt, "samples_hash": "0" * 16,
    }  # fmt: skip


def test_rates_are_sums_over_sums() -> None:
    """Steps count by their time: 200 tokens in 4 s are 50 a second, not the mean of 100 and 33."""
    assert rates([row(1, 1.0), row(2, 3.0)]) == {"tokens_per_second": 50.0, "seconds_per_step": 2.0, "data_share": 0.05}
    assert set(rates([]).values()) == {None}


def test_the_first_step_of_an_attempt_says_nothing_of_the_pace() -> None:
    """The first step's rates count only until there is a second step, also after a restart."""
    view = LiveView()
    for attempt in (1, 2):
        view.begin_attempt(attempt, 2, 0)
        assert view.snapshot()["tokens_per_second"] is None
        view.records([row(1, 10.0, attempt)])
        assert view.snapshot()["tokens_per_second"] == 10.0
        view.records([row(2, 0.5, attempt), row(3, 0.5, attempt)])
        assert view.snapshot()["tokens_per_second"] == 200.0


def test_the_window_is_bounded() -> None:
    """Only the newest WINDOW steps count."""
    view = LiveView()
    view.records([row(s, 5.0) for s in range(1, 200)])
    view.records([row(s, 0.5) for s in range(200, 200 + WINDOW)])
    assert view.snapshot()["seconds_per_step"] == 0.5


def test_stages_are_those_of_the_present_attempt() -> None:
    """The stages of the current attempt, in order, with their times; a late stage of an earlier attempt is ignored."""
    view = LiveView()
    view.begin_attempt(1, 2, 0)
    view.stage(1, "import", 10.0)
    view.stage(1, "build", 11.0)
    assert view.snapshot()["stages"] == [("import", 10.0), ("build", 11.0)]
    view.begin_attempt(2, 2, 0)
    view.stage(1, "load", 12.0)
    assert view.snapshot()["stages"] == []


def test_events_and_counts() -> None:
    """Eval loss, last checkpoint, workers and counts follow the events; late records of an earlier attempt change nothing."""
    view = LiveView()
    view.begin_attempt(1, 2, 0)
    view.event("workers", {"workers": [{"rank": 0, "host": "h", "node_ip": "1.2.3.4", "pid": 5}]})
    view.records([row(1), row(2)])
    view.event("eval", {"step": 2, "loss": 2.5, "tokens": 10, "best": True})
    view.event("checkpoint_saved", {"step": 2, "bytes": 9})
    assert [w["pid"] for w in view.snapshot()["workers"]] == [5]
    view.event("failure", {"attempt": 1, "cause": "x"})
    view.begin_attempt(2, 1, 2)
    view.records([row(9, attempt=1)])
    now = view.snapshot()
    assert (now["step"], now["eval_loss"], now["checkpoint"]["step"], now["world_size"]) == (2, 2.5, 2, 1)
    assert (now["attempts"], now["failures"], now["checkpoints"], now["evals"], now["workers"]) == (2, 1, 1, 1, [])
    assert now["record"]["step"] == 2
    view.event("resumed", {"step": 1, "path": "p"})
    now = view.snapshot()
    assert (now["step"], now["record"], now["eval_loss"]) == (1, None, None), (
        "what is past step 1 will be trained again"
    )


def test_mfu_needs_both_figures() -> None:
    """200 tokens/s at 3 FLOPs each with a peak of 1200 FLOP/s is an MFU of 0.5; without `capacity` it is None."""
    view = LiveView()
    view.records([row(1), row(2)])
    assert view.snapshot()["mfu"] is None
    view.capacity(3.0, 1200.0)
    assert view.snapshot()["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["eval", "checkpoint_saved", "workers"])
def test_an_event_without_its_data_is_refused(kind: str) -> None:
    """An event without its data raises KeyError, and the view can still be used."""
    view = LiveView()
    with pytest.raises(KeyError):
        view.event(kind, {})
    assert view.snapshot()["evals"] == 0
