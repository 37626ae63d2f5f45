"""A user's own model under every strategy: the model that trains is the one that `build` returned; mistakes in it are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist import registry
from raydist.errors import GraphMismatch, UserError
from raydist.spec import JobSpec
from raydist.worker import build
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.mesh import Mesh
from tests.ownmodels import Own, save_pretrained
from tests.training import CONTEXT, MODEL, VOCAB, Trainer, alone, counted, job, mine, run, samples

N = 5
"""Samples of the global batch: ranks have unequal parts."""


def own(name: str, strategy: str, **options: Any) -> JobSpec:
    return job(strategy, {**MODEL, "name": f"tests.ownmodels:{name}", "options": options})


def made(rank: Rank, spec: JobSpec) -> nn.Module:
    """Built in the same way as by the loop."""
    strategy = registry.load("parallel", spec.parallel.strategy)(spec, Mesh(rank))
    model = build.build_model(spec, VOCAB, strategy.takes_meta)
    build.make_trainable(model)
    build.check_same(model, rank)
    return model


def first_step(rank: Rank, spec: JobSpec) -> tuple[dict[str, Any], ...]:
    """Weights before the first step, buffers, its loss and gradients, and the weights after it."""
    trainer = Trainer(rank, spec, N * CONTEXT, made(rank, spec))
    before, buffers, gradients = trainer.whole(), dict(trainer.model.named_buffers()), {}
    trainer.before_update = lambda: gradients.update(trainer.whole(grad=True))
    batches = mine(rank, *samples(N), 2)
    report = trainer.step(1, batches, counted(batches), 1e-2, want_stop=False)
    return before, {n: b.clone() for n, b in buffers.items()}, {"loss": report.loss}, gradients, trainer.whole()


def weights_of(name: str, tmp_path: Path) -> dict[str, str]:
    """The source of the model's weights."""
    if name == "pretrained":
        save_pretrained(str(tmp_path / "hf"), VOCAB)
        return {"path": str(tmp_path / "hf")}
    if name == "Drawn":
        return {}
    torch.manual_seed(7)
    model = Own(job("ddp").model, VOCAB)
    for n, b in model.named_buffers():
        if "scale" in n:
            b.normal_()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return {"weights": str(tmp_path / "weights.pt")}


@pytest.mark.parametrize("name", ["loaded", "in_few_bits", "pretrained", "Drawn"])
def test_what_was_built_is_what_trains(ranks: Any, tmp_path: Path, name: str) -> None:
    """Weights and buffers equal those that one process builds, to the bit; loss, gradients and update equal its own."""
    options = weights_of(name, tmp_path)
    expected = first_step(alone(), own(name, "ddp", **options))
    for strategy in registry.names("parallel"):
        for got in run(ranks, first_step, 2, own(name, strategy, **options)):
            for ours, theirs in zip(got[:2], expected[:2], strict=True):
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[n], value) for n, value in theirs.items()), strategy
            torch.testing.assert_close(got[2:], expected[2:], rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("strategy", registry.names("parallel"))
def test_a_model_that_has_not_asked_for_it_is_never_built_without_weights(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`build` runs once, without a default device; only a model that declares takes_meta is built on the meta device."""
    seen: list[str] = []

    def note(spec: Any, vocab_size: int) -> nn.Module:
        seen.append(torch.get_default_device().type)
        return Own(spec, vocab_size)

    monkeypatch.setattr("tests.ownmodels.loaded", note)
    build.build_model(own("loaded", strategy), VOCAB, meta=True)
    assert seen == ["cpu"]
    model = build.build_model(own("Drawn", strategy), VOCAB, meta=True)
    assert all(p.is_meta for p in model.parameters())
    assert not any(p.is_meta for p in build.build_model(own("Drawn", strategy), VOCAB).parameters())


@pytest.mark.parametrize(
    ("name", "meta", "told"),
    [
        ("empty", False, "no values for embedding.weight, "),
        ("says_too_much", True, "takes_meta is set, and Own has no init_module"),
        ("no_module", False, r"gave dict, not a torch\.nn\.Module"),
    ],
)
def test_a_model_that_breaks_the_contract_is_named(name: str, meta: bool, told: str) -> None:
    """One line with the model and the mistake."""
    with pytest.raises(UserError, match=f"tests.ownmodels:{name}: {told}"):
        build.build_model(own(name, "zero3"), VOCAB, meta)


@pytest.mark.parametrize("strategy", registry.names("parallel"))
def test_ranks_that_build_other_values_are_named(ranks: Any, strategy: str) -> None:
    """Every rank raises, with rank and tensors, parameters and buffers; nothing is trained."""
    for error in ranks.run(made, 3, own("unseeded", strategy)):
        assert isinstance(error, GraphMismatch)
        told = "ranks 1, 2 built other first values than rank 0: layers.1.linear.weight, layers.1.scale"
        assert error.message == told


def test_weights_tied_across_blocks_stay_one(ranks: Any) -> None:
    """ddp, zero1 and zero2 train them as one process does; zero3 and hsdp, which would make copies, name them."""
    expected = first_step(alone(), own("AcrossBlocks", "ddp"))
    for strategy in ("ddp", "zero1", "zero2"):
        for got in run(ranks, two_steps, 2, own("AcrossBlocks", strategy)):
            torch.testing.assert_close(got[0], expected[4], rtol=1e-4, atol=5e-6)
            torch.testing.assert_close(got[1], two_steps(alone(), own("AcrossBlocks", "ddp"))[1], rtol=1e-4, atol=5e-6)
    for strategy in ("zero3", "hsdp"):
        for error in ranks.run(first_step, 2, own("AcrossBlocks", strategy)):
            assert isinstance(error, UserError)
            assert "layers.0.linear.weight = layers.1.linear.weight; layers.2.linear.weight = mix.weight" in str(error)


def two_steps(rank: Rank, spec: JobSpec) -> list[Any]:
    """Weights after each of two steps: the second forward pass uses the result of the first update."""
    trainer, after = Trainer(rank, spec, N * CONTEXT, made(rank, spec)), []
    for step in (1, 2):
        batches = mine(rank, *samples(N), 2)
        report = trainer.step(step, batches, counted(batches), 1e-2, want_stop=False)
        after.append({**trainer.whole(), "loss": torch.tensor(report.loss)} if step == 2 else trainer.whole())
    return after


def halved(rank: Rank, strategy: str) -> tuple[float, float, bool]:
    """The first loss of a step and an evaluation before it, of the same samples; whether a checkpoint has the model's names."""
    spec = own("Halved", strategy)
    trainer = Trainer(rank, spec, N * CONTEXT, made(rank, spec))
    batches = mine(rank, *samples(N), 2)
    held_out, _ = evaluate(trainer.mesh, trainer.strategy, trainer.precision, batches)
    report = trainer.step(1, batches, counted(batches), 0.0, want_stop=False)
    saved = TrainState(trainer.model, trainer.optimizer, trainer.shards).weights()
    return held_out, report.loss, {f"model/{name}" for name in trainer.shards} <= saved.keys()


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero3", 2)])
def test_a_part_may_have_the_name_of_a_wrapper_s(ranks: Any, strategy: str, world: int) -> None:
    """A model whose layers are in `self.module` is trained and evaluated as a whole, and saved under its own names."""
    for held_out, loss, named in run(ranks, halved, world, strategy):
        assert held_out == pytest.approx(loss, rel=1e-6)
        assert named
