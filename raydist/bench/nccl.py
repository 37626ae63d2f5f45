"""What NCCL's algorithms and protocols should take for an all-reduce here: a hint for NCCL_ALGO and NCCL_PROTO.

Runs anywhere. Pure. NCCL chooses both by such a model, anew for each size, and its guide keeps the two variables for debugging:
leave them unset, unless a measured time is far above what is expected here, and another value is measured to be faster.

    Ring     2 (p - 1) steps, of which 2 (nodes - 1) go between nodes; all of the bandwidth
    Tree     2 (p / nodes - 1) steps within a node and 2 log2(nodes) between nodes; 0.92 of the bandwidth
    LL       a flag beside each 4 bytes in place of a synchronisation: the least latency, a quarter of the bandwidth
    LL128    a flag in each 128 bytes: 0.92 of the bandwidth. NCCL enables it where links are safe for it: do not force it
    Simple   large pieces, each synchronised: all of the bandwidth

Sources: latencies of a call, and of a step over NVLink and over a network: NCCL's src/graph/tuning.cc; Hu et al., Demystifying
NCCL, arXiv 2507.04786; double binary trees: Sanders et al. 2009, in NCCL since 2.4; docs.nvidia.com/deeplearning/nccl, env.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_US = 1e-6
_STEP = {  # (of a call, of a step within a node, of one between nodes)
    ("Ring", "LL"): (6.6, 0.6, 2.7),
    ("Ring", "LL128"): (14.0, 1.9, 4.0),
    ("Ring", "Simple"): (8.4, 3.4, 14.0),
    ("Tree", "LL"): (6.8, 0.6, 5.0),
    ("Tree", "LL128"): (14.0, 1.25, 8.5),
    ("Tree", "Simple"): (8.4, 4.0, 14.0),
}
_SHARE = {"Ring": 1.0, "Tree": 0.92, "LL": 0.25, "LL128": 0.92, "Simple": 1.0}


def predict(nbytes: float, world: int, nodes: int, busbw: float) -> dict[tuple[str, str], float]:
    """(algorithm, protocol) -> seconds. `busbw`: what large arrays reach, in bytes/s."""
    made = {}
    for (algorithm, protocol), (call, within, between) in _STEP.items():
        far = 2 * (nodes - 1) if algorithm == "Ring" else 2 * math.ceil(math.log2(nodes))
        near = 2 * (world - nodes) if algorithm == "Ring" else 2 * (math.ceil(world / nodes) - 1)
        sent = 2 * (world - 1) / world * nbytes / (busbw * _SHARE[algorithm] * _SHARE[protocol])
        made[algorithm, protocol] = (call + near * within + far * between) * _US + sent
    return made


def expected(rows: Sequence[Mapping[str, Any]], world: int, nodes: int) -> list[dict[str, Any]]:
    """Of each measured size of an all-reduce: `size`, the `algorithm` and `protocol` with the least expected `seconds`, and those
    `measured`."""
    found = [row for row in rows if row["op"] == "all_reduce" and row["type"] == "fp32" and row["busbw"]]
    busbw = max((row["busbw"] for row in found), default=0.0)
    made = []
    for row in found:
        times = predict(row["size"], world, nodes, busbw)
        algorithm, protocol = least = min(times, key=lambda way: times[way])
        made.append(
            {
                "size": row["size"],
                "algorithm": algorithm,
                "protocol": protocol,
                "seconds": times[least],
                "measured": row["median"],
            }
        )
    return made
