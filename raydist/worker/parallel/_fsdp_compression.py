"""Compressed gradients under FSDP2: in place of its reduce-scatter, or of its all-reduce between copies of the state.

Runs in: each train worker. Torch, never ray.

FSDP2 calls both in its own stream, or on CPU in the thread of the backward pass, and waits there; so does the reducer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.piece import Piece
from raydist.worker.comm.compression.reducer import Reducer


def units(model: nn.Module) -> Iterator[tuple[Any, dict[str, DTensor]]]:
    """Each sharded module with the trained parameters that it sends together, in FSDP2's order."""
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sent = [p.sharded_param for group in _groups(module) for p in group.fsdp_params]
            found = {names[id(p)]: cast(DTensor, p) for p in sent if id(p) in names}
            if found:
                yield module, found


def _groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for this module."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


class CompressedReduceScatter(gloo_p2p.DirectReduceScatter):
    """For `set_custom_reduce_scatter`. The result is FSDP2's mean. `piece`: of the module's parameters."""

    def __init__(self, reducer: Reducer, piece: Piece) -> None:
        super().__init__()
        self._reducer, self._piece = reducer, piece

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Returns once the result has arrived; on CUDA, in the stream."""
        if self._reducer.active:
            self._reducer.reduce_scatter(self._piece, input_tensor, output_tensor).wait()
        else:
            super().__call__(output_tensor, input_tensor, group, op, async_op)


class CompressedCopies:
    """For `set_all_reduce_hook`: the sum over the copies of the state, in the last micro-batch of a step.

    Before that FSDP2 would accumulate the mean over a copy in the parameters' gradients: it is kept here until it can be sent.
    """

    def __init__(self, reducer: Reducer, shapes: Mapping[str, torch.Size], group: dist.ProcessGroup) -> None:
        self._reducer, self._piece, self._group = reducer, reducer.flat(shapes), group
        self._waiting: Tensor | None = None
        self.last = True

    def __call__(self, reduced: Tensor) -> None:
        """`reduced`: the mean over the ranks of this copy."""
        if self._waiting is not None:
            reduced.add_(self._waiting)
        if not self.last:
            self._waiting = reduced.clone()
            reduced.zero_()
            return
        self._waiting = None
        if self._reducer.active:
            self._reducer.all_reduce(self._piece, reduced).wait()
        else:
            dist.all_reduce(reduced, group=self._group)
            reduced.div_(self._group.size())

    def drop(self) -> None:
        """Forgets what waits: the step begins again."""
        self._waiting = None
