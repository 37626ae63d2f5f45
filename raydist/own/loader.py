"""How samples become micro-batches on a device, and what a session takes from a DataLoader of torch: its dataset, its batch size,
and its processes, which read the micro-batches of this rank ahead.

The order of the samples and their division among the ranks are the session's, as without a loader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, RandomSampler

from raydist.data.order import IntArray
from raydist.errors import UserError
from raydist.worker import distributed
from raydist.worker.dataloader import sent

Part = tuple[int, IntArray]
"""A step, and the numbers of the samples of one of its micro-batches."""


class Reader(Dataset[Any]):
    """Part -> micro-batch, here or in a loader's process. What a sample draws at random depends on the seed, the step and the
    sample alone, so that it is the same on any number of ranks; for this each is read by itself."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, part: Part) -> Any:
        step, ids = part
        samples = []
        for number in ids.tolist():
            distributed.seed_all(self._seed, "own data", step, number, devices=False)
            samples.append(self._dataset[number])
        return self._collate(samples)


def read_ahead(reader: Reader, parts: Iterable[Part], loader: DataLoader[Any]) -> Iterator[Any]:
    """The micro-batches in their order, which processes read as `loader` would have them. They end with the iterator."""
    return iter(
        DataLoader(
            reader,
            batch_size=None,
            sampler=parts,
            collate_fn=_as_it_is,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`: those in tuples, lists, dicts and dataclasses, and of another object that has one, by
    its `to`, such as the batches of transformers and of torch_geometric."""

    def send(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return sent(value, device)
        if callable(to := getattr(value, "to", None)):
            return to(device)
        if is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for field in fields(value):
                object.__setattr__(made, field.name, to_device(getattr(value, field.name), device))
            return made
        return value

    return tree_map(send, batch)


def check(loader: DataLoader[Any]) -> None:
    """Raises UserError for a loader whose batches are not those that a session makes of its dataset."""
    kind, sampler = type(loader).__name__, loader.sampler
    wrong, remedy = (
        "",
        "give it shuffle=True and nothing else that chooses samples, or give the session the dataset itself",
    )
    if not (hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__")):
        wrong = "gives batches of a stream, and the session makes them itself, for all ranks"
        remedy = "give it the stream, if it has a state; or a loader with a state that gives samples: batch_size=None"
    elif loader.batch_size is None:
        wrong = "has a batch_sampler, and the session makes the batches itself, for all ranks"
    elif not isinstance(sampler, RandomSampler) or sampler.replacement or len(sampler) != len(loader.dataset):
        wrong = f"chooses samples by its {type(sampler).__name__}, and the session trains each sample once an epoch, shuffled"
    elif loader.drop_last:
        wrong, remedy = (
            "has drop_last=True, and the session trains every sample: an epoch's last batch is shorter",
            "leave it out",
        )
    if wrong:
        raise UserError(f"dataset: this {kind} {wrong}", remedy)


def _as_it_is(made: Any) -> Any:
    return made
