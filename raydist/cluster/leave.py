"""`python -m raydist.cluster.leave SECONDS`: drains this host's node of Ray, and returns once the node has ended.

Runs in: a node that is about to be taken away, such as a pod's preStop hook. A run that sees its node drained saves a checkpoint
and continues on the others; Ray then ends the node, since nothing runs on it any more. RAY_ADDRESS names the cluster.
"""

from __future__ import annotations

import os
import sys
import time

from raydist.cluster import authentication

_LOOK_S = 1.0


def drain(address: str, node_ip: str, seconds: float, why: str) -> list[str]:
    """Marks the nodes with that address as about to be removed in so many seconds; returns their ids.

    Does the same as `ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION`."""
    from raydist.cluster.ray_private import GcsClient, autoscaler_pb2

    gcs = GcsClient(address=address)
    found = [id.hex() for id, info in gcs.get_all_node_info(timeout=30).items()
             if info.state == 0 and info.node_manager_address == node_ip]  # fmt: skip
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    for node in found:
        gcs.drain_node(node, reason, why, int((time.time() + seconds) * 1000))
    return found


def main(arguments: list[str]) -> None:
    """Drains this host's node, and waits at most so many seconds for its end."""
    import ray

    from raydist.cluster.ray_private import GcsClient

    seconds = float(arguments[0])
    os.environ.update(authentication.token_mode())
    address, until = os.environ["RAY_ADDRESS"], time.monotonic() + seconds
    left = set(drain(address, ray.util.get_node_ip_address(), seconds, "the node is being taken away"))
    gcs = GcsClient(address=address)
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left &= {id.hex() for id, info in gcs.get_all_node_info(timeout=30).items() if info.state == 0}


if __name__ == "__main__":
    main(sys.argv[1:])
