"""What a search that chooses its cells as results come will take: reckoned by the cells at the ends of its space.

Runs anywhere. Must not import torch or ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydist.report.sweep.conclusions import value
from raydist.run.sweep_directory import SweepDir
from raydist.spec.sweep import Axis, Cell, Sweep
from raydist.spec.sweep.extent import ordered, size

_SHOWN = 8


def chosen(sweep: Sweep, folder: SweepDir) -> list[Cell]:
    """The cells that it has chosen before, as far as they are this sweep's. Raises StorageError."""
    return [sweep.cell(note.parameters, note.index, note.point) for note in folder.cells()]


def longest(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The most of each that one of the rows has; None where one of them does not know."""
    columns = {name: [row[name] for row in rows] for name in names}
    return {name: None if not column or None in column else max(column) for name, column in columns.items()}


def notes(sweep: Sweep, scouts: Sequence[Cell]) -> list[str]:
    """How many are chosen, from what, and what can go wrong with them."""
    asked, seeds, points = sweep.spec.array.samples or 0, sweep.spec.array.seeds, sweep.most()
    each = f", each with {seeds} seeds" if seeds > 1 else ""
    told = [
        f"search: {sweep.spec.search.name} chooses {points} points as results come{each}: tokens, time and cost are at most these",
        f"from {'; '.join(map(_range, sweep.axes))}",
    ]
    if points < asked:
        told.append(f"there are no more than {size(sweep.axes)} points, array.samples is {asked}")
    problems: dict[str, str] = {}
    for cell in scouts:
        for text in cell.problems:
            problems.setdefault(text, cell.id)
    told += [f"{text} (in {cell}): such cells fail when they are chosen" for text, cell in problems.items()]
    return told


def _range(axis: Axis) -> str:
    if axis.kind == "values":
        values = ordered(axis) or axis.values
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        return f"{axis.name} {', '.join(map(value, values[:_SHOWN]))}{more}"
    how = {"log_uniform": ", in logarithm", "int_uniform": ", whole"}.get(axis.kind, "")
    return f"{axis.name} {value(axis.low)} to {value(axis.high)}{how}"
