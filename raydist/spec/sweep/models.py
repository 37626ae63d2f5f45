"""The fields of a sweep's file: one pydantic model a section, each field with its description.

Runs anywhere. A description is written once: the JSON Schema, docs/reference/sweep-spec.md and the error messages use it. Fields
of a scheduler are described in its file (raydist/cluster/sweep/schedulers), which is read without importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from raydist import registry
from raydist.spec.parts import Extension, Part, SpecValueError, problem, short_name
from raydist.spec.validate import options_model


def _entries(value: Any) -> Any:
    """`parameters` as a mapping means a list with one entry for each field."""
    return [{name: values} for name, values in value.items()] if isinstance(value, dict) else value


Entries = Annotated[list[dict[str, Any]], BeforeValidator(_entries)]


class ArraySpec(Part):
    """The cells of the sweep."""

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
        le=100_000,
        description="random: the number of draws; search: random, optuna or bayes: the number of points of the grid.",
    )
    concurrent: int | None = Field(
        None, ge=1, description="Cells that train at the same time; null: as many as the cluster has room for."
    )
    seeds: int = Field(
        1,
        ge=1,
        le=1000,
        description="Train each cell with so many seeds, from train.seed upwards; tables show the mean.",
    )


def _options() -> dict[str, type[BaseModel]]:
    """Built-in scheduler -> the model of its fields."""
    return {name: found for name in registry.names("scheduler") if (found := options_model("scheduler", name))}


class _Scheduler(Part):
    """Which cells are stopped early, or continue from another one's checkpoint. It counts in tokens."""

    own: ClassVar[dict[str, tuple[str, ...]]] = {name: tuple(found.model_fields) for name, found in _options().items()}
    """Built-in scheduler -> the fields that it has beside `name`."""

    name: Annotated[str, Extension("scheduler", also=("none",), flat=True)] = Field(
        "none",
        description="; ".join(
            [
                "none: every cell to its end",
                *(f"{name}: {(found.__doc__ or '').strip().rstrip('.')}" for name, found in _options().items()),
                "or package.module:attribute of your own.",
            ]
        ),
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of a scheduler of your own; docs/extending.md."
    )

    @model_validator(mode="after")
    def _fits(self) -> _Scheduler:
        own = self.own.get(self.name, ())
        for name in sorted(set(self._given()) - set(own)):
            having = [scheduler for scheduler, fields in self.own.items() if name in fields]
            raise problem(
                name, getattr(self, name), f"has no effect with {self.name}", f"it is for {' and '.join(having)}"
            )
        if self.name in self.own:
            try:
                options_for(self)
            except ValidationError as error:
                cause = error.errors()[0].get("ctx", {}).get("error")
                raise (cause if isinstance(cause, SpecValueError) else error) from None
        return self

    def _given(self) -> dict[str, Any]:
        """The fields beside `name` and `options` that are set."""
        return {
            n: v
            for n in type(self).model_fields
            if n not in ("name", "options") and (v := getattr(self, n)) is not None
        }

    def settings(self) -> dict[str, Any]:
        """The scheduler's own fields, as the file sets them."""
        return {**self._given(), **self.options}

    @property
    def copies(self) -> bool:
        """Whether cells copy one another, so that their values change while they train."""
        return self.name != "none" and bool(registry.described("scheduler", self.name, "COPIES"))


def _fields() -> dict[str, Any]:
    """The fields of all built-in schedulers. Each is None until the file sets it; the scheduler's file has its default."""
    having: dict[str, list[tuple[str, FieldInfo]]] = {}
    for scheduler, model in _options().items():
        for name, info in model.model_fields.items():
            having.setdefault(name, []).append((scheduler, info))
    made: dict[str, Any] = {}
    for name, owners in having.items():
        first = owners[0][1]
        defaults = {s: info.default for s, info in owners if not info.is_required() and info.default is not None}
        shown = {scheduler: _shown(value) for scheduler, value in defaults.items()}
        differ = len(set(shown.values())) > 1
        said = ", ".join(f"{v} ({s})" for s, v in shown.items()) if differ else next(iter(shown.values()), "")
        text = f"{', '.join(s for s, _ in owners)}: {(first.description or '').rstrip('.')}{f'; null: {said}' if said else ''}."
        kinds = {repr((info.annotation, info.metadata)): _type(info) for _, info in owners}
        made[name] = (Union[(*kinds.values(), None)], Field(None, description=text))
    return made


def _type(info: FieldInfo) -> Any:
    """The type of a field with its limits."""
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _shown(value: Any) -> str:
    """A default, as a description has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


if TYPE_CHECKING:

    class SchedulerSpec(_Scheduler):
        """Which cells are stopped early. Its other fields are those of the files in cluster/sweep/schedulers."""

        def __init__(self, **fields: Any) -> None: ...

else:
    SchedulerSpec = create_model("SchedulerSpec", __base__=_Scheduler, __doc__=_Scheduler.__doc__, **_fields())


def options_for(scheduler: _Scheduler) -> BaseModel | None:
    """The validated options of a sweep's scheduler; None where it has no `Options`. Raises ValidationError."""
    model = None if scheduler.name == "none" else options_model("scheduler", scheduler.name)
    return None if model is None else model(**scheduler.settings())


class SearchSpec(Part):
    """The order of the cells, and whether results decide on the next ones."""

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
        description="The seed of all draws: draw i depends on it and on i alone; with optuna and bayes also on the results.",
    )

    @property
    def chooses(self) -> bool:
        """Whether points are chosen from results, so that the cells are not known before."""
        return self.name in ("optuna", "bayes")


METRICS = {"eval_loss": "min", "loss": "min", "tokens_per_second": "max"}
"""Metric of the objective -> which direction is better."""


class ObjectiveSpec(Part):
    """How cells are compared."""

    metric: Literal["eval_loss", "loss", "tokens_per_second"] = Field(
        "eval_loss",
        description="eval_loss: on held-out text, the last one; loss: in training, the mean over the last tenth of the steps; "
        "tokens_per_second.",
    )
    mode: Literal["min", "max"] | None = Field(
        None, description="The better direction; null: min for losses, max for speed."
    )

    @property
    def better(self) -> Literal["min", "max"]:
        """The mode; where the file sets none, the metric's own."""
        return self.mode or ("max" if METRICS[self.metric] == "max" else "min")


class LimitsSpec(Part):
    """Limits after which the sweep ends, finished or not: cost, and failures of a cell."""

    gpu_hours: float | None = Field(
        None,
        gt=0,
        description="GPU-hours after which no cell is started, and those that train save a checkpoint and end.",
    )
    hours: float | None = Field(None, gt=0, description="The same in hours of wall-clock time.")
    cost_per_gpu_hour: float | None = Field(None, ge=0, description="For the cost in tables; in any currency.")
    failures_per_cell: int = Field(2, ge=0, description="How often a cell is tried again before it counts as failed.")


class SweepSpec(Part):
    """Many training jobs that differ in a few fields."""

    name: str | None = Field(
        None,
        description="Name of the sweep, and of its folder; null: the name of the file.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    base: str = Field(description="The job file from which the cells are made, relative to this one.")
    array: ArraySpec = Field(description="The cells of the sweep.")
    scheduler: Annotated[SchedulerSpec, BeforeValidator(short_name)] = Field(
        default_factory=lambda: SchedulerSpec(),
        description="Which cells are stopped early, or continue from another one's checkpoint. It counts in tokens.",
    )
    search: Annotated[SearchSpec, BeforeValidator(short_name)] = Field(
        default_factory=lambda: SearchSpec(),
        description="The order of the cells, and whether results decide on the next ones.",
    )
    objective: ObjectiveSpec = Field(default_factory=lambda: ObjectiveSpec(), description="How cells are compared.")
    equal: Literal["tokens", "steps"] = Field(
        "tokens",
        description="tokens: every cell trains on as many tokens as the base, whatever its batch and context; its steps are "
        "adjusted, and with them all that is counted in steps (eval.every, checkpoint.every, warmup); steps: they stay as in the "
        "base.",
    )
    limits: LimitsSpec = Field(
        default_factory=lambda: LimitsSpec(),
        description="Limits after which the sweep ends, finished or not: cost, and failures of a cell.",
    )

    @model_validator(mode="after")
    def _fits(self) -> SweepSpec:
        kind, search, samples = self.array.type, self.search.name, self.array.samples
        if kind == "random" and search == "grid":
            raise problem("search.name", "grid", "needs a grid, and array.type is random", "leave it out, or optuna")
        if samples is None and (kind == "random" or search == "random" or self.search.chooses):
            asking = "array.type: random" if kind == "random" else f"search.name: {search}"
            raise problem("array.samples", None, f"is needed by {asking}", "set the number of cells to draw")
        if samples is not None and kind != "random" and search in (None, "grid"):
            raise problem(
                "array.samples",
                samples,
                f"has no effect: a {kind} has its own cells",
                "leave it out, or search: random",
            )
        if self.search.chooses and kind in ("zip", "list"):
            raise problem("search.name", search, f"cannot choose in a {kind}", "array.type: random or parameter_sweep")
        if self.scheduler.copies and self.array.seeds > 1:
            raise problem(
                "array.seeds",
                self.array.seeds,
                f"do not go with {self.scheduler.name}, whose cells copy one another",
                "leave it out",
            )
        if self.scheduler.copies and self.search.chooses:
            raise problem("search.name", search, f"and {self.scheduler.name} both choose values", "take one of them")
        return self


__all__ = ["METRICS", "ArraySpec", "LimitsSpec", "ObjectiveSpec", "SchedulerSpec", "SearchSpec", "SweepSpec"]
