"""What is watched beside a run's steps: the columns of a row, of which there is one a rank, node or GPU and moment.

Runs anywhere: plain python and pyarrow. docs/observe.md is the interface.

One schema for all kinds of rows: what a kind does not have is null, which costs no bytes in Parquet. Columns with `total` in their
text are counters: they only grow within an attempt (of a rank) or a boot (of a node), so that a row that was lost costs resolution
and no sum. The others are readings of that moment.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv", "other")
"""Kinds of collectives, as columns name them. other: reduce, gather, scatter, barrier."""
PHASES = ("data", "forward", "backward", "update", "eval", "save")
"""What a rank's time is divided into; raydist.ipc.heartbeat has them, with `start` and `end`, which are no training."""

_F, _I, _S = pa.float64(), pa.int64(), pa.string()

WHO: dict[str, tuple[pa.DataType, str]] = {
    "at": (_F, "Unix time of the reading, by the clock of its node"),
    "kind": (_S, "rank, node or gpu: what the row is about"),
    "host": (_S, "host name"),
    "node": (_S, "IP address that the node has in the cluster"),
    "gpu": (_I, "index of the GPU on its node, as NVML counts"),
    "rank": (_I, "rank; on a row of a GPU the one that trains on it, if one does"),
    "attempt": (_I, "attempt that the rank belongs to"),
    "step": (_I, "newest step that the rank has begun"),
}

RANK: dict[str, tuple[pa.DataType, str]] = {
    **{f"{phase}_seconds": (_F, f"total time in {phase}") for phase in PHASES},
    "allocated_bytes": (_I, "held by tensors in torch's allocator; on a CPU null, as the next five"),
    "reserved_bytes": (_I, "held by the allocator"),
    "peak_bytes": (_I, "most that was allocated at once since the row before"),
    "inactive_bytes": (_I, "split blocks that no tensor holds: fragmentation"),
    "alloc_retries_count": (_I, "total times that the allocator emptied its cache and tried again"),
    "oom_count": (_I, "total times that memory did not suffice"),
    "parameters_bytes": (_I, "this rank's parameters"),
    "gradients_bytes": (_I, "this rank's gradients, where they are largest"),
    "optimizer_bytes": (_I, "this rank's optimizer state, wherever it lies"),
    "activations_bytes": (_I, "the peak, less parameters, gradients and optimizer on the device; null on a CPU"),
    "rss_bytes": (_I, "resident memory of the rank's process"),
    "anon_bytes": (_I, "of it what no file backs: pages of a mapped dataset are in rss_bytes only"),
    "cpu_seconds": (_F, "total processor time of the rank's process"),
    **{
        f"{op}_{name}": (kind, f"total {text} of {op}")
        for op in OPS
        for name, kind, text in (
            ("count", _I, "number"),
            ("bytes", _I, "size by the conventions of nccl-tests"),
            ("wire_bytes", _F, "bytes that a ring sends from each rank: the bus factor of nccl-tests times the size"),
            ("seconds", _F, "time from start to end"),
            ("exposed_seconds", _F, "time that no computing hid"),
        )
    },
}

NODE: dict[str, tuple[pa.DataType, str]] = {
    "cpu_util": (_F, "share of all processors in use since the row before, 0 to 1, by all that runs there"),
    "cpu_count": (_I, "processors"),
    "load": (_F, "load average of one minute"),
    "memory_used_bytes": (_I, "in use and not to be freed: all less the available, of the container if it has less"),
    "memory_total_bytes": (_I, "memory of the node, or of the container if that is less"),
    "shm_used_bytes": (_I, "in use in /dev/shm"),
    "disk_free_bytes": (_I, "free where the run is stored, if that is a folder, else in the temporary folder"),
    "disk_read_bytes": (_I, "total read from the node's disks"),
    "disk_write_bytes": (_I, "total written to them"),
    "nic": (_S, "network interface that carries training"),
    "nic_in_bytes": (_I, "total received on it"),
    "nic_out_bytes": (_I, "total sent on it"),
    "nic_in_packets": (_I, "total packets received on it"),
    "nic_out_packets": (_I, "total packets sent on it"),
    "nic_errors": (_I, "total errors and drops on it, both ways"),
    "nic_limit_bytes_per_second": (_F, "its speed by its own word, one way; null where it has none"),
    "rdma_in_bytes": (_I, "total received by the node's RDMA ports, past the kernel; null without InfiniBand or RoCE"),
    "rdma_out_bytes": (_I, "total sent by them"),
}

GPU: dict[str, tuple[pa.DataType, str]] = {
    "gpu_name": (_S, "model of the GPU"),
    "gpu_util": (_F, "share of time with a kernel running, 0 to 1, by NVML"),
    "gpu_memory_used_bytes": (_I, "in use on the GPU, by all processes"),
    "gpu_memory_total_bytes": (_I, "memory of the GPU"),
    "gpu_process_bytes": (_I, "in use by the rank's process; on a row of a GPU by all ranks of this run"),
    "gpu_other_bytes": (_I, "in use by processes that are no ranks of this run"),
    "gpu_power_watts": (_F, "power draw"),
    "gpu_power_limit_watts": (_F, "power limit"),
    "gpu_temperature_celsius": (_F, "temperature of the GPU"),
    "gpu_sm_clock_hz": (_F, "clock of the multiprocessors"),
    "gpu_memory_clock_hz": (_F, "clock of the memory"),
    "gpu_throttle": (_S, "why the clock is held down, comma-separated; empty where it is not"),
    "gpu_pcie_in_bytes_per_second": (_F, "received over PCIe"),
    "gpu_pcie_out_bytes_per_second": (_F, "sent over PCIe"),
    "gpu_nvlink_in_bytes": (_I, "total received over all NVLinks"),
    "gpu_nvlink_out_bytes": (_I, "total sent over all NVLinks"),
    "gpu_xid_count": (_I, "total XID errors since the agent began"),
    "gpu_xid": (_I, "the newest of them"),
    "gpu_ecc_errors": (_I, "total uncorrected memory errors since the driver was loaded"),
    "gpu_sm_active": (_F, "share of the multiprocessors that were busy, 0 to 1, by GPM (Hopper and later)"),
    "gpu_tensor_active": (_F, "share of time with the tensor cores busy, by GPM"),
    "gpu_dram_active": (_F, "share of the memory's peak bandwidth in use, by GPM"),
}

COLUMNS: dict[str, tuple[pa.DataType, str]] = {**WHO, **RANK, **NODE, **GPU}

SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in COLUMNS.items()],
    metadata={"raydist.schema_version": str(SCHEMA_VERSION)},
)
