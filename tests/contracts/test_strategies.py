"""Every strategy, by name: the losses, gradients and weights of one process, on any number of ranks.

Over a minute: every strategy, on one to four ranks, in each precision, and by torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import GraphMismatch, NonFinite, Rollback
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.dataloader import to_device
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.mesh import Mesh
from raydist.worker.optim.offload import adamw as offload
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.step import StepReport, loss_sum
from tests.training import (
    CONTEXT,
    GROUPED,
    MODEL,
    SHARDS_PARAMETERS,
    VARIANTS,
    VOCAB,
    Trainer,
    alone,
    copies,
    counted,
    gathered,
    job,
    mine,
    run,
    samples,
    without_kernels,
    world_of,
)

STEPS = 3
Result = tuple[list[StepReport], dict[str, torch.Tensor], dict[str, torch.Tensor], float]
"""Reports, the last step's gradients, the weights after it, and the eval loss; plain types, since it crosses processes."""


def train(rank: Rank, spec: JobSpec, n: int, micro: int) -> Result:
    """STEPS steps on different samples each; gradients are the last step's, clipped."""
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    reports, gradients = [], {}
    for s in range(1, STEPS + 1):
        if s == STEPS:
            trainer.before_update = lambda: gradients.update(trainer.whole(grad=True))
        batches = mine(rank, *samples(n, seed=s), micro)
        reports.append(trainer.step(s, batches, counted(batches), 1e-2, want_stop=False))
    loss, _ = evaluate(trainer.step.mesh, trainer.strategy, trainer.precision, mine(rank, *samples(n, seed=99), micro))
    trainer.step.optimizer_hooks.close()
    return reports, gradients, trainer.whole(), loss


def compare(got: Any, expected: Result, loss: float = 1e-5, weights: float = 1e-4, tiny: float = 5e-6) -> None:
    """Compares within these relative tolerances, and `tiny` absolute for weights and gradients."""
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
def reference(n: int, tie: bool, precision: str, model: tuple[tuple[str, Any], ...] = ()) -> Result:
    """The same steps on one process, one micro-batch each, without any strategy."""
    return train(alone(), job("ddp", {**MODEL, "tie_embeddings": tie, **dict(model)}, precision=precision), n, n)


@functools.cache
def trained(ranks: Any, variant: str, world: int, n: int, micro: int, **model: Any) -> list[Result]:
    """The result of `train` on every rank, with these fields of the model."""
    return run(ranks, train, world, job(variant, {**MODEL, **model}), n, micro)


# (world, samples a global batch, micro-batch, tied embeddings): one rank; accumulation and uneven parts; an idle rank.
SPLITS = [(1, 6, 2, True), (3, 7, 2, True), (4, 3, 2, False)]


@pytest.mark.parametrize(("world", "n", "micro", "tie"), SPLITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_match_one_process(ranks: Any, variant: str, world: int, n: int, micro: int, tie: bool) -> None:
    """Losses, gradients, their norm, weights and the eval loss equal those of one process on the same global batches.

    Within 1e-5 relative for losses and norms, 1e-4 (5e-6 absolute) for weights and gradients: sums of float32 in another order.
    """
    if world % VARIANTS[variant].get("shard", 1):
        world = world_of(variant, world)
    for got in trained(ranks, variant, world, n, micro, tie_embeddings=tie):
        compare(got, reference(n, tie, "fp32"))


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"params": "bf16"},
    "reduced in bf16": {"params": "fp32", "reduce": "bf16"},
    "fp16": {"params": "fp16", "loss_scale": {"initial": 1024}},
}
FORMATS = [(v, p) for v in registry.names("parallel") for p in PRECISIONS if p != "fp16" or v in ("ddp", "zero3")]
"""fp16 under every strategy: test_an_overflow_on_one_rank_skips_the_step_on_all."""


@pytest.mark.parametrize(("variant", "format"), FORMATS)
def test_low_precision_stays_near_one_process(ranks: Any, variant: str, format: str) -> None:
    """The same in lower precision, on 3 ranks: losses within 0.5% of one process in that format, the first gradient's norm within
    2%.

    bf16 and fp16 round by up to 0.4% and 0.05%; FSDP also casts norms' gains, which autocast leaves in fp32, and accumulates a
    tied embedding's gradient in bf16: 1.4% here. Weights stay fp32.
    """
    precision = PRECISIONS[format]
    expected = reference(7, True, precision["params"])
    for reports, _, weights, eval_loss in run(ranks, train, 3, job(variant, precision=precision), 7, 2):
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected[0]], rel=5e-3)
        assert reports[0].grad_norm == pytest.approx(expected[0][0].grad_norm, rel=2e-2)
        assert eval_loss == pytest.approx(expected[3], rel=5e-3)
        assert all(w.dtype is torch.float32 for w in weights.values())


@pytest.mark.parametrize("variant", SHARDS_PARAMETERS)
def test_parameters_in_host_memory_compute_the_same(ranks: Any, variant: str) -> None:
    """offload.parameters: cpu, on 4 ranks: the tolerances of fp32."""
    for got in run(ranks, train, 4, job(variant, offload={"parameters": "cpu"}), 6, 2):
        compare(got, reference(6, True, "fp32"))


EXAMPLES = ("ddp", "zero3")
"""Strategies for a second kind of a feature whose first kind is tested under each of them: whole, and sharded."""


@pytest.mark.parametrize(
    ("variant", "where"), [*((v, "cpu") for v in registry.names("parallel")), *((v, "nvme") for v in EXAMPLES)]
)
def test_offloaded_state_changes_no_bit(ranks: Any, tmp_path: Path, variant: str, where: str) -> None:
    """The optimizer in host memory or in a file, on 3 ranks, with clipping: the same losses, gradients and weights, bit for bit.

    Gradients are clipped when the update reads them: the model's own gradients stay unchanged.
    """
    kept = trained(ranks, variant, 3, 7, 2, tie_embeddings=True)
    away = run(ranks, train, 3, job(variant, offload={"optimizer": where, "path": str(tmp_path)}), 7, 2)
    for (reports, _, weights, _), (reports_away, _, weights_away, _) in zip(kept, away, strict=True):
        assert reports == reports_away
        assert all(torch.equal(w, weights_away[n]) for n, w in weights.items())
    assert list(tmp_path.iterdir()) == []


def told_early(rank: Rank, spec: JobSpec) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """For a step of two micro-batches: the gradients when the strategy reported them as final, and at the end."""
    trainer = Trainer(rank, spec, full=7 * CONTEXT)
    shards = trainer.strategy.shards()
    names = {id(shard.local): name for name, shard in shards.items()}
    early: dict[str, torch.Tensor] = {}

    def final(parameters: Sequence[torch.Tensor]) -> None:
        for p in parameters:
            assert p.grad is not None
            assert names[id(p)] not in early, "told twice"
            early[names[id(p)]] = p.grad.clone()

    trainer.strategy.on_final = final
    batches = mine(rank, *samples(7), 1)
    for number, batch in enumerate(batches, start=1):
        with trainer.strategy.accumulate(last=number == len(batches)):
            loss_sum(trainer.strategy.module, batch).backward()  # type: ignore[no-untyped-call]
            assert number == len(batches) or not early
    trainer.strategy.finish_grads()
    late = {name: shard.local.grad.clone() for name, shard in shards.items() if shard.local.grad is not None}
    assert isinstance(trainer.optimizer, offload.OffloadedAdamW)
    trainer.optimizer.close()
    return early, late


@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_gradients_that_are_said_to_be_final_are(ranks: Any, variant: str) -> None:
    """On 3 ranks each gradient is reported once, in the last micro-batch, with the bits that the update uses."""
    for early, late in run(ranks, told_early, 3, job(variant, offload={"optimizer": "cpu"})):
        assert early.keys() == late.keys()
        assert all(torch.equal(early[name], gradient) for name, gradient in late.items())


@pytest.mark.parametrize(
    ("variant", "kind"), [*((v, "full") for v in registry.names("parallel")), *((v, "selective") for v in EXAMPLES)]
)
def test_activations_computed_again_change_no_bit(ranks: Any, variant: str, kind: str) -> None:
    """With dropout and accumulation, on 2 ranks: the same losses, gradients and weights, bit for bit."""
    model = {**MODEL, "dropout": 0.2}
    kept = trained(ranks, variant, 2, 6, 2, dropout=0.2)
    again = run(ranks, train, 2, job(variant, model, {"checkpoint_activations": kind}), 6, 2)
    for (reports, gradients, weights, _), (reports_again, gradients_again, weights_again, _) in zip(
        kept, again, strict=True
    ):
        assert reports == reports_again
        assert all(torch.equal(g, gradients_again[n]) for n, g in gradients.items())
        assert all(torch.equal(w, weights_again[n]) for n, w in weights.items())


ONE_BLOCK: dict[Any, dict[str, Any]] = {"blocks": {"layers": 1}, True: {"layers": 1, "name": "mlp"}}
"""Of compiled models, by scope: to compile takes seconds a block and shape, so there is one of each, and as a whole one without
attention, of which the blocks have the kernels."""


def traced(rank: Rank, spec: JobSpec, n: int, micro: int) -> Result:
    """`train`, without compiled kernels."""
    with without_kernels():
        return train(rank, spec, n, micro)


@pytest.mark.parametrize(
    ("variant", "scope"), [("ddp", True), ("zero3", True), *((name, "blocks") for name in registry.names("parallel"))]
)
def test_compiled_it_computes_the_same(ranks: Any, variant: str, scope: Any) -> None:
    """On 2 ranks with accumulation, by block with recomputed activations, and as a whole: within 1e-4 of one process without
    compilation. Graphs of a whole sharded model: without compiled kernels."""
    function, model = traced if (variant, scope) == ("zero3", True) else train, ONE_BLOCK[scope]
    fields = {"compile": scope, "checkpoint_activations": "full" if scope == "blocks" else "none"}
    for got in run(ranks, function, 2, job(variant, {**MODEL, **model}, fields), 8, 2):
        compare(got, reference(8, True, "fp32", (*model.items(),)), loss=1e-4, weights=1e-3, tiny=1e-5)


def overflow(rank: Rank, spec: JobSpec) -> tuple[StepReport, StepReport, float, bool]:
    """A step whose gradient overflows on the last rank, then one without overflow; returns the scale in between."""
    trainer = Trainer(rank, spec, full=6 * CONTEXT)
    before = trainer.whole()
    batches = mine(rank, *samples(6), 2)
    hook = None
    if rank.rank == rank.world_size - 1:
        hook = trainer.model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * float("inf"),))
    first = trainer.step(1, batches, counted(batches), 1e-2, want_stop=False)
    scale = trainer.precision.loss_scale
    untouched = all(torch.equal(before[n], w) for n, w in trainer.whole().items())
    if hook is not None:
        hook.remove()
    return first, trainer.step(2, batches, counted(batches), 1e-2, want_stop=False), scale, untouched


@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, variant: str) -> None:
    """In fp16 no rank updates, the scale is halved on every rank, and the next step is normal."""
    spec = job(variant, precision={"params": "fp16", "loss_scale": {"initial": 256}})
    for first, second, scale, untouched in run(ranks, overflow, 3, spec):
        assert (first.skipped, second.skipped, scale, untouched) == (True, False, 128, True)


def fresh(rank: Rank, spec: JobSpec) -> tuple[dict[str, torch.Tensor], int]:
    """The initial weights, and the most parameters that this rank held on the CPU at any time while wrapping the model."""
    most = 0

    def look(module: nn.Module) -> None:
        nonlocal most
        held = {id(p): p.numel() for p in top.parameters() if not p.is_meta and not isinstance(p, DTensor)}
        most = max(most, sum(held.values()))

    strategy = registry.load("parallel", spec.parallel.strategy)(spec, Mesh(rank))
    with torch.device("meta"):
        top = registry.load("model", "gpt")(spec.model, VOCAB)
    own = top.init_module
    top.init_module = lambda name, module: (own(name, module), look(module))
    torch.manual_seed(1)
    strategy.wrap(top, lambda module: loss_sum(module, MicroBatch(*samples(1))))
    return {n: gathered(shard.whole(shard.local.detach()), rank) for n, shard in strategy.shards().items()}, most


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("variant", SHARDS_PARAMETERS)
def test_weights_are_made_block_by_block(ranks: Any, variant: str, tie: bool) -> None:
    """The bits equal those of one process that builds the whole model, though a rank never holds more than one whole block and
    the root."""
    torch.manual_seed(1)
    whole = registry.load("model", "gpt")(job("ddp", {**MODEL, "tie_embeddings": tie}).model, VOCAB)
    block = sum(p.numel() for p in whole.blocks[0].parameters())
    root = sum(p.numel() for n, p in whole.named_parameters() if not n.startswith("blocks"))
    for weights, most in run(ranks, fresh, 4, job(variant, {**MODEL, "tie_embeddings": tie})):
        assert most <= block + root
        assert all(torch.equal(p, weights[n]) for n, p in whole.named_parameters())


class Poisoned(nn.Module):
    """A model whose loss, or gradient, is not finite for token 7."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.where = registry.load("model", "gpt")(job("ddp").model, VOCAB), where

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens)
        if (tokens == 7).all():
            if self.where == "loss":
                return logits * float("nan")
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def poisoned(rank: Rank, spec: JobSpec, where: str) -> str:
    """A step in which only rank 1 has token 7; returns the error's text, if the weights are unchanged."""
    trainer = Trainer(rank, spec, full=4 * CONTEXT, model=Poisoned(where))
    before = trainer.whole()
    tokens = torch.full((2, CONTEXT), 7 if rank.rank == 1 else 1, device=rank.device)
    try:
        trainer.step(12, [MicroBatch(tokens, tokens)], 2 * CONTEXT, 1e-2, want_stop=False)
    except NonFinite as error:
        assert all(torch.equal(before[n], w) for n, w in trainer.whole().items())
        return error.message
    return "no error"


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_nan_stops_before_the_update_and_names_step_and_rank(ranks: Any, variant: str, where: str) -> None:
    """NaN in one rank's loss or gradient raises NonFinite on all ranks; the error names step 12 and only rank 1."""
    for message in run(ranks, poisoned, 2, job(variant), where):
        assert "step 12" in message
        assert f"rank 1: its {where}" in message
        assert "rank 0:" not in message


class Forked(nn.Module):
    """Two layers; `use` selects which take part."""

    def __init__(self, use: tuple[str, ...]) -> None:
        super().__init__()
        self.tokens, self.a, self.b, self.use = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB), nn.Linear(4, VOCAB), use

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        out: torch.Tensor = sum(getattr(self, name)(x) for name in self.use)  # type: ignore[assignment]
        return out


def forked(rank: Rank, spec: JobSpec, uses: list[tuple[str, ...]]) -> str:
    """Wraps a model whose graph differs by rank; returns the error's text."""
    try:
        Trainer(rank, spec, full=8, model=Forked(uses[rank.rank]))
    except GraphMismatch as error:
        return error.message
    return "no error"


@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_unused_parameters_are_named(ranks: Any, variant: str) -> None:
    """A layer that takes no part in the loss is refused before training, with its parameters' names."""
    for message in run(ranks, forked, 2, job(variant), [("a",), ("a",)]):
        assert "these parameters take no part in the loss: b.weight, b.bias" in message


@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_a_rank_whose_graph_differs_is_named(ranks: Any, variant: str) -> None:
    """Ranks with different graphs are refused before they wait for one another; the odd rank is named."""
    for message in run(ranks, forked, 3, job(variant), [("a", "b"), ("a", "b"), ("b",)]):
        assert "rank 2 uses other parameters in its loss than rank 0: a.bias, a.weight" in message


def drifting(rank: Rank, spec: JobSpec, path: str, disturbed: bool) -> tuple[bool, str, dict[str, torch.Tensor]]:
    """Two steps; in the second a bit changes on the last rank if `disturbed`.

    Returns whether replicas are compared, the text of Rollback, and the weights.
    """
    trainer = Trainer(rank, spec, full=6 * CONTEXT)
    made = ReplicaCheck(
        rank,
        RunDir(path),
        1,
        trainer.model,
        trainer.optimizer,
        gather_parameters(trainer.strategy.shards(), rank),
        due=lambda step: True,
        before_write=lambda: None,
        reporter=None,
    )
    watched = disturbed and made.compares
    trainer.step.hooks = [made] if watched else []
    hooks: list[Any] = []

    def once(*forward: Any) -> None:
        hooks.pop().remove()
        flip(trainer.model)

    error = ""
    for s in (1, 2):
        if s == 2 and rank.rank == rank.world_size - 1 and watched:
            hooks.append(trainer.model.register_forward_hook(once))
        batches = mine(rank, *samples(6, seed=s), 2)
        try:
            trainer.step(s, batches, counted(batches), 1e-2, want_stop=False)
        except Rollback as rollback:
            error = rollback.message
    return made.compares, error, trainer.whole()


def flip(model: nn.Module) -> None:
    """Flips a bit of the first value of some parameter that this rank holds."""
    local = next(p for n, p in model.named_parameters() if "norm" in n).data  # must be invisible to autograd too
    local = local.to_local() if isinstance(local, DTensor) else local
    local.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)


@pytest.mark.parametrize("variant", [*registry.names("parallel"), *GROUPED.values()])
def test_a_drifted_replica_is_mended(ranks: Any, tmp_path: Path, variant: str) -> None:
    """A bit changes on one of 3 ranks within a step: it is repaired, and the weights after the step have the bits of an
    undisturbed run. Two pairs of copies have no majority: the ranks that differ are named. zero3 has no copies."""
    spec = job(variant)
    world = world_of(variant, 3)
    kept = copies(variant, world)
    expected = [weights for _, _, weights in run(ranks, drifting, world, spec, str(tmp_path), False)]
    for (compares, error, weights), right in zip(
        run(ranks, drifting, world, spec, str(tmp_path), True), expected, strict=True
    ):
        assert compares == (kept > 1)
        if kept == 2:
            assert "step 2: ranks 1, 3 hold different values of model/" in error
        else:
            assert error == ""
            assert all(torch.equal(w, right[n]) for n, w in weights.items())


def frozen(rank: Rank, spec: JobSpec) -> tuple[set[str], bool]:
    """(names of trained parameters, whether the frozen embedding is unchanged) after a step."""
    torch.manual_seed(1)
    model = registry.load("model", "gpt")(spec.model, VOCAB)
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    trainer = Trainer(rank, spec, full=2 * CONTEXT, model=model)
    batch = to_device(MicroBatch(*samples(2)), rank.device)
    trainer.step(1, [batch], counted([batch]), 1e-2, want_stop=False)
    now = model.embedding.weight
    return set(trainer.strategy.shards()), torch.equal(
        (now.full_tensor() if isinstance(now, DTensor) else now).cpu(), before
    )


@pytest.mark.parametrize("variant", registry.names("parallel"))
def test_frozen_parameters_stay(ranks: Any, variant: str) -> None:
    """A parameter without requires_grad is in no shard, and keeps its values."""
    spec = job(variant, {**MODEL, "tie_embeddings": False})
    for trained, same in run(ranks, frozen, 2, spec):
        assert same
        assert "embedding.weight" not in trained
        assert "head.weight" in trained
