"""Adapters under every strategy and mesh: the numbers of one process, the same bits after a kill, and only adapters in checkpoints.

Over a minute: every strategy is killed and resumed, and every mesh is compared with one process.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raydist import registry
from raydist.checkpoint import base_weights, manifest
from raydist.checkpoint.base_weights import BASE
from raydist.cluster import preflight
from raydist.data.prepare import prepare
from raydist.errors import CheckpointError, SpecError, UserError
from raydist.faults import Kill
from raydist.planner.estimate import estimate
from raydist.planner.facts import Activations, Machine, Peak
from raydist.planner.measure import Planner
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, ModelSpec, load, parse
from raydist.spec.lora import linear_names
from raydist.spec.training import LoraSpec
from raydist.storage import Storage
from raydist.worker import base_weights as shared
from raydist.worker import pretrained
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.build import build_model, build_optimizer
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.lora import A, B, LoraLinear, add, frozen_shards
from raydist.worker.metrics.flops import flops_per_token
from tests.exact import exact, weights
from tests.training import CONTEXT, GROUPED, VARIANTS, Trainer, alone, counted, mine, run, samples
from tests.worker.model.families import theirs

IDS, STEPS = 257, 6
CHANGES = {"vocab_size": IDS, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights, as `transformers` writes it."""
    folder = tmp_path_factory.mktemp("base")
    theirs("qwen3", **CHANGES).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of random weights."""
    folder = tmp_path_factory.mktemp("moe")
    theirs("qwen3_moe", **CHANGES, mlp_only_layers=[]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (folder / f"{i}.txt").write_text("".join(random.Random(i).choices("abcdefgh ", k=120)))
    prepare([str(folder)], str(folder / "tokens"), eval_fraction=0.2)
    return str(folder / "tokens")


def job(base: Path, tokens: str, folder: Path, lora: Any = None, **sections: Any) -> JobSpec:
    """A job that trains adapters on the weights of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {
        "model": {"hf": str(base), "context": 8, "lora": {"rank": 4, **(lora or {})}},
        "data": {"path": tokens},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "seed": 3},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 2, "keep": 10, "asynchronous": False},
        "eval": {"every": 3, "batches": 2},
        **sections,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return load(folder / "job.yaml")


def gradients(
    rank: Rank, spec: JobSpec, n: int = 8
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Three steps: losses, the last one's gradients, and the adapters after it."""
    meta = spec.parallel.strategy in ("zero3", "hsdp") or spec.parallel.pipeline > 1
    trainer = Trainer(rank, spec, full=n * CONTEXT, model=build_model(spec, IDS, meta))
    frozen = frozen_shards(trainer.model)
    if trainer.split:
        trainer.split.place(frozen)
    pretrained.load(spec.model, trainer.model, {**trainer.shards, **frozen}, IDS)
    trainer.strategy.updated()
    before = {name: shard.local.clone() for name, shard in frozen.items()}
    mesh = spec.parallel
    losses: list[float] = []
    found: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3):
        if step == 3:
            trainer.before_update = lambda: found.update(trainer.whole(grad=True))
        batches = mine(rank, *samples(n, seed=step), 2, mesh.tensor, mesh.pipeline, mesh.context)
        losses.append(trainer.step(step, batches, counted(batches), 1e-2, want_stop=False).loss)
    assert all(torch.equal(before[name], shard.local) for name, shard in frozen.items())
    assert all(shard.local.grad is None for shard in frozen.values())
    trainer.step.optimizer_hooks.close()
    return losses, found, trainer.whole()


def mesh_of(base: Path, folder: Path, world: int, parallel: Any, **more: Any) -> JobSpec:
    """A job of so many ranks, with an eps that leaves rounding errors small."""
    optim = {"lr": 1e-2, "eps": 1e-3, "clip": 0.5}
    return job(base, "any", folder, parallel=parallel, cluster={"workers": world}, optim=optim, **more)


MESHES: list[tuple[int, dict[str, Any]]] = [
    *[(2, VARIANTS[name]) for name in registry.names("parallel") if name not in GROUPED],
    *[(4, VARIANTS[variant]) for variant in GROUPED.values()],
    (2, {"strategy": "ddp", "tensor": 2}),
    (2, {"strategy": "ddp", "pipeline": 2}),
    (2, {"strategy": "zero1", "context": 2}),
    (4, {"strategy": "zero3", "tensor": 2}),
    (4, {"strategy": "zero2", "pipeline": 2}),
]


@pytest.mark.parametrize(("world", "parallel"), MESHES, ids=str)
def test_gradients_are_those_of_one_process(ranks: Any, base: Path, tmp_path: Path, world: int, parallel: Any) -> None:
    """Losses, each adapter's gradient and value; the base keeps its bits, and has no gradient."""
    one = gradients(alone(), mesh_of(base, tmp_path / "one", 1, {"strategy": "ddp"}))
    assert set(one[1]) == set(one[2])
    assert all(name.endswith((A, B)) for name in one[1])
    assert len(one[1]) == 2 * 2 * 7
    for losses, grads, values in run(ranks, gradients, world, mesh_of(base, tmp_path / "many", world, parallel)):
        assert losses == pytest.approx(one[0], rel=1e-5)
        for ours, right in ((grads, one[1]), (values, one[2])):
            assert ours.keys() == right.keys()
            for name, value in right.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=5e-6, msg=name)  # sums in another order


@pytest.mark.parametrize("parallel", [{"strategy": "ddp", "expert": 2}, {"strategy": "zero3", "expert": 2}], ids=str)
def test_frozen_experts_on_several_ranks(ranks: Any, moe: Path, tmp_path: Path, parallel: Any) -> None:
    """Attention has adapters; the experts, which have none, are split over the ranks."""
    one = gradients(alone(), mesh_of(moe, tmp_path / "one", 1, {"strategy": "ddp"}))
    for losses, grads, _ in run(ranks, gradients, 2, mesh_of(moe, tmp_path / "many", 2, parallel)):
        assert losses == pytest.approx(one[0], rel=1e-5)
        for name, value in one[1].items():
            torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=5e-6, msg=name)


def attempt(rank: Rank, spec: JobSpec, root: str, number: int, faults: Any = ()) -> str:
    """One attempt; rank 0 appends what it says to a file."""

    def push(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        with open(f"{root}/told.jsonl", "a") as file:
            file.writelines(json.dumps(each) + "\n" for each in [*records, *events])

    made = Job(spec, RunDir(f"{root}/run"), str(spec.data.path), number, STEPS, faults=faults)
    return train(made, rank, MonitorChannel(push, lambda: None) if rank.first else None).status


def rows(root: Path) -> list[list[Any]]:
    """The records of all steps, each from the last attempt that trained it."""
    told = [json.loads(line) for line in (root / "told.jsonl").read_text().splitlines()]
    found = {each["step"]: each for each in told if "samples_hash" in each}
    return exact(found[step] for step in sorted(found))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_killed_run_ends_with_the_same_bits(
    ranks: Any, base: Path, tokens: str, tmp_path: Path, strategy: str
) -> None:
    """SIGKILL of rank 1 in step 4; checkpoints hold adapters and their moments alone, and name what is frozen. Sharded: nothing,
    moments and gradients, parameters, too; each strategy without adapters: tests/worker/test_exactness.py."""
    spec = job(
        base, tokens, tmp_path / "job", {"dropout": 0.1}, parallel={"strategy": strategy}, cluster={"workers": 2}
    )
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert run(ranks, attempt, 2, spec, str(tmp_path / "whole"), 1) == ["finished"] * 2
    kill = (Kill(rank=1, step=4, phase="update").model_dump(mode="json"),)
    assert isinstance(ranks.run(attempt, 2, spec, str(tmp_path / "killed"), 1, kill)[1], ChildProcessError)
    assert run(ranks, attempt, 2, spec, str(tmp_path / "killed"), 2) == ["finished"] * 2
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert len(rows(tmp_path / "whole")) == STEPS
    one, other = (RunDir(str(tmp_path / name / "run")) for name in ("whole", "killed"))
    assert weights(one, STEPS) == weights(other, STEPS)
    found = manifest.read(other, STEPS)
    of_model = {n for n in found.tensors if n.startswith("model/")}
    assert of_model == {n for n in of_model if n.endswith((A, B))}
    assert len(of_model) == 2 * 2 * 7
    frozen = found.plain[BASE]["frozen"]
    assert "embedding.weight" in frozen
    assert not {f"model/{n}" for n in frozen} & set(found.tensors)
    parameters = {n for n, _ in build_model(spec, IDS).named_parameters()}
    assert parameters == {*frozen, *(n.removeprefix("model/") for n in of_model)}


def test_another_base_is_refused(ranks: Any, base: Path, tokens: str, tmp_path: Path) -> None:
    """One changed bit in the folder, and the run does not continue, which the driver finds before any worker starts; a copy at
    another place is the same base."""
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    spec = job(base, tokens, tmp_path / "job")
    moved = job(copy, tokens, tmp_path / "moved")
    run(None, attempt, 1, spec, str(tmp_path), 1)
    file = max(copy.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="has other weights than the adapters were trained on"):
        run(None, attempt, 1, moved, str(tmp_path), 2)
    newest = manifest.read_newest(RunDir(str(tmp_path / "run")))
    assert newest is not None
    with pytest.raises(UserError, match="has other weights than the adapters were trained on") as caught:
        base_weights.check_early(moved, newest)
    assert caught.value.exit_code == 2
    base_weights.check_early(spec, newest)
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert run(None, attempt, 1, moved, str(tmp_path), 3) == ["finished"]


def test_the_fingerprint_is_the_same_on_any_number_of_ranks(
    ranks: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever share of the files a rank reads."""
    assert run(ranks, fingerprint_on, 3, base) == [base_weights.fingerprint(Storage(base))] * 3


def fingerprint_on(rank: Rank, folder: Path) -> str:
    """On one rank."""
    return shared.fingerprint(Storage(folder), rank)


def test_weights_that_one_rank_cannot_read(ranks: Any, base: Path, tmp_path: Path) -> None:
    """Every rank ends with that rank's error, instead of waiting for it."""
    for end in ranks.run(unreadable_on_one, 2, base, tmp_path / "gone"):
        assert isinstance(end, UserError)
        assert "gone: has neither model.safetensors" in end.message


def unreadable_on_one(rank: Rank, folder: Path, gone: Path) -> str:
    """Rank 1 sees another folder."""
    return shared.fingerprint(Storage(gone if rank.rank else folder), rank)


def test_layers_for_further_tokens_get_no_adapters() -> None:
    """`transformers` and peft have no such layers."""
    options = {"num_nextn_predict_layers": 1}
    spec = ModelSpec(name="deepseek", layers=2, context=16, hf="any", vocab_size=50, lora=LoraSpec(), options=options)
    with torch.device("meta"):
        model = registry.load("model", "deepseek")(spec, 50)
        add(model, LoraSpec())
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in names} == {"blocks"}
    assert {n.removesuffix(f".{A}") for n in names if n.endswith(A)} == set(
        linear_names({name: tuple(p.shape) for name, p in model.named_parameters() if not name.endswith((A, B))})
    )


def test_a_frozen_weight_costs_four_flops(base: Path, tmp_path: Path) -> None:
    """No gradient is computed of it, so displayed MFU and plans count it with two thirds."""
    spec = job(base, "any", tmp_path)
    small = build_model(spec, IDS)
    whole = build_model(spec.model_copy(update={"model": spec.model.model_copy(update={"lora": None})}), IDS)
    frozen = sum(p.numel() for p in small.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in small.parameters() if p.requires_grad)
    assert flops_per_token(small, 8) == flops_per_token(whole, 8) - 2 * frozen + 6 * adapters


def test_a_plan_counts_adapters_alone_as_trained(base: Path, tmp_path: Path) -> None:
    """Gradients and optimizer state of a plan are those of the adapters, and so are copies in memory."""
    spec = job(base, "any", tmp_path)
    model = build_model(spec, IDS)
    planned = Planner(spec, IDS, "cpu").model()
    assert {p.name: p.trained for p in planned.params} == {n: p.requires_grad for n, p in model.named_parameters()}
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copy = estimate("ddp", spec, Machine(1, 1, "cpu"), planned, Activations(0, (Peak("loss", 0, 0, 0),))).copy
    steps = sum(p.requires_grad for p in model.parameters())  # of AdamW, a number a parameter
    assert copy == 4 * (3 * adapters + steps) + planned.buffers


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"targets": ["atention.q"]}, "no linear layer is named 'atention.q'\n  did you mean \"attention.q\"?"),
        ({"targets": ["head"]}, "no linear layer is named 'head'"),
    ],
)
def test_targets_that_name_nothing(base: Path, tokens: str, tmp_path: Path, lora: Any, says: str) -> None:
    """Refused before anything starts, with exit code 2."""
    with pytest.raises(UserError) as caught:
        preflight.check_early(job(base, tokens, tmp_path, lora), local=True)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_targets_choose_layers(base: Path, tokens: str, tmp_path: Path) -> None:
    """By the ends of their names; and adapters need weights that they are for."""
    spec = job(base, tokens, tmp_path, {"targets": ["attention.[qv]", "blocks.0.mlp.up"]})
    chosen = [n for n, m in build_model(spec, IDS).named_modules() if isinstance(m, LoraLinear)]
    assert chosen == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attention.q", "attention.v", "mlp.up")][:5]
    with pytest.raises(SpecError, match=r"model\.lora: needs the weights that the adapters are for; set model\.hf"):
        parse({"model": {"lora": {}}, "data": {"source": "a"}, "train": {"steps": 1}})


def test_a_rank_without_an_adapter_is_refused(base: Path, tokens: str, tmp_path: Path) -> None:
    """As a pipeline stage of layers that have none: with the remedy, on every rank of that stage."""
    none: Any = None
    with pytest.raises(UserError, match=r"rank 0 has no parameter that is trained\n.*model.lora.targets"):
        build_optimizer(job(base, tokens, tmp_path), alone(), none, {})
