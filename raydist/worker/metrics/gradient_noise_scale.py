"""The gradient noise scale, measured during training: the global batch size beyond which more samples add little.

Runs in: each train worker. Torch, never ray. Every rank measures, and all have the same figures. docs/explanation/noise.md explains
them.

A gradient summed over n tokens is n G plus noise of variance n s: G is the mean gradient over all data, s the variance for one
token. A measured step has gradients of two batch sizes. The large one is the step's own gradient; clipping needs its norm anyway.
The small ones are the gradients of each rank's first micro-batch, before accumulation: a hook takes each parameter's norm during
backward, and 24 bytes per rank are summed. With t tokens in a small batch and T in the whole step, over the ranks,

    small = sum |g|^2 / (T sum t),  share = sum t^2 / (T sum t)      E small = share |G|^2 + s/T
    big   = |g of the step|^2 / T^2                                  E big   =       |G|^2 + s/T

So (big - small) / (1 - share) is an unbiased estimate of |G|^2, and (small - share big) / (1 - share) of the variance of this
batch. The first, and `samples` times the second, are averaged separately. Their ratio is tr(S)/|G|^2 in sequences: McCandlish et
al. 2018 (arXiv 1812.06162), section 2.2 and appendix A.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.worker.mesh import Mesh
from raydist.worker.parallel._model_graph import each_gradient
from raydist.worker.parallel._split import LayerSplit
from raydist.worker.step_hooks import Step, StepHook

NOT_MEASURED = {
    "expert": "a gradient of an expert has several ranks' samples",
    "context": "a rank's gradient has parts of samples",
}
"""Axis of the mesh with several ranks -> why the scale is not measured then."""
LEAST = 10
"""Measurements before the first figure."""
NEARLY_ALL = 0.9
"""Above this share the small batches are nearly as large as the large one, and their difference is not significant."""
DECAY = 4
"""The weight of a measurement among n falls with (age/n) as a polynomial of this degree: the newest fifth dominates the average."""


class Small:
    """The small gradients of one step: `listening` around the first micro-batch, `send` after the last backward, then `sums`."""

    def __init__(self, mesh: Mesh, module: nn.Module, batch: MicroBatch, split: LayerSplit | None) -> None:
        self._mesh, self._module, self._batch, self._split = mesh, module, batch, split
        self.in_first = False
        """Whether the backward pass that runs now is the first micro-batch's; in a pipeline others may come before its last one."""
        self._norms: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._work: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context around forward and backward."""
        with each_gradient(self._module, self._look):
            yield

    def _look(self, name: str, grad: Tensor) -> None:
        if not self.in_first:
            return
        # Keep no reference to the gradient: autograd copies a gradient that others refer to, and moves one that it alone holds.
        if self._split is not None and name in self._split.partial:
            self._parts.append(grad.flatten().float().clone())
            return
        dtype = torch.promote_types(grad.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(grad, dtype=dtype))

    def send(self) -> None:
        """Starts the sum over the ranks. Every rank."""
        tokens = (self._batch.targets != MASKED).sum()
        # No norms if a user's own strategy never makes a parameter whole.
        norms = self._norms or [torch.zeros((), device=self._mesh.rank.device)]
        square = torch.stack(norms).double().square().sum()
        if self._split is not None and self._parts:
            whole = torch.cat(self._parts)
            dist.all_reduce(whole, group=self._split.group)
            square += whole.double().square().sum() if self._mesh.counts else 0.0
        if not self._mesh.counts:
            tokens = torch.zeros_like(tokens)
        self._sums = torch.stack([square, tokens.double(), tokens.double().square()])
        if self._mesh.rank.world_size > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def sums(self) -> tuple[float, float, float]:
        """Sums over all ranks: squared norms of the gradients, as computed by backward; their tokens; squares of these tokens."""
        if self._work is not None:
            self._work.wait()
        square, tokens, squared_tokens = self._sums.tolist()
        return square, tokens, squared_tokens


class GradientNoise(StepHook):
    """A hook that measures every `every` steps, and averages the noise scale.

    `batch`: sequences of a full global batch; `total`: steps of the run; `loss_factor`: the strategy's.
    """

    def __init__(
        self,
        mesh: Mesh,
        module: nn.Module,
        loss_factor: float,
        split: LayerSplit | None = None,
        *,
        every: int,
    ) -> None:
        self._mesh, self._module, self._loss_factor, self._split = mesh, module, loss_factor, split
        self._every = every
        self.average = Average()
        self._small: Small | None = None

    @property
    def scale(self) -> float | None:
        """In sequences; None if it is not known."""
        return self.average.scale

    def begin(self, step: Step) -> None:
        """Starts a measurement if one is due. A step with only one gradient has no smaller one, and cannot be measured."""
        measures = step.number % self._every == 0 and self._mesh.data_size * len(step.micro_batches) > 1
        self._small = Small(self._mesh, self._module, step.micro_batches[0], self._split) if measures else None

    @contextmanager
    def around_micro_batch(self, step: Step, index: int) -> Iterator[None]:
        """Observes the gradients of the first one. After the last one it sends their norms: the transfer overlaps the norm."""
        with self._small.listening() if self._small is not None and index == 0 else nullcontext():
            yield
        if self._small is not None and index == len(step.micro_batches) - 1:
            self._small.send()

    @contextmanager
    def around_backward(self, index: int) -> Iterator[None]:
        """Tells the first micro-batch's gradients from others'."""
        if self._small is not None:
            self._small.in_first = index == 0
        yield

    def before_update(self, step: Step) -> None:
        """Adds the measurement of the step to the average."""
        if self._small is None:
            return
        square, counted, squared = self._small.sums()
        if not square or not counted or (share := squared / (step.tokens * counted)) > NEARLY_ALL:
            return
        in_small = square * (step.factor / self._loss_factor) ** 2 * step.tokens / counted
        signal, noise = split(in_small, step.grad_norm**2, share)
        self.average.add(signal, noise * step.samples)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        average = self.average
        return {"measured": average.measured, "signal": average.signal, "noise": average.noise}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`. An empty one, from a checkpoint without noise scale, starts a new average."""
        if state:
            self.average = Average(int(state["measured"]), float(state["signal"]), float(state["noise"]))


def split(small: float, big: float, share: float) -> tuple[float, float]:
    """Unbiased estimates of (|G|^2, s/T): the squared norm of the true gradient, and the variance of this batch's gradient.

    Either may be negative by chance. `small`, `big`, `share`: see the module's docstring; share < 1.
    """
    return (big - small) / (1 - share), (small - share * big) / (1 - share)


class Average:
    """Averages of both terms, over measurements with polynomially falling weights (Shamir and Zhang 2013, section 4).

    During training |G|^2 falls by orders of magnitude. The first steps would dominate an exponential average that is long enough to
    be steady late in the run. This average forgets them, and becomes steadier with every measurement. Both terms have the same
    weights, so the ratio needs no bias correction.
    """

    def __init__(self, measured: int = 0, signal: float = 0.0, noise: float = 0.0) -> None:
        self.measured, self.signal, self.noise = measured, signal, noise

    def add(self, signal: float, noise: float) -> None:
        """Adds one measurement of both terms."""
        self.measured += 1
        rate = (1 + DECAY) / (self.measured + DECAY)
        self.signal += rate * (signal - self.signal)
        self.noise += rate * (noise - self.noise)

    @property
    def scale(self) -> float | None:
        """In sequences. None before LEAST measurements, and while the average of |G|^2 is not above zero."""
        if self.measured < LEAST or self.signal <= 0.0:
            return None
        return max(self.noise, 0.0) / self.signal
