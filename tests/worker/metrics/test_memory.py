"""A rank's memory: bytes by kind against the plan and the file system, the allocator's statistics, and snapshots."""

from __future__ import annotations

import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist import registry
from raydist.errors import UserError
from raydist.faults import OutOfMemory
from raydist.planner.estimate import estimate
from raydist.planner.facts import Activations, Machine, Model, Param, Peak
from raydist.run.directory import RunDir
from raydist.run.telemetry_schema import RANK
from raydist.spec import JobSpec
from raydist.worker import loop
from raydist.worker.distributed import Rank
from raydist.worker.metrics import memory
from raydist.worker.metrics.memory import Held, MemoryMeter, allocator, bytes_of, process
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.parallel import ParamShard
from tests.training import CONTEXT, GROUPED, Trainer, alone, counted, job, mine, run, samples
from tests.worker.checks.test_bad_steps import dataset, of, spec_of, trained

__all__ = ["dataset"]

KINDS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
MODEL = {"layers": 2, "width": 24, "heads": 2, "context": CONTEXT}


def metered(rank: Rank, spec: JobSpec) -> tuple[list[dict[str, int | None]], list[tuple[str, tuple[int, ...]]]]:
    """The meter's readings after the first, second and third step; and the size of the model's parameters."""
    trainer = Trainer(rank, spec, full=6 * CONTEXT)
    meter = MemoryMeter(rank.device, trainer.model, trainer.strategy.shards(), trainer.optimizer)
    trainer.before_update = meter.before_update
    read = []
    for step in (1, 2, 3):
        batches = mine(rank, *samples(6, seed=step), 2)
        trainer.step(step, batches, counted(batches), 1e-2, False)
        read.append(meter.read())
    parameters = [(name, tuple(p.shape)) for name, p in trainer.model.named_parameters()]
    trainer.step.optimizer_hooks.close()
    return read, parameters


def planned(spec: JobSpec, world: int, parameters: list[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """The prediction of `raydist plan` for the fullest rank's state."""
    nothing = Activations(0, (Peak("backward", 0, 0, 0),))
    model = Model(tuple(Param(name, shape, True, -1) for name, shape in parameters), 0)
    found = estimate(spec.parallel.strategy, spec, Machine(world, world, "cpu"), model, nothing)
    optimizer = found.disk or found.optimizer
    return {"parameters_bytes": found.parameters, "gradients_bytes": found.gradients, "optimizer_bytes": optimizer}


OFFLOADED: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {"optimizer": "cpu"}),
    ("zero1", {"optimizer": "cpu"}),
    ("zero2", {"optimizer": "nvme"}),
    ("zero3", {"optimizer": "nvme"}),
    ("zero3", {"parameters": "cpu"}),
    ("hsdp in pairs", {"optimizer": "cpu", "parameters": "cpu"}),
]


@pytest.mark.parametrize(
    ("variant", "where"), [*((name, {}) for name in [*registry.names("parallel"), *GROUPED.values()]), *OFFLOADED]
)
def test_bytes_by_kind_are_the_plan_s(ranks: Any, tmp_path: Path, variant: str, where: dict[str, Any]) -> None:
    """On 4 ranks, every strategy, with state in memory, on the host and in a file: after the second update all three are known,
    within 5% of the plan for the fullest rank (offloaded state has some padding), and they stay constant."""
    spec = job(variant, {**MODEL, "tie_embeddings": False}, offload={**where, "path": str(tmp_path)})
    for read, parameters in run(ranks, metered, 4, spec):
        expected = planned(spec, 4, parameters)
        first, second, third = ({name: row[name] for name in KINDS} for row in read)
        assert first == dict.fromkeys(KINDS)
        for name, size in expected.items():
            # Offloaded state aligns each tensor to 64 values and ends with whole pages, in two arrays.
            padding = 2 * (64 * 4 * len(parameters) + 4096) if name == "optimizer_bytes" and where else 0
            assert 0.95 * size - 64 <= (second[name] or 0) <= 1.05 * size + padding, name
        assert third == second


def test_every_rank_is_counted_by_its_own_rows(ranks: Any) -> None:
    """zero3 on 4 ranks: parameters and gradients of all ranks together equal the model's."""
    read = run(ranks, metered, 4, job("zero3", MODEL))
    whole = 4 * sum(torch.Size(shape).numel() for _, shape in read[0][1])
    for name in ("parameters_bytes", "gradients_bytes"):
        total = sum(rows[-1][name] for rows, _ in read)
        assert whole <= total <= 1.1 * whole  # FSDP pads to the largest rank's rows


def test_storages_count_once() -> None:
    """Views and tied tensors share a storage; a view counts its whole storage; tensors elsewhere are counted by their device."""
    a, b = torch.zeros(100), torch.zeros(10)
    assert bytes_of([a, a[:5], a.view(10, 10), b]) == 440
    assert bytes_of([a, b], torch.device("cuda")) == 0


def test_what_lies_on_the_device() -> None:
    """If parameters are on another device than their state, only they count for that device; activations are computed from this."""
    parameter = nn.Parameter(torch.zeros(10, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros(10), "step": 3}
    shards = {"p": ParamShard(parameter)}
    model = nn.Module()
    held = Held.of(model, shards, optimizer, torch.device("cpu"))
    assert (held.gradients, held.optimizer, held.on_device) == (0, 40, 40)
    assert Held.of(model, shards, optimizer, torch.device("meta")).on_device == 40


def test_a_meter_has_columns_of_the_schema() -> None:
    """Each column is one of a rank's row, whole numbers or null; on a CPU the allocator's columns are null."""
    model = nn.Linear(2, 2)
    shards = {n: ParamShard(p) for n, p in model.named_parameters()}
    row = MemoryMeter(torch.device("cpu"), model, shards, torch.optim.SGD(model.parameters())).read()
    assert set(row) <= set(RANK)
    assert {n for n in row if row[n] is not None} == {"rss_bytes", "anon_bytes"}


def test_the_allocator_s_words() -> None:
    """torch's nested CUDA statistics, by hand: each figure from its key; activations are the peak minus the state on the device."""
    stats = {
        "allocated_bytes": {"all": {"current": 100, "peak": 900}, "small_pool": {"current": 1, "peak": 2}},
        "reserved_bytes": {"all": {"current": 1000, "peak": 1001}},
        "inactive_split_bytes": {"all": {"current": 30, "peak": 31}},
        "num_alloc_retries": 4,
        "num_ooms": 1,
    }
    expected = {
        "allocated_bytes": 100, "reserved_bytes": 1000, "peak_bytes": 900, "inactive_bytes": 30, "alloc_retries_count": 4,
        "oom_count": 1, "activations_bytes": 820,
    }  # fmt: skip
    assert allocator(stats, Held(50, 50, 60, on_device=80)) == expected
    assert allocator(stats, None)["activations_bytes"] is None
    assert allocator(stats, Held(0, 0, 0, on_device=901))["activations_bytes"] == 0  # no step in this reading
    assert allocator(None, None) == dict.fromkeys(expected)
    # No GPU is available: check the names against torch's documentation.
    documented = torch.cuda.memory_stats.__doc__ or ""
    for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "num_alloc_retries", "num_ooms"):
        assert f'"{name}' in documented


def test_a_mapped_file_is_not_the_process_s_own(tmp_path: Path) -> None:
    """16 MiB of a file that are read through a mapping are in rss_bytes and not in anon_bytes; 16 MiB of anonymous memory are in
    both."""
    size = 16 << 20
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    before = process()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, size, 4096)) > 0
        read = process()
        # Not from malloc, which may reuse that much freed memory.
        own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, 4096):
            own[page] = 1
        both = process()
    assert all(isinstance(v, int) for reading in (before, read, both) for v in reading.values())
    grown = [{n: (b[n] or 0) - (a[n] or 0) for n in a} for a, b in ((before, read), (read, both))]
    slack = 2 << 20
    assert grown[0]["rss_bytes"] >= size - slack
    assert grown[0]["anon_bytes"] <= slack
    assert grown[1]["rss_bytes"] >= len(own) - slack
    assert grown[1]["anon_bytes"] >= len(own) - slack


def test_a_process_that_has_ended_has_no_memory() -> None:
    """A zombie: null and no error, since the caller cannot know yet."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process(pid) == {"rss_bytes": None, "anon_bytes": None}
    os.waitpid(pid, 0)


# --- snapshots


def test_a_snapshot_needs_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a run there is no folder for it: one clear error."""
    monkeypatch.setattr(memory, "_target", None)
    with pytest.raises(UserError, match="this process is not a rank of a run"):
        memory.snapshot()


def test_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so on stderr, and writes nothing."""
    monkeypatch.setattr(memory, "_target", None)
    memory.keep_history(RunDir(tmp_path), alone(), 1, 100)
    assert memory.snapshot() is None
    assert capsys.readouterr().err == "raydist: no memory snapshot: torch does not track CPU memory\n"
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_goes_to_the_run_s_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own snapshot, one file each time, under the attempt and the rank; the message has its path. (A GPU's allocator is
    replaced by fixed values.)"""
    monkeypatch.setattr(memory, "_target", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": []})
    memory.keep_history(RunDir(tmp_path), alone(), 3, 0)
    paths = [memory.snapshot(), memory.snapshot()]
    folder = tmp_path / "logs" / "attempt-0003"
    assert paths == [str(folder / f"rank-00000.memory-{n}.pickle") for n in (1, 2)]
    assert torch.cuda.memory._snapshot() == pickle.loads(Path(str(paths[0])).read_bytes())
    told = memory.after_oom(0, 0)
    assert "rank-00000.memory-3.pickle" in told
    assert "set observe.memory_history: 100000 to add" in told
    assert "would add" not in memory.after_oom(0, 100)


def test_storage_that_refuses_is_told_and_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run ends with the out-of-memory error, not with the snapshot's."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", dict)
    (tmp_path / "logs").write_text("in the way")
    monkeypatch.setattr(memory, "_target", None)
    memory.keep_history(RunDir(tmp_path), alone(), 1, 0)
    assert memory.after_oom(5, 0).startswith("rank 5 ran out of memory; no memory snapshot: ")


def test_running_out_of_memory_says_so(dataset: str, tmp_path: Path) -> None:
    """An attempt that runs out of memory leaves a note: here, on a CPU, that there is no snapshot."""
    faults = [OutOfMemory(rank=0, step=3).model_dump(mode="json")]
    _, events, error = trained(alone(), spec_of(dataset), str(tmp_path), faults=faults)
    assert isinstance(error, torch.OutOfMemoryError)
    notes = [e["text"] for e in of(events, "note")]
    assert "rank 0 ran out of memory; no memory snapshot: torch does not track CPU memory" in notes


def test_the_loop_feeds_its_meter_and_the_mailbox(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run the rank's row has bytes by kind, matching the model that was trained."""
    made: list[Telemetry] = []

    class Kept(Telemetry):
        def __init__(self, *what: Any) -> None:
            super().__init__(*what)
            made.append(self)

    monkeypatch.setattr(loop, "Telemetry", Kept)
    trained(alone(), spec_of(dataset), str(tmp_path), until=2)
    row = made[0].row()
    assert row["parameters_bytes"] == row["gradients_bytes"] > 0
    assert 2 * row["parameters_bytes"] <= row["optimizer_bytes"] <= 2.1 * row["parameters_bytes"]
    assert row["anon_bytes"] <= row["rss_bytes"]
