"""A run on two hosts, each a node of one Ray cluster with a network, processes, memory and a name of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.end_to_end.conftest import exact
from tests.hosts import Cluster

RAYDIST = str(Path(sys.executable).with_name("raydist"))


IN_MEMORY = (
    "--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2", "--set", "cluster.cpus_per_worker=1",
    "--set", "recovery.step_timeout=120",  # ranks wait longer than they may by themselves
)  # fmt: skip


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


def test_two_hosts_give_the_bits_of_one(project: Any, ray_hosts: Cluster, undisturbed: dict[str, Any]) -> None:
    """One worker on each host: records, weights and eval loss equal those of two workers on a private Ray, bit for bit."""
    assert set(ray_hosts.node_ids()) == {"host0", "host1"}
    there = train(project, ray_hosts, "two-hosts")
    assert (there["status"], there["eval_loss"]) == ("finished", undisturbed["shown"]["eval_loss"])
    assert exact(project.steps("two-hosts")) == exact(undisturbed["rows"])
    assert project.weights("two-hosts", 12) == undisturbed["weights"]
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


def test_a_lost_node_costs_no_copy(project: Any, ray_hosts: Cluster, undisturbed: dict[str, Any]) -> None:
    """Both of a node's processes and its memory are gone; it comes back empty. Its rank goes on from what the other host kept of
    it, without a checkpoint on storage, and ends at the bits of a run in which nothing happened."""
    first, second = ray_hosts.hosts
    options = [*IN_MEMORY, *project.options("lost", hold=11)]
    command = [RAYDIST, "train", "job.yaml", "--name", "lost", "--address", ray_hosts.address, *options]
    env = project.environment() | ray_hosts.environment
    with (project.root / "lost.log").open("w") as log:
        process = first.popen(command, env=env, cwd=str(project.root), stdout=log, stderr=log)

    def kept() -> bool:
        listed = first.run(
            ["sh", "-c", "cd /dev/shm && ls -d raydist-*/checkpoints/*/* raydist-*/buddy/*/*/*"]
        ).stdout.split()
        # The manifest is on the host of rank 0, wherever Ray has put that, and where its buddy is.
        step = {n: n.split("/")[-2] for n in listed}
        manifests = {step[n] for n in listed if "MANIFEST" in n}
        own = {step[n] for n in listed if "/buddy/" not in n and "shard-" in n}
        return bool(manifests & own & {step[n] for n in listed if "/buddy/" in n and "shard-" in n})

    while not kept():
        assert process.poll() is None, (project.root / "lost.log").read_text()
        time.sleep(0.2)  # ranks and MemoryCheckpoints of the hosts do it
    ray_hosts.kill_node(second)
    (project.root / "marks" / "lost" / "go").touch()
    ray_hosts.add_node(second)
    process.wait(200)
    assert process.returncode == 0, (project.root / "lost.log").read_text()
    (resumed,) = project.events("lost", "resumed")
    assert (resumed["source"], resumed["step"] in (2, 4)) == ("memory", True)
    assert exact(project.steps("lost")) == exact(undisturbed["rows"])
    assert project.weights("lost", 12) == undisturbed["weights"]
    for host in ray_hosts.hosts:
        assert not host.run(["sh", "-c", "ls -d /dev/shm/raydist-*"]).stdout
