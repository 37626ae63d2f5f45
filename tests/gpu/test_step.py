"""A step on the GPU: formats, compilation, activation checkpointing, the optimizer's kernel, each compared with a plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.worker import distributed
from raydist.worker.build import capacity
from raydist.worker.metrics import flops
from raydist.worker.optim import optimizers
from raydist.worker.parallel import ParamShard
from tests.gpu.device import DEVICE, Trainer, alone, cuda_only, job, trained

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """On the CPU in fp32, eager."""
    return trained(job(), CPU)


@cuda_only
def test_device_and_backend_are_chosen_with_their_reasons() -> None:
    """The first GPU by name, and NCCL for its tensors."""
    device, backend = distributed.choose_device(0, None), distributed.choose_backend(DEVICE)
    assert device.value == DEVICE
    assert torch.cuda.get_device_name(0) in device.because
    assert backend.value == "cpu:gloo,cuda:nccl"
    assert "NCCL" in backend.because


def test_fp32_is_that_of_the_cpu(reference: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """Losses to 1e-5: sums are in another order, and TF32, which would differ by 1e-3, is off."""
    losses, _ = trained(job())
    assert losses == pytest.approx(reference[0], rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fewer_bits_are_near_fp32(precision: str, reference: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """Losses to 1%: the 8 bits of a bf16 number give 0.4%; fp16 has 11, and its scale is 2^10 here, so that none overflows."""
    losses, weights = trained(job(precision={"params": precision, "loss_scale": {"initial": 1024}}))
    assert losses == pytest.approx(reference[0], rel=1e-2)
    assert all(w.dtype == torch.float32 for w in weights.values())


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    """With a scale that must overflow only the scale changes, until a step succeeds."""
    trainer = Trainer(job(precision={"params": "fp16", "loss_scale": {"initial": 2.0**40}}))
    before = trainer.weights()
    (report,) = trainer(1)
    assert report.skipped
    assert trainer.precision.loss_scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before.values(), trainer.weights().values(), strict=True))
    for _ in range(60):
        if not trainer(1)[0].skipped:
            break
    assert trainer.precision.loss_scale < 2.0**39
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), trainer.weights().values(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["full", "selective"])
def test_activations_computed_again_are_the_same_bits(activations: str, precision: str) -> None:
    """The same kernels run on the same numbers, twice."""
    plain = trained(job(precision=precision))
    again = trained(job(precision=precision, train={"checkpoint_activations": activations}))
    assert again[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(again[1].values(), plain[1].values(), strict=True))


@pytest.mark.parametrize("compiled", ["blocks", True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_compiled_is_near_eager(compiled: Any, precision: str, tolerance: float) -> None:
    """Losses: fp32 up to the order of sums; bf16 within its rounding, which fused kernels do less often. One graph per kind of
    part, with no break."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager, _ = trained(job(precision=precision))
    losses, _ = trained(job(precision=precision, train={"compile": compiled}))
    assert losses == pytest.approx(eager, rel=tolerance)
    assert counters["stats"]["unique_graphs"] == (2 if compiled == "blocks" else 1)
    assert not counters["graph_break"]


def test_the_fused_kernel_is_taken_and_is_that_of_the_cpu() -> None:
    """AdamW on the same gradients, ten times: to 1e-6, since one fuses multiply and add where the other does not."""
    generator = torch.Generator().manual_seed(0)
    start = {f"p{n}": torch.randn(n, 7, generator=generator) for n in (1, 64, 999)}
    spec = job(optim={"lr": 1e-2}).optim
    results = []
    for device in (DEVICE, CPU):
        parameters = {n: torch.nn.Parameter(p.clone().to(device)) for n, p in start.items()}
        optimizer = optimizers.build({n: ParamShard(p) for n, p in parameters.items()}, spec, device)
        assert optimizer.param_groups[0]["fused"]
        noise = torch.Generator().manual_seed(1)
        for _ in range(10):
            for p in parameters.values():
                p.grad = torch.randn(p.shape, generator=noise).to(device)
            optimizer.step()
        results.append([p.detach().cpu() for p in parameters.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hsdp"])
def test_on_one_rank_every_strategy_is_ddp(strategy: str) -> None:
    """The same bits, since nothing is split."""
    plain, other = trained(job(precision="bf16")), trained(job(precision="bf16", parallel={"strategy": strategy}))
    assert other[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(other[1].values(), plain[1].values(), strict=True))


@cuda_only
def test_a_step_waits_for_the_device_once() -> None:
    """Once for the sums; the norm, which is read next, is ready by then. Both are reads of a few bytes, and nothing else waits.

    `set_sync_debug_mode` warns of every torch call that waits for the device.
    """
    trainer = Trainer(job(precision="bf16"))
    trainer(2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as told:
            trainer(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [(w.filename.rpartition("/")[2], w.lineno) for w in told if "synchroniz" in str(w.message)]
    assert len(places) == 2, places


@cuda_only
def test_mfu_has_the_devices_peak() -> None:
    """For a GPU in the table: found by the name that the driver reports."""
    name = torch.cuda.get_device_name(0)
    peak = flops.peak_flops(name)
    if peak is None:
        pytest.skip(f"{name} is not in raydist.worker.metrics.flops.GPUS")
    told = capacity(job(), alone(), Trainer(job()).model)
    assert told is not None
    assert told["peak_flops"] == peak
    assert told["flops_per_token"] > 6 * 3 * 12 * 128**2  # three blocks' matrices
