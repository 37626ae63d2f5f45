"""The cluster's nodes, as a run that may shrink, grow and leave needs them: who has room, who is taken away, who answers.

Runs in: the driver. Imports ray in functions only; never torch. `room` is pure.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_ANSWER_S = 3.0
_CONNECT_S = 1.0
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. `free`: what nobody has reserved, {"CPU": 8.0, "GPU": 4.0}; `draining`: it is being taken away."""

    id: str
    free: Mapping[str, float]
    draining: bool = False


def room(nodes: Iterable[Node], each: Mapping[str, float], ours: Mapping[str, int], avoid: Collection[str] = ()) -> int:
    """Workers, of resources `each`, that the nodes can hold, with those that they hold already: `ours`, node id -> workers."""
    fits = 0
    for node in nodes:
        if not node.draining and node.id not in avoid:
            free = (math.floor(node.free.get(name, 0.0) / count + 1e-9) for name, count in each.items() if count)
            fits += min(free, default=0) + ours.get(node.id, 0)
    return fits


def look() -> list[Node]:
    """The nodes that Ray takes to be alive."""
    import ray
    from ray._private.state import available_resources_per_node  # there is no public function that tells it by node

    free, draining = available_resources_per_node(), drained()
    return [Node(n["NodeID"], free.get(n["NodeID"], {}), n["NodeID"] in draining) for n in ray.nodes() if n["Alive"]]


def reserved(placement_group: str) -> dict[str, int]:
    """Node id -> bundles of the placement group on it."""
    from ray.util.placement_group import PlacementGroup, PlacementGroupID, placement_group_table

    facts = placement_group_table(PlacementGroup(PlacementGroupID.from_hex(placement_group)))
    return Counter(facts["bundles_to_node_id"].values()) if facts.get("state") != "REMOVED" else {}


def drained() -> set[str]:
    """Ids of the nodes that are being taken away: by `ray drain-node`, an autoscaler, or SIGTERM to their raylet."""
    from ray._private.state import state  # what Ray Train's own watcher asks

    return set(state.get_draining_nodes())


def unreachable(ids: Iterable[str] | None = None) -> set[str]:
    """Those of the nodes (None: of all that Ray takes to be alive) whose raylet takes no connection within 1 s; Ray itself is sure
    of a death only much later.
    """
    import ray

    where = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]}
    asked = list(where if ids is None else ids)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        listens = threads.map(lambda node: node in where and _listens(where[node]), asked)
        return {node for node, there in zip(asked, listens, strict=True) if not there}


def _listens(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def answering(ids: Iterable[str]) -> set[str]:
    """Those of the nodes that run a task within 3 s."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(_here)
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
        for node in ids
        if node in alive
    }
    if not asked:
        return set()
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    for ref in late:
        ray.cancel(ref, force=True)
    return {asked[ref] for ref in done if _fine(ref)}


def _here() -> bool:
    return True


def _fine(ref: object) -> bool:
    import ray
    from ray.exceptions import RayError

    try:
        return bool(ray.get(ref))
    except RayError:
        return False
