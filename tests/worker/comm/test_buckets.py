"""DDP's bucket size: the model against hand-computed figures and DDP's own buckets, the choice, and that a run keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.data.prepare import prepare
from raydist.run.directory import RunDir, begin_attempt
from raydist.spec import CommSpec, JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.comm import groups
from raydist.worker.comm.buckets import choose, measure
from raydist.worker.comm.buckets.measure import Passes, all_reduce_line, passes
from raydist.worker.comm.buckets.model import MIB, AlphaBeta, Arrival, buckets, exposed, fit, suggest
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import _tree_all_reduce, ddp
from raydist.worker.parallel.ddp import Strategy
from raydist.worker.parts import Parts
from raydist.worker.step import loss_sum
from tests.training import VOCAB, alone, job, run, samples

SIZES = [4, 2**10, 2**16, 2**20, 2**24]


def evenly(sizes: list[int], backward_s: float) -> list[Arrival]:
    """Gradients of these sizes, in this order, as if backward made its bytes at one speed."""
    return [Arrival(n, backward_s * sum(sizes[: i + 1]) / sum(sizes)) for i, n in enumerate(sizes)]


def test_a_line_is_found() -> None:
    """Exact if the points are on a line; still within 2% if one of five is ten times too slow, for any number of points per size:
    the fit recovers a bandwidth that only one in a hundred messages reaches."""
    line = AlphaBeta(5e-5, 2e-9)
    points = [(float(n), line.seconds(n)) for n in SIZES for _ in range(3)]
    found = fit(points)
    assert (found.alpha, found.beta) == pytest.approx((5e-5, 2e-9), rel=1e-6)
    assert found.residual == pytest.approx(0, abs=1e-9)
    jitter = [1.0, 1.01, 0.99]
    disturbed = [(n, t * (10 if i % 5 == 2 else jitter[i % 3])) for i, (n, t) in enumerate(points)]
    found = fit(disturbed)
    assert (found.alpha, found.beta) == pytest.approx((5e-5, 2e-9), rel=0.02)
    assert 0 < found.residual < 0.02
    slow = AlphaBeta(1e-3, 4e-8)
    uneven = [
        (n, slow.seconds(n) * f) for n, times in ((4096, 50), (2**16, 10)) for f in (0.99, 1.01) for _ in range(times)
    ]
    assert fit([*uneven, (2**21, slow.seconds(2**21))]).beta == pytest.approx(4e-8, rel=0.02)


def test_a_line_is_never_negative() -> None:
    """A straight line through points that bend upwards or downwards would have a negative intercept or slope."""
    assert fit([(1e3, 1e-6), (1e6, 1e-2), (2e6, 4e-2)]).alpha == 0
    falling = fit([(1e3, 2e-3), (1e6, 1e-3)])
    assert falling.beta == 0
    assert falling.alpha > 0
    with pytest.raises(ValueError, match="two sizes"):
        fit([(8, 1e-6), (8, 2e-6)])


def test_buckets_by_hand() -> None:
    """A bucket ends with the gradient that fills it; torch's default is a first bucket of 1 MiB and then 25."""
    arrivals = [Arrival(MIB // 2, float(i)) for i in range(1, 101)]  # 50 MiB
    assert buckets(arrivals, 20.0) == [Arrival(20 * MIB, 40.0), Arrival(20 * MIB, 80.0), Arrival(10 * MIB, 100.0)]
    assert buckets(arrivals, None) == [Arrival(MIB, 2.0), Arrival(25 * MIB, 52.0), Arrival(24 * MIB, 100.0)]
    assert buckets([Arrival(7 * MIB, 1.0)], 2.0) == [Arrival(7 * MIB, 1.0)]
    assert buckets([], 2.0) == []


def test_exposed_by_hand() -> None:
    """Two buckets, ready after 1 and 2 s; each all-reduce takes 1.5 s: the second starts at 2.5 and ends at 4."""
    made = [Arrival(MIB, 1.0), Arrival(MIB, 2.0)]
    assert exposed(made, 2.0, AlphaBeta(1.5, 0.0)) == pytest.approx(2.0)
    assert exposed(made, 2.0, AlphaBeta(0.25, 0.0)) == pytest.approx(0.25)  # the last bucket's own
    assert exposed(made, 2.0, AlphaBeta(0.0, 1 / MIB), share=0.5) == pytest.approx(0.5)  # half of a second's bytes


def test_suggested_where_overlap_pays() -> None:
    """12 MiB in 0.1 s of backward at 25 MB/s: small buckets overlap with most of backward; the reason has the figures."""
    arrivals = evenly([MIB // 4] * 48, 0.1)
    found = suggest(arrivals, 0.15, 0.1, AlphaBeta(1e-3, 4e-8))
    assert found.bucket_mb is not None
    assert found.bucket_mb <= 2
    assert found.exposed_s < found.default_s
    assert "exposed" in found.because
    assert "12.0 MiB" in found.because
    # The middle one of those within 1% of a pass of the best.
    other = {mb: exposed(buckets(arrivals, mb), 0.1, AlphaBeta(1e-3, 4e-8)) for mb in (0.5, 1.0, 2.0, 4.0, 8.0)}
    good = [mb for mb, seconds in other.items() if seconds <= min(other.values()) + 0.0015]
    assert found.bucket_mb == good[(len(good) - 1) // 2]
    assert found.exposed_s == other[found.bucket_mb]


def test_the_middle_of_equals() -> None:
    """With a pass of 10 s, buckets of 0.5, 1 and 2 MiB are equally good: the middle one is chosen, since backward may be faster
    than measured, and a bucket may cost more."""
    arrivals, line = evenly([MIB // 4] * 48, 0.8), AlphaBeta(1e-3, 4e-8)
    left = [exposed(buckets(arrivals, mb), 0.8, line) for mb in (0.5, 1.0, 2.0, 4.0)]
    assert max(left[:3]) < min(left) + 0.1 < left[3]
    assert suggest(arrivals, 10.0, 0.8, line).bucket_mb == 1.0


@pytest.mark.parametrize(
    ("line", "pass_s"),
    [
        (AlphaBeta(1e-5, 1e-11), 0.15),  # a link so fast that the size is irrelevant
        (AlphaBeta(1e-3, 4e-8), 1000.0),  # a pass so long that communication is negligible
    ],
)
def test_torchs_where_nothing_is_gained(line: AlphaBeta, pass_s: float) -> None:
    """A gain below 3% of a pass does not change the size."""
    found = suggest(evenly([MIB // 4] * 48, 0.1), pass_s, 0.1, line)
    assert found.bucket_mb is None
    assert "no size is expected to gain" in found.because


def test_larger_ones_where_latency_is_dear() -> None:
    """400 MiB with 20 ms of latency each and almost no backward time: one bucket of the largest size."""
    found = suggest(evenly([MIB] * 200, 0.001), 0.001, 0.001, AlphaBeta(0.1, 1e-10))
    assert found.bucket_mb == 256.0


def wide() -> JobSpec:
    """1.2 MiB of gradients."""
    return job("ddp", {"layers": 4, "width": 96, "heads": 2, "context": 8}, train={"micro_batch": 2, "global_batch": 4})


def build() -> nn.Module:
    """Its model."""
    torch.manual_seed(1)
    made: nn.Module = registry.load("model", "gpt")(wide().model, VOCAB)
    return made


def example(module: nn.Module, samples: int = 1) -> torch.Tensor:
    """Its loss."""
    tokens, targets = _samples(samples)
    return loss_sum(module, MicroBatch(tokens, targets))


_samples = samples


def seen(rank: Rank, bucket_mb: float | None) -> tuple[list[int], list[int]]:
    """Bytes of the buckets that the model predicts, of those seen in a real backward, and of those that DDP sums in its second
    one."""
    made = passes(wide(), rank, bucket_mb, build, example)
    assert made.synced_s > 0
    assert made.pass_s > made.backward_s > 0
    times = [a.at for a in made.arrivals]
    assert times == sorted(times)
    ddp = DistributedDataParallel(build(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)  # type: ignore[arg-type]
    summed: list[int] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]  # torch reads its annotations
        summed.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, note)
    for _ in range(2):
        summed.clear()
        example(ddp).backward()  # type: ignore[no-untyped-call]
    return [b.nbytes for b in buckets(made.arrivals, bucket_mb)], summed


@pytest.mark.parametrize("bucket_mb", [0.25, None])
def test_buckets_are_ddps(ranks: Any, bucket_mb: float | None) -> None:
    """The buckets predicted from a real backward pass's gradients are DDP's, to the byte."""
    for ours, ddps in run(ranks, seen, 2, bucket_mb):
        assert ours == ddps
        assert len(ours) > 1


def repeated(rank: Rank, long_s: float) -> int:
    """The number of passes of a trial in which those are long that take so many seconds."""
    count = 0

    def counted(module: nn.Module, **more: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return example(module, **more)

    before, measure.LONG_S = measure.LONG_S, long_s
    try:
        passes(wide(), rank, None, build, counted)
    finally:
        measure.LONG_S = before
    return count


def test_long_passes_are_measured_once(ranks: Any) -> None:
    """With a sum and without one, after one of the strategy's, and one to warm up."""
    assert run(ranks, repeated, 2, 1e9) == [8, 8]
    assert run(ranks, repeated, 2, 1e-9) == [4, 4]


def opened(rank: Rank, ways: list[dict[str, Any]]) -> list[int]:
    """The number of torch's groups after a trial of each of these, and after the run's own strategy of the last one."""
    counts = []
    for comm in ways:
        spec = wide().model_copy(update={"comm": CommSpec.model_validate(comm)})
        passes(spec, rank, 0.25, build, example)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    Strategy(spec, Mesh(rank)).wrap(build(), example)
    again = Strategy(spec, Mesh(rank))
    again.wrap(build(), example)
    return [*counts, len(dist.distributed_c10d._world.pg_map)]


def test_trials_use_their_groups_again(ranks: Any) -> None:
    """int8 takes two groups on gloo and `direct` one: later trials open none, and neither does the run. Only a second strategy
    beside it does, whose messages must not meet those of the first."""
    for counts in run(ranks, opened, 2, [{}, {"compress": "int8"}, {"topology": "direct"}, {"compress": "int8"}]):
        start = counts[0]
        assert counts == [start, start + 2, start + 2, start + 2, start + 4]


def summed(rank: Rank, parts: int) -> list[int]:
    """Of each bucket that a trial with so many virtual ranks sums along their tree: the number of this rank's nodes."""
    nodes: list[int] = []

    class Counted(_tree_all_reduce.TreeAllReduce):
        def __call__(self, own: Sequence[torch.Tensor], *more: Any) -> torch.futures.Future[torch.Tensor]:
            nodes.append(len(own))
            return super().__call__(own, *more)

    train = {"micro_batch": 1, "global_batch": parts, "virtual_ranks": parts}
    before, ddp.TreeAllReduce = ddp.TreeAllReduce, Counted  # type: ignore[misc]
    try:
        made = passes(job("ddp", wide().model.model_dump(), train=train), rank, 0.25, build, example)
    finally:
        ddp.TreeAllReduce = before  # type: ignore[misc]
    assert made.synced_s > 0
    return nodes


@pytest.mark.parametrize("parts", [4, 5])
def test_trials_sum_virtual_ranks_along_their_tree(ranks: Any, parts: int) -> None:
    """As the run does: each bucket as so many nodes as this rank's parts make, in the four passes with a sum."""
    for rank, nodes in enumerate(run(ranks, summed, 2, parts)):
        assert set(nodes) == {len(Parts(parts, rank, 2).nodes_of_copies()[rank])}
        assert len(nodes) % 4 == 0
        assert len(nodes) > 4


def line_of(rank: Rank) -> AlphaBeta:
    """The fitted line of an all-reduce."""
    return all_reduce_line(rank)


def test_the_line_of_an_all_reduce(ranks: Any) -> None:
    """The line is the same on all ranks; on one host a MiB takes more than zero and less than a second."""
    first, second = run(ranks, line_of, 2)
    assert first == second
    assert 0 < first.beta * MIB < 1


def settled(rank: Rank, folder: str, gain: float) -> list[Any]:
    """(the choice, number of measurements), if trial passes with another size are faster by `gain`."""
    count = 0

    def measured(spec: JobSpec, rank: Rank, bucket_mb: float | None, build: Any, example: Any) -> Passes:
        nonlocal count
        count += 1
        return Passes(1.0 if bucket_mb is None else 1.0 / gain, 0.5, 0.3, tuple(evenly([MIB] * 12, 0.3)))

    before = choose.passes, choose.all_reduce_line
    choose.passes, choose.all_reduce_line = measured, lambda rank: AlphaBeta(1e-3, 4e-8)
    try:
        chosen = choose.settle(wide(), rank, RunDir(folder), VOCAB, build, example)
    finally:
        choose.passes, choose.all_reduce_line = before
    return [chosen.bucket_mb, chosen.because, count]


def test_chosen_once_and_kept(ranks: Any, tmp_path: Path) -> None:
    """A faster size is chosen, with its reason; a restart uses it without measuring again; another run of the same job reuses it,
    unless the stored choice is damaged; a run elsewhere finds no gain and keeps torch's default."""
    first = run(ranks, settled, 2, str(tmp_path / "runs" / "a"), 1.5)
    assert first[0] == first[1]
    bucket_mb, because, count = first[0]
    assert bucket_mb is not None
    assert count == 3  # torch's size is measured again after the candidate
    assert "0.667 s" in because
    tuned, aside = tmp_path / "runs" / ".tuned", tmp_path / "aside"
    tuned.rename(aside)
    again = run(ranks, settled, 2, str(tmp_path / "runs" / "a"), 0.5)
    assert again == [[bucket_mb, because, 0]] * 2
    aside.rename(tuned)
    assert [p.name for p in (tmp_path / "runs" / "a" / "buckets").iterdir()] == ["world-00002.json"]
    other = run(ranks, settled, 2, str(tmp_path / "runs" / "b"), 0.5)
    assert [(o[0], o[2]) for o in other] == [(bucket_mb, 0)] * 2
    assert "earlier run" in other[0][1]
    assert (
        json.loads((tmp_path / "runs" / "b" / "buckets" / "world-00002.json").read_text())["chosen"]["bucket_mb"]
        == bucket_mb
    )
    elsewhere = run(ranks, settled, 2, str(tmp_path / "other" / "c"), 1.01)
    assert [(o[0], o[2]) for o in elsewhere] == [(None, 2)] * 2
    assert elsewhere[0][1].startswith("torch's: trial passes took")
    (left,) = tuned.iterdir()
    left.write_text("{")  # the stored choice is only a hint
    assert [o[2] for o in run(ranks, settled, 2, str(tmp_path / "runs" / "d"), 1.5)] == [3, 3]


def test_trials_send_the_bytes_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's buckets leave exposed is that of the bytes of the job's compressor; where that is left to measurement, of plain
    sums, and so are the passes."""
    arrivals, line, sent = evenly([MIB] * 12, 0.3), AlphaBeta(1e-3, 4e-8), []

    def measured(spec: JobSpec, *_: Any) -> Passes:
        sent.append((spec.comm.compress, spec.comm.topology))
        return Passes(1.0, 0.5, 0.3, tuple(arrivals))

    monkeypatch.setattr(choose, "passes", measured)
    monkeypatch.setattr(choose, "all_reduce_line", lambda rank: line)
    for comm, bits in (({}, 32), ({"compress": "int8"}, 8 + 32 / 1024), ({"compress": "auto", "topology": "auto"}, 32)):
        spec = wide().model_copy(update={"comm": CommSpec.model_validate(comm)})
        told = choose.tried(spec, alone(), build, example).measured["suggestion"]["default_s"]
        assert told == pytest.approx(exposed(buckets(arrivals, None), 0.3, line, bits / 32))
    assert set(sent) == {("none", "torch"), ("int8", "torch")}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("\n".join(f"line {i} of {i * i}" for i in range(200)))
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.2)
    return str(folder / "tokens")


def trained(
    rank: Rank, dataset: str, folder: str, bucket_mb: Any, until: int | None = None, comm: Any = None
) -> tuple[Any, list[str]]:
    """Six steps with dropout in the whole loop: (step, loss, grad norm) of each, and what rank 0 says was chosen."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 2, "width": 64, "heads": 2, "context": 8, "dropout": 0.1},
            "train": {"steps": 6, "global_batch": 6, "micro_batch": 1},
            "parallel": {"bucket_mb": bucket_mb},
            "comm": comm or {},
            "checkpoint": {"every": 3},
            "eval": {"every": None},
        }
    )
    steps, events = [], []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        steps.extend((r["step"], r["loss"], r["grad_norm"]) for r in new)
        events.extend(e["text"] for e in told if e["kind"] == "note")
        events.extend(f"bucket_mb: {e['bucket_mb']}, {e['because']}" for e in told if e["kind"] == "comm_chosen")

    run = RunDir(folder)
    attempt = run.lineage().newest + 1
    if rank.control is not None:
        dist.barrier(group=rank.control)  # all have read the number
    if rank.first:
        begin_attempt(run, attempt)
    train(Job(spec, run, dataset, attempt, until), rank, MonitorChannel(push, lambda: None) if rank.first else None)
    return steps, [text for text in events if "bucket_mb" in text]


def test_what_is_tried_leaves_no_trace(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """On two ranks, where bucket sizes change no bit: losses with auto and real measurements equal those without, including
    dropout; so do those of a run split into two attempts, which measures once."""
    plain, _ = run(ranks, trained, 2, dataset, str(tmp_path / "one" / "plain"), None)[0]
    auto, notes = run(ranks, trained, 2, dataset, str(tmp_path / "two" / "auto"), "auto")[0]
    assert len(plain) == 6
    assert auto == plain
    assert len(notes) == 1
    assert notes[0].startswith("parallel.bucket_mb: auto: torch's: ")
    kept = tmp_path / "two" / "auto" / "buckets" / "world-00002.json"
    before = kept.read_bytes()
    first, _ = run(ranks, trained, 2, dataset, str(tmp_path / "three" / "cut"), "auto", 3)[0]
    second, again = run(ranks, trained, 2, dataset, str(tmp_path / "three" / "cut"), "auto")[0]
    assert first + second == plain
    assert len(again) == 1
    assert kept.read_bytes() == before


def test_a_kept_size_is_the_one_that_trains(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """On three ranks, where bucket sizes change bits: a run that chose 0.02 MiB has the losses of `bucket_mb: 0.02`."""
    (tmp_path / "kept" / "buckets").mkdir(parents=True)
    chosen = {"bucket_mb": 0.02, "because": "it was so", "measured": {}}
    (tmp_path / "kept" / "buckets" / "world-00003.json").write_text(json.dumps({"v": 1, "chosen": chosen}))
    kept, notes = run(ranks, trained, 3, dataset, str(tmp_path / "kept"), "auto")[0]
    asked, _ = run(ranks, trained, 3, dataset, str(tmp_path / "asked"), 0.02)[0]
    torchs, _ = run(ranks, trained, 3, dataset, str(tmp_path / "torchs"), None)[0]
    assert notes == ["parallel.bucket_mb: auto: it was so"]
    assert kept == asked
    assert kept != torchs


def bound(rank: Rank) -> list[Any]:
    """The devices of groups that are made while the world is bound to one, and of the world afterwards."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)
    try:
        made = [groups.another(range(rank.world_size), alone=alone) for alone in (False, True)]
        return [str(group.bound_device_id) for group in (*made, world)]
    finally:
        world.bound_device_id = None


def test_members_alone_connect_a_group(ranks: Any) -> None:
    """A group that other ranks know nothing of has no device: torch then splits no communicator that all of them share."""
    for devices in run(ranks, bound, 2):
        assert devices == ["cuda:0", "None", "cuda:0"]
