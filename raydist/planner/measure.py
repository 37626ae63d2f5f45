"""Measures a model without memory or data: its parameters, and one micro-batch's forward and backward pass.

Runs in: the user's shell (`raydist plan`). Torch, never ray.

The passes run the real code of model and loss on fake tensors, which have a shape and a storage size but no values. Every
operator's output is counted when it is allocated and when it is freed. The meta device cannot be used: autocast does nothing
there, and attention takes another path. They are fake *CPU* tensors, because a torch without CUDA has no autocast or autograd for
fake CUDA tensors; for GPU jobs, target.py emulates the differences.

With `parallel.tensor` the model is split as on the first rank of a tensor group, whose collectives send nothing, but are counted.
Such a model is built for each measurement, because it belongs to its process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import RaydistError, UserError
from raydist.planner.facts import ROOT, Activations, Model, Param, Pass, Peak
from raydist.planner.live import LiveBytes
from raydist.planner.target import KERNELS, OnTarget
from raydist.planner.tensor import first_of
from raydist.worker import model_transforms
from raydist.worker.loss import build as build_loss
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.flops import flops_per_token
from raydist.worker.parallel._model_graph import blocks_of
from raydist.worker.parallel._tensor import TensorParallel
from raydist.worker.precision import DTYPES

if TYPE_CHECKING:
    from raydist.spec import JobSpec
    from raydist.spec.models import TrainSpec


def device_memory() -> int | None:
    """Bytes of the first GPU of this machine; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def device_name() -> str | None:
    """The driver's name of that GPU."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


class Planner:
    """A model of a job on fake tensors. `target` is the device type that it will train on: cuda or cpu.

    `measuring` gets a text at the start of each measurement. Raises UserError if the model cannot be built or run without values,
    and for `parallel.pipeline`, of which no estimate is made.
    """

    def __init__(
        self,
        spec: JobSpec,
        vocab_size: int,
        target: Literal["cuda", "cpu"],
        measuring: Callable[[str], None] = lambda text: None,
    ) -> None:
        if spec.parallel.pipeline > 1:
            raise UserError(
                f"parallel.pipeline: {spec.parallel.pipeline}: memory and speed of a pipeline are not estimated",
                "plan with --set parallel.pipeline=1; a stage has its blocks' share of the parameters",
            )
        self._spec, self._vocab = spec, spec.model.rows(vocab_size)
        self._target, self._measuring = target, measuring
        self._build = cast(Callable[..., nn.Module], registry.load("model", spec.model.name))
        self._loss = build_loss(spec)
        # Constants in the user's module are real tensors.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._mesh: Mesh | None = None
        self._models: dict[bool, _Fake] = {}
        self._known: dict[Pass, Activations] = {}
        self.attention = "none"
        """The kernel that scaled_dot_product_attention used. `math` keeps T x T matrices for backward, the others do not."""

    def model(self) -> Model:
        """Its parameters and buffers, as one rank has them if there is `parallel.tensor`."""
        with self._guard("built"):
            return self._model(cast=False).facts

    def flops_per_token(self) -> float:
        """FLOPs per token of training, of all ranks of a tensor group, without recomputation."""
        with self._guard("built"):
            module = self._whole() if self._mesh is not None else self._model(cast=False).module
            return flops_per_token(module, self._spec.model.context)

    def measure(self, how: Pass) -> Activations:
        """One micro-batch, forward and backward. Results are cached."""
        if how not in self._known:
            count, again = f"pass {len(self._known) + 1}", how.checkpoint
            with self._guard("run"):
                made = self._model(how.cast)
                self._measuring(
                    f"{count}: micro-batch {how.micro_batch}, {'nothing' if again == 'none' else again} computed again"
                )
                self._known[how] = self._measure(made, how)
        return self._known[how]

    def _whole(self) -> nn.Module:
        self._measuring("building the model")
        with self._fake:
            return self._build(self._spec.model, self._vocab).train()

    def _model(self, cast: bool) -> _Fake:
        if cast not in self._models:
            module = self._whole()
            whole = {name: p.shape for name, p in module.named_parameters()}
            with self._fake:
                if self._mesh is not None:
                    TensorParallel(self._mesh).split(module)
                if cast:
                    _cast(module, DTYPES[self._spec.precision.params])
                self._models[cast] = _Fake(module, whole)
        return self._models[cast]

    def _measure(self, made: _Fake, how: Pass) -> Activations:
        shape = (how.micro_batch, self._spec.model.context)
        dtype = DTYPES[self._spec.precision.params]
        on_target = OnTarget(self._target == "cuda")
        train = self._spec.train.model_copy(update={"checkpoint_activations": how.checkpoint, "compile": False})
        with self._fake, made.prepared(train, on_target), on_target:
            tokens = torch.zeros(shape, dtype=torch.int64)
            documents = torch.zeros(shape, dtype=torch.int32) if self._spec.data.pack else None
            batch = MicroBatch(tokens, torch.zeros_like(tokens), documents)
            inputs = [t for t in (batch.tokens, batch.targets, batch.documents) if t is not None]
            with LiveBytes([*made.module.parameters(), *made.module.buffers(), *inputs]) as live:
                made.watch(live, how.hold)
                with torch.autocast("cpu", dtype=dtype) if dtype is not torch.float32 else nullcontext():
                    loss = self._loss(made.module, batch)
                saved = live.bytes["activations"] + live.bytes["loss"]
                live.phase = "loss"
                loss.backward()  # type: ignore[no-untyped-call]
        if on_target.attends:
            self.attention = " and ".join(sorted(KERNELS[n] for n in live.operators & KERNELS.keys())) or "math"
        peaks = tuple(Peak(phase, **worst) for phase, worst in live.peaks.items())
        return Activations(saved, peaks, round(live.sent))

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """As the first rank of a tensor group, if there is one."""
        if self._spec.parallel.tensor == 1:
            yield
            return
        with first_of(self._spec.parallel.tensor) as self._mesh:
            try:
                yield
            finally:
                self._mesh = None
                self._models.clear()

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        with self._in_group():
            try:
                yield
            except RaydistError:
                raise
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), "")
                raise UserError(
                    f'model "{self._spec.model.name}" cannot be {what} without values: {type(error).__name__}: {first}',
                    "a plan has tensors with shapes only: no .item(), no branch on a value, no weights from a file, no kernel "
                    "whose shapes torch does not know; make the model do without, or train a few steps and look at the peak memory",
                ) from error


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """All parameters in another format, as FSDP2 gathers them; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for holder in module.modules():
        for name, p in list(holder.named_parameters(recurse=False)):
            if p.is_floating_point():
                made.setdefault(id(p), nn.Parameter(p.detach().to(dtype), p.requires_grad))
                setattr(holder, name, made[id(p)])


class _Fake:
    """A module on fake tensors, with hooks that report phases and gradients to a `LiveBytes`."""

    def __init__(self, module: nn.Module, whole: Mapping[str, torch.Size]) -> None:
        """`whole`: the shapes of its parameters before it was split."""
        self.module = module
        self._blocks = [block for _, block in blocks_of(module)]
        units = {id(p): i for i, block in reversed(list(enumerate(self._blocks))) for p in block.parameters()}
        self.facts = Model(
            tuple(
                Param(
                    name,
                    tuple(p.shape),
                    p.requires_grad,
                    units.get(id(p), ROOT),
                    None if p.shape == whole[name] else tuple(whole[name]),
                )
                for name, p in module.named_parameters()
            ),
            sum(b.untyped_storage().nbytes() for b in module.buffers()),
        )
        self._unit: dict[int, list[Tensor]] = {}
        for p in module.parameters():
            if p.requires_grad:
                self._unit.setdefault(units.get(id(p), ROOT), []).append(p)
                gradient = partial(self._has_gradient, units.get(id(p), ROOT))
                p.register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]
        for block in self._blocks:
            block.register_forward_pre_hook(self._entered)
            block.register_forward_hook(self._left)

    def watch(self, live: LiveBytes, hold: bool) -> None:
        """Reports to `live`. `hold`: see `Pass`."""
        self._live, self._hold = live, hold
        self._missing = {unit: len(members) for unit, members in self._unit.items()}

    def _entered(self, block: nn.Module, args: object) -> None:
        if self._live.phase != "backward":  # a model may recompute its blocks itself
            self._live.phase = "forward"

    def _left(self, block: nn.Module, args: object, out: object) -> None:
        if self._live.phase == "backward":
            return
        self._live.phase = "loss"  # until the next block, if there is one
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._comes_back)  # type: ignore[no-untyped-call]

    def _comes_back(self, grad: Tensor) -> None:
        self._live.phase = "backward"

    def _has_gradient(self, unit: int, parameter: Tensor) -> None:
        if not self._hold:
            parameter.grad = None  # accumulated into memory that is counted as gradients
            return
        assert parameter.grad is not None
        self._live.retag(parameter.grad, "whole")
        self._missing[unit] -= 1
        if not self._missing[unit]:
            for p in self._unit[unit]:
                p.grad = None

    @contextmanager
    def prepared(self, spec: TrainSpec, on_target: OnTarget) -> Iterator[None]:
        """`train.checkpoint_activations` on each block, as in the training loop; never compiled."""

        def within(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with on_target:
                return forward(*args, **kwargs)

        try:
            for block in self._blocks:
                # Recomputation runs within `backward`, where function modes are off, so the mode is entered again.
                block.forward = partial(within, block.forward)
            model_transforms.prepare(self.module, spec)
            yield
        finally:
            for block in self._blocks:
                block.__dict__.pop("forward", None)
