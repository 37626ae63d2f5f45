"""The figures of `raydist profile`: metrics of a live run over some time, by rank, node and GPU, compared with thresholds.

Runs anywhere. Must not import torch or ray. docs/reference/thresholds.md says where the thresholds come from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raydist.errors import UsageError
from raydist.registry import did_you_mean
from raydist.report import time_breakdown
from raydist.run.directory import RunDir
from raydist.run.status import read_state
from raydist.run.telemetry_log import read_samples
from raydist.run.telemetry_schema import OPS

Row = Mapping[str, Any]
Subject = Literal["rank", "node", "gpu"]
SUBJECTS: dict[Subject, tuple[str, ...]] = {"rank": ("rank", "attempt"), "node": ("node",), "gpu": ("node", "gpu")}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of each `subject`. `value` computes it from the subject's ordered rows of one interval; None if unknown.

    `grows`: it is the increase of counters, so the rows include the last one before the interval. `good`: whether a mean meets
    the threshold (None: there is no threshold); `wanted` is the threshold as text, and `remedy` says what to do.
    """

    subject: Subject
    unit: Literal["share", "bytes/s", "bytes", "W", "C"]
    value: Callable[[Sequence[Row]], float | None]
    good: Callable[[float], bool] | None = None
    wanted: str = ""
    remedy: str = ""
    grows: bool = False


def _mean(name: str) -> Callable[[Sequence[Row]], float | None]:
    def value(rows: Sequence[Row]) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return statistics.fmean(values) if values else None

    return value


def _rate(name: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: time_breakdown.rate(rows, name)


def _spent(name: str) -> Callable[[Sequence[Row]], float | None]:
    def value(rows: Sequence[Row]) -> float | None:
        shares = time_breakdown.spent(rows)
        return None if shares is None else shares[name]

    return value


def _sync(rows: Sequence[Row]) -> float | None:
    """Seconds of communication, divided by the seconds of the forward passes."""
    forward = time_breakdown.grown(rows[0], rows[-1], "forward_seconds")
    moved = sum(time_breakdown.grown(rows[0], rows[-1], f"{op}_seconds") for op in OPS)
    return moved / forward if forward else None


def _link(rows: Sequence[Row]) -> float | None:
    """The rate of the interface's busier direction, divided by its limit."""
    limit = next((row["nic_limit_bytes_per_second"] for row in rows if row.get("nic_limit_bytes_per_second")), None)
    rates = [rate for way in ("in", "out") if (rate := time_breakdown.rate(rows, f"nic_{way}_bytes")) is not None]
    return max(rates) / limit if limit and rates else None


def _used(used: str, total: str) -> Callable[[Sequence[Row]], float | None]:
    def value(rows: Sequence[Row]) -> float | None:
        shares = [row[used] / row[total] for row in rows if row.get(used) is not None and row.get(total)]
        return max(shares) if shares else None

    return value


_MEMORY = "lower train.micro_batch, or use parallel.strategy: zero2 or zero3, or offload.optimizer: cpu"
METRICS: dict[str, Metric] = {
    "compute": Metric("rank", "share", _spent("compute"), grows=True),
    "exposed": Metric(
        "rank",
        "share",
        _spent("exposed"),
        lambda x: x < 0.1,
        "under 10% of the time",
        "larger train.micro_batch (fewer syncs per token), parallel.bucket_mb: auto, precision.reduce: bf16, or a faster link",
        grows=True,
    ),
    "sync": Metric(
        "rank",
        "share",
        _sync,
        lambda x: x < 0.2,
        "under 20% of forward",
        "as for exposed; communication that is overlapped with computation costs nothing",
        grows=True,
    ),
    "data": Metric(
        "rank",
        "share",
        _spent("data"),
        lambda x: x < 0.05,
        "under 5% of the time",
        "raise data.prefetch, prepare the data ahead (`raydist data prepare`), or move it closer",
        grows=True,
    ),
    "save": Metric(
        "rank",
        "share",
        _spent("save"),
        lambda x: x < 0.05,
        "under 5% of the time",
        "raise checkpoint.every",
        grows=True,
    ),
    "rss": Metric("rank", "bytes", _mean("rss_bytes")),
    "gpu_util": Metric(
        "gpu",
        "share",
        _mean("gpu_util"),
        lambda x: x >= 0.85,
        "at least 85%",
        "check data and exposed; larger train.micro_batch, train.compile",
    ),
    "gpu_memory": Metric(
        "gpu",
        "share",
        _used("gpu_memory_used_bytes", "gpu_memory_total_bytes"),
        lambda x: x < 0.95,
        "under 95%",
        _MEMORY,
    ),
    "gpu_sm_active": Metric("gpu", "share", _mean("gpu_sm_active")),
    "gpu_tensor_active": Metric("gpu", "share", _mean("gpu_tensor_active")),
    "gpu_power": Metric("gpu", "W", _mean("gpu_power_watts")),
    "gpu_temperature": Metric("gpu", "C", _mean("gpu_temperature_celsius")),
    "cpu_util": Metric("node", "share", _mean("cpu_util")),
    "memory": Metric(
        "node",
        "share",
        _used("memory_used_bytes", "memory_total_bytes"),
        lambda x: x < 0.9,
        "under 90%",
        _MEMORY,
    ),
    "network_in": Metric("node", "bytes/s", _rate("nic_in_bytes"), grows=True),
    "network_out": Metric("node", "bytes/s", _rate("nic_out_bytes"), grows=True),
    "network": Metric(
        "node",
        "share",
        _link,
        lambda x: x < 0.8,
        "under 80% of the link",
        "precision.reduce: bf16, parallel.strategy: hsdp, or a faster link",
        grows=True,
    ),
}
DEFAULT = (
    "gpu_util",
    "gpu_memory",
    "compute",
    "exposed",
    "sync",
    "data",
    "memory",
    "network_in",
    "network_out",
    "network",
)


def chosen(names: Iterable[str] | None) -> list[str]:
    """Checked names of metrics. Raises UsageError for an unknown one."""
    selected = list(names) if names is not None else list(DEFAULT)
    for name in selected:
        if name not in METRICS:
            raise UsageError(f"unknown metric {name!r}", did_you_mean(name, list(METRICS)))
    return selected


def profile(
    run: RunDir, names: Sequence[str], duration: float, interval_s: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The figures of the next `duration` seconds of a run that trains; see `measured`. `say` gets lines of progress.

    Raises UsageError if it does not train, or nothing was measured.
    """
    begun = time.time()
    end = time.monotonic() + duration
    while True:
        status = read_state(run)["status"]
        if status != "running":
            raise UsageError(
                f"{run.uri}: this run is {status}; only a run that is training can be profiled",
                f"`raydist show {run.uri}` shows its results",
            )
        left = end - time.monotonic()
        if left <= 0:
            break
        say(f"profiling {run.name} for {left:.0f} s more")
        time.sleep(min(left, interval_s))
    rows = read_samples(run, since=begun).to_pylist()
    if not rows:
        raise UsageError(
            f"{run.uri}: nothing was measured in {duration:g} s",
            "set observe.interval_s if it is null; otherwise use a longer --duration",
        )
    return measured(rows, names, begun, interval_s)


def measured(rows: Sequence[Row], names: Sequence[str], begun: float, interval_s: float) -> list[dict[str, Any]]:
    """One dict per metric and subject: metric, the subject's columns and host, unit, mean, least, most over the intervals, ok,
    wanted, remedy. `rows`: ordered by time. A metric without rows has no dict; `ok` is None without a threshold.
    """
    found = []
    for name in names:
        metric = METRICS[name]
        keys = SUBJECTS[metric.subject]
        for who, own in sorted(
            time_breakdown.by_subject((r for r in rows if r["kind"] == metric.subject), *keys).items()
        ):
            binned: dict[int, list[Row]] = {}
            for row in own:
                binned.setdefault(int((row["at"] - begun) // interval_s), []).append(row)
            values, before = [], list[Row]()
            for part in binned.values():
                values.append(metric.value([*before, *part] if metric.grows else part))
                before = part[-1:]
            known = [value for value in values if value is not None]
            if not known:
                continue
            mean = statistics.fmean(known)
            ok = metric.good(mean) if metric.good is not None else None
            found.append(
                {
                    "metric": name,
                    **dict(zip(keys, who, strict=True)),
                    "host": own[-1]["host"],
                    "unit": metric.unit,
                    "mean": mean,
                    "least": min(known),
                    "most": max(known),
                    "ok": ok,
                    "wanted": metric.wanted or None,
                    "remedy": metric.remedy if ok is False else None,
                }
            )
    return found
