"""GPU readings through a fake pynvml with strict checks (tests/nvml.py)."""

from __future__ import annotations

import inspect

import pynvml
import pytest

from raydist.observe.hardware.nvml import Gpus
from raydist.run import telemetry_schema
from tests.nvml import HBM3E, FakeGpu, FakeNvml

ALL = 0xFFFFFFFF
ULL, UINT = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
NVLINK = {
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL): (ULL, 3),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL): (ULL, 5),
}
GPM = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: 90.0,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 55.0,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 30.0,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 2.0,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 1.0,
}


def pcie(received: int, sent: int, kind: int = ULL) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0): (kind, received),
        (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0): (kind, sent),
    }


def test_the_stand_in_has_the_functions_of_pynvml() -> None:
    """Each function of the fake exists in pynvml, with the same parameters."""
    ours = {name: function for name, function in vars(FakeNvml).items() if name.startswith("nvml")}
    assert ours
    for name, function in ours.items():
        theirs = inspect.signature(getattr(pynvml, name)).parameters
        assert list(inspect.signature(function).parameters)[1:] == list(theirs), name


def test_every_column_of_a_hopper() -> None:
    """Each value has the unit of raydist.run.telemetry_schema; values that cover an interval come from the second reading on."""
    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    gpu = FakeGpu(
        reasons=reasons,
        ecc=2,
        corrected=5,
        links="+" * 7 + "-" + "+" * 10,
        processes={7: 5 << 30, 8: None},
        fields=NVLINK,
        gpm=GPM,
    )
    lib = FakeNvml(gpu)
    gpus = Gpus(lib)
    (first,) = gpus.read()
    lib.events = [(0, 31), (0, 79)]
    (second,) = gpus.read()
    assert second.row == {
        "gpu": 0, "gpu_name": "NVIDIA H200", "gpu_util": 0.97, "gpu_memory_used_bytes": 100 << 30, "gpu_memory_total_bytes": HBM3E,
        "gpu_power_watts": 650.5, "gpu_power_limit_watts": 700.0, "gpu_temperature_celsius": 61.0, "gpu_sm_clock_hz": 1755e6,
        "gpu_memory_clock_hz": 3201e6, "gpu_pcie_width": 16, "gpu_throttle": "power_cap,hardware_thermal",
        "gpu_nvlink_count": 17, "gpu_pcie_in_bytes_per_second": 2 * 2**20,
        "gpu_pcie_out_bytes_per_second": 2**20, "gpu_nvlink_in_bytes": 3 * 1024, "gpu_nvlink_out_bytes": 5 * 1024,
        "gpu_xid_count": 2, "gpu_xid": 79, "gpu_ecc_errors": 2, "gpu_ecc_corrected": 5, "gpu_sm_active": pytest.approx(0.9),
        "gpu_tensor_active": pytest.approx(0.55), "gpu_dram_active": pytest.approx(0.3),
    }  # fmt: skip
    assert {*telemetry_schema.GPU, "gpu"} - set(second.row) == {"gpu_process_bytes", "gpu_other_bytes"}  # the agent's
    since = {name for name in second.row if "active" in name or "pcie" in name} - {"gpu_pcie_width"}
    assert set(second.row) - set(first.row) == {*since, "gpu_xid"}
    assert (second.processes, second.uuid) == ({7: 5 << 30, 8: None}, gpu.uuid)
    assert gpus.note() is None
    assert lib.calls["nvmlDeviceGetName"] == 1
    gpus.close()
    assert lib.calls["nvmlShutdown"] == 1


def test_an_older_gpu_without_gpm() -> None:
    """PCIe rates come from byte counters; a counter that decreases gives no rate for that interval; 32-bit counters give none."""
    wide, narrow = FakeGpu(fields=pcie(1000, 0)), FakeGpu(fields=pcie(1000, 0, UINT))
    lib = FakeNvml(wide, narrow)
    gpus = Gpus(lib)
    rates = []
    for at, received, sent in ((0, 1000, 0), (500_000, 4000, 1000), (1_000_000, 10, 1500)):
        wide.field_time_us, wide.fields = at, pcie(received, sent)
        readings = [reading.row for reading in gpus.read()]
        rates.append([row.get(f"gpu_pcie_{way}_bytes_per_second") for row in readings for way in ("in", "out")])
    assert rates == [[None] * 4, [6000.0, 2000.0, None, None], [None, 1000.0, None, None]]
    assert lib.calls["nvmlGpmQueryDeviceSupport"] == 2
    # The second GPU has no usable field, so its fields are not read again.
    assert lib.calls["nvmlDeviceGetFieldValues"] == 4


def test_nvlinks_of_a_blackwell() -> None:
    """Newer NVLinks count in bytes, in their own fields."""
    counts = (pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES)
    ((row),) = [r.row for r in Gpus(FakeNvml(FakeGpu(fields={(f, ALL): (ULL, f) for f in counts}))).read()]
    assert (row["gpu_nvlink_in_bytes"], row["gpu_nvlink_out_bytes"]) == counts


LINKS = {"gpu_nvlink_in_bytes", "gpu_nvlink_out_bytes"}
SINCE = {f"gpu_{name}" for name in ("sm_active", "tensor_active", "dram_active", "pcie_in_bytes_per_second")}
SINCE.add("gpu_pcie_out_bytes_per_second")
COLUMNS = {
    "nvmlDeviceGetName": {"gpu_name"},
    "nvmlDeviceGetUUID": set(),
    "nvmlDeviceGetUtilizationRates": {"gpu_util"},
    "nvmlDeviceGetMemoryInfo": {"gpu_memory_used_bytes", "gpu_memory_total_bytes"},
    "nvmlDeviceGetComputeRunningProcesses_v3": set(),
    "nvmlDeviceGetPowerUsage": {"gpu_power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"gpu_power_limit_watts"},
    "nvmlDeviceGetTemperature": {"gpu_temperature_celsius"},
    "nvmlDeviceGetClockInfo": {"gpu_sm_clock_hz", "gpu_memory_clock_hz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"gpu_throttle"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"gpu_pcie_width"},
    "nvmlDeviceGetNvLinkState": {"gpu_nvlink_count"},
    "nvmlDeviceGetTotalEccErrors": {"gpu_ecc_errors", "gpu_ecc_corrected"},
    "nvmlDeviceGetFieldValues": LINKS,
    "nvmlDeviceGetSupportedEventTypes": {"gpu_xid_count"},
    "nvmlDeviceRegisterEvents": {"gpu_xid_count"},
    "nvmlGpmQueryDeviceSupport": SINCE,
    "nvmlGpmSampleGet": SINCE,
}
"""A function of NVML -> the columns that are missing if it fails."""
AT_START = {
    name for name in COLUMNS if name.endswith(("Name", "UUID", "DeviceSupport", "EventTypes", "RegisterEvents"))
}


@pytest.mark.parametrize("function", COLUMNS)
def test_what_is_not_there_is_found_out_once(function: str) -> None:
    """If a function fails, only its columns are missing, only for this GPU; what is read at the start is not read again."""
    for code in (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_DEPRECATED,
    ):
        lib = FakeNvml(FakeGpu(fields=NVLINK, gpm=GPM, errors={function: code}), FakeGpu(fields=NVLINK, gpm=GPM))
        gpus = Gpus(lib)
        calls = []
        for _ in range(3):
            lacks, whole = gpus.read()
            calls.append(lib.calls[function])
        assert set(whole.row) - set(lacks.row) == COLUMNS[function]
        assert not set(lacks.row) - set(whole.row)
        ecc = function == "nvmlDeviceGetTotalEccErrors"  # of both kinds, each asked for alone
        each = 2 if ecc or function == "nvmlDeviceGetClockInfo" else 1
        first = 18 if function == "nvmlDeviceGetNvLinkState" else int(ecc)  # all links, and one more; then one of them
        assert calls == ([2] * 3 if function in AT_START else [1 + first + n * each for n in (1, 2, 3)])
        assert (gpus.note() is not None) == (code == pynvml.NVML_ERROR_NO_PERMISSION)


def test_a_gpu_that_is_lost_for_a_while() -> None:
    """The row of a lost GPU has only its index, name and XID count; the next reading tries again, and the other GPU is not
    affected."""
    gpu = FakeGpu(gpm=GPM)
    gpus = Gpus(FakeNvml(gpu, FakeGpu()))
    before, _ = gpus.read()
    functions = [name for name in vars(FakeNvml) if name.startswith(("nvmlDeviceGet", "nvmlGpm"))]
    gpu.errors = dict.fromkeys(functions, pynvml.NVML_ERROR_GPU_IS_LOST)
    lost, other = gpus.read()
    assert set(lost.row) == {"gpu", "gpu_name", "gpu_xid_count"}
    assert "gpu_util" in other.row
    gpu.errors = {}
    back, _ = gpus.read()
    assert set(back.row) == set(before.row)  # rates come with the reading after it


def test_xids_of_the_right_gpu() -> None:
    """XIDs are counted by GPU; a GPU that cannot report them has no count, not 0."""
    lib = FakeNvml(FakeGpu(), FakeGpu(event_types=0), FakeGpu())
    gpus = Gpus(lib)
    lib.events = [(2, 48), (2, 94), (0, 13)]
    told = [(r.row.get("gpu_xid_count"), r.row.get("gpu_xid")) for r in gpus.read()]
    assert told == [(1, 13), (None, None), (2, 94)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "there is no NVIDIA driver (NVML Shared Library Not Found)"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "there is no NVIDIA driver (Driver Not Loaded)"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "this user may not use NVML (Insufficient Permissions)"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the NVIDIA driver was updated while in use"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML does not start (Unknown Error)"),
    ],
)
def test_no_nvml(code: int, words: str) -> None:
    """No rows, and a one-line note with the reason."""
    gpus = Gpus(FakeNvml(FakeGpu(), errors={"nvmlInit": code}))
    assert gpus.read() == []
    note = gpus.note()
    assert note is not None
    assert words in note
    assert "\n" not in note


def test_no_permission_for_some_of_it() -> None:
    """One line for all GPUs together; a GPU that may not be opened does not hide the others."""
    denied = {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION}
    locked = FakeGpu(errors={"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_NO_PERMISSION})
    gpus = Gpus(FakeNvml(FakeGpu(errors=denied), locked, FakeGpu(errors=denied)))
    assert [reading.row["gpu"] for reading in gpus.read()] == [0, 2]
    assert gpus.note() == (
        "GPU 1: no metrics: Insufficient Permissions; "
        "this user may not read power from NVML: those columns stay empty, unless Ray runs as a user with that permission"
    )
