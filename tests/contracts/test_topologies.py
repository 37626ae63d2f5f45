"""Every `comm.topology`: each gradient is that of one process, and of torch's all-reduce, and replicas are equal to the bit.

Over a minute on a busy machine: four ranks sum every way, with replicas of one rank and of two.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.errors import SpecError, UserError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, load
from raydist.worker.comm import links, topology
from raydist.worker.comm.buckets.model import AlphaBeta
from raydist.worker.comm.links import Links
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters
from raydist.worker.parallel._topology import teams
from tests.training import (
    CONTEXT,
    MODEL,
    Trainer,
    alone,
    counted,
    job,
    mesh_job,
    mine,
    run,
    samples,
    slow_link_found,
)  # fmt: skip

N, MICRO, STEPS = 12, 1, 2
WAYS: dict[str, dict[str, Any]] = {
    "torch": {},
    "direct": {"topology": "direct"},
    "two_level": {"topology": "two_level"},
    "ring": {"topology": "ring", "ring": [0, 2, 1, 3]},
}
BUCKET = {"strategy": "ddp", "bucket_mb": 0.002}
"""Several buckets, some of them with fewer numbers than fill a row for each rank."""
Gradients = dict[str, torch.Tensor]


def stepped(rank: Rank, ways: list[str], per_node: int, mesh: Mapping[str, int] = {}, reduce: str = "fp32") -> Any:
    """Of each way: the gradients of each step, a hash of the weights after them, and the collectives. So many ranks a node."""
    rank = replace(rank, node_ip=f"node {rank.rank // per_node}")
    tensor, pipeline, context = (mesh.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    found = {}
    for way in ways:
        comm = dict(WAYS[way])
        if "ring" in comm:
            comm["ring"] = [*range(0, rank.world_size, 2), *range(1, rank.world_size, 2)]
        made = mesh_job(
            "ddp",
            tensor,
            MODEL,
            {**BUCKET, **mesh},
            comm=comm,
            optim={"lr": 1e-2, "clip": 0.0, "eps": 1e-3},
            precision={"reduce": reduce},
            cluster={"workers": rank.world_size},
        )
        trainer = Trainer(rank, made, N * CONTEXT)
        log = CollectiveCounters(rank.device)
        log.install()
        steps: list[Gradients] = []
        for s in range(1, STEPS + 1):
            batches, gradients = mine(rank, *samples(N, seed=s), MICRO, tensor, pipeline, context), {}
            trainer.before_update = partial(lambda into, of: into.update(of.whole(grad=True)), gradients, trainer)
            trainer.step(s, batches, counted(batches), 1e-2, want_stop=False)
            steps.append(gradients)
        log.close()
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(trainer.whole().items()))).hexdigest()
        found[way] = steps, digest, {op: (t.count, t.wire_bytes) for op, t in log.totals().items()}
    return found


@functools.cache
def one_process() -> list[Gradients]:
    """The gradients of each step."""
    steps: list[Gradients] = stepped(alone(), ["torch"], 1)["torch"][0]
    return steps


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (3, 2)])
def test_each_gradient_is_that_of_one_process(ranks: Any, world: int, per_node: int) -> None:
    """With accumulation, on nodes of two ranks, and of two and one, where there are no two levels. All ranks have the same
    weights."""
    ways = [way for way in WAYS if way != "ring" or world == 4]
    every, expected = run(ranks, stepped, world, ways, per_node), one_process()
    for way in ways:
        assert len({of_rank[way][1] for of_rank in every}) == 1
        steps, _, counts = every[0][way]
        for got, one, plain in zip(steps, expected, every[0]["torch"][0], strict=True):
            assert got.keys() == one.keys()
            for name, gradient in got.items():
                # Another order of additions: rounding alone, which the update of weights with small gradients makes larger.
                torch.testing.assert_close(gradient, one[name], rtol=1e-5, atol=3e-6)
                torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=3e-6)
        two = way == "two_level" and (world, per_node) == (4, 2)
        assert ("all_to_all" in counts) == (two or way == "direct"), way
    if (world, per_node) == (
        4,
        2,
    ):  # of which nothing was sent twice: half of each bucket between nodes, as a ring of two does
        (sums, direct, two) = (every[0][way][2] for way in ("torch", "direct", "two_level"))
        buckets = direct["all_to_all"][0]
        assert two["all_to_all"][0] == buckets > STEPS
        assert two["all_reduce"][0] == sums["all_reduce"][0]
        assert sum(b for _, b in direct.values()) == pytest.approx(sum(b for _, b in sums.values()), rel=0.05)
        assert sum(b for _, b in two.values()) == pytest.approx(sum(b for _, b in sums.values()), rel=0.05)


def test_a_ring_has_its_order(ranks: Any) -> None:
    """On four ranks the order of a ring changes the last bits, so the ring was another; each run of it has the same."""
    first = run(ranks, stepped, 4, ["torch", "ring"], 2)[0]
    assert first["ring"][1] != first["torch"][1]
    assert run(ranks, stepped, 4, ["ring"], 2)[0]["ring"][1] == first["ring"][1]


def test_in_fewer_bits(ranks: Any) -> None:
    """`precision.reduce` sets the format of what is sent, with the rounding that it has."""
    every, expected = run(ranks, stepped, 4, list(WAYS), 2, {}, "bf16"), one_process()
    for way in WAYS:
        assert len({of_rank[way][1] for of_rank in every}) == 1
        for name, gradient in every[0][way][0][0].items():
            # Each of the four terms, and each sum of them, is rounded by up to 2**-9 of itself; terms may cancel.
            largest = float(expected[0][name].abs().max())
            torch.testing.assert_close(gradient, expected[0][name], rtol=0.05, atol=0.02 * largest + 1e-6)
    wire = {way: sum(b for _, b in every[0][way][2].values()) for way in WAYS}
    assert wire["two_level"] == pytest.approx(wire["torch"], rel=0.05)


@pytest.mark.parametrize(
    ("world", "per_node", "mesh"), [(8, 4, {"tensor": 2}), (8, 2, {"pipeline": 2}), (4, 2, {"context": 2})]
)
def test_on_meshes(ranks: Any, world: int, per_node: int, mesh: dict[str, int]) -> None:
    """Each data group has four ranks on two nodes: with tensor parallel layers every second rank; the half of a stage; with shared
    sequences also the ranks that share them. A ring has those of its order."""
    every, expected = run(ranks, stepped, world, list(WAYS), per_node, mesh), one_process()
    plain = every[0]["torch"][2].get("all_to_all", (0, 0))[0]
    for way in WAYS:
        assert len({of_rank[way][1] for of_rank in every}) == 1
        for got, right in zip(every[0][way][0], expected, strict=True):
            assert got.keys() == right.keys()
            for name, gradient in got.items():
                torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=3e-6)
        sent = every[0][way][2].get("all_to_all", (0, 0))[0]
        assert (sent > plain) == (way in ("direct", "two_level")), way


def test_teams() -> None:
    """As large as nodes allow, and all alike; where ranks of a node are not consecutive, too."""
    assert teams([0, 1, 2, 3], ["a", "a", "b", "b"]) == [[0, 1], [2, 3]]
    assert teams([0, 1, 2, 3], ["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert teams([0, 1, 2, 3, 4, 5], ["a", "a", "a", "a", "b", "b"]) == [[0, 1], [2, 3], [4, 5]]
    assert teams([0, 1, 2], ["a", "a", "b"]) == [[0], [1], [2]]
    assert teams([1, 3], ["a", "a", "b", "b"]) == [[1], [3]]


def linked(racks: list[int]) -> Links:
    """Nodes of racks: 1 GB/s within one, 0.2 between; with 3% of noise."""
    n, draw = len(racks), random.Random(0)
    speed = [[0.0] * n for _ in racks]
    for a, b in itertools.combinations(range(n), 2):
        speed[a][b] = speed[b][a] = (1e9 if racks[a] == racks[b] else 2e8) * draw.uniform(0.97, 1.03)
    latency = [[1e-4 * (a != b) for a in range(n)] for b in range(n)]
    return Links("nodes", tuple(range(n)), tuple(map(str, range(n))), latency, speed, AlphaBeta(0.0, 0.0))


@pytest.mark.parametrize("racks", [[0, 1, 0, 1], [0, 1, 1, 0, 2, 0], [0, 1, 2, 0, 1, 2, 0, 1]])
def test_a_ring_crosses_racks_once_each(racks: list[int]) -> None:
    """It leaves each rack once; no order of all has a lower cost, but for the noise."""
    order = links.ring(linked(racks), [str(n) for n in range(len(racks))], 2**20)
    assert sorted(order) == list(range(len(racks)))
    crossed = sum(racks[a] != racks[b] for a, b in zip(order, [*order[1:], order[0]], strict=True))
    assert crossed == len(set(racks))


def test_a_ring_keeps_what_is_as_good() -> None:
    """Equal links, and two nodes: the order of the ranks. Ranks of a node stay together."""
    assert links.ring(linked([0, 0, 0, 0]), list("0123"), 2**20) == [0, 1, 2, 3]
    assert links.ring(linked([0, 1]), list("01"), 2**20) == [0, 1]
    made = linked([0, 1, 0, 1])
    several = replace(made, members=(0, 2, 4, 6))
    order = links.ring(several, list("00112233"), 2**20)
    assert order in ([0, 1, 4, 5, 6, 7, 2, 3], [0, 1, 4, 5, 2, 3, 6, 7])


def settled(rank: Rank, folder: str, known: bool, nodes: str | None = None) -> Any:
    """The order that a run takes, and what it says; if `known`, a measurement is an error. `nodes`: of each rank, if not of this
    machine."""
    said: list[str] = []
    if nodes is not None:
        rank = replace(rank, node_ip=nodes[rank.rank])
    before = links.measure
    if known:
        links.measure = None  # type: ignore[assignment]
    try:
        made = topology.settle(job("ddp", comm={"topology": "ring"}), rank, RunDir(folder), said.append)
    finally:
        links.measure = before
    return made.comm.ring, said


def test_an_order_is_measured_once_and_kept(ranks: Any, tmp_path: Path) -> None:
    """All ranks get the same, with its reason; a restart reads it, also one that this machine would not choose. On other nodes it
    is measured anew, and on the former ones as it was."""
    first = run(ranks, settled, 3, str(tmp_path / "run"), False)
    assert all(theirs == first[0] for theirs in first)
    order, said = first[0]
    assert sorted(order) == [0, 1, 2]
    assert said[0].startswith(f"comm.ring: {order[0]}, ")
    assert "MB/s" in said[0]
    assert run(ranks, settled, 3, str(tmp_path / "run"), True) == first
    (kept,) = (tmp_path / "run" / "comm").iterdir()
    assert kept.name.startswith("ring-00003-")
    chosen = {"order": [2, 0, 1], "because": "it was so", "measured": {}, "links": ""}
    kept.write_text(json.dumps({"v": 1, "chosen": chosen}))
    assert run(ranks, settled, 3, str(tmp_path / "run"), True)[0] == ([2, 0, 1], ["comm.ring: it was so"])
    for known in (False, True):
        elsewhere = run(ranks, settled, 3, str(tmp_path / "run"), known, "abb")[0]
        assert elsewhere[1][0].startswith("comm.ring: 0, 1, 2, the order of the ranks: links between 2 nodes have ")
    assert run(ranks, settled, 3, str(tmp_path / "run"), True)[0][0] == [2, 0, 1]
    slow_link_found(tmp_path / "run")
    anew = run(ranks, settled, 3, str(tmp_path / "run"), False)
    assert all(theirs == anew[0] for theirs in anew)
    assert "MB/s" in anew[0][1][0]
    assert run(ranks, settled, 3, str(tmp_path / "run"), True) == anew
    assert (kept.with_name(f"{kept.stem}-slow-1.json")).exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"strategy": "zero1"}}, "comm.topology: 'direct' has no effect with parallel.strategy: zero1"),
        ({"comm": {"topology": "direct", "compress": "int8"}}, "does not go with comm.compress: int8"),
        ({"comm": {"topology": "direct", "every": 4}}, "does not go with comm.every: 4"),
        ({"comm": {"topology": "star"}}, "comm.topology: unknown 'star'"),
        ({"comm": {"topology": "direct", "ring": [0, 1]}}, "has no effect with topology: direct"),
        ({"comm": {"topology": "ring", "ring": [0, 2]}}, "is no order of the ranks 0 to 1"),
    ],
)
def test_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Each says field, value and remedy."""
    tree = {
        "data": {"source": "any"},
        "train": {"steps": 1},
        "cluster": {"workers": 4},
        "comm": {"topology": "direct"},
        **sections,
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree))
    with pytest.raises(SpecError) as refused:
        load(path)
    assert message in str(refused.value)


def test_a_ring_that_does_not_fit() -> None:
    """Of another number of ranks, and on NCCL, which has rings of its own."""
    three = job("ddp", comm={"topology": "ring", "ring": [0, 2, 1]}, cluster={"workers": [3, 4]})
    here = Rank(0, 4, 0, torch.device("cpu"), "gloo", "", None, ())
    for rank, message in (
        (here, "an order of 3 ranks, and there are 4"),
        (replace(here, backend="nccl"), "orders its rings itself"),
    ):
        with pytest.raises(UserError, match=message):
            topology.settle(three, rank, RunDir("/nowhere"), print)


def test_it_is_no_number_of_a_run() -> None:
    """As with `parallel`, a run may go on with another one."""
    plain: JobSpec = job("ddp")
    assert job("ddp", comm=WAYS["ring"]).numbers("x") == plain.numbers("x")
    assert job("ddp", comm={"compress": "int8"}).numbers("x") != plain.numbers("x")
