"""Replicas that drift, in the whole loop on real ranks: named, repaired to the same bits, or rolled back a limited number of
times.

Over a minute: about twenty runs of the whole loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.cluster.run.recovery import History, Restart, decide
from raydist.cluster.run.root_cause import RankError, root_cause
from raydist.errors import Rollback, SuspectHardware
from raydist.faults import FlipBit
from raydist.spec import JobSpec
from raydist.worker.checks import replicas
from raydist.worker.checks.replicas import Drift, compare, hashes, weighted
from tests.training import alone, job, run
from tests.worker.checks.test_bad_steps import dataset, exact, of, spec_of, trained, weights

__all__ = ["dataset"]

FIRST = "inner.embedding.weight"
NORM = "inner.norm.weight"


def checked(dataset: str, every: int | None) -> JobSpec:
    """Eight steps with dropout and a buffer that counts forward passes, a checkpoint every third step, replicas compared."""
    raw = spec_of(dataset).model_dump()
    return JobSpec.model_validate(raw | {"train": raw["train"] | {"check_replicas": every}})


def flips(*faults: FlipBit) -> list[dict[str, Any]]:
    return [fault.model_dump(mode="json") for fault in faults]


def test_the_odd_one_is_named_and_mended(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Of 3 ranks one drifts in step 4, found before the update of step 5, and another in step 6, found before its checkpoint:
    losses, weights, optimizer and buffers equal those of a run without drift and without comparison, bit for bit."""
    expected, _, error = run(ranks, trained, 3, checked(dataset, None), str(tmp_path / "calm"))[0]
    assert error is None
    faults = flips(FlipBit(rank=2, step=4), FlipBit(rank=1, step=6, parameter=NORM))
    results = run(ranks, trained, 3, checked(dataset, 1), str(tmp_path / "flipped"), 1, None, faults)
    assert [error for _, _, error in results] == [None] * 3
    steps, events, _ = results[0]
    assert [(e["step"], e["action"], e["ranks"], e["tensors"], e["majority"]) for e in of(events, "replica_drift")] == [
        (5, "repair", [2], [f"model/{FIRST}"], [0, 1]),
        (6, "repair", [1], [f"model/{NORM}"], [0, 2]),
    ]
    assert exact(steps) == exact(expected)
    for step in (6, 8):
        assert weights(tmp_path / "flipped", step) == weights(tmp_path / "calm", step)


def test_a_drift_that_makes_the_loss_nan_is_found_at_once(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """A weight of 1 becomes infinite on one of 3 ranks, long before a check is due: no batch is skipped, the bits are the same."""
    expected, _, _ = run(ranks, trained, 3, checked(dataset, None), str(tmp_path / "calm"))[0]
    faults = flips(FlipBit(rank=0, step=1, parameter=NORM, bit=30))
    steps, events, error = run(ranks, trained, 3, checked(dataset, 100), str(tmp_path / "inf"), 1, None, faults)[0]
    assert error is None
    assert of(events, "non_finite") == []
    assert [(e["step"], e["ranks"]) for e in of(events, "replica_drift")] == [(2, [0])]
    assert exact(steps) == exact(expected)


def test_without_a_majority_the_run_goes_back(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """With 2 ranks there is no majority: Rollback on both, an immediate restart from the checkpoint of step 3, the same bits."""
    expected, _, _ = run(ranks, trained, 2, checked(dataset, None), str(tmp_path / "calm"))[0]
    spec, path, faults = checked(dataset, 1), str(tmp_path / "back"), flips(FlipBit(rank=1, step=4))
    results = run(ranks, trained, 2, spec, path, 1, None, faults)
    assert all(isinstance(error, Rollback) for _, _, error in results)
    (told,) = of(results[0][1], "replica_drift")
    assert (told["step"], told["action"], told["ranks"], told["majority"]) == (5, "rollback", [0, 1], [])
    failure = root_cause([RankError(r, type(e).__name__, str(e)) for r, (_, _, e) in enumerate(results)])
    decision = decide(failure, History(committed=3), spec.recovery)
    assert isinstance(decision, Restart)
    assert decision.because == "rollback 1 of 3: from step 3"
    steps, events, error = run(ranks, trained, 2, spec, path, 2, None, faults)[0]
    assert error is None
    assert [e["step"] for e in of(events, "resumed")] == [3]
    assert exact(results[0][0][:3] + steps) == exact(expected)
    assert weights(tmp_path / "back") == weights(tmp_path / "calm")


def test_on_a_mesh_only_equal_parts_are_compared(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """dp 2 x tensor 2: a gain that all four ranks hold is repaired; a row of the embedding, which two ranks hold, has no majority.
    Without drift nothing is found, and the repaired run has the bits of that one."""

    def told(name: str, strategy: str, *faults: FlipBit) -> Any:
        spec = checked(dataset, 1)
        parallel = spec.parallel.model_copy(update={"strategy": strategy, "tensor": 2})
        spec = spec.model_copy(update={"parallel": parallel})
        results = run(ranks, trained, 4, spec, str(tmp_path / name), 1, None, flips(*faults))
        steps, events, _ = results[0]
        drifts = [(e["step"], e["action"], e["ranks"], e["majority"]) for e in of(events, "replica_drift")]
        return exact(steps), drifts, {type(error) for *_, error in results}

    for strategy in ("ddp", "zero1"):
        calm, drifts, errors = told(f"{strategy}-calm", strategy)
        assert (len(calm), drifts, errors) == (8, [], {type(None)})
        gain = FlipBit(rank=3, step=5, phase="backward", parameter=NORM)
        assert told(f"{strategy}-gain", strategy, gain) == (calm, [(5, "repair", [3], [0, 1, 2])], {type(None)})
        assert weights(tmp_path / f"{strategy}-gain") == weights(tmp_path / f"{strategy}-calm")
    row = FlipBit(rank=2, step=5, phase="backward")
    assert told("row", "ddp", row)[1:] == ([(5, "rollback", [0, 2], [])], {Rollback})


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_with_rows_of_its_own_a_rank_is_mended_too(ranks: Any, dataset: str, tmp_path: Path, strategy: str) -> None:
    """Rank 0 updates the first row. Drift before a check is found on any rank, and the bits equal those of a run without drift,
    also of the optimizer state. Drift after the check is overwritten by the next broadcast if it is on another rank; on rank 0 it
    spreads undetected."""

    def told(name: str, world: int, *faults: FlipBit) -> Any:
        spec = checked(dataset, 1)
        spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"strategy": strategy})})
        results = run(ranks, trained, world, spec, str(tmp_path / name), 1, None, flips(*faults))
        steps, events, _ = results[0]
        drifts = [(e["step"], e["action"], e["ranks"], e["majority"]) for e in of(events, "replica_drift")]
        return exact(steps), drifts, [type(error) for *_, error in results]

    fine = [type(None)] * 3
    calm, drifts, errors = told("calm", 3)
    assert (len(calm), drifts, errors) == (8, [], fine)
    own, others = FlipBit(rank=0, step=3, phase="backward"), FlipBit(rank=2, step=5, phase="backward")
    undone = FlipBit(rank=2, step=7)
    mended = [(3, "repair", [0], [1, 2]), (5, "repair", [2], [0, 1])]
    assert told("mended", 3, own, others, undone) == (calm, mended, fine)
    assert weights(tmp_path / "mended") == weights(tmp_path / "calm")
    spread, drifts, errors = told("spread", 3, FlipBit(rank=0, step=5))
    assert (spread[:5], drifts, errors) == (calm[:5], [], fine)
    assert spread[5:] != calm[5:]
    assert told("pair", 2, own)[1:] == ([(3, "rollback", [0, 1], [])], [Rollback] * 2)


def test_the_third_drift_stops_the_run(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """One drift in each of three attempts: the count is kept in the run's folder, and the third names the ranks, their host and
    device."""
    faults = flips(*(FlipBit(rank=1, step=step) for step in (1, 2, 4)))
    found = []
    for attempt in (1, 2, 3):
        results = run(ranks, trained, 2, checked(dataset, 1), str(tmp_path), attempt, None, faults)
        found.append([type(error) for _, _, error in results])
    assert found == [[Rollback] * 2, [Rollback] * 2, [SuspectHardware] * 2]
    (told,) = of(results[0][1], "replica_drift")
    assert (told["step"], told["action"]) == (5, "stop")
    written = [json.loads(file.read_text()) for file in sorted((tmp_path / "drift").iterdir())]
    assert [(w["step"], w["attempt"]) for w in written] == [(2, 1), (3, 2), (5, 3)]
    error = results[1][2]
    for place in written[-1]["odd"]:
        assert f"rank {place['rank']} ({place['host']}, {place['node_ip']}, cpu)" in error.message
    assert not root_cause([RankError(0, "SuspectHardware", str(error))]).heals


def test_one_note_where_there_is_nothing_to_compare(dataset: str, tmp_path: Path) -> None:
    """One rank has no replica: the run says so once, and trains."""
    steps, events, error = trained(alone(), checked(dataset, 1), str(tmp_path))
    assert error is None
    assert len(steps) == 8
    (note,) = [e["text"] for e in of(events, "note") if "check_replicas" in e["text"]]
    assert "no two ranks hold the same weights with parallel.strategy: ddp on 1 workers" in note


def test_state_in_a_file_is_refused() -> None:
    """offload.optimizer: nvme: the error has the field, its value and the remedy."""
    with pytest.raises(ValueError, match=r"check_replicas.*10.*offload\.optimizer: nvme") as error:
        job("ddp", train={"check_replicas": 10}, offload={"optimizer": "nvme", "path": "/swap"})
    assert "set it to null" in str(error.value)


def test_a_majority_is_more_than_half_of_those_that_hold_it() -> None:
    """The majority is determined for each tensor among the ranks that hold it."""

    def of_rank(a: int, b: int, held: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
        return {held: {"a": a, "b": b}}

    four = [of_rank(1, 1), of_rank(1, 2), of_rank(1, 1), of_rank(9, 2)]
    assert compare(four) == [Drift("a", (0, 1, 2), (3,)), Drift("b", (), (0, 1, 2, 3))]
    pairs = [of_rank(1, 1, (0, 2)), of_rank(5, 5, (1, 3)), of_rank(1, 1, (0, 2)), of_rank(5, 6, (1, 3))]
    assert compare(pairs) == [Drift("b", (), (1, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_every_bit_and_place_counts(dtype: torch.dtype) -> None:
    """A flipped bit, or two swapped values, give another hash, both on the host and by the sum that a device computes."""
    torch.manual_seed(1)
    count = replicas._CHUNK + 5
    values = torch.randint(0, 2, (count,)).to(dtype)
    values[0], values[-1] = 0, 1
    bits = values.view(replicas._INTEGERS[values.element_size()])

    def both() -> tuple[int, int]:
        return hashes([values])[0], int(weighted(bits))

    before = both()
    for at in (0, replicas._CHUNK - 1, replicas._CHUNK, count - 1):
        for bit in (0, 8 * values.element_size() - 2):
            bits[at] ^= 1 << bit
            assert all(now != then for now, then in zip(both(), before, strict=True))
            bits[at] ^= 1 << bit
    assert both() == before
    values[0], values[-1] = 1, 0
    assert all(now != then for now, then in zip(both(), before, strict=True))
    assert hashes([torch.zeros(()), torch.zeros(0)])[0] != hashes([torch.ones(())])[0]
