"""Loads of experts: tells the layers which pass is which, sums their loads over all ranks, moves the routers' biases, and records.

Runs in: each train worker. Torch, never ray. One all-reduce a step, of a number for each expert; for a record on a pipeline, rank 0
gets the biases of the other stages, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from raydist.data.batches import MicroBatch
from raydist.worker.comm.json_gather import gather_json, gather_json_on_first
from raydist.worker.distributed import Rank
from raydist.worker.model._moe import MixtureOfExperts, layers_of
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.step_hooks import Step, StepHook

Say = Callable[..., None]


def _tell(layer: MixtureOfExperts, batch: MicroBatch, *, records: bool) -> None:
    layer.records, layer.real, layer.lengths = records, batch.real, batch.lengths


class ExpertLoads(StepHook):
    """A hook of every step of a model with experts. Every rank has one. `parts`: the model, or the stages that this rank has of it.

    `say`: rank 0's `Reporter.say`, None on the others; it gets the loads and biases of every `every`-th step. `imbalance`: of the
    last step, the load of the fullest expert of a layer over the mean of that layer, for the worst layer; `exchanged`: bytes that
    all ranks together sent to others for it; both None before the first step.
    """

    def __init__(self, parts: Sequence[nn.Module], rank: Rank, every: int | None, say: Say | None) -> None:
        self._rank, self._every, self._say = rank, every, say
        self._layers = {plain_name(name): layer for name, layer in layers_of(*parts)}
        counts: dict[str, int] = {}
        owners: dict[str, int] = {}
        held = gather_json({n: layer.shape.count for n, layer in self._layers.items()}, rank.control)
        for number, of_rank in enumerate(held):
            counts |= of_rank
            owners = dict.fromkeys(of_rank, number) | owners
        self._owned = [name for name in self._layers if owners[name] == rank.rank]
        """The layers of which this rank is the first."""
        self._apart = any(owners.values())
        self._counts = {name: counts[name] for name in sorted(counts, key=_in_order)}
        for layer in self._layers.values():
            layer.loads = layer.loads.to(rank.device)
        self._exchanges = list(
            {id(e): e for layer in self._layers.values() if (e := layer.exchange) is not None}.values()
        )
        self._sent = 0
        self.loads: dict[str, torch.Tensor] = {}
        """Layer -> tokens of each expert in the last step, of all ranks; int64 [E] on the host."""
        self.imbalance: float | None = None
        self.exchanged: int | None = None

    @property
    def counts(self) -> bool:
        """Whether any layer of the model has experts; the same on all ranks."""
        return bool(self._counts)

    @property
    def message(self) -> tuple[str, int, str]:
        """For traces: see MESSAGES in worker/step.py."""
        return "all_reduce", sum(self._counts.values()) + 1, "loads of experts"

    def begin(self, step: Step) -> None:
        """See `StepHook.begin`."""
        for layer in self._layers.values():
            layer.loads.zero_()
            layer.loss_factor = step.loss_factor
        self._step, self._sent = step, self._sent_so_far()

    def before_forward(self, step: Step, index: int) -> None:
        """See `StepHook.before_forward`."""
        for layer in self._layers.values():
            _tell(layer, step.micro_batches[index], records=True)

    @contextmanager
    def around_backward(self, index: int) -> Iterator[None]:
        """A pass that is computed again in backward is of this micro-batch, and was counted."""
        for layer in self._layers.values():
            _tell(layer, self._step.micro_batches[index], records=False)
        yield

    def gradients_ready(self, step: Step) -> None:
        """Sums the loads. A collective."""
        sums = torch.zeros(sum(self._counts.values()) + 1, dtype=torch.int64, device=self._rank.device)
        parts = dict(zip((*self._counts, ""), torch.split(sums, [*self._counts.values(), 1]), strict=True))
        for name, layer in self._layers.items():
            parts[name].copy_(layer.loads)
        parts[""].fill_(self._sent_so_far() - self._sent)
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        found = sums.cpu()
        *loads, sent = torch.split(found, [*self._counts.values(), 1])
        self.loads = dict(zip(self._counts, loads, strict=True))
        self.imbalance = max(float(load.max() * len(load) / load.sum().clamp(min=1)) for load in loads)
        self.exchanged = int(sent)

    @torch.no_grad()
    def updated(self, step: Step) -> None:
        """Moves the biases. Every rank that has a layer does the same."""
        for name, layer in self._layers.items():
            layer.move_bias(self.loads[name])
        if self._every and step.number % self._every == 0:
            self._record(step.number)

    def _record(self, step: int) -> None:
        routers = {name: self._layers[name].router.bias for name in self._owned}
        own = {name: bias.tolist() for name, bias in routers.items() if bias is not None}
        every = gather_json_on_first(own, self._rank.control) if self._apart else [own]
        if self._say is None or every is None:
            return
        biases = {name: bias for of_rank in every for name, bias in of_rank.items()}
        layers = {
            name: {"loads": loads.tolist()} | ({"bias": biases[name]} if name in biases else {})
            for name, loads in self.loads.items()
        }
        self._say("expert_loads", step=step, imbalance=self.imbalance, exchanged=self.exchanged, layers=layers)

    def _sent_so_far(self) -> int:
        return sum(exchange.sent for exchange in self._exchanges)


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """For sorting names with numbers in them."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
