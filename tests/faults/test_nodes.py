"""Faults of a whole node, on a cluster of three hosts: the driver is on the first, the stages of a pipeline of tensor groups are on
the two others.

Over a minute: two nodes whose processes start as on a user's cluster, and two runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from raydist.faults import Drain, FullSharedMemory, KillNode
from tests import forked
from tests.exact import exact
from tests.faults.conftest import GPT, write
from tests.hosts import WATCHFUL, Cluster, Host, Hosts
from tests.processes import command_line, runs

STEPS = 24
FIELDS = [f"train.steps={STEPS}", "model.layers=2", "cluster.workers=4", "parallel.tensor=2", "parallel.pipeline=2"]
JOB = [*GPT, *(word for field in FIELDS for word in ("--set", field))]
CPUS = 3
"""Of a node: Ray by itself would place three of the four workers on one."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, and two nodes with CPUS. These are `plain`: the fault kills what is below the raylet, and the two agents
    of a node share a zygote that one of them starts."""
    with Hosts(3) as hosts, Cluster(hosts, size=1, cpus=0, env=WATCHFUL) as made:
        with ThreadPoolExecutor() as threads:
            list(threads.map(partial(made.add_node, cpus=CPUS, plain=True), list(hosts)[1:]))
        yield made


def left_on(host: Host) -> list[str]:
    """Command lines of a node's own processes, and of the run's processes on it."""
    lines = [command_line(process) for process in host.processes().values() if runs(process)]
    return [line for line in lines if line.startswith(("raylet", "ray::")) or "raydist" in line]


def test_a_killed_node_and_a_drained_one(project: Any, cluster: Cluster) -> None:
    """Two stages of two tensor parallel ranks, which stay on one node though there is room for an odd number: the node of one stage
    is killed, with all processes below its raylet; once there is another node the run continues, with the bits of an undisturbed
    one. A full /dev/shm costs no step, and so does a drain notice for the node of rank 1; Ray removes the node when nothing runs on
    it any more."""
    project.train("node-no-fault", *JOB, "--set", "cluster.cpus_per_worker=0.5", own_model=False)
    head, *others = cluster.hosts
    full = FullSharedMemory(rank=2, step=STEPS // 2, seconds=2.0)
    faults = write(project, "node-faults", [KillNode(rank=1, step=5), full, Drain(rank=1, step=STEPS - 1)])
    command = [
        "raydist",
        "train",
        "job.yaml",
        "--name",
        "node-faults",
        "--address",
        cluster.address,
        *JOB,
        "--set",
        "cluster.cpus_per_worker=1",
        *faults,
    ]
    env = project.environment() | cluster.environment | forked.environment()
    with head.popen(forked.command(*command), cwd=project.root, env=env) as run:
        try:
            cluster.wait_until(lambda: len(cluster.node_ids()) == 2, timeout=240)
            (lost,) = (host for host in others if host.name not in cluster.node_ids())
            deadline = time.monotonic() + 240
            while left := left_on(lost):  # a killed process takes a while to exit
                assert time.monotonic() < deadline, left
                time.sleep(0.1)
            cluster.add_node(lost, cpus=CPUS)
            nodes = {host: cluster.node_ids()[host.name] for host in others}
            assert run.wait(400) == 0
        finally:
            run.kill()
    first, last = (
        {host: [w["rank"] for w in event["workers"] if w["host"] == host.name] for host in others}
        for event in project.events("node-faults", "workers")
    )
    assert sorted(first.values()) == sorted(last.values()) == [[0, 1], [2, 3]], "a stage on each node"
    assert 1 in first[lost]
    (failure,) = project.events("node-faults", "failure")
    assert failure["fault"] in ("node_died", "worker_died")  # Ray may report the workers' death before the node's
    happened = [(e["rank"], e["fault"]) for e in project.events("node-faults", "fault")]
    assert happened == [(1, "kill_node"), (2, "full_shared_memory"), (1, "drain")]
    assert exact(project.steps("node-faults")) == exact(project.steps("node-no-fault"))
    (drained,) = (nodes[host] for host, ranks in last.items() if 1 in ranks)
    cluster.wait_until(lambda: not cluster.nodes()[drained][1])
