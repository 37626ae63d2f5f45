"""A checkpoint saved under any strategy and number of ranks can be resumed under any other.

Over a minute: every strategy saves on two to four ranks, and every other one resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.extension_plans import strategy_plan
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.parameter_table import gather_tensors
from tests.training import (
    CONTEXT,
    GROUPED,
    MODEL,
    Trainer,
    counted,
    gathered,
    job,
    mesh_job,
    mine,
    run,
    samples,
    world_of,
)

N, MICRO = 6, 2
Whole = dict[str, torch.Tensor]


def step(trainer: Trainer, number: int) -> float:
    """One step on the samples of its number; returns its loss."""
    parallel = trainer.spec.parallel
    mesh = parallel.tensor, parallel.pipeline, parallel.context
    batches = mine(trainer.rank, *samples(N, seed=number), MICRO, *mesh)
    return trainer.step(number, batches, counted(batches), 1e-2, want_stop=False).loss


def whole(tensors: dict[str, torch.Tensor], rank: Rank) -> Whole:
    """Model and optimizer, entry by entry, gathered from all ranks."""
    table = gather_tensors(tensors, rank.rank, rank.control)
    parts = {n: t.detach() for n, t in tensors.items()}
    return {n: gathered(parts.get(n), rank, row.shape, table.held_by_all(n)) for n, row in table.items()}


def saved(rank: Rank, spec: JobSpec, folder: str) -> tuple[Whole, float]:
    """Two steps, a checkpoint, a third step: the state in the checkpoint, and the third step's loss."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
    for number in (1, 2):
        step(trainer, number)
    saver = Saver(
        RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=True,
        keep=1, attempt=1, spec_hash="", numbers={}, on_event=lambda event: None,
        mesh=trainer.mesh.sizes, parameters=trainer.parameters,
    )  # fmt: skip
    tensors, rank_tensors, plain = state.capture()
    expected = whole(tensors, rank)
    trainer.before_update = saver.before_update
    saver.start(2, tensors, rank_tensors, plain)
    loss = step(trainer, 3)  # during the save: the saved state is the one before it
    assert saver.wait()
    saver.close()
    return expected, loss


def loaded(rank: Rank, specs: list[JobSpec], folder: str) -> list[tuple[Whole, float]]:
    """For each spec: the state as loaded into a fresh trainer, and the loss of the third step."""
    found = []
    for spec in specs:
        trainer = Trainer(rank, spec, full=N * CONTEXT)
        step(trainer, 99)  # other weights, other moments
        state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
        manifest = restore.choose(RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control)
        assert manifest is not None
        tensors, rank_tensors, _ = state.capture()
        restore.load(RunDir(folder), manifest, tensors, rank_tensors, group=rank.control)
        state.restore(tensors, None, manifest.plain)
        trainer.strategy.updated()
        found.append((whole(state.capture()[0], rank), step(trainer, 3)))
    return found


def cases() -> list[tuple[str, int, tuple[int, ...]]]:
    """(variant and number of ranks that save, numbers of ranks that load, each under every strategy).

    Each strategy saves on 2 ranks. One that shards also saves on an odd number of ranks, or in groups if it has them.
    """
    found: list[tuple[str, int, tuple[int, ...]]] = []
    for name in registry.names("parallel"):
        plan = strategy_plan(name)
        found.append((name, 2, (1, 2) if name in GROUPED else (2, 3)))
        if name in GROUPED:
            found.append((GROUPED[name], world_of(GROUPED[name], 2), (2, 3)))
        elif plan is None or plan.sharded:
            found.append((name, 3, (1, 4) if plan is None or len(plan.sharded) != 1 else (4,)))
    return found


@pytest.mark.parametrize(("variant", "savers", "worlds"), cases())
def test_every_strategy_goes_on_from_every_other(
    ranks: Any, tmp_path: Path, variant: str, savers: int, worlds: tuple[int, ...]
) -> None:
    """Weights and moments equal the saved ones, entry by entry and bit for bit; the next loss is the same to 1e-5, and to the bit
    under the strategy and number of ranks that saved."""
    expected, loss = run(ranks, saved, savers, job(variant), str(tmp_path))[0]
    specs = [job(name) for name in registry.names("parallel")]
    for world in worlds:
        for results in run(ranks, loaded, world, specs, str(tmp_path)):
            for spec, (state, next_loss) in zip(specs, results, strict=True):
                assert state.keys() == expected.keys()
                assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())
                assert next_loss == pytest.approx(loss, rel=0 if (spec, world) == (job(variant), savers) else 1e-5)


MESHES = [
    ("zero3", 1, 2),
    ("ddp", 2, 2),
    ("zero2", 2, 4),
    ("zero3", 2, 4),
    ("ddp", 4, 4),
]
"""(strategy, tensor parallel ranks, all ranks) that load."""


@pytest.mark.parametrize(("strategy", "tensor", "world"), [("zero1", 2, 4), ("zero3", 2, 4), ("zero2", 1, 2)])
def test_every_mesh_goes_on_from_every_other(
    ranks: Any, tmp_path: Path, strategy: str, tensor: int, world: int
) -> None:
    """Tensor parallel or not, with tied embeddings and a vocabulary that no mesh divides: weights and moments bit for bit, the next
    loss to 1e-5, and to the bit on the mesh that saved."""
    model = {**MODEL, "heads": 4, "qk_norm": True}
    expected, loss = run(ranks, saved, world, mesh_job(strategy, tensor, model), str(tmp_path))[0]
    for size in sorted({ranks_of for *_, ranks_of in MESHES}):
        specs = [mesh_job(name, cut, model) for name, cut, ranks_of in MESHES if ranks_of == size]
        for results in run(ranks, loaded, size, specs, str(tmp_path)):
            for spec, (state, next_loss) in zip(specs, results, strict=True):
                assert state.keys() == expected.keys()
                assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())
                same = (spec.parallel.strategy, spec.parallel.tensor, size) == (strategy, tensor, world)
                assert next_loss == pytest.approx(loss, rel=0 if same else 1e-5)


SPARSE = {"name": "tests.sparse:build", "layers": 3, "width": 16, "heads": 2, "context": CONTEXT, "tie_embeddings": False,
          "options": {"bias_rate": 0.01}}  # fmt: skip
WITH_EXPERTS = [
    ("ddp", {}, 1),
    ("zero2", {"expert": 2}, 2),
    ("zero3", {"expert": 4}, 4),
    ("ddp", {"expert": 2, "pipeline": 2}, 4),
    ("zero1", {"tensor": 2, "expert": 4}, 4),
    ("zero2", {"tensor": 2}, 4),
    ("zero3", {"context": 2}, 2),
    ("zero2", {"context": 2, "expert": 4}, 4),
]
"""(strategy, fields of `parallel`, ranks) that load."""


def sparse(strategy: str, fields: dict[str, int]) -> JobSpec:
    """A job of the model with experts."""
    return mesh_job(strategy, fields.get("tensor", 1), SPARSE, {k: v for k, v in fields.items() if k != "tensor"})


@pytest.mark.parametrize(
    ("strategy", "fields", "world"),
    [
        ("zero3", {"expert": 2}, 4),
        ("zero1", {"tensor": 2, "expert": 4}, 4),
        ("ddp", {"expert": 2, "pipeline": 2}, 4),
        ("zero1", {"context": 2}, 4),
    ],
)
def test_experts_and_context_go_on_at_every_mesh(
    ranks: Any, tmp_path: Path, strategy: str, fields: dict[str, int], world: int
) -> None:
    """Experts on two or four ranks or on one, sequences on one or two: weights, moments and the routers' biases bit for bit, the
    next loss to 1e-5, and to the bit on the mesh that saved."""
    expected, loss = run(ranks, saved, world, sparse(strategy, fields), str(tmp_path))[0]
    assert expected["model/blocks.1.mlp.router.bias"].any()
    for size in sorted({size for *_, size in WITH_EXPERTS}):
        specs = [sparse(name, other) for name, other, ranks_of in WITH_EXPERTS if ranks_of == size]
        for results in run(ranks, loaded, size, specs, str(tmp_path)):
            for spec, (state, next_loss) in zip(specs, results, strict=True):
                assert state.keys() == expected.keys()
                assert [n for n, tensor in state.items() if not torch.equal(expected[n], tensor)] == []
                same = (spec, size) == (sparse(strategy, fields), world)
                assert next_loss == pytest.approx(loss, rel=0 if same else 1e-5)
