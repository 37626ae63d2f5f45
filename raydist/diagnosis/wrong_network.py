"""Communication is slow because it goes over the wrong network: sockets where the nodes have InfiniBand or RoCE, or, on one node,
an interface slower than those of the others.

Runs anywhere: plain python and numpy. RDMA bypasses the kernel: the counters of the interface then stand still while those of the
RDMA ports grow. IP over InfiniBand counts in both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import all_wait, figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "it goes over sockets although the nodes have InfiniBand or RoCE, or over a slow interface of one node"
LOOKS = (
    "what each node sends on its interface and on its RDMA ports, and the speed of the interface, while all ranks wait"
)
COLUMNS = ("nic", "nic_out_bytes", "nic_limit_bytes_per_second", "rdma_out_bytes")
THRESHOLDS = {
    "exposed": ("0.3 of the time", "as slow_link: below that a link twice as fast gains under 15%"),
    "sent": ("1 MiB/s on the interface of each node", "control messages and metrics stay far below it"),
    "sockets": (
        "the interface sends at least half of what the RDMA ports send",
        "with RDMA it sends next to nothing, with IP over InfiniBand as much",
    ),
    "interface": (
        "half of the median speed of the other nodes' interfaces, or less",
        "speeds of Ethernet and InfiniBand are at least a factor of two apart",
    ),
}
EXPOSED, SENT, HALF = 0.3, 1 << 20, 0.5
OFF = {"NCCL_IB_DISABLE": ("1",), "NCCL_NET": ("Socket", "socket")}


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job's sockets, or the node whose interface is slow."""
    nodes, exposed = window.keys("node"), all_wait(window, "exposed")
    if len(nodes) < 2 or exposed < EXPOSED:
        return
    sent = window.recent("node", "nic_out_bytes")
    if not (sent >= SENT).all():
        return
    remote, speed = window.recent("node", "rdma_out_bytes"), window.recent("node", "nic_limit_bytes_per_second")
    waits = figure("exposed communication", exposed, "telemetry: the least of all ranks")
    if window.keys("gpu") and (sent >= HALF * remote).all():  # gloo has sockets only; NaN: a node has no RDMA port
        yield _sockets(window, exposed, float(sent.sum()), float(remote.sum()), waits)
    elif not np.isnan(speed).any():
        slow = int(speed.argmin())
        others = float(np.median(np.delete(speed, slow)))
        if speed[slow] <= HALF * others:
            yield _interface(window, exposed, slow, float(speed[slow]), others, waits)


def _sockets(window: Window, exposed: float, sent: float, remote: float, waits: dict[str, object]) -> Finding:
    env = window.setting("cluster.env", {}) or {}
    found = next((name for name, values in OFF.items() if str(env.get(name)) in values), None)
    return Finding(
        rule="wrong_network",
        rank=None,
        severity="warning",
        what=f"all ranks wait {exposed:.0%} of the time for communication, which goes over sockets, {sent / 2**20:.0f} MiB/s, "
        "although all nodes have InfiniBand or RoCE",
        figures={
            "kind": "sockets",
            "exposed": exposed,
            "socket_bytes_per_second": sent,
            "rdma_bytes_per_second": remote,
        },
        remedy=f"remove {found} from cluster.env"
        if found
        else "set NCCL_DEBUG: INFO in cluster.env: `raydist logs RUN` then says why NCCL takes NET/Socket. Containers need "
        "/dev/infiniband and no limit of locked memory (ulimit -l); NCCL_IB_HCA names the ports",
        cause=f"cluster.env sets {found}={env[found]}"
        if found
        else "NCCL has not found the RDMA ports, or may not use them",
        culprit={"setting": f"cluster.env.{found or 'NCCL_NET'}"},
        evidence=[
            figure("bytes a second on the interfaces of all nodes", sent, "node monitor: /proc/net/dev"),
            figure("bytes a second on their RDMA ports", remote, "node monitor: /sys/class/infiniband"),
            waits,
        ],
        others=[{"cause": "the job sends too much", "against": "its nodes have a faster network that is not used"}],
        confidence=0.9 if found else 0.8,
        lost=exposed,
    )


def _interface(
    window: Window, exposed: float, slow: int, speed: float, others: float, waits: dict[str, object]
) -> Finding:
    node = window.keys("node")[slow]
    host, name = window.who("node", node)["host"], window.text("node", node, "nic")
    return Finding(
        rule="wrong_network",
        rank=None,
        severity="warning",
        what=f"all ranks wait {exposed:.0%} of the time for communication: {host} ({node}) sends over {name}, which has "
        f"{speed * 8e-9:.4g} Gbit/s, the other nodes' interfaces have {others * 8e-9:.4g}",
        figures={"kind": str(node), "exposed": exposed, "bytes_per_second": speed, "others_bytes_per_second": others},
        remedy=f"see which interfaces {host} has (`ip -br addr`, `ethtool {name}`); NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in "
        "cluster.env choose one by name, or join the node to Ray with the address of the fast one (--node-ip-address)",
        cause=f"{name} of {host} is slower than the interfaces of the other nodes",
        culprit={"host": host, "node": node, "interface": name},
        evidence=[
            figure(f"speed of {name}, bytes a second", speed, "node monitor: /sys/class/net"),
            figure(
                "median speed of the other nodes' interfaces, bytes a second", others, "node monitor: /sys/class/net"
            ),
            waits,
        ],
        others=[{"cause": "a rank computes longer", "against": "the rank that waits least also waits that long"}],
        confidence=0.9,
        lost=exposed,
    )
