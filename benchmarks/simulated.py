"""Time of the driver's decisions after a failure in a large cluster, and of what it reads: for 1,000 and 10,000 ranks, 8 per node.

    python benchmarks/simulated.py

No torch, no Ray. One rank hangs, or one node is lost. A checkpoint has ten chunks of each rank; three are stored, in a folder of
this file system. Goal: under a second for a decision, under two for a file. Prints seconds of processor time, best of three.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, summary
from raydist.checkpoint.memory_layout import PEERS, SHARED, Shard, needs
from raydist.cluster.nodes import Node, room
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Inventory, place
from raydist.cluster.run.recovery import History, Split, decide, resize
from raydist.cluster.run.root_cause import Failure, RankError, root_cause
from raydist.diagnosis._hang import RankView, judge
from raydist.run.directory import RunDir, begin_attempt, manifest_name, step_folder
from raydist.spec.running import RecoverySpec

PER_NODE = 8
CHUNKS = 10
COLLECTIVES = 50
"""Of each rank: so many go to the coordinator from 10,000 ranks (raydist/launch/agent.py)."""


def errors(world: int) -> list[RankError]:
    """One dead rank, and the lost connections of all others."""
    lost = "Connection closed by peer [10.0.0.1]:1234"
    echoes = [RankError(rank, "RuntimeError", lost, at=2.0, bases=("RuntimeError",)) for rank in range(1, world)]
    return [
        RankError(0, "WorkerDied", "process 7 exited without reporting an error (SIGKILL)", at=1.0, kind="worker_died"),
        *echoes,
    ]


def rank_views(world: int) -> dict[int, RankView]:
    """All ranks wait in a collective that one rank has not started."""
    every = [["0", n, "gloo:all_reduce of [[1000]]"] for n in range(COLLECTIVES)]
    waiting = RankView("S", 7, "backward", 11.0, "", waits=True, collectives=every)
    behind = RankView("S", 7, "backward", 11.0, "train.py:3 in f", collectives=every[:-1])
    return dict.fromkeys(range(world), waiting) | {world // 2: behind}


def memory(world: int, shared: bool) -> tuple[dict[str, Inventory], dict[int, str]]:
    """Two snapshots in the memory of each node and of its peer. One node is lost, and a new one has its ranks."""
    count = world // PER_NODE
    names = {s: [Shard(r, world, 1, f"{r * 1000 + s:032x}").name for r in range(world)] for s in (10, 20)}
    copies = []
    for step in (10, 20):
        common = frozenset(names[step] if shared else names[step][:1])
        copies.append(Copy(step, 1, "MANIFEST-0001.json", world, dict.fromkeys(names[step], 1), common))
    nodes = {}
    for n in range(count):
        own, buddy = (
            {(s, names[s][r]): 1 for s in names for r in range(m * PER_NODE, (m + 1) * PER_NODE)}
            for m in (n, (n - 1) % count)
        )
        nodes[f"n{n}"] = Inventory(own, copies if n < 2 else [], buddy)
    del nodes["n7"]
    return nodes, {r: f"n{r // PER_NODE}" if r // PER_NODE != 7 else "new" for r in range(world)}


def checkpoint(world: int, step: int = 20) -> Manifest:
    """One shard and `CHUNKS` chunks of each rank."""
    names = [Shard(rank, world, 1, f"{rank * 1000 + step:032x}").name for rank in range(world)]
    tensors = {}
    for number in range(CHUNKS):
        chunks = [Chunk((r, 0), (1, 4096), name, number * 16384, 16384) for r, name in enumerate(names)]
        tensors[f"model/blocks.{number}.weight"] = TensorEntry("float32", (world, 4096), tuple(chunks))
    files = {name: FileEntry(CHUNKS * 16384, name[-36:-4]) for name in names}
    return Manifest(step, world, 1, 1.0, "", files, tensors, {SHARED: [], PEERS: []})


def stored(run: RunDir, world: int) -> None:
    """Three checkpoints, whose shards are empty."""
    begin_attempt(run, 1)
    for step in (10, 20, 30):
        made = checkpoint(world, step)
        run.storage.write(f"{step_folder(step)}/{manifest_name(1)}", made.dumps())
        for name in made.files:
            (Path(run.uri) / step_folder(step) / name).touch()


def best(work: Callable[[], Any]) -> float:
    """Seconds of processor time of one call, best of three."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def measure(world: int) -> dict[str, float]:
    """Seconds of each computation of the driver between a failure and the next attempt."""
    policy = RecoverySpec()
    failed, seen = errors(world), rank_views(world)
    cluster = [Node(f"n{n}", {"CPU": 64.0, "GPU": 0.0}) for n in range(world // PER_NODE)]
    ours = {f"n{n}": PER_NODE for n in range(world // PER_NODE - 1)}
    cause = Failure("worker_died", 0, "it died")
    sharded, whole = memory(world, shared=False), memory(world, shared=True)
    made = checkpoint(world)
    data = made.dumps()
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        run = RunDir(folder)
        stored(run, world)
        listed, told = best(run.manifests), best(lambda: summary(run))
    return {
        "root cause of all ranks' errors": best(lambda: root_cause(failed)),
        "who hangs, of all ranks' records": best(lambda: judge(seen)),
        "restart or stop": best(lambda: decide(cause, History().at(5), policy, Split(world, 1, world))),
        "room in the cluster, and the size": best(
            lambda: resize(1, world, world - PER_NODE, room(cluster, {"CPU": 1.0, "GPU": 1.0}, ours), 0.0, policy)
        ),
        "copies in memory, sharded state": best(lambda: place(*sharded)),
        "copies in memory, replicated state": best(lambda: place(*whole)),
        "a manifest, written": best(made.dumps),
        "a manifest, read": best(lambda: Manifest.loads(data)),
        "the shards that a rank restores": best(lambda: needs(made, world // 2, world)),
        "three checkpoints, listed": listed,
        "the same, with their manifests read": told,
    }


def main() -> None:
    """Prints the table, writes results/simulated.json."""
    found = {world: measure(world) for world in (1_000, 10_000)}
    print(f"{'seconds':36s}" + "".join(f"{world:>10,}" for world in found))
    for name in found[1_000]:
        print(f"{name:36s}" + "".join(f"{found[world][name]:10.4f}" for world in found))
    print(write("simulated", {"seconds": {str(world): seconds for world, seconds in found.items()}}))


if __name__ == "__main__":
    main()
