"""The optimizers: one file each, found by the name in `optim.name`. This docstring is their contract.

Runs in: each train worker. Torch, never ray.

An optimizer is a file here, or your own `package.module:attribute`, and has

    build(parameters: Named, spec: OptimSpec, device: torch.device) -> Optimizer

- `parameters`: (name, parameter) pairs, the part of each parameter that this rank updates. `device`: where they are.
- Every parameter is in one group. Groups carry `name` and `param_names`, as `decay_groups` makes them: torch fills in the names
  where the params of a group are pairs. The loop sets the `lr` of every group before each step.
- All of its state is in `Optimizer.state`, as tensors or numbers: checkpoints save that, and nothing else.
- `spec.options` has what the job gives in `optim.options`.

Optional, at the top level of the file, and free of torch (see raydist/registry.py, `described`):

- `PLAN: OptimizerPlan` (raydist/extension_plans.py): the bytes of its state, for `raydist plan`, and whether it needs whole
  matrices. An optimizer without one counts as AdamW, and goes with any strategy.
- `Options`: a pydantic model that `optim.options` is checked against.
- `check_spec(spec: OptimSpec)`: raises `raydist.spec.parts.problem(...)` for values that do not go together.

Weight decay acts on matrices (two or more dimensions), embeddings among them: a tied one is the output head too, and
a row that no token uses should decay. Norms and biases have none: decay would pull a gain of 1 towards 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from raydist import registry
from raydist.errors import UserError
from raydist.extension_plans import optimizer_plan

if TYPE_CHECKING:
    from raydist.spec import OptimSpec
    from raydist.worker.parallel import ParamShard

FUSED_DEVICES = ("cuda", "cpu", "mps", "xpu")
"""Device types on which torch has fused AdamW and SGD."""

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
Build = Callable[[Named, "OptimSpec", torch.device], Optimizer]


def build(
    shards: Mapping[str, ParamShard], spec: OptimSpec, device: torch.device, *, same_bits: bool = False
) -> Optimizer:
    """The optimizer over the part of each parameter that this rank updates; `device` is where that is. `same_bits`: however
    parameters are cut into parts.

    Groups carry `name` and `param_names`, in the order of `shards`. Their lr is `spec.lr` until the loop sets it.
    Raises UserError: `fused: true` where there is no such kernel; muon without `blocks`; an optimizer that needs whole matrices
    with a strategy that gives each rank rows of them.
    """
    named = [(name, shard.local) for name, shard in shards.items()]
    plan = optimizer_plan(spec.name)
    if plan is not None and plan.whole_matrices and any(shard.like is not None for shard in shards.values()):
        raise UserError(
            f"optim.name: {spec.name} works on whole matrices, and the strategy gives each rank some rows of them",
            "use adamw or sgd, or parallel.strategy: ddp",
        )
    made = cast(Build, registry.load("optimizer", spec.name))
    if not same_bits or device.type != "cpu":
        return made(named, spec, device)
    from raydist.worker.optim.aligned import aligned

    if spec.name != "adamw":  # torch's loop over tensors rounds each number alike, its other fused kernels do not
        spec = spec.model_copy(update={"fused": False})
    return aligned(made(named, spec, device))


def one_group(name: str, named: Named, weight_decay: float) -> list[Group]:
    """One group in a list, or none if it would be empty."""
    return [{"name": name, "params": named, "weight_decay": weight_decay}] if named else []


def decay_groups(named: Named, spec: OptimSpec) -> list[Group]:
    """Two groups, `decay` and `no_decay`, matrices and the rest; one that would be empty is left out."""
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    rest = [(n, p) for n, p in named if p.ndim < 2]
    return one_group("decay", matrices, spec.weight_decay) + one_group("no_decay", rest, 0.0)


def kernel(spec: OptimSpec, device: torch.device, *, fused: bool) -> dict[str, bool]:
    """torch's `fused` and `foreach`: the fastest that the optimizer has on this device, unless the spec forbids it."""
    can_fuse = fused and device.type in FUSED_DEVICES
    if spec.fused is True and not can_fuse:
        raise UserError(
            f"optim.fused: true, but {spec.name} has no fused kernel on {device.type}", "set optim.fused: auto"
        )
    use = can_fuse and spec.fused is not False
    # On CPU `foreach` still loops over the tensors, and takes memory for it.
    return {"fused": use, "foreach": not use and device.type != "cpu"}


def run_closure(closure: Callable[[], float] | None) -> float | None:
    """The closure of `Optimizer.step`, as torch runs it: first, with autograd on; its value is returned."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
