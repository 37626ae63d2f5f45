"""The whole loop on real ranks with `data.batching`: same samples and losses whatever the ranks and the padding, same bits after a
kill. Documents have a long tail of lengths, so micro-batches have many shapes.

Over a minute: every strategy on several numbers of ranks, and five meshes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import registry
from raydist.data.prepare import prepare
from raydist.faults import Kill
from raydist.worker.distributed import Rank
from tests.training import run, without_kernels
from tests.worker.test_exactness import PLAIN, STEPS, Run, assert_same, attempt

BATCHING = {"max_tokens": 24, "multiple": 4, "global_tokens": 72}
ALONE = {**BATCHING, "max": 1, "multiple": 1}
"""Each document is a micro-batch of its own, without padding."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """90 documents of 1 to 33 bytes, most of them short; a fifth is held out. A context of 8 splits every fourth."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(5)
    texts = ["".join(choose.choices("abcdefgh ", k=min(int(choose.paretovariate(0.9)), 33))) for _ in range(90)]
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(folder / "all.jsonl")], str(folder / "tokens"), eval_fraction=0.2, shard_tokens=100)
    return str(folder / "tokens")


def run_of(
    ranks: Any, dataset: str, root: Path, strategy: str, batching: Any = BATCHING, model: Any = PLAIN, **sections: Any
) -> Run:
    """A run with batching."""
    sections = {"data": {"path": dataset, "batching": batching}, **sections}
    return Run(ranks, dataset, root, strategy, model, sections)


def assert_equal(one: Run, other: Run) -> None:
    """The same samples and tokens in every step; losses within 1e-4 relative, norms within 1e-3 (float32 sums in another order)."""
    rows, expected = one.rows(), other.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["samples_hash"] for row in rows] == [row["samples_hash"] for row in expected]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    for row, same in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(same["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-3)
    last = [[(e["step"], e["tokens"]) for e in each.told("eval")][-1] for each in (one, other)]
    assert last[0] == last[1]
    losses = [each.told("eval")[-1]["loss"] for each in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture(scope="module")
def unpadded(ranks: Any, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process that trains one document at a time."""
    made = run_of(ranks, dataset, tmp_path_factory.mktemp("unpadded"), "ddp", ALONE)
    assert made.train(1) == "finished"
    return made


@pytest.mark.parametrize("strategy", registry.names("parallel"))
def test_any_number_of_ranks(ranks: Any, dataset: str, unpadded: Run, tmp_path: Path, strategy: str) -> None:
    """On 2 ranks to step 4, on 3 to step 8, then on 1: the samples, losses and norms of one process without padding. With hsdp on
    2, 4 and 2, whole groups."""
    made = run_of(ranks, dataset, tmp_path / "made", strategy)
    other = 4 if strategy == "hsdp" else 3
    assert [made.train(2, 4), made.train(other, 8), made.train(2 if strategy == "hsdp" else 1)] == [
        "paused",
        "paused",
        "finished",
    ]
    assert_equal(made, unpadded)


def test_any_mesh(ranks: Any, dataset: str, unpadded: Run, tmp_path: Path) -> None:
    """Tensor, context and pipeline parallel, alone and with replicas, one after another in a run: sequences are padded to what the
    ranks can share, and stages send each other micro-batches of changing shapes."""
    made = run_of(ranks, dataset, tmp_path / "made", "zero1", {**BATCHING, "longest": 8})
    meshes: list[tuple[int, int, dict[str, int]]] = [
        (2, 2, {"pipeline": 2}),
        (2, 6, {"tensor": 2}),
        (2, 8, {"context": 2}),
        (4, 10, {"tensor": 2, "pipeline": 2}),
        (4, STEPS, {"context": 2, "pipeline": 2}),
    ]
    for world, until, made.mesh in meshes:
        made.train(world, until)
    assert_equal(made, unpadded)


def test_experts_do_not_count_padding(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """A model with experts, a bias that follows their loads and a balance loss: on dp 2, with experts on both ranks, and in a
    tensor group, the losses of one process without padding, and its loads in each step: two experts of each token. Of a token
    whose experts are nearly as good, rounding may choose another one. Each step's biases are those before it, moved by its loads,
    also across the restarts. With AdamW's usual eps the update of a gradient of nearly zero would have the sign of its rounding
    error."""
    optim = {"lr": 1e-2, "eps": 1e-3}
    sparse = {**PLAIN, "name": "tests.sparse:build", "options": {"bias_rate": 0.01, "balance": 0.05}}
    alone = run_of(ranks, dataset, tmp_path / "alone", "ddp", ALONE, sparse, optim=optim)
    assert alone.train(1) == "finished"
    made = run_of(ranks, dataset, tmp_path / "made", "zero1", BATCHING, sparse, optim=optim)
    for until, made.mesh in ((5, {}), (9, {"expert": 2}), (STEPS, {"tensor": 2})):
        made.train(2, until)
    assert_equal(made, alone)
    assert [row["expert_imbalance"] for row in made.rows()] == [row["expert_imbalance"] for row in alone.rows()]
    bias = torch.zeros(1, 8)
    for row, whole in zip(made.rows(), alone.rows(), strict=True):
        assert row["expert_bias"] == bias.tolist()
        loads = torch.tensor(row["expert_loads"])
        assert loads.sum(1).tolist() == [2 * row["tokens"]]
        assert (loads - torch.tensor(whole["expert_loads"])).abs().sum(1).max() <= 2, "one token"
        bias += 0.01 * torch.sign(loads.double().mean(1, keepdim=True) - loads).float()


@pytest.mark.parametrize(("strategy", "lengths"), [("ddp", None), ("zero3", 2)])
def test_killed_ranks_leave_no_trace(
    ranks: Any, dataset: str, tmp_path: Path, strategy: str, lengths: int | None
) -> None:
    """SIGKILL of rank 1 in step 5, in the middle of an epoch, and a pause at step 8: the run ends with the bits of an undisturbed
    one, dropout included. With few shapes, too."""
    batching = {**BATCHING, "lengths": lengths}
    undisturbed = run_of(ranks, dataset, tmp_path / "undisturbed", strategy, batching, {})
    assert undisturbed.train() == "finished"
    killed = run_of(ranks, dataset, tmp_path / "killed", strategy, batching, {})
    killed.die([Kill(rank=1, step=5, phase="backward").model_dump(mode="json")], guilty=1)
    assert [killed.train(until=8), killed.train()] == ["paused", "finished"]
    assert_same(killed, undisturbed)
    notes = [note["text"] for note in undisturbed.told("note")]
    assert any("are longer than 8 tokens, and are split into" in note for note in notes)
    assert any("micro-batches have" in note and "shapes" in note for note in notes) == (lengths is not None)


def counting(rank: Rank, *arguments: Any) -> tuple[str, int]:
    """An attempt; and how many graphs it has compiled."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with without_kernels():
        return attempt(rank, *arguments), counters["stats"]["unique_graphs"]


def test_a_compiled_model_has_few_shapes(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """`train.compile: blocks` with two lengths, and one or two rows: the losses of the model that is not compiled, and on each rank
    a graph of the block and one of the head for each of the 4 shapes. One block, no evaluation, and without compiled kernels: to
    compile takes seconds."""
    batching = {"max_tokens": 16, "max": 2, "lengths": 2, "multiple": 4, "global_tokens": 72}
    made = {}
    for compiled in (False, "blocks"):
        sections = {
            "data": {"path": dataset, "batching": batching},
            "train": {"compile": compiled},
            "eval": {"every": None},
        }
        one = made[compiled] = Run(ranks, dataset, tmp_path / str(compiled), "zero2", {**PLAIN, "layers": 1}, sections)
        for status, graphs in run(ranks, counting, 2, *one._arguments(STEPS)):
            assert (status, graphs) == ("finished", 8 if compiled else 0)
    (note,) = [note["text"] for note in made["blocks"].told("note") if "shapes" in note["text"]]
    assert "4 shapes" in note
    for row, same in zip(made["blocks"].rows(), made[False].rows(), strict=True):
        assert row["samples_hash"] == same["samples_hash"]
        assert row["loss"] == pytest.approx(same["loss"], rel=1e-5)  # kernels that sum in another order


def test_sequences_of_a_global_batch(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Without `global_tokens` a step has train.global_batch sequences, and the last one of an epoch fewer; on 1 and 3 ranks."""
    one, three = (
        run_of(ranks, dataset, tmp_path / str(world), "ddp", {"max_tokens": 24, "longer": "cut"}) for world in (1, 3)
    )
    assert [one.train(1), three.train(3)] == ["finished", "finished"]
    assert_equal(three, one)
