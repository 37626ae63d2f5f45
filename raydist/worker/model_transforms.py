"""Activation checkpointing and compilation of a model's blocks.

Runs in: each train worker. Torch, never ray.

Both replace only `forward` of a module. Parameter names stay, and so do the hooks with which a strategy gathers and reduces: they
run outside of `forward`. Call it after the strategy has wrapped the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from raydist.errors import UserError
from raydist.worker.parallel._model_graph import blocks_of

if TYPE_CHECKING:
    from raydist.spec import TrainSpec

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""aten operations whose results selective checkpointing keeps: expensive to compute, and small in relation to that."""


def prepare(model: nn.Module, spec: TrainSpec, shapes: int = 1) -> None:
    """Applies `train.checkpoint_activations` and `train.compile` to `model`.

    `shapes`: of micro-batches, each of which is compiled for itself; 1: torch's own choice when a second one comes. With
    `train.virtual_ranks` each is, too, so that its code does not depend on which shapes this process has seen before.

    Raises UserError if one of them works block by block and the model has no blocks.
    """
    blocks = [block for _, block in blocks_of(model)]
    for field, value, wanted in (
        ("checkpoint_activations", spec.checkpoint_activations, spec.checkpoint_activations != "none"),
        ("compile", spec.compile, spec.compile == "blocks"),
    ):
        if wanted and not blocks:
            raise UserError(
                f"train.{field}: {value} works block by block, and the model has no nn.ModuleList or nn.Sequential",
                f"keep its blocks in an nn.ModuleList, or leave train.{field} out",
            )
    if spec.checkpoint_activations != "none":
        for block in blocks:
            _replace(block, _recomputed(block.forward, selective=spec.checkpoint_activations == "selective"))
    if spec.compile:
        same_bits, limits = spec.virtual_ranks is not None, torch._dynamo.config
        each = shapes > 1 or same_bits
        limits.fail_on_recompile_limit_hit = same_bits
        if each:  # beyond its limit torch runs a function as it is
            shapes = max(shapes, spec.micro_batch if same_bits else 1)  # the last batch may have fewer sequences
            # Each shape also in evaluation, without gradients.
            limits.recompile_limit = max(limits.recompile_limit, 2 * shapes + 1)
            most = limits.recompile_limit * (len(blocks) + 1)  # of all blocks, which are one function
            limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, most)
        # In a small model the loss takes much of the time, so a head that computes it is compiled, too.
        head = getattr(model, "head", None) if getattr(model, "gives_loss", False) else None
        parts = blocks if head is None else [*blocks, head]
        for module in parts if spec.compile == "blocks" else [model]:
            assert isinstance(module, nn.Module)
            _replace(module, torch.compile(module.forward, dynamic=False if each else None))


def on_compile(tell: Callable[[bool], None]) -> None:
    """Calls `tell(True)` whenever torch starts to compile in this process, and `tell(False)` when it has finished."""
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(lambda _: tell(True))
    on_compile_end(lambda _: tell(False))


def _recomputed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    # Not reentrant: the reentrant variant hides gradients of parameters from DDP. It restores the random state for dropout.
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    return partial(checkpoint, forward, **options)


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward
