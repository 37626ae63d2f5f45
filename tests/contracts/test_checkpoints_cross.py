"""A checkpoint saved under any strategy and number of ranks can be resumed under any other.

Over a minute: every strategy saves on two to four ranks, and every other one resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    gather_parts,
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
    return gather_parts({n: tensors[n].detach() if n in tensors else None for n in table}, rank, table)


def saved(rank: Rank, spec: JobSpec, folder: str) -> tuple[Whole, float]:
    """Two steps, a checkpoint, a third step: the state in the checkpoint, and the third step's loss."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards, trainer.frozen)
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


def loaded(rank: Rank, loads: list[tuple[JobSpec, list[str]]]) -> list[list[tuple[Whole, float]]]:
    """For each spec a trainer, which loads its checkpoints in turn: the state as loaded, and the loss of the third step."""
    found = []
    for spec, folders in loads:
        trainer = Trainer(rank, spec, full=N * CONTEXT)
        step(trainer, 99)  # other weights, other moments; as each checkpoint's third step leaves behind
        found.append([load(trainer, RunDir(folder)) for folder in folders])
    return found


def load(trainer: Trainer, folder: RunDir) -> tuple[Whole, float]:
    rank, state = trainer.rank, TrainState(trainer.model, trainer.optimizer, trainer.shards, trainer.frozen)
    manifest = restore.choose(folder, rank=rank.rank, world_size=rank.world_size, group=rank.control)
    assert manifest is not None
    for shard in trainer.frozen.values():
        shard.local.add_(1)  # which no step changes
    tensors, rank_tensors, _ = state.capture()
    restore.load(folder, manifest, tensors, rank_tensors, group=rank.control)
    state.restore(tensors, None, manifest.plain)
    trainer.strategy.updated()
    return whole(state.capture()[0], rank), step(trainer, 3)


Meshes = list[tuple[JobSpec, int]]
"""Jobs, and on how many ranks each trains."""


def check(
    ranks: Any, folder: Path, savers: Meshes, loaders: Meshes, own: Sequence[tuple[JobSpec, int]] = ()
) -> list[Whole]:
    """Each loader goes on from the checkpoint of each saver: the state bit for bit, the next loss to 1e-5, and to the bit where job
    and number of ranks are the same. `own`: savers that go on from their own checkpoint only. Returns what was saved."""
    folders = [str(folder / str(number)) for number in range(len(savers))]
    made = [run(ranks, saved, world, spec, to)[0] for (spec, world), to in zip(savers, folders, strict=True)]
    every = [*range(len(savers))]
    for world in sorted({world for _, world in [*loaders, *own]}):
        from_each = [(spec, every) for spec, size in loaders if size == world]
        loads = [*from_each, *((spec, [savers.index((spec, size))]) for spec, size in own if size == world)]
        for results in run(ranks, loaded, world, [(spec, [folders[n] for n in numbers]) for spec, numbers in loads]):
            for (spec, numbers), of_each in zip(loads, results, strict=True):
                for number, (state, next_loss) in zip(numbers, of_each, strict=True):
                    saver, (expected, loss) = savers[number], made[number]
                    pair = f"{(spec.parallel, world)} from {saver[0].parallel, saver[1]}"
                    assert state.keys() == expected.keys(), pair
                    assert [n for n, t in state.items() if not torch.equal(expected[n], t)] == [], pair
                    assert next_loss == pytest.approx(loss, rel=0 if (spec, world) == saver else 1e-5), pair
    return [expected for expected, _ in made]


def test_every_strategy_goes_on_from_every_other(ranks: Any, tmp_path: Path) -> None:
    """Each saves: one that shards on three ranks, which divide no shape, or in groups if it has them. Each loads all of them on two
    ranks, and its own on as many as it saved on; one loads them in one process. tests/worker/test_exactness.py changes the number
    of ranks of each between one and four."""
    names = registry.names("parallel")
    savers: Meshes = []
    for name in names:
        plan, variant = strategy_plan(name), GROUPED.get(name, name)
        savers.append((job(variant), world_of(variant, 3 if plan is None or plan.sharded else 2)))
    two = [(job(name), 2) for name in names]
    check(ranks, tmp_path, savers, [(job(names[0]), 1), *two], own=[saver for saver in savers if saver not in two])


TWO_STAGES = {"pipeline": 2}
MESHES: list[tuple[str, int, dict[str, int], int]] = [
    ("zero3", 1, {}, 2),
    ("ddp", 2, {}, 2),
    ("zero2", 2, {}, 4),
    ("zero3", 2, {}, 4),
    ("ddp", 4, {}, 4),
    ("ddp", 2, TWO_STAGES, 4),
    ("zero1", 1, {**TWO_STAGES, "chunks": 2}, 4),
]
"""(strategy, tensor parallel ranks, other axes, all ranks) that load."""


def test_every_mesh_goes_on_from_every_other(ranks: Any, tmp_path: Path) -> None:
    """Tensor parallel, in stages, in interleaved ones, or none of it, with embeddings tied (also of the first and the last stage)
    and a vocabulary that no mesh divides."""
    model = {**MODEL, "layers": 4, "heads": 4, "qk_norm": True}

    def meshes(*of: tuple[str, int, dict[str, int], int]) -> Meshes:
        return [(mesh_job(strategy, tensor, model, others), world) for strategy, tensor, others, world in of]

    savers = meshes(
        ("zero1", 2, {}, 4),
        ("zero3", 2, {}, 4),
        ("zero2", 1, {}, 2),
        ("zero3", 2, TWO_STAGES, 4),
        ("ddp", 1, {**TWO_STAGES, "chunks": 2}, 2),
    )
    check(ranks, tmp_path, savers, meshes(*MESHES))


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


WHICH_SAVE = [
    ("zero3", {"expert": 2}, 4),
    ("zero1", {"tensor": 2, "expert": 4}, 4),
    ("ddp", {"expert": 2, "pipeline": 2}, 4),
    ("zero1", {"context": 2}, 4),
]


def sparse(*meshes: tuple[str, dict[str, int], int], **options: Any) -> Meshes:
    """Jobs of the model with experts."""
    found, model = [], {**SPARSE, "options": {**SPARSE["options"], **options}}
    for strategy, fields, world in meshes:
        others = {k: v for k, v in fields.items() if k != "tensor"}
        found.append((mesh_job(strategy, fields.get("tensor", 1), model, others), world))
    return found


def test_experts_and_context_go_on_at_every_mesh(ranks: Any, tmp_path: Path) -> None:
    """Experts on two or four ranks or on one, sequences on one or two; the routers' biases are in the checkpoint."""
    for expected in check(ranks, tmp_path, sparse(*WHICH_SAVE), sparse(*WITH_EXPERTS)):
        assert expected["model/blocks.1.mlp.router.bias"].any()


def test_frozen_parameters_are_in_a_checkpoint_of_every_mesh(ranks: Any, tmp_path: Path) -> None:
    """Also those that layers split, whose parts a stage has, or that a strategy splits."""
    check(
        ranks, tmp_path, sparse(*WHICH_SAVE[:3], frozen=True), sparse(*WITH_EXPERTS[::3], WITH_EXPERTS[4], frozen=True)
    )
