"""A trial between a report and the decision on it, and a trial that waits for workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.session import Session
from raydist.cluster.sweep.trial import EndRequest, Plan, TrialRun
from raydist.run.directory import RunDir
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.run.sweep_state import fold

STOP = EndRequest("stopped", "asha at 100 tokens", at_once=True)


class NoCrews:
    """A pool without slots: `get` returns only when the trial has given up, and `may_return` is set."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.may_return = threading.Event()
        self.may_return.set()

    def get(self, plan: Plan, given_up: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(given_up)
        assert self.may_return.wait(240)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def put(self, slot: Any) -> None:
        """No trial has a slot to return."""


@pytest.fixture
def waiting(tmp_path: Path) -> tuple[TrialRun, SweepLog, list[tuple[dict[str, Any], bool]]]:
    """A trial that waits for workers, the sweep's log, and its reports, each with whether `end` had to wait for that report."""
    posted: list[tuple[dict[str, Any], bool]] = []
    plan = SimpleNamespace(
        id="cell",
        request=SimpleNamespace(run=RunDir(str(tmp_path / "run"))),
        total=8,
        workers=1,
        tokens=lambda step: 100 * step,
    )
    log = SweepLog(SweepDir(tmp_path))
    run = TrialRun(
        cast(Plan, plan), cast(Session, None), NoCrews(), log,
        lambda report: posted.append((report, run._lock.locked())), "loss",
    )  # fmt: skip
    return run, log, posted


def test_no_report_after_its_end_was_decided(waiting: Any) -> None:
    """After `end`, a trial posts no report before its last one: a stale report would be judged as one of its next stretch."""
    run, _, posted = waiting
    run._slots.may_return.clear()  # else the last report may come before the second step
    run.update({"record": {"step": 1, "loss": 3.0}})
    run.end(STOP)
    run.update({"record": {"step": 2, "loss": 2.0}})
    run._slots.may_return.set()
    assert run.join(240)
    assert [(report["tokens"], report["done"]) for report, _ in posted] == [(100, False), (200, True)]
    assert posted[0][1], "`end` waits for it"


def test_stopped_while_it_waits(waiting: Any, tmp_path: Path) -> None:
    """A trial that has lost its workers can be stopped before it gets others: the log says so, and the next driver does not train
    it."""
    run, log, posted = waiting
    run.end(STOP)
    assert run.join(240)
    log.flush()
    state = fold(SweepDir(tmp_path).events())["cell"]
    assert (state.status, state.cause) == ("stopped", "asha at 100 tokens")
    assert [report["ended"] for report, _ in posted] == ["stopped"]
