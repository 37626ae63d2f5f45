"""Errors that the GPU driver reports: XIDs and uncorrectable memory errors. Each is reported when it occurs.

Runs anywhere: plain python. Not a rule over windows: a single such error is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raydist.records import Finding

# NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors): those caused by a program, and their meaning.
_OF_PROGRAMS = {
    13: "a kernel used an invalid address or instruction",
    31: "a kernel accessed unmapped memory",
    43: "a program on the GPU was terminated after an error of its own",
    45: "a program on the GPU was terminated",
}
_OF_HARDWARE = {
    48: "double-bit memory error",
    63: "a memory row was retired",
    64: "a memory row could not be retired",
    74: "an NVLink failed",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU system processor (GSP) does not answer",
    120: "the GPU system processor (GSP) failed",
}
_FIX_PROGRAM = "run the step that failed with CUDA_LAUNCH_BLOCKING=1 in cluster.env, or under compute-sanitizer, to find the kernel"
_FIX_HARDWARE = (
    "drain the node (ray drain-node), reset the GPU or restart the host, and have its memory tested (dcgmi diag -r 3)"
)


class GpuErrors:
    """`observe` takes the newest rows and reports the increase of each GPU's error counts since the previous rows."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], tuple[int, int]] = {}

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
        """The new errors. Counts restart when a node monitor restarts. Errors from before this run are not reported."""
        for row in rows:
            if row["kind"] != "gpu":
                continue
            which = row["node"], row["gpu"]
            xids, bits = row.get("gpu_xid_count") or 0, row.get("gpu_ecc_errors") or 0
            # A node monitor counts XIDs since its own start; the driver counts memory errors since it was loaded.
            xids_before, bits_before = self._before.get(which, (0, bits))
            self._before[which] = xids, bits
            if xids > xids_before:
                yield _xid(row, xids - xids_before)
            if bits > bits_before:
                yield _finding(row, "ecc", bits - bits_before, "uncorrectable memory error", _FIX_HARDWARE)


def _xid(row: Mapping[str, Any], count: int) -> Finding:
    number = row.get("gpu_xid")
    meaning = _OF_PROGRAMS.get(number) or _OF_HARDWARE.get(number) if number is not None else None
    what = f"XID {number}" + (f", {meaning}" if meaning else "")
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
