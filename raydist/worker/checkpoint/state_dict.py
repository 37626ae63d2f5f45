"""The training state as flat tensors and plain values, and back: model, optimizer, extra state.

Runs in: each train worker. Torch, never ray.

    model/<fqn>            parameters and persistent buffers, by the names of the plain module's `state_dict`
    optim/<fqn>/<slot>     the optimizer's tensors (exp_avg, ...), by their parameter's name
    plain["optim"]         the optimizer's state that is not tensors
    extra/<name>/<tensor>  registered by others, with plain["extra"]: see extra_state.py. Those of one rank alone: rank tensors

The tensors are references: a save copies them, a load writes into them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist.errors import CheckpointError
from raydist.worker.checkpoint.extra_state import ExtraState, Joins, tensor_name
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import plain_name

PLAIN = (bool, int, float, str, type(None))


class TrainState:
    """`model`, without DDP's wrapper, and `optimizer` as the loop has them; names do not contain the prefix of torch.compile.

    `shards`: `strategy.shards()`; `frozen`: those of parameters that are not trained; `base`: names of these that are no part of
    the state, because they are read from `model.hf`; `outer`: the weights that replicas have in common, if they train apart: they
    are saved as the model's, and their own as extra state. To be made before the first step, with the optimizer as the spec built
    it: see `restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[str, ParamShard],
        frozen: Mapping[str, ParamShard] | None = None,
        base: Container[str] = (),
        outer: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._optimizer, self._shards, self._outer = model, optimizer, shards, outer or {}
        self._held, self._base = {**(frozen or {}), **shards}, base
        self._names: dict[Tensor, str] = {shard.local: name for name, shard in shards.items()}
        self._built = self._groups()
        self._extra: dict[str, ExtraState] = {}

    def register(self, name: str, state: ExtraState) -> None:
        """Adds state that is neither the model's nor the optimizer's. The same names on every rank, before the first `capture`."""
        assert name not in self._extra, name
        assert "/" not in name, name
        self._extra[name] = state

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """(tensors, rank tensors, plain): the state as it is now.

        Parameters and optimizer state are references, unchanged until the next update. Buffers are copies, because a forward pass
        may change them. Before the first step this creates the optimizer's state, so that a load can write into it.
        """
        self._ensure_optimizer_state()
        tensors = self.weights()
        slots: dict[str, dict[str, Any]] = {}
        for parameter, state in self._optimizer.state.items():
            name = self._names[parameter]
            for slot, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optim/{name}/{slot}"] = self._shards[name].whole(value)
                elif isinstance(value, PLAIN):
                    slots.setdefault(name, {})[slot] = value
                else:
                    raise CheckpointError(f"optim/{name}/{slot}: a {type(value).__name__}", _ONLY_TENSORS)
        plain = {"optim": {"built": self._built, "groups": self._groups(), "slots": slots}}
        rank_tensors: dict[str, Tensor] = {}
        if self._extra:
            plain["extra"] = {name: dict(state.state_values()) for name, state in self._extra.items()}
        for name, state in self._extra.items():
            for tensor, value in state.state_tensors().items():
                own = state.per_rank and not isinstance(value, DTensor)
                (rank_tensors if own else tensors)[tensor_name(name, tensor)] = value
        return tensors, rank_tensors, plain

    def weights(self) -> dict[str, Tensor]:
        """The tensors of `capture` that are the model's."""
        tensors: dict[str, Tensor] = {}
        names = {id(p): plain_name(n) for n, p in self._model.named_parameters()}
        # Both names of a tied weight lead to the one shard of it.
        parameters = {plain_name(n): names[id(p)] for n, p in self._model.named_parameters(remove_duplicate=False)}
        for name, value in self._model.state_dict().items():
            name = plain_name(name)
            if not isinstance(value, Tensor):
                raise CheckpointError(f"model/{name}: a {type(value).__name__} in the state_dict", _ONLY_TENSORS)
            if parameters.get(name) in self._base:
                continue
            if parameters.get(name) in self._outer:
                value = self._outer[parameters[name]]
            elif parameters.get(name) in self._held:
                # Only the part that this rank updates: other ranks' rows may still be in transfer.
                shard = self._held[parameters[name]]
                value = shard.whole(shard.local.detach())
            tensors[f"model/{name}"] = value if name in parameters else value.detach().clone()
        return tensors

    def take_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what was loaded into the buffers of `weights`, which are copies."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if f"model/{plain_name(name)}" in tensors:
                    buffer.copy_(tensors[f"model/{plain_name(name)}"])

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        rank_tensors: Mapping[str, Tensor],
        plain: Mapping[str, Any],
        *,
        restored: Container[str] = (),
    ) -> None:
        """Takes what was loaded into the tensors of `capture`, and the plain values that were saved with them.

        `restored`: names of extra states that were loaded. A group's
        value (lr, betas, ...) comes from the checkpoint, unless the spec now builds another value than it did then
        (--allow-spec-change): that one stays.
        """
        self.take_buffers(tensors)
        saved = self._of_own_groups(plain["optim"])
        if len(saved["groups"]) != len(self._optimizer.param_groups):
            raise CheckpointError(
                f"the optimizer has {len(self._optimizer.param_groups)} parameter groups, and had {len(saved['groups'])}",
                "train with the optimizer that it was saved with, or start from the beginning (--fresh)",
            )
        for group, now, built, then in zip(
            self._optimizer.param_groups, saved["groups"], self._built, saved["built"], strict=True
        ):
            for key in now.keys() & group.keys():
                if _listed(built.get(key)) == then.get(key):
                    group[key] = tuple(now[key]) if isinstance(group[key], tuple) else now[key]
        by_name = {n: p for p, n in self._names.items()}
        for name, slots in saved["slots"].items():
            if name in by_name:  # another pipeline stage has the others
                self._optimizer.state[by_name[name]].update(slots)
        for name, state in self._extra.items():
            if name in restored:
                prefix = tensor_name(name, "")
                of_state = {
                    n.removeprefix(prefix): t for n, t in {**tensors, **rank_tensors}.items() if n.startswith(prefix)
                }
                state.load_state(of_state, plain["extra"][name])

    @property
    def joins(self) -> dict[str, Joins]:
        """The extra states that another mesh takes up."""
        return {name: state for name, state in self._extra.items() if isinstance(state, Joins)}

    @property
    def extra(self) -> tuple[str, ...]:
        """The names of all registered extra states."""
        return tuple(self._extra)

    def _of_own_groups(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A saved optimizer without the groups that this rank has no parameters of: a pipeline stage may lack some."""
        own = [group.get("name") for group in self._optimizer.param_groups]
        kept = [i for i, group in enumerate(saved["groups"]) if group.get("name") in own]
        if len(kept) != len(own):
            return saved
        return {**saved, **{key: [saved[key][i] for i in kept] for key in ("groups", "built")}}

    def _groups(self) -> list[dict[str, Any]]:
        """Each parameter group's plain values."""
        return [
            {k: _listed(v) for k, v in g.items() if k not in ("params", "param_names") and _is_plain(v)}
            for g in self._optimizer.param_groups
        ]

    def _ensure_optimizer_state(self) -> None:
        if not self._optimizer.state:
            # torch's own way (torch.distributed.checkpoint.state_dict): a step with gradients and learning rates of zero.
            rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for parameter in self._names:
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            for state in self._optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"].zero_()  # no step was made; if the first batch is left out, nothing is loaded over it
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


_ONLY_TENSORS = "a checkpoint holds tensors and plain values only: keep the rest out of the state"


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, PLAIN) for v in items)
