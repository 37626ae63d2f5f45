"""Which of the bytes that a rank sends leave its node: the ranks of a mesh on nodes, and the messages between them.

Runs anywhere. Plain python: no torch, no ray. Ranks are numbered as in worker/mesh.py, tensor innermost, and fill one node after
another. Shares are means over all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from raydist.planner.facts import Machine, Model
from raydist.planner.shares import plan_of
from raydist.planner.traffic import traffic_of_parts

if TYPE_CHECKING:
    from raydist.spec import JobSpec


def replicas_network(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> float:
    """Bytes to replicas on other nodes in a step, of a rank with this stage: around rings, as `traffic` counts them."""
    apart, sharded = _apart(spec, machine), plan_of(strategy).sharded
    sent = 0.0
    for made, over, shard in traffic_of_parts(strategy, spec, machine, model):
        stride, size = apart // over, shard if sharded else over
        bases = range(0, machine.ranks, apart)
        rings = [range(base + j, base + apart, stride) for base in bases for j in range(stride)]
        within = (ring[n : n + size] for ring in rings for n in range(0, over, size))
        sent += (made.gathers + made.sums) * _around(within, machine.per_node)
        sent += made.across * _around((ring[n::size] for ring in rings for n in range(size)), machine.per_node)
    return sent


def group_share(spec: JobSpec, machine: Machine) -> float:
    """Share of what a rank sends to its tensor and context groups, which are consecutive ranks, that goes to other nodes."""
    parallel = spec.parallel
    groups = _consecutive(parallel.tensor * parallel.context, machine.ranks)
    return (_each_to_each if parallel.context > 1 else _around)(groups, machine.per_node)


def experts_share(spec: JobSpec, machine: Machine) -> float:
    """Share of what a rank exchanges with the ranks of experts that goes to other nodes, of all alike."""
    return _each_to_each(_consecutive(spec.parallel.expert, machine.ranks), machine.per_node)


def stages_share(spec: JobSpec, machine: Machine, source: int, target: int) -> float:
    """Share of the ranks of a stage whose counterparts in another one are on other nodes. Stages: by their rank in the pipeline."""
    apart, node = _apart(spec, machine), machine.per_node
    return sum((source * apart + n) // node != (target * apart + n) // node for n in range(apart)) / apart


def _apart(spec: JobSpec, machine: Machine) -> int:
    """Ranks of a stage."""
    return machine.ranks // spec.parallel.pipeline


def _consecutive(size: int, ranks: int) -> Iterable[range]:
    return (range(n, n + size) for n in range(0, ranks, size))


def _around(groups: Iterable[Sequence[int]], per_node: int) -> float:
    """Share of the bytes of a ring, in which each sends to the next, that leave a node."""
    leaving = every = 0
    for group in groups:
        every += len(group)
        leaving += sum(group[n - 1] // per_node != rank // per_node for n, rank in enumerate(group))
    return leaving / every


def _each_to_each(groups: Iterable[Sequence[int]], per_node: int) -> float:
    leaving = every = 0
    for group in groups:
        on = Counter(rank // per_node for rank in group)
        every += len(group) * (len(group) - 1)
        leaving += len(group) ** 2 - sum(count**2 for count in on.values())
    return leaving / every if every else 0.0
