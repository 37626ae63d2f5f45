"""Faults of a whole node, on a cluster of two hosts: the driver is on the first, all ranks are on the second.

Over a minute: a cluster whose processes start as on a user's, and two runs of sixty steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.faults import Drain, KillNode
from tests import forked
from tests.exact import exact
from tests.faults.conftest import LONG, STEPS, write
from tests.hosts import WATCHFUL, Cluster, Host, Hosts
from tests.processes import command_line, runs


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, and a node with two. `plain`: the fault kills what is below the raylet, and the two agents of the node
    share a zygote that one of them starts."""
    with Hosts(2) as hosts, Cluster(hosts, size=1, cpus=0, env=WATCHFUL, plain=True) as made:
        made.add_node(hosts[1], cpus=2)
        yield made


def left_on(host: Host) -> list[str]:
    """Command lines of a node's own processes, and of the run's processes on it."""
    lines = [command_line(process) for process in host.processes().values() if runs(process)]
    return [line for line in lines if line.startswith(("raylet", "ray::")) or "raydist" in line]


def test_a_killed_node_and_a_drained_one(project: Any, cluster: Cluster, undisturbed: dict[str, Any]) -> None:
    """The node of a rank is killed, with all processes below its raylet; once there is another node the run continues, with the
    same bits. A drain notice for the new node costs no step; Ray removes the node when nothing runs on it any more."""
    head, other = cluster.hosts
    faults = write(project, "node-faults", [KillNode(rank=1, step=5), Drain(rank=1, step=STEPS - 1)])
    first = cluster.node_ids()[other.name]
    command = ["raydist", "train", "job.yaml", "--name", "node-faults", "--address", cluster.address, *LONG, *faults]
    env = project.environment() | cluster.environment | forked.environment()
    with head.popen(forked.command(*command), cwd=project.root, env=env) as run:
        try:
            cluster.wait_until(lambda: not cluster.nodes()[first][1], timeout=240)
            deadline = time.monotonic() + 240
            while left := left_on(other):  # a killed process takes a while to exit
                assert time.monotonic() < deadline, left
                time.sleep(0.1)
            second = cluster.add_node(other, cpus=2)
            assert run.wait(400) == 0
        finally:
            run.kill()
    (failure,) = project.events("node-faults", "failure")
    assert failure["fault"] in ("node_died", "worker_died")  # Ray may report the workers' death before the node's
    assert [(e["rank"], e["fault"]) for e in project.events("node-faults", "fault")] == [(1, "kill_node"), (1, "drain")]
    assert exact(project.steps("node-faults")) == undisturbed["rows"]
    cluster.wait_until(lambda: not cluster.nodes()[second][1])
