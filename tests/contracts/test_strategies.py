"""Every strategy, by name: the losses, gradients and weights of one process, on any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from raydist import registry
from raydist.data.batches import MASKED, MicroBatch, share
from raydist.spec import JobSpec
from raydist.worker import optim
from raydist.worker.parallel import ParallelStrategy
from raydist.worker.precision import Precision
from raydist.worker.setup import Rank
from raydist.worker.step import StepReport, TrainStep, evaluate, loss_sum

VOCAB, CONTEXT, STEPS = 13, 8, 5
MODEL = {"layers": 3, "width": 16, "heads": 2, "context": CONTEXT}


def job(strategy: str, model: dict[str, Any] = MODEL, **sections: Any) -> JobSpec:
    """A spec with these sections beside the smallest that is valid."""
    return JobSpec.model_validate(
        {
            "data": {"source": "any"},
            "train": {"steps": STEPS},
            # With the usual eps AdamW divides tiny gradients by their own size, and makes rounding errors as large as updates.
            "optim": {"lr": 1e-2, "clip": 0.5, "eps": 1e-3},
            "model": model,
            "parallel": {"strategy": strategy},
            **sections,
        }
    )


def samples(n: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets [n, 8]; the last sample counts 3 tokens only."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (n, CONTEXT + 1), generator=g)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    targets[-1, 3:] = MASKED
    return tokens, targets


def mine(rank: Rank, tokens: torch.Tensor, targets: torch.Tensor, micro: int) -> list[MicroBatch]:
    """This rank's part, as the loader deals it."""
    import numpy as np

    made = []
    for ids in share(np.arange(len(tokens)), rank.rank, rank.world_size, micro):
        if len(ids):
            made.append(MicroBatch(tokens[ids], targets[ids]))
        else:
            made.append(MicroBatch(tokens[:1], torch.full_like(targets[:1], MASKED)))
    return made


class Trainer:
    """Model, strategy, optimizer and step of one rank."""

    def __init__(self, rank: Rank, spec: JobSpec, full: int, model: nn.Module | None = None) -> None:
        torch.manual_seed(1)
        self.rank, self.spec = rank, spec
        self.model = model or registry.load("model", spec.model.name)(spec.model, VOCAB)
        self.strategy: ParallelStrategy = registry.load("parallel", spec.parallel.strategy)(spec, rank)
        tokens, targets = samples(1)
        self.precision = Precision(spec.precision, rank.device)

        def example(module: nn.Module) -> torch.Tensor:
            with self.precision.autocast():
                return loss_sum(module, MicroBatch(tokens, targets))

        self.strategy.wrap(self.model, example)
        self.optimizer = optim.build(self.strategy.shards(), spec.optim, rank.device)
        self.gradients: dict[str, torch.Tensor] = {}
        self.step = TrainStep(
            rank,
            self.strategy,
            self.optimizer,
            self.precision,
            full_tokens=full,
            clip=spec.optim.clip,
            before_update=lambda: self.gradients.update(self.whole(grad=True)),
        )

    def whole(self, grad: bool = False) -> dict[str, torch.Tensor]:
        """Every parameter, or its gradient, put together from all ranks."""
        found = {}
        for name, shard in self.strategy.shards().items():
            local = shard.local.grad if grad else shard.local.detach()
            assert local is not None
            tensor = shard.whole(local)
            found[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        return found


Result = tuple[list[StepReport], dict[str, torch.Tensor], dict[str, torch.Tensor], float]
"""Reports, the last step's gradients, the weights after it, and the eval loss; plain, for it crosses processes."""


def train(rank: Rank, spec: JobSpec, n: int, micro: int) -> Result:
    """Five steps on other samples each; gradients are those of the last one, clipped."""
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    reports = []
    for s in range(1, STEPS + 1):
        batches = mine(rank, *samples(n, seed=s), micro)
        tokens = sum(int((m.targets != MASKED).sum()) for m in batches)
        reports.append(trainer.step(s, batches, tokens, 1e-2, want_stop=False))
    loss, _ = evaluate(rank, trainer.strategy, trainer.precision, mine(rank, *samples(n, seed=99), micro))
    return reports, trainer.gradients, trainer.whole(), loss


def alone() -> Rank:
    """One process without a group."""
    return Rank(0, 1, 0, torch.device("cpu"), "gloo", "127.0.0.1", None, ())


def compare(got: Any, expected: Result, loss: float = 1e-5, weights: float = 1e-4, tiny: float = 1e-6) -> None:
    """Within these relative tolerances, and `tiny` absolute for weights and gradients."""
    if isinstance(got, BaseException):
        raise got
    for report, right in zip(got[0], expected[0], strict=True):
        assert report.loss == pytest.approx(right.loss, rel=loss)
        assert report.grad_norm == pytest.approx(right.grad_norm, rel=loss)
        assert report.tokens == right.tokens
    assert got[3] == pytest.approx(expected[3], rel=loss)
    for what, ours, theirs in (("gradient", got[1], expected[1]), ("weight", got[2], expected[2])):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            try:
                torch.testing.assert_close(ours[name], value, rtol=weights, atol=tiny)
            except AssertionError as error:
                raise AssertionError(f"{what} of {name}: {error}") from None


@functools.cache
def reference(n: int, tie: bool, precision: str) -> Result:
    """The same five steps on one process, one micro-batch each, without any strategy at work."""
    return train(alone(), job("ddp", {**MODEL, "tie_embeddings": tie}, precision=precision), n, n)


# (world, samples a global batch, micro-batch): with accumulation, with uneven parts, with a rank that has no sample.
SPLITS = [(1, 6, 2), (2, 6, 2), (3, 7, 2), (4, 6, 1), (4, 3, 2)]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("world", "n", "micro"), SPLITS)
@pytest.mark.parametrize("strategy", registry.names("parallel"))
def test_five_steps_match_one_process(ranks: Any, strategy: str, world: int, n: int, micro: int, tie: bool) -> None:
    """Losses, gradients, their norm, weights and the eval loss equal those of one process on the same global batches.

    Within 1e-5 relative for losses and norms, 1e-4 (1e-6 absolute) for weights and gradients: sums of float32 in another order.
    """
    expected = reference(n, tie, "fp32")
    spec = job(strategy, {**MODEL, "tie_embeddings": tie})
    results = [train(alone(), spec, n, micro)] if world == 1 else ranks.run(train, world, spec, n, micro)
    for got in results:
        compare(got, expected)
