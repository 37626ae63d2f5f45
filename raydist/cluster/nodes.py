"""The state of the cluster's nodes for elastic runs: free resources, draining nodes, nodes that answer.

Runs in: the driver. Imports ray in functions only; never torch. `room` is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raydist.errors import HeadReplaced
from raydist.spec.resources import ResourcesSpec

NODE_ID_LABEL = "ray.io/node-id"
"""The label that Ray gives every node, for label selectors."""
_ANSWER_S = 60.0
"""How long a task may take to run on a node (its process is new, and the node may be busy), and its answer counts."""
_CONNECT_S = 1.0
_STATE_S = 30.0
_AT_ONCE = 800
"""Connections: half of 1,250 nodes that do not answer are one wait; less than the usual limit of 1,024 open files."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive. `free`: unreserved resources, {"CPU": 8.0, "GPU": 4.0}; `draining`: it is about to be removed."""

    id: str
    free: Mapping[str, float]
    draining: bool = False


def room(
    nodes: Iterable[Node],
    each: Mapping[str, float],
    ours: Mapping[str, int],
    avoid: Collection[str] = (),
    together: int = 1,
) -> int:
    """Workers with resources `each` that the nodes have room for, including the ones already there: `ours`, node id -> workers.

    `together`: see `places`.
    """
    return sum(_room_on_each(nodes, each, ours, avoid, together).values())


def assigned(
    nodes: Iterable[Node],
    each: Mapping[str, float],
    ours: Mapping[str, int],
    avoid: Collection[str],
    together: int,
    workers: int,
) -> list[str]:
    """The node of each of so many workers, a multiple of `together`: on as few nodes as possible, a multiple on each. [] if there
    is no room for them. See `room`.
    """
    on = _room_on_each(nodes, each, ours, avoid, together)
    found: list[str] = []
    for node in sorted(on, key=on.__getitem__, reverse=True):
        found += [node] * min(on[node], workers - len(found))
    return found if len(found) == workers else []


def _room_on_each(
    nodes: Iterable[Node], each: Mapping[str, float], ours: Mapping[str, int], avoid: Collection[str], together: int
) -> dict[str, int]:
    found = {}
    for node in nodes:
        if not node.draining and node.id not in avoid:
            here = places([node.free], each) + ours.get(node.id, 0)
            found[node.id] = here - here % together
    return found


def places(nodes: Iterable[Mapping[str, float]], each: Mapping[str, float], together: int = 1) -> int:
    """Workers with resources `each` that fit on the nodes. A node: its resources, {"CPU": 8.0, "GPU": 4.0}.

    `together`: so many workers must be on one node; only multiples of it count.
    """
    fits = 0
    for node in nodes:
        here = min((math.floor(node.get(name, 0.0) / count + 1e-9) for name, count in each.items() if count), default=0)
        fits += here - here % together
    return fits


def amount(resources: Mapping[str, float]) -> str:
    """Resources as text, such as "8 CPUs and 1 GPU"."""
    named = (f"{v:g} {k}{'s' if v != 1 and k in ('CPU', 'GPU') else ''}" for k, v in resources.items() if v)
    return " and ".join(named) or "nothing"


def listed() -> list[dict[str, Any]]:
    """All nodes, as `ray.nodes()` lists them. Raises HeadReplaced, where that would abort this process."""
    import ray

    _of_head()
    return list(ray.nodes())


def look() -> list[Node]:
    """The nodes that Ray lists as alive."""
    from raydist.cluster.ray_private import available_resources_per_node

    draining = drained()  # first: what follows aborts this process if the head was started again
    free = available_resources_per_node()
    return [Node(n["NodeID"], free.get(n["NodeID"], {}), n["NodeID"] in draining) for n in listed() if n["Alive"]]


def reserved(placement_group: str) -> dict[str, int]:
    """Node id -> bundles of the placement group on it."""
    _of_head()
    from ray.util.placement_group import PlacementGroup, PlacementGroupID, placement_group_table

    facts = placement_group_table(PlacementGroup(PlacementGroupID.from_hex(placement_group)))
    return Counter(facts["bundles_to_node_id"].values()) if facts.get("state") != "REMOVED" else {}


def usable(node: Mapping[str, Any], asked: ResourcesSpec) -> bool:
    """Whether a run may use this node, as `ray.nodes()` lists it: it has the labels, and is not left out by its address."""
    labels = node.get("Labels") or {}
    return node["NodeManagerAddress"] not in asked.exclude and asked.labels.items() <= labels.items()


def unusable(asked: ResourcesSpec) -> set[str]:
    """Ids of the nodes that a run may not use."""
    if not asked.labels and not asked.exclude:
        return set()
    return {node["NodeID"] for node in listed() if not usable(node, asked)}


def drained() -> set[str]:
    """Ids of the nodes that are draining: by `ray drain-node`, an autoscaler, or SIGTERM to their raylet. None while the head does
    not answer. Raises HeadReplaced.
    """
    from raydist.cluster.ray_private import gcs_pb2

    draining = gcs_pb2.NodeSnapshot.DRAINING
    return {node.hex() for node, facts in _of_head().items() if facts.state_snapshot.state == draining}


def head_replaced() -> bool:
    """Whether another cluster answers at the head's address. False while none answers."""
    try:
        _of_head()
    except HeadReplaced:
        return True
    return False


def _of_head() -> Mapping[Any, Any]:
    """Node id -> what the head knows of it. {} while the head does not answer. Raises HeadReplaced."""
    from ray.exceptions import RayError

    from raydist.cluster.ray_private import internal_kv_get_gcs_client

    try:
        nodes: Mapping[Any, Any] = internal_kv_get_gcs_client().get_all_node_info(timeout=_STATE_S)
    except RayError as error:
        if "WrongClusterID" in str(error):
            raise HeadReplaced(
                "Ray's head was started again, as another cluster, which does not have this run's actors",
                "run the same command again to continue",
            ) from error
        return {}
    return nodes


def unreachable(ids: Iterable[str] | None = None) -> set[str]:
    """The nodes of `ids` whose raylet accepts no connection within 1 s. None: of all that Ray lists as alive, asked twice, since a
    packet is lost, and a process that opens a thousand connections is late.

    Ray itself detects a dead node only much later.
    """
    addresses = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in listed() if n["Alive"]}
    if ids is None:
        return unreachable(_silent(addresses))
    asked = {*ids}
    return asked - addresses.keys() | _silent({node: addresses[node] for node in asked & addresses.keys()})


def _silent(addresses: Mapping[str, tuple[str, int]]) -> set[str]:
    return addresses.keys() - asyncio.run(listening(addresses))


async def listening(addresses: Mapping[str, tuple[str, int]]) -> set[str]:
    """The nodes that accept a connection at their (host, port) within 1 s."""
    few = asyncio.Semaphore(_AT_ONCE)

    async def listens(address: tuple[str, int]) -> bool:
        async with few:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, connection = await asyncio.open_connection(*address)
            except OSError:
                return False
            connection.close()
            with contextlib.suppress(OSError):
                await connection.wait_closed()
            return True

    answers = await asyncio.gather(*map(listens, addresses.values()))
    return {node for node, up in zip(addresses, answers, strict=True) if up}


class Pings:
    """Tasks on nodes that were lost: a node whose task has run answers again. A node that is slow to start a process for its task
    is not asked anew, since the next process would be as slow."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[Any, float]] = {}  # node -> the task's result, and when it was sent

    def answering(self, ids: Iterable[str]) -> set[str]:
        """The nodes of `ids` whose task has run. Does not wait: sends a task where none is on its way. A node that answered, or
        whose task failed, gets a new task in the next call."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = {n["NodeID"] for n in listed() if n["Alive"]}
        task = ray.remote(num_cpus=0, max_retries=0)(_ping)
        for node in (alive & {*ids}) - self._asked.keys():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._asked[node] = task.options(scheduling_strategy=there).remote(), time.monotonic()
        answered = set()
        for node, (result, at) in list(self._asked.items()):
            done, _ = ray.wait([result], timeout=0)
            old = node not in alive or time.monotonic() - at > _ANSWER_S
            if not done and not old:
                continue
            if not done:
                ray.cancel(result, force=True)
            elif not old and _succeeded(result):
                answered.add(node)
            del self._asked[node]
        return answered & {*ids}


def _ping() -> bool:
    return True


def _succeeded(ref: object) -> bool:
    import ray
    from ray.exceptions import RayError

    try:
        return bool(ray.get(ref))
    except RayError:
        return False
