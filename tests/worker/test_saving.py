"""Storage failures in the whole loop on real files: training continues, and stops only after too many failures in a row."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint import manifest
from raydist.data.prepare import prepare
from raydist.errors import SavesFailed, SpecChanged
from raydist.faults import Kill
from raydist.records import Event, StepRecord
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from raydist.run.log_writer import RunLog
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.checkpoint.shard_writer import ShardWriter
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.metrics import reporter
from tests.exact import exact
from tests.training import run


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=40)) for _ in range(40)))
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.2)
    return str(folder / "tokens")


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def trained(rank: Rank, dataset: str, disk: str, mended_after: int) -> tuple[list[int], list[dict[str, Any]], Any]:
    """Twelve steps, a save every second one, to a file system that is read-only until the given number of failures.

    Returns (the steps trained, the events, and the outcome or the error) of this rank.
    """
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 12, "global_batch": 4, "micro_batch": 2},
            "checkpoint": {"every": 2, "asynchronous": False, "max_failures": 3 if mended_after > 3 else 100},
            "eval": {"every": None},
        }
    )
    steps: list[int] = []
    events: list[dict[str, Any]] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        steps.extend(record["step"] for record in new)
        events.extend(told)
        if sum(e["kind"] == "checkpoint_failed" for e in events) >= mended_after:
            remount(Path(disk), "rw")

    try:
        outcome: Any = train(
            Job(spec, RunDir(f"{disk}/run"), dataset), rank, MonitorChannel(push, lambda: None) if rank.first else None
        )
    except SavesFailed as error:
        outcome = error.message
    return steps, events, outcome


@pytest.mark.parametrize("world", [1, 2])
def test_three_failures_in_a_row_stop_the_run(ranks: Any, dataset: str, disk: Path, world: int) -> None:
    """All ranks stop at the same due step, with one cause."""
    remount(disk, "ro")
    found = run(ranks, trained, world, dataset, str(disk), 1000)
    steps, events, _ = found[0]
    assert steps == list(range(1, 9)), "the three failed at 2, 4 and 6, and 8 is the due step that learns of it"
    assert [e["step"] for e in events if e["kind"] == "checkpoint_failed"] == [2, 4, 6]
    for _, _, message in found:
        assert message.startswith("3 saves in a row failed up to step 8; the last one: rank 0: ")
        assert "Read-only file system" in message


def test_storage_that_comes_back_costs_its_saves_only(ranks: Any, dataset: str, disk: Path) -> None:
    """The run finishes with every step trained once, and the last state is saved."""
    remount(disk, "ro")
    ((steps, events, outcome),) = run(ranks, trained, 1, dataset, str(disk), 1)
    assert steps == list(range(1, 13))
    assert (outcome.status, outcome.step) == ("finished", 12)
    failed = [e["step"] for e in events if e["kind"] == "checkpoint_failed"]
    assert failed[0] == 2
    assert RunDir(disk / "run").committed()[-1] == 12
    assert manifest.verify(RunDir(disk / "run"), 12) == []


def requested(rank: Rank, dataset: str, root: str) -> list[tuple[str, int]]:
    """Twelve steps, a save every sixth. A user's request arrives in step 7; the save of step 6 cannot go on before step 9.
    Returns (kind, step) of each event about a save."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 12, "global_batch": 4, "micro_batch": 2},
            "checkpoint": {"every": 6},
            "eval": {"every": None},
        }
    )
    released, events, answer = threading.Event(), [], {}
    write, stepped = ShardWriter._write, reporter.Reporter.step

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> dict[str, Any]:
        events.extend(told)
        if any(record["step"] == 7 for record in new):
            answer["saves"] = [1]
        return answer

    def slow(self: ShardWriter, *args: Any) -> Any:
        released.wait()
        return write(self, *args)

    def step(self: reporter.Reporter, record: StepRecord) -> None:
        stepped(self, record)
        while record.step == 7 and not self.wants_checkpoint:
            self._wake.set()
            time.sleep(0.01)
        if record.step == 9:
            released.set()
            for thread in threading.enumerate():
                if thread.name == "raydist-checkpoint":
                    thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "_write", slow)
        patch.setattr(reporter.Reporter, "step", step)
        train(Job(spec, RunDir(root), dataset), rank, MonitorChannel(push, lambda: None))
    return [(e["kind"], e["step"]) for e in events if e["kind"].startswith("checkpoint_")]


def test_a_request_is_answered_right_after_the_save_in_flight(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """No step is passed over for it: it is saved after the first step that begins once that save has ended, and once only."""
    (found,) = run(ranks, requested, 1, dataset, str(tmp_path / "run"))
    assert found == [("checkpoint_saved", step) for step in (6, 10, 12)]


def copied(rank: Rank, dataset: str, root: str, attempt: int, until: int) -> tuple[list[str], list[float]]:
    """An attempt that saves every second step, with a replica: its event kinds and losses, as seen by rank 0."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 8, "global_batch": 4, "micro_batch": 2},
            "checkpoint": {"every": 2, "replicas": [f"{root}/replica"], "verify_every": 2},
            "eval": {"every": None},
        }
    )
    losses: list[float] = []
    kinds: list[str] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        losses.extend(record["loss"] for record in new)
        kinds.extend(e["kind"] for e in told)

    job = Job(spec, RunDir(f"{root}/run"), dataset, attempt, until)
    train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)
    return kinds, losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_from_its_replica(ranks: Any, dataset: str, tmp_path: Path, world: int) -> None:
    """If the newest checkpoint is corrupt or the whole folder is gone, the replica is used, with the losses of an undisturbed
    run."""
    _, undisturbed = run(ranks, copied, world, dataset, str(tmp_path / "undisturbed"), 1, 8)[0]
    _, losses = run(ranks, copied, world, dataset, str(tmp_path), 1, 4)[0]
    for shard in (tmp_path / "run/checkpoints/step-00000004").glob("shard-*"):
        shard.write_bytes(b"")
    kinds, more = run(ranks, copied, world, dataset, str(tmp_path), 2, 6)[0]
    assert [k for k in kinds if k in ("checkpoint_rejected", "replica_used", "resumed")] == [
        "checkpoint_rejected",
        "replica_used",
        "resumed",
    ]
    losses += more
    shutil.rmtree(tmp_path / "run")
    kinds, more = run(ranks, copied, world, dataset, str(tmp_path), 3, 8)[0]
    assert "replica_used" in kinds
    assert losses + more == undisturbed
    assert RunDir(tmp_path / "replica" / "run").committed()[-1] == 8


def extended(rank: Rank, dataset: str, root: str, attempt: int, steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """An attempt of `steps` steps: its records and its notes, as seen by rank 0."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": steps, "global_batch": 4, "micro_batch": 2},
            "optim": {"schedule": {"name": "cosine", "warmup": 2}},
            "checkpoint": {"every": 2},
            "eval": {"every": None},
        }
    )
    records: list[dict[str, Any]] = []
    notes: list[str] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        records.extend(new)
        notes.extend(e["text"] for e in told if e["kind"] == "note")

    train(
        Job(spec, RunDir(f"{root}/run"), dataset, attempt),
        rank,
        MonitorChannel(push, lambda: None) if rank.first else None,
    )
    return records, notes


@pytest.mark.parametrize("world", [1, 2])
def test_a_finished_run_is_extended(ranks: Any, dataset: str, tmp_path: Path, world: int) -> None:
    """6 steps, then 12 of the same job: each sample of a run of 12 is used once, the learning rates of the added steps follow the
    schedule of 12, and the change is reported. Fewer steps than already trained are refused."""
    whole, _ = run(ranks, extended, world, dataset, str(tmp_path / "whole"), 1, 12)[0]
    first, _ = run(ranks, extended, world, dataset, str(tmp_path), 1, 6)[0]
    more, notes = run(ranks, extended, world, dataset, str(tmp_path), 2, 12)[0]
    assert [r["step"] for r in first + more] == list(range(1, 13))
    assert [r["samples_hash"] for r in first + more] == [r["samples_hash"] for r in whole]
    assert [r["lr"] for r in more] == [r["lr"] for r in whole[6:]]
    assert first[-1]["lr"] < whole[5]["lr"]
    (told,) = [note for note in notes if note.startswith("train.steps: was 6, is 12: ")]
    assert f"from {first[-1]['lr']:.3g} at step 6 to {more[0]['lr']:.3g} at step 7" in told
    for failed in ranks.run(extended, world, dataset, str(tmp_path), 3, 11):
        assert isinstance(failed, SpecChanged)


def spaced(rank: Rank, dataset: str, root: str) -> list[int]:
    """Sixty steps with `checkpoint.every: auto`, and a failure expected at once: the steps trained, as seen by rank 0."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 60, "global_batch": 4, "micro_batch": 2},
            "checkpoint": {"every": "auto", "mtbf_h": 1e-6, "keep": 60},
            "eval": {"every": None},
        }
    )
    steps: list[int] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        steps.extend(record["step"] for record in new)

    train(Job(spec, RunDir(f"{root}/run"), dataset), rank, MonitorChannel(push, lambda: None) if rank.first else None)
    return steps


def test_checkpoints_as_far_apart_as_loses_least(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Two ranks that measure different times save at the same steps, which rank 0 chooses: the first two before a cost is known,
    and the last one at the end."""
    steps, _ = run(ranks, spaced, 2, dataset, str(tmp_path))
    assert steps == list(range(1, 61))
    committed = RunDir(tmp_path / "run").committed()
    assert committed[:2] == [10, 20]
    assert committed[-1] == 60


def recorded(rank: Rank, dataset: str, root: str, attempt: int, resume: int, dies: bool) -> Any:
    """An attempt whose monitor is a RunLog. With `dies` it is cut off after its first flush, and the rank is killed in step 9."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 12, "global_batch": 4, "micro_batch": 2},
            "checkpoint": {"every": 2, "asynchronous": False},
            "eval": {"every": None},
        }
    )
    log = RunLog(RunDir(root))
    log.attempt(attempt, resume)
    cut: list[bool] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        if cut:
            raise ConnectionError("the monitor does not answer")
        log.steps(new)
        for event in told:
            log.event(Event.from_dict(event))

    def durable() -> None:
        log.flush()
        cut.extend([True] * dies)

    faults = [Kill(rank=0, step=9).model_dump(mode="json")] if dies else []
    job = Job(spec, RunDir(root), dataset, attempt, faults=faults)
    patience, reporter.FLUSH_S = reporter.FLUSH_S, 1.0 if dies else 240.0
    try:
        return train(job, rank, MonitorChannel(push, durable)).status
    finally:
        reporter.FLUSH_S = patience


def test_a_checkpoint_has_the_records_that_the_monitor_did_not_get(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """The network to the monitor is cut after the save of step 2, the rank dies in step 9, and the run goes on from step 8: each
    step has one row, which is that of an undisturbed run, and the saves of before are events."""
    calm, disturbed = RunDir(tmp_path / "calm"), RunDir(tmp_path / "disturbed")
    assert run(ranks, recorded, 1, dataset, calm.uri, 1, 0, False) == ["finished"]
    (death,) = ranks.run(recorded, 1, dataset, disturbed.uri, 1, 0, True)
    assert isinstance(death, ChildProcessError)
    assert read_steps(disturbed)["step"].to_pylist() == [1, 2]
    assert run(ranks, recorded, 1, dataset, disturbed.uri, 2, 8, False) == ["finished"]
    rows, expected = (exact(read_steps(each).to_pylist()) for each in (disturbed, calm))
    assert [row[0] for row in rows] == list(range(1, 13))
    assert rows == expected
    saved = [event.data["step"] for event in read_events(disturbed) if event.kind == "checkpoint_saved"]
    assert saved == [2, 4, 6, 10, 12]  # that of step 8 became known after the checkpoint
    assert read_steps(disturbed)["attempt"].to_pylist() == [1] * 2 + [2] * 10
