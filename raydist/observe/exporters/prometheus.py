"""Exports a run's metrics to Prometheus, through `ray.util.metrics`: Ray's agent on the monitor's node serves them.

Runs in: the run's monitor. Imports ray when created. docs/how-to/exporters.md has the names,
and deploy/grafana/raydist.json uses them.

Ray puts `ray_` before each name. Labels are few: `run`; `rank`, as many as the run has; `op`, `kind`, `phase`, `cause`, `rule` and
`severity`, from fixed lists. A rank's counters restart with each attempt: only the increase since its last sample is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from raydist.observe.exporters import BaseExporter, Facts
from raydist.run.telemetry_schema import OPS, PHASES
from raydist.spec.parts import Part

CAUSES = (
    "user_error", "worker_died", "node_died", "out_of_memory", "worker_hung", "communication", "controller_died",
    "startup_timeout", "startup_failed", "rollback", "aborted",
)  # fmt: skip
"""Kinds of failures, as named in raydist.cluster.run.recovery; all others count as `other`."""
MEMORY = ("allocated", "reserved", "peak", "inactive", "parameters", "gradients", "optimizer", "activations", "rss")
"""Kinds of memory: column names of a rank's sample without `_bytes`."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raydist_step": ("newest optimizer step", ("run",)),
    "raydist_loss_nats": ("loss of the newest step", ("run",)),
    "raydist_eval_loss_nats": ("loss of the newest evaluation on held-out text", ("run",)),
    "raydist_learning_rate": ("learning rate of the newest step", ("run",)),
    "raydist_grad_norm": ("global gradient norm of the newest step, before clipping", ("run",)),
    "raydist_step_seconds": ("mean time of a step since the last report, measured on rank 0", ("run", "rank")),
    "raydist_mfu_ratio": ("model FLOP/s over the devices' peak, 0 to 1; on GPUs whose peak is known", ("run",)),
    "raydist_memory_bytes": ("memory of a rank, by kind", ("run", "rank", "kind")),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "raydist_tokens_total": ("tokens that counted in the loss, of all ranks", ("run",)),
    "raydist_phase_seconds_total": ("time of a rank, by phase", ("run", "rank", "phase")),
    "raydist_comm_seconds_total": ("time of collectives, from start to end", ("run", "rank", "op")),
    "raydist_comm_exposed_seconds_total": ("time of collectives not overlapped with computation", ("run", "rank")),
    "raydist_comm_bytes_total": ("bytes of collectives' messages", ("run", "rank", "op")),
    "raydist_findings_total": ("findings, by rule and severity", ("run", "rule", "severity")),
    "raydist_restarts_total": ("attempts that failed, by the kind of the root cause", ("run", "cause")),
}
"""Name -> (description, labels)."""

_READINGS = {f"{kind}_bytes": ("raydist_memory_bytes", {"kind": kind}) for kind in MEMORY}
_TOTALS: dict[str, tuple[str, dict[str, str]]] = {
    **{f"{phase}_seconds": ("raydist_phase_seconds_total", {"phase": phase}) for phase in PHASES},
    **{f"{op}_seconds": ("raydist_comm_seconds_total", {"op": op}) for op in OPS},
    **{f"{op}_exposed_seconds": ("raydist_comm_exposed_seconds_total", {}) for op in OPS},
    **{f"{op}_bytes": ("raydist_comm_bytes_total", {"op": op}) for op in OPS},
}
"""Column of a rank's sample -> (metric, its labels besides `run` and `rank`)."""


class Options(Part):
    """Where the metrics are served."""

    port: int | None = Field(
        None, ge=1, le=65535, strict=True, description="Port of a private Ray's metrics; default: any free one."
    )


class Exporter(BaseExporter):
    """Passes data to Ray as it arrives, but of samples only the newest of each rank, at each flush: counters are totals."""

    ray_metrics = True

    def __init__(self, facts: Facts) -> None:
        from ray.util import metrics

        self._run = facts.run.name
        self._gauges = {name: metrics.Gauge(name, text, labels) for name, (text, labels) in GAUGES.items()}
        self._counters = {name: metrics.Counter(name, text, labels) for name, (text, labels) in COUNTERS.items()}
        self._newest: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._totals_seen: dict[tuple[int, str], tuple[int, float]] = {}
        """(rank, column) -> (attempt, total) of the newest sample."""
        self._capacity: tuple[float, float] | None = None
        self._run_gauges: dict[str, tuple[float, dict[str, str]]] = {}
        """Gauge of the whole run -> its newest value and labels."""
        facts.note(_where())

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """The newest step, loss, learning rate and gradient norm; tokens; over these rows the mean step time, and MFU."""
        tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
        self._set_run_gauge("raydist_step", rows[-1]["step"])
        self._set_run_gauge("raydist_loss_nats", rows[-1]["loss"])
        self._set_run_gauge("raydist_learning_rate", rows[-1]["lr"])
        self._set_run_gauge("raydist_grad_norm", rows[-1]["grad_norm"])
        self._set_run_gauge("raydist_step_seconds", seconds / len(rows), rank="0")
        self._add("raydist_tokens_total", tokens)
        if self._capacity and seconds > 0:
            per_token, peak = self._capacity
            self._set_run_gauge("raydist_mfu_ratio", tokens / seconds * per_token / peak)

    def event(self, event: Mapping[str, Any]) -> None:
        """Failures, findings, the loss of an evaluation, and the data for MFU."""
        if event["kind"] == "failure":
            self._add("raydist_restarts_total", 1, cause=event["fault"] if event["fault"] in CAUSES else "other")
        elif event["kind"] == "finding" and event.get("state", "new") == "new":
            self._add("raydist_findings_total", 1, rule=event["rule"], severity=event["severity"])
        elif event["kind"] == "eval":
            self._set_run_gauge("raydist_eval_loss_nats", event["loss"])
        elif event["kind"] == "capacity":
            self._capacity = event["flops_per_token"], event["peak_flops"]

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Memory, phases and collectives of ranks. Nodes and GPUs are left out, because Ray exports those itself."""
        self._newest |= {(row["rank"], row["attempt"]): row for row in rows if row["kind"] == "rank"}

    def flush(self) -> None:
        """Passes on the newest samples, and sets the run's gauges again: Ray drops a gauge that was not set for two of its reports,
        but an evaluation's loss stays valid until the next one.
        """
        for name, (value, labels) in self._run_gauges.items():
            self._set(name, value, **labels)
        while self._newest:
            rank, attempt = next(iter(self._newest))
            for column, value in self._newest.pop((rank, attempt)).items():
                if value is None:
                    continue
                if column in _READINGS:
                    name, labels = _READINGS[column]
                    self._set(name, value, rank=str(rank), **labels)
                elif column in _TOTALS:
                    name, labels = _TOTALS[column]
                    self._add(name, self._new(rank, attempt, column, value), rank=str(rank), **labels)

    def _new(self, rank: int, attempt: int, column: str, total: float) -> float:
        """The increase of a total since the last sample of that rank's attempt; the whole total for the first sample."""
        of, before = self._totals_seen.get((rank, column), (attempt, 0.0))
        self._totals_seen[rank, column] = attempt, total
        return total - before if of == attempt and total >= before else total

    def _set_run_gauge(self, name: str, value: float, **labels: str) -> None:
        self._run_gauges[name] = value, labels

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name].set(value, {"run": self._run, **labels})

    def _add(self, name: str, value: float, **labels: str) -> None:
        if value > 0:  # Ray rejects an increase of 0
            self._counters[name].inc(value, {"run": self._run, **labels})


def _where() -> str:
    """The URL of this process's metrics for Prometheus, or why there is none."""
    import ray

    here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
    for node in ray.nodes() if here else ():
        if node["NodeID"] == here and node["MetricsExportPort"] > 0:
            return f"prometheus: metrics are at http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    return (
        "prometheus: Ray serves no metrics on this node; install ray[default], and start it without "
        "RAY_enable_metrics_collection=0"
    )
