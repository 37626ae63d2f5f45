"""Replicas that train apart, and outer steps: the same as a loop in plain torch, and the same bits after a restart.

Over a minute: replicas of one rank and of two, four runs that are killed, and their undisturbed twins.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from raydist import registry
from raydist.checkpoint import manifest
from raydist.errors import SpecError, UserError
from raydist.faults import FlipBit, Kill
from raydist.run.directory import RunDir
from raydist.spec import CommSpec, JobSpec, load
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.comm.outer.hook import cut_evenly
from raydist.worker.comm.outer.schedule import Schedule
from raydist.worker.comm.outer.state import OuterState
from raydist.worker.distributed import Rank
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard
from raydist.worker.step import loss_sum
from tests.training import CONTEXT, MODEL, VOCAB, Trainer, counted, gathered, job, mesh_job, mine, run, samples
from tests.worker.checkpoint.test_extra_state import saver_of
from tests.worker.test_exactness import Run, assert_same, dataset

__all__ = ["dataset"]

N, MICRO, TOTAL, REPLICAS = 8, 2, 8, 2
SIZES = [N, N, N, 1, N, N, N, N]
"""Sequences of the batches. One has a single sequence: a replica then has none."""
MODEL_OF = {**MODEL, "vocab_size": 16, "hidden": 32}
STREAMING = {"every": 4, "fragments": 2, "delay": 1}
Weights = dict[str, Tensor]


def spec_of(strategy: str, comm: dict[str, Any], tensor: int = 1, **pipeline: Any) -> JobSpec:
    """A job of TOTAL steps."""
    optim = {"lr": 1e-2, "clip": 0.5, "eps": 1e-3}
    return mesh_job(strategy, tensor, MODEL_OF, pipeline, comm=comm, train={"steps": TOTAL}, optim=optim)


def batches_of(rank: Rank, step: int, tensor: int = 1, pipeline: int = 1) -> Any:
    return mine(rank, *samples(SIZES[step - 1], seed=step), MICRO, tensor, pipeline)


def steps(trainer: Trainer, first: int, last: int) -> list[tuple[float, float]]:
    """Trains these steps, as the loop does. The reports' losses and norms."""
    found = []
    parallel = trainer.spec.parallel
    for step in range(first, last + 1):
        batches = batches_of(trainer.rank, step, parallel.tensor, parallel.pipeline)
        report = trainer.step(step, batches, counted(batches), 1e-2, want_stop=False)
        found.append((report.loss, report.grad_norm))
        if trainer.outer is not None and trainer.outer.stepped(step, lambda: None):
            trainer.strategy.updated()
    return found


def trained(rank: Rank, spec: JobSpec) -> Any:
    """Losses and norms; this rank's weights after the last step; and what an outer step cost."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    reports = steps(trainer, 1, TOTAL)
    return reports, trainer.whole(), trainer.outer and trainer.outer.last


def by_hand(spec: JobSpec) -> tuple[list[float], list[float], Weights]:
    """DiLoCo of two replicas in a plain loop on one process: losses, mean norms, weights. The outer optimizer is torch's SGD."""
    comm = spec.comm
    torch.manual_seed(1)
    outer: nn.Module = registry.load("model", "gpt")(spec.model, VOCAB)
    replicas = [copy.deepcopy(outer) for _ in range(REPLICAS)]
    inner = []
    for model in replicas:
        shards = {n: ParamShard(p) for n, p in model.named_parameters()}
        inner.append(optimizers.build(shards, spec.optim, torch.device("cpu")))
    parameters = list(outer.parameters())
    cut = cut_evenly([p.numel() for p in parameters], comm.fragments)
    steppers = [
        torch.optim.SGD(parameters[a:b], comm.outer.lr, comm.outer.momentum, nesterov=comm.outer.momentum > 0)
        for a, b in cut
    ]
    seen = torch.zeros(comm.fragments, REPLICAS)
    plan = Schedule.of(comm, TOTAL)
    flights: dict[int, list[tuple[int, list[Tensor]]]] = {}
    losses, norms = [], []
    for step in range(1, TOTAL + 1):
        total = tokens = 0.0
        own_norms = []
        for r, (model, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            rank = Rank(r, REPLICAS, r, torch.device("cpu"), "gloo", "", None, ())
            batches = batches_of(rank, step)
            count = counted(batches)
            for batch in batches:
                loss = loss_sum(model, batch)
                (loss / max(count, 1)).backward()
                total += float(loss.detach())
            tokens += count
            own_norms.append(float(clip_grad_norm_(model.parameters(), spec.optim.clip)))
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            if count:
                optimizer.step()
            model.zero_grad()
            seen[:, r] += count
        losses.append(total / tokens)
        norms.append(sum(own_norms) / REPLICAS)
        for n in list(flights):
            if step in (flights[n][0][0], TOTAL):
                take(steppers[n], cut[n], parameters, replicas, flights.pop(n)[0][1], comm.outer.blend)
        for n in plan.starts(step):
            share = seen[n] / seen[n].sum()
            seen[n] = 0
            own = [list(model.parameters()) for model in replicas]
            made = [
                sum((share[r] * (outer_p.detach() - own[r][i].detach()) for r in range(REPLICAS)), torch.zeros(()))
                for i, outer_p in enumerate(parameters)
            ]
            if plan.arrives(step) == step:
                take(steppers[n], cut[n], parameters, replicas, made, 0.0)
            else:
                flights[n] = [(plan.arrives(step), made)]
    return losses, norms, {n: p.detach().clone() for n, p in replicas[0].named_parameters()}


@torch.no_grad()
def take(
    stepper: torch.optim.Optimizer,
    cut: tuple[int, int],
    parameters: list[nn.Parameter],
    replicas: Sequence[nn.Module],
    gradients: list[Tensor],
    blend: float,
) -> None:
    """One outer step of the parameters from cut[0] to before cut[1]."""
    for i in range(*cut):
        parameters[i].grad = gradients[i]
    stepper.step()
    for model in replicas:
        for i, own in enumerate(model.parameters()):
            if cut[0] <= i < cut[1]:
                own.copy_(blend * own + (1 - blend) * parameters[i])


@pytest.mark.parametrize(
    ("strategy", "comm", "mesh"),
    [
        ("ddp", {"every": 3}, {}),
        ("ddp", {"every": 4, "fragments": 2}, {}),
        ("ddp", STREAMING, {}),
        ("ddp", {"every": 3, "delay": 2, "outer": {"lr": 1.0, "momentum": 0.0, "blend": 0.25}}, {}),
        ("hsdp in pairs", {"every": 3}, {}),
        ("hsdp in pairs", STREAMING, {}),
        ("ddp", {"every": 3}, {"tensor": 2}),
        ("ddp", {"every": 3}, {"pipeline": 2}),
    ],
)
def test_equals_a_loop_in_plain_torch(ranks: Any, strategy: str, comm: dict[str, Any], mesh: dict[str, int]) -> None:
    """Two replicas, of one rank or of two, with accumulation, clipping by each replica's norm, masked tokens, and a batch of which
    one replica has nothing: losses, norms and the last weights. Within 1e-5: float32 sums in another order. All replicas end with
    the same bits."""
    world = REPLICAS * (1 if strategy == "ddp" and not mesh else 2)
    spec = spec_of(strategy, comm, **mesh)
    every = run(ranks, trained, world, spec)
    losses, norms, weights = by_hand(spec)
    for reports, own, _ in every:
        assert [loss for loss, _ in reports] == pytest.approx(losses, rel=1e-5)
        assert [norm for _, norm in reports] == pytest.approx(norms, rel=1e-4)
        for name, right in weights.items():
            torch.testing.assert_close(own[name], right, rtol=1e-4, atol=1e-5)
            assert torch.equal(own[name], every[0][1][name]), name


def shared(rank: Rank, spec: JobSpec) -> dict[str, Tensor]:
    """What this rank has, after the last step, of each norm and of the embeddings, which stages may share."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    steps(trainer, 1, TOTAL)
    tensor = spec.parallel.tensor > 1
    return {
        name: shard.local.detach().clone() for name, shard in trainer.shards.items() if "norm" in name or not tensor
    }


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2}])
def test_what_ranks_of_a_replica_have_alike_stays_alike(ranks: Any, mesh: dict[str, int]) -> None:
    """Rounded outer steps: a parameter that several ranks have, beside parameters that others have not, is rounded alike on all."""
    every = run(ranks, shared, 4, spec_of("ddp", {"every": 3, "compress": "int8"}, **mesh))
    names = [name for name in every[0] if all(name in own for own in every)]
    assert names
    for name in names:
        assert all(torch.equal(own[name], every[0][name]) for own in every), name


def test_each_step_together_is_ddp(ranks: Any) -> None:
    """every: 1 with the mean of the weights, and inner SGD: the losses and weights of ddp, within float32's tolerance. Weights are
    those of tokens: the batches have masked ones."""
    optim = {"name": "sgd", "lr": 1e-2, "clip": 0.0, "momentum": 0.0}
    together = {"every": 1, "outer": {"lr": 1.0, "momentum": 0.0}}
    of = [job("ddp", MODEL_OF, train={"steps": TOTAL}, optim=optim, comm=c) for c in ({}, together)]
    (plain, weights, _), *_ = run(ranks, trained, 2, of[0])
    (reports, own, last), *_ = run(ranks, trained, 2, of[1])
    assert [loss for loss, _ in reports] == pytest.approx([loss for loss, _ in plain], rel=1e-6)
    for name, right in weights.items():
        torch.testing.assert_close(own[name], right, rtol=1e-5, atol=1e-6)
    numbers = sum(p.numel() for p in weights.values())
    assert 8 * numbers / 2 <= last[1] < 1.1 * 8 * numbers / 2, "a reduce-scatter and an all-gather of fp32"


@pytest.mark.parametrize(("name", "near"), [("bf16", 0.01), ("int8", 0.02)])
@pytest.mark.parametrize("comm", [{"every": 3}, STREAMING])
def test_rounded_outer_gradients(ranks: Any, name: str, near: float, comm: dict[str, Any]) -> None:
    """The weights differ from those of plain sums by a share of how far they moved: bf16 has 8 bits, int8 127 steps of the largest
    of a block, and two roundings of several outer steps add up. Replicas have the same bits, and fewer bytes are sent."""
    plain = run(ranks, trained, 2, spec_of("ddp", comm))[0]
    every = run(ranks, trained, 2, spec_of("ddp", {**comm, "compress": name}))
    torch.manual_seed(1)
    first = dict(registry.load("model", "gpt")(spec_of("ddp", comm).model, VOCAB).named_parameters())
    moved = max(float((plain[1][n] - p.detach()).abs().max()) for n, p in first.items())
    for _, own, _ in every:
        assert all(torch.equal(own[n], every[0][1][n]) for n in own)
        assert max(float((own[n] - plain[1][n]).abs().max()) for n in own) < near * moved
    assert not all(torch.equal(every[0][1][n], plain[1][n]) for n in first)
    assert every[0][2][1] < (0.6 if name == "bf16" else 0.4) * plain[2][1]


def state_of(trainer: Trainer) -> tuple[TrainState, OuterState]:
    assert trainer.outer is not None
    extra = OuterState(trainer.outer, trainer.model, trainer.optimizer, trainer.shards)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards, outer=trainer.outer.weights)
    for name, each in extra.states.items():
        state.register(name, each)
    return state, extra


def kept(trainer: Trainer) -> tuple[Weights, Weights, Weights]:
    """(this rank's weights, whole outer weights, whole momentum)."""
    assert trainer.outer is not None
    own = {n: s.local.detach().clone() for n, s in trainer.shards.items()}
    outer = {n: gathered(t, trainer.rank) for n, t in trainer.outer.weights.items()}
    momentum = {n: gathered(t, trainer.rank) for f in trainer.outer.fragments for n, t in f.parts(f.momentum).items()}
    return own, outer, momentum


def saved(rank: Rank, spec: JobSpec, at: int, folder: str, memory: bool) -> Any:
    """Saves after step `at`; what is there then, and what is at the end."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    steps(trainer, 1, at)
    state, _ = state_of(trainer)
    saver = saver_of(rank, folder, memory)
    saver.start(at, *state.capture())
    assert saver.wait()
    saver.close()
    there = kept(trainer)
    return there, steps(trainer, at + 1, TOTAL), kept(trainer)


def loaded(rank: Rank, spec: JobSpec, at: int, folder: str, until: int = TOTAL) -> Any:
    """Goes on from there; what was loaded, and what is at the end, or after step `until`, which is saved."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    state, extra = state_of(trainer)
    found = manifest.read(RunDir(folder), at, RunDir(folder).manifests()[at])
    tensors, rank_tensors, _ = state.capture()
    got = restore.load(
        RunDir(folder), found, tensors, rank_tensors, group=rank.control, extra=state.extra, joins=state.joins
    )
    state.restore(tensors, rank_tensors, found.plain, restored=got.extra)
    extra.resumed()
    there, reports = kept(trainer), steps(trainer, at + 1, until)
    if until < TOTAL:
        saver = saver_of(rank, folder, False)
        saver.start(until, *state.capture())
        assert saver.wait()
        saver.close()
    return there, reports, kept(trainer), got.anew


@pytest.mark.parametrize(
    ("strategy", "comm", "at", "memory"),
    [
        ("ddp", {"every": 4}, 3, False),
        ("ddp", STREAMING, 4, True),
        ("ddp", {**STREAMING, "compress": "int8"}, 4, False),
        ("hsdp in pairs", STREAMING, 2, False),
    ],
)
def test_goes_on_between_outer_steps_and_while_one_is_on_its_way(
    ranks: Any, tmp_path: Path, strategy: str, comm: dict[str, Any], at: int, memory: bool
) -> None:
    """From storage and from memory: each rank's own weights, the outer ones and the momentum, to the bit; and at the end, too. At
    another number of replicas the outer weights and the momentum are the same, each replica starts from the mean of all, and the
    run ends."""
    spec, world = spec_of(strategy, comm), 2 if strategy == "ddp" else 4
    before = run(ranks, saved, world, spec, at, str(tmp_path), memory)
    for one, other in zip(before, run(ranks, loaded, world, spec, at, str(tmp_path)), strict=True):
        assert other[3] == {}
        assert one[1] == other[1]
        for then, now in zip((*one[0], *one[2]), (*other[0], *other[2]), strict=True):
            assert all(torch.equal(then[n], now[n]) for n in then)
    apart = before[0][0][0], before[-1][0][0]
    assert not all(torch.equal(apart[0][n], apart[1][n]) for n in apart[0]), "replicas differ at that step"
    if strategy == "ddp" and not memory:
        begins_with_the_mean(run(ranks, loaded, 3, spec, at, str(tmp_path)), [there for there, *_ in before])


def begins_with_the_mean(after: Sequence[Any], before: Sequence[Any]) -> None:
    """Each replica that has loaded has the mean of those that were saved, and the outer weights and the momentum to the bit."""
    for own, outer, momentum in (there for there, *_ in after):
        for name, value in own.items():
            mean = torch.stack([of[0][name] for of in before]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-8)
            assert torch.equal(outer[name], before[0][1][name])
            assert torch.equal(momentum[name], before[0][2][name])


@pytest.mark.parametrize("comm", [{"every": 4}, STREAMING])
def test_a_lost_replica_leaves_and_comes_back(ranks: Any, tmp_path: Path, comm: dict[str, Any]) -> None:
    """Three replicas, saved at step 3; two go on, and are saved at step 5, after an outer step of these two; then there are three
    again. The steps that the lost one had trained are in the mean that two begin with, and the one that comes back begins with
    their newest weights, as all do; in the next outer step it counts. All end with the same weights."""
    spec, folder = spec_of("ddp", comm), str(tmp_path)
    three = [there for there, *_ in run(ranks, saved, 3, spec, 3, folder, False)]
    two = run(ranks, loaded, 2, spec, 3, folder, 5)
    begins_with_the_mean(two, three)
    assert not all(torch.equal(two[0][2][1][n], three[0][1][n]) for n in three[0][1]), "they made an outer step"
    again = run(ranks, loaded, 3, spec, 5, folder)
    begins_with_the_mean(again, [end for _, _, end, _ in two])
    ends = [end[0] for _, _, end, _ in again]
    assert all(torch.equal(end[n], ends[0][n]) for end in ends for n in ends[0])


@pytest.mark.parametrize(
    ("strategy", "comm", "mesh", "world"),
    [
        ("ddp", {"every": 4}, {}, 2),
        ("ddp", {"every": 6, "fragments": 2, "delay": 2, "compress": "int8"}, {}, 2),
        ("hsdp", {"every": 6, "fragments": 2, "delay": 2}, {"shard": 2}, 4),
        ("ddp", {"every": 6, "fragments": 2, "delay": 2}, {"pipeline": 2}, 4),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    ranks: Any, dataset: str, tmp_path: Path, strategy: str, comm: dict[str, Any], mesh: dict[str, int], world: int
) -> None:
    """SIGKILL of rank 1 in step 4: the run goes on from step 3, between two outer steps or while one is on its way, and ends with
    the bits of an undisturbed one. Replicas are compared in each step, and differ only where they must. Records say which steps
    were local, and what the last outer step cost."""
    sections = {"comm": comm, "train": {"check_replicas": 1, "check_gradients": 1}}
    undisturbed = Run(ranks, dataset, tmp_path / "undisturbed", strategy, sections=sections, **mesh)
    assert undisturbed.train(world) == "finished"
    killed = Run(ranks, dataset, tmp_path / "killed", strategy, sections=sections, **mesh)
    killed.die([Kill(rank=1, step=4, phase="update").model_dump(mode="json")], guilty=1, world=world)
    assert killed.train(world) == "finished"
    assert [e["step"] for e in killed.told("resumed")] == [3]
    assert not [e for e in killed.told("note") if "extra state" in e["text"]]
    assert_same(killed, undisturbed)
    assert not killed.told("replica_drift")
    assert not killed.told("gradients")
    plan = Schedule.of(CommSpec.model_validate(comm), 12)
    arrivals = {plan.arrives(step) for step in range(1, 13) if plan.starts(step)}
    rows = killed.rows()
    assert [r["local_step"] for r in rows] == [not plan.starts(s) and s not in arrivals for s in range(1, 13)]
    first = min(arrivals)
    assert all((r["sync_bytes"] is None) == (r["step"] < first) for r in rows)
    assert {r["sync_seconds"] is not None and r["sync_seconds"] > 0 for r in rows[first:]} == {True}


def test_drift_is_found_after_an_outer_step(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """A bit of a weight of rank 1 flips in step 5, right after an outer step of three replicas: found in that step, repaired, and
    the run ends with the bits of an undisturbed one. In step 6, between two of them, no other rank has those weights."""
    sections = {"comm": {"every": 4}, "train": {"check_replicas": 1}}
    runs = {}
    for step in (0, 5, 6):
        runs[step] = Run(ranks, dataset, tmp_path / str(step), sections=sections)
        faults = [FlipBit(rank=1, step=step, phase="backward").model_dump(mode="json")] if step else []
        assert runs[step].train(3, faults=faults) == "finished"
    assert [e["step"] for e in runs[5].told("replica_drift")] == [5]
    assert_same(runs[5], runs[0])
    assert not runs[6].told("replica_drift")


def few(rank: Rank) -> str:
    try:
        Trainer(rank, spec_of("ddp", {"every": 100, "fragments": 50}), full=N * CONTEXT)
    except UserError as error:
        return f"{error.message}; {error.hint}"
    return ""


def test_more_fragments_than_parameters(ranks: Any) -> None:
    """The error names both numbers."""
    (line, _) = run(ranks, few, 2)
    assert line.startswith("comm.fragments: 50: a rank has 29 parameters; set it to 29 or less")


def test_fragments_are_even() -> None:
    """Each has something, and none is above its share by more than the largest parameter."""
    for sizes, parts in (([1] * 7, 3), ([100, 1, 1, 1], 4), ([5, 1, 1, 1, 5, 1, 2], 3)):
        cut = cut_evenly(sizes, parts)
        assert [first for first, _ in cut] == [0, *[last for _, last in cut[:-1]]]
        assert cut[-1][1] == len(sizes)
        assert all(0 < sum(sizes[a:b]) <= sum(sizes) / parts + max(sizes) for a, b in cut)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (["comm.every=0"], "comm.every: 0: input should be greater than or equal to 1"),
        (["comm={every: 32, fragments: 5}"], "comm.fragments: 5 does not divide every: 32; try 2 or 4 or 8"),
        (["comm={every: 4, fragments: 8}"], "comm.fragments: 8 does not divide every: 4"),
        (["comm={every: 32, fragments: 4, delay: 8}"], "comm.delay: 8 is not below the 8 steps"),
        (["comm={every: 32, outer: {momentum: 1.0}}"], "comm.outer.momentum: 1.0: input should be less than 1"),
        (["comm={every: 32, outer: {blend: 0.2}}"], "comm.outer.blend: 0.2 has no effect without delay"),
        (["comm={outer: {lr: 0.5}}"], "comm.outer: {'lr': 0.5, 'momentum': 0.9, 'blend': 0.5} belongs to an outer step"),
        (["comm={delay: 2}"], "comm.delay: 2 belongs to an outer step, and there is none; set comm.every"),
        (["comm={every: 32, compress: topk}"], "comm.compress: 'topk' does not go with comm.every"),
        (["comm={every: 32, compress: int8, error_feedback: true}"], "comm.error_feedback: True does not go with comm.every"),
        (["comm.every=32", "parallel.strategy=zero2"], "comm.every: 32 does not go with parallel.strategy: zero2, which splits"),
        (["comm.every=32", "cluster.workers=1"], "comm.every: 32 needs two replicas or more, and cluster.workers: 1 makes one"),
        (["comm.every=32", "parallel={strategy: hsdp, shard: 2}"], "comm.every: 32 needs two replicas or more"),
        (["comm.every=32", "parallel.context=2", "cluster.workers=4"], "comm.every: 32 does not go with parallel.context: 2"),
        (["comm.every=32", "offload.optimizer=cpu"], "comm.every: 32 does not go with offload.optimizer: cpu"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_error(fields: list[str], line: str) -> None:
    """With the field, its value and the remedy."""
    with pytest.raises(SpecError) as caught:
        load(Path(__file__).parents[2] / "jobs/quickstart.yaml", fields)
    assert line in caught.value.message
    assert "\n" not in caught.value.message


def test_outer_steps_change_the_numbers() -> None:
    """A resumed run must have the same fields; a job without them has the numbers of an older version."""
    path = Path(__file__).parents[2] / "jobs/quickstart.yaml"
    numbers = load(path, ["comm={every: 32, fragments: 4, delay: 2}"]).numbers("f")
    assert (numbers["comm.every"], numbers["comm.fragments"], numbers["comm.delay"]) == (32, 4, 2)
    compressed = load(path, ["comm.compress=int8"]).numbers("f")
    assert not {"comm.every", "comm.fragments", "comm.delay", "comm.outer.lr"} & compressed.keys()
