"""Batches of this rank: micro-batches as tensors on its device.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raydist.data.batches import MASKED, Divide, MicroBatch, Samples, StepBatch, eval_batches
from raydist.data.dataset import TokenDataset
from raydist.data.samples import batches_of, divide_of, held_out_samples, training_samples
from raydist.data.sequences import Sequences
from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.distributed import use_device
from raydist.worker.mesh import Mesh
from raydist.worker.parts import Parts


class Feed:
    """The batches of one rank. Ranks send nothing to each other: each reads its part of the same global batch."""

    def __init__(self, spec: JobSpec, mesh: Mesh, dataset: TokenDataset) -> None:
        self._spec, self._mesh, self._dataset = spec, mesh, dataset
        self._device = mesh.rank.device
        self.samples = training_samples(spec, dataset)
        self.batches = batches_of(spec, self.samples, dataset.fingerprint)
        self._of_part = divide_of(spec, self.samples)
        self._parts: Parts | None = None

    def in_parts(self, parts: Parts | None) -> Feed:
        """The same batches, of a global batch that is divided into these parts first."""
        made = copy(self)
        made._parts = parts
        return made

    @property
    def divide(self) -> Divide:
        """How a global batch becomes the micro-batches of each rank."""
        return self._of_part if self._parts is None else self._parts.divide(self._of_part)

    @property
    def shapes(self) -> int:
        """How many shapes micro-batches have; 1 if that is not limited, too."""
        return len(self.samples.shapes.all()) or 1 if isinstance(self.samples, Sequences) else 1

    def notes(self) -> list[str]:
        """What a user should know about how the data is divided; each a line."""
        return self.samples.notes() if isinstance(self.samples, Sequences) else []

    def to_torch(self, batch: StepBatch) -> StepBatch:
        """Converts this rank's tokens of every micro-batch to tensors, in pinned memory for CUDA. Called in the loader's thread."""
        use_device(self._device)  # torch asks there whether copies from pinned memory have ended
        own = [own_tokens(m, self._mesh) for m in batch.micro_batches]
        if self._mesh.context > 1:
            batch.tokens = sum(int(np.count_nonzero(m.targets != MASKED)) for m in own)
        batch.micro_batches = [_tensors(m, pin=self._device.type == "cuda") for m in own]
        return batch

    def to_device(self, batch: MicroBatch) -> MicroBatch:
        """The batch on this rank's device."""
        return to_device(batch, self._device)

    def example(self, samples: int = 1) -> MicroBatch:
        """One sample, `samples` times, with which a strategy checks the graph."""
        return self._made(self.samples, self.samples.example(samples))

    def eval_set(self) -> list[MicroBatch]:
        """This rank's part of the eval batches, the same at each evaluation. Raises DataError if the eval split is empty."""
        samples = held_out_samples(self._spec, self._dataset, self.samples)
        batches = eval_batches(len(samples), self._spec.eval.batches, self.batches.global_batch)
        divide, rank, size = divide_of(self._spec, samples), self._mesh.data_rank, self._mesh.data_size
        if self._parts is None:
            return [self._made(samples, ids[part]) for ids in batches for part in divide(ids, rank, size)]
        divided = [(ids, self._parts.divide(divide)(ids, rank, size)) for ids in batches]
        turns = len(self._parts.own)
        return [  # all of the first part, then all of the second
            self._made(samples, ids[micro_batch])
            for turn in range(turns)
            for ids, micro_batches in divided
            for micro_batch in micro_batches[
                turn * len(micro_batches) // turns : (turn + 1) * len(micro_batches) // turns
            ]
        ]

    def _made(self, samples: Samples, ids: Any) -> MicroBatch:
        made = own_tokens(MicroBatch(*samples.batch(ids, self._spec.data.pack)), self._mesh)
        return self.to_device(_tensors(made, pin=False))


def own_tokens(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """Along `context` this rank's tokens and targets of each sequence; the documents are those of the whole sequence.

    Raises UserError for a sequence that the ranks cannot share.
    """
    if mesh.context == 1:
        return batch
    time = batch.tokens.shape[1]
    if time % (mesh.context * mesh.tensor):
        times = f" times tensor: {mesh.tensor}" if mesh.tensor > 1 else ""
        raise UserError(
            f"parallel.context: {mesh.context}{times} does not divide a sequence of {time} tokens",
            "make sequences of a length that it divides, or set parallel.context: 1",
        )
    each = time // mesh.context
    own = slice(mesh.context_rank * each, (mesh.context_rank + 1) * each)
    return replace(batch, tokens=batch.tokens[:, own], targets=batch.targets[:, own])


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Copies tensors to `device`, unless they are there already; from pinned memory the host does not wait."""
    if device.type == "cpu":
        return batch
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of a batch on `device`. From pageable memory the host would wait until the device has done all before."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _tensors(batch: MicroBatch, pin: bool) -> MicroBatch:
    """The same batch as tensors that share the arrays' memory; in pinned memory for CUDA."""

    def make(array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pin else tensor

    return _each(batch, make)


def _each(batch: MicroBatch, make: Callable[[Any], torch.Tensor]) -> MicroBatch:
    """The same batch with another tensor in place of each."""
    names = ("tokens", "targets", "documents", "lengths")
    made: dict[str, Any] = {name: make(old) for name in names if (old := getattr(batch, name)) is not None}
    return replace(batch, **made)
