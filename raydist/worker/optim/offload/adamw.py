"""AdamW with state and update on the host: in its memory, or in a scratch file that is streamed through memory.

Runs in: each train worker. Torch, never ray.

The state is in backward order, the last parameter first, and is processed in chunks. Each chunk is read (nvme), updated by torch's
fused CPU AdamW together with its parameters and gradients, and written back (nvme). The result is bit for bit that of the kernel
on the whole state in memory.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from raydist.errors import StorageError, UserError
from raydist.spec.running import OffloadSpec
from raydist.spec.training import OptimSpec
from raydist.worker.optim.aligned import Row, fused_adamw, whole_vectors
from raydist.worker.optim.offload.hostcopy import HostCopy
from raydist.worker.optim.offload.layout import Layout
from raydist.worker.optim.offload.moments import InFile, InMemory, Moments
from raydist.worker.optim.optimizers import decay_groups, run_closure
from raydist.worker.parallel import ParamShard

STATE_BYTES = 8
"""Per value of a parameter: exp_avg and exp_avg_sq in fp32."""


def build(
    shards: Mapping[str, ParamShard], spec: OptimSpec, offload: OffloadSpec, device: torch.device, tag: str
) -> OffloadedAdamW:
    """AdamW over this rank's part of each parameter, with the groups of raydist.worker.optim.optimizers.

    `device`: the device of the shards, as for `optim.build`; `tag`: see OffloadedAdamW. Raises UserError for `fused: false`, an
    unusable swap folder, or shards that are not fp32.
    """
    assert all(shard.local.device.type == device.type for shard in shards.values())
    if spec.fused is False:
        raise UserError(
            "optim.fused: false, but an offloaded update is always one fused kernel on the CPU", "set optim.fused: auto"
        )
    return OffloadedAdamW(
        decay_groups([(name, shard.local) for name, shard in shards.items()], spec),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        offload=offload,
        tag=tag,
        order=[shard.local for shard in shards.values()],
    )


class OffloadedAdamW(AdamW):
    """Has the interface of torch.optim.AdamW, with groups and `state`: parameter -> step, exp_avg, exp_avg_sq.

    `groups`: as for AdamW; all parameters dense fp32 on one device, or on the CPU; some may be empty. `order`: all parameters in
    forward order, if the groups have another order. `tag`: this rank, in messages and names ("rank3").

    The tensors in `state` are the state itself, on the CPU (nvme: over a mapping of the file, which uses the process's memory only
    for a short time). They may be read from `step` to the next `step`, and written from `step` to the next `prefetch`.

    Raises UserError for an unusable folder, and for parameters that are not dense fp32. After a StorageError from `step` the state
    is inconsistent; only `close` may be called then.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        offload: OffloadSpec,
        tag: str,
        order: Sequence[Tensor] | None = None,
    ) -> None:
        assert offload.optimizer != "none"
        self._moments: Moments | None = None
        self.same_bits = False
        """Whether the update must not depend on how parameters are cut into parts."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True, foreach=False)
        listed = list(chain.from_iterable(group["params"] for group in self.param_groups))
        self._parameters: list[Tensor] = listed if order is None else list(order)
        self._numbers = {p: i for i, p in enumerate(self._parameters)}
        assert self._numbers.keys() == set(listed), "order has the groups' parameters, each once"
        self._group_of = {self._numbers[p]: g for g, group in enumerate(self.param_groups) for p in group["params"]}
        self._check_parameters()
        counts = {i: self._parameters[i].numel() for i in reversed(range(len(self._parameters)))}
        self._layout = layout = Layout.of(counts, int(offload.chunk_mb * 2**20) // STATE_BYTES)
        streamed = offload.optimizer == "nvme" and layout.total > 0
        device = _device_of(self._parameters)
        self._host = None
        if device.type != "cpu":
            self._host = HostCopy(self._parameters, layout, device, keep=not streamed)
        if streamed:
            assert offload.path is not None
            self._moments = InFile(layout, offload.path, tag)
        else:
            self._moments = InMemory(layout, device)
        for parameter in listed:
            first, second = self._moments.tensors(layout.starts[self._numbers[parameter]], parameter.shape)
            self.state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
        self._plan: list[int] | None = None
        self._factors: list[float] = []
        self._backward_is_last = False
        self._failure: BaseException | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    # --- during backward

    def prefetch(self) -> None:
        """The backward pass of a step's last micro-batch begins: starts to read the first chunks during it. Optional."""
        self._check_usable()
        assert self._moments is not None
        self._moments.start(self._plan if self._plan is not None else range(len(self._layout.chunks)))
        if self._host is not None:
            self._host.begin()
        self._factors.clear()
        self._backward_is_last = True

    def gradients_final(self, parameters: Iterable[Tensor]) -> None:
        """The `grad` of these parameters is final except for `scale_grads`, now or on the current stream: copied during backward.

        Call it only between `prefetch` and `step`. A gradient that changes afterwards is detected, and copied again. Does nothing
        unless parameters are on CUDA and the state is in memory.
        """
        assert self._backward_is_last, "prefetch() comes first"
        if self._host is not None:
            grads = {self._numbers[p]: p.grad.reshape(-1) for p in parameters if p.grad is not None and p.numel()}
            self._host.gradients_final(grads)

    def watch_backward(self) -> None:
        """Without reduction (one rank): calls `gradients_final` for each parameter when autograd accumulates its gradient."""
        this = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            optimizer = this()
            if optimizer is not None and optimizer._backward_is_last:
                optimizer.gradients_final([parameter])

        if self._host is not None and not self._hooks:
            self._hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in self._parameters]  # type: ignore[no-untyped-call]

    def scale_grads(self, factor: float) -> None:
        """The next `step` multiplies all gradients by `factor`, on the host, which may already have copies of the gradients."""
        self._factors.append(factor)

    @property
    def pending_factor(self) -> float:
        """The factor by which the next `step` multiplies the gradients."""
        return math.prod(self._factors)

    # --- the update

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient. The state is written only during this call."""
        loss = run_closure(closure)
        self._check_usable()
        grads: dict[int, Tensor] = {}
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                assert not parameter.grad.is_sparse, "AdamW does not take sparse gradients"
                grads[number] = parameter.grad.reshape(-1)
        try:
            self._update(grads)
        except BaseException as error:
            self._failure = error
            raise
        self._factors.clear()
        self._backward_is_last = False
        return loss

    def _update(self, grads: Mapping[int, Tensor]) -> None:
        assert self._moments is not None
        if grads:
            torch._foreach_add_([self.state[self._parameters[n]]["step"] for n in grads], 1)
        chunks = self._layout.chunks
        self._plan = [k for k, pieces in enumerate(chunks) if any(p.parameter in grads for p in pieces)]
        self._moments.start(self._plan)
        if self._host is not None:
            self._host.start(self._plan, grads)
        for index, number in enumerate(self._plan):
            first, second = self._moments.get()
            here = None if self._host is None else self._host.get(index)
            columns: dict[int, list[Row]] = defaultdict(list)
            for piece in chunks[number]:
                if piece.parameter not in grads:
                    continue
                parameter = self._parameters[piece.parameter]
                if here is None:
                    value = parameter.detach().view(-1)[piece.there]
                    grad = grads[piece.parameter][piece.there]
                else:
                    value, grad = here[0][piece.here], here[1][piece.here]
                row = value, grad, first[piece.here], second[piece.here], self.state[parameter]["step"]
                columns[self._group_of[piece.parameter]].append(row)
            for group, rows in columns.items():
                self._kernel(self.param_groups[group], rows)
            self._moments.put()
            if self._host is not None:
                self._host.put(index)
        self._moments.finish()
        if self._host is not None:
            self._host.finish()

    def _kernel(self, group: dict[str, Any], rows: Sequence[Row]) -> None:
        for factor in self._factors:
            torch._foreach_mul_([grads for _, grads, *_ in rows], factor)
        with whole_vectors(rows) if self.same_bits else nullcontext(rows) as made:
            fused_adamw(group, made)

    # --- methods of torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As AdamW's, in the constructor only: afterwards the state has a fixed size."""
        assert self._moments is None, "an offloaded optimizer's parameters are known from the start"
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict` of this class or of AdamW: values of groups, and the state, which is copied in place."""
        self._check_usable()
        assert self._moments is not None
        self._moments.cancel()
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})  # else it would move the whole state to the device first
        self.state = own
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        listed = chain.from_iterable(group["params"] for group in self.param_groups)
        with torch.no_grad():
            for name, parameter in zip(ids, listed, strict=True):
                saved = state_dict["state"].get(name, {})
                for slot, tensor in own[parameter].items():
                    value = saved.get(slot, 0.0)
                    tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)

    def close(self) -> None:
        """Ends the threads, and frees the state with its memory or file. The parameters stay."""
        moments, self._moments = self._moments, None
        if moments is not None:
            self.state.clear()
            self._host = None
            for hook in self._hooks:
                hook.remove()
            moments.close()

    def __enter__(self) -> OffloadedAdamW:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- checks

    def _check_usable(self) -> None:
        assert self._moments is not None, "the optimizer is closed"
        if self._failure is not None:
            raise StorageError(
                f"an earlier update failed half-way, so the optimizer's state is inconsistent: {self._failure}",
                "resume from the last checkpoint",
            )

    def _check_parameters(self) -> None:
        for group in self.param_groups:
            names = group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                    what = f"{str(parameter.dtype).removeprefix('torch.')}, strides {list(parameter.stride())}"
                    raise UserError(
                        f"offload.optimizer: {name} is not a dense fp32 tensor ({what})",
                        "keep master weights in fp32 and contiguous, or set offload.optimizer: none",
                    )


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    """The one device of all parameters."""
    (device,) = {p.device for p in parameters}
    return device
