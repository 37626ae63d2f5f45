"""The thread that prepares batches ahead of time."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.data.batches import MASKED, Batches, Cursor, StepBatch, equal_parts, samples_hash
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.loader import RESTARTS, Loader, Stall
from raydist.data.order import IntArray
from raydist.errors import DataError


@pytest.fixture
def windows(dataset: TokenDataset) -> Windows:
    """Samples of 16 tokens."""
    return Windows(dataset.split("train"), 16)


def batches_of(windows: Windows, size: int = 12) -> Batches:
    """Global batches of `size` samples."""
    return Batches(len(windows), size, 5, "f")


def test_gives_the_ranks_share_of_each_step(windows: Windows) -> None:
    """Cursors continue from the given one; arrays are those of the rank's own samples."""
    batches = batches_of(windows)
    start = batches.at_step(batches.steps_per_epoch - 2)
    with Loader(windows, batches, start, rank=1, world=2, divide=equal_parts(4), steps=4) as loader:
        steps = list(loader)
    assert len(steps) == 4
    assert [s.cursor.epoch for s in steps] == [0, 0, 1, 1]
    assert steps[0].cursor == start
    for before, behind in itertools.pairwise(steps):
        assert behind.cursor == before.after == batches.after(before.cursor)
    for step in steps:
        assert np.array_equal(step.ids, batches.ids(step.cursor))
        assert step.samples_hash == samples_hash(step.ids)
        mine = step.ids[len(step.ids) // 2 :]
        expected = windows.batch(mine)
        assert np.array_equal(np.concatenate([m.tokens for m in step.micro_batches]), expected[0])
        assert np.array_equal(np.concatenate([m.targets for m in step.micro_batches]), expected[1])
        assert step.tokens == np.count_nonzero(expected[1] != MASKED)
        assert step.wait_seconds >= 0


def test_a_rank_without_samples_takes_part(windows: Windows) -> None:
    """A rank without samples gets as many micro-batches as the others, fully masked."""
    batches = Batches(len(windows), 3, 5, "f")
    with Loader(windows, batches, Cursor(), rank=0, world=4, divide=equal_parts(1), steps=1) as loader:
        step = next(loader)
    assert len(step.ids) == 3
    assert len(step.micro_batches) == 1
    assert step.micro_batches[0].tokens.shape == (1, 16)
    assert np.all(step.micro_batches[0].targets == MASKED)
    assert step.tokens == 0


def test_every_target_is_trained_once_an_epoch(windows: Windows) -> None:
    """In an epoch on three ranks, the unmasked targets are all tokens of the split but the first."""
    batches = batches_of(windows)
    total = 0
    for rank in range(3):
        with Loader(
            windows, batches, Cursor(), rank=rank, world=3, divide=equal_parts(2), steps=batches.steps_per_epoch
        ) as it:
            total += sum(step.tokens for step in it)
    assert total == len(windows.split) - 1


class _Counting:
    """Samples of one token that count the batches requested, and raise at batch `fail_at`."""

    def __init__(self, fail_at: int = -1) -> None:
        self.made = 0
        self.fail_at = fail_at
        self.asked = threading.Semaphore(0)

    def row_lengths(self, ids: IntArray) -> None:
        """All rows are full."""

    def batch(self, ids: IntArray, pack: bool = False) -> tuple[IntArray, IntArray, None]:
        if self.made == self.fail_at:
            raise OSError("the disk is gone")
        self.made += 1
        self.asked.release()
        tokens = np.zeros((len(ids), 1), dtype=np.int64)
        return tokens, tokens, None


def test_the_queue_is_bounded_and_close_ends_it() -> None:
    """Without a consumer `prefetch` batches and one more are made; `close` ends the waiting thread."""
    source = _Counting()
    loader = Loader(source, Batches(10**9, 4, 0, "f"), Cursor(), divide=equal_parts(4), prefetch=3)
    for _ in range(4):
        assert source.asked.acquire(timeout=240)
    # The fifth batch is not started: the thread waits until the queue has room for the fourth.
    assert not source.asked.acquire(timeout=0.2)
    assert source.made == 4
    loader.close()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name == "raydist-loader"]
    assert source.made == 4
    with pytest.raises(StopIteration):
        next(loader)


def test_an_error_in_the_thread_reaches_the_consumer() -> None:
    """Earlier batches are delivered; then every `next` raises the thread's exception."""
    with Loader(_Counting(fail_at=2), Batches(100, 4, 0, "f"), Cursor(), divide=equal_parts(4)) as loader:
        assert next(loader).cursor == Cursor(0, 0)
        assert next(loader).cursor == Cursor(0, 4)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)


def test_transform_runs_in_the_thread() -> None:
    """The transform, which converts and pins, runs in the loader's thread, not in the training loop's."""
    names = []

    def mark(step: StepBatch) -> StepBatch:
        names.append(threading.current_thread().name)
        step.samples_hash = "seen"
        return step

    with Loader(
        _Counting(), Batches(100, 4, 0, "f"), Cursor(), divide=equal_parts(4), steps=2, transform=mark
    ) as loader:
        assert [s.samples_hash for s in loader] == ["seen", "seen"]
    assert set(names) == {"raydist-loader"}


class _Blocking:
    """Samples of one token, their own id. The first `times` reads that include sample `stuck` block in the kernel, on a FIFO."""

    def __init__(self, fifo: Path, stuck: int, times: int) -> None:
        os.mkfifo(fifo)
        self.fifo, self.stuck, self.left = fifo, stuck, times
        self.blocked, self.freed = threading.Semaphore(0), threading.Semaphore(0)

    def row_lengths(self, ids: IntArray) -> None:
        """All rows are full."""

    def batch(self, ids: IntArray, pack: bool = False) -> tuple[IntArray, IntArray, None]:
        if self.stuck in ids and self.left:
            self.left -= 1
            self.blocked.release()
            with open(self.fifo, "rb") as file:  # waits for a writer
                file.read()
            self.freed.release()
        tokens = ids[:, None].copy()
        return tokens, tokens, None

    def free(self, threads: int) -> None:
        """Unblocks all blocked threads, and waits until they have returned."""
        descriptor = os.open(self.fifo, os.O_WRONLY)
        os.close(descriptor)
        for _ in range(threads):
            assert self.freed.acquire(timeout=240)


def test_a_stuck_thread_is_replaced_at_its_cursor(tmp_path: Path) -> None:
    """A blocked read is reported with its line while it blocks, and the thread is replaced; each sample comes once, also after
    the old thread continues."""
    batches = Batches(40, 4, 0, "f")
    stuck = batches.at_step(3)
    source = _Blocking(tmp_path / "fifo", int(batches.ids(stuck)[0]), 1)
    told: list[Stall] = []
    expected = np.concatenate([batches.ids(batches.at_step(i)) for i in range(10)])
    with Loader(
        source, batches, Cursor(), divide=equal_parts(2), steps=10, timeout_s=1.0, on_stall=told.append
    ) as loader:
        steps = [next(loader) for _ in range(3)]
        assert source.blocked.acquire(timeout=240)
        steps += [next(loader) for _ in range(2)]
        source.free(1)
        steps += list(loader)
    assert np.array_equal(np.concatenate([m.tokens[:, 0] for s in steps for m in s.micro_batches]), expected)
    # A busy machine may hold up another batch as long, or this one again.
    stall = next(one for one in told if one.cursor == stuck)
    assert (stall.restarts, stall.final) == (0, False)
    assert np.array_equal(stall.ids, batches.ids(stuck))
    assert stall.seconds >= 1.0
    assert "test_loader.py" in stall.at.splitlines()[0]
    assert stall.at.splitlines()[0].endswith("in batch")


def test_a_read_that_blocks_for_ever_ends_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two restarts at one batch `next` raises DataError with the line at which the thread blocks; `close` does not wait for
    that thread."""
    batches = Batches(40, 4, 0, "f")
    stuck = batches.at_step(1)
    source = _Blocking(tmp_path / "fifo", int(batches.ids(stuck)[0]), 9)
    told: list[Stall] = []
    start = Loader._start

    def until_blocked(loader: Loader) -> Any:
        """Its threads make the first batch, and are blocked in the next one, before anybody waits for 0.5 s."""
        made = start(loader)
        assert source.blocked.acquire(timeout=240)
        return made

    monkeypatch.setattr(Loader, "_start", until_blocked)
    with Loader(source, batches, Cursor(), divide=equal_parts(4), timeout_s=0.5, on_stall=told.append) as loader:
        assert next(loader).cursor == Cursor()
        with pytest.raises(DataError, match=r"epoch 0, sample 4, on rank 0.*\n.*test_loader.py:\d+ in batch"):
            next(loader)
    assert [(s.restarts, s.final) for s in told if s.cursor == stuck] == [(0, False), (1, False), (RESTARTS, True)]
    source.left = 0
    source.free(3)
