"""Exports a sweep's trials to tools that compare runs side by side: one row per trial. One file per tool.

Runs in: the sweep's driver, in a thread (raydist/cluster/sweep/result_export.py). Must not import torch or ray.

A tool is chosen by the base job's exporter for the same tool (`PLACES`). Its file has a class `Rows`, created when the first row
is written:

    Rows(facts)        may connect, and may raise: it is tried again
    .has(cell)         whether the trial's row exists already, from an earlier driver
    .write(row)        the trial has ended. If a driver is killed during this call, the next driver calls it again: it then
                       completes a partial row and never writes a second one

Errors are reported once; rows that could not be written wait for the next try.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from raydist.observe.exporters import resolve
from raydist.run.directory import RunDir
from raydist.run.sweep_directory import SweepDir

PLACES = {"tensorboard": "hparams", "mlflow": "mlflow"}
_OF_SWEEP = {"mlflow": "experiment", "wandb": "group"}
"""Exporter -> the file in this folder that exports rows to the same tool."""


@dataclass(frozen=True, slots=True)
class Row:
    """A trial that has ended. `status`: finished, stopped or failed; `at`: when it ended, `started`: when it first had workers,
    both in Unix seconds; `seconds`: how long it had workers.
    """

    cell: str
    point: int
    seed: int
    parameters: Mapping[str, Any]
    """Field of the job -> value."""
    status: str
    cause: str | None
    started: float
    at: float
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Computed by raydist.report.sweep.figures.measure; empty if it never trained."""
    metric: str = "eval_loss"
    """Which of the figures is the objective."""

    @property
    def values(self) -> dict[str, float]:
        """The compared values: objective, eval_loss, loss, tokens and seconds; only those that are known."""
        metrics = {name: self.figures.get(name) for name in ("eval_loss", "loss", "tokens")}
        found = {"objective": self.figures.get(self.metric), **metrics, "seconds": self.seconds}
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def step(self) -> int:
        """Number of steps trained."""
        return int(self.figures.get("steps") or 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """The sweep's facts for a tool. `options`: the exporter's options, from its `resolve`."""

    folder: SweepDir
    options: Mapping[str, Any] = field(default_factory=dict)


class Rows(Protocol):
    """The interface of a tool's rows; the constructor takes Facts."""

    def has(self, cell: str) -> bool:
        """Whether that trial's row is written."""

    def write(self, row: Row) -> None:
        """Writes a row, or completes it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A chosen tool: the exporter's name, and the arguments of its rows."""

    exporter: str
    facts: Facts

    def open(self) -> Rows:
        """Imports its file, and creates its Rows."""
        made: Rows = import_module(f"{__name__}.{PLACES[self.exporter]}").Rows(self.facts)
        return made


def choose(exporters: Iterable[Mapping[str, Any]], folder: SweepDir) -> list[Place]:
    """The tools for that sweep's rows, from `observe.exporters` of its base job. Raises UserError if one cannot work here."""
    chosen = [each for each in exporters if each["name"] in PLACES]
    resolved = resolve(of_sweep(chosen, folder), RunDir(folder.storage))
    return [Place(each["name"], Facts(folder, each["options"])) for each in resolved]


def of_sweep(exporters: Iterable[Mapping[str, Any]], folder: SweepDir) -> list[dict[str, Any]]:
    """A trial's exporters, not resolved yet: its MLflow run is in the sweep's experiment, and its W&B run in the sweep's group,
    unless the job names one."""
    found = []
    for each in exporters:
        options, place = dict(each["options"]), _OF_SWEEP.get(each["name"])
        if place is not None:
            options[place] = options.get(place) or folder.name
        found.append({"name": each["name"], "options": options})
    return found
