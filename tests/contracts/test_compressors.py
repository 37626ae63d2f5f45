"""Every compressor, under every strategy: the sum is that of the same compression on one process, and nothing is lost for good.

Over a minute: every compressor, under every strategy, on two to four ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raydist import registry
from raydist.checkpoint import manifest
from raydist.errors import SpecError, UserError
from raydist.extension_plans import CompressorPlan, sides, strategy_plan
from raydist.faults import Kill
from raydist.run.directory import RunDir
from raydist.spec import CommSpec, JobSpec, load
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.comm import compressors
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.compression.state import NAME, Compression
from raydist.worker.comm.compressors import Matrix, Rows, Sums
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters
from raydist.worker.step import MESSAGES, loss_sum
from tests.training import CONTEXT, GROUPED, MODEL, VARIANTS, VOCAB, Trainer, counted, job, mesh_job, mine, run, samples
from tests.worker.checkpoint.test_extra_state import saver_of
from tests.worker.test_exactness import STEPS as RUN_STEPS
from tests.worker.test_exactness import Run, assert_same, dataset

__all__ = ["dataset"]

NAMES = registry.names("compressor")
STRATEGIES = [GROUPED.get(s, s) for s in registry.names("parallel") if getattr(strategy_plan(s), "compresses", False)]
STEPS, N, MICRO = 3, 8, 2
OPTIONS: dict[str, Any] = {"topk": {"ratio": 0.1}, "powersgd": {"rank": 2}}
MOE = {**MODEL, "name": "mixtral", "hidden": 32}
STACK = {"experts": torch.Size([3, 8, 6]), "norm": torch.Size([7])}
"""Three experts of 8 rows and 6 columns: factors of 3 (8 + 6) numbers a column."""
EACH = ("zero2", "zero3")
"""Strategies that reduce gradients in every micro-batch."""

Gradients = dict[str, Tensor]


def comm(name: str, **more: Any) -> dict[str, Any]:
    """The section of a job; errors are fed back also where that is not the default."""
    return {"compress": name, "options": OPTIONS.get(name, {}), "error_feedback": True, **more}


def made(variant: str, name: str, **more: Any) -> JobSpec:
    """A job without clipping."""
    return job(variant, optim={"lr": 1e-2, "clip": 0.0, "eps": 1e-3}, comm=comm(name), **more)


def groups_of(variant: str, world: int) -> list[list[int]]:
    """The ranks that add up their gradients before these are compressed: one copy of the state each."""
    shard = VARIANTS[variant].get("shard", 1)
    return [[*range(first, first + shard)] for first in range(0, world, shard)]


def stepped(rank: Rank, variant: str, names: Sequence[str], **more: Any) -> Any:
    """Of each compressor: the gradients of each step, times what they were divided by; what is left of them on this rank after the
    last one; and the pieces. The weights do not change."""
    found = {}
    for name in names:
        trainer = Trainer(rank, made(variant, name, **more), full=N * CONTEXT)
        assert trainer.compression is not None
        steps: list[Gradients] = []
        for s in range(1, STEPS + 1):
            batches, gradients = mine(rank, *samples(N, seed=s), MICRO), {}
            trainer.before_update = partial(lambda into, of: into.update(of.whole(grad=True)), gradients, trainer)
            report = trainer.step(s, batches, counted(batches), 0.0, want_stop=False)
            steps.append({n: g * (report.tokens / (N * CONTEXT)) for n, g in gradients.items()})
        left = {
            n.removeprefix("left/"): t.cpu().clone()
            for n, t in trainer.compression.state_tensors().items()
            if n[0] == "l"
        }
        (reducer,) = trainer.strategy.reducers()
        pieces = [(list(p.shapes), p.packed, p.size) for p in reducer.pieces]
        found[name] = steps, left, pieces, trainer.compression.last
    return found


def contributions(world: int, seed: int) -> list[list[Gradients]]:
    """Of each rank and each of its micro-batches, on one process: its part of the gradient of a full batch's mean loss."""
    torch.manual_seed(1)
    model = registry.load("model", "gpt")(job("ddp").model, VOCAB)
    every = []
    for r in range(world):
        rank = Rank(r, world, r, torch.device("cpu"), "gloo", "", None, ())
        every.append([])
        for batch in mine(rank, *samples(N, seed=seed), MICRO):
            model.zero_grad()
            (loss_sum(model, batch) / (N * CONTEXT)).backward()
            every[-1].append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
    return every


def added(several: Sequence[Gradients]) -> Gradients:
    """Their sum."""
    return {name: torch.stack([each[name] for each in several]).sum(0) for name in several[0]}


class OneProcess:
    """The sum of several ranks' gradients, by the definition of a compressor, in a loop over the ranks."""

    def __init__(self, name: str, pieces: Any, world: int, shapes: Mapping[str, torch.Size]) -> None:
        self.compressor = compressors.build(name, OPTIONS.get(name, {}))
        self.pieces, self.world, self.shapes = pieces, world, shapes
        self.left = [{n: torch.zeros(shape) for n, shape in shapes.items()} for _ in range(world)]
        self.state: dict[str, Tensor] = {}
        if isinstance(self.compressor, Sums):
            states = {n: self.compressor.state(n, *sides(s)) for n, s in shapes.items() if len(s) > 1}
            self.state = {n: state for n, state in states.items() if state is not None}

    def __call__(self, every: Sequence[Gradients]) -> Gradients:
        """The sum of these, of the ranks; what was lost stays for the next call."""
        given = [added([mine, left]) for mine, left in zip(every, self.left, strict=True)]
        if isinstance(self.compressor, Sums):
            return self._low_rank(given)
        return {n: g for names, packed, size in self.pieces for n, g in self._rows(given, names, packed, size).items()}

    def _rows(self, given: Sequence[Gradients], names: list[str], packed: bool, size: int) -> Gradients:
        compressor, world = self.compressor, self.world
        assert isinstance(compressor, Rows)
        values = [self._into_rows([of[n] for n in names], packed, size) for of in given]
        total, pair = torch.zeros(world, size), world == 2 and not packed
        for of_rank in values:
            total += self._through(of_rank.view(1, -1) if pair else of_rank).view(world, size)
        if not (packed or pair):  # all ranks get the sum: each encodes a row of it
            for r in range(world):
                row = total[r : r + 1].clone()
                decoded = self._through(row)
                values[r][r] += row[0]
                total[r] = decoded[0]
        for of_rank, left in zip(values, self.left, strict=True):
            left.update(self._out_of_rows(of_rank, names, packed))
        return self._out_of_rows(total, names, packed)

    def _through(self, values: Tensor) -> Tensor:
        """Encoded and decoded; `values` becomes what is lost."""
        assert isinstance(self.compressor, Rows)
        before, encoded = (
            values.clone(),
            torch.zeros(len(values), self.compressor.row_bytes(values.shape[1]), dtype=torch.uint8),
        )
        self.compressor.encode(values, encoded)
        decoded = torch.full_like(values, torch.nan)
        self.compressor.decode(encoded, decoded)
        torch.testing.assert_close(values + decoded, before, rtol=1e-6, atol=1e-9)
        return decoded

    def _into_rows(self, tensors: list[Tensor], packed: bool, size: int) -> Tensor:
        rows = torch.zeros(self.world, size)
        if not packed:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            rows.view(-1)[: len(flat)] = flat
            return rows
        for r in range(self.world):
            at = 0
            for t in tensors:
                each = -(-len(t) // self.world)
                own = t[r * each : (r + 1) * each].reshape(-1)
                rows[r, at : at + len(own)] = own
                at += each * t[0].numel()
        return rows

    def _out_of_rows(self, rows: Tensor, names: list[str], packed: bool) -> Gradients:
        found, at = {}, 0
        for name in names:
            shape = self.shapes[name]
            if not packed:
                found[name] = rows.reshape(-1)[at : at + shape.numel()].view(shape).clone()
                at += shape.numel()
                continue
            length = -(-shape[0] // self.world) * shape[1:].numel()
            found[name] = rows[:, at : at + length].reshape(-1)[: shape.numel()].view(shape).clone()
            at += length
        return found

    def _low_rank(self, given: list[Gradients]) -> Gradients:
        """By torch's QR, as in the paper."""
        found = {}
        for name, shape in self.shapes.items():
            ms = [of[name].reshape(sides(shape) if len(shape) > 1 else (1, -1, 1)) for of in given]
            if (q := self.state.get(name)) is None:
                found[name] = sum(ms).view(shape)  # type: ignore[union-attr]
                for left in self.left:
                    left[name] = torch.zeros(shape)
                continue
            p, _ = torch.linalg.qr(sum(m @ q for m in ms))
            new: Tensor = sum(m.mT @ p for m in ms)  # type: ignore[assignment]
            self.state[name] = torch.where(new.abs().amax(-2, keepdim=True) > 0, new, q)
            found[name] = (p @ new.mT).view(shape)
            for m, left in zip(ms, self.left, strict=True):
                left[name] = (m - p @ (p.mT @ m)).view(shape)
        return found


def expected(name: str, variant: str, world: int, pieces: Any) -> tuple[list[Gradients], list[Gradients], Gradients]:
    """(the sum of each step, what is left on each rank after the last, the plain sum of all steps)."""
    groups = groups_of(variant, world)
    shard = len(groups[0])
    sums, plain, of_parts = [], [], []
    whole = {n: p.shape for n, p in registry.load("model", "gpt")(job("ddp").model, VOCAB).named_parameters()}
    cut = {n: torch.Size([-(-s[0] // shard), *s[1:]]) if shard > 1 else s for n, s in whole.items()}
    for _ in range(shard):
        of_parts.append(OneProcess(name, pieces, len(groups), cut))
    for s in range(1, STEPS + 1):
        every = contributions(world, s)
        plain.append(added([each for of_rank in every for each in of_rank]))
        rounds = [list(each) for each in zip(*every, strict=True)] if variant in EACH else [[added(of) for of in every]]
        found: list[Gradients] = []
        for of_ranks in rounds:
            of_groups = [added([of_ranks[r] for r in group]) for group in groups]
            parts = [one([part_of(of, cut, i, shard) for of in of_groups]) for i, one in enumerate(of_parts)]
            found.append({n: torch.cat([part[n] for part in parts])[: whole[n][0]] for n in whole})
        sums.append(added(found))
    left = [of_parts[r % shard].left[r // shard] for r in range(world)]
    return sums, left, added(plain)


def part_of(gradients: Gradients, cut: Mapping[str, torch.Size], index: int, parts: int) -> Gradients:
    """The rows of a rank of a copy, padded."""
    if parts == 1:
        return gradients
    found = {}
    for name, whole in gradients.items():
        found[name] = torch.zeros(cut[name])
        own = whole[index * len(found[name]) : (index + 1) * len(found[name])]
        found[name][: len(own)] = own
    return found


@pytest.mark.parametrize(("strategy", "copies"), [*((each, 2) for each in STRATEGIES), ("ddp", 4)])
def test_the_sum_is_that_of_the_same_compression_on_one_process(ranks: Any, strategy: str, copies: int) -> None:
    """On 2 ranks, ddp on 4, too, hsdp on 4, with accumulation, over three steps: each gradient, and what is left of it on each
    rank. Replicas have the same bits. The sums that arrived, and what is left on all ranks, are the sum of all gradients.

    Within 1e-5 of the largest number: sums of float32 in another order. One number in a hundred may differ by more: by a step of
    int8's, fp16's or bf16's rounding, or in topk by whether it is sent, where the order decides. PowerSGD: 1e-3, because P is made
    orthonormal by other operations.
    """
    world = copies * VARIANTS[strategy].get("shard", 1)
    every = run(ranks, stepped, world, strategy, NAMES)
    for name in NAMES:
        check(name, strategy, world, every)


def check(name: str, strategy: str, world: int, every: Sequence[Any]) -> None:
    """`every`: of each rank, what `stepped` gave."""
    steps, _, pieces, report = every[0][name]
    for other in every[1:]:
        for one, two in zip(steps, other[name][0], strict=True):
            assert all(torch.equal(one[n], two[n]) for n in one), "replicas have the same bits"
    sums, left, plain = expected(name, strategy, world, pieces)
    for s, (got, right) in enumerate(zip(steps, sums, strict=True)):
        close(got, right, name, f"{name}: step {s + 1}")
    arrived = added(steps)
    for rank, of_rank in enumerate(left):
        got = {n.partition("/")[0]: t for n, t in every[rank][name][1].items()}
        close(got, of_rank, name, f"{name}: what is left on rank {rank}")
    lost = [plain_of(every[rank][name][1], plain, rank, strategy) for rank in range(world)]
    for n, whole in added([arrived, *lost]).items():
        torch.testing.assert_close(whole, plain[n], rtol=1e-4, atol=2e-6 * float(plain[n].abs().max()))
    squares = sum(float(t.double().square().sum()) for t in every[0][name][1].values())
    assert report.residual_norm == pytest.approx(math.sqrt(squares), rel=1e-4)


def plain_of(left: Gradients, whole: Gradients, rank: int, variant: str) -> Gradients:
    """What is left on a rank, in the shapes of whole parameters: a rank of a copy has some of their rows."""
    shard = VARIANTS[variant].get("shard", 1)
    found = {n: torch.zeros_like(t) for n, t in whole.items()}
    for key, tensor in left.items():
        name, rows = key.partition("/")[0], len(tensor)
        into = found[name][rank % shard * rows : (rank % shard + 1) * rows] if shard > 1 else found[name]
        into += tensor[: len(into)]
    return found


def close(got: Gradients, right: Gradients, name: str, what: str) -> None:
    """See the test above."""
    assert got.keys() == right.keys()
    off = of_all = 0
    for n, value in right.items():
        near = 1e-3 if name == "powersgd" else 1e-5
        largest = max(float(v.abs().max()) for v in right.values())
        differs = (got[n] - value).abs() > near * largest
        off, of_all = off + int(differs.sum()), of_all + value.numel()
    assert off <= (of_all // 100 if name != "powersgd" else 0), f"{what}: {off} of {of_all} numbers differ"


def stacked(rank: Rank, packed: bool) -> Any:
    """Three steps of a piece with experts, in each of them another one without tokens: of each step the gradients, their sum, what
    is left, and the bytes sent."""
    group = dist.group.WORLD
    assert group is not None
    reducer = Reducer(CommSpec(**comm("powersgd")), group, rank.device, factor=1.0, aside=False)
    piece = reducer.packed(STACK) if packed else reducer.flat(STACK)
    found = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank.rank)
        own = {n: torch.randn(shape, generator=draw) for n, shape in STACK.items()}
        own["experts"][step] = 0  # no tokens
        rows = torch.zeros(rank.world_size, piece.size)
        piece.take(rows, own)
        reducer.begin(1.0)
        if packed:
            mine = torch.zeros(piece.row)
            reducer.reduce_scatter(piece, rows, mine).wait()
            rows = torch.tensor(gather_json(mine.tolist(), rank.control))
        else:
            reducer.all_reduce(piece, piece.body(rows)).wait()
        reducer.commit()
        assert piece.kept is not None
        left = {n: t.clone() for n, t in piece.of_parameters(piece.kept).items()}
        found.append((own, {n: t.clone() for n, t in piece.of_parameters(rows).items()}, left, reducer.sent[0].nbytes))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_each_expert_is_a_matrix(ranks: Any, packed: bool) -> None:
    """A stack of experts in an all-reduce, and in a reduce-scatter by experts, of which the second rank has one and a filler:
    as torch's QR has it for each expert, in the bytes of all their factors. What fills up the norm's second part is sent. An expert
    without tokens in the first step, whose factors are zeros, has some in the next."""
    every = run(ranks, stacked, 2, packed)
    one = OneProcess("powersgd", [], 2, STACK)
    for of_ranks in zip(*every, strict=True):
        right = one([own for own, *_ in of_ranks])
        for (_, got, left, nbytes), its in zip(of_ranks, one.left, strict=True):
            close(got, right, "powersgd", "sum")
            close(left, its, "powersgd", "left")
            assert nbytes == 4 * (2 * 3 * (8 + 6) + (8 if packed else 7))


def test_matrices_of_a_lower_rank_than_the_factors() -> None:
    """As of experts with a single token, or none in the first step: they arrive as they are, in each step."""
    compressor = compressors.build("powersgd", {"rank": 4})
    assert isinstance(compressor, Sums)
    first = compressor.state("w", 2, 64, 32)
    assert first is not None
    state, draw = {"w": first}, torch.Generator().manual_seed(1)
    for step in range(4):
        values = torch.randn(1, 2, 64, 1, generator=draw) @ torch.randn(1, 2, 1, 32, generator=draw)
        values[:, 1] *= step > 0
        matrix = Matrix("w", values.clone(), torch.empty_like(values))
        state = compressor.reduce([matrix], [], state, lambda flat: None)
        torch.testing.assert_close(matrix.result, values, rtol=0, atol=1e-4)
        assert matrix.values.abs().max() < 1e-4


def trained_twice(rank: Rank, spec: JobSpec) -> Any:
    """Reports of five steps as in test_strategies, and hashes of what replicas have alike; with fp32's counters."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    reports = []
    for s in range(1, 6):
        mesh = spec.parallel
        batches = mine(rank, *samples(N, seed=s), MICRO, mesh.tensor, mesh.pipeline, mesh.context)
        gradients: Gradients = {}
        trainer.before_update = partial(lambda into, of: into.update(of.whole(grad=True)), gradients, trainer)
        reports.append(trainer.step(s, batches, counted(batches), 1e-2, want_stop=False))
    local = (
        {n: p.detach().clone() for n, p in trainer.model.named_parameters()} if "ddp" in spec.parallel.strategy else {}
    )
    return reports, gradients, trainer.whole(), local, trainer.mesh.coordinate(rank.rank)


@pytest.mark.parametrize(
    ("strategy", "axis"),
    [
        *(("ddp", axis) for axis in ("tensor", "pipeline", "context")),
        ("zero1", "tensor"),
        *(("zero2", axis) for axis in ("pipeline", "context")),
    ],
)
def test_along_the_data_axis_of_a_mesh(ranks: Any, strategy: str, axis: str) -> None:
    """dp 2 x tensor 2, dp 2 x pipeline 2 and dp 2 x context 2. topk that sends all has the numbers of one process, in float32's
    tolerance; int8 its losses within 1e-2, and replicas keep the same bits. PowerSGD depends on the sum of the gradients alone, so
    in ddp it gives those of four ranks without a mesh."""
    model = {**MODEL, "tie_embeddings": True, "hidden": 32}

    def on_four(name: str, mesh: dict[str, int], **more: Any) -> list[Any]:
        made = mesh_job(strategy, 1, {**model, "vocab_size": 16}, mesh, comm=comm(name, **more))
        return run(ranks, trained_twice, 4, made)

    one = run(ranks, trained_twice, 1, job("ddp", {**model, "vocab_size": 16}))[0]
    for reports, gradients, weights, *_ in on_four("topk", {axis: 2}, options={"ratio": 1.0}):
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in one[0]], rel=1e-5)
        assert [r.grad_norm for r in reports] == pytest.approx([r.grad_norm for r in one[0]], rel=1e-4)
        for n, right in one[1].items():
            torch.testing.assert_close(gradients[n], right, rtol=1e-4, atol=5e-6)
            torch.testing.assert_close(weights[n], one[2][n], rtol=1e-4, atol=5e-6)
    every = on_four("int8", {axis: 2})
    for reports, *_ in every:
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in one[0]], rel=1e-2)
    for *_, local, (stage, _, _, part) in every:
        for *_, other, (its_stage, _, _, its_part) in every:
            if (stage, part) == (its_stage, its_part):
                assert all(torch.equal(local[n], other[n]) for n in local)
    if (strategy, axis) == ("ddp", "context"):
        (_, right, *_), *_ = on_four("powersgd", {})
        for _, gradients, *_ in on_four("powersgd", {axis: 2}):
            close(gradients, right, "powersgd", "PowerSGD on parts of sequences")


@pytest.mark.parametrize(
    ("strategy", "name", "mesh", "world"),
    [
        ("ddp", "int8", {}, 2),
        ("zero2", "topk", {}, 2),
        ("zero3", "int8", {}, 2),
        ("hsdp", "powersgd", {"shard": 2}, 4),
        ("zero1", "int8", {"tensor": 2}, 4),
        ("ddp", "powersgd", {"pipeline": 2}, 4),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    ranks: Any, dataset: str, tmp_path: Path, strategy: str, name: str, mesh: dict[str, int], world: int
) -> None:
    """SIGKILL of rank 1 in step 4, between the gradients and the update: the run goes on from the checkpoint of step 3, and ends
    with the bits of an undisturbed one. What each step sent and left is in its record. Replicas and gradients are compared in each
    step, and equal; the noise scale is measured."""
    sections = {
        "comm": comm(name),
        "train": {"check_replicas": 1, "check_gradients": 1},
        "observe": {"grad_noise": 2},
    }
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
    for one, other in zip(killed.rows(), undisturbed.rows(), strict=True):
        assert one["residual_norm"] == pytest.approx(other["residual_norm"], rel=1e-9)
        assert 0 < one["compression_error"] < 1
        assert one["sent_bytes"] == other["sent_bytes"] > 0
    assert len(killed.rows()) == RUN_STEPS


def some_steps(rank: Rank, spec: JobSpec, steps: int = 2) -> tuple[Trainer, TrainState]:
    """A trainer after these steps, and its state."""
    trainer = Trainer(rank, spec, full=N * CONTEXT)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
    assert trainer.compression is not None
    state.register(NAME, trainer.compression)
    for s in range(1, steps + 1):
        batches = mine(rank, *samples(N, seed=s), MICRO)
        trainer.step(s, batches, counted(batches), 1e-2, want_stop=False)
    return trainer, state


def kept(trainer: Trainer, kind: str) -> Gradients:
    """Copies of that kind of tensors."""
    assert trainer.compression is not None
    return {n: t.clone() for n, t in trainer.compression.state_tensors().items() if n.startswith(kind)}


def saved(rank: Rank, variant: str, name: str, folder: str, memory: bool) -> Any:
    trainer, state = some_steps(rank, made(variant, name))
    saver = saver_of(rank, folder, memory)
    saver.start(1, *state.capture())
    assert saver.wait()
    saver.close()
    return kept(trainer, "left"), kept(trainer, "shared")


def loaded(rank: Rank, variant: str, name: str, folder: str, model: Any = MODEL) -> Any:
    """What is left on this rank, what all ranks have alike, and which state started anew, or partly."""
    trainer, state = some_steps(rank, made(variant, name, model=model), 0)
    (at,) = RunDir(folder).manifests().values()
    found = manifest.read(RunDir(folder), 1, at)
    tensors, rank_tensors, _ = state.capture()
    got = restore.load(
        RunDir(folder), found, tensors, rank_tensors, group=rank.control, extra=state.extra, joins=state.joins
    )
    state.restore(tensors, rank_tensors, found.plain, restored=got.extra)
    return kept(trainer, "left"), kept(trainer, "shared"), got.anew | dict.fromkeys(got.partly, "partly")


@pytest.mark.parametrize(
    ("variant", "name", "memory", "first", "then"),
    [
        ("ddp", "int8", False, 2, (2, 3, 4)),
        ("ddp", "int8", True, 2, (2,)),
        ("ddp", "int8", False, 3, (2,)),
        ("zero1", "int8", False, 3, (2,)),
        ("zero2", "powersgd", False, 2, (2, 3, 4)),
        ("zero2", "powersgd", True, 2, (2,)),
        ("zero3", "powersgd", False, 3, (2,)),
    ],
)
def test_what_is_left_is_summed_at_another_number_of_ranks(
    ranks: Any, tmp_path: Path, variant: str, name: str, memory: bool, first: int, then: tuple[int, ...]
) -> None:
    """From storage and from memory, to as many ranks: each its own, to the bit. To more and to fewer: the sum over the ranks, to
    the bit, in stretches; what all ranks had alike is on all."""
    folder = str(tmp_path)
    before = run(ranks, saved, first, variant, name, folder, memory)
    if first in then:
        for one, other in zip(before, run(ranks, loaded, first, variant, name, folder), strict=True):
            assert other[2] == {}
            assert all(torch.equal(one[kind][n], other[kind][n]) for kind in (0, 1) for n in one[kind])
    for world in (world for world in then if world != first):
        after = run(ranks, loaded, world, variant, name, folder)
        total = added([left for left, _ in before])
        assert all(float(t.abs().max()) > 0 for n, t in total.items() if "norm" not in n)
        for n, whole in added([left for left, *_ in after]).items():
            assert torch.equal(whole, total[n]), n
        holders = torch.stack([sum((t != 0).sum() for t in left.values()) for left, *_ in after])  # type: ignore[misc]
        assert holders.max() < holders.sum(), "not all of it is on one rank"
        assert all(torch.equal(shared[n], before[0][1][n]) for _, shared, _ in after for n in shared)
        assert not any(anew for *_, anew in after)


def in_place(every: Sequence[Gradients]) -> Gradients:
    """The sum of what is left on these ranks, in the shapes of whole parameters, with the rows that fill up the last parts."""
    whole = {n: p for n, p in registry.load("model", "gpt")(job("ddp").model, VOCAB).named_parameters()}
    found = {n: torch.zeros(len(p) + 4, *p.shape[1:]) for n, p in whole.items()}
    for left in every:
        for key, tensor in left.items():
            name, _, rows = key.removeprefix("left/").partition("/")
            begin = int(rows.split("-")[1]) * len(tensor) if rows else 0
            found[name][begin : begin + len(tensor)] += tensor
    assert all(not found[n][len(p) :].any() for n, p in whole.items())
    return found


PAIRS = GROUPED["hsdp"]
"""hsdp: two ranks hold a copy."""


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("int8", (PAIRS, 4), [("zero3", 3), (PAIRS, 2), ("ddp", 4)]),
        ("powersgd", (PAIRS, 4), [("zero2", 4)]),
        ("int8", ("zero1", 3), [(PAIRS, 4)]),
        ("powersgd", ("ddp", 4), [(PAIRS, 4)]),
    ],
)
def test_what_is_left_goes_on_with_other_shards(
    ranks: Any, tmp_path: Path, name: str, first: tuple[str, int], then: list[tuple[str, int]]
) -> None:
    """Where ranks had rows of a copy and have whole gradients, or the other way round, on as many ranks and on others: the sum over
    the ranks, to the bit, in its place; PowerSGD's factors are on all ranks alike."""
    folder = str(tmp_path)
    before = run(ranks, saved, first[1], first[0], name, folder, False)
    total = in_place([left for left, _ in before])
    assert all(float(t.abs().max()) > 0 for n, t in total.items() if "norm" not in n)
    for variant, world in then:
        after = run(ranks, loaded, world, variant, name, folder)
        assert not any(anew for *_, anew in after)
        assert all(torch.equal(t, total[n]) for n, t in in_place([left for left, *_ in after]).items())
        factors = {n.removeprefix("shared/").partition("/")[0]: t for n, t in before[0][1].items()}
        for _, shared, _ in after:
            of_first = {
                n.partition("/")[2].removesuffix("/rows-0-of-2"): t for n, t in shared.items() if "rows-1" not in n
            }
            assert all(torch.equal(t, factors[n]) for n, t in of_first.items() if n in factors)
            assert (name == "powersgd") == bool(shared)


def saved_with_other_factors(rank: Rank, folder: str) -> Any:
    """A job with experts, saved by a version in which the first dimension of each gradient was the rows of one matrix."""
    import raydist.worker.comm.compression.piece as pieces
    import raydist.worker.comm.compression.reducer as reducers

    before, by_rows = sides, lambda shape: (1, shape[0], math.prod(shape[1:]))
    pieces.sides = reducers.sides = by_rows  # type: ignore[attr-defined]
    try:
        trainer, state = some_steps(rank, made("zero2", "powersgd", model=MOE))
    finally:
        pieces.sides = reducers.sides = before  # type: ignore[attr-defined]
    saver = saver_of(rank, folder, memory=False)
    saver.start(1, *state.capture())
    assert saver.wait()
    saver.close()
    return kept(trainer, "left"), kept(trainer, "shared")


@pytest.mark.parametrize("world", [2, 3])
def test_factors_of_another_shape_start_anew(ranks: Any, tmp_path: Path, world: int) -> None:
    """On as many ranks and on others: those of experts, and it is said; all other factors are read, and what is left is summed."""
    before = run(ranks, saved_with_other_factors, 2, str(tmp_path))
    after = run(ranks, loaded, world, "zero2", "powersgd", str(tmp_path), MOE)
    total, first = added([left for left, _ in before]), compressors.build("powersgd", OPTIONS["powersgd"])
    assert isinstance(first, Sums)
    model = registry.load("model", "mixtral")(job("ddp", model=MOE).model, VOCAB)
    forms = {f"shared/{n}": sides(p.shape) for n, p in model.named_parameters() if p.dim() > 1}
    for n, whole in added([left for left, *_ in after]).items():
        assert torch.equal(whole, total[n]), n
    for _, shared, anew in after:
        assert anew == {NAME: "partly"}
        assert any("experts" in n for n in shared)
        for n, factor in shared.items():
            old = before[0][1][n]
            assert ("experts" in n) == (old.shape != factor.shape)
            assert torch.equal(factor, first.state(n.removeprefix("shared/"), *forms[n]) if "experts" in n else old)


def test_parts_without_rows() -> None:
    """Of a parameter with fewer rows than ranks some parts only fill up: they take up nothing, and nothing is taken from them. What
    is missing, or of other columns, cannot be taken up; factors then stay as they are."""
    whole, part, other = (f"left/w{rows}" for rows in ("", "/rows-1-of-2", "/rows-0-of-2"))
    own = {part: torch.zeros(1, 3)}
    sources = partial(Compression.sources, None)  # type: ignore[arg-type]
    assert sources(own, {whole: (1, 3)}) == {part: []}
    assert sources({whole: torch.zeros(1, 3)}, {other: (1, 3), part: (1, 3)}) == {whole: [other]}
    assert sources({whole: torch.zeros(2, 3)}, {part: (1, 3), other: (1, 3)}) == {whole: [other, part]}
    for saved in ({}, {"left/v": (1, 3)}, {whole: (2, 4)}, {"left/w/tensor-0-of-2": (2, 3)}):
        assert sources(own, saved) is None
    assert sources({"shared/w": torch.zeros(3, 2)}, {"shared/w": (3, 4)}) == {"shared/w": []}


def test_factors_of_experts_that_other_ranks_have() -> None:
    """Each expert's are taken from the ranks that had it, whatever rows the ranks had and have; those of other columns are not."""
    first, second = (f"shared/w/rows-{rows}-of-2" for rows in range(2))
    halves = {first: torch.ones(2, 3, 2), second: torch.full((2, 3, 2), 2.0)}
    whole, third = {"shared/w": torch.zeros(4, 3, 2)}, {"shared/w/rows-1-of-3": torch.zeros(2, 3, 2)}
    for own, expected in (
        (whole, [1.0, 1.0, 2.0, 2.0]),
        (third, [2.0, 2.0]),
        ({first: torch.zeros(2, 3, 2)}, [1.0, 1.0]),
    ):
        ((name, total),) = own.items()
        (those,) = Compression.sources(None, own, {n: tuple(t.shape) for n, t in halves.items()}).values()  # type: ignore[arg-type, union-attr]
        for place, source in enumerate(those):
            Compression.join(None, name, total, source, halves[source], place == 0)  # type: ignore[arg-type]
        assert total[:, 0, 0].tolist() == expected
    assert Compression.sources(None, whole, {"shared/w": (4, 5, 2)}) == {"shared/w": []}  # type: ignore[arg-type]


def test_another_stage_has_its_own(ranks: Any, tmp_path: Path) -> None:
    """zero1, then ddp and zero3 on as many ranks: what each had left, to the bit."""
    before = run(ranks, saved, 2, "zero1", "int8", str(tmp_path), False)
    for variant in ("ddp", "zero3"):
        for (left, _), (other, _, anew) in zip(
            before, run(ranks, loaded, 2, variant, "int8", str(tmp_path)), strict=True
        ):
            assert anew == {}
            assert left.keys() == other.keys()
            assert all(torch.equal(left[n], other[n]) for n in left)


def test_a_copy_in_memory_with_other_shards_starts_anew(ranks: Any, tmp_path: Path) -> None:
    """On as many ranks: a node has the memory of its ranks' peers alone. The reason is said."""
    run(ranks, saved, 4, PAIRS, "int8", str(tmp_path), True)
    for left, _, anew in run(ranks, loaded, 4, "zero3", "int8", str(tmp_path)):
        assert anew == {NAME: "has other tensors than the saved state"}
        assert not any(t.any() for t in left.values())


def overflown(rank: Rank, strategy: str) -> Any:
    """fp16, with a scale that overflows in the second of three steps; what is left after each, and the reports."""
    scale = {"params": "fp16", "loss_scale": {"initial": 1024.0}}
    trainer, _ = some_steps(rank, made(strategy, "int8", precision=scale), 0)
    found = []
    for s in range(1, 4):
        trainer.precision.loss_scale = 2.0**40 if s == 2 else 1024.0
        batches = mine(rank, *samples(N, seed=s), MICRO)
        report = trainer.step(s, batches, counted(batches), 1e-2, want_stop=False)
        found.append((report.skipped, kept(trainer, "left")))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_overflow_keeps_what_was_left(ranks: Any, strategy: str) -> None:
    """A step whose gradients overflow in fp16 is dropped on every rank, and what was left before stays, to the bit. Its unit is
    that of the gradient without loss scale."""
    for found in run(ranks, overflown, 2, strategy):
        assert [skipped for skipped, _ in found] == [False, True, False]
        one, two, three = (left for _, left in found)
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert not all(torch.equal(three[n], two[n]) for n in one)
        assert max(float(t.abs().max()) for t in three.values()) < 1e-2


def on_the_wire(rank: Rank, variant: str, name: str, model: Any = MODEL) -> tuple[float, float, float]:
    """Bytes of a step by the counters, without the step's own sums; by the record; and those that it saved."""
    trainer, _ = some_steps(rank, made(variant, name, model=model), 1)
    log = CollectiveCounters(rank.device)
    log.install()
    batches = mine(rank, *samples(N, seed=2), MICRO)
    trainer.step(2, batches, counted(batches), 0.0, want_stop=False)
    log.close()
    assert log.problem is None
    totals = log.totals()
    assert trainer.compression is not None
    assert trainer.compression.last is not None
    counted_bytes = sum(t.wire_bytes for op, t in totals.items() if op != "all_reduce" or name == "powersgd")
    numbers = next(count for _, count, what in MESSAGES if what == "sums of the step")
    sums = 8 * numbers * 2 * (rank.world_size - 1) / rank.world_size if name == "powersgd" else 0.0
    return counted_bytes - sums, trainer.compression.last.sent_bytes, trainer.compression.last.saved_bytes


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_counted_as_they_are_sent(ranks: Any, name: str) -> None:
    """Under ddp on 3 ranks the counters and the record have the same bytes, and what they save is the rest of fp32's."""
    numbers = sum(p.numel() for p in registry.load("model", "gpt")(job("ddp").model, VOCAB).parameters())
    for on_wire, sent, saved_bytes in run(ranks, on_the_wire, 3, "ddp", name):
        assert on_wire == pytest.approx(sent, abs=1)
        assert sent + saved_bytes == pytest.approx(2 * 4 * numbers * 2 / 3, abs=2)


def test_bytes_of_a_model_with_experts(ranks: Any) -> None:
    """PowerSGD sends 2 columns and 2 rows of each expert's matrix."""
    model = registry.load("model", "mixtral")(job("ddp", model=MOE).model, VOCAB)
    shapes = [p.shape for p in model.parameters()]
    numbers = sum(s[:-2].numel() * 2 * sum(s[-2:]) if len(s) > 1 else s.numel() for s in shapes)
    assert [sent for _, sent, _ in run(ranks, on_the_wire, 2, "ddp", "powersgd", MOE)] == [4 * numbers] * 2


@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(registry.load("compressor", n), Rows)])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """An overflow on one rank is seen on all."""
    compressor = compressors.build(name, {})
    assert isinstance(compressor, Rows)
    values = torch.randn(2, 2048)
    values[1, 100] = bad
    encoded = torch.zeros(2, compressor.row_bytes(2048), dtype=torch.uint8)
    compressor.encode(values, encoded)
    decoded = torch.empty(2, 2048)
    compressor.decode(encoded, decoded)
    assert torch.isfinite(decoded[0]).all()
    assert not torch.isfinite(decoded[1]).all()
    total = torch.zeros(2048)
    compressor.add(encoded, total)
    assert not torch.isfinite(total).all()


PLAN = CompressorPlan(feedback=True, outer=True)
"""Of `Wide`."""


class Wide(Rows):
    """As the compressor of a node with another version: rank 1 sends one byte more."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self._more = dist.get_rank() == 1

    def row_bytes(self, size: int) -> int:
        return size * 4 + self._more

    def encode(self, values_RS: Tensor, into_RB: Tensor) -> None:
        raise AssertionError("nothing is sent")

    decode = encode


def disagreeing(rank: Rank, more: dict[str, Any]) -> Any:
    made_here = job("ddp", comm={"compress": "tests.contracts.test_compressors:Wide", **more})
    try:
        Trainer(rank, made_here, full=N * CONTEXT)
    except UserError as error:
        return error.message
    return gather_json("nothing raised", rank.control)


@pytest.mark.parametrize("more", [{}, {"every": 2}])
def test_nodes_that_disagree(ranks: Any, more: dict[str, Any]) -> None:
    """One error on every rank, before anything is sent, that names the ranks: of gradients, and of outer ones."""
    message = "comm.compress: rank 1 would send other gradients than rank 0"
    assert run(ranks, disagreeing, 2, more) == [message] * 2


def too_low(rank: Rank) -> str:
    try:
        Trainer(rank, job("zero1", comm={"compress": "powersgd", "options": {"rank": 64}}), full=N * CONTEXT)
    except UserError as error:
        return f"{error.message}; {error.hint}"
    return ""


def test_a_rank_beyond_every_matrix(ranks: Any) -> None:
    """The error says which rank would do."""
    line = "comm.options.rank: 64: no matrix of the model is larger than its factors of that rank; set it to at most 12"
    assert run(ranks, too_low, 2) == [line] * 2


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (["comm.compress=itn8"], 'comm.compress: unknown "itn8"; did you mean "int8"?'),
        (["comm={compress: topk, options: {ratio: 0}}"], "comm.options.ratio: 0: input should be greater than 0"),
        (["comm={compress: topk, options: {ratio: 1.5}}"], "comm.options.ratio: 1.5: input should be less than or equal to 1"),
        (["comm={compress: topk, options: {rato: 0.1}}"], 'comm.options.rato: unknown field; did you mean "ratio"?'),
        (["comm={compress: int8, options: {block: 64}}"], "comm.options: block: int8 has no options; remove them"),
        (["comm={compress: topk, error_feedback: false}"], "comm.error_feedback: False loses every gradient"),
        (["comm.compress=int8", "precision.reduce=bf16"], "precision.reduce: 'bf16' and comm.compress: int8 both say"),
        (["comm.compress=int8", "parallel.strategy=json:loads"], "has no effect with parallel.strategy: json:loads"),
        (["comm.compress=int8", "model={name: mixtral}", "parallel.expert=2", "cluster.workers=2"],
         "does not go with parallel.expert: 2"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_error(fields: list[str], line: str) -> None:
    """With the field, its value and the remedy."""
    with pytest.raises(SpecError) as caught:
        load(Path(__file__).parents[2] / "jobs/quickstart.yaml", fields)
    assert line in caught.value.message
    assert "\n" not in caught.value.message


def test_compression_changes_the_numbers() -> None:
    """A resumed run must have the same fields of `comm`; without compression there are none."""
    path = Path(__file__).parents[2] / "jobs/quickstart.yaml"
    numbers = load(path, ["comm={compress: topk, options: {ratio: 0.1}}"]).numbers("f")
    assert (numbers["comm.compress"], numbers["comm.options.ratio"]) == ("topk", 0.1)
    assert not [name for name in load(path).numbers("f") if name.startswith("comm")]
