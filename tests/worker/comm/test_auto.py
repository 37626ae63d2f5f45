"""`comm.compress: auto` and `topology: auto`: the fastest way within the bound is taken, said and kept; the run is that of the way
by its name.

Over a minute on a busy machine: runs of three ranks, one of them with real trials of every way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.errors import SpecError
from raydist.run.directory import RunDir
from raydist.spec import CommSpec, JobSpec, load
from raydist.worker.comm import auto, topology
from raydist.worker.comm.auto import Way, fastest, within
from raydist.worker.comm.buckets.measure import Passes
from raydist.worker.comm.topology import Ring
from raydist.worker.distributed import Rank
from tests.training import job, run, slow_link_found
from tests.worker.comm.test_buckets import build, dataset, example, trained

__all__ = ["dataset"]

BOTH = {"compress": "auto", "topology": "auto"}
INT8, SMALL, DIRECT = "int8, buckets of 2 MiB", "torch, buckets of 2 MiB", "direct, buckets of 2 MiB"
BF16, TWO_LEVEL = "bf16, buckets of 2 MiB", "two_level, buckets of 2 MiB"
SLOW = {
    "torch": 2.0,
    DIRECT: 1.9,
    SMALL: 1.5,
    BF16: 1.3,
    INT8: 1.0,
    "powersgd, buckets of 2 MiB": 0.8,
}


def settled(
    rank: Rank, folder: str, comm: dict[str, Any], cases: list[Any], global_batch: int = 8, size: float | None = None
) -> Any:
    """Of each case, (name, seconds of a pass by way, those of a way's second trial): the way, the reason, and the ways tried in
    order. A case of the same name is a restart. Seconds without exchange are 0.7, or as `times` has them for the first trial and
    the others; micro-batches are of 8 sequences."""
    found = []
    for name, times, again in cases:
        tried: list[str] = []

        def measured(
            spec: JobSpec, rank: Rank, bucket_mb: float | None, build: Any, example: Any,
            times: Mapping[str, float] = times, again: Mapping[str, float] = again, tried: list[str] = tried,
        ) -> Passes:  # fmt: skip
            build()
            way = str(Way(spec.comm.compress, spec.comm.topology, spec.comm.ring, bucket_mb))
            seconds = again.get(way, times[way]) if way in tried else times[way]
            alone = times.get("alone later" if tried else "alone first", 0.7)
            tried.append(way)
            return Passes(seconds, alone, 0.5, ())

        before, auto.passes = auto.passes, measured
        try:
            asked = job("ddp", train={"global_batch": global_batch}, comm=comm).with_fields(
                {"parallel.bucket_mb": size}
            )
            spec, chosen = auto.settle(asked, rank, RunDir(f"{folder}/{name}"), build, example)
        finally:
            auto.passes = before
        assert not spec.comm.auto
        way = Way(spec.comm.compress, spec.comm.topology, spec.comm.ring, spec.parallel.bucket_mb)  # type: ignore[arg-type]
        found.append((str(way), chosen and chosen.because, tried))
    return found


def test_the_fastest_is_taken_and_kept(ranks: Any, tmp_path: Path) -> None:
    """Two ranks. All get the same; torch's and the best are tried twice; a restart tries nothing."""
    every = run(ranks, settled, 2, str(tmp_path), BOTH, [
        ("slow", SLOW, {}),
        ("slow", {}, {}),
        ("fast", {"torch": 0.71, SMALL: 0.72}, {}),
        ("close", {**SLOW, SMALL: 1.01}, {}),
        ("luck", SLOW, {"torch": 1.02, INT8: 1.1}),
        ("direct", {**SLOW, DIRECT: 0.9}, {}),
        ("steps", {**SLOW, "torch": 1.0, SMALL: 0.985, INT8: 0.97}, {}),
    ])  # fmt: skip
    assert every[0] == every[1]
    slow, restart, fast, close, luck, direct, steps = every[0]
    ways = ["torch", INT8, BF16, SMALL, DIRECT]
    assert (slow[0], slow[2]) == (INT8, [*ways, "torch", INT8])
    assert slow[1].startswith(
        "int8, buckets of 2 MiB: 100% faster than torch; 65% of a step of 2 s waits for gradients"
    )
    assert "bf16, buckets of 2 MiB 1.3 s" in slow[1]
    assert restart == (*slow[:2], [])
    assert (fast[0], fast[2]) == ("torch", ["torch", SMALL])
    assert "nothing is to be gained" in fast[1]
    assert close[0] == SMALL, "within 2% of int8, and loses nothing"
    assert (luck[0], luck[2]) == ("torch", [*ways, "torch", INT8]), "torch's was as fast the second time"
    assert "no way is faster by 2%" in luck[1]
    assert direct[0] == DIRECT
    assert steps[0] == SMALL, "1.5% faster than torch, which is more than 2% slower than int8"
    kept = json.loads((tmp_path / "slow" / "comm" / "world-00002-compress-0-topology.json").read_text())["chosen"]
    assert kept["way"]["compress"] == "int8"
    assert kept["seconds"] == {"no exchange": 0.7, **{way: SLOW[way] for way in ways}}


@pytest.mark.parametrize("later", [0.681, 0.92])
def test_where_no_step_seems_to_wait_small_buckets_are_tried(ranks: Any, tmp_path: Path, later: float) -> None:
    """Figures of a GPT of 10.7M parameters on 2 ranks and links of 1 Gbit/s, where passes without exchange were slowed down in the
    first trial, or in all: no pass with an exchange is faster than one without. Where no trial is faster, it stays with torch's. A
    job that says the size has its way measured twice."""
    gpt = {
        "torch": 0.915,
        SMALL: 0.796,
        DIRECT: 0.882,
        BF16: 0.837,
        INT8: 0.907,
        "alone first": 0.92,
        "alone later": later,
    }
    mended, none = run(ranks, settled, 2, str(tmp_path), BOTH, [
        ("mended", gpt, {}),
        ("none", {**gpt, SMALL: 0.91, "alone later": 0.92}, {}),
    ])[0]  # fmt: skip
    assert (mended[0], mended[2]) == (SMALL, ["torch", SMALL, INT8, BF16, DIRECT, "torch", SMALL])
    assert mended[1].startswith(
        f"{SMALL}: 15% faster than torch; {1 - min(later, 0.796) / 0.915:.0%} of a step of 0.915 s"
    )
    assert (none[0], none[2]) == ("torch", ["torch", SMALL])
    assert none[1] == "torch: 1% of a step of 0.915 s waits for gradients, so nothing is to be gained"
    sized = {"torch, buckets of 5 MiB": 0.915, "alone first": 0.92, "alone later": 0.91}
    said = run(ranks, settled, 2, str(tmp_path), BOTH, [("sized", sized, {})], 8, 5.0)[0][0]
    assert (said[0], len(said[2])) == ("torch, buckets of 5 MiB", 2)


def test_where_passes_take_long_only_ways_that_come_near_are_tried(ranks: Any, tmp_path: Path) -> None:
    """Bytes alone take 40 s with int8, 80 s with bf16 and 159 s without compression: what takes 1.5 times the best so far is not
    tried, and said; nor is torch's a second time."""
    near, bound, useless = run(ranks, settled, 2, str(tmp_path), BOTH, [
        ("near", {"torch": 160.0, INT8: 41.0}, {}),
        ("bound", {"torch": 160.0, INT8: 90.0, BF16: 85.0}, {}),
        ("useless", {"torch": 160.0, INT8: 150.0, BF16: 155.0, SMALL: 161.0, DIRECT: 120.0}, {}),
    ])[0]  # fmt: skip
    assert (near[0], near[2]) == (INT8, ["torch", INT8, INT8])
    left = f"not tried, as what they send takes longer: {BF16} 79.7 s, {SMALL} 159 s, {DIRECT} 159 s"
    assert near[1].endswith(f"of a step: no exchange 0.7 s, torch 160 s, {INT8} 41 s; {left}")
    assert (bound[0], bound[2]) == (BF16, ["torch", INT8, BF16, BF16]), "int8 is not as fast as its bytes"
    assert bound[1].endswith(f"longer: {SMALL} 159 s, {DIRECT} 159 s")
    assert (useless[0], useless[2]) == (DIRECT, ["torch", INT8, BF16, SMALL, DIRECT, "torch", DIRECT])
    assert "not tried" not in useless[1]


def test_another_number_of_ranks_and_a_slow_link_keep_the_compressor(ranks: Any, tmp_path: Path) -> None:
    """What is left of gradients is of its kind. Where none was chosen, topologies and buckets are chosen anew. One rank has no
    choice."""
    cases = [("int8", SLOW, {}), ("none", {**SLOW, BF16: 1.49, INT8: 1.49}, {})]
    run(ranks, settled, 2, str(tmp_path), BOTH, cases)
    times = {"torch": 2.0, SMALL: 1.5, DIRECT: 1.9}
    int8, none = run(ranks, settled, 3, str(tmp_path), BOTH, [("int8", times, {}), ("none", times, {})])[0]
    assert int8 == (INT8, f"{INT8}: as this run has chosen before", [])
    assert (none[0], none[2]) == (SMALL, ["torch", SMALL, DIRECT, "torch", SMALL])
    assert run(ranks, settled, 1, str(tmp_path), BOTH, [("int8", {}, {})]) == [[("torch", None, [])]]
    for name in ("int8", "none"):
        slow_link_found(tmp_path / name)
    times = {"torch": 2.0, SMALL: 2.0, DIRECT: 1.5}
    int8, none = run(ranks, settled, 3, str(tmp_path), BOTH, [("int8", times, {}), ("none", times, {})])[0]
    assert int8 == (INT8, f"{INT8}: as this run has chosen before", [])
    assert (none[0], none[2]) == (DIRECT, ["torch", SMALL, DIRECT, "torch", DIRECT])


def test_a_choice_counts_for_the_job_that_asked_for_it(ranks: Any, tmp_path: Path) -> None:
    """A job that since names what it had left to measurement, or has another bound, gets a choice of its own, and one with another
    size of buckets that size. The first choice counts again for a job that asks for it again."""

    def again(comm: dict[str, Any], size: float | None = None, world: int = 2) -> tuple[str, int]:
        way, _, tried = run(ranks, settled, world, str(tmp_path), comm, [("a", SLOW, {})], 8, size)[0][0]
        return way, len(tried)

    assert again(BOTH) == (INT8, 7)
    assert again({"topology": "auto"}) == (SMALL, 5)
    assert again({**BOTH, "max_loss_increase": 0.2}) == ("powersgd, buckets of 2 MiB", 8)
    assert again(BOTH, 5.0) == ("int8, buckets of 5 MiB", 0)
    assert again(BOTH) == (INT8, 0)
    assert again(BOTH, world=3) == (INT8, 0)


def elsewhere(rank: Rank, folder: str) -> tuple[list[int] | None, dict[str, Any]]:
    """The ring of a run that has chosen one before, on nodes whose best order is another one; and what is said."""
    before = topology.measured
    topology.measured = lambda rank, run: Ring([1, 0, 2], "", {}, "")
    try:
        spec, chosen = auto.settle(job("ddp", comm=BOTH), rank, RunDir(folder), build, example)
    finally:
        topology.measured = before
    assert chosen is not None
    return spec.comm.ring, chosen.way


def test_a_kept_ring_has_the_order_of_the_nodes(ranks: Any, tmp_path: Path) -> None:
    """Every rank gets the one of the nodes that this attempt has, and the event says it."""
    way = {"compress": "none", "topology": "ring", "ring": [0, 2, 1], "bucket_mb": None}
    (tmp_path / "comm").mkdir()
    kept = {"v": 1, "chosen": {"way": way, "because": "it was so", "seconds": {}}}
    (tmp_path / "comm" / "world-00003-compress-0-topology.json").write_text(json.dumps(kept))
    assert run(ranks, elsewhere, 3, str(tmp_path)) == [([1, 0, 2], {**way, "ring": [1, 0, 2]})] * 3


def test_a_step_of_several_micro_batches(ranks: Any, tmp_path: Path) -> None:
    """Only the last one is summed. What is 5% of a pass is 1.4% of a step of four: nothing is to be gained. What makes a pass twice
    as fast makes the step 37% faster: 4.1 s in place of 3.0 s."""
    cases = [("close", {"torch": 0.74, SMALL: 0.74}, {}), ("slow", SLOW, {})]
    close, slow = run(ranks, settled, 2, str(tmp_path), BOTH, cases, 64)[0]
    assert (close[0], close[2]) == ("torch", ["torch", SMALL])
    assert "1% of a step of 2.84 s in 4 micro-batches waits for gradients, so nothing" in close[1]
    assert slow[0] == INT8
    assert slow[1].startswith(f"{INT8}: 32% faster than torch; 32% of a step of 4.1 s in 4 micro-batches waits")
    kept = json.loads((tmp_path / "slow" / "comm" / "world-00002-compress-0-topology.json").read_text())["chosen"][
        "seconds"
    ]
    assert (kept["no exchange"], kept["torch"], kept[INT8]) == pytest.approx((2.8, 4.1, 3.1))


def test_ways_on_two_nodes(ranks: Any, tmp_path: Path) -> None:
    """Two levels where nodes have several ranks, in the faster buckets, and also where passes take long; with one of the two left
    to measurement no other is tried."""
    slow, long = {**SLOW, TWO_LEVEL: 1.2}, {"torch": 160.0, INT8: 41.0, "two_level": 50.0}
    for comm, times, ways in (
        ({"topology": "auto"}, slow, ["torch", SMALL, TWO_LEVEL, DIRECT]),
        (
            {"compress": "auto", "max_loss_increase": 0.2},
            slow,
            ["torch", "powersgd, buckets of 2 MiB", INT8, BF16, SMALL],
        ),
        (BOTH, long, ["torch", INT8, "two_level"]),
    ):
        found = run(ranks, on_nodes, 4, str(tmp_path / f"{len(comm)}-{len(ways)}"), comm, [("a", times, {})])
        _, why, tried = found[0][0]
        assert list(dict.fromkeys(tried)) == ways
        assert ("links between 2 nodes have " in why) == ("topology" in comm)


def on_nodes(rank: Rank, *arguments: Any) -> Any:
    """`settled` on two nodes of two ranks each."""
    return settled(replace(rank, node_ip=f"node {rank.rank // 2}"), *arguments)


def test_within_the_bound() -> None:
    """The least loss first, then the most bits; those of unknown loss never, nor what can compress no matrix of the model, nor
    what loses more without error feedback. The first of equal ways is taken."""

    def found(bound: float, matrix: tuple[int, int] = (64, 32), **more: Any) -> list[str]:
        return within(CommSpec(compress="auto", max_loss_increase=bound, **more), {"w": matrix, "b": (1000,)})

    assert found(0.0) == ["bf16", "int8"]
    assert found(0.2) == ["bf16", "int8", "powersgd"]
    assert found(10.0) == ["bf16", "int8", "powersgd", "topk"]
    assert found(10.0, matrix=(8, 8)) == ["bf16", "int8", "topk"], "factors of rank 4 are no smaller"
    assert found(10.0, error_feedback=False) == ["bf16", "int8"]
    ways = [Way(), Way("bf16"), Way("int8")]
    assert fastest(ways, {"torch": 1.0, "bf16": 0.52, "int8": 0.51}) == ways[1]
    assert fastest(ways, {"torch": 1.0, "bf16": 0.53, "int8": 0.51}) == ways[2]


def test_a_run_is_that_of_the_way_by_its_name(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """On three ranks, in the whole loop with real trials: a run that has chosen int8 has the bits of `compress: int8`, also when it
    is cut into two attempts; one that has just chosen, and the size of its buckets before it, has those of the way that it says.
    Trials leave no trace."""
    way = {"compress": "int8", "topology": "torch", "ring": None, "bucket_mb": 0.02}
    for name in ("kept", "cut"):
        (tmp_path / name / "comm").mkdir(parents=True)
        chosen = {"way": way, "because": "it was so", "seconds": {}}
        (tmp_path / name / "comm" / "world-00003-compress-0-topology.json").write_text(
            json.dumps({"v": 1, "chosen": chosen})
        )
    named, _ = run(ranks, trained, 3, dataset, str(tmp_path / "named"), 0.02, None, {"compress": "int8"})[0]
    kept, said = run(ranks, trained, 3, dataset, str(tmp_path / "kept"), None, None, BOTH)[0]
    assert (kept, said) == (named, ["bucket_mb: 0.02, it was so"])
    first, _ = run(ranks, trained, 3, dataset, str(tmp_path / "cut"), None, 3, BOTH)[0]
    second, _ = run(ranks, trained, 3, dataset, str(tmp_path / "cut"), None, None, BOTH)[0]
    assert first + second == named
    new, _ = run(ranks, trained, 3, dataset, str(tmp_path / "new"), "auto", None, BOTH)[0]
    found = json.loads((tmp_path / "new" / "comm" / "world-00003-compress-0-topology.json").read_text())["chosen"]
    assert "no exchange" in found["seconds"]
    size = found["way"].pop("bucket_mb")
    by_name = run(ranks, trained, 3, dataset, str(tmp_path / "by name"), size, None, found["way"])[0][0]
    assert new == by_name


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"comm": {"compress": "auto"}, "parallel": {"strategy": "zero1"}},
            "comm.compress: 'auto' does not go with parallel.strategy",
        ),
        (
            {"comm": {"topology": "auto"}, "parallel": {"tensor": 2}},
            "comm.topology: 'auto' does not go with parallel.tensor: 2",
        ),
        (
            {"comm": {"compress": "auto"}, "train": {"steps": 1, "compile": True}},
            "does not go with train.compile: True",
        ),
        ({"comm": {"compress": "auto", "every": 4}}, "does not go with comm.every"),
        ({"comm": {"compress": "auto", "options": {"rank": 2}}}, "belongs to one compressor"),
        ({"comm": {"compress": "int8", "max_loss_increase": 1.0}}, "has no effect with compress: int8"),
        ({"comm": {"compress": "int8", "topology": "auto"}}, "does not go with comm.compress: int8"),
    ],
)
def test_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Each says field, value and remedy."""
    path = tmp_path / "job.yaml"
    path.write_text(
        json.dumps({"data": {"source": "any"}, "train": {"steps": 1}, "cluster": {"workers": 4}, **sections})
    )
    with pytest.raises(SpecError) as refused:
        load(path)
    assert message in str(refused.value)
