"""The columns of a run's telemetry: one row per rank, node or GPU and reading.

Runs anywhere: plain python and pyarrow. docs/reference/observe.md describes the interface.

One schema for all kinds of rows: columns that a kind does not have are null, which needs no space in Parquet. Columns with `total`
in their text are counters: they never decrease within an attempt (of a rank) or a boot (of a node), so that a lost row reduces the
resolution but no sum. The others are readings of that moment.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv", "other")
"""Kinds of collectives in column names. other: reduce, gather, scatter, barrier."""
PHASES = ("data", "forward", "backward", "update", "eval", "save")
"""The phases of a rank's time; raydist.ipc.heartbeat also has `start` and `end`, which are not training."""

_F, _I, _S = pa.float64(), pa.int64(), pa.string()

WHO: dict[str, tuple[pa.DataType, str]] = {
    "at": (_F, "Unix time of the reading, by its node's clock; by the run monitor's if they are a minute apart"),
    "kind": (_S, "rank, node or gpu: the subject of the row"),
    "host": (_S, "host name"),
    "node": (_S, "IP address of the node in the cluster"),
    "gpu": (_I, "NVML's index of the GPU on its node"),
    "rank": (_I, "rank; in a row of a GPU the rank that trains on it, if any"),
    "attempt": (_I, "attempt of the rank"),
    "step": (_I, "newest step that the rank has started"),
}

RANK: dict[str, tuple[pa.DataType, str]] = {
    **{f"{phase}_seconds": (_F, f"total time in {phase}") for phase in PHASES},
    "allocated_bytes": (_I, "used by tensors in torch's allocator; null on a CPU, like the next five"),
    "reserved_bytes": (_I, "reserved by the allocator"),
    "peak_bytes": (_I, "maximum allocated at once since the previous row"),
    "inactive_bytes": (_I, "split blocks not used by a tensor: fragmentation"),
    "alloc_retries_count": (_I, "total number of times the allocator emptied its cache and tried again"),
    "oom_count": (_I, "total number of out-of-memory errors"),
    "parameters_bytes": (_I, "this rank's parameters"),
    "gradients_bytes": (_I, "this rank's gradients, at their largest"),
    "optimizer_bytes": (_I, "this rank's optimizer state, on any device"),
    "activations_bytes": (_I, "the peak minus parameters, gradients and optimizer state on the device; null on a CPU"),
    "rss_bytes": (_I, "resident memory of the rank's process"),
    "anon_bytes": (_I, "its part not backed by files: pages of a memory-mapped dataset are only in rss_bytes"),
    "cpu_seconds": (_F, "total processor time of the rank's process"),
    "run_delay_seconds": (_F, "total time that its main thread was ready to run and had no processor"),
    "throttled_seconds": (_F, "total time that its control group was held at its CPU quota"),
    "major_faults_count": (_I, "total number of its pages that were read from a disk: swap, mapped files"),
    "stopped_count": (_I, "total number of readings in which its process was stopped (SIGSTOP, a debugger)"),
    "held_seconds": (
        _F,
        "total time that its whole process was held: SIGSTOP, a debugger, a freezer, a paused machine",
    ),
    "gc_seconds": (_F, "total time in Python's garbage collector"),
    "hooks_seconds": (_F, "total time in the job's hooks; null without hooks on this rank"),
    "loader_seconds": (_F, "total time that its loader's thread took to make batches"),
    "loader_waited_seconds": (
        _F,
        "total time of that in which it neither ran nor was ready to: storage, a lock, the GIL",
    ),
    **{
        f"{op}_{name}": (kind, f"total {text} of {op}")
        for op in OPS
        for name, kind, text in (
            ("count", _I, "number"),
            ("bytes", _I, "size by the conventions of nccl-tests"),
            ("wire_bytes", _F, "bytes that a ring sends from each rank: the bus factor of nccl-tests times the size"),
            ("seconds", _F, "time from start to end"),
            ("exposed_seconds", _F, "exposed time (not overlapped with computation)"),
        )
    },
}

NODE: dict[str, tuple[pa.DataType, str]] = {
    "cpu_util": (_F, "share of all processors in use since the previous row, 0 to 1, by all processes"),
    "cpu_count": (_I, "processors"),
    "steal_seconds": (_F, "total processor time that its hypervisor gave to others"),
    "load": (_F, "load average of one minute"),
    "memory_used_bytes": (
        _I,
        "in use and not reclaimable: all minus available memory, of the container if its limit is lower",
    ),
    "memory_total_bytes": (_I, "memory of the node, or of the container if its limit is lower"),
    "shm_used_bytes": (_I, "in use in /dev/shm"),
    "disk_free_bytes": (_I, "free space where the run is stored, if that is a folder, else in the temporary folder"),
    "disk_read_bytes": (_I, "total read from the node's disks"),
    "disk_write_bytes": (_I, "total written to the node's disks"),
    "disk_waited_seconds": (_F, "total time in which a process of the node waited for a disk (the kernel's PSI)"),
    "nic": (_S, "network interface used for training"),
    "nic_in_bytes": (_I, "total received on it"),
    "nic_out_bytes": (_I, "total sent on it"),
    "nic_in_packets": (_I, "total packets received on it"),
    "nic_out_packets": (_I, "total packets sent on it"),
    "nic_errors": (_I, "total errors and drops on it, both directions"),
    "retransmits_count": (_I, "total number of TCP segments that were sent again, on all interfaces"),
    "link_queue_bytes": (_I, "waiting in the TCP sockets to the peer with the most"),
    "link_queue_peer": (_S, "address of that peer; empty if nothing waits"),
    "nic_limit_bytes_per_second": (_F, "its speed in one direction, as reported by the driver; null if unknown"),
    "rdma_in_bytes": (
        _I,
        "total received by the node's RDMA ports, bypassing the kernel; null without InfiniBand or RoCE",
    ),
    "rdma_out_bytes": (_I, "total sent by the node's RDMA ports"),
}

GPU: dict[str, tuple[pa.DataType, str]] = {
    "gpu_name": (_S, "model of the GPU"),
    "gpu_util": (_F, "share of time with a kernel running, 0 to 1, by NVML"),
    "gpu_memory_used_bytes": (_I, "in use on the GPU, by all processes"),
    "gpu_memory_total_bytes": (_I, "memory of the GPU"),
    "gpu_process_bytes": (_I, "in use by the rank's process; in a row of a GPU by all ranks of this run"),
    "gpu_other_bytes": (_I, "in use by processes that are not ranks of this run"),
    "gpu_power_watts": (_F, "power draw"),
    "gpu_power_limit_watts": (_F, "power limit"),
    "gpu_temperature_celsius": (_F, "temperature of the GPU"),
    "gpu_sm_clock_hz": (_F, "clock of the multiprocessors"),
    "gpu_memory_clock_hz": (_F, "clock of the memory"),
    "gpu_throttle": (_S, "reasons for reduced clocks, comma-separated; empty if there are none"),
    "gpu_pcie_width": (_I, "PCIe lanes in use"),
    "gpu_pcie_in_bytes_per_second": (_F, "received over PCIe"),
    "gpu_pcie_out_bytes_per_second": (_F, "sent over PCIe"),
    "gpu_nvlink_count": (_I, "NVLinks that are up; null without NVLink"),
    "gpu_nvlink_in_bytes": (_I, "total received over all NVLinks"),
    "gpu_nvlink_out_bytes": (_I, "total sent over all NVLinks"),
    "gpu_xid_count": (_I, "total XID errors since the node monitor started"),
    "gpu_xid": (_I, "the newest XID"),
    "gpu_ecc_errors": (_I, "total uncorrected memory errors since the driver was loaded"),
    "gpu_ecc_corrected": (_I, "total corrected memory errors since the driver was loaded"),
    "gpu_sm_active": (_F, "share of the multiprocessors in use, 0 to 1, by GPM (Hopper and later)"),
    "gpu_tensor_active": (_F, "share of time with the tensor cores busy, by GPM"),
    "gpu_dram_active": (_F, "share of the memory's peak bandwidth in use, by GPM"),
}

COLUMNS: dict[str, tuple[pa.DataType, str]] = {**WHO, **RANK, **NODE, **GPU}


def is_total(column: str) -> bool:
    """Whether a column is a counter, which never decreases."""
    return " total " in f" {COLUMNS[column][1]}"


SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in COLUMNS.items()],
    metadata={"raydist.schema_version": str(SCHEMA_VERSION)},
)
