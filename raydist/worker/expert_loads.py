"""Loads of experts: tells the layers which pass is which, sums their loads over all ranks, moves the routers' biases, and records.

Runs in: each train worker. Torch, never ray. One all-reduce a step and one copy to the host: of each expert's load and, from the
first rank that has the layer, the bits of its bias; zeros from the others leave them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from raydist.data.batches import MicroBatch
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.model._moe import MixtureOfExperts, layers_of
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.step_hooks import Step, StepHook

Say = Callable[..., None]


def _tell(layer: MixtureOfExperts, batch: MicroBatch, *, records: bool) -> None:
    layer.records, layer.real, layer.lengths = records, batch.real, batch.lengths


class ExpertLoads(StepHook):
    """A hook of every step of a model with experts. Every rank has one. `parts`: the model, or the stages that this rank has of it.

    `say`: rank 0's `Reporter.say`, None on the others; it gets the layers' names. `every`: steps between two records of loads and
    biases; None: none. Of the last step, on every rank, None before the first one: `imbalance`, the load of the fullest expert of a
    layer over the mean of that layer, for the worst layer; `exchanged`: bytes that all ranks together sent to others for it.
    """

    def __init__(self, parts: Sequence[nn.Module], rank: Rank, every: int | None, say: Say | None) -> None:
        self._rank, self._every = rank, every
        self._layers = {plain_name(name): layer for name, layer in layers_of(*parts)}
        known: dict[str, tuple[int, bool]] = {}
        owners: dict[str, int] = {}
        own = {n: (layer.shape.count, layer.router.bias is not None) for n, layer in self._layers.items()}
        for number, of_rank in enumerate(gather_json(own, rank.control)):
            known |= of_rank
            owners = dict.fromkeys(of_rank, number) | owners
        self._owned = {name for name in self._layers if owners[name] == rank.rank}
        """The layers of which this rank is the first."""
        self._counts = {name: known[name][0] for name in sorted(known, key=_in_order)}
        self._biased = [name for name in self._counts if every is not None and known[name][1]]
        """The layers whose bias is recorded."""
        self._experts = sum(self._counts.values())
        self._zeros = {
            n: torch.zeros(count, dtype=torch.int64, device=rank.device) for n, count in self._counts.items()
        }
        self._none = torch.zeros(1, dtype=torch.int64, device=rank.device)
        if say is not None and self._counts:
            say("experts", layers=self._counts)
        for layer in self._layers.values():
            layer.loads = layer.loads.to(rank.device)
        self._exchanges = list(
            {id(e): e for layer in self._layers.values() if (e := layer.exchange) is not None}.values()
        )
        self._sent = 0
        self.loads: dict[str, torch.Tensor] = {}
        """Layer -> tokens of each expert in the last step, of all ranks; int64 [E] on the host."""
        self._summed: dict[str, torch.Tensor] = {}
        """The same on the device."""
        self._found = self._none
        """Of the last step, on the host: the loads of all layers, the bits of their biases, and what was sent."""
        self._due = False
        self.imbalance: float | None = None
        self.exchanged: int | None = None

    @property
    def counts(self) -> bool:
        """Whether any layer of the model has experts; the same on all ranks."""
        return bool(self._counts)

    @property
    def message(self) -> tuple[str, int, str]:
        """For traces: see MESSAGES in worker/step.py."""
        return "all_reduce", self._experts + sum(self._counts[name] for name in self._biased) + 1, "loads of experts"

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
        loads = [self._layers[name].loads if name in self._layers else zero for name, zero in self._zeros.items()]
        sums = torch.cat([*loads, *map(self._bits, self._biased), self._none])
        sums[-1] = self._sent_so_far() - self._sent
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        self._found = found = sums.cpu()
        self.loads, self._summed = (self._by_layer(all_loads[: self._experts]) for all_loads in (found, sums))
        self.imbalance = max(float(load.max() * len(load) / load.sum().clamp(min=1)) for load in self.loads.values())
        self.exchanged = int(found[-1])
        self._due = self._every is not None and step.number % self._every == 0

    @property
    def recorded(self) -> tuple[list[list[int]] | None, list[list[float]] | None]:
        """Of the last step, by layer: its loads, and the bias with which its router chose; None if they are not to be recorded."""
        if not self._due:
            return None, None
        loads = iter(self._found.tolist())
        floats = iter(self._found[self._experts : -1].int().view(torch.float32).tolist())
        counts = self._counts.items()
        biases = [[*islice(floats, count if name in self._biased else 0)] for name, count in counts]
        return [[*islice(loads, count)] for _, count in counts], biases if self._biased else None

    def _bits(self, name: str) -> torch.Tensor:
        """Of the bias of a layer, of which another rank is the first: zeros."""
        if name not in self._owned:
            return self._zeros[name]
        bias = self._layers[name].router.bias
        assert bias is not None, name
        return bias.float().view(torch.int32)

    @torch.no_grad()
    def updated(self, step: Step) -> None:
        """Moves the biases. Every rank that has a layer does the same, and on CUDA none waits for its device."""
        for name, layer in self._layers.items():
            layer.move_bias(self._summed[name])

    def _by_layer(self, loads: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self._counts, torch.split(loads, [*self._counts.values()]), strict=True))

    def _sent_so_far(self) -> int:
        return sum(exchange.sent for exchange in self._exchanges)


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """For sorting names with numbers in them."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
