"""The samples of each step, from a dataset with a length or from one that is iterated and has a state.

Either way all ranks have the same global batches, of which each takes its share. A stream is read whole by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from raydist.data.batches import Batches, Cursor
from raydist.data.order import IntArray
from raydist.errors import DataError, UserError
from raydist.own.state import ValueState
from raydist.worker import distributed

STREAM = "dataset"
"""The extra state of a checkpoint that has a stream's."""


class Samples(Protocol):
    """`fingerprint`: of the dataset; `steps_per_epoch`: 0 if it is not known."""

    @property
    def source(self) -> Any:
        """`source[number]`: a sample; of a stream one of the newest global batch."""

    fingerprint: str
    steps_per_epoch: int

    @property
    def state(self) -> ValueState | None:
        """What checkpoints keep of it. `next` keeps the state of before the batch, until `ValueState.drop`."""

    def next(self, at: Cursor) -> tuple[IntArray, Cursor]:
        """The numbers of the samples of the global batch at `at`, and the cursor after it."""


def samples_of(dataset: Any, batch: int, seed: int) -> Samples:
    """Raises UserError for a dataset that could not be continued where a killed run ended."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if not len(dataset):
            raise _empty(dataset)
        return _Indexed(dataset, batch, seed)
    if all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict")):
        return _Stream(dataset, batch, seed)
    raise UserError(
        f"dataset: {type(dataset).__name__} has no length (__len__ and __getitem__), and no state (__iter__, state_dict and "
        "load_state_dict)",
        "give it either: without, a killed run cannot be continued with the sample after its last one",
    )


def _empty(dataset: Any) -> DataError:
    return DataError(f"dataset: {type(dataset).__name__} has no samples", "give one that has some")


class _Indexed:
    state = None

    def __init__(self, dataset: Any, batch: int, seed: int) -> None:
        self.source = dataset
        self.fingerprint = f"own/{len(dataset)}"
        self._batches = Batches(len(dataset), batch, seed, self.fingerprint)
        self.steps_per_epoch = self._batches.steps_per_epoch

    def next(self, at: Cursor) -> tuple[IntArray, Cursor]:
        return self._batches.ids(at), self._batches.after(at)


class _Stream:
    """Samples are numbered in the order in which an epoch gives them.

    No sample is read ahead of the global batch. An epoch that ends in a batch makes it shorter.
    """

    fingerprint = "own/stream"
    steps_per_epoch = 0

    def __init__(self, dataset: Any, batch: int, seed: int) -> None:
        self._dataset, self._batch, self._seed = dataset, batch, seed
        self._iterator: Iterator[Any] | None = None
        self._items: list[Any] = []
        self._first = 0
        self.state = ValueState(dataset, "dataset")

    def next(self, at: Cursor) -> tuple[IntArray, Cursor]:
        self.state.keep()
        items = self._read(at)
        if not items:
            # The last batch had the epoch's last sample; or the state of an epoch that had ended was loaded.
            at = Cursor(at.epoch + 1) if at.offset else at
            self._iterator = None
            if not (items := self._read(at)):
                raise _empty(self._dataset)
        self._items, self._first = items, at.offset
        after = Cursor(at.epoch, at.offset + len(items))
        if len(items) < self._batch:
            self._iterator, after = None, Cursor(at.epoch + 1)
        return np.arange(at.offset, at.offset + len(items), dtype=np.int64), after

    @property
    def source(self) -> Any:
        return self

    def __getitem__(self, number: int) -> Any:
        return self._items[number - self._first]

    def _read(self, at: Cursor) -> list[Any]:
        distributed.seed_all(self._seed, "own stream", at.epoch, at.offset)  # what it draws is the same on all ranks
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return list(islice(self._iterator, self._batch))
