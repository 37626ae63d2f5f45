"""Where a sweep's cells go besides its folder: a row a cell, in what shows runs side by side. One file a place.

Runs in: the sweep's driver, in a thread (raydist/cluster/sweep/result_export.py). Must not import torch or ray.

A place is chosen by the exporter of the base job that goes to the same tool (`PLACES`). Its file has a class `Rows`, made when
there is the first row to write:

    Rows(facts)        may connect, and raise: it is tried again
    .has(cell)         whether the cell has its row already, from an earlier driver
    .write(row)        the cell is over, for good. One that was killed in the middle of it is followed by one that calls it again:
                       what there is of the row then is completed, never doubled

What they raise is told once; rows that could not be written wait for the next try.
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
"""Exporter -> the file of this folder whose rows go to the same tool."""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell that is over. `status`: finished, stopped or failed; `at`: when it ended, `started`: when it first had workers, both
    Unix seconds; `seconds`: for how long it has had them.
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
    """As raydist.report.sweep.figures.measure takes them; empty where it never trained."""
    metric: str = "eval_loss"
    """Which of the figures the objective is."""

    @property
    def values(self) -> dict[str, float]:
        """What is compared: objective, eval_loss, loss, tokens and seconds; those that are known."""
        told = {name: self.figures.get(name) for name in ("eval_loss", "loss", "tokens")}
        found = {"objective": self.figures.get(self.metric), **told, "seconds": self.seconds}
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def step(self) -> int:
        """How many steps it has trained."""
        return int(self.figures.get("steps") or 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a place knows of its sweep. `options`: those of the exporter, as its `resolve` gave them."""

    folder: SweepDir
    options: Mapping[str, Any] = field(default_factory=dict)


class Rows(Protocol):
    """What a place has; its constructor takes Facts."""

    def has(self, cell: str) -> bool:
        """Whether that cell's row is written."""
        ...

    def write(self, row: Row) -> None:
        """Writes one, or completes it."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A place that was chosen: the exporter's name, and what its rows are made with."""

    exporter: str
    facts: Facts

    def open(self) -> Rows:
        """Imports its file, and makes its rows."""
        made: Rows = import_module(f"{__name__}.{PLACES[self.exporter]}").Rows(self.facts)
        return made


def choose(exporters: Iterable[Mapping[str, Any]], folder: SweepDir) -> list[Place]:
    """Where the rows of that sweep go, by the `observe.exporters` of its base. Raises UserError where one cannot work here."""
    chosen = [each for each in exporters if each["name"] in PLACES]
    resolved = resolve(of_sweep(chosen, folder), RunDir(folder.storage))
    return [Place(each["name"], Facts(folder, each["options"])) for each in resolved]


def of_sweep(exporters: Iterable[Mapping[str, Any]], folder: SweepDir) -> list[dict[str, Any]]:
    """The exporters of a cell, not resolved yet: in MLflow its run is in the sweep's experiment, unless the job names one."""
    return [
        {
            "name": each["name"],
            "options": {**each["options"], "experiment": each["options"].get("experiment") or folder.name},
        }
        if each["name"] == "mlflow"
        else dict(each)
        for each in exporters
    ]
