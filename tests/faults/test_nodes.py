"""Faults of a whole node, on two hosts."""

from __future__ import annotations

from typing import Any

import yaml

from raydist.faults import Drain, KillNode
from tests.end_to_end.test_hosts import EXACT, RAYDIST
from tests.hosts import Cluster


def test_a_killed_node_and_a_drained_one(project: Any, ray_hosts: Cluster) -> None:
    """The node of a rank is killed, with all that is below its raylet; once there is another one the run goes on, to the same bits.
    A drain notice for that one takes no step; Ray ends the node when nothing runs on it any more.
    """
    head, other = ray_hosts.hosts
    faults = [KillNode(rank=1, step=5), Drain(rank=1, step=11)]
    (project.root / "nodes.yaml").write_text(yaml.safe_dump([fault.model_dump(mode="json") for fault in faults]))
    first = ray_hosts.node_ids()[other.name]
    command = [
        RAYDIST,
        "train",
        "job.yaml",
        "--name",
        "nodes",
        "--address",
        ray_hosts.address,
        "--faults",
        "nodes.yaml",
    ]
    spec = ["--set", "cluster.cpus_per_worker=1", *project.options("nodes")]
    with head.popen([*command, *spec], cwd=project.root, env=project.environment() | ray_hosts.environment) as run:
        ray_hosts.wait_until(lambda: not ray_hosts.nodes()[first][1], timeout=120)
        assert {process.name() for process in other.processes().values()} == {"cat"}  # the host's own init
        second = ray_hosts.add_node(other)
        assert run.wait(240) == 0
    assert [(e["rank"], e["fault"]) for e in project.events("nodes", "failure")] == [(1, "node_died")]
    assert [(e["rank"], e["fault"]) for e in project.events("nodes", "fault")] == [(1, "kill_node"), (1, "drain")]
    project.train("no-faults")
    both = [[[row[n] for n in EXACT] for row in project.steps(name)] for name in ("nodes", "no-faults")]
    assert both[0] == both[1]
    assert len(both[0]) == 12
    ray_hosts.wait_until(lambda: not ray_hosts.nodes()[second][1])
