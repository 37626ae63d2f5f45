"""The gradient noise scale: how large a global batch may be before more samples in it add little. Measured as the run trains.

Runs in: each train worker. Torch, never ray. Every rank has one, and all have the same numbers. docs/noise.md says what they mean.

A gradient summed over n tokens is n G and noise of variance n s: G is what all the data would say, s one token's variance. A step
that is measured has gradients of two sizes. The large one is its own, whose norm clipping needs anyway. The small ones are those
of each rank's first micro-batch, before they are added to anything: a hook takes each parameter's norm as backward brings it, and
24 bytes a rank are summed. With t tokens in a small one and T in all of the step, over the ranks,

    small = sum |g|^2 / (T sum t),  share = sum t^2 / (T sum t)      E small = share |G|^2 + s/T
    big   = |g of the step|^2 / T^2                                  E big   =       |G|^2 + s/T

So (big - small) / (1 - share) is |G|^2 without bias, and (small - share big) / (1 - share) the variance of this batch. The first,
and `samples` times the second, are averaged, each by itself; their ratio is tr(S)/|G|^2 in sequences: McCandlish et al. 2018
(arXiv 1812.06162), section 2.2 and appendix A.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.records import Finding, batch_far_beyond_noise
from raydist.worker.distributed import Rank
from raydist.worker.parallel._model_graph import each_gradient

LEAST = 10
"""Measurements before there is a figure."""
NEARLY_ALL = 0.9
"""Share from which on the small batches are nearly the large one, and their difference says nothing."""
DECAY = 4
"""A measurement's weight among n falls with (age/n) as a polynomial of this degree: the newest fifth of all make the average."""


class Small:
    """One step's small gradients: `listening` around the first micro-batch, `send` after the last backward, then `sums`."""

    def __init__(self, rank: Rank, module: nn.Module, batch: MicroBatch) -> None:
        self._rank, self._module, self._batch = rank, module, batch
        self._norms: list[Tensor] = []
        self._work: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around forward and backward."""
        with each_gradient(self._module, self._look):
            yield

    def _look(self, name: str, grad: Tensor) -> None:
        # The gradient itself is not kept: what autograd alone holds it hands on, and what others hold it copies.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(grad, dtype=dtype))

    def send(self) -> None:
        """Every rank."""
        tokens = (self._batch.targets != MASKED).sum()
        # Nothing was seen where a strategy of the user's own never makes a parameter whole.
        norms = self._norms or [torch.zeros((), device=self._rank.device)]
        square = torch.stack(norms).double().square().sum()
        self._sums = torch.stack([square, tokens.double(), tokens.double().square()])
        if self._rank.world_size > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def sums(self) -> tuple[float, float, float]:
        """Over all ranks: of the gradients' squared norms, as backward made them; of their tokens; of those squared."""
        if self._work is not None:
            self._work.wait()
        square, tokens, squared_tokens = self._sums.tolist()
        return square, tokens, squared_tokens


class GradientNoise:
    """Measures in every `every`-th step, and knows the noise scale so far.

    `batch`: sequences of a full global batch; `total`: steps of the run; `loss_factor`: the strategy's.
    """

    def __init__(
        self, rank: Rank, module: nn.Module, loss_factor: float, *, every: int, batch: int, total: int
    ) -> None:
        self._rank, self._module, self._loss_factor = rank, module, loss_factor
        self._every, self._batch, self._total = every, batch, total
        self.average = Average()
        self._told = False

    @property
    def scale(self) -> float | None:
        """In sequences; None where it is not known."""
        return self.average.scale

    def listen(self, step: int, micro_batches: Sequence[MicroBatch]) -> Small | None:
        """For a step that is to be measured; None where it is not, or has but one gradient."""
        if step % self._every or self._rank.world_size * len(micro_batches) == 1:
            return None
        return Small(self._rank, self._module, micro_batches[0])

    def add(self, small: Small, norm: float, factor: float, tokens: int, samples: int) -> None:
        """A step's gradients; every rank. `norm`: of the mean over the `tokens` of its global batch, which has so many `samples`;
        `factor`: what makes the gradient that the strategy has reduced that mean.
        """
        square, counted, squared = small.sums()
        if not square or not counted or (share := squared / (tokens * counted)) > NEARLY_ALL:
            return
        in_small = square * (factor / self._loss_factor) ** 2 * tokens / counted
        signal, noise = split(in_small, norm**2, share)
        self.average.add(signal, noise * samples)

    def verdict(self, step: int) -> Finding | None:
        """Once in a run: the global batch is far beyond the noise scale. In the second half: in the first that grows fastest."""
        scale = self.scale
        if self._told or scale is None or 2 * step < self._total:
            return None
        if not batch_far_beyond_noise(self._batch, scale, self.average.measured):
            return None
        self._told = True
        return _too_large(self._batch, max(scale, 1.0))

    def state(self) -> dict[str, Any]:
        """For the plain state of a checkpoint."""
        average = self.average
        return {"measured": average.measured, "signal": average.signal, "noise": average.noise, "told": self._told}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; {} of a checkpoint without one begins anew."""
        if state:
            self.average = Average(int(state["measured"]), float(state["signal"]), float(state["noise"]))
            self._told = bool(state["told"])


def split(small: float, big: float, share: float) -> tuple[float, float]:
    """(|G|^2, s/T): the squared norm of the true gradient, and the variance of this batch's, both without bias; see above.

    Either may be negative by chance. `small`, `big`, `share` as above; share < 1.
    """
    return (big - small) / (1 - share), (small - share * big) / (1 - share)


class Average:
    """Of both terms, over measurements with polynomially falling weights (Shamir and Zhang 2013, section 4).

    As training goes on |G|^2 falls by orders of magnitude. An exponential average long enough to be steady late would be ruled by
    the first steps until then; this one forgets them at any time, and becomes the steadier the longer it goes. Both terms have
    the same weights, so the ratio needs no correction for the start.
    """

    def __init__(self, measured: int = 0, signal: float = 0.0, noise: float = 0.0) -> None:
        self.measured, self.signal, self.noise = measured, signal, noise

    def add(self, signal: float, noise: float) -> None:
        """One measurement of each."""
        self.measured += 1
        rate = (1 + DECAY) / (self.measured + DECAY)
        self.signal += rate * (signal - self.signal)
        self.noise += rate * (noise - self.noise)

    @property
    def scale(self) -> float | None:
        """None before LEAST measurements, and where so little of the gradient is signal that its average is not above zero."""
        if self.measured < LEAST or self.signal <= 0.0:
            return None
        return max(self.noise, 0.0) / self.signal


def _too_large(batch: int, scale: float) -> Finding:
    """What to tell of a batch far beyond the noise scale.

    A step's progress is that of an endless batch over 1 + scale/batch, each at its best learning rate (McCandlish et al., 2.2).
    """
    times, fits = batch / scale, 1 << max(0, int(scale) - 1).bit_length()
    progress = (1 + scale / batch) / (1 + scale / fits)
    return Finding(
        rule="grad_noise",
        rank=None,
        severity="info",
        what=f"the global batch of {batch} sequences is {times:.1f} times the gradient noise scale, {scale:.3g}",
        figures={"global_batch": batch, "grad_noise_scale": scale, "times": times, "batch_that_fits": fits},
        remedy=f"lower train.global_batch: with {fits} a step learns about {progress:.0%} as much from {fits / batch:.1%} of the "
        "tokens; or keep it, if the workers have nothing better to do, and try a higher optim.lr (docs/noise.md)",
    )
