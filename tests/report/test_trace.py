"""Merging the ranks' traces: shares with known answers, clocks with a known offset, names and lanes of hand-made parts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from raydist.errors import StorageError
from raydist.report import clock_sync, tables
from raydist.report.clock_sync import Offset
from raydist.report.collectives import collectives
from raydist.report.overlap import Shares, common, innermost, length, shares, union
from raydist.report.trace import describe, merge
from raydist.run.directory import RunDir
from raydist.run.requests import part_name

BASE = 1_700_000_000_000_000_000


def test_intervals() -> None:
    """Overlaps count once, adjacent intervals are merged, empty ones are removed."""
    assert union([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]
    assert common([(0, 4), (5, 7)], [(1, 2), (3, 6), (8, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert length([(0, 4), (5, 7)]) == 6
    assert innermost([(0, 10), (1, 4), (2, 3), (5, 9), (20, 21)]) == [(2, 3), (5, 9), (20, 21)]
    assert innermost([(0, 1), (1, 2)]) == [(0, 1), (1, 2)]
    assert innermost([]) == []


def test_shares_with_a_known_answer() -> None:
    """10 s: compute in 0-4 and 6-7, communication in 2-6 (two ranges that overlap) and 8-9. Of 5 s, 2 are hidden and 3
    exposed."""
    found = shares((0, 10), [(0, 3), (2, 4), (6, 7)], [(2, 5), (4, 6), (8, 9)])
    assert found == Shares(seconds=10, compute=0.5, communication=0.5, overlap=0.4, exposed=0.3)
    assert shares((0, 10), [(-5, 5)], []) == Shares(10, 0.5, 0.0, None, 0.0)


def test_a_clock_ahead_is_found_within_its_bounds() -> None:
    """b's clock is 5 s ahead. Each rank entered one collective last, so the durations of these two bound the offset."""
    a = {1: (0.000, 0.101), 2: (1.000, 1.004), 3: (2.0, 2.010)}
    b = {1: (5.100, 5.101), 2: (5.900, 6.004), 3: (7.0, 7.011)}
    found = clock_sync.between([a], [b])
    assert found is not None
    assert found.seconds == pytest.approx(5.0, abs=1e-9)
    assert found.error == pytest.approx(0.004)  # 5.100 - 0.101 <= 5.0 <= 6.004 - 1.000
    # The median of 8 s and 0 is 4 s; the second collective allows 0.1 s at most.
    held = clock_sync.between([{1: (0.0, 1.0), 2: (2.0, 2.1)}], [{1: (0.0, 9.0), 2: (2.0, 2.1), 3: (1.0, 1.0)}])
    assert held == Offset(pytest.approx(0.1), pytest.approx(0.2))  # type: ignore[arg-type]


def test_clocks_with_nothing_in_common() -> None:
    """Two clocks without a common collective are compared through a third; if there is none, the offset is unknown."""
    one, two, three = {"x": (0.0, 1.0)}, {"x": (3.0, 4.0), "y": (5.0, 6.0)}, {"y": (7.0, 8.0)}
    found = clock_sync.offsets({"one": [one], "two": [two], "three": [three], "four": [{"z": (0.0, 1.0)}]})
    assert [found[name].seconds for name in ("one", "two", "three")] == [0.0, 3.0, 5.0]
    assert [found[name].error for name in ("one", "two", "three")] == [0.0, 1.0, 2.0]
    assert found["four"] == Offset(0.0, None)


def x(name: str, cat: str, tid: int, begin: float, end: float, pid: int = 100, **args: Any) -> dict[str, Any]:
    """A range; times in ms."""
    return {
        "ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": begin * 1e3, "dur": (end - begin) * 1e3, "args": args,
    }  # fmt: skip


def part(rank: int, events: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """A part as raydist/worker/metrics/trace.py writes it."""
    return {
        "raydist": {
            "v": 1, "run": "a-run", "trace": 1, "attempt": 1, "rank": rank, "world_size": 2, "first_step": 5, "last_step": 5,
            "host": f"host{rank}", "clock": f"clock{rank}", "device": "cpu", "pid": 100, "thread": 7, "one_group": True,
            "messages": [], **about,
        },
        "baseTimeNanoseconds": BASE,
        "traceEvents": events,
    }  # fmt: skip


def on_cpu(ahead: float, late: float) -> list[dict[str, Any]]:
    """One step of 100 ms on a clock that is `ahead` by that many ms: 40 ms of compute, an all-reduce of 40 ms, half of it hidden,
    which starts `late` ms later than on the other rank."""
    return [
        x("ProfilerStep#5", "user_annotation", 7, ahead, ahead + 100),
        x("forward", "user_annotation", 7, ahead + 10, ahead + 30),
        x("backward", "user_annotation", 7, ahead + 30, ahead + 90),
        x("aten::linear", "cpu_op", 7, ahead + 10, ahead + 30),
        x("aten::addmm", "cpu_op", 7, ahead + 11, ahead + 12),
        x("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 7, ahead + 30, ahead + 90),
        x("aten::mm", "cpu_op", 7, ahead + 30, ahead + 50),
        x("c10d::allreduce_", "cpu_op", 7, ahead + 50, ahead + 51),
        x("gloo:all_reduce", "cpu_op", 9, ahead + 30 + late, ahead + 70, **{"Input Dims": [[1000]], "Input type": ["float"]}),
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 11, "ts": 0, "args": {"name": "pt_data"}},
        x("aten::copy_", "cpu_op", 11, ahead + 1, ahead + 2),
        {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": 100, "tid": 7, "ts": ahead * 1e3},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 0, "s": "g"},
        x("PyTorch Profiler (0)", "Trace", 0, 0, 1),
    ]  # fmt: skip


def stored(run: RunDir, parts: list[dict[str, Any]]) -> list[str]:
    names = [part_name(1, 1, rank, len(parts)) for rank in range(len(parts))]
    for name, made in zip(names, parts, strict=True):
        run.storage.write(name, gzip.compress(json.dumps(made).encode()))
    return names


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process per rank on a common clock, with named lanes and collectives; the shares of hand-made steps are right."""
    run = RunDir(tmp_path)
    messages = [["all_reduce", 1000, "bucket 0"]]
    second = part(1, on_cpu(250.0, 35.0), messages=messages)
    names = stored(run, [part(0, on_cpu(0.0, 0.0), messages=messages), second])
    data, told = merge(run, names)
    made = json.loads(gzip.decompress(data))
    assert made["raydist"] == told
    events = made["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank and e["ph"] != "M"]
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
        where = {e["name"]: (e["ts"], e["ts"] + e["dur"], lanes[e["tid"]]) for e in mine if e["ph"] == "X"}
        assert where["step 5"] == (0.0, 100_000.0, "training")
        assert where["all_reduce bucket 0 (3.9 KiB)"] == (30_000.0 + rank * 35_000, 70_000.0, "collectives")
        assert where["aten::copy_"][2] == "pt_data"
        assert set(where) == {e["name"] for e in mine if e["ph"] == "X"}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2, "flows of two ranks are not one"
    first, other = told["ranks"]
    # Compute: the linear and the mm, 20 ms each, not the node of 60 ms that waits. 30 to 50 ms hide half of rank 0's all-reduce.
    assert first == pytest.approx({
        "rank": 0, "host": "host0", "device": "cpu", "seconds": 0.1, "compute": 0.4, "communication": 0.4, "overlap": 0.5,
        "exposed": 0.2, "data_wait": 0.0, "checkpoint": 0.0, "clock_offset_seconds": 0.0, "clock_error_seconds": 0.0,
    })  # fmt: skip
    assert other["clock_offset_seconds"] == pytest.approx(0.25)
    assert other["clock_error_seconds"] == pytest.approx(0.04)
    assert (other["communication"], other["exposed"]) == pytest.approx((0.05, 0.05))
    tables.trace(told)
    out = capsys.readouterr().out
    assert "clock of host1 relative to host0, subtracted: +250.000 ms, ±40.000 at most" in out
    assert "50%" in out


def test_autograd_of_the_users_own_computes() -> None:
    """An autograd node without nested ranges counts as compute; one that only contains others does not."""
    step = x("ProfilerStep#5", "user_annotation", 7, 0, 100)
    node = x("autograd::engine::evaluate_function: MineBackward", "cpu_op", 7, 10, 60)
    found = describe(part(0, [step, node, x("MineBackward", "cpu_op", 7, 20, 40)]), "a part")
    assert found.shares.compute == pytest.approx(0.2)


def test_gpu_kernels_count_as_hta_has_them() -> None:
    """Kernels are compute, except NCCL's; copies are neither compute nor communication; CPU ranges do not count. NCCL gives
    sequence numbers."""
    nccl = {
        "Collective name": "_reduce_scatter_base",
        "In msg nelems": 4096,
        "dtype": "BFloat16",
        "Seq": 12,
        "stream": 20,
    }
    found = describe(
        part(
            0,
            [
                x("ProfilerStep#5", "user_annotation", 7, 0, 100),
                x("aten::mm", "cpu_op", 7, 0, 100),
                x("sm90_gemm", "kernel", 7, 10, 40, pid=0, stream=7),
                x("vectorized_elementwise_kernel", "kernel", 8, 30, 50, pid=0, stream=8),
                x("Memcpy DtoH", "gpu_memcpy", 7, 60, 70, pid=0, stream=7),
                x("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 20, 45, 65, pid=0,
                  **nccl, **{"Process Group Name": "3"}),
            ],
            device="cuda:0",
        ),
        "a part",
    )  # fmt: skip
    assert found.shares == Shares(*map(pytest.approx, (0.1, 0.4, 0.2, 0.25, 0.15)))  # type: ignore[arg-type]
    (one,) = found.collectives
    assert (one.label, one.key, one.binds) == ("reduce_scatter (8.0 KiB)", ("3", 12, "reduce_scatter"), True)


def test_who_launched_a_collective_says_what_it_is() -> None:
    """The label of a gloo reduce-scatter, which runs as an all-reduce, comes from its operator; FSDP2's range gives the module.
    Only the last collectives can be unfinished."""
    events = [x("ProfilerStep#5", "user_annotation", 7, 0, 100)]
    for i, (module, what, dims) in enumerate(
        [
            ("all_gather", "_allgather_base_", [[16], [8]]),
            ("all_gather (layers.0)", "_allgather_base_", [[16], [8]]),
            ("post_backward_reduce (layers.0)", "_reduce_scatter_base_", [[8], [16]]),
            ("all_gather (layers.1)", "_allgather_base_", [[16], [8]]),
        ]
    ):
        begin = 10.0 * i
        events.append(x(f"FSDP::{module}", "user_annotation", 7, begin, begin + 5))
        for inside in (0.0, 0.1):  # one call, recorded twice, as by raydist/worker/metrics/collective_counters.py
            events.append(
                x(f"c10d::{what}", "cpu_op", 7, begin + 1 + inside, begin + 2 - inside, **{"Input Dims": dims})
            )
    for i, (what, size) in enumerate([("all_gather", 8), ("all_gather", 8), ("all_reduce", 16)]):
        begin = 10.0 * i + 3
        dims = {"Input Dims": [[size]], "Input type": ["float"]}
        events.append(x(f"gloo:{what}", "user_annotation", 9, begin, begin + 5, **dims))
    labels = [c.label for c in describe(part(0, events), "a part").collectives]
    assert labels == ["all_gather root (32 B)", "all_gather layers.0 (32 B)", "reduce_scatter layers.0 (64 B)"]


def test_a_part_that_is_none(tmp_path: Path) -> None:
    """A part that is truncated or has no step is one error that names it."""
    run = RunDir(tmp_path)
    names = stored(run, [part(0, [])])
    with pytest.raises(StorageError, match="contains no step"):
        merge(run, names)
    path = tmp_path / names[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StorageError, match="cannot be read"):
        merge(run, names)


def test_what_another_thread_sends_is_not_part_of_a_direct_exchange() -> None:
    """Thread 8 gathers 17 bytes while thread 7 is launching its exchange, in two operations, of 64 bytes."""

    def gloo(name: str, tid: int, begin: float, size: int) -> dict[str, Any]:
        return x(
            f"gloo:{name}", "cpu_op", tid, begin, begin + 1, **{"Input Dims": [[size]], "Input type": ["signed char"]}
        )

    def launch(name: str, tid: int, begin: float, *sizes: int) -> dict[str, Any]:
        return x(f"c10d::{name}", "cpu_op", tid, begin, begin + 0.1, **{"Input Dims": [[[size] for size in sizes]]})

    events = [
        x("raydist::all_to_all", "user_annotation", 7, 1, 5),
        launch("recv_", 7, 1.1, 64), gloo("recv", 9, 1.2, 64),
        launch("allgather_", 8, 2, 17, 34), gloo("all_gather", 10, 2.2, 17),
        launch("send", 7, 4, 64), gloo("send", 9, 4.2, 64),
    ]  # fmt: skip
    found = collectives(events, [(0.0, 0.01)], {})
    assert [(one.label, len(one.others)) for one in found] == [("all_to_all (64 B)", 1), ("all_gather (17 B)", 0)]
