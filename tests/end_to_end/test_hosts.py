"""A run on two hosts, each a node of one Ray cluster with its own network, processes, memory and host name.

Over a minute: two hosts start a cluster; one of them is killed, and joins again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests import forked
from tests.exact import exact
from tests.hosts import Cluster, Host
from tests.sockets import ATTACK, unexpected

IN_MEMORY = (
    "--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2", "--set", "cluster.cpus_per_worker=1",
    "--set", "recovery.step_timeout=120",  # the default is shorter than the ranks wait here
)  # fmt: skip


def train(project: Any, cluster: Cluster, name: str, *arguments: str) -> dict[str, Any]:
    """Runs `raydist train job.yaml --json` on the first host with one worker on each; returns the object that it prints."""
    command = forked.command("raydist", "train", "job.yaml", "--name", name, "--json", "--address", cluster.address)
    each = ["--set", "cluster.cpus_per_worker=1"]
    env = project.environment() | cluster.environment | forked.environment()
    done = cluster.hosts[0].run(
        [*command, *each, *project.options(name), *arguments], cwd=project.root, env=env, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_two_hosts_give_the_bits_of_one(project: Any, ray_hosts: Cluster, undisturbed: dict[str, Any]) -> None:
    """With one worker on each host, records, weights and eval loss equal those of two workers on a private Ray, bit for bit."""
    assert set(ray_hosts.node_ids()) == {"host0", "host1"}
    there = train(project, ray_hosts, "two-hosts")
    assert (there["status"], there["eval_loss"]) == ("finished", undisturbed["shown"]["eval_loss"])
    assert exact(project.steps("two-hosts")) == exact(undisturbed["rows"])
    assert project.weights("two-hosts", 12) == undisturbed["weights"]
    (started,) = project.events("two-hosts", "workers")
    places = {(worker["host"], worker["node_ip"]) for worker in started["workers"]}
    assert places == {(host.name, host.ip) for host in ray_hosts.hosts}


def assert_closed(host: Host, run: Path) -> None:
    """What listens on the host, and its files, are as the page on security says; another user of it gets nothing of the run."""
    root = Path(__file__).parents[2]
    done = host.run([sys.executable, "-m", "tests.shared_files", str(run)], cwd=root, timeout=240)
    assert json.loads(done.stdout) == [], done.stderr
    done = host.run([sys.executable, "-m", "tests.sockets"], cwd=root, timeout=240)
    rows, what = json.loads(done.stdout)
    assert {"rank", "raylet", "zygote"} <= {name for name, _ in rows}
    # Ray's own folder is elsewhere on these hosts, and has sockets for every user of the node.
    assert unexpected((name, address.replace("/run/ray/", "/tmp/ray/")) for name, address in rows) == []
    what["unix"] = [address for address in what["unix"] if "raydist-" in address]
    what["paths"] = sorted({str(Path(address).parent) for address in what["unix"] if address.startswith("/")})
    attack = host.run([sys.executable, "-c", ATTACK, json.dumps(what)], timeout=240)
    assert attack.returncode == 0, attack.stderr
    assert json.loads(attack.stdout) == []


def test_a_lost_node_costs_no_copy(project: Any, ray_hosts: Cluster, undisturbed: dict[str, Any]) -> None:
    """A node is killed with its memory, and joins again, empty, as another Ray node. Its rank resumes from the copy on the other
    host, without a checkpoint on storage, and the run ends with the bits of an undisturbed one. Before, another user has attacked
    both hosts in vain."""
    first, second = ray_hosts.hosts
    nodes = ray_hosts.node_ids()
    options = [*IN_MEMORY, *project.options("lost", hold=11)]
    command = forked.command("raydist", "train", "job.yaml", "--name", "lost", "--address", ray_hosts.address, *options)
    env = project.environment() | ray_hosts.environment | forked.environment()
    with (project.root / "lost.log").open("w") as log:
        process = first.popen(command, env=env, cwd=str(project.root), stdout=log, stderr=log)

    def kept() -> bool:
        listed = first.run(
            ["sh", "-c", "cd /dev/shm && ls -d raydist-*/checkpoints/*/* raydist-*/buddy/*/*/*"]
        ).stdout.split()
        # The manifest is on the host of rank 0, which Ray chooses, and on its buddy.
        step = {n: n.split("/")[-2] for n in listed}
        manifests = {step[n] for n in listed if "MANIFEST" in n}
        own = {step[n] for n in listed if "/buddy/" not in n and "shard-" in n}
        return bool(manifests & own & {step[n] for n in listed if "/buddy/" in n and "shard-" in n})

    while not kept():
        assert process.poll() is None, (project.root / "lost.log").read_text()
        time.sleep(0.5)  # ranks and MemoryCheckpoints of the hosts do it
    for host in ray_hosts.hosts:
        assert_closed(host, project.runs / "lost")
    ray_hosts.kill_node(second)
    (project.root / "marks" / "lost" / "go").touch()
    ray_hosts.wait_until(lambda: not ray_hosts.nodes()[nodes["host1"]][1])
    assert ray_hosts.node_ids() == {"host0": nodes["host0"]}
    again = ray_hosts.add_node(second)
    assert again != nodes["host1"]
    assert ray_hosts.node_ids() == {"host0": nodes["host0"], "host1": again}
    process.wait(200)
    assert process.returncode == 0, (project.root / "lost.log").read_text()
    (resumed,) = project.events("lost", "resumed")
    # Of step 2 or 4. A snapshot that is due while the one before is being copied is taken a step later.
    assert resumed["source"] == "memory"
    assert 2 <= resumed["step"] <= 5
    assert exact(project.steps("lost")) == exact(undisturbed["rows"])
    assert project.weights("lost", 12) == undisturbed["weights"]
    for host in ray_hosts.hosts:
        assert not host.run(["sh", "-c", "ls -d /dev/shm/raydist-*"]).stdout


def test_the_nodes_are_measured_without_a_job(project: Any, ray_hosts: Cluster) -> None:
    """`raydist check` on two hosts: a rank on each, the link between them, and the storage. A node that is left
    out by its address, from Python, gets no rank. A folder that the other host does not share is an error before anything is
    measured."""
    env = project.environment() | ray_hosts.environment | forked.environment()
    first, second = ray_hosts.hosts
    check = forked.command("raydist", "check", "--address", ray_hosts.address, "--json", "--slow", "0.01")
    done = first.run(check, cwd=project.root, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["nodes"]
    assert {(row["node"], row["ranks"]) for row in rows} == {(first.ip, 1), (second.ip, 1)}
    for row in rows:
        assert min(row[rate] for rate in ("link", "matmul", "memory", "storage_mb_s", "storage_iops")) > 0
    alone = {"cluster.resources.exclude": [second.ip]}
    call = f"raydist.check(set={alone}, address={ray_hosts.address!r}, slow=0.01)['nodes']"
    script = f"import raydist; print([row['node'] for row in {call}])"
    done = first.run([sys.executable, "-c", script], cwd=project.root, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"[{first.ip!r}]\n"), done.stderr
    done = first.run([*check, "--storage", "/dev/shm/runs"], cwd=project.root, env=env, timeout=300)
    assert done.returncode == 2, done.stdout
    assert f"node {second.ip}: /dev/shm/runs is another folder there" in done.stderr
