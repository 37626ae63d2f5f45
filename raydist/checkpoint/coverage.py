"""Whether the chunks of a checkpoint cover every tensor that it should hold, each element once. Pure functions.

Runs anywhere: plain python, no torch. Before a commit rank 0 compares the union of all ranks' names with what was saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""(offsets, sizes)."""
NAMED = 10
"""Most tensors that a message names."""


def uncovered(
    wanted: Mapping[str, Sequence[int]], saved: Mapping[str, tuple[Sequence[int], Sequence[Box]]]
) -> list[str]:
    """A line for each tensor that is missing or incomplete; [] if all are there.

    `wanted`: name -> shape. `saved`: name -> (shape, boxes).
    """
    problems = []
    for name, shape in wanted.items():
        if name not in saved:
            problems.append(f"{name}: no rank saves it")
            continue
        saved_shape, boxes = saved[name]
        if tuple(saved_shape) != tuple(shape):
            problems.append(f"{name}: saved with shape {list(saved_shape)}, has shape {list(shape)}")
        elif (found := sum(math.prod(sizes) for _, sizes in boxes)) < math.prod(shape) or not boxes:
            problems.append(f"{name}: {found} of {math.prod(shape)} elements are saved")
        elif found > math.prod(shape) or _overlap(boxes) or not all(_inside(box, shape) for box in boxes):
            problems.append(f"{name}: its {len(boxes)} chunks overlap, or reach over its shape {list(shape)}")
    return problems


def sentence(problems: Sequence[str]) -> str:
    """The problems as one line, shortened."""
    more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return "; ".join(problems[:NAMED]) + more


def _inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box[0]) == len(shape) and all(o >= 0 and o + n <= size for o, n, size in zip(*box, shape, strict=True))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes have an element in common."""
    ordered = sorted((box for box in boxes if math.prod(box[1])), key=lambda box: tuple(box[0]))
    for i, (offsets, sizes) in enumerate(ordered):
        for other_offsets, other_sizes in ordered[i + 1 :]:
            if not offsets or other_offsets[0] >= offsets[0] + sizes[0]:
                break
            boxes_meet = (
                a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            )
            if all(boxes_meet):
                return True
    return False
