"""Time and cost of a search that chooses its cells by earlier results, from the cells at the ends of its space.

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
    """The cells that the search has chosen so far. Raises StorageError."""
    return [sweep.cell(note.parameters, note.index, note.point) for note in folder.cells()]


def longest(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The maximum of each column over the rows; None if it is unknown in a row."""
    columns = {name: [row[name] for row in rows] for name in names}
    return {name: None if not column or None in column else max(column) for name, column in columns.items()}


def notes(sweep: Sweep, scouts: Sequence[Cell]) -> list[str]:
    """Notes: how many points are chosen, from which ranges, and their possible problems."""
    samples, seeds, points = sweep.spec.array.samples or 0, sweep.spec.array.seeds, sweep.most()
    each = f", each with {seeds} seeds" if seeds > 1 else ""
    lines = [
        f"search: {sweep.spec.search.name} chooses {points} points from earlier results{each}: tokens, time and cost are upper "
        "bounds",
        f"from {'; '.join(map(_range, sweep.axes))}",
    ]
    if points < samples:
        lines.append(f"there are no more than {size(sweep.axes)} points, array.samples is {samples}")
    problems: dict[str, str] = {}
    for cell in scouts:
        for text in cell.problems:
            problems.setdefault(text, cell.id)
    lines += [f"{text} (in {cell}): such cells fail when they are chosen" for text, cell in problems.items()]
    return lines


def _range(axis: Axis) -> str:
    if axis.kind == "values":
        values = ordered(axis) or axis.values
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        return f"{axis.name} {', '.join(map(value, values[:_SHOWN]))}{more}"
    how = {"log_uniform": ", in logarithm", "int_uniform": ", whole"}.get(axis.kind, "")
    return f"{axis.name} {value(axis.low)} to {value(axis.high)}{how}"
