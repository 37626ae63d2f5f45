"""Exports a run's metrics and events to other tools: one exporter per file, found by its name in `observe.exporters`.

Runs in: the run's monitor, except `resolve`, which the driver calls. Must not import torch.

An exporter's file (or the user's `package.module:attribute`) has a class `Exporter`: a `BaseExporter`, or a class with
the same methods. The monitor calls them in this order, all in one thread that only this exporter uses:

    Exporter(facts)                        before the first of the calls below; may connect, and may raise: it is tried again
    .attempt(number, resume_step, at)      steps after resume_step are void, and will be trained again
    .steps(rows, at)  .event(event)  .samples(rows)      as they arrive; buffer them, do not send
    .flush()                               about every 2 seconds: send. If it raises, it is called again later, with no new data
                                           in between: so an exporter has to keep the data of one round only
    .close()                               once, at the end of the run

The file may have `Options`, a pydantic model by which the job's options are validated before `resolve` gets them.

If another method raises, the error is reported once, and the data of that call is lost. An exporter that raises or hangs does not
affect the run or other exporters (raydist/observe/exporter_threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raydist import registry
from raydist.errors import UserError
from raydist.run.directory import RunDir
from raydist.spec.models import flatten

OF_STEPS = (
    "loss",
    "lr",
    "grad_norm",
    "seconds",
    "data_seconds",
    "grad_noise_scale",
    "expert_imbalance",
    "exchanged_bytes",
)
"""Numbers of a step that are curves."""


def curves(row: Mapping[str, Any]) -> dict[str, float]:
    """A step's point on each curve, by the curve's name. `row`: a StepRecord as a dict."""
    values = {f"train/{name}": row[name] for name in OF_STEPS if row.get(name) is not None}
    if row["seconds"] > 0:
        for name in ("tokens", "samples"):
            if row.get(name) is not None:
                values[f"train/{name}_per_second"] = row[name] / row["seconds"]
    return values


def _nobody(text: str) -> None:
    """Discards a note."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The run's facts for an exporter.

    `spec`: the resolved job as plain data, as in spec.yaml. `options`: from `resolve`. `note`: prints one line for the user.
    """

    run: RunDir
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    note: Callable[[str], None] = _nobody

    def fields(self) -> dict[str, Any]:
        """The job's fields that are set, by their dotted names."""
        return {name: value for name, value in flatten(dict(self.spec)).items() if value not in (None, {}, [])}


class BaseExporter:
    """An exporter that does nothing: a subclass overrides the methods that it needs."""

    ray_metrics: ClassVar[bool] = False
    """Whether it exports through `ray.util.metrics`: a private Ray then serves its metrics."""

    def __init__(self, facts: Facts) -> None:
        """Called in the monitor. May raise if it cannot work now."""

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """Called in the driver before anything starts: returns the options for `Facts`. Raises UserError."""
        return dict(options)

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Attempt `number` resumes from `resume_step`. Called again, with another step, if workers find no checkpoint there."""

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """StepRecords as dicts, in order, each step of an attempt once. `at`: Unix time at which they arrived."""

    def event(self, event: Mapping[str, Any]) -> None:
        """An event as a dict: `kind`, `at` and its data. docs/reference/records.md lists the kinds."""

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of raydist.run.telemetry_schema, only columns that have a value: of ranks, nodes and GPUs."""

    def flush(self) -> None:
        """Sends the buffered data."""

    def close(self) -> None:
        """The last flush, at the end."""


def resolve(chosen: Iterable[Mapping[str, Any]], run: RunDir) -> list[dict[str, Any]]:
    """The exporters of a run, each with `name` and the resolved `options`.

    Imports each one. Raises UserError, which names the exporter and the problem.
    """
    found = []
    for each in chosen:
        try:
            exporter = registry.load("exporter", each["name"])
            if not hasattr(exporter, "resolve") or not hasattr(exporter, "ray_metrics"):
                raise UserError(
                    "is not an exporter", "write package.module:NAME of a subclass of BaseExporter; docs/extending.md"
                )
            options = exporter.resolve(each["options"], run)
        except ImportError as error:
            raise UserError(f"observe.exporters: {each['name']}: {error}", "install what it imports") from error
        except UserError as error:
            raise UserError(f"observe.exporters: {each['name']}: {error.message}", error.hint) from error
        found.append({"name": each["name"], "options": options})
    return found


def metrics_port(chosen: Iterable[Mapping[str, Any]]) -> int | None:
    """The port on which a private Ray must serve its metrics: 0 for any free port, None for no metrics."""
    ports = [e["options"].get("port") or 0 for e in chosen if registry.load("exporter", e["name"]).ray_metrics]
    return max(ports, default=None)
