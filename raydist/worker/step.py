"""One optimizer step: forward and backward of the micro-batches, the sync, clip, update. One loss, whatever the split.

Runs in: each train worker. Torch, never ray. All ranks call `train_step` together, with their parts of one global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge

from raydist.data.batches import MicroBatch
from raydist.errors import NonFinite
from raydist.ipc.heartbeat import Heartbeat
from raydist.worker.comm.groups import another
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.loss import Loss, call_model
from raydist.worker.loss.cross_entropy import loss_sum as loss_sum
from raydist.worker.mesh import Mesh
from raydist.worker.optim.hooks import hooks_of
from raydist.worker.parallel import ParallelStrategy
from raydist.worker.parallel._grad_norm import GradNorm, RowNorm
from raydist.worker.parallel._model_graph import watch_gradients
from raydist.worker.parallel._split import LayerSplit
from raydist.worker.parameter_table import ParameterTable
from raydist.worker.parts import Parts, add_loss
from raydist.worker.precision import Precision
from raydist.worker.step_hooks import Bad, Step, StepHook

MESSAGES = (
    ("all_reduce", 7, "sums of the step"),
    ("all_reduce", 1, "gradient norm"),
    ("all_reduce", 3, "gradient noise"),
    ("all_reduce", 2, "sums of the evaluation"),
    ("all_reduce", 4, "changes of the saved state"),
)
"""The collectives of a step, an evaluation and a save beside the strategy's own: (kind, elements, name), for traces."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, the same on every rank.

    `loss`: mean over the global batch's `tokens`, in nats. `stop`, `save`: whether any rank wants to end here, or a checkpoint.
    `skipped`: nothing was updated. `votes`: sum of the ranks' `vote`; `trace`: sum of the ranks' `trace`, (number, steps).
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    skipped: bool
    votes: float = 0.0
    trace: tuple[int, int] = (0, 0)
    save: bool = False


LEFT_OUT = StepReport(float("nan"), float("nan"), 0, stop=False, skipped=True)
"""Of a step whose batch is left out: nothing was computed."""


class TrainStep:
    """One optimizer step. `full_tokens`: of a full global batch; `clip`: largest norm of the gradient (0: no limit); `split`: the
    layers of the model, if they are split; `parts`: the rank's, of a strategy that sums along their tree. `replica`: the mesh of
    this rank's replica, if replicas train apart: each then updates with the gradient of its own part of the batch, and what goes
    between them is the sums of the step and the mean of the norms."""

    def __init__(
        self,
        mesh: Mesh,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        parameters: ParameterTable,
        full_tokens: int,
        clip: float,
        split: LayerSplit | None = None,
        replica: Mesh | None = None,
        hooks: Sequence[StepHook] = (),
        heartbeat: Heartbeat | None = None,
        loss: Loss = loss_sum,
        parts: Parts | None = None,
    ) -> None:
        self.loss, self.parts = loss, parts
        self.mesh, self.strategy, self.optimizer, self.precision = mesh, strategy, optimizer, precision
        self.full_tokens, self._clip, self.hooks = full_tokens, clip, hooks
        self._split, self._replica = split, replica
        group = dist.group.WORLD
        if replica:
            group = another(replica.members) if len(replica.members) > 1 else None
        self._grad_norm = GradNorm(parameters, mesh.rank, group) if parts is None else RowNorm(parameters, mesh.rank)
        self.optimizer_hooks = hooks_of(optimizer, strategy.scale_grads)
        self.heartbeat = heartbeat or Heartbeat()

    def messages(self) -> list[tuple[str, int, str]]:
        """MESSAGES, as many elements as they have here."""
        if self.parts is None:
            return list(MESSAGES)
        more = self.parts.tree.count - 1
        sizes = {
            "sums of the step": 7 + more,
            "sums of the evaluation": 2 + more,
            "gradient norm": self._grad_norm.numbers,
        }
        return [(kind, sizes.get(name, elements), name) for kind, elements, name in MESSAGES]

    def __call__(
        self,
        number: int,
        micro_batches: Sequence[MicroBatch],
        tokens: int,
        lr: float,
        want_stop: bool,
        vote: float = 0.0,
        trace: tuple[int, int] = (0, 0),
        samples: int = 0,
        want_save: bool = False,
    ) -> StepReport:
        """Runs step `number`. `tokens`: those that count in this rank's loss; `samples`: all ranks' sequences; `vote` and `trace`
        are summed over the ranks.

        Raises, on every rank and before the update, what a hook raises about bad numbers, or NonFinite where no hook leaves the
        step out.
        """
        mine = [0.0, tokens if self.mesh.counts else 0, want_stop, want_save, vote, *trace]
        own_tokens = self._own(tokens)
        while True:
            step = Step(
                number, micro_batches, samples, self.precision.loss_scale * self.strategy.loss_factor / self.full_tokens
            )
            total_loss, all_tokens, stops, saves, votes, *asked = self._passes(step, mine)
            step.tokens = int(all_tokens)
            step.loss = total_loss / max(step.tokens, 1)
            # From "per token of a full batch" and "times the loss scale" to the gradient of the mean loss.
            step.own_tokens = step.tokens if own_tokens is None else own_tokens
            step.factor = self.full_tokens / max(step.own_tokens, 1) / self.precision.loss_scale
            step.own_norm = step.grad_norm = step.grad_norm * step.factor
            if self._replica is not None:
                step.grad_norm = self._mean(step.own_norm)
            finite = _finite(step.loss) and _finite(step.grad_norm)
            step.overflow = not finite and self.precision.scaled and _finite(step.loss)
            for hook in self.hooks:
                hook.gradients_ready(step)
            bad = self._bad(step, finite)
            if not any([hook.recompute(step, suspect=bad is not None) for hook in self.hooks]):
                break
            self.strategy.zero_grad()
        if bad is not None:
            if not any([hook.leave_out(bad) for hook in self.hooks]):
                raise NonFinite(f"{bad.cause}; the update was not applied", bad.hint)
            self.strategy.zero_grad()
            return StepReport(step.loss, step.grad_norm, step.tokens, stops > 0, skipped=True, save=saves > 0)
        if finite:
            self._update(step, lr)
        self.precision.update(overflow=not finite)  # the same on all ranks, for the gradient is
        self.strategy.zero_grad()
        if finite:
            self.strategy.updated()
        wanted = (int(asked[0]), int(asked[1]))
        return StepReport(step.loss, step.grad_norm, step.tokens, stops > 0, not finite, votes, wanted, saves > 0)

    def _passes(self, step: Step, mine: Sequence[float]) -> list[float]:
        """Forward and backward of all micro-batches. `mine`, and in its first place the loss, summed over the ranks.

        Sets `step.grad_norm`, of the gradient as the strategy has reduced it.
        """
        for hook in self.hooks:
            hook.begin(step)
        work = _Training(self, step, mine)
        if self.mesh.pipeline > 1:
            self.heartbeat.enter("forward")  # a stage that waits for its first micro-batch does not wait for data
        self.strategy.passes(step.micro_batches, work)
        sums = work.summed()
        self.strategy.finish_grads()
        if self._split is not None:
            self._split.sum_gradients()
        norm = self._grad_norm()  # enqueued before the host waits for the device, once
        found: list[float] = sums.tolist()
        step.grad_norm = float(norm)
        return found if self.parts is None else self.parts.joined(found)

    def _own(self, tokens: int) -> int | None:
        """The tokens of this rank's replica; None if replicas do not train apart."""
        if self._replica is None:
            return None
        if self._replica.data_size == 1:  # its ranks read the same samples
            return tokens
        found = torch.tensor([tokens], device=self.mesh.rank.device)
        dist.all_reduce(found, group=self._replica.group("data"))
        return int(found)

    def _mean(self, own: float) -> float:
        """The mean over all ranks; not finite if one is not: then no replica makes the update."""
        if self.mesh.rank.world_size == 1:
            return own
        total = torch.tensor([own], dtype=torch.float64, device=self.mesh.rank.device)
        dist.all_reduce(total)
        return float(total) / self.mesh.rank.world_size

    def _bad(self, step: Step, finite: bool) -> Bad | None:
        if step.overflow:
            return None
        if not finite:
            return self._non_finite(step)
        return next((bad for hook in self.hooks if (bad := hook.find_bad(step)) is not None), None)

    def _update(self, step: Step, lr: float) -> None:
        factor = step.factor
        if self._clip and step.own_norm > self._clip:
            factor *= self._clip / (step.own_norm + 1e-6)
        if factor != 1.0:
            self.optimizer_hooks.scale_grads(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        step.pending_factor = self.optimizer_hooks.pending_factor
        self.heartbeat.enter("save")  # a hook may wait here until a copy of the state is complete
        for hook in self.hooks:
            hook.before_update(step)
        self.heartbeat.enter("update")
        if self._replica is None or step.own_tokens:  # a short last batch may leave a replica nothing to learn from
            self.optimizer.step()
        for hook in self.hooks:
            hook.updated(step)

    def _non_finite(self, step: Step) -> Bad:
        """Runs the step's passes once more to find on which rank a loss or a gradient is not finite."""
        self.strategy.zero_grad()
        rank = self.mesh.rank
        with watch_gradients(self.strategy.module) as gradients:
            work = _Diagnosis(self, step, gradients)
            self.strategy.passes(step.micro_batches, work)
        named = [name for name, finite in gradients.items() if not finite]
        if named:
            work.found["parameters"] = named[:5]
        self.strategy.zero_grad()
        faults = tuple(filter(None, gather_json(work.found and {"rank": rank.rank, **work.found}, rank.control)))
        found = []
        for facts in faults:
            what = f"loss is {facts['loss']}" if "loss" in facts else f"gradient of {', '.join(facts['parameters'])}"
            found.append(f"rank {facts['rank']}: its {what}")
        where = "; ".join(found) or "no rank alone: the sum over the ranks overflows"
        what = "the gradient" if _finite(step.loss) else f"the loss ({step.loss})"
        return Bad(step.number, step.loss, f"step {step.number}: {what} is not finite ({where})", faults)


class _Training:
    """The passes of a step. See `raydist.worker.parallel.Work`."""

    trains = True

    def __init__(self, owner: TrainStep, step: Step, mine: Sequence[float]) -> None:
        self._owner, self._step = owner, step
        self._last = len(step.micro_batches) - 1
        self._pending: dist.Work | None = None
        self._sent = owner.mesh.rank.world_size == 1
        self._parts = owner.parts
        self._sums = torch.tensor(mine if self._parts is None else self._parts.spread(mine), dtype=torch.float64)
        device = owner.mesh.rank.device
        if device.type == "cuda":  # from pageable memory the host would wait here for the update before
            self._sums = self._sums.pin_memory().to(device, non_blocking=True)

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        if index == self._last:
            self._owner.optimizer_hooks.prefetch()
        with ExitStack() as stack:
            for hook in self._owner.hooks:
                stack.enter_context(hook.around_micro_batch(self._step, index))
            yield

    def forward(self, module: nn.Module, index: int, batch: MicroBatch, part: bool = False) -> torch.Tensor:
        self._owner.heartbeat.enter("forward")
        for hook in self._owner.hooks:
            hook.before_forward(self._step, index)
        with self._owner.precision.autocast():
            return call_model(module, batch) if part else self._owner.loss(module, batch)

    def backward(self, index: int, made: torch.Tensor | GradientEdge, grad: torch.Tensor | None = None) -> None:
        owner = self._owner
        owner.heartbeat.enter("backward")
        if isinstance(made, torch.Tensor):
            if owner.mesh.counts:
                add_loss(self._sums, made, self._parts)
            if index == self._last and owner.mesh.pipeline == 1:
                self._send()  # its milliseconds hide behind the backward pass; every rank issues it before DDP's own
            # A constant stands for the tokens of the global batch, which are known only after the sync.
            made = owner.precision.scale(made * (owner.strategy.loss_factor / owner.full_tokens))
        with ExitStack() as stack:
            for hook in owner.hooks:
                stack.enter_context(hook.around_backward(index))
            torch.autograd.backward(made, grad)

    def _send(self) -> None:
        if not self._sent:
            self._sent, self._pending = True, dist.all_reduce(self._sums, async_op=True)

    def summed(self) -> torch.Tensor:
        """The sums over all ranks. After the passes."""
        self._send()  # in a pipeline, where the ranks end their passes at different times
        if self._pending is not None:
            self._pending.wait()
        return self._sums


class _Diagnosis:
    """Finds this rank's first micro-batch whose loss or gradient is not finite. See `raydist.worker.parallel.Work`."""

    trains = True

    def __init__(self, owner: TrainStep, step: Step, gradients: Mapping[str, torch.Tensor]) -> None:
        self._owner, self._step, self._gradients = owner, step, gradients
        self.found: dict[str, Any] = {}

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        yield
        if not self.found and not all(self._gradients.values()):
            self.found = {"micro_batch": index}

    def forward(self, module: nn.Module, index: int, batch: MicroBatch, part: bool = False) -> torch.Tensor:
        for hook in self._owner.hooks:
            hook.before_forward(self._step, index)
        with self._owner.precision.autocast():
            return call_model(module, batch) if part else self._owner.loss(module, batch)

    def backward(self, index: int, made: torch.Tensor | GradientEdge, grad: torch.Tensor | None = None) -> None:
        if isinstance(made, torch.Tensor) and not self.found and not torch.isfinite(made):
            self.found = {"loss": float(made.detach()), "micro_batch": index}
        torch.autograd.backward(made, grad)


def _finite(x: float) -> bool:
    return x - x == 0.0
