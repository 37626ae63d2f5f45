"""The results of `raydist check` as text: a table of the nodes, and those that differ or are slow.

Runs in: the user's shell. Must not import torch or ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from raydist.report.tables import columns

RATES = {
    "matmul": "TFLOP/s of a matrix product",
    "memory": "GB/s in its memory",
    "to_device": "GB/s from the host to the GPU",
    "in_node": "GB/s between its GPUs",
    "link": "GB/s to other nodes",
    "storage_mb_s": "MB/s to the storage",
    "storage_iops": "files/s to the storage",
}
"""What is compared between nodes, and its unit."""
_HEADS = {"ranks": "ranks", "gpu": "GPU", "matmul": "TFLOP/s", "memory": "memory GB/s", "to_device": "to GPU GB/s",
          "in_node": "in node GB/s", "link": "links GB/s", "storage_mb_s": "storage MB/s", "storage_iops": "files/s",
          "disk_gib": "disk GiB", "shm_gib": "shm GiB"}  # fmt: skip


def show(result: Mapping[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist check --json`."""
    out = out or Console(highlight=False)
    shown = {key: head for key, head in _HEADS.items() if any(row.get(key) for row in result["nodes"])}
    table = columns("node", *(f"{head}>" for head in shown.values()))
    for row in result["nodes"]:
        table.add_row(row["node"], *(_cell(row.get(key)) for key in shown))
    out.print(table)
    for line in (*result["differs"], *map(said, result["slow"])):
        out.print(line, style="red", soft_wrap=True, markup=False)
    if names := result.get("left_out"):
        out.print(f"left out: {', '.join(names)}; the job fits on the others", soft_wrap=True, markup=False)
    elif names := sorted({each["node"] for each in result["slow"]}):
        left_out = f"--set 'cluster.resources.exclude=[{', '.join(names)}]'"
        out.print(f"to leave them out: {left_out}, or raydist train --exclude-slow", soft_wrap=True, markup=False)
    elif not result["differs"]:
        out.print("no node is slow against the others", markup=False)


def said(each: Mapping[str, Any]) -> str:
    """An entry of `slow` as a line."""
    return f"node {each['node']}: {each['value']:.3g} {RATES[each['rate']]}, the median is {each['median']:.3g}"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
