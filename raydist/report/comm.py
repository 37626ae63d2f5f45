"""The results of `raydist bench comm` as text: the columns of nccl-tests, the matrix of pairs, the model's gradients.

Runs in: the user's shell. Must not import torch or ray.
"""

from __future__ import annotations

import itertools
from typing import Any

from rich.console import Console

_FORM = "{:>14}{:>12}{:>13}{:>6}{:>6}{:>12}{:>12}{:>12}{:>10}{:>10}{:>8}"
_HEAD = ("", "size", "count", "type", "iters", "min", "time", "p99", "algbw", "busbw", "#wrong")
_UNITS = ("", "(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
_FAR = 3.0
"""A measured time over the expected one that is worth another measurement."""
_SHOWN = 16
"""Maximum number of nodes for which the matrix is printed; with more nodes only the extremes are printed."""


def show(result: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist bench comm --json`."""
    out = out or Console(highlight=False)

    def say(line: str, style: str = "") -> None:
        out.print(line, style=style, soft_wrap=True, markup=False)

    nodes = len({rank["node_ip"] for rank in result["ranks"]})
    say(f"{result['world_size']} ranks on {nodes} node{'s' if nodes != 1 else ''}, {result['backend']}", "bold")
    for note in result["notes"]:
        say(f"  {note}")
    say(_FORM.format(*_HEAD), "bold")
    say(_FORM.format(*_UNITS))
    for row in result["collectives"]:
        say(_line(row), "red" if row["wrong"] else "")
    _pairs(result["pairs"], say)
    line = result["fit"]
    say(
        f"a message of n bytes: {_us(line['alpha'])} us + n / {_speed(line['beta'])} (half of the points deviate by "
        f"{line['residual']:.0%} or less)"
    )
    if result["gradients"] is not None:
        _gradients(result["gradients"], say)
    if result["nccl"]:
        _nccl(result["nccl"], nodes, say)
    if result["bucket"] is not None:
        say(f"parallel.bucket_mb: auto would choose {result['bucket']['because']}")


def _line(row: dict[str, Any]) -> str:
    times = (_us(row[key]) for key in ("min", "median", "p99"))
    speeds = (f"{row[key] / 1e9:.3f}" for key in ("algbw", "busbw"))
    head = (row["op"], row["size"], row["count"], row["type"], row["iterations"])
    return _FORM.format(*head, *times, *speeds, row["wrong"])


def _pairs(pairs: dict[str, Any], say: Any) -> None:
    names, n = pairs["names"], len(pairs["names"])
    for what, unit, scale in (("latency", "us", 1e6), ("bandwidth", "GB/s", 1e-9)):
        values = {(a, b): pairs[what][a][b] * scale for a in range(n) for b in range(a)}
        worst = (max if what == "latency" else min)(values, key=lambda pair: values[pair])
        say(
            f"{what} between {pairs['between']}, {unit}: {min(values.values()):.3g} to {max(values.values()):.3g}; "
            f"the worst between {names[worst[1]]} and {names[worst[0]]}",
            "bold",
        )
        if 2 < n <= _SHOWN:
            width = max(9, *(len(name) + 2 for name in names))
            say(" " * width + "".join(f"{name:>{width}}" for name in names))
            for a in range(n):
                say(f"{names[a]:>{width}}" + "".join(_cell(pairs[what][a][b] * scale, a == b, width) for b in range(n)))


def _cell(value: float, same: bool, width: int) -> str:
    return f"{'-' if same else format(value, '.3g'):>{width}}"


def _gradients(result: dict[str, Any], say: Any) -> None:
    say(f"all-reduce of the model's gradients, {result['bytes'] / 2**20:.1f} MiB", "bold")
    for name, seconds in sorted(result["predicted"].items(), key=lambda item: item[1]):
        say(f"  {name.replace('_', ' '):<20} {seconds:9.4f} s  predicted from the line above")
    part = (
        "" if result["measured_bytes"] >= result["bytes"] else f", for {result['measured_bytes'] / 2**20:.0f} MiB of it"
    )
    say(f"  {'measured':<20} {result['measured']:9.4f} s{part}")


def _nccl(rows: list[dict[str, Any]], nodes: int, say: Any) -> None:
    """Ranges of sizes with one expected way; and what to compare if a size takes far longer."""
    head = (
        "NCCL_ALGO and NCCL_PROTO: leave them unset. By NCCL's latencies and the bandwidth above the fastest should be"
    )
    say(head, "bold")
    for way, group in itertools.groupby(rows, key=lambda row: (row["algorithm"], row["protocol"])):
        sizes = [row["size"] for row in group]
        say(
            f"  {', '.join(way):<14} for {sizes[0]:,} to {sizes[-1]:,} bytes on {nodes} node{'s' if nodes != 1 else ''}"
        )
    worst = max(rows, key=lambda row: row["measured"] / row["seconds"])
    times = worst["measured"] / worst["seconds"]
    if times > _FAR:
        forced = f"NCCL_ALGO={worst['algorithm']} raydist bench comm --op all_reduce"
        say(f"  {worst['size']:,} bytes took {times:.1f} times as long as expected: compare with {forced}")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _speed(beta: float) -> str:
    return f"({1e-9 / beta:.3g} GB/s)" if beta else "(no limit seen)"
