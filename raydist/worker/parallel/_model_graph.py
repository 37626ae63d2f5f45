"""What a model is made of, whatever is wrapped around it: its blocks, its names, and who gets a gradient.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raydist.errors import GraphMismatch, UserError
from raydist.worker.distributed import Rank


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers' (DistributedDataParallel, torch.compile)."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the model's blocks: the elements of its outermost ModuleLists, else of its outermost Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        found: list[tuple[str, nn.Module]] = []
        lists: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, kind) and not any(name.startswith(outer + ".") for outer in lists):
                lists.append(name)
                found += [(f"{name}.{i}".lstrip("."), m) for i, m in module.named_children() if list(m.parameters())]
        if found:
            return found
    return []


@torch.no_grad()
def initialise(model: nn.Module) -> Iterator[str]:
    """Gives the parameters of a model on the meta device memory on the CPU, and first values, by its `init_module`.

    Module by module, in the order of `named_modules`, so that the same generator gives the same weights whether or not those
    before are still whole. Yields the name of each module that is done, its children not yet.
    """
    made: dict[int, nn.Parameter] = {}  # a tied weight is one parameter of two modules
    for name, module in list(model.named_modules()):
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad)
                setattr(module, key, made[id(p)])
        model.init_module(name, module)  # type: ignore[operator]
        empty = [f"{name}.{key}".lstrip(".") for key, b in module.named_buffers(recurse=False) if b.is_meta]
        if empty:
            raise UserError(
                f"no values for {some(empty)}: buffers on the meta device",
                'have build make buffers with device="cpu": only parameters are made anew for init_module',
            )
        yield name


def tied_across(model: nn.Module) -> dict[int, list[str]]:
    """The parameters that belong to several blocks, or to a block and to the rest of the model: id -> all their names."""
    blocks = [block for _, block in blocks_of(model)]
    inside = {id(m) for block in blocks for m in block.modules()}
    rest = [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]
    units = [{id(p) for p in block.parameters()} for block in blocks] + [{id(p) for p in rest}]
    owners = Counter(chain.from_iterable(units))
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if owners[id(p)] > 1:
            found.setdefault(id(p), []).append(name)
    return found


def refuse_scalars(model: nn.Module) -> None:
    """Raises UserError for a parameter without dimensions: it has no rows to split."""
    scalars = [n for n, p in model.named_parameters() if p.ndim == 0]
    if scalars:
        raise UserError(
            f"{', '.join(scalars)}: a parameter without dimensions cannot be split over the ranks",
            "give it the shape [1], or use parallel.strategy: ddp",
        )


def weakly(method: Callable[..., None], *args: object) -> Callable[[Tensor], None]:
    """`method(*args, parameter)`, as a hook of a parameter that does not keep the method's object alive.

    Torch holds such hooks where the garbage collector cannot look: one with the model behind it would keep the model for ever.
    """
    weak = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (alive := weak()) is not None:
            alive(*args, parameter)

    return hook


@contextmanager
def each_gradient(model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block a backward pass calls `look(name, gradient)` for each parameter that it reaches, with that pass's own.

    It sees this rank's gradient, before it is added to anything or reduced, and works on sharded modules too: their
    parameters are whole from the module's forward on, which is when they are found.
    """
    found: set[Tensor] = set()
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def find(prefix: str) -> Callable[[nn.Module, object], None]:
        def before(module: nn.Module, args: object) -> None:
            if not torch.is_grad_enabled():
                return
            for name, p in module.named_parameters(prefix):
                if p.requires_grad and not isinstance(p, DTensor) and p not in found:
                    found.add(p)
                    handles.append(p.register_hook(partial(look, plain_name(name))))  # type: ignore[no-untyped-call]

        return before

    for name, module in model.named_modules():
        if name == "" or isinstance(module, FSDPModule):
            assert isinstance(module, nn.Module)
            handles.append(module.register_forward_pre_hook(find(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the block: name of each parameter that a backward pass reached -> whether its gradient was finite (bool, 0-dim)."""
    seen: dict[str, Tensor] = {}

    def note(name: str, grad: Tensor) -> None:
        finite = torch.isfinite(grad).all()
        seen[name] = finite & seen[name] if name in seen else finite

    with each_gradient(model, note):
        yield seen


def check_graph(model: nn.Module, loss: Callable[[], Tensor], rank: Rank) -> None:
    """One backward on each rank alone: every parameter must get a gradient, and the same ones on all ranks.

    Otherwise a rank waits for a gradient that never comes, or ranks wait for one another. Raises GraphMismatch on every
    rank. `loss` must reduce nothing over the ranks. The caller drops the gradients.
    """
    named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    signature = [f"{n}{list(p.shape)}:{str(p.dtype).removeprefix('torch.')}" for n, p in named]
    remedy = "build the same model on every rank: nothing in it may depend on the rank, the host or the time"
    _same_on_all_ranks(signature, rank, "has other parameters", remedy)
    was_training = model.training
    model.train()
    with watch_gradients(model) as seen:
        loss().backward()  # type: ignore[no-untyped-call]
    model.train(was_training)
    # Tied weights are one parameter with two names.
    names = {id(p): n for n, p in named}
    aliases = {plain_name(n): names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in names}
    reached = {aliases.get(n, n) for n in seen}
    without = [n for n, _ in named if n not in reached]
    remedy = "forward must take the same path through the model on every rank"
    _same_on_all_ranks(without, rank, "uses other parameters in its loss", remedy)
    if without:
        raise GraphMismatch(
            f"these parameters take no part in the loss: {some(without)}",
            "use them in forward, remove them, or call requires_grad_(False) on them",
        )


def _same_on_all_ranks(mine: list[str], rank: Rank, fault: str, remedy: str) -> None:
    """Raises GraphMismatch, on every rank, if a rank's names are not those of rank 0."""
    every = [mine] * rank.world_size
    if rank.world_size > 1:
        dist.all_gather_object(every, mine, group=rank.control)
    for other, theirs in enumerate(every):
        if theirs != every[0]:
            names = some(sorted(set(theirs) ^ set(every[0])))
            raise GraphMismatch(f"rank {other} {fault} than rank 0: {names}", remedy)


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of the names, in one line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
