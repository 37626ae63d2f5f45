"""Where what is watched goes besides the run's folder: one exporter a file, found by its name in `observe.exporters`.

Runs in: the run's monitor, but for `resolve`, which the driver calls. Must not import torch.

An exporter's file (or the user's `package.module:attribute`) has a class `Exporter`: a `BaseExporter`, or anything with
its methods. The monitor calls them in this order, all in one thread that is this exporter's alone:

    Exporter(facts)                        before the first of what follows; may connect, and raise: it is tried again
    .attempt(number, resume_step, at)      steps past resume_step are void, and will be trained again
    .steps(rows, at)  .event(event)  .samples(rows)      as they come; to be buffered, not sent
    .flush()                               about every 2 seconds: send. One that raises is called again in a while, with nothing
                                           new given in between: so what has to be kept is what one round brought
    .close()                               once, at the end of the run

What the others raise is told once, and what they were given is lost. An exporter that raises or hangs costs neither the run nor
other exporters anything (raydist/observe/exporter_threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raydist import registry
from raydist.errors import UserError
from raydist.run.directory import RunDir


def _nobody(text: str) -> None:
    """For a note that nobody reads."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an exporter knows of its run.

    `spec`: the resolved job, plain, as in spec.yaml. `options`: what `resolve` gave. `note`: says something to the user, once.
    """

    run: RunDir
    options: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    note: Callable[[str], None] = _nobody


class BaseExporter:
    """An exporter of nothing: a subclass overrides what it wants to know."""

    ray_metrics: ClassVar[bool] = False
    """Whether it speaks through `ray.util.metrics`: a private Ray then serves its metrics."""

    def __init__(self, facts: Facts) -> None:
        """In the monitor. Raises what keeps it from working now."""

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """On the driver, before anything is started: the options as `Facts` shall have them. Raises UserError."""
        return dict(options)

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Attempt `number` goes on from `resume_step`. Told again, with another step, if the workers find no checkpoint of it."""

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """StepRecords as dicts, in order, each step of an attempt once. `at`: Unix time at which they were heard of."""

    def event(self, event: Mapping[str, Any]) -> None:
        """An event as a dict: `kind`, `at`, its data. docs/records.md lists the kinds."""

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of raydist.run.telemetry_schema, those columns that have a value: of ranks, nodes and GPUs."""

    def flush(self) -> None:
        """Sends what was given."""

    def close(self) -> None:
        """The last flush, and the end."""


def only(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises UserError for an option that is not `known`."""
    for name in options:
        if name not in known:
            hint = registry.did_you_mean(name, list(known)) if known else "it has none"
            raise UserError(f'unknown option "{name}"', hint)


def resolve(chosen: Iterable[Mapping[str, Any]], run: RunDir) -> list[dict[str, Any]]:
    """The exporters of a run, each `name` and `options`, with options as the monitor shall have them.

    Imports each one. Raises UserError, which says which exporter wants what.
    """
    found = []
    for each in chosen:
        try:
            options = registry.load("exporter", each["name"]).resolve(each["options"], run)
        except ImportError as error:
            raise UserError(f"observe.exporters: {each['name']}: {error}", "install what it imports") from error
        except UserError as error:
            raise UserError(f"observe.exporters: {each['name']}: {error.message}", error.hint) from error
        found.append({"name": each["name"], "options": options})
    return found


def metrics_port(chosen: Iterable[Mapping[str, Any]]) -> int | None:
    """On which port a private Ray must serve its metrics: 0 for any free one, None for not at all."""
    ports = [e["options"].get("port") or 0 for e in chosen if registry.load("exporter", e["name"]).ray_metrics]
    return max(ports, default=None)
