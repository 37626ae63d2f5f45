"""Errors that a GPU's driver reports: XIDs, and memory that could not be corrected. Each is told as it comes.

Runs anywhere: plain python. No rule over windows: one such error is one too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raydist.records import Finding

# NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors): those that a program causes, and what they say.
_OF_PROGRAMS = {
    13: "a kernel failed: an address or an instruction that it must not use",
    31: "a kernel used memory that is not mapped",
    43: "a program on the GPU was ended after an error of its own",
    45: "a program on the GPU was ended",
}
_OF_HARDWARE = {
    48: "memory was wrong in two bits",
    63: "a row of memory was put out of use",
    64: "a row of memory could not be put out of use",
    74: "an NVLink failed",
    79: "the GPU has fallen off the bus",
    92: "memory is wrong in single bits at a high rate",
    94: "memory was wrong; the damage is contained",
    95: "memory was wrong; the damage is not contained",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}
_FIX_PROGRAM = "run the step that failed with CUDA_LAUNCH_BLOCKING=1 in cluster.env, or under compute-sanitizer, to find the kernel"
_FIX_HARDWARE = (
    "drain the node (ray drain-node), reset the GPU or restart the host, and have its memory tested (dcgmi diag -r 3)"
)


class GpuErrors:
    """`observe` the newest rows: what has been added to a GPU's counts since the rows before."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], tuple[int, int]] = {}

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
        """Of an agent that began anew the counts begin anew. Errors of a GPU's past are none of this run's."""
        for row in rows:
            if row["kind"] != "gpu":
                continue
            which = row["node"], row["gpu"]
            xids, bits = row.get("gpu_xid_count") or 0, row.get("gpu_ecc_errors") or 0
            # Of XIDs an agent counts its own, of memory the driver all since it was loaded.
            xids_before, bits_before = self._before.get(which, (0, bits))
            self._before[which] = xids, bits
            if xids > xids_before:
                yield _xid(row, xids - xids_before)
            if bits > bits_before:
                yield _finding(row, "ecc", bits - bits_before, "memory that could not be corrected", _FIX_HARDWARE)


def _xid(row: Mapping[str, Any], count: int) -> Finding:
    number = row.get("gpu_xid")
    said = _OF_PROGRAMS.get(number) or _OF_HARDWARE.get(number) if number is not None else None
    what = f"XID {number}" + (f", {said}" if said else "")
    return _finding(row, f"xid {number}", count, what, _FIX_PROGRAM if number in _OF_PROGRAMS else _FIX_HARDWARE)


def _finding(row: Mapping[str, Any], kind: str, count: int, what: str, remedy: str) -> Finding:
    rank = row.get("rank")
    whose = f" of rank {rank}" if rank is not None else ""
    times = f", {count} times" if count > 1 else ""
    figures = {"kind": kind, "count": count, "host": row["host"], "node": row["node"], "gpu": row["gpu"]}
    return Finding(
        rule="gpu_errors",
        rank=rank,
        severity="warning" if remedy is _FIX_PROGRAM else "critical",
        what=f"GPU {row['gpu']} on {row['host']} ({row['node']}){whose}: {what}{times}",
        figures=figures,
        remedy=remedy,
    )
