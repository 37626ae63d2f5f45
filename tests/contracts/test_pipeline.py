"""Pipelines of every strategy: the bits of one process, whatever the schedule; with tensor parallel layers its gradients.

Over a minute: every strategy and schedule on two and four ranks.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import json
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.errors import UserError
from raydist.ipc import heartbeat
from raydist.ipc.stack_dump import waits
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.metrics.collective_counters import CollectiveCounters
from raydist.worker.parallel._model_graph import blocks_of
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._pipeline_passes import Passes
from raydist.worker.parallel._stages import cut_model
from raydist.worker.pipeline_schedule import Action, actions, cut, schedule, timeline, way
from raydist.worker.step import StepReport
from tests.training import CONTEXT, GROUPED, MODEL, VOCAB, Trainer, alone, counted, job, mesh_job, mine, run, samples

DEEP = {**MODEL, "layers": 4, "heads": 4, "width": 32, "tie_embeddings": False, "qk_norm": True}
N, MICRO = 7, 2
"""Samples of a global batch and of a micro-batch: with accumulation, a short micro-batch, and masked targets."""
OPTIM = {"lr": 1e-2, "eps": 1e-3}
UNCLIPPED = {"optim": {**OPTIM, "clip": 0}}
"""The factor of a clip has the last bits of the norm."""
TWO = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "chunks": 2}

Result = tuple[list[StepReport], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], float, int]
"""Reports of two steps; first weights; gradients of the first step, clipped; weights after both; the loss of held-out samples; the
most micro-batches in flight."""


def train(rank: Rank, spec: JobSpec, n: int = N) -> Result:
    """Two steps; all ranks return the same, but for the last value."""
    trainer = Trainer(rank, spec, full=n * CONTEXT)
    first, gradients = trainer.whole(), dict[str, torch.Tensor]()
    mesh = (spec.parallel.tensor, spec.parallel.pipeline)
    reports = []
    for s in (1, 2):
        trainer.before_update = (lambda: gradients.update(trainer.whole(grad=True))) if s == 1 else (lambda: None)
        batches = mine(rank, *samples(n, seed=s), MICRO, *mesh)
        reports.append(trainer.step(s, batches, counted(batches), 1e-2, want_stop=False))
    loss, _ = evaluate(
        trainer.mesh, trainer.strategy, trainer.precision, mine(rank, *samples(n, seed=99), MICRO, *mesh)
    )
    trainer.step.optimizer_hooks.close()
    in_flight = trainer.strategy.in_flight if isinstance(trainer.strategy, Pipeline) else 0
    return reports, first, gradients, trainer.whole(), loss, in_flight


@functools.cache
def reference(
    ranks: Any, world: int = 1, tied: bool = False, strategy: str = "ddp", clip: float = 0.5, dropout: float = 0.0
) -> Result:
    """One process; or data parallel ranks, with the micro-batches of as many replicas."""
    spec = job(strategy, {**DEEP, "tie_embeddings": tied, "dropout": dropout}, optim={**OPTIM, "clip": clip})
    return run(ranks, train, world, spec)[0]


def same_bits(got: Result, right: Result) -> None:
    """Losses, first weights, gradients, weights and held-out loss; the norm within 1e-6: it is summed in another order."""
    for ours, theirs in zip(got[0], right[0], strict=True):
        assert (ours.loss, ours.tokens) == (theirs.loss, theirs.tokens)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert got[4] == right[4]
    for ours_of, theirs_of in zip(got[1:4], right[1:4], strict=True):
        assert ours_of.keys() == theirs_of.keys()
        assert [name for name, value in theirs_of.items() if not torch.equal(ours_of[name], value)] == []


@pytest.mark.parametrize("fields", [TWO, INTERLEAVED, {"pipeline": 4}, {"pipeline": 2, "pipeline_cut": [1, 3]}])
def test_a_pipeline_changes_no_number(ranks: Any, fields: dict[str, Any]) -> None:
    """One replica: the loss of both steps, all gradients and weights. A rank has no more in flight than the schedule says."""
    for rank, got in enumerate(run(ranks, train, fields["pipeline"], mesh_job("ddp", 1, DEEP, fields, **UNCLIPPED))):
        same_bits(got, reference(ranks, clip=0))
        assert got[5] <= (fields["pipeline"] - rank) * fields.get("chunks", 1) + fields.get("chunks", 1) - 1


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        *((name, TWO) for name in registry.names("parallel") if name not in GROUPED),
        *((name, INTERLEAVED) for name in ("zero1", "zero3")),
    ],
)
def test_each_strategy_runs_in_each_stage(ranks: Any, strategy: str, fields: dict[str, Any]) -> None:
    """dp 2 x pipeline 2: the numbers of two data parallel ranks with the same strategy."""
    for got in run(ranks, train, 4, mesh_job(strategy, 1, DEEP, fields, **UNCLIPPED)):
        same_bits(got, reference(ranks, 2, strategy=strategy, clip=0))


@pytest.mark.parametrize("name", registry.names("optimizer"))
def test_each_optimizer_in_each_stage(ranks: Any, name: str) -> None:
    """Also those that need whole matrices: a stage has them."""
    optim = {"name": name, "lr": 1e-2, "clip": 0}
    (right,) = run(ranks, train, 1, job("ddp", DEEP, optim=optim))
    for got in run(ranks, train, 2, mesh_job("ddp", 1, DEEP, TWO, optim=optim)):
        same_bits(got, right)


def test_hsdp_in_each_stage(ranks: Any) -> None:
    """Copies of pairs: dp 4 x pipeline 2."""
    variant = GROUPED["hsdp"]
    for got in run(ranks, train, 8, mesh_job(variant, 1, DEEP, TWO, cluster={"workers": 8})):
        near(got, reference(ranks), 3e-6)


def near(got: Result, right: Result, far: float) -> None:
    """Each gradient within `far` of its largest element; the norm and the losses within 1e-6."""
    for ours, theirs in zip(got[0], right[0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.tokens == theirs.tokens
    assert got[0][0].grad_norm == pytest.approx(right[0][0].grad_norm, rel=1e-6)
    assert all(torch.equal(got[1][name], value) for name, value in right[1].items())
    for name, value in right[2].items():
        assert float((got[2][name] - value).abs().max() / value.abs().max()) <= far, name


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("zero1", 4), ("zero2", 4), ("zero3", 4)])
def test_tied_weights_of_the_first_and_the_last_stage(ranks: Any, strategy: str, world: int) -> None:
    """Their gradient is the sum of both stages', in another order than in one process: 3e-6. It counts once in the norm."""
    for got in run(ranks, train, world, mesh_job(strategy, 1, {**DEEP, "tie_embeddings": True}, TWO)):
        near(got, reference(ranks, tied=True), 3e-6)


def groups_after(rank: Rank, spec: JobSpec) -> tuple[Result, int]:
    """And the number of torch's groups."""
    return train(rank, spec), len(dist.distributed_c10d._world.pg_names)


def test_stages_between_tied_ones_make_as_many_groups(ranks: Any) -> None:
    """By their number torch names the next group of all stages: with another one, ranks would wait for each other for ever."""
    found = run(ranks, groups_after, 3, mesh_job("ddp", 1, {**DEEP, "tie_embeddings": True}, {"pipeline": 3}))
    for got, _ in found:
        near(got, reference(ranks, tied=True), 3e-6)
    assert len({count for _, count in found}) == 1


@pytest.mark.parametrize(
    ("strategy", "world", "tied", "fields"),
    [("ddp", 4, False, TWO), ("ddp", 4, True, TWO), ("zero1", 4, False, INTERLEAVED), ("zero3", 8, True, TWO)],
)
def test_with_tensor_parallel_layers(ranks: Any, strategy: str, world: int, tied: bool, fields: dict[str, Any]) -> None:
    """Tensor 2 x pipeline 2, with one and two replicas."""
    spec = mesh_job(strategy, 2, {**DEEP, "tie_embeddings": tied}, fields, cluster={"workers": world})
    for got in run(ranks, train, world, spec):
        near(got, reference(ranks, tied=tied), 3e-6)


@pytest.mark.parametrize(
    ("fields", "train_fields"), [(TWO, {}), ({"pipeline": 4}, {}), (INTERLEAVED, {"checkpoint_activations": "full"})]
)
def test_dropout_draws_the_masks_of_one_process(ranks: Any, fields: dict[str, Any], train_fields: Any) -> None:
    """Each block's masks belong to the micro-batch and the block, whichever rank has it, and whatever it computed in between."""
    spec = mesh_job("ddp", 1, {**DEEP, "dropout": 0.2}, fields, train=train_fields, **UNCLIPPED)
    for got in run(ranks, train, fields["pipeline"], spec):
        same_bits(got, reference(ranks, clip=0, dropout=0.2))


def test_dropout_with_replicas_and_tensor_parallel_layers(ranks: Any) -> None:
    """dp 2 x pipeline 2, and tensor 2 x pipeline 2: the masks of one process, whose micro-batches are the same."""
    model = {**DEEP, "dropout": 0.2}
    for tensor, world in ((1, 4), (2, 4)):
        for got in run(ranks, train, world, mesh_job("zero2", tensor, model, TWO)):
            near(got, reference(ranks, dropout=0.2), 3e-6)


def test_fewer_micro_batches_than_stages(ranks: Any) -> None:
    """One micro-batch on four stages."""

    def wide(fields: dict[str, Any]) -> JobSpec:
        return mesh_job("ddp", 1, DEEP, fields, train={"micro_batch": 8}, **UNCLIPPED)

    for got in run(ranks, train_whole, 4, wide({"pipeline": 4})):
        assert got == train_whole(alone(), wide({}))


def train_whole(rank: Rank, spec: JobSpec) -> list[float]:
    """The losses of two steps with one micro-batch each, the second one short."""
    trainer, losses = Trainer(rank, spec, full=N * CONTEXT), []
    for s, n in ((1, N), (2, 3)):
        batches = mine(rank, *samples(n, seed=s), 8, 1, spec.parallel.pipeline)
        losses.append(trainer.step(s, batches, counted(batches), 1e-2, want_stop=False).loss)
    return losses


def packed(rank: Rank, spec: JobSpec) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights after a step on samples of three documents each."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], device=rank.device)
    batches = [
        replace(batch, documents=documents.expand_as(batch.tokens))
        for batch in mine(rank, *samples(N, seed=1), MICRO, 1, spec.parallel.pipeline)
    ]
    loss = trainer.step(1, batches, counted(batches), 1e-2, want_stop=False).loss
    return loss, trainer.whole()


def test_packed_documents_and_recomputed_activations(ranks: Any) -> None:
    """Each stage has the documents, and positions and masks of its own."""
    saving = {"train": {"checkpoint_activations": "full"}}
    loss, weights = packed(alone(), job("ddp", DEEP, **UNCLIPPED))
    for got in run(ranks, packed, 2, mesh_job("ddp", 1, DEEP, INTERLEAVED, **saving, **UNCLIPPED)):
        assert got[0] == loss
        assert all(torch.equal(got[1][name], value) for name, value in weights.items())


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks_of", [2, 3, 4])
def test_every_schedule_ends(ranks_of: int, chunks: int) -> None:
    """Each pass comes once, after those that it needs, on every rank; for any number of micro-batches."""
    last = ranks_of * chunks - 1
    for n in range(1, 10):
        left = [actions(rank, ranks_of, chunks, n) for rank in range(ranks_of)]
        assert all(len(order) == 2 * n * chunks for order in left)
        done: set[tuple[str, int, int]] = set()
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(left):
                while order:
                    at = order[0].chunk * ranks_of + rank
                    if order[0].kind == "forward":
                        needs = {("forward", at - 1, order[0].index)} if at else set()
                    else:
                        needs = {("backward", at + 1, order[0].index)} if at < last else set()
                        needs |= {("forward", at, order[0].index)}
                    if not needs <= done:
                        break
                    done.add((order[0].kind, at, order[0].index))
                    order.pop(0)
                    moved = True
        assert not any(left), f"{n} micro-batches: no rank can go on"


def test_receives_start_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On gloo two actions before their use, so that the message that a receive has started arrives before the sender needs it."""
    order, started, after = actions(0, 2, 2, 4), set[Action](), list[int]()

    def passes(_: Passes, action: Action) -> None:
        after.append(len(started & {*order[order.index(action) + 1 :]}))

    monkeypatch.setattr(Passes, "_receive", lambda _, action: started.add(action))
    for kind in ("_forward", "_backward"):
        monkeypatch.setattr(Passes, kind, passes)
    work: Any = SimpleNamespace(around=lambda index: nullcontext())
    none: Any = None
    Passes([], none, None, torch.device("cpu"), 1, order, [none] * 4, work)()
    assert after == [2] * (len(order) - 2) + [1, 0]


Transfer = tuple[int, int, int]
"""The stage that sends, the one that receives, the micro-batch."""


def transfers(rank: int, ranks_of: int, chunks: int, n: int, backward: bool) -> list[tuple[str, Transfer]]:
    """What a rank starts and waits for, in the order of worker/parallel/_pipeline_passes.py."""
    order = actions(rank, ranks_of, chunks, n, backward)

    def between(action: Action, after: bool) -> list[Transfer]:
        own = action.chunk * ranks_of + rank
        other = own + (1 if after == (action.kind == "forward") else -1)
        pair = (own, other) if after else (other, own)
        return [(*pair, action.index)] if 0 <= other < ranks_of * chunks else []

    made: list[tuple[str, Transfer]] = []
    for at, action in enumerate(order):
        starts = [t for one in order[at : at + 2] for t in between(one, after=False)]
        made += [("start", t) for t in starts if ("start", t) not in made]
        made += [("wait", t) for t in between(action, after=False)]
        made += [("start", t) for t in between(action, after=True)]
    return made


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks_of", [2, 3, 4, 5])
def test_no_transfer_waits_for_one_that_waits_for_it(ranks_of: int, chunks: int) -> None:
    """For any number of micro-batches, in evaluations too, where each rank makes the transfers of a way one by one (NCCL)."""
    for n, backward in itertools.product(range(1, 12), (True, False)):
        left = [transfers(rank, ranks_of, chunks, n, backward) for rank in range(ranks_of)]
        queues: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        arrived: set[Transfer] = set()
        moved = True
        while moved:
            moved = False
            for rank, steps in enumerate(left):
                while steps:
                    what, transfer = steps[0]
                    source, target, _ = transfer
                    on = way(source, target, ranks_of)
                    if what == "start":
                        queues[rank, on].append(transfer)
                    ends = [queues[stage % ranks_of, on] for stage in (source, target)]
                    while all(ends) and ends[0][0] == ends[1][0]:
                        arrived.add(ends[0].pop(0))
                        ends[1].pop(0)
                    if what == "wait" and transfer not in arrived:
                        break
                    steps.pop(0)
                    moved = True
        assert not any(left), f"{n} micro-batches, backward {backward}: no rank can go on"


def test_how_a_model_is_cut() -> None:
    """The slowest stage is as fast as possible; then the largest one as small as possible."""
    assert cut([1, 1, 1, 1], [1, 1, 1, 1], 2) == [2, 2]
    assert cut([1, 1, 1, 4], [1, 1, 1, 1], 2) == [3, 1]
    assert cut([2, 2, 2, 2, 2], [9, 1, 1, 1, 1], 3) == [1, 2, 2]
    assert cut([1, 1], [1, 1], 2) == [1, 1]


def test_the_bubble_of_a_schedule() -> None:
    """Equal stages: the published formulas. A stage of twice the time: all wait for it. A transfer delays only what needs it."""
    assert timeline([1.0] * 4, [2.0] * 4, 4, 9).bubble == pytest.approx(3 / 12)
    assert timeline([1.0] * 12, [2.0] * 12, 4, 8).bubble == pytest.approx(3 / (3 * 8 + 3))
    uneven = timeline([1.0, 2.0], [1.0, 2.0], 2, 10)
    # The second stage computes 10 x 4; it begins after one forward pass, and the first ends one backward pass after it.
    assert (uneven.ends, uneven.busy) == ((42.0, 41.0), (20.0, 40.0))
    assert uneven.bubble == pytest.approx(1 - 60 / 84)
    late = timeline([1.0, 1.0], [1.0, 1.0], 2, 10, transfer=[0.5])
    assert max(late.ends) > max(timeline([1.0, 1.0], [1.0, 1.0], 2, 10).ends)


def test_a_link_carries_one_transfer_after_another() -> None:
    """On a slow link a step takes as long as all transfers of one direction: of four stages on two ranks three for each
    micro-batch, of two stages one."""
    slow = timeline([1.0] * 4, [1.0] * 4, 2, 8, transfer=[100.0] * 3)
    assert 3 * 8 * 100 <= max(slow.ends) < 3 * 8 * 100 + 6 * 100
    # Both directions at once: forward of the next micro-batches beside backward of the first ones.
    both = timeline([1.0] * 2, [1.0] * 2, 2, 8, transfer=[100.0])
    assert 8 * 100 < max(both.ends) < 11 * 100


def test_what_a_run_says_of_its_schedule() -> None:
    """The bubble of the cut as it is; with few micro-batches, what would help: a micro-batch that makes enough of them, or the
    smallest, and more chunks where there are blocks for them."""
    few = schedule([2, 2, 2, 2], [0.25] * 4, 4, sequences=16, micro_batch=2)
    assert (few["micro_batches"], few["bubble"]) == (8, pytest.approx(3 / 11))
    assert few["better"] == [
        {"set": "train.micro_batch: 1", "bubble": pytest.approx(3 / 19)},
        {"set": "parallel.chunks: 2", "bubble": pytest.approx(3 / 19)},
    ]
    assert [one["set"] for one in schedule([1, 1], [0.5] * 2, 2, 32, 8)["better"]] == ["train.micro_batch: 4"]
    assert schedule([1, 1], [0.5] * 2, 2, 8, 1)["better"] == []
    uneven = schedule([1, 1], [0.2, 0.8], 2, 64, 1)
    assert uneven["bubble"] == pytest.approx(timeline([0.2, 0.8], [0.4, 1.6], 2, 64).bubble)
    assert uneven["bubble"] > 0.35


def test_an_own_sequential_is_cut_by_itself(ranks: Any) -> None:
    """Names and values are those of the whole; the loss is that of one process."""
    right = own(alone(), job("ddp", MODEL, **UNCLIPPED))
    for got in run(ranks, own, 2, mesh_job("ddp", 1, MODEL, TWO, **UNCLIPPED)):
        assert got == right


def own(rank: Rank, spec: JobSpec) -> float:
    """The loss of the second step of an nn.Sequential."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, VOCAB))
    trainer, loss = Trainer(rank, spec, N * CONTEXT, model), 0.0
    for s in (1, 2):
        batches = mine(rank, *samples(N, seed=s), MICRO, 1, spec.parallel.pipeline)
        loss = trainer.step(s, batches, counted(batches), 1e-2, want_stop=False).loss
    return loss


class _Lost(nn.Module):
    """Its stages leave the head out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        (nn.Linear(2, 2), TWO, "Linear has no stage(first, last), and is no nn.Sequential"),
        (_Lost(), TWO, "_Lost has no stage"),
        (nn.Sequential(nn.Linear(2, 2)), TWO, "2 stages (pipeline x chunks), and the model has 1 blocks"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), {**TWO, "pipeline_cut": [1, 2]}, "has 3 blocks in all"),
    ],
)
def test_what_cannot_be_cut_is_one_clear_error(model: nn.Module, fields: dict[str, Any], says: str) -> None:
    """It says what the model lacks, or counts its blocks."""
    with pytest.raises(UserError) as caught:
        cut_model(model, mesh_job("ddp", 1, MODEL, fields))
    assert says in caught.value.message


def test_stages_keep_the_names() -> None:
    """The parts of the gpt have each parameter once, under its name; of tied weights both ends have the first name."""
    for tied in (False, True):
        spec = mesh_job("ddp", 1, {**DEEP, "tie_embeddings": tied}, {"pipeline": 4})
        model: nn.Module = registry.load("model", "gpt")(spec.model, VOCAB)
        parts = cut_model(model, spec).parts(model)
        names = [name for part in parts for name, _ in part.named_parameters()]
        assert len(names) - len(set(names)) == tied
        assert set(names) == {name for name, _ in model.named_parameters()}
        assert [len(blocks_of(part)) for part in parts] == [1, 1, 1, 1]


def stuck(rank: Rank, spec: JobSpec, folder: str) -> str | None:
    """Rank 0 stays in its first forward pass until rank 1's stack says that it waits, as read from another thread. Rank 1's phase
    then."""
    trainer, seen, phases = Trainer(rank, spec, full=N * CONTEXT), Path(folder, "seen"), list[str]()
    descriptor = heartbeat.create()
    trainer.step.heartbeat = heartbeat.Heartbeat(descriptor)
    counters = CollectiveCounters(rank.device)
    counters.install()
    main = threading.get_ident()

    def until_seen(*_: Any) -> None:
        while not seen.exists():
            time.sleep(0.01)

    def look() -> None:
        while not phases:
            with open(f"{folder}/stacks", "w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                if waits(file.read(), main):
                    phases.append(heartbeat.Reader(descriptor).look().phase)
        seen.touch()

    if rank.rank == 0:
        trainer.model.register_forward_pre_hook(until_seen)
    else:
        assert not waits("", main)
        threading.Thread(target=look, daemon=True).start()
    batches = mine(rank, *samples(N), MICRO, 1, 2)
    trainer.step(1, batches, counted(batches), 1e-2, want_stop=False)
    counters.close()
    return phases[0] if phases else None


def test_a_stage_that_waits_for_its_first_micro_batch(ranks: Any, tmp_path: Path) -> None:
    """Its stack says so, so the verdict on a hang does not name it (tests/diagnosis/test_hang.py); and it is in a phase
    with a deadline."""
    assert run(ranks, stuck, 2, mesh_job("ddp", 1, DEEP, TWO), str(tmp_path)) == [None, "forward"]
    assert "forward" not in heartbeat.UNLIMITED


@functools.cache
def plain(ranks: Any, strategy: str, world: int, sections: str) -> Result:
    """Data parallel ranks, without a pipeline. `sections`: in JSON."""
    made: Result = ranks.run(train, world, job(strategy, DEEP, **UNCLIPPED, **json.loads(sections)))[0]
    return made


@pytest.mark.parametrize(
    ("strategy", "replicas", "sections"),
    [
        ("zero3", 2, {"precision": {"params": "fp16", "loss_scale": {"initial": 1024}}}),
        ("zero2", 2, {"precision": "bf16"}),
    ],
)
def test_formats_keep_the_bits(ranks: Any, strategy: str, replicas: int, sections: dict[str, Any]) -> None:
    """Two stages: the numbers of as many replicas without a pipeline, in the same format."""
    right = plain(ranks, strategy, replicas, json.dumps(sections))
    for got in run(ranks, train, 2 * replicas, mesh_job(strategy, 1, DEEP, TWO, **UNCLIPPED, **sections)):
        same_bits(got, right)


def test_compiled_blocks_keep_the_bits(ranks: Any) -> None:
    """Two stages of a block each: the bits of one rank with the same compiled blocks. It has a process, too, because warnings of
    torch.compile fail this one. Equal micro-batches and blocks without attention, because to compile takes seconds."""
    fields: dict[str, Any] = {**UNCLIPPED, "train": {"compile": "blocks"}}
    model, n = {"name": "mlp", "layers": 2, "width": 16, "context": CONTEXT}, 8
    (right,) = ranks.run(train, 1, job("ddp", model, **fields), n)
    for got in run(ranks, train, 2, mesh_job("ddp", 1, model, TWO, **fields), n):
        same_bits(got, right)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("zero1", {"optimizer": "nvme"}), ("zero3", {"optimizer": "cpu"}), ("zero3", {"parameters": "cpu"})],
)
def test_the_state_of_a_stage_off_the_device(
    ranks: Any, tmp_path: Path, strategy: str, offload: dict[str, str]
) -> None:
    """The optimizer in a file or in host memory, or all of the state there, and some activations computed again: losses and weights
    of a run without. The optimizer's gradients are scaled during the update."""
    sections = {"offload": {**offload, "path": str(tmp_path)}, "train": {"checkpoint_activations": "selective"}}
    right = plain(ranks, strategy, 2, "{}")
    for got in run(ranks, train, 4, mesh_job(strategy, 1, DEEP, INTERLEAVED, **sections, **UNCLIPPED)):
        assert [report.loss for report in got[0]] == [report.loss for report in right[0]]
        assert [name for name, value in right[3].items() if not torch.equal(got[3][name], value)] == []
        assert got[4] == right[4]
