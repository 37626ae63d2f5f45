"""The node monitor's reading of the real NVML: the documented columns exist on Hopper, in their documented units, and the fake
matches."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import pytest
import torch

from raydist.observe.hardware.nvml import Gpus, Reading
from raydist.run.telemetry_schema import GPU
from tests.gpu.device import CUDA, DEVICE

if not CUDA:
    pytest.skip("needs a CUDA device: see CONTRIBUTING", allow_module_level=True)

from tests.nvml import FakeGpu, FakeNvml

ALWAYS = {
    "gpu_name": str,
    "gpu_util": float,
    "gpu_memory_used_bytes": int,
    "gpu_memory_total_bytes": int,
    "gpu_power_watts": float,
    "gpu_power_limit_watts": float,
    "gpu_temperature_celsius": float,
    "gpu_sm_clock_hz": float,
    "gpu_memory_clock_hz": float,
    "gpu_throttle": str,
    "gpu_ecc_errors": int,
    "gpu_ecc_corrected": int,
}
GPM = ("gpu_sm_active", "gpu_tensor_active", "gpu_dram_active")
PCIE = ("gpu_pcie_in_bytes_per_second", "gpu_pcie_out_bytes_per_second")
"""Read by GPM, or by field values without it."""


def busy(seconds: float = 2.0) -> None:
    """bf16 matrix products, and copies in both directions over PCIe. NVML's utilisation is a mean over up to a second."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    host, there = torch.empty(1 << 22, pin_memory=True), torch.empty(1 << 22, device=DEVICE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    while True:
        for _ in range(20):
            a @ a
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)
        end.record()
        end.synchronize()
        if begin.elapsed_time(end) > 1000 * seconds:
            return


@pytest.fixture(scope="module")
def told() -> tuple[list[Reading], str | None]:
    """Readings under load; the first one only starts the counters."""
    gpus = Gpus()
    try:
        gpus.read()
        busy()
        return gpus.read(), gpus.note()
    finally:
        gpus.close()


def test_every_column_of_the_table_is_there_or_accounted_for(told: tuple[list[Reading], str | None]) -> None:
    """Each GPU's basic columns exist with their types; GPM's if the library supports it; for a missing column the note has the
    reason."""
    (reading, *_), note = told
    row = reading.row
    print(f"\nnote: {note}\nrow: {row}")
    assert row.keys() <= GPU.keys() | {"gpu"}
    refused = note or ""
    for name, kind in ALWAYS.items():
        assert isinstance(row.get(name), kind), f"{name}: {row.get(name)!r}; {refused}"
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        gpm = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except pynvml.NVMLError:
        gpm = False
    finally:
        pynvml.nvmlShutdown()
    if gpm:
        for name in (*GPM, *PCIE):
            assert name in row or "GPM" in refused, f"{name} is missing; {refused}"


def test_values_are_in_their_ranges(told: tuple[list[Reading], str | None]) -> None:
    """A busy GPU's values: the units are the table's, not NVML's."""
    row = told[0][0].row
    assert 0.2 < row["gpu_util"] <= 1
    assert row["gpu_memory_total_bytes"] == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.05)
    assert torch.cuda.memory_reserved() < row["gpu_memory_used_bytes"] < row["gpu_memory_total_bytes"]
    assert 50 < row["gpu_power_watts"] < 1.2 * row["gpu_power_limit_watts"] < 2000
    assert 15 < row["gpu_temperature_celsius"] < 100
    assert 1e8 < row["gpu_sm_clock_hz"] < 4e9
    assert 1e8 < row["gpu_memory_clock_hz"] < 2e10
    for name in GPM:
        assert 0 <= row.get(name, 0.5) <= 1
    for name in PCIE:
        assert 0 <= row.get(name, 1.0) < 2e11
    if "gpu_tensor_active" in row:
        assert row["gpu_tensor_active"] > 0.05


def test_this_process_is_found(told: tuple[list[Reading], str | None]) -> None:
    """By its pid with its memory; a container may show the host's pids, or none, but never this pid with too little memory."""
    processes = told[0][0].processes
    if os.getpid() not in processes:
        pytest.skip(f"NVML shows the processes {sorted(processes)}, not this one: pids of another namespace")
    used = processes[os.getpid()]
    assert used is None or used > torch.cuda.memory_reserved()


def shape(value: Any) -> Any:
    """The type of a value; for a structure the types of its fields."""
    fields = getattr(value, "_fields_", None)
    return {f[0]: shape(getattr(value, f[0])) for f in fields} if fields else type(value)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("nvmlDeviceGetName", ()),
        ("nvmlDeviceGetUUID", ()),
        ("nvmlDeviceGetUtilizationRates", ()),
        ("nvmlDeviceGetMemoryInfo", (pynvml.nvmlMemory_v2,)),
        ("nvmlDeviceGetPowerUsage", ()),
        ("nvmlDeviceGetEnforcedPowerLimit", ()),
        ("nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,)),
        ("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_SM,)),
        ("nvmlDeviceGetCurrentClocksEventReasons", ()),
        ("nvmlDeviceGetSupportedEventTypes", ()),
    ],
)
def test_the_fake_answers_as_the_real_one(call: str, arguments: tuple[Any, ...]) -> None:
    """tests/nvml.py returns the same types, and structures with the same fields."""
    fake = FakeNvml(FakeGpu())
    theirs = getattr(fake, call)(fake.nvmlDeviceGetHandleByIndex(0), *arguments)
    pynvml.nvmlInit()
    try:
        ours = getattr(pynvml, call)(pynvml.nvmlDeviceGetHandleByIndex(0), *arguments)
    except pynvml.NVMLError as error:
        pytest.skip(f"this GPU has none: {error}")
    finally:
        pynvml.nvmlShutdown()
    assert shape(ours) == shape(theirs)
