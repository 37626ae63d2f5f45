"""A step is AdamW on the mean loss; all ranks stop together; DDP's first backward, and evaluation. See also tests/contracts."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard
from raydist.worker.step import loss_sum
from tests.training import CONTEXT, Trainer, alone, counted, job, mine, samples


def test_the_step_is_adamw_on_the_mean_loss() -> None:
    """One step equals plain torch: mean cross entropy, clip_grad_norm_, AdamW.

    Within 1e-6: AdamW's first update divides the gradient by its own size, which magnifies the rounding of tiny ones.
    """
    trainer = Trainer(alone(), job("ddp"), full=4 * CONTEXT)
    plain = copy.deepcopy(trainer.model)
    batch, spec = MicroBatch(*samples(4)), trainer.spec.optim
    trainer.step(1, [batch], counted([batch]), 1e-2, False)
    reference = optimizers.build({n: ParamShard(p) for n, p in plain.named_parameters()}, spec, torch.device("cpu"))
    for group in reference.param_groups:
        group["lr"] = 1e-2
    logits = plain(batch.tokens).flatten(0, 1)
    nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=MASKED).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), spec.clip)
    reference.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def stops(rank: Rank) -> list[bool]:
    """The stop flags of three steps; the last rank requests a stop in the second."""
    trainer = Trainer(rank, job("ddp"), full=6 * CONTEXT)
    batches = mine(rank, *samples(6), 2)
    return [trainer.step(s, batches, counted(batches), 1e-2, s == 2 and rank.rank == 1).stop for s in (1, 2, 3)]


def test_one_rank_asks_and_all_stop(ranks: Any) -> None:
    """In the step in which it asked, and on every rank."""
    assert ranks.run(stops, 2) == [[False, True, False]] * 2


def settled(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of the same batch at the first and at the third backward of one DDP."""
    spec = job("ddp", {"layers": 3, "width": 64, "heads": 2, "context": 8})
    spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"bucket_mb": 0.05})})
    trainer = Trainer(rank, spec, full=2 * CONTEXT)
    batch = MicroBatch(*samples(2, seed=rank.rank))
    seen = []
    for _ in range(3):
        trainer.model.zero_grad(set_to_none=True)
        loss_sum(trainer.strategy.module, batch).backward()  # type: ignore[no-untyped-call]
        seen.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])
    return seen[0], seen[2]


def test_the_first_backward_is_like_any_other(ranks: Any) -> None:
    """On 3 ranks, where the order of additions depends on the buckets, gradients of the first and the third backward have the
    same bits: so the first step of a resumed run equals that step of an uninterrupted run."""
    for first, third in ranks.run(settled, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def evaluated(rank: Rank, micro: int) -> tuple[float, int]:
    """Loss and tokens of one evaluation."""
    trainer = Trainer(rank, job("ddp"), full=7 * CONTEXT)
    return evaluate(trainer.step.mesh, trainer.strategy, trainer.precision, mine(rank, *samples(7), micro))


def test_eval_loss_is_the_mean_over_all_ranks_tokens(ranks: Any) -> None:
    """Three ranks with uneven, masked parts give the held-out loss of one process, within the rounding of float32."""
    loss, tokens = evaluated(alone(), 7)
    assert tokens == 7 * CONTEXT - 5
    for theirs, count in ranks.run(evaluated, 3, 2):
        assert theirs == pytest.approx(loss, rel=1e-6)
        assert count == tokens


def changed_after_evaluation(rank: Rank, strategy: str) -> float:
    """The held-out loss once each rank has halved the weights that it updates, of which an evaluation has left copies."""
    trainer = Trainer(rank, job(strategy), full=7 * CONTEXT)
    batches = mine(rank, *samples(7), 2)
    held_out = partial(evaluate, trainer.step.mesh, trainer.strategy, trainer.precision, batches)
    held_out()
    with torch.no_grad():
        for shard in trainer.shards.values():
            shard.local.div_(2)
    trainer.strategy.updated()
    return held_out()[0]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_weights_that_change_after_an_evaluation_are_used(ranks: Any, strategy: str) -> None:
    """As the repair of a replica changes them, before a checkpoint: all ranks compute with the new values."""
    expected = changed_after_evaluation(alone(), "ddp")
    for loss in ranks.run(changed_after_evaluation, 2, strategy):
        assert loss == pytest.approx(expected, rel=1e-6)
