"""Reported memory equals that of torch's allocator; and a plan made without a GPU predicts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydist.planner.estimate import estimate, measured_pass
from raydist.planner.facts import Machine
from raydist.planner.measure import Planner
from raydist.run.directory import RunDir
from raydist.worker.metrics import memory
from raydist.worker.metrics.memory import MemoryMeter, keep_history
from tests.gpu.device import CUDA, DEVICE, VOCAB, Trainer, alone, job

if not CUDA:
    pytest.skip("needs a CUDA device: see CONTRIBUTING", allow_module_level=True)

LARGE = {"layers": 6, "width": 512, "heads": 8}
"""Large enough that the allocator's rounding to 512 bytes per tensor is negligible."""


@pytest.fixture(scope="module", autouse=True)
def workspace() -> None:
    """cuBLAS allocates its workspace, 64 MiB, in the first product, and keeps it."""
    Trainer(job())(1)


def settled() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_is_what_is_allocated_between_steps(precision: str) -> None:
    """Parameters and moments, to 2%: the rest is the batches and the rotary tables. Gradients exist only within a step."""
    before = settled()
    trainer = Trainer(job(model=LARGE, precision=precision))
    meter = MemoryMeter(DEVICE, trainer.model, trainer.shards, trainer.optimizer)
    trainer.before_update = meter.before_update
    within: list[int] = []
    trainer(2)
    trainer.before_update = lambda: within.append(settled())
    trainer(1)
    after = settled()
    row = meter.read()
    state = row["parameters_bytes"] + row["optimizer_bytes"]  # type: ignore[operator]
    assert row["parameters_bytes"] == 4 * sum(p.numel() for p in trainer.model.parameters())
    assert row["gradients_bytes"] == row["parameters_bytes"]
    assert after - before == pytest.approx(state, rel=0.02)
    assert within[0] - before == pytest.approx(state + row["gradients_bytes"], rel=0.05)  # type: ignore[operator]
    assert row["allocated_bytes"] == after
    assert row["peak_bytes"] > row["allocated_bytes"]  # type: ignore[operator]
    assert row["activations_bytes"] == row["peak_bytes"] - state - row["gradients_bytes"]  # type: ignore[operator]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["none", "full", "selective"])
def test_a_plan_foretells_the_peak(activations: str, precision: str) -> None:
    """The state to 5%, and the rest of the peak to 20%: the plan uses a table of kernels, not this GPU's."""
    spec = job(model=LARGE, precision=precision, train={"checkpoint_activations": activations})
    torch.use_deterministic_algorithms(False)  # deterministic algorithms use extra memory
    before = settled()
    trainer = Trainer(spec)
    trainer(2)
    torch.cuda.reset_peak_memory_stats()
    trainer(1)
    settled()
    peak = torch.cuda.max_memory_allocated() - before
    planner = Planner(spec, VOCAB, "cuda")
    machine = Machine(1, 1, "cuda")
    told = estimate("ddp", spec, machine, planner.model(), planner.measure(measured_pass("ddp", spec, machine)))
    meter = memory.Held.of(trainer.model, trainer.shards, trainer.optimizer, DEVICE)
    state = meter.parameters * 2 + meter.optimizer
    assert told.state == pytest.approx(state, rel=0.05)
    assert told.total - told.state == pytest.approx(peak - state, rel=0.20), (told, peak, state)


def test_a_snapshot_is_taken_where_memory_ends(tmp_path: Path) -> None:
    """The file that torch's viewer reads exists, with the history of allocations, and shows the last allocation."""
    run = RunDir(str(tmp_path / "run"))
    keep_history(run, alone(), 1, 1000)
    try:
        kept = [torch.empty(1 << 20, device=DEVICE)]
        with pytest.raises(torch.OutOfMemoryError):
            kept.append(torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE))
        told = memory.after_oom(0, 1000)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert told.startswith("rank 0 ran out of memory; a snapshot of the allocator's blocks is in ")
    (file,) = tmp_path.rglob("rank-00000.memory-1.pickle")
    assert str(file) in told
    assert file.stat().st_size > 1000
