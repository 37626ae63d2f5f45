"""What a sweep's file may say: one pydantic model a section, each field with its help.

Runs anywhere. The help is written here once: the JSON Schema, docs/sweep-spec.md and the error messages come from it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist.spec.models import Part
from raydist.spec.parts import problem


def _entries(value: Any) -> Any:
    """`parameters` as a mapping is the same as a list of one entry a field."""
    return [{name: values} for name, values in value.items()] if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """1e6 is a float to YAML, and a whole number of tokens to people."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Tokens = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Factor = Annotated[float, Field(gt=0)]
Entries = Annotated[list[dict[str, Any]], BeforeValidator(_entries)]


class ArraySpec(Part):
    """Which cells there are."""

    type: Literal["parameter_sweep", "zip", "list", "random"] = Field(
        "parameter_sweep",
        description="parameter_sweep: every value with every other, the last parameter fastest; zip: first with first, second "
        "with second; list: each entry of `parameters` is a cell; random: `samples` draws.",
    )
    parameters: Entries = Field(
        min_length=1,
        description="Short names (below) or dotted fields of the job: a list of values, one value for all cells, or for draws "
        "{uniform: [a, b]}, {log_uniform: [a, b]}, {int_uniform: [a, b]} (both ends included), {choice: [...]}.",
    )
    samples: int | None = Field(
        None,
        ge=1,
        description="random: how many draws; search: random, optuna or bayes: how many points of the grid are taken.",
    )
    concurrent: int | None = Field(
        None, ge=1, description="Cells that train at the same time; null: as many as the cluster has room for."
    )
    seeds: int = Field(
        1,
        ge=1,
        le=1000,
        description="Train each cell with so many seeds, counted up from train.seed; tables show the mean.",
    )


class SchedulerSpec(Part):
    """Which cells are stopped early, or go on from another one's checkpoint. What it counts is tokens."""

    own: ClassVar[dict[str, tuple[str, ...]]] = {
        "none": (),
        "asha": ("rungs", "reduction"),
        "hyperband": ("rungs", "reduction"),
        "median": ("grace", "every"),
        "pbt": ("every", "quantile", "perturb", "resample"),
    }
    """Scheduler -> the fields that it has."""

    name: Literal["none", "asha", "hyperband", "median", "pbt"] = Field(
        "none",
        description="none: every cell to its end; asha, hyperband: at each rung the best 1/reduction go on; median: one worse "
        "than the median of the others stops; pbt: the worst go on from the best one's checkpoint, with its values perturbed.",
    )
    rungs: list[Tokens] | None = Field(
        None,
        min_length=1,
        description="asha, hyperband: tokens at which it is decided, ascending; null: those of a cell over reduction, again and "
        "again, three rungs at most.",
    )
    reduction: float | None = Field(
        None, gt=1, description="asha, hyperband: one in so many goes on; null: 4 (asha), 3 (hyperband)."
    )
    grace: Tokens | None = Field(
        None, description="median: tokens before which nothing is stopped; null: a fifth of a cell's."
    )
    every: Tokens | None = Field(
        None, description="median, pbt: tokens between two decisions; null: a tenth of a cell's."
    )
    quantile: float = Field(
        0.25, gt=0, le=0.5, description="pbt: the share that is worst, and the share that is best and copied from."
    )
    perturb: tuple[Factor, Factor] = Field(
        (0.8, 1.25),
        description="pbt: a copied number is multiplied with one of these; of a list it goes to a neighbour.",
    )
    resample: float = Field(
        0.25, ge=0, le=1, description="pbt: how likely a value is drawn anew instead of being perturbed."
    )

    @model_validator(mode="after")
    def _fits(self) -> SchedulerSpec:
        fields = type(self).model_fields
        said = {name for name in fields if getattr(self, name) != fields[name].default}
        for name in sorted(said - {"name", *self.own[self.name]}):
            having = [scheduler for scheduler, own in self.own.items() if name in own]
            raise problem(
                name, getattr(self, name), f"says nothing to {self.name}", f"it is for {' and '.join(having)}"
            )
        if self.rungs is not None and sorted(set(self.rungs)) != self.rungs:
            raise problem("rungs", self.rungs, "do not ascend", f"write {sorted(set(self.rungs))}")
        return self

    def rungs_of(self, tokens: int) -> list[int]:
        """asha, hyperband: tokens at which a cell of so many is judged, ascending."""
        if self.rungs is not None:
            return self.rungs
        return sorted({max(1, round(tokens / self.reduction_of**k)) for k in (1, 2, 3)})

    @property
    def reduction_of(self) -> float:
        """asha, hyperband: of so many cells one goes on."""
        return self.reduction or (4.0 if self.name == "asha" else 3.0)

    def every_of(self, tokens: int) -> int:
        """median, pbt: tokens between two decisions in a cell of so many."""
        return self.every or max(1, tokens // 10)

    def grace_of(self, tokens: int) -> int:
        """median: tokens before which nothing is stopped in a cell of so many."""
        return self.grace or tokens // 5


class SearchSpec(Part):
    """In which order cells come, and whether what they gave decides on the next ones."""

    name: Literal["grid", "random", "optuna", "bayes"] | None = Field(
        None,
        description="grid: all cells, in their order; random: `array.samples` of them, drawn; optuna: `array.samples` points, each "
        "chosen by the results so far, by tree-structured Parzen estimators; bayes: the same by a Gaussian process, for few and "
        "costly cells (both need raydist[optuna]); null: grid, and for array.type: random its draws.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="All draws come from it: draw i is a function of it and i alone; under optuna and bayes of the results, too.",
    )

    @property
    def chooses(self) -> bool:
        """Whether points are chosen as results come, so that there are none before."""
        return self.name in ("optuna", "bayes")


METRICS = {"eval_loss": "min", "loss": "min", "tokens_per_second": "max"}
"""What a cell can be judged by -> which way is better."""


class ObjectiveSpec(Part):
    """What makes a cell the best."""

    metric: Literal["eval_loss", "loss", "tokens_per_second"] = Field(
        "eval_loss",
        description="eval_loss: on held-out text, the last one; loss: in training, the mean over the last tenth of the steps; "
        "tokens_per_second.",
    )
    mode: Literal["min", "max"] | None = Field(
        None, description="Which is better; null: min for losses, max for speed."
    )

    @property
    def better(self) -> Literal["min", "max"]:
        """The mode, also where the file says none."""
        return self.mode or ("max" if METRICS[self.metric] == "max" else "min")


class LimitsSpec(Part):
    """Where the sweep ends, finished or not: what it costs, and how often a cell may fail."""

    gpu_hours: float | None = Field(
        None, gt=0, description="No cell is started, and those that train are checkpointed, once so many are spent."
    )
    hours: float | None = Field(None, gt=0, description="The same for the clock on the wall.")
    cost_per_gpu_hour: float | None = Field(None, ge=0, description="For the cost in tables; in any currency.")
    failures_per_cell: int = Field(
        2, ge=0, description="How often a failed cell is tried again before it counts as failed."
    )


def _short(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class SweepSpec(Part):
    """Many training jobs that differ in a few fields."""

    name: str | None = Field(
        None,
        description="Name of the sweep, and of its folder; null: that of the file.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    base: str = Field(description="The job file that the cells are made of, relative to this one.")
    array: ArraySpec = Field(description="Which cells there are.")
    scheduler: Annotated[SchedulerSpec, BeforeValidator(_short)] = Field(
        default_factory=lambda: SchedulerSpec(),
        description="Which cells are stopped early, or go on from another one's checkpoint. What it counts is tokens.",
    )
    search: Annotated[SearchSpec, BeforeValidator(_short)] = Field(
        default_factory=lambda: SearchSpec(),
        description="In which order cells come, and whether what they gave decides on the next ones.",
    )
    objective: ObjectiveSpec = Field(default_factory=lambda: ObjectiveSpec(), description="What makes a cell the best.")
    equal: Literal["tokens", "steps"] = Field(
        "tokens",
        description="tokens: whatever its batch and context, a cell trains on as many tokens as the base, so its steps are made "
        "to fit, and what is counted in steps (eval.every, checkpoint.every, warmup) with them; steps: they stay.",
    )
    limits: LimitsSpec = Field(
        default_factory=lambda: LimitsSpec(),
        description="Where the sweep ends, finished or not: what it costs, and how often a cell may fail.",
    )

    @model_validator(mode="after")
    def _fits(self) -> SweepSpec:
        kind, search, samples = self.array.type, self.search.name, self.array.samples
        if kind == "random" and search == "grid":
            raise problem(
                "search.name", "grid", "has no grid to go through: array.type is random", "leave it out, or optuna"
            )
        if samples is None and (kind == "random" or search == "random" or self.search.chooses):
            asking = "array.type: random" if kind == "random" else f"search.name: {search}"
            raise problem("array.samples", None, f"is needed by {asking}", "say how many cells are drawn")
        if samples is not None and kind != "random" and search in (None, "grid"):
            raise problem(
                "array.samples", samples, f"says nothing: a {kind} has its cells", "leave it out, or search: random"
            )
        if self.search.chooses and kind in ("zip", "list"):
            raise problem("search.name", search, f"cannot choose in a {kind}", "array.type: random or parameter_sweep")
        if self.scheduler.name == "pbt" and self.array.seeds > 1:
            raise problem("array.seeds", self.array.seeds, "do not go with pbt, whose cells mix", "leave it out")
        if self.scheduler.name == "pbt" and self.search.chooses:
            raise problem("search.name", search, "and pbt both choose values", "take one of them")
        return self


__all__ = ["METRICS", "ArraySpec", "LimitsSpec", "ObjectiveSpec", "SchedulerSpec", "SearchSpec", "SweepSpec"]
