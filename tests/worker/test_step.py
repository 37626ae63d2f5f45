"""One loss: whatever the split into ranks and micro-batches, a step computes what one process computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.data.batches import MASKED, MicroBatch, share
from raydist.errors import GraphMismatch, NonFinite
from raydist.spec import JobSpec, ModelSpec, OptimSpec, PrecisionSpec
from raydist.worker import optim
from raydist.worker.model.gpt import build
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel.ddp import Strategy
from raydist.worker.precision import Precision
from raydist.worker.setup import Rank
from raydist.worker.step import StepReport, TrainStep, evaluate, loss_sum

MODEL = ModelSpec(layers=2, width=16, heads=2, context=8)
OPTIM = OptimSpec(lr=1e-2, clip=0.5)
VOCAB = 11


def job(**parallel: Any) -> JobSpec:
    """A spec with this `parallel` section."""
    return JobSpec.model_validate({"data": {"source": "any"}, "train": {"steps": 1}, "parallel": parallel})


def samples(n: int, masked_tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets [n, 8]; with a masked tail the last sample counts 3 tokens only."""
    g = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCAB, (n, 9), generator=g)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    if masked_tail:
        targets[-1, 3:] = MASKED
    return tokens, targets


def micro_batches(rank: Rank, tokens: torch.Tensor, targets: torch.Tensor, micro: int) -> list[MicroBatch]:
    """This rank's part, as the loader deals it."""
    made = []
    for ids in share(np.arange(len(tokens)), rank.rank, rank.world_size, micro):
        if len(ids):
            made.append(MicroBatch(tokens[ids], targets[ids]))
        else:
            made.append(MicroBatch(tokens[:1], torch.full_like(targets[:1], MASKED)))
    return made


def make(rank: Rank, model: nn.Module, full: int, clip: float = OPTIM.clip) -> TrainStep:
    """A step over `model`, DDP where there are several ranks."""
    strategy = Strategy(job(), rank)
    tokens, targets = samples(1, False)
    strategy.wrap(model, lambda module: loss_sum(module, MicroBatch(tokens, targets)))
    optimizer = optim.build(strategy.shards(), OPTIM, rank.device)
    precision = Precision(PrecisionSpec(), rank.device)
    return TrainStep(rank, strategy, optimizer, precision, full_tokens=full, clip=clip, before_update=lambda: None)


def three_steps(rank: Rank, n: int, micro: int, masked_tail: bool) -> tuple[list[StepReport], dict[str, torch.Tensor]]:
    """Reports of three steps on the same batch, and the weights after them."""
    torch.manual_seed(1)
    model = build(MODEL, VOCAB)
    step = make(rank, model, full=n * 8)
    tokens, targets = samples(n, masked_tail)
    mine = micro_batches(rank, tokens, targets, micro)
    count = sum(int((m.targets != MASKED).sum()) for m in mine)
    reports = [step(s, mine, count, 1e-2, want_stop=s == 2 and rank.rank == 1) for s in (1, 2, 3)]
    return reports, {k: v.clone() for k, v in model.state_dict().items()}


def alone() -> Rank:
    """One process without a group."""
    return Rank(0, 1, 0, torch.device("cpu"), "gloo", "127.0.0.1", None, ())


@pytest.mark.parametrize("masked_tail", [False, True])
@pytest.mark.parametrize(("world", "n", "micro"), [(1, 6, 2), (2, 6, 3), (3, 7, 2), (4, 6, 1), (4, 3, 2)])
def test_three_steps_match_one_process(ranks: Any, world: int, n: int, micro: int, masked_tail: bool) -> None:
    """Losses, norms, token counts and weights equal those of one process with one micro-batch.

    Within 1e-5 relative: sums of float32 in another order. With 3 samples on 4 ranks one rank has none.
    """
    expected, weights = three_steps(alone(), n, n, masked_tail)
    for reports, theirs in ranks.run(three_steps, world, n, micro, masked_tail):
        for report, reference in zip(reports, expected, strict=True):
            assert report.loss == pytest.approx(reference.loss, rel=1e-5)
            assert report.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
            assert report.tokens == reference.tokens == (n * 8 - 5 if masked_tail else n * 8)
        for name, value in weights.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)
        assert [r.stop for r in reports] == [False, world > 1, False]


def test_the_step_is_adamw_on_the_mean_loss() -> None:
    """One step equals plain torch: mean cross entropy, clip_grad_norm_, AdamW.

    Within 1e-6: AdamW's first update is the gradient over its own size, which magnifies the rounding of tiny ones.
    """
    torch.manual_seed(1)
    model = build(MODEL, VOCAB)
    plain = copy.deepcopy(model)
    tokens, targets = samples(4, True)
    make(alone(), model, full=4 * 8)(1, [MicroBatch(tokens, targets)], 27, 1e-2, False)
    reference = optim.build({n: ParamShard(p) for n, p in plain.named_parameters()}, OPTIM, torch.device("cpu"))
    for group in reference.param_groups:
        group["lr"] = 1e-2
    nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=MASKED).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), OPTIM.clip)
    reference.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


class Poisoned(nn.Module):
    """A model whose loss, or gradient, is NaN for token 7."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = build(MODEL, VOCAB), where

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.inner(tokens)
        if (tokens == 7).any():
            if self.where == "loss":
                return logits * float("nan")
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def poisoned(rank: Rank, where: str) -> bool:
    """Steps on a batch whose second half holds token 7; gives whether the weights are untouched."""
    torch.manual_seed(1)
    model = Poisoned(where)
    step = make(rank, model, full=4 * 8)
    before = copy.deepcopy(model.state_dict())
    tokens = torch.zeros(2, 8, dtype=torch.int64) + (7 if rank.rank == 1 else 1)
    try:
        step(12, [MicroBatch(tokens, tokens)], 16, 1e-2, False)
    except NonFinite as error:
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        raise error
    return False


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_stops_before_the_update_and_names_step_and_rank(ranks: Any, where: str) -> None:
    """NaN in one rank's loss or gradient raises NonFinite on all ranks, which names step 12 and rank 1 alone."""
    for error in ranks.run(poisoned, 2, where):
        assert isinstance(error, NonFinite), error
        assert "step 12" in error.message
        assert f"rank 1: its {where}" in error.message
        assert "rank 0:" not in error.message


class Forked(nn.Module):
    """Two layers, of which `use` says which take part."""

    def __init__(self, use: tuple[str, ...]) -> None:
        super().__init__()
        self.tokens, self.a, self.b, self.use = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB), nn.Linear(4, VOCAB), use

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        out: torch.Tensor = sum(getattr(self, name)(x) for name in self.use)  # type: ignore[assignment]
        return out


def forked(rank: Rank, uses: list[tuple[str, ...]]) -> None:
    """Wraps a model whose graph is its rank's own."""
    make(rank, Forked(uses[rank.rank]), full=8)


def test_unused_parameters_are_named(ranks: Any) -> None:
    """A layer that takes no part in the loss is refused before training, with its parameters' names."""
    for error in ranks.run(forked, 2, [("a",), ("a",)]):
        assert isinstance(error, GraphMismatch), error
        assert "these parameters take no part in the loss: b.weight, b.bias" in error.message


def test_a_rank_whose_graph_differs_is_named(ranks: Any) -> None:
    """Ranks that take different paths are refused before they wait for one another; the odd rank is named."""
    for error in ranks.run(forked, 3, [("a", "b"), ("a", "b"), ("b",)]):
        assert isinstance(error, GraphMismatch), error
        assert "rank 2 uses other parameters in its loss than rank 0: a.bias, a.weight" in error.message


def settled(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of the same batch at the first and at the third backward of one DDP."""
    torch.manual_seed(1)
    model = build(ModelSpec(layers=3, width=64, heads=2, context=8), VOCAB)
    strategy = Strategy(job(bucket_mb=0.05), rank)
    g = torch.Generator().manual_seed(rank.rank)
    tokens = torch.randint(0, VOCAB, (2, 8), generator=g)
    module = strategy.wrap(model, lambda m: loss_sum(m, MicroBatch(tokens, tokens)))
    seen = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        loss_sum(module, MicroBatch(tokens, tokens)).backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return seen[0], seen[2]


def test_the_first_backward_is_like_any_other(ranks: Any) -> None:
    """On 3 ranks, where the order of additions depends on the buckets, gradients of the first and the third backward are
    the same bits: so a resumed run's first step is the step of a run that never stopped."""
    for first, third in ranks.run(settled, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def evaluated(rank: Rank, micro: int) -> tuple[float, int]:
    """Loss and tokens of one evaluation."""
    torch.manual_seed(1)
    model = build(MODEL, VOCAB)
    step = make(rank, model, full=56)
    tokens, targets = samples(7, True)
    return evaluate(rank, step.strategy, step.precision, micro_batches(rank, tokens, targets, micro))


def test_eval_loss_is_the_mean_over_all_ranks_tokens(ranks: Any) -> None:
    """Three ranks with uneven, masked parts give one process's held-out loss, within the rounding of float32."""
    loss, tokens = evaluated(alone(), 7)
    assert tokens == 51
    for theirs, count in ranks.run(evaluated, 3, 2):
        assert theirs == pytest.approx(loss, rel=1e-6)
        assert count == tokens
