"""Bad steps in the whole loop on real files: never applied, skipped once, recorded; all other batches are trained once."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import manifest
from raydist.cluster.run.recovery import History, Restart, Split, decide
from raydist.cluster.run.root_cause import Failure, RankError, root_cause
from raydist.data import skipped_batches
from raydist.data.batches import Batches, equal_parts
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.prepare import prepare
from raydist.errors import LossSpike, NonFinite, Rollback
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.mesh import Mesh
from tests.training import alone, run

STEPS, CONTEXT, BATCH = 8, 8, 6
Seen = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte corpus in which every sample begins differently."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=40)) for _ in range(40)))
    out = folder / "tokens"
    prepare([str(folder / "a.txt")], str(out), eval_fraction=0.2)
    return str(out)


def spec_of(dataset: str, on_nan: str = "stop", options: Any = None, micro: int = 2, **recovery: Any) -> JobSpec:
    """Eight steps of six sequences, with dropout, a checkpoint every third step."""
    return JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"name": "tests.worker.faulty:build", "layers": 1, "width": 16, "heads": 2, "context": CONTEXT,
                      "dropout": 0.1, "options": options or {}},
            "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": micro},
            "checkpoint": {"every": 3},
            "eval": {"every": None},
            "recovery": {"on_nan": on_nan, **recovery},
        }
    )  # fmt: skip


def sample(dataset: str, step: int) -> tuple[list[int], list[int]]:
    """(tokens of the last sample in the batch of `step`, the ids of that batch)."""
    data = TokenDataset(dataset)
    windows = Windows(data.split("train"), CONTEXT)
    batches = Batches(len(windows), BATCH, 0, data.fingerprint)
    ids = batches.ids(batches.at_step(step - 1))
    return windows.batch(ids[-1:])[0][0].tolist(), ids.tolist()


def trained(rank: Rank, spec: JobSpec, path: str, attempt: int = 1, until: int | None = None, faults: Any = ()) -> Any:
    """One attempt: (steps, events) as rank 0 reported them, and what the attempt raised, if anything."""
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        steps.extend(new)
        events.extend(told)

    job = Job(spec, RunDir(path), str(spec.data.path), attempt, until, faults=faults)
    error: BaseException | None = None
    try:
        train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)
    except Exception as raised:
        error = type(raised)(*raised.args)
    return steps, events, error


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["kind"] == kind]


def weights(path: Path, step: int = STEPS) -> dict[str, bytes]:
    """Every tensor of a checkpoint, optimizer state and buffers too, as bytes."""
    run = RunDir(path)
    found = {}
    for name, entry in manifest.read(run, step).tensors.items():
        if name.startswith(("model/", "optim/")):
            parts = []
            for chunk in sorted(entry.chunks, key=lambda c: c.offsets):
                with run.storage.open(manifest.path(step, chunk.file)) as source:
                    source.seek(chunk.start)
                    parts.append(source.read(chunk.length))
            found[name] = b"".join(parts)
    return found


def exact(steps: list[dict[str, Any]]) -> list[Any]:
    """The values of the trained steps that must be equal bit for bit; a NaN equals nothing, so such steps are omitted."""
    return [(s["step"], s["loss"], s["grad_norm"], s["samples_hash"]) for s in steps if s["loss"] == s["loss"]]


@pytest.mark.parametrize("world", [1, 2])
def test_stop_names_the_batch_and_ends_on_all_ranks(ranks: Any, dataset: str, tmp_path: Path, world: int) -> None:
    """NaN at step 5: NonFinite on every rank; the event has the batch's ids, rank and micro-batch; the skipped-batch list is
    empty."""
    poison, ids = sample(dataset, 5)
    results = run(ranks, trained, world, spec_of(dataset, "stop", {"poison": poison}), str(tmp_path))
    assert all(isinstance(error, NonFinite) for _, _, error in results)
    steps, events, _ = results[0]
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    (told,) = of(events, "non_finite")
    assert (told["step"], told["action"], told["ids"]) == (5, "stop", ids)
    (guilty,) = told["ranks"]
    # The poisoned sample is the batch's last one: in the last micro-batch of the last rank.
    assert (guilty["rank"], guilty["micro_batch"]) == (world - 1, 2 if world == 1 else 1)
    assert len(guilty["parameters"]) == 5
    assert skipped_batches.read(RunDir(tmp_path)) == []


@pytest.mark.parametrize("world", [1, 2])
def test_skip_and_rollback_leave_the_same_batch_out(ranks: Any, dataset: str, tmp_path: Path, world: int) -> None:
    """NaN at step 1 or 5. With skip, the run finishes and lists the batch. With rollback, a second attempt skips it and trains the
    other batches to the same losses and weights, bit for bit, including dropout, optimizer and saved buffers."""
    poison, _ = sample(dataset, 5)
    first, _ = sample(dataset, 1)
    for at, name in ((poison, "five"), (first, "one")):
        number = 5 if name == "five" else 1
        skipped, rolled = tmp_path / f"skip-{name}", tmp_path / f"rollback-{name}"
        steps, events, error = run(ranks, trained, world, spec_of(dataset, "skip", {"poison": at}), str(skipped))[0]
        assert error is None
        assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
        assert [s["step"] for s in steps if s["loss"] != s["loss"]] == [number]
        assert [e["action"] for e in of(events, "non_finite")] == ["skip"]
        spec = spec_of(dataset, "rollback", {"poison": at})
        results = run(ranks, trained, world, spec, str(rolled))
        assert all(isinstance(error, Rollback) for _, _, error in results)
        again, events, error = run(ranks, trained, world, spec, str(rolled), 2)[0]
        assert error is None
        assert of(events, "non_finite") == []
        assert [e["step"] for e in of(events, "resumed")] == ([3] if name == "five" else [])
        left = [s for s in again if s["loss"] != s["loss"]]
        assert [(s["step"], s["tokens"], s["samples"]) for s in left] == [(number, 0, 0)]
        whole = [s for s in results[0][0] if s["step"] < again[0]["step"]] + again
        assert exact(whole) == exact(steps)
        assert weights(rolled) == weights(skipped)
        counts = {v for n, v in weights(rolled).items() if n.startswith("optim/") and n.endswith("/step")}
        assert counts == {struct.pack("<f", STEPS - 1)}  # updates that the optimizer has made
        for path, action in ((skipped, "skip"), (rolled, "rollback")):
            (entry,) = skipped_batches.read(RunDir(path))
            assert (entry.step, entry.action, entry.attempt) == (number, action, 1)
            assert entry.samples_hash == steps[number - 1]["samples_hash"]


def test_the_ledger_holds_at_another_world_size(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Rolled back on 2 ranks and resumed on 1, without the folder, from the list in the checkpoint: the batch stays skipped."""
    poison, _ = sample(dataset, 5)
    spec = spec_of(dataset, "rollback", {"poison": poison})
    run(ranks, trained, 2, spec, str(tmp_path))
    run(ranks, trained, 2, spec, str(tmp_path), 2, 6)
    (tmp_path / "ledger" / "step-00000005.json").unlink()
    steps, events, error = trained(alone(), spec, str(tmp_path), 3)
    assert error is None
    assert [s["step"] for s in steps] == [7, 8]
    assert [e["step"] for e in manifest.read(RunDir(tmp_path), STEPS).plain["guard"]["left_out"]] == [5]
    assert of(events, "resumed")[0]["step"] == 6


@pytest.mark.parametrize(
    ("on_nan", "limit", "why"),
    [("rollback", {"max_rollbacks": 0}, "rolled back 0 times"), ("skip", {"max_skips": 1}, "recovery.max_skips is 1")],
)
def test_limits_stop_the_run(dataset: str, tmp_path: Path, on_nan: str, limit: Any, why: str) -> None:
    """Past its limit each stops the run with the cause: the number of rollbacks, and of skipped steps in a row."""
    if on_nan == "skip":
        # An earlier batch is already in the list.
        ids = sample(dataset, 4)[1]
        skipped_batches.write(RunDir(tmp_path), skipped_batches.Entry(4, 0, 3 * BATCH, len(ids), "-", "skip", "-", 1))
    spec = spec_of(dataset, on_nan, {"poison": sample(dataset, 5)[0]}, **limit)
    _, _, error = trained(alone(), spec, str(tmp_path))
    assert isinstance(error, NonFinite)
    assert why in error.message


def test_weights_that_are_not_finite_are_not_skipped(dataset: str, tmp_path: Path) -> None:
    """With a non-finite weight every later step is bad: skip stops the run, and names the weight."""
    from raydist.worker.checks import bad_steps

    spec = spec_of(dataset, "skip")
    model = torch.nn.Linear(2, 2)
    made = bad_steps.BadStepCheck(spec, Mesh(alone()), RunDir(tmp_path), 1, model, None, equal_parts(1))
    assert made._weights_problem() == ""
    with torch.no_grad():
        model.bias[1] = float("inf")
    assert made._weights_problem() == "the weights themselves are not finite: bias"


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_spike_is_not_applied(dataset: str, tmp_path: Path, on_nan: str) -> None:
    """A loss above twice the median of the 3 before it: at step 5 the run stops, or skips it like a NaN, with the same bits."""
    options = {"poison": sample(dataset, 5)[0], "times": 1000.0}
    spike = {"factor": 2.0, "window": 3}
    steps, events, error = trained(alone(), spec_of(dataset, on_nan, options, spike=spike), str(tmp_path / "spike"))
    (told,) = of(events, "loss_spike")
    assert (told["step"], told["action"]) == (5, on_nan)
    assert told["loss"] > 2 * told["median"]
    if on_nan == "stop":
        assert isinstance(error, LossSpike)
        return
    assert error is None
    nan = spec_of(dataset, on_nan, {**options, "times": float("nan")})
    trained(alone(), nan, str(tmp_path / "nan"))
    assert weights(tmp_path / "spike") == weights(tmp_path / "nan")
    assert len(steps) == STEPS


def test_out_of_memory_shrinks_the_micro_batch_until_it_fits(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Memory for one sequence: micro-batches of 3 fail, so the next attempt uses 1. Samples equal those of a run that had enough
    memory from the start, losses within 1e-5."""

    def spec(micro: int, room: int | None) -> JobSpec:
        made = spec_of(dataset, options={"room": room}, micro=micro)
        return made.model_copy(update={"model": made.model.model_copy(update={"dropout": 0.0})})

    expected, _, error = run(ranks, trained, 2, spec(6, None), str(tmp_path / "roomy"))[0]
    assert error is None
    micro, history, tried = 6, History(), []
    while True:
        tried.append(micro)
        results = run(ranks, trained, 2, spec(micro, 1), str(tmp_path / "tight"), len(tried))
        if results[0][2] is None:
            break
        failure: Failure = root_cause([
            RankError(i, type(e).__name__, str(e), bases=tuple(c.__name__ for c in type(e).__mro__))
            for i, (_, _, e) in enumerate(results)
        ])  # fmt: skip
        decision = decide(failure, history, spec(micro, 1).recovery, Split(BATCH, micro, 2))
        assert isinstance(decision, Restart)
        assert decision.micro_batch is not None
        history, micro = history.then(failure), decision.micro_batch
    assert tried == [6, 1]
    steps = results[0][0]
    assert [s["samples_hash"] for s in steps] == [s["samples_hash"] for s in expected]
    assert [s["loss"] for s in steps] == pytest.approx([s["loss"] for s in expected], rel=1e-5)
