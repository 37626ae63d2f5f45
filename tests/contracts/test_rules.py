"""Every rule in diagnosis keeps the contract in its `__init__`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

import numpy as np
import pytest

from raydist import registry
from raydist.diagnosis import BINS, Window
from raydist.records import Finding, Severity
from raydist.run import telemetry_schema

RULES = registry.names("diagnosis")


def window(name: str, values: Any) -> Window:
    """A window in which all columns of the rule have these values, [R, BINS], while steps advance."""
    columns = import_module(f"raydist.diagnosis.{name}").COLUMNS
    steps = np.broadcast_to(np.arange(BINS, dtype=float), values.shape)
    return Window(30.0, 1e9, tuple(range(len(values))), {**{c: values for c in columns}, "step": steps})


@pytest.mark.parametrize("name", RULES)
def test_it_asks_for_columns_of_ranks(name: str) -> None:
    """COLUMNS are columns of a rank's row."""
    columns = import_module(f"raydist.diagnosis.{name}").COLUMNS
    assert columns
    assert set(columns) <= set(telemetry_schema.RANK)


@pytest.mark.parametrize("values", [0.0, 2.0**34, np.nan], ids=["zero", "constant", "no reading"])
@pytest.mark.parametrize("name", RULES)
def test_nothing_happens_nothing_is_found(name: str, values: float) -> None:
    """For values that are constant, zero or missing: None, and no warning; also for one rank, and for none."""
    check = registry.load("diagnosis", name)
    for ranks in (0, 1, 5):
        assert check(window(name, np.full((ranks, BINS), values))) is None


@pytest.mark.parametrize("name", RULES)
def test_a_finding_crosses_processes(name: str) -> None:
    """On values that grow, jump and fall, a finding, if any, names the rule and a remedy, and is equal after a round trip."""
    check, t = registry.load("diagnosis", name), np.arange(BINS, dtype=float)
    shapes = [t, -t, 40.0 * (t > BINS / 2), np.exp(t / 10), t % 7]
    for shape in shapes:
        finding = check(window(name, 2.0**34 * (2 + shape[None] / 40)))
        if finding is not None:
            assert finding.rule == name
            assert finding.severity in get_args(Severity)
            assert finding.what
            assert finding.remedy
            assert Finding.from_dict(finding.to_dict()) == finding
            assert finding.event(7.0).to_dict()["rule"] == name
