"""One optimizer step: forward and backward of the micro-batches, the sync, clip, update. One loss, whatever the split.

Runs in: each train worker. Torch, never ray. All ranks call `train_step` together, with their parts of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.errors import NonFinite
from raydist.ipc.heartbeat import Heartbeat
from raydist.worker.distributed import Rank
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.optim.hooks import hooks_of
from raydist.worker.parallel import ParallelStrategy
from raydist.worker.parallel._model_graph import watch_gradients
from raydist.worker.precision import Precision

MESSAGES = (
    ("all_reduce", 6, "sums of the step"),
    ("all_reduce", 1, "gradient norm"),
    ("all_reduce", 3, "gradient noise"),
    ("all_reduce", 2, "sums of the evaluation"),
)
"""What a step sends beside the gradients, and an evaluation: (kind, elements, name), for traces."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, the same on every rank: `loss` is the global mean; `stop` whether any rank wants to end here.

    `skipped`: nothing was updated; `bad`: for its numbers are, and its judge wants to go on. fp16's overflow is not bad.
    `votes`: the sum of what the ranks gave as `vote`; `trace` that of what they asked for: (number, steps).
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    skipped: bool
    bad: Bad | None = None
    votes: float = 0.0
    trace: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Bad:
    """A step whose numbers forbid its update; the same on every rank.

    `ranks`: of each guilty rank its `rank`, its `loss` or its `parameters` (those whose gradient is not finite, the first
    in backward first, five at most), and its `micro_batch`. `median`: of the losses before, if this one's is a spike.
    """

    step: int
    loss: float
    cause: str
    ranks: tuple[dict[str, Any], ...] = ()
    median: float | None = None

    @property
    def hint(self) -> str:
        """Where to look."""
        if self.median is not None:
            return "look at the learning rate and the data of this step"
        return "look at the learning rate, the data of this step, and the model's own divisions, logs and square roots"


class Judge(Protocol):
    """Who says what becomes of a step's numbers: `raydist.worker.checks.bad_steps.BadStepCheck`."""

    def spike(self, loss: float) -> float | None:
        """The median of the losses before if `loss` is a spike, else None: the same on every rank."""
        ...

    def bad(self, bad: Bad) -> None:
        """Raises, on every rank, or returns: the step is then left out."""
        ...


class Watch(Protocol):
    """Who sees to it that replicas hold the same weights: `raydist.worker.checks.replicas.ReplicaCheck`."""

    def begin(self) -> None:
        """A step begins, or does so again."""
        ...

    def mended(self, step: int, *, suspect: bool) -> bool:
        """Whether the weights were odd on some rank, so that the step's gradients are of no use; the same on every rank."""
        ...


def loss_sum(module: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Cross entropy in nats, summed over the targets that count: a scalar in fp32."""
    kwargs = {} if batch.documents is None else {"documents": batch.documents}
    if getattr(getattr(module, "module", module), "gives_loss", False):
        loss: torch.Tensor = module(batch.tokens, targets=batch.targets, **kwargs)
        return loss
    logits_BTV = module(batch.tokens, **kwargs)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=MASKED, reduction="sum"
    )


class Look(Protocol):
    """Who looks at gradients: `raydist.worker.checks.gradients.GradientCheck`."""

    def look(self, step: int) -> None:
        """Every rank: the gradients of `step` are summed, and not yet clipped."""
        ...


class TrainStep:
    """What a step needs of one step and the next: the modules, and how many tokens a full global batch has."""

    def __init__(
        self,
        rank: Rank,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        full_tokens: int,
        clip: float,
        before_update: Callable[[], None],
        judge: Judge | None = None,
        watch: Watch | None = None,
        gradients: Look | None = None,
        noise: GradientNoise | None = None,
        heartbeat: Heartbeat | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._heartbeat = heartbeat or Heartbeat()
        self._around_backward: Callable[[], AbstractContextManager[None]] = (
            telemetry.backward if telemetry else nullcontext
        )
        self.rank, self.strategy, self.optimizer, self.precision = rank, strategy, optimizer, precision
        self._full_tokens, self._clip, self._before_update = full_tokens, clip, before_update
        self._judge, self._watch, self._gradients, self._noise = judge, watch, gradients, noise
        self.hooks = hooks_of(optimizer, strategy.scale_grads)

    def __call__(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        tokens: int,
        lr: float,
        want_stop: bool,
        vote: float = 0.0,
        trace: tuple[int, int] = (0, 0),
        samples: int = 0,
    ) -> StepReport:
        """Runs step number `step`; `tokens` count in this rank's loss; `vote` and `trace` are added up on the way; `samples`: all
        ranks', for the noise scale. Raises what its judge does about bad numbers, on every rank, before the update; without
        one NonFinite. Where replicas had drifted the passes run once more, on the mended weights.
        """
        if self._watch is not None:
            self._watch.begin()
        sums = torch.tensor([0.0, tokens, want_stop, vote, *trace], dtype=torch.float64)
        if self.rank.device.type == "cuda":  # from pageable memory the host would wait here for the update before
            sums = sums.pin_memory().to(self.rank.device, non_blocking=True)
        pending = None
        small = self._noise.listen(step, micro_batches) if self._noise is not None else None
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            if last:
                self.hooks.prefetch()
            listening = small.listening() if small is not None and i == 0 else nullcontext()
            with listening, self.strategy.accumulate(last):
                self._heartbeat.enter("forward")
                with self.precision.autocast():
                    loss = loss_sum(self.strategy.module, batch)
                self._heartbeat.enter("backward")
                sums[0] += loss.detach()
                if last and self.rank.world_size > 1:
                    # Its milliseconds hide behind the backward pass. Every rank issues it before DDP's own.
                    pending = dist.all_reduce(sums, async_op=True)
                # A constant stands for the tokens of the global batch, which are known only after the sync.
                scaled = self.precision.scale(loss * (self.strategy.loss_factor / self._full_tokens))
                with self._around_backward():
                    scaled.backward()  # type: ignore[no-untyped-call]
        if small is not None:
            small.send()  # its milliseconds hide behind the norm
        if pending is not None:
            pending.wait()
        norm = self.strategy.grad_norm()  # on its way before the host waits for the device, once
        total_loss, all_tokens, stops, votes, *asked = sums.tolist()
        counted, tokens = tokens, int(all_tokens)
        loss_mean = total_loss / max(tokens, 1)
        # From "per token of a full batch" and "times the loss scale" to the gradient of the mean loss.
        factor = self._full_tokens / max(tokens, 1) / self.precision.loss_scale
        grad_norm = float(norm) * factor
        finite = _finite(loss_mean) and _finite(grad_norm)
        overflow = not finite and self.precision.scaled and _finite(loss_mean)
        if self._gradients is not None and not overflow:
            self._gradients.look(step)
        skipped = False
        bad = None
        if not finite and not overflow:
            bad = self._non_finite(step, micro_batches, loss_mean)
        elif finite and self._judge is not None and (median := self._judge.spike(loss_mean)) is not None:
            cause = f"step {step}: a loss of {loss_mean:.4g}, where the median of those before it is {median:.4g}"
            bad = Bad(step, loss_mean, cause, median=median)
        if self._watch is not None and self._watch.mended(step, suspect=bad is not None):
            self.strategy.zero_grad()
            return self(step, micro_batches, counted, lr, want_stop, vote, trace, samples)
        if bad is not None:
            if self._judge is None:
                raise NonFinite(f"{bad.cause}; the update was not applied", bad.hint)
            self._judge.bad(bad)
            self.strategy.zero_grad()
            return StepReport(loss_mean, grad_norm, tokens, stops > 0, skipped=True, bad=bad)
        if finite:
            if small is not None and self._noise is not None:
                self._noise.add(small, grad_norm, factor, tokens, samples)
            if self._clip and grad_norm > self._clip:
                factor *= self._clip / (grad_norm + 1e-6)
            if factor != 1.0:
                self.hooks.scale_grads(factor)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            self._heartbeat.enter("save")  # stands, if at all, for a copy of the state
            self._before_update()
            self._heartbeat.enter("update")
            self.optimizer.step()
        else:
            skipped = True  # fp16 overflow: the same on all ranks, for the gradient is
        self.precision.update(overflow=skipped)
        self.strategy.zero_grad()
        if not skipped:
            self.strategy.updated()
        asked_for = (int(asked[0]), int(asked[1]))
        return StepReport(loss_mean, grad_norm, tokens, stops > 0, skipped, votes=votes, trace=asked_for)

    def _non_finite(self, step: int, micro_batches: Sequence[MicroBatch], loss_mean: float) -> Bad:
        """Runs the step's passes once more to see on which rank a loss or a gradient is not finite."""
        self.strategy.zero_grad()
        guilty: dict[str, Any] = {}
        with watch_gradients(self.strategy.module) as finite:
            for i, batch in enumerate(micro_batches):
                with self.strategy.accumulate(last=i == len(micro_batches) - 1):
                    with self.precision.autocast():
                        loss = loss_sum(self.strategy.module, batch)
                    if not guilty and not torch.isfinite(loss):
                        guilty = {"rank": self.rank.rank, "loss": float(loss.detach()), "micro_batch": i}
                    loss.backward()  # type: ignore[no-untyped-call]
                if not guilty and not all(finite.values()):
                    guilty = {"rank": self.rank.rank, "micro_batch": i}
        named = [name for name, whether in finite.items() if not whether]
        if named:
            guilty["parameters"] = named[:5]
        self.strategy.zero_grad()
        every = [guilty]
        if self.rank.world_size > 1:
            every = [{}] * self.rank.world_size
            dist.all_gather_object(every, guilty, group=self.rank.control)
        found = []
        for facts in filter(None, every):
            what = f"loss is {facts['loss']}" if "loss" in facts else f"gradient of {', '.join(facts['parameters'])}"
            found.append(f"rank {facts['rank']}: its {what}")
        where = "; ".join(found) or "no rank alone: the sum over the ranks overflows"
        what = "the gradient" if _finite(loss_mean) else f"the loss ({loss_mean})"
        return Bad(step, loss_mean, f"step {step}: {what} is not finite ({where})", tuple(filter(None, every)))


def _finite(x: float) -> bool:
    return x - x == 0.0


@torch.no_grad()
def evaluate(
    rank: Rank,
    strategy: ParallelStrategy,
    precision: Precision,
    batches: Sequence[MicroBatch],
    heartbeat: Heartbeat | None = None,
) -> tuple[float, int]:
    """(mean loss in nats, tokens) over the held-out batches of all ranks, each of which brings its own part."""
    module = getattr(strategy.module, "module", strategy.module)
    was_training = module.training
    module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=rank.device)
    heartbeat = heartbeat or Heartbeat()
    for batch in batches:
        heartbeat.enter("eval")
        with precision.autocast():
            sums[0] += loss_sum(module, batch)
        sums[1] += (batch.targets != MASKED).sum()
    module.train(was_training)
    if rank.world_size > 1:
        dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return total / max(tokens, 1.0), int(tokens)
