"""Nodes that are killed, drained or disconnected, and come back: on three hosts, each a node of one Ray cluster with one CPU.

Over a minute: seven commands; in most a node is killed, and joins again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from raydist.run.log import read_steps
from tests import forked
from tests.end_to_end.sweeps import Sweeps, until
from tests.exact import exact
from tests.hosts import WATCHFUL, Cluster, Host, Hosts, Process

HOLD = 9
"""The forward pass in which ranks wait for the test: of step 5 on two workers, with the checkpoint of step 3 committed."""


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    """Three hosts. Ray takes an unreachable node to be dead after 30 s: a test cuts one off for 10, and TCP may repeat what was
    lost as late as 10 s after that."""
    with Hosts(3) as hosts, Cluster(hosts, env=WATCHFUL | {"RAY_health_check_timeout_ms": "6000"}) as cluster:
        yield cluster


@pytest.fixture
def cluster(three_nodes: Cluster) -> Cluster:
    """Three hosts, each a node, whatever the test before has left."""
    three_nodes.make_whole()
    return three_nodes


@pytest.fixture
def start(project: Any, cluster: Cluster) -> Iterator[Callable[..., Run]]:
    """start(name, *arguments): a Run, which is killed at the end of the test."""
    made: list[Run] = []

    def start(*arguments: str, **options: int) -> Run:
        made.append(Run(project, cluster, *arguments, **options))
        return made[-1]

    yield start
    for run in made:
        run.process.kill()
        run.process.communicate()


class Run:
    """`raydist train job.yaml` on host `on`, whose ranks wait in their `hold`-th forward pass until `go`."""

    def __init__(
        self, project: Any, cluster: Cluster, name: str, *arguments: str, on: int = 0, hold: int = HOLD
    ) -> None:
        self.project, self.cluster, self.name = project, cluster, name
        command = ["raydist", "train", "job.yaml", "--name", name, "--json", "--address", cluster.address]
        sets = ["--set", "cluster.cpus_per_worker=1", "--set", "recovery.step_timeout=120", *arguments]
        self.process = cluster.hosts[on].popen(
            forked.command(*command, *project.options(name, hold=hold), *sets),
            cwd=project.root,
            env=project.environment() | cluster.environment | forked.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Its events of these kinds (none given: all), as far as it has begun."""
        with contextlib.suppress(FileNotFoundError):
            return list(self.project.events(self.name, *kinds))
        return []

    def until(self, true: Callable[[], bool], timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"{self.events()}\n{self.cluster.describe()}"
            time.sleep(0.2)  # another process writes it

    def until_trains(self, attempt: int) -> None:
        """Waits for the first step of an attempt."""
        self.until(lambda: any(e["attempt"] == attempt for e in self.events("first_step")))

    def until_held(self, attempt: int) -> None:
        """Waits until its ranks are in the step in which they wait, or so close to it that nothing else can be saved."""
        self.until_trains(attempt)
        first = next(e["step"] for e in self.events("first_step") if e["attempt"] == attempt)
        due = (first + 2) // 3 * 3
        self.until(lambda: any(e["step"] == due for e in self.events("checkpoint_saved")))

    def victim(self) -> Host:
        """A host with a rank; not the host of the driver."""
        names = {worker["host"] for worker in self.events("workers")[-1]["workers"]}
        return next(host for host in self.cluster.hosts if host.name in names and host is not self.cluster.hosts[0])

    def go(self) -> None:
        (self.project.root / "marks" / self.name / "go").touch()

    def go_on(self) -> None:
        """Lets the ranks of this attempt continue; those of the next attempt wait again."""
        for worker in self.events("workers")[-1]["workers"]:
            (self.project.root / "marks" / self.name / f"go-{worker['host']}-{worker['pid']}").touch()

    def finish(self) -> list[dict[str, Any]]:
        """Waits for the end of the run, which must be finished; returns its steps."""
        out, told = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, told
        assert json.loads(out)["status"] == "finished"
        return list(self.project.steps(self.name))


def ranks_on(host: Host) -> list[str]:
    """Command lines of the fork servers and ranks on a host."""
    found = []
    for process in host.processes().values():
        with contextlib.suppress(psutil.NoSuchProcess):  # a ZombieProcess is one
            found.append(" ".join(process.cmdline()))
    return [line for line in found if "fork_server" in line]


def actors_on(host: Host) -> set[str]:
    """Classes of the actors on a host."""
    found = set()
    for process in host.processes().values():
        with contextlib.suppress(psutil.NoSuchProcess):  # a ZombieProcess is one
            (title, *_) = process.cmdline() or [""]
            if title.startswith("ray::"):
                found.add(title.removeprefix("ray::").partition(".")[0].strip())
    return found


def test_a_killed_node_a_drained_one_and_one_that_is_cut_off_are_left(
    start: Any, cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    """A node is killed: the failure names it, and the remaining agent and the spare agent continue at once. It joins again, and the
    other node is drained: the run makes a checkpoint and continues on the new one, without a failure or a step trained twice, and
    no process of it stays on the drained node, which Ray sees to be idle and removes long before the drain's deadline. It joins
    again, and the network of the other one is cut, and restored while the run continues without it: who was cut off commits
    nothing, and no rank is left on the node. One lineage, with the same bits."""
    options = ("--set", "cluster.spares=1", "--set", "recovery.snapshot_every=1")
    run = start("left-nodes", *options, hold=5)  # the third step of each attempt
    run.until_trains(1)
    killed = run.victim()
    cluster.kill_node(killed)
    cluster.wait_until(lambda: killed.name not in cluster.node_ids())  # else Ray would list the host twice
    cluster.add_node(killed)
    run.until_trains(2)
    (failure,) = run.events("failure")
    assert failure["fault"] == "node_died"
    assert killed.name not in {worker["host"] for worker in run.events("workers")[-1]["workers"]}

    drained = run.victim()
    run.until(lambda: actors_on(drained) >= {"NodeMonitor", "MemoryStore"})
    # As a pod's preStop hook does; it returns when Ray has ended the node.
    hook = [sys.executable, "-m", "raydist.cluster.leave", "300"]
    leaving = drained.popen(hook, env=cluster._env | {"RAY_ADDRESS": cluster.address})
    run.until(lambda: any(e["action"] == "leave" for e in run.events("decision")))
    run.go_on()
    run.until_trains(3)
    run.until(lambda: not actors_on(drained) & {"NodeMonitor", "MemoryStore"})
    run.until(lambda: drained.name not in cluster.node_ids())
    assert leaving.wait(120) == 0
    assert len(run.events("failure")) == 1
    first, _, again = run.events("first_step")
    assert again["repeated_steps"] == 0
    assert list(again["stages"]) == ["decide", *first["stages"]]
    assert again["stages"]["decide"] > 0
    assert drained.name not in {worker["host"] for worker in run.events("workers")[-1]["workers"]}

    cluster.kill_node(drained)
    cluster.add_node(drained)
    cut = run.victim()
    cluster.hosts.cut(cut)
    run.until(lambda: len(run.events("attempt_started")) == 4)
    cluster.hosts.heal(cut)
    run.until_trains(4)
    run.go()
    assert exact(run.finish()) == exact(undisturbed["rows"])
    assert [failure["fault"] for failure in run.events("failure")] == ["node_died"] * 2
    assert cut.name not in {worker["host"] for worker in run.events("workers")[-1]["workers"]}
    cluster.wait_until(lambda: not ranks_on(cut))


def test_a_node_on_which_ranks_die_again_and_again_is_left(
    project: Any, start: Any, cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    """Rank 1 is killed twice without a checkpoint in between: the second time its node is excluded, and the spare takes its
    place."""
    dying = project.options("sick-node", kill=[[1, "step", HOLD], [1, "step", HOLD + 1]])
    run = start("sick-node", "--set", "cluster.spares=1", "--set", "checkpoint.every=null", *dying)
    assert exact(run.finish()) == exact(undisturbed["rows"])
    of_rank_1 = [
        worker["host"] for event in run.events("workers") for worker in event["workers"] if worker["rank"] == 1
    ]
    assert of_rank_1[0] == of_rank_1[1]
    hosts = [{worker["host"] for worker in event["workers"]} for event in run.events("workers")]
    assert len(hosts) == 3
    assert of_rank_1[0] not in hosts[2]
    assert [e["exclude"] for e in run.events("decision")] == [None, cluster.node_ids()[of_rank_1[0]]]


def test_a_run_shrinks_and_grows_again(project: Any, start: Any, cluster: Cluster, undisturbed: dict[str, Any]) -> None:
    """Three replicas of two tensor parallel ranks, two after a node is killed, three again when it is back: each step once, with
    its samples. With virtual ranks one undisturbed replica has the same losses, norms and weights, to the bit."""
    mesh = ["--set", "parallel={strategy: zero1, tensor: 2}", "--set", "cluster.cpus_per_worker=0.5"]
    parts = ["--set", "train.virtual_ranks=4"]
    run = start("shrinks", "--set", "cluster.workers=[2,6]", "--set", "train.steps=24", *mesh, *parts)
    run.until_held(1)
    victim = run.victim()
    cluster.kill_node(victim)
    run.until(lambda: any(e["action"] == "resize" for e in run.events("decision")))
    run.until_held(2)
    cluster.wait_until(lambda: victim.name not in cluster.node_ids())
    cluster.add_node(victim)
    run.until(lambda: any(e["action"] == "grow" for e in run.events("decision")))
    run.go()
    steps = run.finish()
    assert [row["step"] for row in steps] == list(range(1, 25))
    sizes = [row["world_size"] for row in steps]
    assert [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]] == [6, 4, 6]
    assert [row["samples_hash"] for row in steps][:12] == [row["samples_hash"] for row in undisturbed["rows"]]
    assert len(run.events("failure")) == 1
    assert run.events("first_step")[-1]["repeated_steps"] == 0
    for event in run.events("workers"):
        hosts = [worker["host"] for worker in event["workers"]]
        assert hosts[::2] == hosts[1::2], "the ranks of a replica are on one node"
    done = project.raydist("checkpoint", "verify", "shrinks", "--replay", "21", "--step", "3", "--trust", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    replay = json.loads(done.stdout)
    assert (replay["before"], replay["workers"]) == ([4, 6], 2)
    assert replay["tensors"] > 0
    assert replay["differences"] == []


WAITING = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(*(group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"))
"""


def test_a_silent_node_and_one_that_is_cut_off_and_taken_back(
    start: Any, cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    """A node loses power while Ray still lists it as alive: the run starts on the others. Then one of these hears nothing
    any more, and can send, until the run waits for a third node: the run continues with the node once it answers again."""
    silent = cluster.hosts[2]
    node = cluster.node_ids()[silent.name]
    silent.power_off()
    assert cluster.nodes()[node][1]
    run = start("taken-back")
    run.until_held(1)
    assert silent.name not in {worker["host"] for worker in run.events("workers")[-1]["workers"]}
    cluster.wait_until(lambda: silent.name not in cluster.node_ids())
    victim = run.victim()
    cluster.hosts.deafen(victim)
    run.until(lambda: bool(run.events("decision")))
    cluster.hosts.undeafen(victim)
    assert victim.name in cluster.node_ids(), "Ray took it to be dead: that is another test"
    run.until_held(2)
    asked = cluster.hosts[0].run([sys.executable, "-c", WAITING, cluster.address], env=cluster._env, timeout=240)
    # The group that waited for a third node is gone.
    assert asked.stdout.split() == ["CREATED"], asked.stdout + asked.stderr
    run.go()
    assert exact(run.finish()) == exact(undisturbed["rows"])
    (failure,) = run.events("failure")
    assert failure["fault"] == "node_died"
    assert [e["repeated_steps"] for e in run.events("first_step")] == [0, 1]
    notes = " ".join(e["text"] for e in run.events("note"))
    assert "there is room for 1 of 2 workers now" in notes
    assert "answers again" in notes


@pytest.fixture
def sweep(project: Any, cluster: Cluster) -> Iterator[Callable[[str], Process]]:
    """sweep(name): `raydist sweep NAME.yaml` on host 0, with cells of one worker, each on its own host; killed at the end of the
    test."""
    made: list[Process] = []

    def start(name: str) -> Process:
        sets = ["--set", "cluster.cpus_per_worker=1", "--set", "recovery.step_timeout=120"]
        command = forked.command("raydist", "sweep", f"{name}.yaml", "--json", "--address", cluster.address, *sets)
        env = project.environment() | cluster.environment | forked.environment()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        made.append(cluster.hosts[0].popen(command, cwd=project.root, env=env, **pipes))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_a_sweep_loses_nodes_and_its_driver(project: Any, sweep: Any, cluster: Cluster) -> None:
    """Three cells, one a node, two at a time. A node is killed: its cell continues where there is room. Then the driver is
    killed: the same command resumes both on the two remaining nodes, then trains the third. Another node is killed: its cell
    waits for a node, the other cell is not affected, and the sweep finishes. Each step is trained once, with the same bits."""
    sweeps = Sweeps(project)
    # They differ in the number of checkpoints kept, which does not change the training. Each process waits in its eighth step.
    sweeps.write("nodes", [{"model.name": "cells:waiting", "checkpoint.keep": n} for n in (5, 6, 7)], 2)
    folder = sweeps.folder("nodes")

    def held(cell: str, attempt: int, *steps: int) -> bool:
        """Whether the cell's checkpoints are these, and its log has the host of that attempt's worker."""
        return folder.run(cell).committed() == [*steps] and len(sweeps.run_events("nodes", cell, "workers")) == attempt

    def host_of(cell: str) -> Host:
        (worker,) = sweeps.run_events("nodes", cell, "workers")[-1]["workers"]
        return next(host for host in cluster.hosts if host.name == worker["host"])

    def elsewhere(*cells: str) -> str:
        """One of these cells that is not on the driver's host."""
        return next(cell for cell in cells if host_of(cell) is not cluster.hosts[0])

    process = sweep("nodes")
    until(process, folder.exists)
    *both, last = sweeps.cells("nodes")
    until(process, lambda: all(held(cell, 1, 4) for cell in both))
    one = elsewhere(*both)
    (two,) = set(both) - {one}
    lost = [host_of(one)]
    cluster.kill_node(lost[0])
    until(process, lambda: folder.run(one).committed() == [4, 8])
    process.kill()
    process.communicate()

    process = sweep("nodes")
    until(process, lambda: held(two, 2, 4, 8) and held(last, 1, 4))
    waits = elsewhere(two, last)
    lost.append(host_of(waits))
    cluster.kill_node(lost[1])
    until(process, lambda: sweeps.events("nodes", waits, "paused"))
    (sweeps.marks("nodes") / "go").touch()
    out, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert json.loads(out)["counts"] == {"finished": 3}
    cells = [one, two, last]
    steps = [exact(read_steps(folder.run(cell)).to_pylist()) for cell in cells]
    assert [row[0] for row in steps[0]] == list(range(1, 13))
    assert steps[0] == steps[1] == steps[2]
    assert [len(sweeps.events("nodes", cell, "started")) for cell in cells] == [
        2,
        2 + (waits == two),
        1 + (waits == last),
    ]
    resumed = [[event["step"] for event in sweeps.run_events("nodes", cell, "resumed")] for cell in cells]
    assert resumed == [[4, 8], [4, 8] if waits == two else [4], [4] if waits == last else []]
    # Ray may report the worker's death first, or the node's.
    faults = {cell: [event["fault"] for event in sweeps.run_events("nodes", cell, "failure")] for cell in cells}
    assert {cell: len(found) for cell, found in faults.items()} == {cell: int(cell in (one, waits)) for cell in cells}
    assert {fault for found in faults.values() for fault in found} <= {"node_died", "worker_died"}
    assert [event.kind for event in folder.events() if event.kind in ("failed", "retried")] == []


def test_the_head_is_lost_and_comes_back(
    start: Any, project: Any, cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    """When the head is lost the driver, on another node, prints it and exits before Ray would kill it. So it does when the head is
    started again at once, which makes another cluster. On a new head at another address the same command ends with the same
    bits."""
    options = ("head-lost", "--set", "recovery.head_timeout=8")
    run = start(*options, on=1)
    run.until_held(1)
    cluster.kill_node(cluster.hosts[0])
    _, told = run.process.communicate(timeout=300)
    assert run.process.returncode == 3, told
    assert f"Ray's head at {cluster.address} has not answered for" in told.splitlines()[-2]
    assert "with another --address if it has moved" in told.splitlines()[-2]
    assert project.show("head-lost")["status"] == "stopped"
    cluster.restart(2)
    run = start("head-lost", "--set", "recovery.head_timeout=55", on=1)
    run.until_held(2)
    cluster.kill_node(cluster.hosts[0])
    cluster.start_head()
    _, told = run.process.communicate(timeout=300)
    assert run.process.returncode == 3, told
    assert f"Ray's head at {cluster.address} was started again, as another cluster" in told.splitlines()[-2]
    assert project.show("head-lost")["status"] == "stopped"
    run.go()
    cluster.restart(2, port=6380)
    assert exact(start(*options, on=1).finish()) == exact(undisturbed["rows"])
