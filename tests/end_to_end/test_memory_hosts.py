"""A lost node costs no copy: what it had in memory is on the other host."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tests.end_to_end.test_exactness import exact
from tests.hosts import Cluster

RAYDIST = str(Path(sys.executable).with_name("raydist"))
PLAIN = (
    "--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2", "--set", "cluster.cpus_per_worker=1",
    "--set", "recovery.step_timeout=120",  # ranks wait longer than they may by themselves
)  # fmt: skip


def test_a_lost_node_costs_no_copy(project: Any, ray_hosts: Cluster) -> None:
    """Both of a node's processes and its memory are gone; it comes back empty. Its rank goes on from what the other host kept of
    it, without a checkpoint on storage, and ends at the bits of a run in which nothing happened."""
    project.train("hosts-undisturbed", *PLAIN)
    first, second = ray_hosts.hosts
    options = [*PLAIN, *project.options("lost", hold=11)]
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
        time.sleep(0.2)  # ranks and Vaults of the hosts do it
    ray_hosts.kill_node(second)
    (project.root / "marks" / "lost" / "go").touch()
    ray_hosts.add_node(second)
    process.wait(200)
    assert process.returncode == 0, (project.root / "lost.log").read_text()
    (resumed,) = project.events("lost", "resumed")
    assert (resumed["source"], resumed["step"] in (2, 4)) == ("memory", True)
    assert exact(project.steps("lost")) == exact(project.steps("hosts-undisturbed"))
    assert project.weights("lost", 12) == project.weights("hosts-undisturbed", 12)
    for host in ray_hosts.hosts:
        assert not host.run(["sh", "-c", "ls -d /dev/shm/raydist-*"]).stdout
