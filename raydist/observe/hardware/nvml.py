"""The state of a node's GPUs, from NVIDIA's management library (NVML): load, memory, power, clocks, links, errors.

Runs in: the monitor of each node; creates no CUDA context. `pynvml` (nvidia-ml-py) loads the driver's own libnvidia-ml. A value
that a GPU, its driver or this user's permissions do not provide is asked for once, and stays empty after that.

Sources: NVML API reference (units, scopes of fields). GPM needs Hopper or later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

_ALL_LINKS = 0xFFFFFFFF
"""Scope of a field: the sum over all NVLinks."""
_EVENTS_AT_ONCE = 1000
_LINK_READS = 10
"""Readings between two looks at the states of the NVLinks, which take a call each."""
_MIB = 1 << 20

_THROTTLE = {
    "nvmlClocksEventReasonApplicationsClocksSetting": "application_clocks",
    "nvmlClocksEventReasonSwPowerCap": "power_cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware_slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync_boost",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware_thermal",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power_brake",
    "nvmlClocksEventReasonDisplayClockSetting": "display_clocks",
}
"""Reasons for reduced clocks; GpuIdle is not one of them."""

_FIELDS = {
    ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS): ("gpu_nvlink_in_bytes", 1024),
    ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS): ("gpu_nvlink_out_bytes", 1024),
    ("NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES", _ALL_LINKS): ("gpu_nvlink_in_bytes", 1),
    ("NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES", _ALL_LINKS): ("gpu_nvlink_out_bytes", 1),
    ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0): ("gpu_pcie_in_bytes_per_second", 1),
    ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0): ("gpu_pcie_out_bytes_per_second", 1),
}
"""Field and scope -> column and factor. NVLinks up to Hopper use the first two, later ones the next two (as in DCGM).

The PCIe fields are for GPUs without GPM. nvmlDeviceGetPcieThroughput gives the same, but blocks for 20 ms per direction.
"""

_GPM: dict[str, tuple[str, float]] = {
    "NVML_GPM_METRIC_SM_UTIL": ("gpu_sm_active", 0.01),
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL": ("gpu_tensor_active", 0.01),
    "NVML_GPM_METRIC_DRAM_BW_UTIL": ("gpu_dram_active", 0.01),
    "NVML_GPM_METRIC_PCIE_RX_PER_SEC": ("gpu_pcie_in_bytes_per_second", _MIB),
    "NVML_GPM_METRIC_PCIE_TX_PER_SEC": ("gpu_pcie_out_bytes_per_second", _MIB),
}
"""Metric -> column and factor. The values are for the time since the previous sample."""

_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Name of a field's value, by the number of its type: NVML_VALUE_TYPE_DOUBLE is 0, and so on."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A GPU at one moment. `row`: values of raydist.run.telemetry_schema.GPU, and `gpu`; unknown values are left out.

    `processes`: pid -> bytes used, None if NVML does not report it; in a container these may be the host's pids.
    """

    row: dict[str, Any]
    processes: dict[int, int | None]
    uuid: str | None


class Gpus:
    """All GPUs of this node. `lib`: pynvml, or a replacement for it."""

    def __init__(self, lib: Any = pynvml) -> None:
        self._lib = lib
        self._gpus: list[_Gpu] = []
        self._events: Any = None
        self._missing: list[str] = []
        try:
            lib.nvmlInit()
            count = lib.nvmlDeviceGetCount()
        except lib.NVMLError as error:
            self._missing.append(_unavailable_reason(lib, error))
            return
        if not count:
            self._missing.append("the NVIDIA driver reports no GPU here")
        for index in range(count):
            try:
                self._gpus.append(_Gpu(lib, index))
            except lib.NVMLError as error:
                self._missing.append(f"GPU {index}: no metrics: {error}")
        self._register_xid_events()

    def note(self) -> str | None:
        """Which GPU metrics are missing, and why, in one line; None if all are there. Complete after the first `read`."""
        notes = list(self._missing)
        if denied := {name for gpu in self._gpus for name in gpu.denied}:
            notes.append(
                f"this user may not read {', '.join(sorted(denied))} from NVML: "
                "those columns stay empty, unless Ray runs as a user with that permission"
            )
        return "; ".join(notes) or None

    def read(self) -> list[Reading]:
        """One reading per GPU."""
        self._read_xids()
        return [gpu.read() for gpu in self._gpus]

    def close(self) -> None:
        """Shuts NVML down."""
        if self._gpus:
            self._lib.nvmlShutdown()

    # --- errors that the driver reports: XIDs

    def _register_xid_events(self) -> None:
        xid = self._lib.nvmlEventTypeXidCriticalError
        for gpu in self._gpus:
            try:
                if self._lib.nvmlDeviceGetSupportedEventTypes(gpu.handle) & xid:
                    self._events = self._events or self._lib.nvmlEventSetCreate()
                    self._lib.nvmlDeviceRegisterEvents(gpu.handle, xid, self._events)
                    gpu.xids = 0
            except self._lib.NVMLError as error:
                if error.value == self._lib.NVML_ERROR_NO_PERMISSION:
                    gpu.denied.add("XIDs")

    def _read_xids(self) -> None:
        if self._events is None:
            return
        for _ in range(_EVENTS_AT_ONCE):
            try:
                event = self._lib.nvmlEventSetWait_v2(self._events, 0)
                index = self._lib.nvmlDeviceGetIndex(event.device)
            except self._lib.NVMLError:
                return  # NVML_ERROR_TIMEOUT: no more events
            for gpu in self._gpus:
                if gpu.index == index:
                    gpu.xids, gpu.xid = (gpu.xids or 0) + 1, int(event.eventData)


class _Gpu:
    """One GPU. Raises NVMLError if NVML gives no handle for it."""

    def __init__(self, lib: Any, index: int) -> None:
        self._lib, self.index = lib, index
        self.handle = lib.nvmlDeviceGetHandleByIndex(index)
        self.xids: int | None = None
        self.xid: int | None = None
        self.denied: set[str] = set()
        self._static: dict[str, Any] = {}
        self._fields = dict(_FIELDS)
        self._counted: dict[str, tuple[int, int]] = {}
        self._samples: tuple[Any, Any] | None = None
        self._sampled = False
        self._link_reads, self._links_up = 0, set[int]()
        self._permanent_errors = {  # permanent errors: not asked again; they differ between drivers
            lib.NVML_ERROR_NOT_SUPPORTED,
            lib.NVML_ERROR_NO_PERMISSION,
            lib.NVML_ERROR_FUNCTION_NOT_FOUND,
            lib.NVML_ERROR_INVALID_ARGUMENT,
            lib.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            lib.NVML_ERROR_DEPRECATED,
            lib.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        }
        self._readings: dict[str, Callable[[], dict[str, Any]]] = {
            "utilisation": self._utilisation,
            "memory": self._memory,
            "processes": self._processes,
            "power": self._power,
            "the power limit": self._power_limit,
            "temperature": self._temperature,
            "clocks": self._clocks,
            "throttle reasons": self._throttle,
            "PCIe lanes": self._lanes,
            "NVLink states": self._nvlinks,
            "ECC errors": self._ecc,
            "corrected ECC errors": self._corrected,
            "NVLink counters": self._links,
            "GPM counters": self._gpm,
        }

    def read(self) -> Reading:
        row: dict[str, Any] = {"gpu": self.index}
        if not self._static:
            row.update(self._query("name", self._name))
            row.update(self._query("uuid", self._uuid))
            self._static = dict(row)
        for name in list(self._readings):
            row.update(self._query(name, self._readings[name]))
        if self.xids is not None:
            row["gpu_xid_count"] = self.xids
            if self.xid is not None:
                row["gpu_xid"] = self.xid
        row = self._static | row
        return Reading(row, row.pop("processes", {}), row.pop("uuid", None))

    def _query(self, name: str, reading: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return reading()
        except self._lib.NVMLError as error:
            if error.value == self._lib.NVML_ERROR_NO_PERMISSION:
                self.denied.add(name)
            if error.value in self._permanent_errors:
                self._readings.pop(name, None)
            return {}

    # --- each of these methods may raise NVMLError

    def _name(self) -> dict[str, Any]:
        return {"gpu_name": _text(self._lib.nvmlDeviceGetName(self.handle))}

    def _uuid(self) -> dict[str, Any]:
        return {"uuid": _text(self._lib.nvmlDeviceGetUUID(self.handle))}

    def _utilisation(self) -> dict[str, Any]:
        return {"gpu_util": self._lib.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100}

    def _memory(self) -> dict[str, Any]:
        info = self._lib.nvmlDeviceGetMemoryInfo(
            self.handle, self._lib.nvmlMemory_v2
        )  # version 1 counts the driver's memory as used
        return {"gpu_memory_used_bytes": info.used, "gpu_memory_total_bytes": info.total}

    def _processes(self) -> dict[str, Any]:
        processes = self._lib.nvmlDeviceGetComputeRunningProcesses_v3(self.handle)
        return {"processes": {process.pid: process.usedGpuMemory for process in processes}}

    def _power(self) -> dict[str, Any]:
        return {"gpu_power_watts": self._lib.nvmlDeviceGetPowerUsage(self.handle) / 1000}

    def _power_limit(self) -> dict[str, Any]:
        return {"gpu_power_limit_watts": self._lib.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1000}

    def _temperature(self) -> dict[str, Any]:
        sensor = self._lib.NVML_TEMPERATURE_GPU
        return {"gpu_temperature_celsius": float(self._lib.nvmlDeviceGetTemperature(self.handle, sensor))}

    def _clocks(self) -> dict[str, Any]:
        megahertz = self._lib.nvmlDeviceGetClockInfo
        return {
            "gpu_sm_clock_hz": megahertz(self.handle, self._lib.NVML_CLOCK_SM) * 1e6,
            "gpu_memory_clock_hz": megahertz(self.handle, self._lib.NVML_CLOCK_MEM) * 1e6,
        }

    def _throttle(self) -> dict[str, Any]:
        bits = self._lib.nvmlDeviceGetCurrentClocksEventReasons(self.handle)
        return {"gpu_throttle": ",".join(word for name, word in _THROTTLE.items() if bits & getattr(self._lib, name))}

    def _lanes(self) -> dict[str, Any]:
        return {"gpu_pcie_width": self._lib.nvmlDeviceGetCurrPcieLinkWidth(self.handle)}

    def _nvlinks(self) -> dict[str, Any]:
        all_of_them, self._link_reads = self._link_reads % _LINK_READS == 0, self._link_reads + 1
        for link in range(self._lib.NVML_NVLINK_MAX_LINKS if all_of_them else 1):
            try:
                up = self._lib.nvmlDeviceGetNvLinkState(self.handle, link) == self._lib.NVML_FEATURE_ENABLED
            except self._lib.NVMLError as error:
                if not link or error.value not in self._permanent_errors:
                    raise
                break  # this model has no more links
            self._links_up = self._links_up - {link} | ({link} if up else set())
        return {"gpu_nvlink_count": len(self._links_up)}

    def _ecc(self) -> dict[str, Any]:
        lib = self._lib
        kind, since = lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC
        return {"gpu_ecc_errors": lib.nvmlDeviceGetTotalEccErrors(self.handle, kind, since)}

    def _corrected(self) -> dict[str, Any]:
        lib = self._lib
        kind, since = lib.NVML_MEMORY_ERROR_TYPE_CORRECTED, lib.NVML_VOLATILE_ECC
        return {"gpu_ecc_corrected": lib.nvmlDeviceGetTotalEccErrors(self.handle, kind, since)}

    def _links(self) -> dict[str, Any]:
        names = list(self._fields)
        asked = [(getattr(self._lib, name), scope) for name, scope in names]
        row = {}
        for name, field in zip(names, self._lib.nvmlDeviceGetFieldValues(self.handle, asked), strict=True):
            column, factor = self._fields[name]
            rate = column.endswith("_per_second")
            # On a fast link, 32 bits overflow in less than a second.
            narrow = rate and field.valueType == self._lib.NVML_VALUE_TYPE_UNSIGNED_INT
            if field.nvmlReturn in self._permanent_errors or (field.nvmlReturn == self._lib.NVML_SUCCESS and narrow):
                del self._fields[name]
            elif field.nvmlReturn == self._lib.NVML_SUCCESS:
                value = getattr(field.value, _VALUES[field.valueType]) * factor
                row.update(self._rate(column, value, field.timestamp) if rate else {column: value})
        if not self._fields:
            raise self._lib.NVMLError(self._lib.NVML_ERROR_NOT_SUPPORTED)
        return row

    def _rate(self, column: str, value: int, at_us: int) -> dict[str, Any]:
        before, self._counted[column] = self._counted.get(column), (value, at_us)
        if before is None or value < before[0] or at_us <= before[1]:
            return {}
        return {column: (value - before[0]) * 1e6 / (at_us - before[1])}

    def _gpm(self) -> dict[str, Any]:
        lib = self._lib
        if self._samples is None:
            if not lib.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                raise lib.NVMLError(lib.NVML_ERROR_NOT_SUPPORTED)
            self._samples = lib.nvmlGpmSampleAlloc(), lib.nvmlGpmSampleAlloc()
        before, now = self._samples
        had, self._sampled = self._sampled, False
        lib.nvmlGpmSampleGet(self.handle, now)
        self._samples, self._sampled = (now, before), True
        if not had:
            return {}
        asked = lib.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = lib.NVML_GPM_METRICS_GET_VERSION, len(_GPM)
        asked.sample1, asked.sample2 = before, now
        for place, name in enumerate(_GPM):
            asked.metrics[place].metricId = getattr(lib, name)
        lib.nvmlGpmMetricsGet(asked)
        row = {}
        for place, (column, factor) in enumerate(_GPM.values()):
            if asked.metrics[place].nvmlReturn == lib.NVML_SUCCESS:
                row[column] = asked.metrics[place].value * factor
        self._fields = {name: field for name, field in self._fields.items() if field[0] not in row}
        return row


def _unavailable_reason(lib: Any, error: Any) -> str:
    """The reason why NVML cannot be used."""
    match error.value:
        case lib.NVML_ERROR_LIBRARY_NOT_FOUND | lib.NVML_ERROR_DRIVER_NOT_LOADED:
            return f"no GPU metrics: there is no NVIDIA driver ({error})"
        case lib.NVML_ERROR_NO_PERMISSION:
            return f"no GPU metrics: this user may not use NVML ({error}); Ray's processes need access to /dev/nvidia*"
        case lib.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return f"no GPU metrics: the NVIDIA driver was updated while in use ({error}); reload it, or reboot"
        case _:
            return f"no GPU metrics: NVML does not start ({error})"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
