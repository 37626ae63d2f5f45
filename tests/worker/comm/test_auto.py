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
from raydist.spec import JobSpec, load
from raydist.worker.comm import auto
from raydist.worker.comm.auto import Way, fastest, within
from raydist.worker.comm.buckets.measure import Passes
from raydist.worker.distributed import Rank
from tests.training import job, run, slow_link_found
from tests.worker.comm.test_buckets import build, dataset, example, trained

__all__ = ["dataset"]

BOTH = {"compress": "auto", "topology": "auto"}
INT8, SMALL = "int8, buckets of 1 MiB", "torch, buckets of 1 MiB"
SLOW = {
    "torch": 2.0,
    "direct": 1.9,
    SMALL: 1.5,
    "bf16, buckets of 1 MiB": 1.3,
    INT8: 1.0,
    "powersgd, buckets of 1 MiB": 0.8,
}


def settled(rank: Rank, folder: str, comm: dict[str, Any], cases: list[Any]) -> Any:
    """Of each case, (name, seconds of a pass by way, those of a way's second trial): the way, the reason, and the ways tried in
    order. A case of the same name is a restart. Seconds without exchange are 1."""
    found = []
    for name, times, again in cases:
        tried: list[str] = []

        def measured(
            spec: JobSpec, rank: Rank, bucket_mb: float | None, build: Any, example: Any,
            times: Mapping[str, float] = times, again: Mapping[str, float] = again, tried: list[str] = tried,
        ) -> Passes:  # fmt: skip
            way = str(Way(spec.comm.compress, spec.comm.topology, spec.comm.ring, bucket_mb))
            seconds = again.get(way, times[way]) if way in tried else times[way]
            tried.append(way)
            return Passes(seconds, 0.7, 0.5, ())

        before, auto.passes = auto.passes, measured
        try:
            spec, chosen = auto.settle(job("ddp", comm=comm), rank, RunDir(f"{folder}/{name}"), build, example)
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
        ("fast", {"torch": 0.71}, {}),
        ("close", {**SLOW, SMALL: 1.01}, {}),
        ("luck", SLOW, {"torch": 1.02, INT8: 1.1}),
        ("direct", {**SLOW, "direct": 0.9}, {}),
    ])  # fmt: skip
    assert every[0] == every[1]
    slow, restart, fast, close, luck, direct = every[0]
    ways = ["torch", "direct", SMALL, "bf16, buckets of 1 MiB", INT8]
    assert (slow[0], slow[2]) == (INT8, [*ways, "torch", INT8])
    assert slow[1].startswith(
        "int8, buckets of 1 MiB: 100% faster than torch; 65% of a pass of 2 s waits for gradients"
    )
    assert "bf16, buckets of 1 MiB 1.3 s" in slow[1]
    assert restart == (*slow[:2], [])
    assert (fast[0], fast[2]) == ("torch", ["torch"])
    assert "nothing is to be gained" in fast[1]
    assert close[0] == SMALL, "within 2% of int8, and loses nothing"
    assert (luck[0], luck[2]) == ("torch", [*ways, "torch", INT8]), "torch's was as fast the second time"
    assert "no way is faster by 3%" in luck[1]
    assert direct[0] == "direct"
    kept = json.loads((tmp_path / "slow" / "comm" / "world-00002.json").read_text())["chosen"]
    assert kept["way"]["compress"] == "int8"
    assert kept["seconds"] == {"no exchange": 0.7, **{way: SLOW[way] for way in ways}}


def test_another_number_of_ranks_and_a_slow_link_keep_the_compressor(ranks: Any, tmp_path: Path) -> None:
    """What is left of gradients is of its kind. Where none was chosen, topologies are chosen anew. One rank has no choice."""
    cases = [("int8", SLOW, {}), ("none", {**SLOW, "bf16, buckets of 1 MiB": 1.49, INT8: 1.49}, {})]
    run(ranks, settled, 2, str(tmp_path), BOTH, cases)
    times = {"torch": 2.0, "direct": 1.9}
    int8, none = run(ranks, settled, 3, str(tmp_path), BOTH, [("int8", times, {}), ("none", times, {})])[0]
    assert int8 == (INT8, f"{INT8}: as this run has chosen before", [])
    assert (none[0], none[2][:2]) == ("direct", ["torch", "direct"])
    assert run(ranks, settled, 1, str(tmp_path), BOTH, [("int8", {}, {})]) == [[("torch", None, [])]]
    for name in ("int8", "none"):
        slow_link_found(tmp_path / name)
    times = {"torch": 2.0, "direct": 2.1}
    int8, none = run(ranks, settled, 3, str(tmp_path), BOTH, [("int8", times, {}), ("none", times, {})])[0]
    assert int8 == (INT8, f"{INT8}: as this run has chosen before", [])
    assert (none[0], none[2][:2]) == ("torch", ["torch", "direct"])


def test_ways_on_two_nodes(ranks: Any, tmp_path: Path) -> None:
    """Two levels where nodes have several ranks; with one of the two left to measurement no other is tried."""
    times = {**SLOW, "two_level": 1.2}
    for comm, ways in (
        ({"topology": "auto"}, ["torch", "two_level", "direct"]),
        (
            {"compress": "auto", "max_loss_increase": 0.2},
            ["torch", SMALL, "bf16, buckets of 1 MiB", INT8, "powersgd, buckets of 1 MiB"],
        ),
    ):
        tried = run(ranks, on_nodes, 4, str(tmp_path / ways[1]), comm, [("a", times, {})])[0][0][2]
        assert [way for way in dict.fromkeys(tried) if way != "ring"] == ways


def on_nodes(rank: Rank, *arguments: Any) -> Any:
    """`settled` on two nodes of two ranks each."""
    return settled(replace(rank, node_ip=f"node {rank.rank // 2}"), *arguments)


def test_within_the_bound() -> None:
    """The least loss first, then the most bits; those of unknown loss never. The first of equal ways is taken."""
    assert within(0.0) == ["bf16", "int8"]
    assert within(0.2) == ["bf16", "int8", "powersgd"]
    assert within(10.0) == ["bf16", "int8", "powersgd", "topk"]
    ways = [Way(), Way("bf16"), Way("int8")]
    assert fastest(ways, {"torch": 1.0, "bf16": 0.52, "int8": 0.51}) == ways[1]
    assert fastest(ways, {"torch": 1.0, "bf16": 0.53, "int8": 0.51}) == ways[2]


def test_a_run_is_that_of_the_way_by_its_name(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """On three ranks, in the whole loop with real trials: a run that has chosen int8 has the bits of `compress: int8`, also when it
    is cut into two attempts; one that has just chosen has those of the way that it says. Trials leave no trace."""
    way = {"compress": "int8", "topology": "torch", "ring": None, "bucket_mb": 0.02}
    for name in ("kept", "cut"):
        (tmp_path / name / "comm").mkdir(parents=True)
        chosen = {"way": way, "because": "it was so", "seconds": {}}
        (tmp_path / name / "comm" / "world-00003.json").write_text(json.dumps({"v": 1, "chosen": chosen}))
    named, _ = run(ranks, trained, 3, dataset, str(tmp_path / "named"), 0.02, None, {"compress": "int8"})[0]
    kept, said = run(ranks, trained, 3, dataset, str(tmp_path / "kept"), None, None, BOTH)[0]
    assert (kept, said) == (named, ["bucket_mb: 0.02, it was so"])
    first, _ = run(ranks, trained, 3, dataset, str(tmp_path / "cut"), None, 3, BOTH)[0]
    second, _ = run(ranks, trained, 3, dataset, str(tmp_path / "cut"), None, None, BOTH)[0]
    assert first + second == named
    new, _ = run(ranks, trained, 3, dataset, str(tmp_path / "new"), None, None, BOTH)[0]
    found = json.loads((tmp_path / "new" / "comm" / "world-00003.json").read_text())["chosen"]
    assert {"no exchange", "torch"} <= found["seconds"].keys()
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
