"""A run starts from the weights of another run's checkpoint, on any mesh, once, and takes nothing else of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raydist.checkpoint.source import pinned, split
from raydist.data.prepare import prepare
from raydist.errors import CheckpointCorrupt, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, dump
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.build import build_model
from raydist.worker.checkpoint.manager import CheckpointManager, Progress
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.precision import Precision
from tests.training import CONTEXT, VARIANTS, VOCAB, Trainer, run

FIELDS: dict[str, Any] = {"name": "llama", "layers": 4, "width": 16, "heads": 2, "context": CONTEXT}


def spec(parallel: dict[str, Any], workers: int, seed: int = 0, **sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": FIELDS,
            "data": {"source": "any"},
            "train": {"steps": 4, "global_batch": 8, "micro_batch": 2, "seed": seed},
            "parallel": parallel,
            "cluster": {"workers": workers},
            "eval": {"every": None},
            **sections,
        }
    )


def save(rank: Rank, job: JobSpec, folder: str) -> dict[str, torch.Tensor]:
    """Saves a model at step 3, with an optimizer; returns its weights."""
    trainer = Trainer(rank, job, full=64)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
    saver = Saver(
        RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=False, keep=1, attempt=1,
        spec_hash="", numbers=job.numbers(""), on_event=lambda event: None, mesh=trainer.mesh.sizes, parameters=trainer.parameters,
    )  # fmt: skip
    saver.start(3, *state.capture())
    assert saver.wait()
    saver.close()
    trainer.step.optimizer_hooks.close()
    return trainer.whole()


def load(rank: Rank, job: JobSpec, source: str) -> tuple[dict[str, torch.Tensor], bool]:
    """The weights after `start_from`, and whether the optimizer still has no state."""
    meta = job.parallel.strategy in ("zero3", "hsdp") or job.parallel.pipeline > 1
    trainer = Trainer(rank, job, full=64, model=build_model(job, VOCAB, meta))
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
    own = Job(job, RunDir("/nowhere"), "", 1, None)
    manager = CheckpointManager(
        own, rank, None, Progress(), state, precision=Precision(job.precision, rank.device), bad_steps=None,  # type: ignore[arg-type]
        noise=None, fingerprint="", total=4, steps_per_epoch=4,
    )  # fmt: skip
    manager.start_from(source)
    trainer.strategy.updated()
    trainer.step.optimizer_hooks.close()
    return trainer.whole(), not trainer.optimizer.state


@pytest.fixture(scope="module")
def source(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, dict[str, torch.Tensor]]:
    """A run with a checkpoint of step 3 of zero3 on two ranks, and its weights."""
    job = spec(VARIANTS["zero3"], 2, seed=1)
    made = RunDir(tmp_path_factory.mktemp("source") / "base")
    made.storage.write(SPEC, dump(job).encode())
    return made, run(ranks, save, 2, job, made.uri)[0]


TARGETS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"strategy": "zero2"}),
    (4, {"strategy": "zero3", "tensor": 2}),
    (4, {"strategy": "ddp", "tensor": 2, "pipeline": 2}),
]


def test_the_weights_alone_on_any_mesh(ranks: Any, source: tuple[RunDir, dict[str, torch.Tensor]]) -> None:
    """Bit for bit the saved weights, in all of them; no optimizer state is made or read."""
    base, right = source
    for workers, parallel in TARGETS:
        for values, empty in run(ranks, load, workers, spec(parallel, workers, init_from=base.uri), base.uri):
            assert values.keys() == right.keys()
            assert [name for name, value in right.items() if not torch.equal(values[name], value)] == [], parallel
            assert empty


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 5}, "blocks.4.attention.q.weight: is not in the checkpoint"),
        ({"layers": 3}, "blocks.3.attention.q.weight: the model has no such tensor"),
        ({"hidden": 24}, r"blocks.0.mlp.gate.weight: \[64, 16\] in the checkpoint, \[24, 16\] by the job's model"),
        ({"name": "gpt", "qk_norm": True}, "blocks.0.attention.q_norm.weight: is not in the checkpoint"),
    ],
)
def test_other_tensors_are_named(
    source: tuple[RunDir, dict[str, torch.Tensor]], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    """Missing, surplus and wrongly shaped ones: by the driver before anything starts, and by a rank."""
    base, _ = source
    job = spec({}, 1, model={**FIELDS, **changes}, init_from="base")
    with pytest.raises(UserError, match=says) as caught:
        pinned(job, RunDir(tmp_path / "own"), str(Path(base.uri).parent))
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=says):
        run(None, load, 1, job, base.uri)


def test_a_tied_head_is_not_two_tensors(ranks: Any, tmp_path: Path) -> None:
    """A model that ties embedding and head cannot take different ones; one that does not may take the tied one twice."""
    untied = spec({}, 1, model={**FIELDS, "tie_embeddings": False})
    for name, saved in (("two", untied), ("one", spec({}, 1))):
        (tmp_path / name).mkdir()
        (tmp_path / name / SPEC).write_text(dump(saved))
        run(None, save, 1, saved, str(tmp_path / name))
    for attempt in (
        lambda: pinned(spec({}, 1, init_from="two"), RunDir(tmp_path / "own"), str(tmp_path)),
        lambda: run(None, load, 1, spec({}, 1, init_from="two"), str(tmp_path / "two")),
    ):
        with pytest.raises(UserError, match=r"head\.weight: another tensor than embedding\.weight"):
            attempt()
    ((values, _),) = run(None, load, 1, untied, str(tmp_path / "one"))
    assert torch.equal(values["head.weight"], values["embedding.weight"])


def test_a_source_is_found_and_pinned(source: tuple[RunDir, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """By name, folder or checkpoint: the job gets the URI of one checkpoint. What does not exist is named."""
    base, _ = source
    right = f"{base.uri}/checkpoints/step-00000003"
    own = RunDir(tmp_path / "own")
    for name in ("base", base.uri, right, "base/checkpoints/step-00000003"):
        assert pinned(spec({}, 1, init_from=name), own, str(Path(base.uri).parent)).init_from == right
    for name, says in (
        ("bace", "init_from: no run 'bace'"),
        ("base/checkpoints/step-00000004", "init_from: .*no checkpoint of step 4"),
    ):
        with pytest.raises(UserError, match=says):
            pinned(spec({}, 1, init_from=name), own, str(Path(base.uri).parent))
    with pytest.raises(UserError, match="is this run itself"):
        pinned(spec({}, 1, init_from="base"), base, str(Path(base.uri).parent), fresh=True)
    RunDir(tmp_path / "new").storage.write(SPEC, b"{}")
    with pytest.raises(UserError, match="run new has no checkpoint"):
        pinned(spec({}, 1, init_from="new"), own, str(tmp_path))
    assert split("s3://b/run/checkpoints/step-00000012?region=x") == ("s3://b/run?region=x", 12)


def test_a_flipped_byte_of_the_source(source: tuple[RunDir, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Its hash is wrong: nothing is loaded, and the file is named."""
    base = RunDir(shutil.copytree(source[0].uri, tmp_path / "base"))
    shard = next(Path(base.uri, "checkpoints/step-00000003").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=shard.name):
        run(None, load, 1, spec({}, 1, init_from=base.uri), base.uri)


def trained(rank: Rank, job: JobSpec, folder: str, until: int) -> tuple[list[float], list[str]]:
    """The losses of an attempt, and the kinds of its events."""
    losses: list[float] = []
    kinds: list[str] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        losses.extend(record["loss"] for record in new)
        kinds.extend(event["kind"] for event in told)

    train(
        Job(job, RunDir(folder), str(job.data.path), until, until),
        rank,
        MonitorChannel(push, lambda: None) if rank.first else None,
    )
    return losses, kinds


def test_a_run_starts_from_another_once(ranks: Any, tmp_path: Path) -> None:
    """Its first loss is that of trained weights; a later attempt continues from its own checkpoint, without the source, which
    spec.yaml still names."""
    (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 23) for i in range(3000)))
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"), eval_fraction=0.2)
    data = {"path": str(tmp_path / "tokens")}
    sections: dict[str, Any] = {"data": data, "checkpoint": {"every": 1, "asynchronous": False}}
    sections["optim"] = {"lr": 1e-2, "schedule": {"name": "constant", "warmup": 0}}
    plain = spec({}, 1, **sections)
    base = RunDir(tmp_path / "base")
    base.storage.write(SPEC, dump(plain).encode())
    first, _ = run(None, trained, 1, plain, base.uri, 3)[0]
    own = RunDir(tmp_path / "own")
    # From step 0, with a learning rate too small to move anything: its losses show the weights that it started from.
    still = spec(
        {"strategy": "zero3"}, 2, **{**sections, "optim": {**sections["optim"], "lr": 1e-12}, "init_from": "base"}
    )
    still = pinned(still, own, str(tmp_path))
    own.storage.write(SPEC, dump(still).encode())
    losses, kinds = run(ranks, trained, 2, still, own.uri, 2)[0]
    assert kinds.count("weights_loaded") == 1
    assert losses[0] < first[0] - 0.1  # the same batch, after three steps of training
    shutil.rmtree(base.uri)
    again = pinned(
        spec({"strategy": "zero3"}, 2, **{**sections, "optim": dict(still.optim), "init_from": "base"}), own, "/nowhere"
    )
    assert again.init_from == still.init_from == yaml.safe_load(own.storage.read(SPEC))["init_from"]
    more, kinds = run(ranks, trained, 2, again, own.uri, 3)[0]
    assert len(more) == 1
    assert "weights_loaded" not in kinds
