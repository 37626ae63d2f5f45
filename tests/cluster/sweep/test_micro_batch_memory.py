"""raydist.cluster.sweep.micro_batch_memory: a trial does not run out of memory again if that is known in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.cluster.run.request import Request
from raydist.cluster.sweep.micro_batch_memory import MicroBatches, shrunk
from raydist.records import Event
from raydist.run.directory import SPEC, RunDir
from raydist.run.log_writer import RunLog
from raydist.spec import parse


def request(path: Path, micro_batch: int = 8, **fields: Any) -> Request:
    """A trial with that micro-batch; `model` and `optim` as given."""
    train = {"steps": 10, "global_batch": 24, "micro_batch": micro_batch, **fields.pop("train", {})}
    spec = parse({"data": {"path": "d"}, **fields, "train": train}, source="test")
    return Request(spec, RunDir(path), "d", 0.0)


def decided(*micro_batches: int | None) -> list[Event]:
    """The supervisor's decisions after failures of a run."""
    told = {"action": "restart", "because": "", "after_s": 0.0, "exclude": None}
    return [Event("decision", 1.0, {**told, "micro_batch": n}) for n in micro_batches]


def test_the_last_one_counts() -> None:
    """In a run that has reduced it several times; other failures change nothing."""
    assert shrunk([]) is None
    assert shrunk(decided(None)) is None
    assert shrunk([Event("failure", 1.0, {"micro_batch": 7}), *decided(4, 2, None)]) == 2


def test_a_cell_that_begins_again(tmp_path: Path) -> None:
    """A trial that starts again has the micro-batch of its run's events, whichever driver wrote them; all else is as
    requested."""
    asked, fits = request(tmp_path / "a"), MicroBatches()
    assert fits.fitted(asked) is asked
    asked.run.storage.write(SPEC, b"")
    log = RunLog(asked.run)
    for event in decided(4, 2):
        log.event(event)
    log.flush()
    fitted = fits.fitted(asked)
    assert fitted.spec.train.micro_batch == 2
    assert fitted.spec.train.model_copy(update={"micro_batch": 8}) == asked.spec.train
    assert (fitted.run, fitted.dataset) == (asked.run, "d")
    assert fits.fitted(request(tmp_path / "a", 1)).spec.train.micro_batch == 1, "it is never made larger"


def test_virtual_ranks_keep_the_micro_batch(tmp_path: Path) -> None:
    """Its size decides bits: a trial that ran out of memory begins again with recomputed activations, and others as requested."""
    asked, fits = request(tmp_path / "a", train={"virtual_ranks": 3}), MicroBatches()
    fits.learn(asked.spec, 2)
    assert fits.fitted(asked, 2) is asked
    asked.run.storage.write(SPEC, b"")
    log = RunLog(asked.run)
    (event,) = decided(None)
    log.event(Event("decision", 1.0, {**event.data, "checkpoint_activations": "full"}))
    log.flush()
    train = fits.fitted(asked).spec.train
    assert train == asked.spec.train.model_copy(update={"checkpoint_activations": "full"})


@pytest.mark.parametrize(
    ("other", "micro_batch"),
    [
        ({"optim": {"lr": 1.0}}, 4),
        ({"train": {"seed": 5}}, 4),
        ({"train": {"global_batch": 30, "micro_batch": 10}}, 3),
        ({"model": {"width": 256}}, 8),
        ({"train": {"checkpoint_activations": "full"}}, 8),
        ({"precision": "bf16"}, 8),
    ],
)
def test_cells_alike(tmp_path: Path, other: dict[str, Any], micro_batch: int) -> None:
    """The micro-batch found by one trial is used for trials whose passes need as much memory: the largest that fits and divides
    the batch."""
    fits = MicroBatches()
    for learnt in (4, 6):
        fits.learn(request(tmp_path / "a").spec, learnt)
    assert fits.fitted(request(tmp_path / "b", **other)).spec.train.micro_batch == micro_batch


def test_a_budget_of_tokens(tmp_path: Path) -> None:
    """With data.batching it is max_tokens that a trial starts with: of its run's events, of equal trials, or of the sweep; never
    less than the longest sequence, which stays the same, and never more than was asked for."""

    def asked(name: str, max_tokens: int = 64, **train: Any) -> Request:
        data = {"path": "d", "batching": {"max_tokens": max_tokens, "longest": 12}}
        return request(tmp_path / name, model={"context": 16}, data=data, train=train)

    def tokens(made: Request) -> tuple[int, int]:
        batching = made.spec.data.batching
        assert batching is not None
        return batching.max_tokens, made.spec.longest

    fits, first = MicroBatches(), asked("a")
    first.run.storage.write(SPEC, b"")
    log = RunLog(first.run)
    told = {"action": "restart", "because": "", "after_s": 0.0, "exclude": None, "micro_batch": None}
    log.event(Event("decision", 1.0, {**told, "max_tokens": 32}))
    log.flush()
    assert tokens(fits.fitted(first)) == (32, 12)
    assert tokens(fits.fitted(asked("a", 20))) == (20, 12)
    assert tokens(fits.fitted(asked("b"))) == (64, 12)
    fits.learn(first.spec, 32)
    assert tokens(fits.fitted(asked("b", seed=5))) == (32, 12)
    assert tokens(fits.fitted(asked("b"), 4)) == (12, 12)
    assert fits.fitted(request(tmp_path / "c", model={"context": 16})).spec.train.micro_batch == 8


def test_what_the_sweep_has_noted(tmp_path: Path) -> None:
    """It is used if the run's own events are missing."""
    assert MicroBatches().fitted(request(tmp_path / "a"), 3).spec.train.micro_batch == 3
