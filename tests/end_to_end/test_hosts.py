"""A run on two hosts, each a node of one Ray cluster with a network, processes and a name of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.hosts import Cluster

RAYDIST = str(Path(sys.executable).with_name("raydist"))
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples_hash")


def train(project: Any, cluster: Cluster, name: str, *arguments: str) -> dict[str, Any]:
    """`raydist train job.yaml --json` on the first host, one worker on each; the object that it ends with."""
    command = [RAYDIST, "train", "job.yaml", "--name", name, "--json", "--address", cluster.address]
    each = ["--set", "cluster.cpus_per_worker=1"]
    env = project.environment() | cluster.environment
    done = cluster.hosts[0].run(
        [*command, *each, *project.options(name), *arguments], cwd=project.root, env=env, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_two_hosts_give_the_bits_of_one(project: Any, ray_hosts: Cluster) -> None:
    """One worker on each host: records, weights and eval loss equal those of two workers on a private Ray, bit for bit."""
    assert set(ray_hosts.node_ids()) == {"host0", "host1"}
    there = train(project, ray_hosts, "two-hosts")
    here = project.train("one-host")
    assert (there["status"], there["eval_loss"]) == ("finished", here["eval_loss"])
    both = [[[row[n] for n in EXACT] for row in project.steps(run)] for run in ("two-hosts", "one-host")]
    assert both[0] == both[1]
    assert len(both[0]) == 12
    assert project.weights("two-hosts", 12) == project.weights("one-host", 12)
    (started,) = project.events("two-hosts", "workers")
    places = {(worker["host"], worker["node_ip"]) for worker in started["workers"]}
    assert places == {(host.name, host.ip) for host in ray_hosts.hosts}


def test_a_killed_node_is_gone_and_comes_back_as_another(ray_hosts: Cluster) -> None:
    """Ray's head says that it is dead; the other lives; the host that is booted again is a new node."""
    first = ray_hosts.node_ids()
    ray_hosts.kill_node(ray_hosts.hosts[1])
    ray_hosts.wait_until(lambda: not ray_hosts.nodes()[first["host1"]][1])
    assert ray_hosts.node_ids() == {"host0": first["host0"]}
    again = ray_hosts.add_node(ray_hosts.hosts[1])
    assert again != first["host1"]
    assert ray_hosts.node_ids() == {"host0": first["host0"], "host1": again}
