"""Chooses the next point of a search from the results so far: with optuna's Parzen estimators or its Gaussian process.

Runs in: one zero-CPU actor on the driver's node, started only for `search: optuna` and `bayes`. optuna is imported in functions;
for `bayes` it imports torch, which the driver must not: hence the actor. Imports ray in `start_sampler` only.

No state is kept between calls: each builds a new study from all results, with a sampler seeded by search.seed and the number of
points. So the answer depends on the arguments only, whatever was restarted in between.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raydist.spec.sweep import Axis, Point
from raydist.spec.sweep.extent import holds, ordered, size
from raydist.spec.sweep.models import SearchSpec
from raydist.spec.sweep.space import MOST_CELLS, draw, uniform

NAME = "raydist-sampler"
_AGAIN = 4
"""Attempts to get a new point from optuna, if it suggests known ones; after that a random one of the remaining is drawn."""
_DRAWS = 64
_STARTUP = 10
"""Random points before the first chosen one: optuna's default."""


@dataclass(frozen=True, slots=True)
class PointResult:
    """A point that was chosen, and its result. `value`: the objective; for a stopped point, the one after `tokens`."""

    point: Mapping[str, Any]
    state: Literal["running", "finished", "stopped", "failed"] = "running"
    value: float | None = None
    tokens: int = 0


class Sampler:
    """The sampler of one search space, for a `search` that chooses: optuna or bayes. `better`: the objective's mode."""

    def __init__(self, axes: Sequence[Axis], search: SearchSpec, better: Literal["min", "max"]) -> None:
        self._fixed = {axis.field: axis.values[0] for axis in axes if axis.fixed}
        self._fields = [axis.field for axis in axes]
        self._axes = [_Scale(axis) for axis in axes if not axis.fixed]
        self._space = list(axes)
        self._gaussian, self._seed, self._better = search.name == "bayes", search.seed, better

    def ask(self, results: Sequence[PointResult]) -> Point | None:
        """The next point, different from those of `results` (all earlier points, in order). None if no point is left."""
        places = [self._place(one.point) for one in results]
        taken = {place for place in places if place is not None}
        count = size(self._space)
        if count is not None and len(taken) >= count:
            return None
        if not self._axes:
            return None if results else dict(self._fixed)
        known = [(place, one) for place, one in zip(places, results, strict=True) if place is not None]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about experimental features of optuna: constraints.txt has the tested version
            for place in itertools.chain(self._asked(known, len(results)), self._left(taken, len(results), count)):
                if place not in taken:
                    return self._point(place)
        return None

    def _asked(self, known: Sequence[tuple[tuple[Any, ...], PointResult]], number: int) -> Iterator[tuple[Any, ...]]:
        """Suggestions of optuna. The study counts its earlier suggestions as running points."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        distributions = {scale.field: scale.distribution() for scale in self._axes}
        direction = "minimize" if self._better == "min" else "maximize"
        study = optuna.create_study(direction=direction, sampler=self._sampler(number))
        for place, one in self._fit_to_tell(known):
            study.add_trial(self._trial(place, one, distributions))
        for _ in range(_AGAIN):
            params = study.ask(distributions).params
            yield tuple(scale.tidy(params[scale.field]) for scale in self._axes)

    def _sampler(self, number: int) -> Any:
        import optuna

        seed = int(uniform(self._seed, number, "sampler") * 2**32)
        if self._gaussian:
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True, warn_independent_sampling=False
        )

    def _fit_to_tell(
        self, known: Sequence[tuple[tuple[Any, ...], PointResult]]
    ) -> Iterator[tuple[tuple[Any, ...], PointResult]]:
        """For the Gaussian process, turns stopped points into finished ones: optuna would ignore stopped points.

        The value of a stopped point is limited to the worst finished one.
        """
        values = [one.value for _, one in known if one.state == "finished" and one.value is not None]
        worst = (max if self._better == "min" else min)(values, default=None)
        for place, one in known:
            if self._gaussian and one.state == "stopped":
                ends = [v for v in (one.value, worst) if v is not None]
                value = (min if self._better == "min" else max)(ends, default=None)
                one = replace(one, state="finished" if value is not None else "failed", value=value)
            yield place, one

    @staticmethod
    def _trial(place: tuple[Any, ...], one: PointResult, distributions: Mapping[str, Any]) -> Any:
        from optuna.trial import TrialState, create_trial

        states = {
            "running": TrialState.RUNNING,
            "finished": TrialState.COMPLETE,
            "stopped": TrialState.PRUNED,
            "failed": TrialState.FAIL,
        }
        return create_trial(
            state=states[one.state],
            value=one.value if one.state == "finished" else None,
            params=dict(zip(distributions, place, strict=True)),
            distributions=dict(distributions),
            # TPE ranks stopped points by their tokens, and then by their value.
            intermediate_values={one.tokens: one.value} if one.state == "stopped" and one.value is not None else {},
        )

    def _left(self, taken: set[tuple[Any, ...]], number: int, count: int | None) -> Iterator[tuple[Any, ...]]:
        """Random points: in a small space, one of the points that are left."""
        if count is not None and count <= MOST_CELLS:
            left = [place for place in itertools.product(*(s.all() for s in self._axes)) if place not in taken]
            yield left[int(uniform(self._seed, number, "left") * len(left))]
            return
        for attempt in range(_DRAWS):
            point = draw(self._space, self._seed, number * _DRAWS + attempt)
            yield tuple(scale.place(point[scale.field]) for scale in self._axes)

    def _place(self, point: Point) -> tuple[Any, ...] | None:
        """The point in optuna's representation; None if it is not in this space (the sweep file was changed)."""
        return tuple(scale.place(point[scale.field]) for scale in self._axes) if holds(self._space, point) else None

    def _point(self, place: tuple[Any, ...]) -> Point:
        varied = {scale.field: scale.value(inner) for scale, inner in zip(self._axes, place, strict=True)}
        return {name: self._fixed[name] if name in self._fixed else varied[name] for name in self._fields}


class _Scale:
    """An axis in optuna's representation: a range as it is, a list as indices of its values (numbers in ascending order)."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self.field = axis, axis.field
        self._numbers = ordered(axis)
        self._values = self._numbers or list(axis.values)

    def distribution(self) -> Any:
        """optuna's distribution for this axis."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        match self._axis.kind:
            case "values" if self._numbers is None:
                return CategoricalDistribution(list(range(len(self._values))))
            case "values":
                return IntDistribution(0, len(self._values) - 1)
            case "int_uniform":
                return IntDistribution(int(self._axis.low), int(self._axis.high))
            case kind:
                return FloatDistribution(self._axis.low, self._axis.high, log=kind == "log_uniform")

    def all(self) -> range:
        """All positions of a list or of an integer range."""
        if self._axis.kind == "values":
            return range(len(self._values))
        return range(int(self._axis.low), int(self._axis.high) + 1)

    def tidy(self, inner: Any) -> Any:
        """A suggestion of optuna, rounded like the values of trials."""
        return inner if self._axis.kind == "values" else self._axis.tidy(inner)

    def place(self, value: Any) -> Any:
        """A trial's value in optuna's representation."""
        return self._values.index(value) if self._axis.kind == "values" else value

    def value(self, inner: Any) -> Any:
        """The inverse of `place`."""
        return self._values[inner] if self._axis.kind == "values" else inner


def start_sampler(axes: Sequence[Axis], search: SearchSpec, better: Literal["min", "max"]) -> Any:
    """Starts the sampler as a zero-CPU actor on this process's node; it ends with this process. Returns its handle at once.

    Ray restarts it if it dies, and repeats the call: it has no state.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": NAME, "num_cpus": 0, "max_restarts": -1, "max_task_retries": 3, "scheduling_strategy": here}
    return ray.remote(Sampler).options(**options).remote(list(axes), search, better)
