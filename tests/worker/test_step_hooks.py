"""The hooks of a step, strategies that order the passes themselves, and the gradient norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raydist.data.batches import MicroBatch
from raydist.errors import NonFinite
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.parallel import Work
from raydist.worker.parallel._grad_norm import grad_norm
from raydist.worker.step_hooks import Bad, Step, StepHook
from tests.training import CONTEXT, Trainer, alone, counted, job, mine, run, samples


class Recorder(StepHook):
    """Records each call. `bad`: the first step is bad; `again`: how often the passes are repeated."""

    def __init__(self, calls: list[str], name: str, bad: bool = False, handles: bool = False, again: int = 0) -> None:
        self.calls, self.name, self.forbids, self.handles, self.again = calls, name, bad, handles, again
        self.seen: dict[str, tuple[float, float, int]] = {}

    def note(self, point: str, step: Step | None = None) -> None:
        self.calls.append(f"{self.name} {point}")
        if step is not None:
            self.seen[point] = (step.loss, step.grad_norm, step.tokens)

    def begin(self, step: Step) -> None:
        self.note("begin", step)

    @contextmanager
    def around_micro_batch(self, step: Step, index: int) -> Iterator[None]:
        self.note(f"micro-batch {index}")
        yield
        self.note(f"end {index}")

    @contextmanager
    def around_backward(self, index: int) -> Iterator[None]:
        self.note("backward")
        yield

    def gradients_ready(self, step: Step) -> None:
        self.note("gradients_ready", step)

    def find_bad(self, step: Step) -> Bad | None:
        return Bad(step.number, step.loss, "it was asked for") if self.forbids and step.number == 1 else None

    def recompute(self, step: Step, suspect: bool) -> bool:
        self.note(f"recompute {suspect}")
        self.again -= 1
        return self.again >= 0

    def leave_out(self, bad: Bad) -> bool:
        self.note("leave_out")
        return self.handles

    def before_update(self, step: Step) -> None:
        self.note("before_update", step)

    def updated(self, step: Step) -> None:
        self.note("updated", step)


def one_step(trainer: Trainer, number: int = 1, n: int = 4, micro: int = 2) -> Any:
    batches = mine(trainer.rank, *samples(n), micro)
    return trainer.step(number, batches, counted(batches), 1e-2, want_stop=False)


def test_hooks_are_called_in_the_order_of_their_list() -> None:
    """All hooks are called at each point; around a micro-batch the first one is the outermost."""
    trainer, calls = Trainer(alone(), job("ddp"), full=4 * CONTEXT), list[str]()
    trainer.step.hooks = [Recorder(calls, "a"), Recorder(calls, "b")]
    report = one_step(trainer)
    passes = [
        call
        for i in (0, 1)
        for call in (f"a micro-batch {i}", f"b micro-batch {i}", "a backward", "b backward", f"b end {i}", f"a end {i}")
    ]
    after = ["gradients_ready", "recompute False", "before_update", "updated"]
    assert calls == ["a begin", "b begin", *passes, *(f"{name} {point}" for point in after for name in "ab")]
    hook = trainer.step.hooks[0]
    assert isinstance(hook, Recorder)
    assert hook.seen["gradients_ready"] == hook.seen["updated"] == (report.loss, report.grad_norm, report.tokens)


def test_a_bad_step_that_no_hook_leaves_out_ends_the_run() -> None:
    """NonFinite is raised, and the weights are unchanged."""
    trainer = Trainer(alone(), job("ddp"), full=4 * CONTEXT)
    trainer.step.hooks, before = [Recorder([], "a", bad=True)], trainer.whole()
    with pytest.raises(NonFinite, match="it was asked for; the update was not applied"):
        one_step(trainer)
    assert all(torch.equal(before[name], value) for name, value in trainer.whole().items())


def test_a_bad_step_that_a_hook_leaves_out() -> None:
    """No update, no `before_update`, no gradient left; the next step is computed."""
    trainer, calls = Trainer(alone(), job("ddp"), full=4 * CONTEXT), list[str]()
    trainer.step.hooks, before = [Recorder(calls, "a", bad=True), Recorder(calls, "b", handles=True)], trainer.whole()
    assert one_step(trainer).skipped
    assert all(torch.equal(before[name], value) for name, value in trainer.whole().items())
    assert all(p.grad is None for p in trainer.model.parameters())
    assert calls[-4:] == ["a recompute True", "b recompute True", "a leave_out", "b leave_out"]
    assert not one_step(trainer, 2).skipped
    assert calls[-1] == "b updated"


def test_passes_that_are_computed_again_leave_no_trace() -> None:
    """Two repetitions give the bits of a step without any."""
    plain, repeated = (Trainer(alone(), job("ddp"), full=4 * CONTEXT) for _ in range(2))
    repeated.step.hooks = [Recorder([], "a", again=2)]
    assert one_step(plain).loss == one_step(repeated).loss
    mine = repeated.whole()
    assert all(torch.equal(value, mine[name]) for name, value in plain.whole().items())


def all_forward_first(rank: Rank) -> list[tuple[float, float, float]]:
    """Loss, norm and evaluation: by the default passes, and by a strategy that runs all forward passes first."""
    found = []
    for own in (False, True):
        trainer = Trainer(rank, job("zero1"), full=6 * CONTEXT)
        strategy = trainer.strategy

        def passes(micro_batches: Sequence[MicroBatch], work: Work, strategy: Any = strategy) -> None:
            with ExitStack() as stack:
                losses = []
                for index, batch in enumerate(micro_batches):
                    stack.enter_context(work.around(index))
                    losses.append(work.forward(strategy.module, index, batch))
                for index, loss in enumerate(losses if work.trains else []):
                    with strategy.accumulate(last=index == len(losses) - 1):
                        work.backward(index, loss)

        if own:
            strategy.passes = passes  # type: ignore[attr-defined]
        report = one_step(trainer, n=6, micro=1)
        loss, _ = evaluate(trainer.step.mesh, strategy, trainer.precision, mine(rank, *samples(5, seed=9), 2))
        found.append((report.loss, report.grad_norm, loss))
    return found


def test_a_strategy_may_order_the_passes_itself(ranks: Any) -> None:
    """All forward passes first, as in GPipe: the same bits."""
    for default, own in run(ranks, all_forward_first, 2):
        assert own == default


def norms(rank: Rank) -> tuple[float, float]:
    """The norm of a gradient of which each rank has its own rows and both ranks the rest, counted once; and of one that only rank
    1 has."""
    g = torch.Generator().manual_seed(3)
    rows, shared = torch.randn(2, 5, generator=g), torch.randn(7, generator=g)
    whole = torch.cat([rows.flatten(), shared]).double().norm().item()
    mixed = grad_norm([(rows[rank.rank], 1), (shared, 2), (None, 1)], dist.group.WORLD, rank.device)
    lone = grad_norm([(rows[1], 1)] if rank.rank else [], dist.group.WORLD, rank.device)
    assert lone.item() == pytest.approx(rows[1].double().norm().item(), rel=1e-7)
    return mixed.item(), whole


def test_the_norm_counts_what_several_ranks_hold_once(ranks: Any) -> None:
    """The norm of the whole gradient, on every rank, within the rounding of float32."""
    (first, whole), (second, _) = run(ranks, norms, 2)
    assert first == second == pytest.approx(whole, rel=1e-6)
