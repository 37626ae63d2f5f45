"""The structure of a model, wrapped or not: its blocks, its parameter names, and which parameters get a gradient.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raydist.errors import GraphMismatch, UserError
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.loss import unwrapped
from raydist.worker.mesh import Mesh

MAPPED_BYTES = 1 << 20
"""From this size on empty parameters are pages of their own."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile."""
    return name.replace("_orig_mod.", "")


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the model's blocks: the elements with parameters of its outermost ModuleLists, else of its outermost
    Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [(name, module) for name, module in elements_of(model, kind) if list(module.parameters())]
        if found:
            return found
    return []


def elements_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(name, module) of the elements of the model's outermost containers of this kind, or modules that `lists` says are one."""
    found: list[tuple[str, nn.Module]] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        is_one = isinstance(module, kind) or getattr(module, "lists", None) is kind
        if is_one and not any(name.startswith(outer + ".") or not outer for outer in lists):
            lists.append(name)
            found += [(f"{name}.{i}".lstrip("."), m) for i, m in module.named_children()]
    return found


def parts_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that are called: the model, without DDP's wrapper, or the stages that this rank has of it."""
    parts: tuple[nn.Module, ...] = getattr(model, "chunks", (unwrapped(model),))
    return parts


@torch.no_grad()
def initialise(model: nn.Module, keep: Container[str] | None = None) -> Iterator[str]:
    """Allocates the parameters of a model on the meta device on the CPU, and initialises them with its `init_module`.

    `keep`: names; of a tied weight its first one, if any. Other parameters are drawn, too, and go back to the meta device at once.

    Goes module by module, in the order of `named_modules`, so that the same generator gives the same weights, even if modules
    before are already sharded. Yields the name of each module when it is done, before its children.
    """
    empty_model = getattr(model, "stays_empty", False)
    made: dict[int, nn.Parameter] = {}  # a tied weight is one parameter of two modules
    for name, module in list(model.named_modules()):
        foreign: dict[str, nn.Parameter] = {}
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_meta:
                if keep is not None and f"{name}.{key}".lstrip(".") not in keep:
                    foreign[key] = p
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(
                        _untouched(p) if empty_model else torch.empty_like(p, device="cpu"),
                        requires_grad=p.requires_grad,
                    )
                setattr(module, key, made[id(p)])
        model.init_module(name, module)  # type: ignore[operator]
        for key, p in foreign.items():
            setattr(module, key, p)
            made.pop(id(p), None)
        empty = [f"{name}.{key}".lstrip(".") for key, b in module.named_buffers(recurse=False) if b.is_meta]
        if empty:
            raise UserError(
                f"no values for {some(empty)}: buffers on the meta device",
                'create buffers with device="cpu" in build: only parameters are created again for init_module',
            )
        yield name


def _untouched(like: Tensor) -> Tensor:
    """Zeros of that shape on the CPU. The system gives them memory page by page, when something is written: a rank that keeps a
    part of a parameter needs no memory for the rest. torch.zeros writes to all of it."""
    if like.nbytes < MAPPED_BYTES:
        return torch.zeros_like(like, device="cpu")
    pages = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


def tied_across(model: nn.Module) -> dict[int, list[str]]:
    """Parameters that are in several blocks, or in a block and in the rest of the model: id -> all their names."""
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
    """A hook for a parameter that calls `method(*args, parameter)` and does not keep the method's object alive.

    Torch holds such hooks where the garbage collector does not see them: a strong reference to the model would leak the model.
    """
    weak = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (alive := weak()) is not None:
            alive(*args, parameter)

    return hook


@contextmanager
def whole_parameters(model: nn.Module, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block a forward pass calls `take(name, parameter)` for each parameter that is trained, once.

    Works with sharded modules, too: their parameters are whole from the module's forward on, and are found there.
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
                    take(plain_name(name), p)

        return before

    for name, module in (item for part in parts_of(model) for item in part.named_modules()):
        if name == "" or isinstance(module, FSDPModule):
            assert isinstance(module, nn.Module)
            handles.append(module.register_forward_pre_hook(find(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def each_gradient(model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block a backward pass calls `look(name, gradient)` for each parameter that it reaches.

    The gradient is this rank's from this pass, before it is accumulated or reduced.
    """
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def take(name: str, p: Tensor) -> None:
        handles.append(p.register_hook(partial(look, name)))  # type: ignore[no-untyped-call]

    try:
        with whole_parameters(model, take):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a dict: name of each parameter that a backward pass reached -> whether its gradient was finite (bool, 0-dim)."""
    seen: dict[str, Tensor] = {}

    def note(name: str, grad: Tensor) -> None:
        finite = torch.isfinite(grad).all()
        seen[name] = finite & seen[name] if name in seen else finite

    with each_gradient(model, note):
        yield seen


def check_graph(model: nn.Module, loss: Callable[[], Tensor], mesh: Mesh) -> list[str]:
    """One backward on each rank by itself: every parameter must get a gradient, and all ranks must have the same parameters.
    Their names, in the order in which the pass has reached them.

    Otherwise training would wait forever for a missing gradient or for another rank. Raises GraphMismatch on every rank. `loss`
    must not reduce anything over the replicas. The caller drops the gradients.
    """
    named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    signature = [f"{n}{list(p.shape)}:{str(p.dtype).removeprefix('torch.')}" for n, p in named]
    remedy = "build the same model on every rank: nothing in it may depend on the rank, the host or the time"
    _same_on_all_ranks(signature, mesh, "has other parameters", remedy)
    was_training = model.training
    model.train()
    with watch_gradients(model) as seen:
        made = loss()
        if not made.requires_grad:
            raise GraphMismatch(
                f"rank {mesh.rank.rank}: the loss depends on no parameter that is trained",
                "train parameters of each part of the model: with parallel.pipeline each stage needs some",
            )
        made.backward()  # type: ignore[no-untyped-call]
    model.train(was_training)
    # Tied weights are one parameter with two names.
    names = {id(p): n for n, p in named}
    aliases = {plain_name(n): names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in names}
    reached = [aliases.get(n, n) for n in seen]
    _refuse_unreached([n for n, _ in named if n not in reached], mesh)
    return reached


def check_loss(loss: Tensor, parameters: Mapping[Tensor, str], names: Sequence[str], mesh: Mesh) -> None:
    """The same of a loss that was made already, before its backward pass: follows its graph, computes no gradient.

    `parameters`: names of what `whole_parameters` has found; `names`: of all that are trained.
    """
    reached: set[str] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":  # reentrant checkpointing has a graph of its own inside
            reached.update(names)
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that accumulate a gradient
        if variable is not None and variable in parameters:
            reached.add(parameters[variable])
        nodes += [following for following, _ in node.next_functions]
    _refuse_unreached([name for name in names if name not in reached], mesh)


def _refuse_unreached(without: list[str], mesh: Mesh) -> None:
    remedy = "forward must take the same path through the model on every rank"
    _same_on_all_ranks(without, mesh, "uses other parameters in its loss", remedy)
    if without:
        raise GraphMismatch(
            f"these parameters take no part in the loss: {some(without)}",
            "use them in forward, remove them, or call requires_grad_(False) on them",
        )


def _same_on_all_ranks(mine: list[str], mesh: Mesh, fault: str, remedy: str) -> None:
    """Raises GraphMismatch, on every rank, if a rank's names are not those of the first rank with the same part of the model."""
    first: dict[tuple[int, int], int] = {}
    every = gather_json(mine, mesh.rank.control)
    for other, theirs in enumerate(every):
        pipeline, _, _, tensor = mesh.coordinate(other)
        like = first.setdefault((pipeline, tensor), other)
        if theirs != every[like]:
            names = some(sorted(set(theirs) ^ set(every[like])))
            raise GraphMismatch(f"rank {other} {fault} than rank {like}: {names}", remedy)


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, in one line, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
