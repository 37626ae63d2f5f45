"""`raydist check`: what every node has and does, and which are slow against the others. Needs no job.

Runs in: the driver. Imports ray in functions only; never torch. `everywhere`, `table` and `slow` are pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.cluster import nodes, preflight
from raydist.cluster.session import Session
from raydist.errors import PreflightError
from raydist.report.check import RATES
from raydist.spec import JobSpec
from raydist.spec.parallel import ParallelSpec

SLOW = 0.8
"""A node is slow if it does less than this share of the nodes' median."""
_UNIT = {"matmul": 1e12, "memory": 1e9, "to_device": 1e9, "in_node": 1e9, "link": 1e9}


def run(job: JobSpec, session: Session, storage: str, share: float = SLOW) -> dict[str, Any]:
    """Preflight with every measurement, then one rank on each GPU, or on each node without GPUs. docs/how-to/check.md lists the
    keys. Raises PreflightError as `preflight.check` does, and what `bench.run` raises."""
    from raydist.cluster import bench, node_facts

    has = preflight.check(job, session, storage, None, measure=True)
    asked = everywhere(job, [node["Resources"] for node in preflight.usable_nodes(job, session)])
    result = bench.run("raydist.bench.node:in_ranks", {"threads": 1}, asked, session, spread=True)
    found = table(has, result)
    return {
        "v": 1,
        "backend": result["backend"],
        "nodes": found,
        "differs": node_facts.odd({node["node"]: node for node in found}),
        "slow": slow(found, share),
    }


def everywhere(job: JobSpec, there: Sequence[Mapping[str, float]]) -> JobSpec:
    """The job with a rank for each GPU of these nodes, or for each node without GPUs, whatever its mesh. Pure."""
    gpus = job.cluster.gpus_per_worker != 0 and any(node.get("GPU") for node in there)
    if gpus:
        each = {"workers": nodes.places(there, {"GPU": 1.0}), "cpus_per_worker": 0.01, "gpus_per_worker": 1.0}
    else:
        ranks = sum(node.get("CPU", 0.0) >= 1 for node in there)
        each = {"workers": ranks, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0}
    fields = {**each, "spares": 0, "resources.custom": {}}
    return job.with_fields({f"cluster.{name}": value for name, value in fields.items()} | {"parallel": ParallelSpec()})


def table(has: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a node: what it has, the slowest rate of its ranks, and the median bandwidth of its links to other nodes, in units of
    RATES."""
    rows = []
    pairs = measured["pairs"]
    between = dict(zip(pairs["names"], pairs["bandwidth"], strict=True))
    for ip in dict.fromkeys([*(rank["node_ip"] for rank in measured["ranks"]), *has]):
        mine = [rank for rank in measured["ranks"] if rank["node_ip"] == ip]
        rates: dict[str, float | None] = {
            name: min(values) / _UNIT[name] if (values := [r[name] for r in mine if r[name] is not None]) else None
            for name in ("matmul", "memory", "to_device", "in_node")
        }
        links = [speed for speed in between.get(ip, []) if speed]
        rates["link"] = statistics.median(links) / _UNIT["link"] if links else None
        rows.append({"node": ip, "ranks": len(mine), **has.get(ip, {"gpus": 0}), **rates})
    return rows


def slow(rows: Sequence[Mapping[str, Any]], share: float) -> list[dict[str, Any]]:
    """Each rate of each node below `share` of the nodes' median. Pure."""
    found = []
    for rate in RATES:
        values = {row["node"]: row[rate] for row in rows if row.get(rate) is not None}
        usual = statistics.median(values.values()) if values else 0.0
        found += [
            {"node": node, "rate": rate, "value": value, "median": usual}
            for node, value in values.items()
            if value < share * usual
        ]
    return found


def without_slow(job: JobSpec, session: Session, slow: Sequence[Mapping[str, Any]]) -> JobSpec:
    """The job without these nodes, of `run`. Raises PreflightError if it does not fit on the others."""
    names = sorted({each["node"] for each in slow})
    left = job.with_fields({"cluster.resources.exclude": [*job.cluster.resources.exclude, *names]})
    problems = preflight.check_resources(left, [node["Resources"] for node in preflight.usable_nodes(left, session)])
    if problems:
        raise PreflightError(f"without the slow nodes {', '.join(names)}: {problems[0]}")
    return left
