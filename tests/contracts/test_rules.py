"""Every rule in diagnosis keeps the contract in its `__init__`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

import numpy as np
import pytest

from raydist import registry
from raydist.diagnosis import BINS, Candidate, Diagnosis, Lows, Window, rules
from raydist.records import Event, Finding, Severity
from raydist.run import telemetry_schema

RULES = registry.names("diagnosis")
COLUMNS = telemetry_schema.COLUMNS
ERRORS = ("gpu_xid_count", "gpu_ecc_errors", "alloc_retries_count")
"""Totals of which an increase is a fault."""


def lows(values: Any) -> Lows:
    """A long history in which all columns have these values, [R, BINS], while steps advance."""
    steps = np.broadcast_to(np.arange(BINS, dtype=float), values.shape)
    long = {name: values for rule in rules() for name in rule.long}
    return Lows(30.0, 1e9, tuple(range(len(values))), {**long, "step": steps})


def checked(name: str, window: Window) -> list[Finding]:
    found = import_module(f"raydist.diagnosis.{name}").check(window)
    return [one.finding if isinstance(one, Candidate) else one for one in found]


def row(kind: str, at: int, subject: int, value: float | None, grows: float) -> dict[str, Any]:
    """All columns of that kind have `value`; totals grow by `grows` a second."""
    columns = {"rank": telemetry_schema.RANK, "node": telemetry_schema.NODE, "gpu": telemetry_schema.GPU}[kind]
    made: dict[str, Any] = {"kind": kind, "at": 1e9 + at, "host": f"h{subject}", "node": f"10.0.0.{subject}"}
    made |= {"rank": subject, "attempt": 1, "step": at + 1} if kind == "rank" else {"gpu": 0} if kind == "gpu" else {}
    for column, (kind_of, text) in columns.items():
        if value is not None and str(kind_of) != "string" and column not in ERRORS:
            made[column] = value + (grows * at if " total " in f" {text} " else 0.0)
    return made


@pytest.mark.parametrize("name", RULES)
def test_it_says_what_it_does(name: str) -> None:
    """Its texts are there, each limit has a source, and its columns exist."""
    (rule,) = [rule for rule in rules() if rule.name == name]
    assert rule.cause
    assert rule.looks
    assert all(value and source for value, source in rule.thresholds.values())
    assert {*rule.columns, *rule.long} <= set(COLUMNS)


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_read_nothing_is_found(name: str) -> None:
    """An empty window, and a history that is constant, zero or missing: nothing; also for one rank, and for none."""
    assert checked(name, Window()) == []
    for value in (0.0, 2.0**34, np.nan):
        for ranks in (0, 1, 5):
            assert checked(name, Window(lows=[lows(np.full((ranks, BINS), value))])) == []


@pytest.mark.parametrize("value", [None, 0.0, 1e9])
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_happens_nothing_is_found(value: float | None, ranks: int) -> None:
    """Ranks, nodes and GPUs whose columns are missing, zero or constant, with equal totals: no finding, and no rule fails."""
    diagnosis = Diagnosis()
    for at in range(60):
        rows = [row(kind, at, subject, value, 0.1) for kind in ("node", "gpu", "rank") for subject in range(ranks)]
        found = [one for one in diagnosis.observe(rows) if one.rule not in ("node_memory", "data_bound")]
        assert found == []
    assert diagnosis.problems == {}


def test_no_event_ends_a_rule() -> None:
    """Events of all kinds with the least data: no rule fails."""
    diagnosis = Diagnosis(spec={"train": None})
    kinds = ("attempt_started", "checkpoint_saved", "eval", "decision", "note", "ended", "of_a_later_version")
    list(diagnosis.observe([], [], [Event(kind, 1e9 + i, {"step": 1}) for i, kind in enumerate(kinds)]))
    assert diagnosis.problems == {}


@pytest.mark.parametrize("name", RULES)
def test_a_finding_crosses_processes(name: str) -> None:
    """On values that grow, jump and fall, a finding, if any, names the rule and a remedy, and is equal after a round trip."""
    t = np.arange(BINS, dtype=float)
    for shape in (t, -t, 40.0 * (t > BINS / 2), np.exp(t / 10), t % 7):
        for finding in checked(name, Window(lows=[lows(2.0**34 * (2 + shape[None] / 40))])):
            assert finding.rule == name
            assert finding.severity in get_args(Severity)
            assert finding.what
            assert finding.remedy
            assert Finding.from_dict(finding.to_dict()) == finding
            assert finding.event(7.0).to_dict()["rule"] == name
