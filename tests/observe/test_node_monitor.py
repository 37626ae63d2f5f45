"""A node's rows, from its ranks' mailbox, its kernel and its GPUs. As an actor: tests/cluster/test_node_monitors.py."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raydist.ipc import mailbox
from raydist.ipc.mailbox import Mailbox
from raydist.observe import node_monitor
from raydist.observe.hardware.nvml import Gpus, Reading
from raydist.observe.node_monitor import NodeMonitor, inject, place, shared
from raydist.run import telemetry_schema
from tests.nvml import FakeGpu, FakeNvml

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two real processes in place of ranks."""
    made = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    yield made
    for process in made:
        process.communicate()


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodeMonitor]]:
    """make(*gpus): an agent that has read once, and reads again when a test calls it; `_monitor.sent` has the rows that it
    sent."""
    made = []

    def make(*gpus: FakeGpu) -> NodeMonitor:
        monkeypatch.setattr(node_monitor, "Gpus", lambda: Gpus(FakeNvml(*gpus)))
        sent: list[dict[str, Any]] = []
        monitor = SimpleNamespace(observe=SimpleNamespace(remote=lambda rows, at: sent.extend(rows)), sent=sent)
        agent = NodeMonitor(str(tmp_path), "127.0.0.1", monitor, 3600.0, str(tmp_path))
        made.append(agent)
        agent.note()
        return agent

    yield make
    for agent in made:
        agent.close()


def of(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def test_rows_of_a_node(
    tmp_path: Path, watching: Callable[..., NodeMonitor], processes: list[subprocess.Popen[bytes]]
) -> None:
    """One row for the node, one per GPU, one per rank, each with its GPU and rank; values that the rank did not write are filled
    in. All rows fit the schema."""
    first, second = (process.pid for process in processes)
    for rank, pid, more in ((0, first, {"rss_bytes": None}), (1, second, {"rss_bytes": 5, "gpu_uuid": B})):
        Mailbox(str(tmp_path), "127.0.0.1", rank).write(
            {"monotonic": time.monotonic() - 100, "rank": rank, "attempt": 2, "step": 3, "pid": pid, **more}
        )
    agent = watching(FakeGpu(uuid=A, processes={first: 700, 42: 30}), FakeGpu(uuid=B, processes={second: 900}))
    rows: list[dict[str, Any]] = agent._monitor.sent
    (of_node,), (gpu0, gpu1), (rank0, rank1) = (of(rows, kind) for kind in ("node", "gpu", "rank"))
    assert of_node["nic"] == "lo"
    assert of_node["memory_used_bytes"] > 0
    assert (gpu0["rank"], gpu0["gpu_process_bytes"], gpu0["gpu_other_bytes"]) == (0, 700, 30)
    assert (gpu1["rank"], gpu1["gpu_process_bytes"], gpu1["gpu_other_bytes"]) == (1, 900, 0)
    assert (rank0["gpu"], rank0["gpu_process_bytes"], rank1["gpu"], rank1["gpu_process_bytes"]) == (0, 700, 1, 900)
    assert (rank0["attempt"], rank0["step"]) == (2, 3)
    assert 100 <= of_node["at"] - rank0["at"] < 160, "by the node's clock, whatever the rank's says"
    assert rank0["rss_bytes"] > 100_000
    assert rank1["rss_bytes"] == 5  # written by the rank itself
    assert rank0["cpu_seconds"] >= 0
    assert {(row["host"], row["node"]) for row in rows} == {(of_node["host"], "127.0.0.1")}
    assert all(abs(row["at"] - time.time()) < 60 for row in (of_node, gpu0, gpu1))
    assert {name for row in rows for name in row} <= telemetry_schema.COLUMNS.keys()
    assert pa.Table.from_pylist(rows, telemetry_schema.SCHEMA).num_rows == 5


def test_readings_of_a_fault() -> None:
    """Of a rank, its node and its GPU: a total grows by them, another column has them. A rank without a GPU gets one with what was
    asked for alone; columns of whole numbers stay so."""
    who = {"at": 1.0, "host": "h", "node": "n"}
    rows: list[dict[str, Any]] = [
        {**who, "kind": "node", "nic_out_bytes": 70},
        {**who, "kind": "gpu", "gpu": 3, "rank": 0, "gpu_pcie_width": 16, "gpu_ecc_errors": 1},
        {**who, "kind": "rank", "rank": 0, "gpu": 3, "inactive_bytes": 5},
        {**who, "kind": "rank", "rank": 1},
    ]
    asked = {
        "nic_out_bytes": 30.6,
        "gpu_pcie_width": 4.0,
        "gpu_ecc_errors": 2.0,
        "inactive_bytes": 9.0,
        "rdma_out_bytes": 1.0,
    }
    inject(rows, 0, 3, asked, who)
    inject(rows, 1, 1, {"gpu_throttle": "thermal"}, who)
    inject(rows, 2, 2, {"major_faults_count": 7.0}, who)  # a rank without a new row
    assert rows == [
        {**who, "kind": "node", "nic_out_bytes": 100, "rdma_out_bytes": 1},
        {**who, "kind": "gpu", "gpu": 3, "rank": 0, "gpu_pcie_width": 4, "gpu_ecc_errors": 3},
        {**who, "kind": "rank", "rank": 0, "gpu": 3, "inactive_bytes": 9},
        {**who, "kind": "rank", "rank": 1, "gpu": 1},
        {**who, "kind": "gpu", "gpu": 1, "rank": 1, "gpu_throttle": "thermal"},
    ]
    assert pa.Table.from_pylist(rows, telemetry_schema.SCHEMA).num_rows == 5


def test_only_what_is_new_of_ranks_that_live(
    tmp_path: Path, watching: Callable[..., NodeMonitor], processes: list[subprocess.Popen[bytes]]
) -> None:
    """A rank without a new reading, or whose process has exited, has no row; a rank of the next attempt has one."""
    ranks = [Mailbox(str(tmp_path), "127.0.0.1", rank) for rank in (0, 1)]
    row = {"monotonic": 1.0, "attempt": 1, "step": 1}
    for rank, process in enumerate(processes):
        ranks[rank].write({**row, "rank": rank, "pid": process.pid})
    agent = watching()
    assert [r["rank"] for r in of(agent._monitor.sent, "rank")] == [0, 1]
    assert of(agent.read(), "rank") == []
    processes[0].communicate()
    for rank, process in enumerate(processes):
        ranks[rank].write({**row, "monotonic": 2.0, "rank": rank, "pid": process.pid})
    assert [r["rank"] for r in of(agent.read(), "rank")] == [1]
    ranks[1].write({**row, "monotonic": 2.0, "attempt": 2, "rank": 1, "pid": processes[1].pid})
    assert [r["attempt"] for r in of(agent.read(), "rank")] == [2]
    agent.close()
    assert not mailbox.folder(str(tmp_path)).exists()


def test_a_reading_that_fails_is_told_once(
    watching: Callable[..., NodeMonitor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent continues after an exception; its log has one traceback."""
    agent = watching()
    tried = []

    def fail() -> list[dict[str, Any]]:
        tried.append(None)
        if len(tried) == 3:
            agent._ended.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(agent, "read", fail)
    agent._interval_s = 0.0
    agent._watch()  # in this thread
    assert len(tried) == 3
    assert [record.exc_text is not None and "a bug" in record.exc_text for record in caplog.records] == [True]


def test_a_driver_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs does not delay the agent's start or its close, and the agent's note names it."""
    free, asked = threading.Event(), threading.Event()

    def hang() -> Gpus:
        asked.set()
        free.wait(240)
        return Gpus(FakeNvml())

    monkeypatch.setattr(node_monitor, "Gpus", hang)
    monkeypatch.setattr(node_monitor, "_FIRST_S", 0.0)
    monkeypatch.setattr(node_monitor, "_CLOSE_S", 0.0)
    monitor = SimpleNamespace(observe=SimpleNamespace(remote=lambda rows, at: None))
    agent = NodeMonitor(str(tmp_path), "127.0.0.1", monitor, 3600.0, str(tmp_path))
    assert asked.wait(240)
    assert "has not answered" in (agent.note() or "")
    agent.close()
    assert agent._thread.is_alive()
    free.set()
    agent._thread.join(240)
    assert agent.note() == "the NVIDIA driver reports no GPU here"


@pytest.mark.parametrize(
    ("rows", "gpus", "expected"),
    [
        ({0: {"pid": 7}, 1: {"pid": 8}}, [(A, {8: 1}), (B, {7: 1})], {0: 1, 1: 0}),
        # two ranks share a GPU
        ({0: {"pid": 7}, 1: {"pid": 8}}, [(A, {7: 1, 8: 1})], {0: 0, 1: 0}),
        # a container: NVML's pids are the host's; torch names the GPU without NVML's prefix
        ({0: {"pid": 7, "gpu_uuid": B.removeprefix("GPU-")}}, [(A, {7: 1}), (B, {9007: 1})], {0: 1}),
        # ranks on the CPU
        ({0: {"pid": 7}, 1: {"pid": 8, "gpu_uuid": None}}, [(A, {9: 1}), (None, {})], {}),
    ],
)
def test_place(rows: dict[int, dict[str, Any]], gpus: list[Any], expected: dict[int, int]) -> None:
    """By the UUID that the rank reports, else by its process id."""
    assert place(rows, [Reading({}, processes, uuid) for uuid, processes in gpus]) == expected


@pytest.mark.parametrize(
    ("processes", "ranks", "expected"),
    [
        ({7: 10, 8: 20, 9: 3}, {1: 7, 0: 8}, {"rank": 0, "gpu_process_bytes": 30, "gpu_other_bytes": 3}),
        ({9: 3, 10: 4}, {}, {"gpu_other_bytes": 7}),
        ({7: None, 9: 3}, {1: 7}, {"rank": 1, "gpu_other_bytes": 3}),
        ({7: 1, 9: None}, {1: 7}, {"rank": 1, "gpu_process_bytes": 1}),
        # host pids: which processes are ranks is not known
        ({9007: 10, 9: 3}, {1: 7}, {"rank": 1}),
        ({}, {}, {"gpu_other_bytes": 0}),
    ],
)
def test_shared(processes: dict[int, int | None], ranks: dict[int, int], expected: dict[str, int]) -> None:
    """A sum is given if all its parts are known, else it is missing."""
    assert shared(Reading({}, processes, None), ranks) == expected
