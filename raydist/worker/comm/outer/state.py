"""What checkpoints and memory copies hold of replicas that train apart, beside the outer weights, which are their `model/`.

Runs in: each train worker. Torch, never ray.

    outer      the momentum, by rows: redistributed at another number of replicas
    replica    of each rank: its weights, its optimizer's state, its buffers. Another mesh starts from their mean over the replicas,
               so that what they have trained since the last outer step is not lost; the next outer step takes it into account
    outer_sum  of each rank: what it has sent for the outer step in flight, and the tokens since the last ones. On another mesh it
               starts anew: the fragment is brought together at its next turn

So a run goes on to the same bits on the same mesh after any step. The optimizer's `optim/` is saved as well, of each parameter
stretch by stretch of one replica or another: for a job without `comm.every` that goes on from this checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydist.worker.checkpoint.extra_state import ExtraState
from raydist.worker.comm.outer.hook import Flight, Outer
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import plain_name


class OuterState:
    """The extra states of one rank, by name: see `ExtraState`."""

    def __init__(
        self,
        outer: Outer,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[str, ParamShard],
    ) -> None:
        self._outer = outer
        self.replica = ReplicaState(outer.mesh, model, optimizer, shards)
        self.states: dict[str, ExtraState] = {
            "outer": Momentum(outer),
            "replica": self.replica,
            "outer_sum": SumInFlight(outer),
        }

    def resumed(self) -> None:
        """After a load, of all states or of some. A collective."""
        self._outer.resumed(has_locals=self.replica.loaded)


class Momentum:
    """See the module."""

    per_rank = False

    def __init__(self, outer: Outer) -> None:
        self._parts = {n: part for f in outer.fragments for n, part in f.parts(f.momentum).items()}

    def state_tensors(self) -> Mapping[str, Tensor]:
        """See `ExtraState.state_tensors`."""
        return {f"momentum/{name}": part for name, part in self._parts.items()}

    def state_values(self) -> Mapping[str, Any]:
        """See `ExtraState.state_values`."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState.load_state`: they were loaded in place."""


class ReplicaState:
    """See the module. `loaded`: whether a checkpoint had it."""

    per_rank = True

    def __init__(
        self, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, shards: Mapping[str, ParamShard]
    ) -> None:
        self._optimizer, self._shards, self.loaded = optimizer, shards, False
        rows = f"rows-{mesh.data_rank}-of-{mesh.data_size}" if mesh.data_size > 1 else ""
        self._part = "-".join(filter(None, (mesh.part, rows)))
        parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = {plain_name(n): t for n, t in model.state_dict(keep_vars=True).items() if n not in parameters}
        self._joined: dict[str, int] = {}

    def state_tensors(self) -> Mapping[str, Tensor]:
        """See `ExtraState.state_tensors`."""
        found = {self._key("local", name): shard.local.detach() for name, shard in self._shards.items()}
        for name, shard in self._shards.items():
            for slot, value in self._optimizer.state.get(shard.local, {}).items():
                if isinstance(value, Tensor):
                    found[self._key(f"optim/{slot}", name)] = value
        return found | {self._key("buffer", name): buffer.detach().clone() for name, buffer in self._buffers.items()}

    def state_values(self) -> Mapping[str, Any]:
        """See `ExtraState.state_values`."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState.load_state`: all but buffers were loaded in place."""
        self.loaded = True
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[self._key("buffer", name)])

    def sources(
        self, own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Sequence[str]] | None:
        """See `Joins.sources`: those of the same names and shapes."""
        if any(saved.get(name) != tuple(tensor.shape) for name, tensor in own.items()):
            return None
        return {name: (name,) for name in own}

    def join(self, name: str, total: Tensor, source: str, of_rank: Tensor, first: bool) -> None:
        """See `Joins.join`: the mean over the replicas, of the same rows; of whole numbers the first."""
        self._joined[name] = 1 if first else self._joined[name] + 1
        if first:
            total.copy_(of_rank)
        elif total.is_floating_point():
            total.add_((of_rank - total) / self._joined[name])

    def _key(self, kind: str, name: str) -> str:
        """Of ranks that have the same rows of a parameter the same."""
        return "/".join(filter(None, (kind, name, self._part)))


class SumInFlight:
    """See the module."""

    per_rank = True

    def __init__(self, outer: Outer) -> None:
        self._outer = outer

    def state_tensors(self) -> Mapping[str, Tensor]:
        """See `ExtraState.state_tensors`. Nothing flies between two steps if training waits for outer steps."""
        sent = {"sent": self._outer.sent} if self._outer.schedule.delay else {}
        return {"tokens": self._outer.tokens.clone(), **sent}

    def state_values(self) -> Mapping[str, Any]:
        """See `ExtraState.state_values`."""
        flight = self._outer.flight
        return {} if flight is None else {"fragment": flight.fragment, "arrives": flight.arrives}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState.load_state`."""
        self._outer.tokens.copy_(tensors["tokens"])
        if values:
            self._outer.flight = Flight(int(values["fragment"]), int(values["arrives"]))
