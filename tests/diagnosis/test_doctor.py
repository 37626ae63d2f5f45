"""The engine: causes of one symptom compete, a finding is told when it changes and when it is over; from a run's folder alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from raydist.diagnosis import Diagnosis, Facts, Former, check_job, examine, rules, sizes, thresholds, words_of_tree
from raydist.diagnosis._symptoms import SYMPTOMS
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, Finding
from raydist.run.directory import ATTEMPTS, SPEC, RunDir
from raydist.run.log import read_events
from raydist.spec import JobSpec

T = 1_700_000_000.0
STEP_S = 0.5


def rows(
    seconds: int,
    slow: Callable[[int, int], dict[str, float]] = lambda rank, second: {},
    ranks: int = 4,
    attempt: int = 1,
    begin: int = 0,
) -> Iterator[list[dict[str, Any]]]:
    """Each second the rows of `ranks` ranks and their node. `slow(rank, second)`: additional `compute` in that second, which the
    others wait for, and what the counters grow by."""
    rng = np.random.default_rng(5)
    totals: list[dict[str, float]] = [{} for _ in range(ranks)]
    for second in range(begin, begin + seconds):
        grown = [slow(rank, second) for rank in range(ranks)]
        most = max(one.get("compute", 0.0) for one in grown)
        for total, one in zip(totals, grown, strict=True):
            own = (0.9 - most) * (1 + 0.01 * float(rng.standard_normal())) + one.get("compute", 0.0)
            adds = {"forward_seconds": own / 3, "backward_seconds": 1.0 - own / 3, "all_reduce_exposed_seconds": 1.0 - own,
                    "cpu_seconds": 1.05 * (own - one.get("compute", 0.0)), "run_delay_seconds": 0.01, "gc_seconds": 0.001,
                    "throttled_seconds": 0.0, "major_faults_count": 0.0, "stopped_count": 0.0,
                    "held_seconds": 0.0, "hooks_seconds": 0.0}  # fmt: skip
            for name, value in adds.items():
                total[name] = total.get(name, 0.0) + value + one.get(name, 0.0)
        at = T + second
        who = {"host": "h", "node": "10.0.0.1", "at": at}
        node = {**who, "kind": "node", "cpu_count": 8, "cpu_util": 0.5, "steal_seconds": 0.0}
        made = [
            {**who, "kind": "rank", "rank": r, "attempt": attempt, "step": int(second / STEP_S) + 2, **t}
            for r, t in enumerate(totals)
        ]
        yield [node, *made]


def told(diagnosis: Diagnosis, *parts: Iterator[list[dict[str, Any]]]) -> list[tuple[float, Finding]]:
    """(seconds since T, finding) of all that is told, asked each two seconds."""
    found, waiting = [], []
    for part in parts:
        for own in part:
            waiting += own
            if int(own[0]["at"]) % 2 == 0:
                found += [(own[0]["at"] - T, one) for one in diagnosis.observe(waiting)]
                waiting = []
    return found


def hog(
    begin: int, end: int, counter: str = "run_delay_seconds", lost: float = 0.4
) -> Callable[[int, int], dict[str, float]]:
    """Rank 2 computes longer from `begin` to `end`, and this counter says why."""
    return lambda rank, second: {"compute": lost, counter: lost} if rank == 2 and begin <= second < end else {}


@pytest.mark.parametrize(
    ("counter", "rule"),
    [
        ("run_delay_seconds", "cpu_stolen"),
        ("throttled_seconds", "cpu_throttled"),
        ("held_seconds", "process_stopped"),
        ("hooks_seconds", "slow_hook"),
        ("gc_seconds", "gc_pauses"),
        ("cpu_seconds", "own_code"),
        ("step", "own_code"),
    ],
)
def test_one_symptom_one_finding(counter: str, rule: str) -> None:
    """Found within 15 s, once; named with rank, host, evidence and remedy; the other causes with what speaks against them; told
    once more when it is over."""
    found = told(Diagnosis(), rows(120, hog(50, 90, counter)))
    assert [(one.rule, one.rank, one.state) for _, one in found] == [(rule, 2, "new"), (rule, 2, "over")]
    (first, finding), (last, _) = found
    assert 50 < first <= 65
    assert 90 < last <= 120
    assert finding.culprit == {"rank": 2, "host": "h", "node": "10.0.0.1"}
    assert 0.15 <= (finding.lost or 0.0) < 0.45  # of the newest 12 s, which the fault may fill only in part
    assert finding.evidence
    assert finding.remedy
    assert all(one["from"] for one in finding.evidence)
    causes = [r for r in rules() if r.symptom == "slow_compute" and not r.name.startswith(("gpu", "pcie"))]
    assert len(finding.others) == len(causes) - 1
    assert all(other["against"] for other in finding.others)
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


def test_another_cause_is_told_as_a_change() -> None:
    """A rank that is still slow, first because of its host, then because of its quota: the second finding says it has changed."""

    def both(rank: int, second: int) -> dict[str, float]:
        return hog(50, 100)(rank, second) or hog(100, 200, "throttled_seconds")(rank, second)

    found = told(Diagnosis(), rows(160, both))
    assert [(one.rule, one.state) for _, one in found] == [("cpu_stolen", "new"), ("cpu_throttled", "changed")]


def test_a_crowded_host_is_no_fault() -> None:
    """All ranks lack a processor for half of the time, and one happens to be late by a fifth of it: nothing is told."""

    def crowded(rank: int, second: int) -> dict[str, float]:
        late = 0.2 if rank == second // 15 % 4 else 0.0
        return {"run_delay_seconds": 0.5 + late, "compute": late}

    assert told(Diagnosis(), rows(120, crowded)) == []


@pytest.mark.parametrize(
    ("spec", "size", "setting"),
    [
        ({}, 1 << 10, "parallel.bucket_mb"),
        ({"parallel": {"strategy": "zero2"}}, 1 << 10, "train.micro_batch"),
        ({"parallel": {"strategy": "ddp", "bucket_mb": "auto"}}, 1 << 10, "train.micro_batch"),
        ({}, 1 << 20, "comm.compress"),
        ({"comm": {"compress": "none"}}, 1 << 20, "comm.compress"),
        ({"comm": {"compress": "int8"}}, 1 << 20, "train.micro_batch"),
    ],
)
def test_what_helps_against_waiting_for_the_network(spec: dict[str, Any], size: int, setting: str) -> None:
    """All ranks of two nodes wait alike, with messages of that size: the remedy is a setting that the job can change."""

    def waiting() -> Iterator[list[dict[str, Any]]]:
        for node, *ranks in rows(60):
            second = node["at"] - T + 1
            for row in ranks:
                row |= {"forward_seconds": 0.1 * second, "backward_seconds": 0.9 * second, "run_delay_seconds": 0.0,
                        "all_reduce_exposed_seconds": 0.7 * second, "all_reduce_count": 10 * second,
                        "all_reduce_bytes": 10 * second * size}  # fmt: skip
            yield [node, {**node, "node": "10.0.0.2"}, *ranks]

    ((_, finding),) = told(Diagnosis(spec=spec), waiting())
    assert (finding.rule, finding.culprit["setting"]) == ("comm_bound", setting)
    assert setting.rpartition(".")[2] in finding.remedy


def test_a_rank_that_is_slow_from_the_start_is_named() -> None:
    """The more it costs the others, the fewer seconds of history it takes; one that costs a fifth of the time needs all of it."""
    first = {lost: told(Diagnosis(), rows(120, hog(2, 120, lost=lost)))[0] for lost in (0.2, 0.4, 0.7)}
    assert all((one.rule, one.rank) == ("cpu_stolen", 2) for _, one in first.values())
    seconds = [at for at, _ in first.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] <= 2 + 3 + 15  # the first step, SETTLE_S, and the judged parts
    assert seconds[0] > 35


def test_noise_before_hides_no_rank_that_all_wait_for() -> None:
    """Ranks of a crowded host are ahead in turn, by up to 0.7 for 6 s; then one waits in its own code for 0.9 of the time. Nothing
    is told of the first, and the second within 15 s, although four times the noise is more than all of the time."""

    def crowded(rank: int, second: int) -> dict[str, float]:
        if second >= 61:
            return {"compute": 0.85 if rank == 1 else 0.0}
        late = (0.7, 0.1, 0.0, 0.5, 0.3)[second // 6 % 5] if rank == second // 6 % 2 else 0.0
        return {"compute": late, "run_delay_seconds": 0.3 + late}

    ((at, finding),) = told(Diagnosis(), rows(90, crowded, ranks=2))
    assert (finding.rule, finding.rank) == ("own_code", 1)
    assert 61 < at <= 76


def test_what_the_kernel_names_needs_no_history() -> None:
    """A rank that is held for 4 s is told in the first seconds of a run, where all lack a processor for 0.7 of the time; one that a
    quota keeps back is told there, too, and the same quota of all ranks is told of their node."""

    def crowded(column: str, begin: int, ranks: tuple[int, ...]) -> Callable[[int, int], dict[str, float]]:
        def one(rank: int, second: int) -> dict[str, float]:
            on = rank in ranks and begin <= second
            share = 0.3 if on else 0.0
            held = 1.0 if on and column == "held_seconds" and second < begin + 4 else 0.0
            more = {column: held} if column == "held_seconds" else {column: share, "compute": share}
            return {"run_delay_seconds": 0.7, **more}

        return one

    found = told(Diagnosis(), rows(14, crowded("held_seconds", 6, (1,))))
    assert [(one.rule, one.rank) for _, one in found] == [("process_stopped", 1)]
    assert "rank 1 on h is kept from computing for" in found[0][1].what
    found = told(Diagnosis(), rows(60, crowded("throttled_seconds", 30, (1,))))
    assert [(one.rule, one.rank) for _, one in found] == [("cpu_throttled", 1)]
    found = told(Diagnosis(), rows(60, crowded("throttled_seconds", 30, (0, 1, 2, 3))))
    assert [(one.rule, one.rank, one.culprit) for _, one in found] == [
        ("node_throttled", None, {"host": "h", "node": "10.0.0.1"})
    ]


@pytest.mark.parametrize(("waited", "words"), [(0.8, "its loader waits for 80%"), (0.1, "its loader computes for 90%")])
def test_a_slow_loader_waits_or_computes(waited: float, words: str) -> None:
    """By what its thread did, where the rank recorded it; those of all ranks, too."""

    def made(slow: range) -> Iterator[list[dict[str, Any]]]:
        for i, own in enumerate(rows(90)):
            for row in own[1:]:
                late = 0.4 * max(i - 50, 0) if row["rank"] in slow else 0.0
                row |= {"data_seconds": late, "loader_seconds": 0.5 * i, "loader_waited_seconds": 0.5 * i * waited}
            yield own

    ((_, one),) = told(Diagnosis(), made(range(2, 3)))
    assert (one.rule, one.rank) == ("slow_loader", 2)
    assert words in one.cause
    ((_, one),) = told(Diagnosis(), made(range(4)))
    assert (one.rule, one.culprit) == ("data_bound", {"setting": "data.prefetch"})
    assert (
        words.replace("its loader waits", "the loaders wait").replace("its loader computes", "the loaders compute")
        in one.cause
    )


def test_a_new_attempt_begins_anew() -> None:
    """What was found is over when the next attempt starts, and its first seconds are not judged."""
    found = told(Diagnosis(), rows(70, hog(40, 70)), rows(12, hog(70, 82), attempt=2, begin=70))
    assert [one.state for _, one in found] == ["new", "over"]


def linked(
    seconds: int,
    queues: Callable[[int], tuple[int, ...]],
    exposed: Callable[[int], float] = lambda second: 0.7,
    nodes: tuple[str, ...] = ("10.0.0.1", "10.0.0.2"),
    attempt: int = 1,
    begin: int = 0,
) -> Iterator[list[dict[str, Any]]]:
    """Ranks of these nodes, whose sockets hold `queues(second)` bytes, all wait for `exposed(second)` of the time."""
    waited = 0.0
    for _, *ranks in rows(seconds, attempt=attempt, begin=begin):
        at = ranks[0]["at"]
        second, passed = int(at - T), at - T - begin + 1
        waited += exposed(second)
        made: list[dict[str, Any]] = [
            {"kind": "node", "host": f"h{name[-1]}", "node": name, "at": at, "cpu_count": 8, "nic_out_bytes": 100 * passed,
             "nic_out_packets": passed, "retransmits_count": 0, "link_queue_bytes": queue, "link_queue_peer": "10.0.0.9"}
            for name, queue in zip(nodes, queues(second), strict=True)
        ]  # fmt: skip
        for i, row in enumerate(ranks):
            row |= {"node": nodes[i % len(nodes)], "forward_seconds": 0.1 * passed, "backward_seconds": 0.9 * passed,
                    "run_delay_seconds": 0.0, "all_reduce_exposed_seconds": waited, "all_reduce_count": 10 * passed,
                    "all_reduce_bytes": passed * (10 << 20)}  # fmt: skip
        yield [*made, *ranks]


def test_nodes_that_have_left_are_not_compared() -> None:
    """After a move to two other nodes, whose sockets are equally full, no link is blamed; on one node, no network."""

    def even(_: int) -> tuple[int, ...]:
        return 200_000, 200_000

    moved = linked(40, even, nodes=("10.0.0.3", "10.0.0.4"), attempt=2, begin=40)
    assert {one.rule for _, one in told(Diagnosis(), linked(40, even), moved)} <= {"comm_bound"}
    shrunk = linked(60, lambda _: (0,), nodes=("10.0.0.1",), attempt=2, begin=20)
    assert told(Diagnosis(), linked(20, lambda _: (0, 0)), shrunk) == []


@pytest.mark.parametrize(("begin", "end"), [(0, 360), (100, 360), (100, 460)])
def test_a_link_that_stays_slow_stays_reported(begin: int, end: int) -> None:
    """Minutes later it is all of the run's history: it is told once, and over only once its sockets are empty; meanwhile nothing
    says that no link is slow."""

    def slow(second: int) -> bool:
        return begin <= second < end

    def queues(second: int) -> tuple[int, ...]:
        return (300_000, 1_000) if slow(second) else (0, 0)

    found = told(Diagnosis(), linked(500 if end > 360 else 360, queues, lambda second: 0.7 if slow(second) else 0.1))
    ended = ["over"] if end > 360 else []
    assert [(one.rule, one.state) for _, one in found] == [("slow_link", state) for state in ("new", *ended)]
    assert found[0][0] <= begin + 25
    assert not ended or found[1][0] > end


def test_full_sockets_that_are_no_news_are_not_denied() -> None:
    """All ranks always waited that long, and then one node's sockets are full: that no link is slow is no longer said."""
    found = told(Diagnosis(), linked(160, lambda second: (300_000 if second > 100 else 0, 0)))
    assert [(one.rule, one.state) for _, one in found] == [("comm_bound", "new"), ("comm_bound", "over")]
    assert found[1][0] > 100


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_hides_nothing(jump: float) -> None:
    """The clock by which rows are timed jumps an hour, while a rank is slow: what is slow after that is found as before, and what
    was told is over once it is."""

    def jumping() -> Iterator[list[dict[str, Any]]]:
        for own in rows(150, lambda rank, second: {**hog(20, 70)(rank, second), **hog(100, 130)(rank, second)}):
            yield [{**row, "at": row["at"] + jump * (row["at"] - T >= 60)} for row in own]

    found = [(at - jump * (at - T > 1800 or at < T), one.rule, one.state) for at, one in told(Diagnosis(), jumping())]
    assert [one[1:] for one in found] == [("cpu_stolen", "new"), ("cpu_stolen", "over")] * 2
    assert 100 < found[2][0] <= 115


def test_a_rule_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and not called again; the others go on."""
    diagnosis = Diagnosis()
    broken = next(i for i, rule in enumerate(diagnosis.rules) if rule.name == "data_bound")
    object.__setattr__(diagnosis.rules[broken], "check", lambda window: 1 / 0)
    assert [one.rule for _, one in told(diagnosis, rows(90, hog(50, 90)))] == ["cpu_stolen"]
    assert diagnosis.problems == {"data_bound": "ZeroDivisionError: division by zero"}


def steps(losses: Any, norms: Any, first: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": first + i, "loss": float(a), "grad_norm": float(b), "lr": 1e-3, "tokens": 100, "seconds": 0.5, "data_seconds": 0.0,
         "world_size": 2, "attempt": 1, "samples_hash": f"{i:016x}", "residual_norm": None, "grad_noise_scale": 16.0}
        for i, (a, b) in enumerate(zip(losses, norms, strict=True))
    ]  # fmt: skip


def judged(
    made: list[dict[str, Any]],
    events: list[Event] = [],  # noqa: B006
    spec: Any = None,
    every: int = 20,
) -> list[Finding]:
    diagnosis = Diagnosis(spec=spec)
    found = [one for i in range(0, len(made), every) for one in diagnosis.observe([], made[i : i + every])]
    return found + list(diagnosis.observe([], [], events))


def test_a_bad_batch_and_a_high_learning_rate_differ() -> None:
    """A loss that jumps for one step names the step and its batch; one that stays up names optim.lr; a noisy one nothing."""
    rng = np.random.default_rng(3)
    losses, norms = 3 + 0.05 * rng.standard_normal(200), np.exp(0.2 * rng.standard_normal(200))
    assert judged(steps(losses, norms)) == []
    one, big = losses.copy(), norms.copy()
    one[150], big[150] = 6.0, 20.0
    (found,) = judged(steps(one, big))
    assert (found.rule, found.culprit) == ("bad_batch", {"step": 151, "samples_hash": f"{150:016x}"})
    by_heart = np.concatenate([[3.0], losses[1:] / 500])  # next to nothing of the first loss, as is 8 times as much
    by_heart[150] = 0.05
    assert judged(steps(by_heart, big)) == []
    by_heart[1:] /= 10  # 80 times
    by_heart[150] = 0.05
    assert judged(steps(by_heart, big)) == []
    by_heart[150] = 0.2
    assert [found.rule for found in judged(steps(by_heart, big))] == ["bad_batch"]
    slowly = losses.copy()
    slowly[150:165] += 3 * 0.8 ** np.arange(15)  # it comes back, but other batches were high, too
    (found,) = judged(steps(slowly, big))
    assert (found.rule, found.culprit) == ("lr_too_high", {"setting": "optim.lr"})
    for at, looks in ((25, 20), (150, 400)):  # soon after the start; and of many steps between two looks
        one, big = np.resize(losses, 800), np.resize(norms, 800)
        one[at], big[at] = 6.0, 20.0
        assert [found.figures["step"] for found in judged(steps(one, big), every=looks)] == [at + 1]
    in_blocks = losses * np.where(np.arange(200) % 40 < 20, 1.0, 1.1)  # data that is not shuffled
    assert judged(steps(in_blocks, norms)) == []
    in_blocks[150:] += 1.5
    assert [found.rule for found in judged(steps(in_blocks, norms))] == ["lr_too_high"]
    rises, grows = losses.copy(), norms.copy()
    rises[150:] += 1.5
    grows[150:] *= 5
    (found,) = judged(steps(rises, grows))
    assert (found.rule, found.culprit) == ("lr_too_high", {"setting": "optim.lr"})


@pytest.mark.parametrize(("grown", "rule"), [(1.0, "bad_batch"), (5.0, "lr_too_high")])
def test_what_is_not_finite_has_a_cause(grown: float, rule: str) -> None:
    """After calm steps it is the data, after a gradient that grew the learning rate; the other cause is listed."""
    norms = np.where(np.arange(120) < 100, 1.0, grown)
    event = Event(
        "non_finite", T, {"step": 121, "cause": "step 121: the loss is not finite", "ranks": [], "samples_hash": "ab"}
    )
    (found,) = [f for f in judged(steps(np.full(120, 3.0), norms), [event]) if f.severity == "critical"]
    assert found.rule == rule
    assert len(found.others) == 1


def test_noise_of_evaluations_is_no_overfitting() -> None:
    """Of a hundred evaluations some three rise in a row, by more than 1% above the best of all; four that rise further are it."""
    calm = 2 + 0.02 * np.random.default_rng(10).standard_normal(300)[:100]
    rises = np.concatenate([calm, 2 + 0.1 * np.arange(1, 5)])
    for held_out, found in ((calm, []), (rises, ["overfitting"])):
        diagnosis, told = Diagnosis(), list[str]()
        made = steps(3 / (1 + np.arange(5.0 * len(held_out)) / 500), np.ones(5 * len(held_out)))
        for i, loss in enumerate(held_out.tolist()):
            event = Event("eval", T + i, {"step": 5 * i + 5, "loss": loss, "tokens": 8})
            told += [one.rule for one in diagnosis.observe([], made[5 * i : 5 * i + 5], [event])]
        assert told == found


def test_overflows_are_those_of_fp16() -> None:
    """Norms that are not finite, step after step: with fp16, or where the job is not known; not where none is recorded."""
    norms = np.ones(120)
    norms[60:] = np.inf
    for spec, norm, found in (
        ({}, norms, ["loss_scale"]),
        ({"precision": {"params": "fp16"}}, norms, ["loss_scale"]),
        ({"precision": {"params": "bf16"}}, norms, []),
        ({}, np.full(120, np.nan), []),
    ):
        assert [one.rule for one in judged(steps(np.full(120, 3.0), norm), spec=spec)] == found


def test_noise_and_compression_are_judged_from_the_steps() -> None:
    """A batch far beyond the noise scale, in the second half of a run; and error feedback that grows fourfold: once each."""
    spec = {"train": {"global_batch": 256, "steps": 400}, "observe": {"grad_noise": 1}}
    made = steps(np.full(260, 3.0), np.ones(260))
    assert judged(made[:199], spec=spec) == []
    (found,) = judged(made, spec=spec)
    assert found.figures == {"global_batch": 256, "grad_noise_scale": 16.0, "times": 16.0, "batch_that_fits": 16}
    assert "with 16 a step learns about 53% as much from 6.2% of the tokens" in found.remedy
    for i, row in enumerate(made):
        row["residual_norm"] = 1.0 if i < 100 or i == 150 else 8.0 if i >= 160 else 1.0
    assert [f.rule for f in judged(made)] == ["compression_error"]


def test_evaluation_and_storage_are_judged_from_events() -> None:
    """Evaluations that take a third of the time name eval.every, and those of a twentieth nothing; a checkpoint that was not
    written is told with the storage's error and its remedy, and is over once one is."""
    for seconds, rules_told in ((25.0, ["evaluation_cost"]), (2.5, [])):
        evals = [Event("eval", T + i * (50 + seconds), {"step": 100 * (i + 1), "loss": 3.0 - i}) for i in range(5)]
        found = judged(steps(np.full(500, 3.0), np.ones(500)), evals)
        assert [one.rule for one in found] == rules_told
        for one in found:
            assert one.culprit == {"setting": "eval.every"}
            assert one.lost == pytest.approx(1 / 3)
            assert one.remedy.startswith("set eval.every: 951,")  # 25 s after 475 s of training are 5%
    diagnosis = Diagnosis()

    def event(kind: str, at: float, **data: Any) -> list[Finding]:
        return list(diagnosis.observe([], [], [Event(kind, T + at, {"step": int(at), **data})]))

    (one,) = event("checkpoint_failed", 10, rank=3, cause="OSError: [Errno 28] No space left on device")
    assert (one.rule, one.severity, one.culprit["rank"], one.cause) == (
        "storage_failing",
        "warning",
        3,
        "the storage is full",
    )
    assert (
        event("checkpoint_failed", 20, rank=3, cause="OSError: [Errno 28] No space left on device") == []
    )  # told already
    (one,) = event("checkpoint_failed", 80, rank=3, cause="OSError: [Errno 28] No space left on device")
    assert (one.state, one.severity) == ("changed", "critical")
    assert event("checkpoint_saved", 85, bytes=1, seconds=1.0, stall_seconds=0.0) == []
    assert [one.state for one in event("note", 100, text="")] == ["over"]
    slow: dict[str, Any] = {
        "rank": 0,
        "cause": "passed over: the save of step 100 is still on its way after 9 s",
        "skipped": True,
    }
    assert event("checkpoint_failed", 110, **slow) == []
    (one,) = event("checkpoint_failed", 120, **slow)
    assert one.cause == "the storage does not answer, or is too slow"


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ([0.5] * 10 + [0.85] * 5, True),  # becomes uneven
        ([0.85] * 12, False),  # is so from the start, as routers of new models are
        ([0.85] * 35, True),  # and stays so
        (list(np.linspace(0.85, 0.7, 40)), False),  # evens out
        ([0.5] * 10 + [0.85] * 4, False),
    ],
)
def test_an_uneven_router_is_named_where_it_does_not_even_out(shares: list[float], named: bool) -> None:
    """`shares`: tokens of the first of two ranks, in every tenth step; in those between, the second has all. The same in events of
    an earlier version."""
    loads = [[[int(s * 500), int(s * 500), 1000 - 2 * int(s * 500), 0]] for s in shares]
    names = Event("experts", T, {"layers": {"blocks.0.mlp": 4}})
    count = 10 * len(shares) - 9
    trained = [
        row | {"expert_loads": loads[row["step"] // 10] if row["step"] % 10 == 0 else [[0, 0, 500, 500]]}
        for row in steps([3.0] * count, [1.0] * count, first=0)
    ]
    events = [
        Event("expert_loads", T + i, {"step": 10 * i, "layers": {"blocks.0.mlp": {"loads": made[0], "bias": None}}})
        for i, made in enumerate(loads)
    ]
    for made, told in ((trained, [names]), ([], events)):
        found = list(Diagnosis(spec={"parallel": {"expert": 2}}).observe([], made, told))
        told_of = [one.culprit for one in found if one.rule == "expert_imbalance"]
        assert told_of == ([{"parameter": "blocks.0.mlp", "expert_rank": 0}] if named else [])


def test_a_layer_that_learns_nothing_or_too_much() -> None:
    """From the histograms of a run: a parameter whose gradient goes to a thousandth of the others', or of its own, is named; so is
    one that is next to nothing from the start; gradients that shrink together are not, nor one that is exactly zero."""

    def found(size: Callable[[int], float], common: Callable[[int], float] = lambda i: 1e-3) -> list[Finding]:
        events = []
        for i in range(20):
            own = {"a": common(i), "b": 3 * common(i), "c": 0.5 * common(i), "blocks.0.w": size(i)}
            gradients = {
                name: {"edges": [0.0, 1.0], "counts": [4], "sum": 0.0, "sum_squares": 4 * g * g}
                for name, g in own.items()
            }
            events.append(sizes(Event("histograms", T + i, {"step": 10 * i, "weights": {}, "gradients": gradients})))
        diagnosis = Diagnosis()
        return [one for event in events for one in diagnosis.observe([], [], [event]) if one.state == "new"]

    (one,) = found(lambda i: 1e-3 if i < 12 else 1e-7)
    assert (one.rule, one.severity, one.culprit) == ("layer_gradients", "warning", {"parameter": "blocks.0.w"})
    assert "vanishes" in one.what
    (one,) = found(lambda i: 1e-3 if i < 12 else 5.0)
    assert (one.severity, one.culprit) == ("critical", {"parameter": "blocks.0.w"})
    (one,) = found(lambda i: 1e-9)
    assert "since the first histograms" in one.what
    assert found(lambda i: 1e-3 * 0.3**i, lambda i: 1e-3 * 0.3**i) == []
    assert found(lambda i: 0.0) == []
    assert found(lambda i: 1e-3 if i % 3 else 1e-7) == []


def test_a_layer_whose_output_vanishes_or_explodes() -> None:
    """The first in the order of the model, not one that follows it, nor its gradient; one that is next to nothing from the start.
    A layer that grows from zero is not named, nor one that is exactly zero for a while."""

    def found(size: Callable[[int], float], after: Callable[[int], float] = lambda i: 0.3) -> list[Finding]:
        events = []
        for i in range(20):
            gradients = {
                f"{name}.weight": {"counts": [1], "sum_squares": (1e-3 * now) ** 2}
                for name, now in (("a", 1.0), ("b", size(i) or 1.0), ("c", 1.0), ("d", 1.0))
            }
            outputs = {"a": 1.0, "b": size(i), "c": after(i), "d": 2.0}
            data = {"step": 10 * i, "weights": {}, "gradients": gradients, "activations": outputs}
            events.append(sizes(Event("histograms", T + i, data)))
        diagnosis = Diagnosis()
        told = [one for event in events for one in diagnosis.observe([], [], [event]) if one.state == "new"]
        assert diagnosis.problems == {}
        return told

    (one,) = found(lambda i: 1.0 if i < 12 else 1e-4, lambda i: 0.3 if i < 12 else 1e-6)
    assert (one.rule, one.severity, one.culprit) == ("layer_activations", "warning", {"parameter": "b"})
    assert "so do 1 other layers" in one.what
    (one,) = found(lambda i: 1.0 if i < 12 else 0.0)
    assert (one.rule, one.culprit) == ("layer_activations", {"parameter": "b"})
    (one,) = found(lambda i: 1.0 if i < 12 else 5e3)
    assert (one.severity, one.culprit) == ("critical", {"parameter": "b"})
    (one,) = found(lambda i: 1e-6)
    assert "since the first histograms" in one.what
    assert found(lambda i: min(1.0, 1e-3 * (i + 1) ** 2)) == []
    assert found(lambda i: 0.0 if i < 6 else 1.0) == []
    assert found(lambda i: 1.0 if i % 3 else 1e-5) == []


@pytest.mark.parametrize(
    ("held_out", "trained", "of_pass", "named"),
    [
        (
            lambda step: max(3 - step / 500, 2.0),
            lambda step: 3 - step / 400,
            100,
            True,
        ),  # stands still from step 500 on
        (lambda step: 3 - step / 500, lambda step: 3 - step / 400, 100, False),  # still falls
        (lambda step: 2.0, lambda step: 2.0, 100, False),  # has converged
        (lambda step: max(3 - step / 500, 2.0), lambda step: 3 - step / 400, 200, False),  # in the fourth pass
        (lambda step: max(3 - step / 500, 2.0), lambda step: 3 - step / 400, None, False),  # of an earlier version
    ],
)
def test_tokens_are_repeated_more_than_helps(
    held_out: Callable[[int], float], trained: Callable[[int], float], of_pass: int | None, named: bool
) -> None:
    """After 7.5 passes of 100 steps, or 3.75 of 200; evaluated each 25 steps."""
    start = {"attempt": 1, "step": 1, "seconds": 1.0, "stages": {}, "repeated_steps": 0, "steps_per_epoch": of_pass}
    diagnosis, found = Diagnosis(), []
    found += diagnosis.observe([], [], [Event("first_step", T, start)])
    for step in range(1, 751):
        row = {"step": step, "loss": trained(step), "grad_norm": 1.0, "seconds": 0.1, "tokens": 9, "lr": 1e-3}
        evals = (
            [Event("eval", T + 0.1 * step, {"step": step, "loss": held_out(step), "tokens": 9})]
            if step % 25 == 0
            else []
        )
        found += diagnosis.observe([], [row], evals)
    told_of = [(one.rule, one.culprit["setting"]) for one in found if one.state == "new"]
    assert told_of == ([("repeated_tokens", "train.steps")] if named else [])


def test_uneven_stages_of_a_pipeline() -> None:
    """The stage whose ranks compute longer than the other's is named with its ranks; even ones are not, and without a pipeline a
    rank that is slower is named."""

    def second_stage(rank: int, second: int) -> dict[str, float]:
        return {"compute": 0.4 if rank >= 2 else 0.0}

    spec = {"parallel": {"pipeline": 2}}
    ((_, one),) = told(Diagnosis(spec=spec), rows(90, second_stage))
    assert (one.rule, one.rank, one.culprit["ranks"]) == ("stages_uneven", None, [2, 3])
    assert told(Diagnosis(spec=spec), rows(60)) == []
    alone = told(Diagnosis(spec=spec), rows(90, lambda rank, second: hog(0, 90)(rank + 1, second), ranks=2))
    ((_, one),) = alone
    assert (one.rule, one.rank, one.cause) == ("stages_uneven", 1, "its ranks wait for a processor")


def test_the_monitor_tells_and_the_folder_has_it(tmp_path: Path) -> None:
    """A finding is an event of the run while it lasts, and `examine` finds the same in the folder alone. Of histograms, which are
    not in the folder, the monitor gives the rules what they need, and `examine` lists what was told."""
    (tmp_path / ATTEMPTS).mkdir()
    monitor = RunMonitor(str(tmp_path), exporters=[], interval_s=1e9)
    monitor.begin_attempt(1, 4, 0)
    for own in rows(120, hog(50, 90)):
        monitor.observe(own)
        if int(own[0]["at"]) % 2 == 0:
            monitor._diagnose()
    told_of = len([event for event in monitor.snapshot()["events"] if event["kind"] == "finding"])
    root_mean_squares = {"a": 1e-3, "b": 1e-3, "c": 1e-9}
    gradients = {name: {"counts": [1], "sum_squares": size**2} for name, size in root_mean_squares.items()}
    histograms = [Event("histograms", T + i, {"step": i, "weights": {}, "gradients": gradients}) for i in range(8)]
    monitor.push([], [event.to_dict() for event in histograms])
    monitor._diagnose()
    *_, newest = monitor.snapshot()["events"]
    assert (newest["rule"], newest["culprit"], told_of) == ("layer_gradients", {"parameter": "c"}, 2)
    monitor.end("finished")
    run = RunDir(tmp_path)
    run.storage.write(SPEC, b"name: x\n")
    events = [event.data for event in read_events(run) if event.kind == "finding"]
    assert [(one["rule"], one["rank"], one["state"]) for one in events] == [
        ("cpu_stolen", 2, "new"),
        ("cpu_stolen", 2, "over"),
        ("layer_gradients", None, "new"),
    ]
    made = examine(run)
    one, layer = made.found
    assert layer.finding.rule == "layer_gradients"
    assert (one.finding.rule, one.finding.rank) == ("cpu_stolen", 2)
    assert 50 < one.since - T <= 65
    assert one.until is not None
    assert any("4 ranks" in words for words in made.looked)


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    """A run without telemetry and with a few steps: the rules that it lacks data for are named."""
    run = RunDir(tmp_path)
    run.storage.write(SPEC, b"observe: {interval_s: null}\n")
    made = examine(run)
    assert made.found == []
    assert any("observe.interval_s is null" in words and "cpu_stolen" in words for words in made.blind)
    assert any("too few to judge the loss" in words for words in made.blind)


def job(**sections: Any) -> JobSpec:
    base: dict[str, Any] = {
        "name": "x", "data": {"source": "any"}, "model": {"layers": 2, "width": 16, "heads": 2, "context": 8},
        "train": {"steps": 100, "global_batch": 64}, "optim": {"lr": 1e-3, "schedule": {"warmup": 0.1}},
        "cluster": {"workers": 8},
    }  # fmt: skip
    return JobSpec.model_validate({**base, **sections})


FORMER = Former("old", noise_scale=4.0, step_s=0.1, save_s=30.0, stall_s=0.1)


@pytest.mark.parametrize(
    ("sections", "facts", "rule", "setting"),
    [
        ({"parallel": {"tensor": 8}, "model": {"layers": 2, "width": 64, "heads": 8, "context": 8}}, Facts(per_node=4),
         "mesh_over_nodes", "parallel.tensor"),
        ({}, Facts(former=FORMER), "grad_noise", "train.global_batch"),
        ({}, Facts(former=FORMER), "checkpoint_cost", "checkpoint.every"),
        ({}, Facts(needed=95, usable=100), "memory_headroom", "train.micro_batch"),
        ({"cluster": {"workers": 8, "env": {"NCCL_P2P_DISABLE": "1"}}}, Facts(), "environment", "cluster.env.NCCL_P2P_DISABLE"),
        ({"optim": {"lr": 1e-3, "schedule": {"warmup": 0}}}, Facts(), "no_warmup", "optim.schedule.warmup"),
        ({"observe": {"interval_s": None}}, Facts(), "no_telemetry", "observe.interval_s"),
    ],
)  # fmt: skip
def test_before_a_run(sections: Any, facts: Facts, rule: str, setting: str) -> None:
    """Each names the setting; a sound job has no finding."""
    assert (rule, setting) in [(one.rule, one.culprit["setting"]) for one in check_job(job(**sections), facts)]
    assert check_job(job(), Facts(per_node=8)) == []


def test_the_tree_and_the_thresholds_have_every_rule() -> None:
    """Generated from the rules: each with its cause, and each limit with a source; docs/reference/thresholds.md has them all."""
    every = rules()
    words = words_of_tree(every)
    assert all(f"- {rule.name}: {rule.cause}" in words for rule in every)
    assert all(symptom in words for symptom in SYMPTOMS)
    page = (Path(__file__).parents[2] / "docs/reference/thresholds.md").read_text()
    for rule, name, value, source in thresholds(every):
        assert source
        assert f"| {rule} | {name} | {value} | {source} |" in page


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """benchmarks/doctor.py."""
    folder = Path(__file__).parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location("doctor_benchmark", folder / "doctor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def test_simulated_runs(benchmark: ModuleType) -> None:
    """Scenarios of the benchmark that need GPUs, nodes or storage: the right rule and culprit; healthy ones are told nothing."""
    chosen = ("GPU too hot", "other process on the GPU", "fewer PCIe lanes", "slow loader on one rank", "slow data everywhere",
              "slow link", "fragmentation", "node's memory fills", "loss scale collapses", "dead experts",
              "sockets, not InfiniBand", "a node on a slow interface", "an NVLink is down", "a layer's gradient vanishes",
              "a layer's gradient explodes", "histograms of a healthy model", "asymmetric collectives",
              "SIGSTOP bursts", "swap", "very busy host", "very uneven documents")  # fmt: skip
    for scenario in [*benchmark.SCENARIOS, *benchmark.HEALTHY]:
        if scenario.name not in chosen:
            continue
        score = benchmark.play(scenario, 1, False)
        assert not score.false
        if scenario.rules:
            assert (score.cause, score.culprit) == (True, True), (scenario.name, score)
