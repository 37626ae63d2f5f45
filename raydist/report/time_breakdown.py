"""Shares of each rank's time between two readings: compute, exposed communication, data and the rest.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raydist.run.telemetry_schema import OPS, PHASES


def spent(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Shares of a rank's time between its first and last row, which add up to 1: compute, exposed, data, eval, save.

    `rows`: of one rank and attempt, in order. None if there is no time between them. Exposed communication is subtracted from
    the compute phases, because ranks wait for it there.
    """
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    phases = {phase: grown(first, last, f"{phase}_seconds") for phase in PHASES}
    total = sum(phases.values())
    if total <= 0:
        return None
    computing = phases["forward"] + phases["backward"] + phases["update"]
    exposed = min(computing, sum(grown(first, last, f"{op}_exposed_seconds") for op in OPS))
    parts = {"compute": computing - exposed, "exposed": exposed}
    parts |= {phase: phases[phase] for phase in ("data", "eval", "save")}
    return {name: seconds / total for name, seconds in parts.items()}


def rate(rows: Sequence[Mapping[str, Any]], counter: str) -> float | None:
    """A counter's increase per second, between the first and the last row that have it; None if there are fewer than two."""
    known = [row for row in rows if row.get(counter) is not None]
    if len(known) < 2 or known[-1]["at"] <= known[0]["at"]:
        return None
    return grown(known[0], known[-1], counter) / float(known[-1]["at"] - known[0]["at"])


def by_subject(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows grouped by these columns, in their order."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found


def grown(first: Mapping[str, Any], last: Mapping[str, Any], counter: str) -> float:
    """A counter's increase from one row to another; a missing value is 0."""
    return max(0.0, (last.get(counter) or 0.0) - (first.get(counter) or 0.0))
