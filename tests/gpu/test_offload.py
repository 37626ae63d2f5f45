"""The optimizer on the host, for parameters on the GPU: the CPU kernel's bits, overlap with backward, and nothing left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist.spec.running import OffloadSpec
from raydist.worker.metrics.memory import process
from raydist.worker.optim.offload.adamw import OffloadedAdamW
from tests.gpu.device import CUDA, DEVICE, cuda_only, job, trained

MODES = ["cpu", "nvme"]


def made(parameters: list[nn.Parameter], mode: str, folder: Path, chunk_mb: float = 0.0625) -> OffloadedAdamW:
    return OffloadedAdamW(
        [{"name": "decay", "params": parameters, "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        offload=OffloadSpec(optimizer=mode, path=str(folder), chunk_mb=chunk_mb),  # type: ignore[arg-type]
        tag="rank0",
    )


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_the_kernel_in_memory(mode: str, tmp_path: Path) -> None:
    """Parameters and moments, on the same gradients, equal those of torch's fused AdamW on CPU tensors: the same kernel is used,
    and copies change no bit."""
    shapes = [(257, 64), (63, 129), (1000,), (3, 5)]
    start = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    ours = [nn.Parameter(s.clone().to(DEVICE)) for s in start]
    theirs = [nn.Parameter(s.clone()) for s in start]
    plain = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    with made(ours, mode, tmp_path) as optimizer:
        for step in range(4):
            optimizer.prefetch()
            for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                b.grad = normal(*b.shape, seed=100 * step + n)
                a.grad = b.grad.to(DEVICE)
            optimizer.gradients_final(ours[::-1])
            optimizer.step()
            plain.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.detach().cpu(), b)
            for slot in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[a][slot], plain.state[b][slot])


def test_a_training_is_the_same_from_memory_and_from_a_file(tmp_path: Path) -> None:
    """Losses and weights are equal bit for bit, and close to those of the GPU's own kernel, which rounds in another order: to
    1e-3."""
    spec: dict[str, Any] = {"precision": "bf16"}
    (memory, weights), (file, others) = (
        trained(job(**spec, offload={"optimizer": mode, "path": str(tmp_path), "chunk_mb": 0.25})) for mode in MODES
    )
    assert memory == file
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), others.values(), strict=True))
    assert memory == pytest.approx(trained(job(**spec))[0], rel=1e-5 if not CUDA else 1e-3)


@cuda_only
def test_gradients_come_down_beside_the_backward_pass(tmp_path: Path) -> None:
    """By the order of the streams: the last layer's gradient is on the host while the rest of backward is still running."""
    last, first = (nn.Parameter(normal(1 << 18, seed=n).to(DEVICE)) for n in (0, 1))
    with made([first, last], "cpu", tmp_path) as optimizer:
        optimizer.prefetch()
        last.grad = torch.ones_like(last)
        optimizer.gradients_final([last])
        assert optimizer._host is not None
        assert optimizer._host._down is not None
        arrived = optimizer._host._down.record_event()
        torch.cuda._sleep(2_000_000_000)  # the rest of backward: about a second
        rest = torch.cuda.current_stream().record_event()
        arrived.synchronize()
        assert not rest.query()
        first.grad = torch.ones_like(first)
        optimizer.gradients_final([first])
        optimizer.step()
        assert rest.query()  # the data used arrived after what it depends on


def swap_files(folder: Path) -> list[str]:
    """This process's open files in that folder, including unlinked ones."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left(mode: str, tmp_path: Path) -> None:
    """Three optimizers with 64 MiB of state one after the other: memory does not grow, and no swap file stays open."""
    parameters = [nn.Parameter(torch.zeros(1 << 23, device=DEVICE))]
    after = []
    for _ in range(3):
        with made(parameters, mode, tmp_path, chunk_mb=8) as optimizer:
            parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.prefetch()
            optimizer.step()
            assert bool(swap_files(tmp_path)) == (mode == "nvme")
        del optimizer
        gc.collect()
        assert not swap_files(tmp_path)
        after.append(process()["anon_bytes"] or 0)
    assert after[2] - after[0] < 32 << 20
    assert not list(tmp_path.iterdir())
