"""Communication is slow because one node's link is: what it sends waits in its sockets, or is lost and sent again.

Runs anywhere: plain python and numpy. A ring is as fast as its slowest link, so all ranks wait alike; only the sender of that link
has a full socket, because the others wait for what it passes on. Traffic that bypasses the kernel (InfiniBand, RoCE) has no
sockets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis import wrong_network
from raydist.diagnosis._symptoms import all_wait, figure, history
from raydist.diagnosis._window import RECENT, Window
from raydist.records import Finding

CAUSE = "the link of one node is slower than the others"
LOOKS = (
    "what waits in the sockets of each node to its slowest peer, and the segments it sends again, while all ranks wait"
)
COLUMNS = ("link_queue_bytes", "link_queue_peer", "retransmits_count", "nic_out_bytes", "nic_out_packets")
THRESHOLDS = {
    "exposed": ("0.3 of the time", "below that a link twice as fast gains under 15%"),
    "grown": (
        "1.5 times the run's own before, or no history; not while it is reported",
        "a link that was always like this is no fault of one node",
    ),
    "queue": (
        "64 KiB in all of the newest parts but one",
        "Linux's least send buffer for a connection in use (tcp_wmem)",
    ),
    "other nodes": ("4 times the median of the others", "ranks of a healthy ring have like queues"),
}
EXPOSED, QUEUE, TIMES, GROWN = 0.3, 64 << 10, 4.0, 1.5


def full(window: Window) -> tuple[int, float, float] | None:
    """The node whose sockets are full while all ranks wait: its row, what waits in them, and the median of the other nodes."""
    queues = window.series("node", "link_queue_bytes")[:, -RECENT:]
    # A node that has left, or whose kernel does not tell, is not one with empty sockets.
    known = ~np.isnan(queues).all(axis=1)
    if known.sum() < 2 or queues.shape[1] < RECENT or all_wait(window, "exposed") < EXPOSED:
        return None
    queues = np.nan_to_num(queues)
    waits = np.sort(queues, axis=1)[:, 1]  # in all parts but one
    worst = int(waits.argmax())
    means = queues.mean(axis=1)
    own = float(means[worst])
    others = float(np.median(means[known & (np.arange(len(means)) != worst)]))
    return (worst, own, others) if waits[worst] >= QUEUE and own >= TIMES * others else None


def check(window: Window) -> Iterator[Finding]:
    """The node whose sockets are full, and the peer that it sends to."""
    found = full(window)
    if found is None or any(wrong_network.check(window)):
        return
    worst, own, others = found
    node = window.keys("node")[worst]
    exposed, before = all_wait(window, "exposed"), history(window.share("exposed"))
    reported = window.reported.get(("slow_link", None, str(node)))
    if reported is not None:  # a link that stays slow becomes the run's history, and is still slow
        value = reported.evidence[-1]["value"]
        before = float("nan") if value is None else float(value)
    elif exposed < GROWN * before:
        return
    who = window.who("node", node)
    peer = window.text("node", node, "link_queue_peer")
    again = window.recent("node", "retransmits_count")[worst]
    sent = window.recent("node", "nic_out_bytes")[worst]
    packets = max(float(window.recent("node", "nic_out_packets")[worst]), 1.0)
    lost = exposed - (0.0 if np.isnan(before) else before)
    yield Finding(
        rule="slow_link",
        rank=None,
        severity="warning",
        what=f"all ranks wait {exposed:.0%} of the time for communication: the link from {who['host']} ({node}) to {peer} is slow, "
        f"{sent / 2**20:.1f} MiB/s",
        figures={
            "kind": str(node),
            "exposed": exposed,
            "bytes_per_second": float(sent),
            "queue_bytes": own,
        },
        remedy=f"measure it: `raydist bench comm`; check the cable, port and driver of {who['host']} (ethtool -S), and that "
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the fast interface",
        cause=f"what {who['host']} sends to {peer} waits in its sockets",
        culprit={"host": who["host"], "node": node, "link": [node, peer]},
        evidence=[
            figure("bytes that wait in its sockets", own, "node monitor: /proc/net/tcp"),
            figure("median of the other nodes", others, "node monitor: /proc/net/tcp"),
            figure("share of segments that are sent again", float(again) / packets, "node monitor: /proc/net/snmp"),
            figure("exposed communication", exposed, "telemetry: the least of all ranks"),
            figure("exposed communication before", before, "telemetry: the run's own history"),
        ],
        others=[
            {
                "cause": "a rank computes longer",
                "against": "the rank that waits least for the others also waits that long",
            },
            {
                "cause": "more is sent",
                "against": f"{who['host']} sends {sent / 2**20:.1f} MiB/s and its sockets are full",
            },
        ],
        confidence=0.9 if not np.isnan(before) else 0.7,
        lost=max(lost, 0.0),
    )
