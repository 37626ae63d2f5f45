"""Faults of a whole node, on a cluster of two hosts: the driver is on the first, all ranks on the second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raydist.faults import Drain, KillNode
from tests.end_to_end.test_hosts import RAYDIST
from tests.faults.conftest import LONG, STEPS, exact, write
from tests.hosts import WATCHFUL, Cluster, Host, Hosts
from tests.processes import command_line, runs


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, and a node of two."""
    with Hosts(2) as hosts, Cluster(hosts, size=1, cpus=0, env=WATCHFUL) as made:
        made.add_node(hosts[1], cpus=2)
        yield made


def left_on(host: Host) -> list[str]:
    """Command lines of what a node consists of, and of the run's processes on it."""
    lines = [command_line(process) for process in host.processes().values() if runs(process)]
    return [line for line in lines if line.startswith(("raylet", "ray::")) or "raydist" in line]


def test_a_killed_node_and_a_drained_one(project: Any, cluster: Cluster, undisturbed: dict[str, Any]) -> None:
    """The node of a rank is killed, with all that is below its raylet; once there is another one the run goes on, to the same
    bits. A drain notice for that one takes no step; Ray ends the node when nothing runs on it any more.
    """
    head, other = cluster.hosts
    faults = write(project, "nodes", [KillNode(rank=1, step=5), Drain(rank=1, step=STEPS - 1)])
    first = cluster.node_ids()[other.name]
    command = [RAYDIST, "train", "job.yaml", "--name", "nodes", "--address", cluster.address, *LONG, *faults]
    with head.popen(command, cwd=project.root, env=project.environment() | cluster.environment) as run:
        try:
            cluster.wait_until(lambda: not cluster.nodes()[first][1], timeout=90)
            cluster.wait_until(lambda: not left_on(other), timeout=10)  # a process that is killed takes a while to end
            second = cluster.add_node(other, cpus=2)
            assert run.wait(90) == 0
        finally:
            run.kill()
    (failure,) = project.events("nodes", "failure")
    assert failure["fault"] in ("node_died", "worker_died")  # Ray may know that of the workers before that of the node
    assert [(e["rank"], e["fault"]) for e in project.events("nodes", "fault")] == [(1, "kill_node"), (1, "drain")]
    assert exact(project.steps("nodes")) == undisturbed["rows"]
    cluster.wait_until(lambda: not cluster.nodes()[second][1])
