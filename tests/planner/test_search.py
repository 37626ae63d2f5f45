"""The search of meshes: limits that are known by hand, and measured passes in between."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import plan
from raydist.errors import UsageError, UserError
from raydist.planner import search as search_module
from raydist.planner.estimate import estimates
from raydist.planner.facts import Activations, Machine, Model, Param, Pass, Peak, Stage
from raydist.planner.measure import Planner
from raydist.planner.search import Found, _Between, _Tried, search
from raydist.planner.shares import planned
from raydist.planner.speed import find
from raydist.spec import JobSpec
from raydist.worker.pipeline_schedule import soonest, timeline
from tests.planner.jobs import SMALL, VOCAB, job

GIB, BLOCKS = 2**30, 8
SPEC = job(
    train={"global_batch": 64, "micro_batch": 1}, model={**SMALL, "layers": BLOCKS, "heads": 8}, cluster={"workers": 8}
)


class Blocks:
    """A model of 8 blocks, each with 256 MiB of parameters, and of a sequence with 1/8 GiB of activations, and 64 MiB that a layer
    sends to its tensor or context group. A tensor group shares all of it, a context group activations. With experts half of the
    parameters are theirs, and a layer sends 64 MiB to them."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self.each = spec, BLOCKS // spec.parallel.stages

    def _part(self, first: int, last: int) -> Model:
        parallel = self.spec.parallel
        rows = 2**20 // parallel.tensor
        if self.spec.model.name == "gpt":
            return Model(tuple(Param(f"{i}", (rows, 64), True, i, (2**20, 64)) for i in range(first, last)), 0)
        dense = (Param(f"{i}", (rows // 2, 64), True, i, (2**19, 64)) for i in range(first, last))
        of_expert, whole = (2**19 // parallel.expert, 64), (2**19, 64)
        held = Fraction(parallel.tensor, parallel.expert)
        experts = (Param(f"{i}.experts", of_expert, True, i, whole, held) for i in range(first, last))
        return Model((*dense, *experts), 0)

    def model(self) -> Model:
        whole = self._part(0, BLOCKS)
        if self.spec.parallel.pipeline == 1:
            return whole
        firsts = range(0, BLOCKS, self.each)
        stages = tuple(Stage(self._part(n, n + self.each), self.each, self.each / BLOCKS) for n in firsts)
        return Model(whole.params, 0, stages)

    def measure(self, how: Pass) -> Activations:
        ranks = self.spec.parallel.tensor * self.spec.parallel.context
        kept = GIB // 8 * self.each * how.micro_batch // ranks
        sent = 0 if ranks == 1 else 2**26 * self.each * how.micro_batch
        exchanged = 0 if self.spec.parallel.expert == 1 else 2**26 * self.each * how.micro_batch
        passed = 0 if how.stage == self.spec.parallel.stages - 1 else 2**20 * how.micro_batch
        peaks = (Peak("forward", 0, kept, 0), Peak("backward", 0, kept, 0))
        return Activations(kept, peaks, sent, passed_on=passed, exchanged=exchanged)

    sends = measure


def found(usable: float, spec: JobSpec = SPEC, per_node: int = 8, best: int = 5) -> Found:
    card = find("h100")
    assert card is not None
    machine = Machine(8, per_node, "cuda", round((usable + 1) * GIB / 0.95))
    return search(spec, machine, card, 1e12, BLOCKS, Blocks, best)


def meshes(result: Found) -> list[tuple[int, int]]:
    return [(one.spec.parallel.tensor, one.spec.parallel.pipeline) for one in result.best]


def test_with_much_memory_the_simplest_is_the_fastest() -> None:
    """Eight replicas, ddp, the largest micro-batch that is full: nothing waits. Of each mesh one combination is shown."""
    result = found(100)
    first = result.best[0]
    # 2 GiB each of weights and gradients, 4 of the optimizer, and 8 sequences of 1 GiB.
    assert (meshes(result)[0], first.changes) == ((1, 1), {"train.micro_batch": 8})
    assert (first.estimate.strategy, round(first.estimate.total / GIB)) == ("ddp", 16)
    assert first.because == "a rank computes 100% of a step"
    assert len(set(meshes(result))) > 1
    assert result.too_large == {}
    speeds = [one.speed.tokens_per_second for one in result.best]
    assert all(b < 1.006 * a for a, b in pairwise(speeds))


def test_a_budget_of_tokens_is_fitted() -> None:
    """With data.batching the size of a micro-batch is data.batching.max_tokens: so many of the longest sequences as fit, at least
    `min` and at most `max`, which stay as long as in the job."""
    batching = {"max_tokens": 100, "min": 2, "max": 8}
    spec = job(
        data={"batching": batching},
        train={"global_batch": 64},
        model={**SPEC.model.model_dump()},
        cluster={"workers": 8},
    )
    assert spec.longest == 50
    much, little = (found(usable, spec).best[0] for usable in (100, 9.5))
    assert much.changes == {"data.batching.max_tokens": 8 * 50, "data.batching.longest": 50}
    assert (little.estimate.strategy, little.spec.data.batching.max_tokens) == ("zero1", 4 * 50)
    assert [one.spec.longest for one in (much, little)] == [50, 50]
    assert spec.with_fields(little.changes).largest_pass == (4, 50)
    sizes = {one.spec.largest_pass[0] for usable in (100, 9.5, 3) for one in found(usable, spec).best}
    assert sizes <= {2, 4, 8}


def test_less_memory_shards_first() -> None:
    """The same mesh with fewer sequences, then with sharded state, where ddp's is too large; it says that ddp does not fit."""
    first = found(9.5).best[0]
    assert (first.estimate.strategy, first.spec.train.micro_batch, first.spec.parallel.replica) == ("zero1", 4, 1)
    assert "ddp does not fit with it" in first.because
    assert all(one.estimate.total <= 9.5 * GIB for one in found(9.5).best)


def test_a_mesh_where_no_replica_fits_on_a_rank() -> None:
    """The state takes 1 GiB of a rank on every mesh, and a sequence another one where a rank has whole layers: also the first
    stage of a pipeline, which keeps as many sequences as there are stages. So layers or sequences are shared."""
    result = found(1.6)
    assert result.best
    assert (1, 1) not in meshes(result)
    assert all(one.spec.parallel.tensor * one.spec.parallel.context > 1 for one in result.best)
    assert {"parallel.tensor", "parallel.context"} <= {name for one in result.best for name in one.changes}
    assert sum(result.too_large.values()) > 0
    # 8 x 2, 8 x 4; and 4 x 4, with tensor 1 and 2, and context 2.
    assert result.refused["more stages than blocks"] == 5


def test_a_mesh_whose_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a compressor that takes no half of a matrix: counted with its reason, and the others are searched."""
    whole = Blocks.model

    def model(self: Blocks) -> Model:
        if self.spec.parallel.tensor > 1:
            raise UserError("no matrix is larger", "take more rows")
        return whole(self)

    monkeypatch.setattr(Blocks, "model", model)
    result = found(100)
    assert result.best
    assert {one.spec.parallel.tensor for one in result.best} == {1}
    assert result.refused["no matrix is larger"] > 1


def test_experts_on_several_ranks() -> None:
    """Each number of ranks that share the experts is a mesh: more of them sum fewer gradients, and send tokens instead. Over nodes
    it is the first mesh on two of these that sends most over the network."""
    model = {**SPEC.model.model_dump(), "name": "mixtral"}
    spec = job(train={"global_batch": 64, "micro_batch": 1}, model=model, cluster={"workers": 8})
    result = found(100, spec, per_node=4, best=1000)
    plain = {
        one.spec.parallel.expert: one
        for one in result.best
        if one.spec.parallel.stages == one.spec.parallel.replica == 1
    }
    assert [*sorted(plain)] == [1, 2, 4, 8]
    assert plain[1].estimate.exchanged == 0
    assert all(plain[n].changes["parallel.expert"] == n for n in (2, 4, 8))
    count = 64 // 8 // plain[8].spec.train.micro_batch
    assert plain[8].estimate.exchanged == count * plain[8].spec.train.micro_batch * 8 * 2**26
    dense, experts = 8 * 2**27, 8 * 2**27
    for n, one in plain.items():
        held = 8 // n
        strategy = one.estimate.strategy
        assert strategy == "ddp"
        assert one.estimate.sent == 2 * dense * 7 // 8 + 2 * (held - 1) * experts // n // held
        # Of eight steps around all ranks two leave a node; of a ring of the n-th ranks, two of `held`, none of 4 on one node.
        network = 2 * dense * 7 // 8 // 4 + 2 * (held - 1) * experts // n // held * min(2 / held, 1)
        network += one.estimate.exchanged * (4 / 7 if n == 8 else 0)
        assert one.estimate.network == pytest.approx(network, abs=2)
        assert one.estimate.within_node == one.estimate.sent + one.estimate.exchanged - one.estimate.network
    slower = [plain[n].speed.communication for n in (4, 8)]
    assert slower[0] < slower[1]  # eight ranks are on two nodes


def test_where_nothing_fits_all_are_counted() -> None:
    """Every combination was looked at, and has a reason."""
    result = found(0.01)
    assert result.best == ()
    assert sum(result.too_large.values()) == result.combinations > 100
    assert result.slower == 0


MOE = job(
    train={"global_batch": 64, "micro_batch": 1},
    model={**SPEC.model.model_dump(), "name": "mixtral"},
    cluster={"workers": 8},
)


@pytest.mark.parametrize("spec", [SPEC, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(("usable", "best"), [(1.6, 1000), (4.0, 5), (9.5, 1)])
def test_the_best_of_limits_are_the_best_of_all(
    monkeypatch: pytest.MonkeyPatch, spec: JobSpec, usable: float, best: int
) -> None:
    """The meshes found are those of a search that gives all combinations a forecast, and the memory of a pass; and no forecast is
    faster than its limit."""
    tried: list[_Tried] = []
    fitting = search_module._fitting

    def keep(spec: JobSpec, machine: Machine, combinations: list[_Tried], refused: Counter[str], best: int) -> Found:
        tried.extend(combinations)
        return fitting(spec, machine, combinations, refused, best)

    monkeypatch.setattr(search_module, "_fitting", keep)
    result = found(usable, spec, per_node=4, best=best)
    speeds = [one.forecast(timeline).tokens_per_second for one in tried]
    limits = [one.forecast(soonest).tokens_per_second for one in tried]
    assert all(limit >= speed * (1 - 1e-12) for limit, speed in zip(limits, speeds, strict=True))
    order = [*planned(spec)]
    ranked = sorted(
        zip(tried, speeds, strict=True),
        key=lambda pair: (
            -round(math.log(pair[1]) / math.log(1.005)), pair[0].spec.parallel.replica * pair[0].spec.parallel.chunks,
            pair[0].spec.parallel.expert, order.index(pair[0].strategy), -pair[0].spec.train.micro_batch,
        ),
    )  # fmt: skip
    machine = Machine(8, 4, "cuda", round((usable + 1) * GIB / 0.95))
    shown: dict[tuple[int, ...], tuple[str, int, float, int]] = {}
    for one, speed in ranked:
        if one.mesh not in shown and len(shown) < best:
            total = max(e.total for e in estimates(one.strategy, one.spec, machine, one.model, one.measure))
            if machine.usable is not None and total <= machine.usable:
                shown[one.mesh] = one.strategy, one.spec.train.micro_batch, speed, total
    assert [*shown.values()] == [
        (one.estimate.strategy, one.spec.train.micro_batch, one.speed.tokens_per_second, one.estimate.total)
        for one in result.best
    ]
    assert result.combinations == len(tried)
    assert result.slower > 0


def test_passes_in_between() -> None:
    """At both ends they are the measured ones; in between no less than the measured peak, and within 2% of it."""
    spec = job(model={**SMALL, "width": 64, "context": 64}, precision="bf16")
    planner = Planner(spec, VOCAB, "cuda")
    between = _Between(planner.measure)
    for micro in (1, 4, 32):
        real, guessed = (measure(Pass(micro, "none", False, True)) for measure in (planner.measure, between))
        for a, b in zip(real.peaks, guessed.peaks, strict=True):
            assert a.total - 1 <= b.total <= 1.02 * a.total
            assert micro == 4 or a == b
        assert guessed.saved == pytest.approx(real.saved, abs=1)


@pytest.mark.parametrize("micro_batches", [200, 203])
@pytest.mark.parametrize(
    ("ranks", "times"),
    [
        (4, [1.0, 1.3, 0.7, 1.1]),
        (4, [1.0, 1.3, 0.7, 1.1, 0.9, 1.2, 1.0, 0.8]),
        (2, [8.0, 8.0, 8.0, 7.6]),
        (2, [3.0, 1.0]),
    ],
)
def test_many_micro_batches_are_not_played_out(
    monkeypatch: pytest.MonkeyPatch, ranks: int, times: list[float], micro_batches: int
) -> None:
    """A long step of uneven stages ends when a short one and equal groups do; no rank computes longer than that."""
    arguments = (times, [2 * t for t in times], ranks, micro_batches, [0.05] * (len(times) - 1))
    short = timeline(*arguments)
    monkeypatch.setattr("raydist.worker.pipeline_schedule._MANY", 1000)
    long = timeline(*arguments)
    assert short.busy == pytest.approx(long.busy)
    assert short.ends == pytest.approx(long.ends, rel=0.01)
    assert max(short.ends) >= max(short.busy)
    for count in (1, ranks, ranks + 1, micro_batches):
        arguments = (*arguments[:3], count, arguments[4])
        least, real = soonest(*arguments), timeline(*arguments)
        assert all(a <= b * (1 + 1e-12) for a, b in zip(least.ends, real.ends, strict=True))
        assert least.busy == pytest.approx(real.busy)


SMALL_JOB = """\
model: {layers: 4, width: 32, heads: 2, context: 16}
data: {source: corpus/*.txt}
train: {steps: 1, global_batch: 8, micro_batch: 2}
"""


def call(*arguments: Any) -> str:
    app = typer.Typer()
    app.command()(plan.plan)
    done = CliRunner(env={"COLUMNS": "60"}).invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command(tmp_path: Path) -> None:
    """The fastest of each mesh with its figures, which are those of a plan of that mesh, in lines for people and as JSON; without a
    known GPU one error."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_JOB)
    asked = (path, "--gpus", 4, "--device", "h100", "--search")
    made = json.loads(call(*asked, "--json"))
    assert 2 <= len(made["best"]) <= 5
    one = next(one for one in made["best"] if one["mesh"]["pipeline"] > 1)
    changes = [word for name, value in one["set"].items() for word in ("--set", f"{name}={value}")]
    same = json.loads(call(path, "--gpus", 4, "--device", "h100", *changes, "--json"))
    row = next(row for row in same["strategies"] if row["strategy"] == one["strategy"])
    assert one["speed"]["tokens_per_second"] == pytest.approx(row["speed"]["tokens_per_second"], rel=1e-6)
    # The search interpolates between micro-batches, so it is above the plan where the peak is another moment's: 2.9% here.
    assert one["total"] == pytest.approx(row["total"], rel=0.03)
    assert one["total"] >= row["total"] - 1
    page = (Path(__file__).parents[2] / "docs/how-to/plan.md").read_text()
    assert all(f"`{key}`" in page for key in {*made, *made["best"][0]})
    out = call(*asked).splitlines()
    assert "combinations in" in out[1]
    assert out[2].split()[:5] == [*made["best"][0]["mesh"]][:5] == ["tensor", "context", "pipeline", "chunks", "expert"]
    assert out[3].split()[:6] == ["1", *(str(made["best"][0]["mesh"][axis]) for axis in out[2].split()[:5])]
    with pytest.raises(UsageError, match="--search compares forecasts"):
        call(path, "--search", "--gpus", 4)


def test_the_estimate_of_a_search_is_that_of_a_plan() -> None:
    """With the measured passes themselves instead of those in between, the memory of each rank is the same."""
    spec = job(parallel={"pipeline": 2}, cluster={"workers": 2}, train={"global_batch": 8, "micro_batch": 1})
    planner = Planner(spec, VOCAB, "cuda")
    model, machine = planner.model(), Machine(2, 8, "cuda")
    exact, between = (estimates("ddp", spec, machine, model, m) for m in (planner.measure, _Between(planner.measure)))
    assert exact == between
