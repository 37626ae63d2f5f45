"""Tracing real ranks that train: the same numbers, the named ranges of all ranks on one clock, and nothing left behind.

Over a minute: meshes of four ranks are traced three times each, and trained without a trace.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from raydist.data.prepare import prepare
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event
from raydist.report.trace import merge
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.metrics import reporter
from raydist.worker.metrics.trace import Tracer
from tests.report.viewers import Viewers
from tests.training import alone, run

STEPS = 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=40)) for _ in range(40)))
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.2)
    return str(folder / "tokens")


class UsersOwn(Exception):
    """An error that a model raises."""


class Gate(Heartbeat):
    """Blocks its rank at step 3 until rank 0 knows of the trace; optionally fails in the middle of step `bad`."""

    def __init__(self, known: threading.Event | None, bad: int | None) -> None:
        super().__init__()
        self._known, self._bad, self._step = known, bad, 0

    def step(self, number: int) -> None:
        self._step = number
        if number == 3 and self._known is not None:
            assert self._known.wait(240)
        super().step(number)

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == "backward" and self._step == self._bad:
            raise UsersOwn


def installed(heartbeat: Heartbeat) -> list[str]:
    """Which parts of a trace are still installed."""
    threads = [t.name for t in threading.enumerate() if t.name == "raydist-trace"]
    on = ["a profiler"] * (torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)
    return threads + on + ["a listener"] * (heartbeat.on_phase is not None)


def trained(
    rank: Rank,
    dataset: str,
    path: str,
    strategy: str,
    attempt: int = 1,
    traced: bool = True,
    bad: int | None = None,
    comm: Any = None,
    mesh: Any = None,
    model: Any = None,
    micro: int = 2,
) -> tuple[list[tuple[float, float]], list[str], list[dict[str, Any]]]:
    """(loss and gradient norm of each step, remains of a trace, trace events) of this rank."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, **(model or {})},
            "train": {"steps": STEPS, "global_batch": 8, "micro_batch": micro},
            "checkpoint": {"every": 2},
            "eval": {"every": None},
            "parallel": {"strategy": strategy, **(mesh or {})},
            "comm": comm or {},
            "cluster": {"workers": rank.world_size},
        }
    )
    place, known = RunDir(path), threading.Event()
    steps: list[tuple[float, float]] = []
    events: list[dict[str, Any]] = []
    answered = 0

    def push(records: list[dict[str, Any]], told: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal answered
        steps.extend((r["loss"], r["grad_norm"]) for r in records)
        events.extend(e for e in told if e["kind"].startswith("trace_"))
        if answered:  # the answer to the previous push has arrived
            known.set()
        waiting = [(r.number, r.steps) for r in requests.pending(place)]
        answered += bool(waiting)
        return {"traces": waiting}

    heartbeat = Gate(known if rank.first and traced else None, bad)
    interval, reporter.INTERVAL_S = reporter.INTERVAL_S, 0.02
    try:
        channel = MonitorChannel(push, lambda: None) if rank.first else None
        train(Job(spec, place, dataset, attempt), rank, channel, heartbeat, tell=lambda e: events.append(e.to_dict()))
    except UsersOwn:
        pass
    finally:
        reporter.INTERVAL_S = interval
    return steps, installed(heartbeat), events


@pytest.fixture(scope="module")
def viewers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewers]:
    with Viewers(tmp_path_factory.mktemp("chromium")) as made:
        yield made


def test_compressed_gradients_are_in_a_trace(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """What other threads send is there, as one gather of a bucket in each step, with its bytes."""
    place = RunDir(tmp_path / "run")
    request = requests.ask_trace(place, 3, 600.0)
    run(ranks, trained, 2, dataset, place.uri, "ddp", 1, True, None, {"compress": "int8"})
    data, _ = merge(place, requests.parts(place, request.number)[0])
    made = json.loads(gzip.decompress(data))["traceEvents"]
    for rank in (0, 1):
        sent = Counter(e["name"] for e in made if e["pid"] == rank and e.get("cat") == "collective")
        # 12,000 gradients, padded, to the other rank. gloo's own thread ends the record of a gather after it has woken the step
        # that waits for it: on a busy machine the trace may stop before the last one, or have the end of a gather from before its
        # first step.
        assert sent["all_gather (14.1 KiB)"] in (2, 3)


def test_outer_steps_are_in_a_trace(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Of each of three steps its start, its exchange and its arrival, on both ranks."""
    place = RunDir(tmp_path / "run")
    request = requests.ask_trace(place, 3, 600.0)
    run(ranks, trained, 2, dataset, place.uri, "ddp", 1, True, None, {"every": 1})
    data, _ = merge(place, requests.parts(place, request.number)[0])
    made = json.loads(gzip.decompress(data))["traceEvents"]
    for rank in (0, 1):
        found = Counter(e["name"] for e in made if e.get("pid") == rank and str(e["name"]).startswith("outer step"))
        assert found == {f"outer step of fragment 0: {what}": 3 for what in ("start", "exchange", "arrival")}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_trace_of_two_ranks(ranks: Any, viewers: Viewers, dataset: str, tmp_path: Path, strategy: str) -> None:
    """Three steps of both ranks, every phase and collective by name; no rank leaves a collective before the other enters it. The
    numbers equal those of an untraced run, bit for bit, and nothing of the profiler is left. Perfetto and chrome://tracing show
    all of zero3's, which has more kinds of ranges."""
    plain = run(ranks, trained, 2, dataset, str(tmp_path / "plain"), strategy, 1, False)
    place = RunDir(tmp_path / "traced")
    request = requests.ask_trace(place, 3, 600.0)
    found = run(ranks, trained, 2, dataset, place.uri, strategy)
    assert found[0][0] == plain[0][0]
    assert len(found[0][0]) == STEPS
    assert [left for _, left, _ in found] == [[], []]
    (started,) = found[0][2]
    first = started["first_step"]
    assert (started["kind"], started["trace"], started["steps"], started["world_size"]) == ("trace_started", 1, 3, 2)
    names, missing = requests.parts(place, request.number)
    assert missing == []
    data, told = merge(place, names)
    assert (told["first_step"], told["last_step"]) == (first, first + 2)
    made = json.loads(gzip.decompress(data))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in made if e["name"] == "process_name"}
    written = Counter((e["pid"], processes[e["pid"]], e["name"]) for e in made if e["ph"] == "X")
    for opened in (viewers.perfetto, viewers.catapult) if strategy == "zero3" else ():
        shown, wrong = opened(gzip.decompress(data))
        assert wrong == []
        assert shown == written
    ends = []
    for rank in (0, 1):
        mine = [e for e in made if e["pid"] == rank and e["ph"] == "X"]
        seen = [e["name"] for e in mine]
        assert [n for n in seen if n.startswith("step ")] == [f"step {first + i}" for i in range(3)]
        for phase in ("data wait", "forward", "backward", "optimizer"):
            assert seen.count(phase) >= 3, phase
        assert seen.count("checkpoint") in (1, 2), "each second step saves"
        sent = [e for e in mine if e.get("cat") == "collective"]
        assert {n: [e["name"].startswith(n) for e in sent].count(True) for n in SENT[strategy]} == SENT[strategy]
        if strategy == "zero3":
            gathered = [e["name"].split()[1] for e in sent if e["name"].startswith("all_gather")]
            assert gathered == ["root", "blocks.0", "blocks.1", "blocks.0"] * 2 * 3, (
                "twice a step: forward, then backward"
            )
        ends.append([(e["name"], e["ts"], e["ts"] + e["dur"]) for e in sent])
        assert told["ranks"][rank]["clock_error_seconds"] == 0.0, "one host, one clock"
    for kind in SENT[strategy]:
        pairs = zip(*([e for e in sent if e[0].startswith(kind)] for sent in ends), strict=True)
        for (_, begin_a, end_a), (_, begin_b, end_b) in pairs:
            assert max(begin_a, begin_b) <= min(end_a, end_b) + CLOCK_US
    set_apart(place, names[1], seconds=5.0)
    _, told = merge(place, names)
    clock = told["ranks"][1]
    assert abs(clock["clock_offset_seconds"] - 5.0) <= clock["clock_error_seconds"] + CLOCK_US / 1e6


CLOCK_US = 500.0
"""Accuracy of kineto's host clock, which it calibrates from the cycle counter."""

SENT = {
    "ddp": {"all_reduce bucket 0": 3, "all_reduce sums of the step": 3},
    "zero2": {"reduce_scatter blocks.1": 6, "all_gather blocks.0": 3, "all_reduce gradient norm": 3},
    "zero3": {"reduce_scatter blocks.1": 6, "all_gather blocks.0": 12, "all_reduce gradient norm": 3},
}
"""Strategy -> the number of some of its collectives in three steps."""


MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def traced_apart(rank: Rank, *args: Any) -> tuple[list[tuple[float, float]], list[str], list[dict[str, Any]]]:
    """`trained`, with each block of events in pages of its own: a write after it is freed is a SIGSEGV."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(MMAP_THRESHOLD, 65536)
    try:
        return trained(rank, *args)
    finally:
        libc.mallopt(MMAP_THRESHOLD, 128 * 1024)


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2, "context": 2, "expert": 2}], ids=", ".join)
def test_nothing_is_recorded_into_freed_memory(ranks: Any, dataset: str, tmp_path: Path, mesh: dict[str, int]) -> None:
    """zero1 gathers weights while a trace ends. Three traces of a run, of which the last one ends with it; its numbers equal those
    of an untraced run, bit for bit."""
    place = RunDir(tmp_path / "traced")
    # Experts have many events a micro-batch, so there is one.
    model: Any = ({"name": "mixtral", "heads": 4}, 8) if "expert" in mesh else ({"tie_embeddings": False}, 2)
    asked = [requests.ask_trace(place, steps, 600.0).number for steps in (1, 1, 100)]
    found = run(ranks, traced_apart, 4, dataset, place.uri, "zero1", 1, True, None, None, mesh, *model)
    plain = run(ranks, trained, 4, dataset, str(tmp_path / "plain"), "zero1", 1, False, None, None, mesh, *model)
    assert found[0][0] == plain[0][0]
    assert len(found[0][0]) == STEPS
    assert [left for _, left, _ in found] == [[]] * 4
    assert [event["kind"] for _, _, events in found for event in events] == ["trace_started"] * 3
    told = [merge(place, requests.parts(place, number)[0])[1] for number in asked]
    assert [t["world_size"] for t in told] == [4] * 3
    steps = [(t["first_step"], t["last_step"]) for t in told]
    assert steps[0][1] < steps[1][0] == steps[1][1] < steps[2][0] <= steps[2][1] == STEPS, "one after the other"


def set_apart(place: RunDir, name: str, seconds: float) -> None:
    """A part as written by a host whose clock is ahead."""
    part = json.loads(gzip.decompress(place.storage.read(name)))
    part["baseTimeNanoseconds"] += int(seconds * 1e9)
    part["raydist"]["clock"] = "another"
    place.storage.write(name, gzip.compress(json.dumps(part).encode()))


def test_a_restart_takes_the_request_up(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """An attempt that fails in the middle of a trace leaves no part, and reports it. The next stops the profiler, and traces."""
    place = RunDir(tmp_path / "run")
    request = requests.ask_trace(place, 5, 600.0)
    first = run(ranks, trained, 2, dataset, place.uri, "ddp", 1, True, 6)
    assert [left for _, left, _ in first] == [["a profiler"]] * 2, "its collectives may end later"
    for _, _, events in first:
        assert [(e["kind"], e["cause"]) for e in events if e["kind"] == "trace_failed"] == [
            ("trace_failed", "the attempt ended")
        ]
    assert requests.parts(place, request.number) == ([], [])
    second = run(ranks, trained, 2, dataset, place.uri, "ddp", 2)
    assert [left for _, left, _ in second] == [[], []]
    names, missing = requests.parts(place, request.number)
    assert (len(names), missing) == (2, [])
    assert all("attempt-0002" in name for name in names)


def tracer(path: Path, events: list[Event]) -> Tracer:
    return Tracer(RunDir(path), alone(), 1, Heartbeat(), events.append)


def test_several_requests_come_one_after_the_other(tmp_path: Path) -> None:
    """The oldest first, each once; a trace that is cut short by the run's end has the steps before it."""
    events: list[Event] = []
    made, waiting = tracer(tmp_path, events), [(1, 2), (2, 3)]
    asked = []
    for number in range(2, 9):
        asked.append(made.requested(waiting))
        made.step(number, asked[-1], ends=number == 8)
    made.close()
    assert asked == [(1, 2), (0, 0), (0, 0), (0, 0), (2, 3), (0, 0), (0, 0)]
    assert made.requested(waiting) == (0, 0)
    place = RunDir(tmp_path)
    told = [merge(place, requests.parts(place, n)[0])[1] for n in (1, 2)]
    assert [(t["first_step"], t["last_step"]) for t in told] == [(2, 3), (6, 7)]
    assert [e.kind for e in events] == ["trace_started"] * 2


def test_a_profiler_of_the_users_own(tmp_path: Path) -> None:
    """It stays on; the trace fails with a reason, and the loop continues."""
    events: list[Event] = []
    made = tracer(tmp_path, events)
    with profile() as own:
        made.step(2, (1, 2), ends=False)
        torch.ones(2) + 1
        made.step(3, (0, 0), ends=False)
        made.close()
    assert any(e.name == "aten::add" for e in own.events())
    assert [e.kind for e in events][-1] == "trace_failed"
    assert events[-1].data["trace"] == 1
    assert "another profiler is on" in events[-1].data["cause"]
    assert requests.parts(RunDir(tmp_path), 1) == ([], [])


def test_nvtx_ranges_on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On CUDA, steps and phases also open and close NVTX ranges in pairs."""
    from raydist.worker.metrics.trace import _Ranges

    open_, seen = [], []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (open_.append(name), seen.append(list(open_))))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_.pop)
    ranges = _Ranges(cuda=True)
    ranges.step(4)
    for phase in ("data", "forward", "backward", "save", "update", "save"):
        ranges.phase(phase)
    ranges.close()
    assert open_ == []
    inside = ["data wait", "forward", "backward", "checkpoint copy", "optimizer", "checkpoint"]
    assert seen == [["ProfilerStep#4"], *(["ProfilerStep#4", name] for name in inside)]
