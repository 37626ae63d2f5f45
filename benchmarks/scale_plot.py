"""The figures of benchmarks/scale.py over the number of ranks, as a table and as an SVG file.

    python benchmarks/scale_plot.py            of results/scale.json

Two plots with logarithmic axes and a dotted line of what grows with the ranks, through the first point: seconds, and amounts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

IMAGE = Path(__file__).parents[1] / "docs/images/scale.svg"
_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND = 420, 300, 60, 40, 200
_COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad")

Found = Mapping[str, Mapping[str, Any]]
FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "start, s": lambda f: f["start"]["ordered_s"],
    "one rank dies, s": lambda f: f["one rank dies"]["ordered_s"],
    "one rank dies, control CPU s": lambda f: f["one rank dies"]["control_cpu_s"],
    "one node is cut off, s": lambda f: f["one node is cut off"]["ordered_s"],
    "5% of the ranks die, s": lambda f: f["5% of the ranks die"]["ordered_s"],
    "messages/s": lambda f: f["steady"]["messages_s"]["messages"],
    "messages/s of a node": lambda f: f["steady"]["messages_s_of_a_node"],
    "bytes of an order to train": lambda f: f["steady"]["bytes"]["next"],
    "coordinator, cores": lambda f: f["steady"]["cores"]["coordinator"],
    "coordinator, MiB": lambda f: f["memory_mib"]["coordinator"],
    "driver, MiB": lambda f: f["memory_mib"]["driver"],
}
PLOTS = {
    "Seconds": ("start, s", "one rank dies, s", "one node is cut off, s", "5% of the ranks die, s"),
    "Amounts": ("messages/s", "bytes of an order to train", "coordinator, MiB", "driver, MiB"),
}


def values(found: Found, name: str) -> list[tuple[int, float]]:
    """(ranks, figure) of the sizes that have it."""
    points = []
    for ranks, figures in found.items():
        try:
            points.append((int(ranks), float(FIGURES[name](figures))))
        except KeyError:  # this size failed before
            continue
    return points


def table(found: Found) -> str:
    """A row for each figure, a column for each number of ranks, and the power of the ranks with which it grows over the last three
    of them."""
    lines = [f"{'':28s}" + "".join(f"{int(ranks):>11,}" for ranks in found) + "   power"]
    for name in FIGURES:
        points = dict(values(found, name))
        cells = "".join(f"{points[int(ranks)]:>11.4g}" if int(ranks) in points else f"{'-':>11s}" for ranks in found)
        lines.append(f"{name:28s}{cells}{_power([*points.items()][-3:])}")
    failed = [f"{ranks} ranks: {figures['failed']}" for ranks, figures in found.items() if "failed" in figures]
    return "\n".join([*lines, *failed])


def _power(points: Sequence[tuple[int, float]]) -> str:
    if len(points) < 2 or points[0][1] <= 0 or points[-1][1] <= 0:
        return f"{'-':>8s}"
    (first, low), (last, high) = points[0], points[-1]
    return f"{math.log(high / low) / math.log(last / first):8.2f}"


def draw(found: Found, path: Path = IMAGE) -> Path:
    """Writes the plots."""
    whole = (len(PLOTS) * (_LEFT + _WIDTH + _LEGEND), _TOP + _HEIGHT + 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]}" height="{whole[1]}" font-family="sans-serif" font-size="12">',
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="white"/>',
    ]
    for number, (title, names) in enumerate(PLOTS.items()):
        series = {name: points for name in names if (points := [p for p in values(found, name) if p[1] > 0])}
        if series:
            parts += _plot(title, series, _LEFT + number * (_LEFT + _WIDTH + _LEGEND))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
    return path


def _plot(title: str, series: Mapping[str, Sequence[tuple[int, float]]], left: float) -> list[str]:
    ranks = sorted({x for points in series.values() for x, _ in points})
    low, high = (f(y for points in series.values() for _, y in points) for f in (min, max))
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9)
    width = math.log10(ranks[-1] / ranks[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(y) - bottom) / ((top - bottom) or 1)
        return left + _WIDTH * math.log10(x / ranks[0]) / width, _TOP + _HEIGHT * (1 - share)

    parts = [
        f'<text x="{left}" y="{_TOP - 15}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">ranks</text>',
    ]
    for x in ranks:
        at = place(x, low)[0]
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{x:,}</text>')
    for power in range(bottom, top + 1):
        at = place(ranks[0], 10.0**power)[1]
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour, (first, begun) = _COLOURS[number % len(_COLOURS)], points[0]
        linear = [(x, begun * x / first) for x, _ in points if begun * x / first <= 10.0**top]
        parts.append(_line(map(lambda p: place(*p), linear), colour, 'stroke-dasharray="2 4" stroke-opacity="0.6"'))
        parts.append(_line(map(lambda p: place(*p), points), colour, 'stroke-width="2"'))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (place(*p) for p in points)]
        parts.append(
            f'<text x="{left + _WIDTH + 10}" y="{_TOP + 14 + 20 * number}" fill="{colour}">{name.replace("&", "&amp;")}</text>'
        )
    return parts


def _line(points: Any, colour: str, how: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{colour}" {how}/>'


if __name__ == "__main__":
    stored = json.loads((RESULTS / "scale.json").read_text())["ranks"]
    print(table(stored))
    print(draw(stored))
