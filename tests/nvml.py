"""A replacement for pynvml on machines without a GPU: the functions that raydist calls, over GPUs that a test describes.

Constants, structures and errors are pynvml's own. Functions that raydist must not call fail.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

HBM3E = 150_754_820_096


@dataclass
class FakeGpu:
    """A GPU, in NVML's units: milliwatts, percent, MHz; by default a busy H200. `errors`: function -> code that it raises."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-7d7e0e5c-2f0a-11f0-8000-0242ac120002"
    utilisation: int = 97
    memory_used: int = 100 << 30
    memory_total: int = HBM3E
    power: int = 650_500
    power_limit: int = 700_000
    temperature: int = 61
    clocks: dict[int, int] = field(default_factory=lambda: {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 3201})
    reasons: int = 0
    ecc: int = 0
    corrected: int = 0
    lanes: int = 16
    links: str = "+" * 18
    """The state of each NVLink: + is up, - is down."""
    processes: dict[int, int | None] = field(default_factory=dict)
    fields: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(field, scope) -> (type, value); all others are not supported."""
    field_time_us: int = 0
    gpm: dict[int, float] | None = None
    """Metric -> value since the previous sample."""
    event_types: int = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """`calls` counts calls by function. `errors`: function -> code, for functions that concern no GPU. `events`: pending (GPU,
    XID)."""

    def __init__(self, *gpus: FakeGpu, errors: dict[str, int] | None = None) -> None:
        self.gpus, self.errors = gpus, errors or {}
        self.calls: Counter[str] = Counter()
        self.events: list[tuple[int, int]] = []
        self._handles = [pynvml.c_nvmlDevice_t(pynvml.struct_c_nvmlDevice_t()) for _ in gpus]
        self._samples: dict[int, tuple[int, int]] = {}
        self._watched: set[int] = set()
        self._taken: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        """Attributes that are not functions come from pynvml."""
        told = getattr(pynvml, name)
        assert not name.startswith("nvml") or not callable(told), f"{name} is called, and stands for nothing here"
        return told

    def _called(self, name: str, handle: Any = None) -> FakeGpu:
        self.calls[name] += 1
        gpu = self.gpus[self._index(handle)] if handle is not None else None
        code = (gpu.errors if gpu else self.errors).get(name)
        if code is not None:
            raise pynvml.NVMLError(code)
        return gpu or FakeGpu()

    def _index(self, handle: Any) -> int:
        return [ctypes.addressof(h.contents) for h in self._handles].index(ctypes.addressof(handle.contents))

    # --- pynvml's names and signatures

    def nvmlInit(self) -> None:
        self._called("nvmlInit")

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._called("nvmlDeviceGetHandleByIndex", self._handles[index])
        return self._handles[index]

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        self._called("nvmlDeviceGetIndex", handle)
        return self._index(handle)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._called("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._called("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return pynvml.c_nvmlUtilization_t(self._called("nvmlDeviceGetUtilizationRates", handle).utilisation, 40)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        gpu = self._called("nvmlDeviceGetMemoryInfo", handle)
        assert version == pynvml.nvmlMemory_v2
        rest = gpu.memory_total - gpu.memory_used
        return pynvml.c_nvmlMemory_v2_t(version, gpu.memory_total, rest // 10, rest - rest // 10, gpu.memory_used)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[Any]:
        found = self._called("nvmlDeviceGetComputeRunningProcesses_v3", handle).processes
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found.items()]

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._called("nvmlDeviceGetPowerUsage", handle).power

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self._called("nvmlDeviceGetEnforcedPowerLimit", handle).power_limit

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int:
        return self._called("nvmlDeviceGetCurrPcieLinkWidth", handle).lanes

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        links = self._called("nvmlDeviceGetNvLinkState", device).links
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(links[link] == "+")

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._called("nvmlDeviceGetTemperature", handle).temperature

    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:
        return self._called("nvmlDeviceGetClockInfo", handle).clocks[type]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._called("nvmlDeviceGetCurrentClocksEventReasons", handle).reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:
        assert counterType == pynvml.NVML_VOLATILE_ECC
        gpu = self._called("nvmlDeviceGetTotalEccErrors", handle)
        assert errorType in (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
        return gpu.ecc if errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else gpu.corrected

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: list[tuple[int, int]]) -> Any:
        gpu = self._called("nvmlDeviceGetFieldValues", handle)
        answers = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for answer, (number, scope) in zip(answers, fieldIds, strict=True):
            answer.fieldId, answer.scopeId, answer.timestamp = number, scope, gpu.field_time_us
            if (number, scope) in gpu.fields:
                answer.valueType, value = gpu.fields[number, scope]
                names = {
                    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
                    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
                }
                setattr(answer.value, names[answer.valueType], value)
            else:
                answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return answers

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        return self._called("nvmlDeviceGetSupportedEventTypes", handle).event_types

    def nvmlEventSetCreate(self) -> Any:
        self._called("nvmlEventSetCreate")
        return pynvml.c_nvmlEventSet_t()

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        self._called("nvmlDeviceRegisterEvents", handle)
        self._watched.add(self._index(handle))

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        self._called("nvmlEventSetWait_v2")
        assert timeoutms == 0, "a reading waits for nothing"
        while self.events:
            gpu, xid = self.events.pop(0)
            if gpu in self._watched:
                return pynvml.c_nvmlEventData_t(self._handles[gpu], pynvml.nvmlEventTypeXidCriticalError, xid, 0, 0)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def nvmlGpmQueryDeviceSupport(self, device: Any) -> Any:
        gpu = self._called("nvmlGpmQueryDeviceSupport", device)
        return pynvml.c_nvmlGpmSupport_t(pynvml.NVML_GPM_SUPPORT_VERSION, gpu.gpm is not None)

    def nvmlGpmSampleAlloc(self) -> Any:
        self._called("nvmlGpmSampleAlloc")
        return pynvml.c_nvmlGpmSample_t(pynvml.struct_c_nvmlGpmSample_t())

    def nvmlGpmSampleGet(self, device: Any, gpmSample: Any) -> Any:
        self._called("nvmlGpmSampleGet", device)
        gpu = self._index(device)
        self._taken[gpu] += 1
        self._samples[ctypes.addressof(gpmSample.contents)] = gpu, self._taken[gpu]
        return gpmSample

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        self._called("nvmlGpmMetricsGet")
        assert metricsGet.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        (gpu, first), (same, second) = (
            self._samples[ctypes.addressof(sample.contents)] for sample in (metricsGet.sample1, metricsGet.sample2)
        )
        assert (gpu, second - first) == (same, 1), "not the two newest samples of one GPU, in order"
        values = self.gpus[gpu].gpm
        assert values is not None
        for place in range(metricsGet.numMetrics):
            metric = metricsGet.metrics[place]
            if metric.metricId in values:
                metric.value = values[metric.metricId]
            else:
                metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return metricsGet
