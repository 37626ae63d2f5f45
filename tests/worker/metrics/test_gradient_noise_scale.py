"""The gradient noise scale: against its closed form, against single gradients on real ranks, and in whole runs.

Over a minute: every strategy and precision on real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.metrics import gradient_noise_scale as noise
from raydist.worker.metrics.gradient_noise_scale import Average, GradientNoise, split
from raydist.worker.parallel._model_graph import each_gradient
from raydist.worker.step import StepReport, TrainStep, loss_sum
from tests.training import (
    CONTEXT,
    MODEL,
    VARIANTS,
    VOCAB,
    Trainer,
    alone,
    counted,
    job,
    mesh_job,
    mine,
    run,
    samples,
    world_of,
)
from tests.worker.checks.test_bad_steps import dataset, spec_of, trained, weights

__all__ = ["dataset"]


class Kept(Average):
    """An average that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[float, float]] = []

    def add(self, signal: float, noise: float) -> None:
        self.all.append((signal, noise))
        super().add(signal, noise)


class Measured:
    """A trainer that measures every step, or none."""

    def __init__(
        self, rank: Rank, spec: JobSpec, full: int, measures: bool = True, model: nn.Module | None = None
    ) -> None:
        self.trainer = made = Trainer(rank, spec, full, model)
        self.noise = GradientNoise(
            made.mesh, made.strategy.module, made.strategy.loss_factor, every=1, split=made.split
        )
        self.noise.average = self.kept = Kept()
        self.step = TrainStep(
            made.mesh, made.strategy, made.optimizer, made.precision, parameters=made.parameters, full_tokens=full,
            clip=spec.optim.clip, split=made.split, hooks=[self.noise] if measures else [],
        )  # fmt: skip

    def run(self, number: int, batches: list[MicroBatch], count: int, lr: float = 1e-2) -> StepReport:
        return self.step(number, batches, counted(batches), lr, False, samples=count)


# --- every strategy sees the right gradients


def three_steps(rank: Rank, spec: JobSpec, n: int, micro: int) -> tuple[bool, list[tuple[float, float]]]:
    """Whether losses, norms and weights are the same with and without measuring; and (|G|^2, tr S) of each step."""
    made, plain = (Measured(rank, spec, n * CONTEXT, measures) for measures in (True, False))
    same = True
    for step in (1, 2, 3):
        batches = mine(rank, *samples(n, seed=step), micro, spec.parallel.tensor)
        same &= made.run(step, batches, n) == plain.run(step, batches, n)
    others = plain.trainer.whole()
    same &= all(torch.equal(value, others[name]) for name, value in made.trainer.whole().items())
    return same, made.kept.all


def by_hand(world: int, n: int, micro: int, precision: Any) -> list[tuple[float, float]]:
    """The same on one process: the expectations of the two squared norms, solved for |G|^2 and one token's variance."""
    trainer = Trainer(alone(), job("ddp", precision=precision), n * CONTEXT)
    scale = trainer.precision.loss_scale
    found = []
    for step in (1, 2, 3):
        tokens, targets = samples(n, seed=step)
        squares, counts = [], []
        for r in range(world):
            first = mine(replace(alone(), rank=r, world_size=world), tokens, targets, micro)[0]
            with trainer.precision.autocast():
                loss = loss_sum(trainer.model, first)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad.double() for p in trainer.model.parameters() if p.grad is not None]
            squares.append(sum(float(g.square().sum()) for g in grads) / scale**2)
            counts.append(counted([first]))
            trainer.strategy.zero_grad()
        whole = [MicroBatch(tokens, targets)]
        norm, total = trainer.step(step, whole, counted(whole), 1e-2, False).grad_norm, counted(whole)
        mean = [[sum(c * c for c in counts), sum(counts)], [total * total, total]]
        signal, variance = np.linalg.solve(np.array(mean, float), [sum(squares), (norm * total) ** 2])
        found.append((signal, variance * n / total))
    return found


FP16 = {"params": "fp16", "loss_scale": {"initial": 1024}}
CASES: list[Any] = [
    *(pytest.param(name, {}, world_of(name, 3), 7, 2, id=name) for name in VARIANTS),
    pytest.param("ddp", {}, 2, 6, 3, id="one micro-batch a rank"),
    pytest.param("ddp", {}, 4, 3, 2, id="an idle rank"),
    pytest.param("ddp", {}, 1, 7, 2, id="one rank that accumulates"),
    pytest.param("zero3", {"train": {"checkpoint_activations": "full"}}, 2, 6, 3, id="computed again"),
    pytest.param("zero2", {"offload": {"optimizer": "cpu"}}, 2, 6, 2, id="offloaded"),
    pytest.param("zero3", {"offload": {"parameters": "cpu"}}, 2, 6, 3, id="parameters offloaded"),
    pytest.param("ddp", {"precision": FP16}, 2, 6, 3, id="ddp fp16"),
    pytest.param("zero3", {"precision": FP16}, 2, 6, 3, id="zero3 fp16"),
    pytest.param("zero3", {"precision": {"params": "bf16", "reduce": "bf16"}}, 2, 6, 3, id="zero3 bf16"),
]


@pytest.mark.parametrize(("variant", "sections", "world", "n", "micro"), CASES)
def test_every_strategy_measures_the_same(
    ranks: Any, variant: str, sections: Any, world: int, n: int, micro: int
) -> None:
    """Signal and noise of three steps equal those of one process that computes each gradient separately; no bit of training
    changes.

    Ranks have unequal tokens: a sample is partly masked, and 7 samples are split unevenly over 3 ranks. Within 1e-4 of the noise
    in fp32. In lower precision, where weights diverge, the first step is within 1% (fp16) or 5% (bf16).
    """
    precision = sections.get("precision", {"params": "fp32"})
    near = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[precision["params"]]
    expected = by_hand(world, n, micro, precision)[: 3 if near == 1e-4 else 1]
    for same, found in run(ranks, three_steps, world, job(variant, **sections), n, micro):
        assert same
        assert len(found) == 3
        for (signal, variance), (right, right_variance) in zip(found, expected, strict=False):
            assert variance == pytest.approx(right_variance, rel=near)
            assert signal == pytest.approx(right, rel=near, abs=near * right_variance / n)


def test_a_mesh_measures_the_same(ranks: Any) -> None:
    """On dp 2 x tensor 2 as on dp 2, within 1e-4; no bit of training changes."""
    expected = run(ranks, three_steps, 2, job("ddp"), 7, 2)[0][1]
    for same, found in run(ranks, three_steps, 4, mesh_job("zero3", 2, MODEL), 7, 2):
        assert same
        for (signal, variance), (right, right_variance) in zip(found, expected, strict=True):
            assert variance == pytest.approx(right_variance, rel=1e-4)
            assert signal == pytest.approx(right, rel=1e-4, abs=1e-4 * right_variance / 7)


def test_every_pass_is_looked_at_once() -> None:
    """Each of two passes within the block reports each parameter's own gradient once, a tied weight's too; after the block, none
    does."""
    model, seen = Bigram(), []
    model.head = model.table  # two names
    tokens, targets = samples(3)
    with each_gradient(model, lambda name, grad: seen.append((name, float(grad.norm())))):
        for i in (0, 1):
            loss_sum(model, MicroBatch(tokens[i : i + 1], targets[i : i + 1])).backward()  # type: ignore[no-untyped-call]
    loss_sum(model, MicroBatch(tokens, targets)).backward()  # type: ignore[no-untyped-call]
    assert sorted(name for name, _ in seen) == ["bias", "bias", "table.weight", "table.weight"]
    assert len({norm for _, norm in seen}) == 4


# --- a problem whose noise scale is known

SIZE = VOCAB
TARGETS = np.random.default_rng(3).dirichlet(np.full(SIZE, 0.3), size=SIZE)
"""[token, target]: the probability of each target after each token."""


class Bigram(nn.Module):
    """Logits from the token alone, all zero: every target has the probability 1/SIZE."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(SIZE, SIZE), nn.Parameter(torch.zeros(SIZE))
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens -> logits."""
        out: torch.Tensor = self.table(tokens) + self.bias
        return out


def closed_form() -> tuple[float, float]:
    """|G|^2, and the variance of one token's gradient, for tokens drawn uniformly and independently.

    For token c and target t the gradient is u - e_t in row c of the table, and in the bias; u is uniform.
    """
    even = np.full(SIZE, 1 / SIZE)
    signal = ((even - TARGETS) ** 2).sum() / SIZE**2 + ((even - TARGETS.mean(0)) ** 2).sum()
    square = 2 * (1 - 1 / SIZE)  # |u - e_t|^2, twice
    return float(signal), float(square - signal)


def drawn(generator: np.random.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n sequences [n, CONTEXT]; in every second one only three targets count."""
    tokens = generator.integers(SIZE, size=(n, CONTEXT))
    targets = (TARGETS.cumsum(1)[tokens] < generator.random((n, CONTEXT, 1))).sum(-1)
    targets[::2, 3:] = MASKED
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def many_steps(rank: Rank, variant: str, n: int, micro: int, steps: int) -> list[tuple[float, float]]:
    """The measurements of fresh batches, at a learning rate of zero."""
    spec = job(variant)
    made = Measured(rank, spec, n * CONTEXT, model=Bigram())
    generator = np.random.default_rng(7)
    for step in range(1, steps + 1):
        made.run(step, mine(rank, *drawn(generator, n), micro), n, lr=0.0)
    return made.kept.all


@pytest.mark.parametrize(
    ("variant", "world", "n", "micro"), [("ddp", 2, 24, 12), ("ddp", 4, 24, 6), ("zero2", 2, 20, 4), ("ddp", 1, 24, 8)]
)
def test_the_closed_form(ranks: Any, variant: str, world: int, n: int, micro: int) -> None:
    """|G|^2 and tr(S) are unbiased: within four standard errors, which are less than 8% of each."""
    steps = 120
    (found, *others) = run(ranks, many_steps, world, variant, n, micro, steps)
    assert all(other == found for other in others)
    signal, variance = closed_form()
    tokens = -(-n // 2) * 3 + n // 2 * CONTEXT
    right = np.array([signal, variance * n / tokens])
    error = np.std(found, axis=0) / np.sqrt(steps)
    assert (np.abs(np.mean(found, axis=0) - right) < 4 * error).all()
    assert (error < 0.08 * right).all()


def test_split_is_unbiased_whatever_the_shares() -> None:
    """Gaussian gradients of 40 dimensions in groups of unequal tokens, over all or part of the batch: within four standard
    errors."""
    generator = np.random.default_rng(1)
    mean, spread, draws = generator.normal(size=40), 9.0, 20_000
    for tokens, first in (((5, 5), 2), ((8, 1, 3), 3), ((4, 4, 4, 4), 1), ((6, 0, 2, 4), 2)):
        counts = np.array(tokens, float)
        groups = [c * mean + spread * np.sqrt(c) * generator.normal(size=(draws, 40)) for c in tokens]
        total, part = counts.sum(), counts[:first].sum()
        small = sum((g**2).sum(1) for g in groups[:first]) / (total * part)
        big = (sum(groups) ** 2).sum(1) / total**2
        found = split(small, big, float((counts[:first] ** 2).sum() / (total * part)))
        for values, right in zip(found, ((mean**2).sum(), 40 * spread**2 / total), strict=True):
            assert abs(np.mean(values) - right) < 4 * np.std(values) / np.sqrt(draws)


# --- the average


def test_the_ratio_of_averages_not_the_average_of_ratios() -> None:
    """Signals that are negative by chance are included: of 1, -1, 3, ... with noise 4 the scale is 4."""
    average = Average()
    for i in range(40):
        assert (average.scale is None) == (i < noise.LEAST)
        average.add(3.0 if i % 2 else -1.0, 4.0)
    assert average.scale == pytest.approx(4.0, rel=0.2)


def test_the_first_steps_are_forgotten() -> None:
    """|G|^2 that is a thousand times larger in the first 10 of 100 measurements changes the last value by less than 3%."""
    average = Average()
    for i in range(100):
        average.add(1000.0 if i < 10 else 1.0, 50.0)
    assert average.noise == pytest.approx(50.0)
    assert average.scale == pytest.approx(50.0, rel=0.03)


def test_all_noise_has_no_scale_and_no_noise_has_zero() -> None:
    """An average |G|^2 of zero or less: None. Variance below zero, by rounding: 0."""
    for signal, variance, scale in ((-1.0, 5.0, None), (0.0, 5.0, None), (2.0, -1e-9, 0.0)):
        average = Average()
        for _ in range(noise.LEAST):
            average.add(signal, variance)
        assert average.scale == scale


# --- whole runs


def observed(path: str, every: int | None, steps: int = 16, micro: int = 2) -> JobSpec:
    raw = spec_of(path, micro=micro).model_dump()
    return JobSpec.model_validate(
        raw | {"observe": raw["observe"] | {"grad_noise": every}, "train": raw["train"] | {"steps": steps}}
    )


def scales(steps: list[dict[str, Any]]) -> list[float | None]:
    return [s["grad_noise_scale"] for s in steps]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_same_records(ranks: Any, dataset: str, tmp_path: Path, world: int) -> None:
    """Interrupted at step 12 of 16: every figure and weight equals the uninterrupted run's, bit for bit; none until LEAST."""
    spec = observed(dataset, 1)
    whole, _, _ = run(ranks, trained, world, spec, str(tmp_path / "whole"))[0]
    first, _, _ = run(ranks, trained, world, spec, str(tmp_path / "cut"), 1, 12)[0]
    rest, _, error = run(ranks, trained, world, spec, str(tmp_path / "cut"), 2)[0]
    assert error is None
    assert scales(first + rest) == scales(whole)
    assert [scale is None for scale in scales(whole)][: noise.LEAST] == [True] * (noise.LEAST - 1) + [False]
    assert weights(tmp_path / "cut", 16) == weights(tmp_path / "whole", 16)


def test_off_and_one_gradient_a_step_have_none(dataset: str, tmp_path: Path) -> None:
    """observe.grad_noise: null, or one rank with the batch in one pass. Weights equal those with measuring."""
    for name, spec in (("off", observed(dataset, None)), ("one", observed(dataset, 1, micro=6))):
        steps, _, error = trained(alone(), spec, str(tmp_path / name))
        assert error is None
        assert scales(steps) == [None] * 16


def test_every_other_step_is_measured(dataset: str, tmp_path: Path) -> None:
    """The figure changes only in those steps."""
    steps, _, _ = trained(alone(), observed(dataset, 2, steps=24), str(tmp_path))
    found = scales(steps)
    assert found[18] is None
    assert found[19] is not None
    assert found[20] == found[19] != found[21]


def test_bad_steps_count_for_nothing() -> None:
    """fp16's overflow, and a step that is refused, are not measured."""
    made = Measured(alone(), job("ddp", precision={"params": "fp16", "loss_scale": {"initial": 2.0**40}}), 6 * CONTEXT)
    assert made.run(1, mine(alone(), *samples(6), 2), 6).skipped
    assert made.kept.all == []
