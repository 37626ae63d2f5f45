"""Benefit and cost of a search: the best of N chosen points compared with N random ones, and seconds per chosen point.

    python benchmarks/search.py [--seeds 20] [--told 10 100 300 1000]

Benefit: two bowl-shaped functions of learning rate (log), weight decay and batch size, one of them bent, with noise like that of
real trials. The search and random draws have the same number of points. Printed: the search's distance to the minimum divided by
the random draws' distance, as a median over seeds. Time: of one call of `ask`, which builds a new study from all earlier points;
three parameters, one thread.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from common import write

from raydist.cluster.sweep.sampler import PointResult, Sampler
from raydist.spec.sweep import Axis, Point
from raydist.spec.sweep.models import SearchSpec
from raydist.spec.sweep.space import draw

AXES = [
    Axis("lr", "optim.lr", "log_uniform", low=1e-5, high=1e-1),
    Axis("wd", "optim.weight_decay", "uniform", low=0.0, high=1.0),
    Axis("batch", "train.global_batch", "values", (16, 32, 64, 128, 256)),
]
NOISE = 0.02
BUDGETS = (16, 32)


def bowl(point: Point) -> float:
    """Separable; the best batch is 64."""
    rate, batch = math.log10(point["optim.lr"]) + 3, math.log2(point["train.global_batch"]) - 6
    return rate**2 + 4 * (point["optim.weight_decay"] - 0.3) ** 2 + 0.1 * batch**2


def bent(point: Point) -> float:
    """The best learning rate grows with the square root of the batch, as in training."""
    batch = math.log2(point["train.global_batch"]) - 6
    rate = math.log10(point["optim.lr"]) + 3 - batch * math.log10(math.sqrt(2))
    return 2 * rate**2 + 4 * (point["optim.weight_decay"] - 0.3) ** 2 + 0.05 * batch**2


def reached(name: Literal["optuna", "bayes"] | None, seed: int, points: int, f: Callable[[Point], float]) -> float:
    """Distance to the minimum of the point with the best noisy value. `name`: None draws random points."""
    noise = random.Random(seed)
    made = None if name is None else Sampler(AXES, SearchSpec(name=name, seed=seed), "min")
    told: list[PointResult] = []
    for number in range(points):
        point = draw(AXES, seed, number) if made is None else made.ask(told)
        assert point is not None
        told.append(PointResult(point, "finished", f(point) + noise.gauss(0, NOISE)))
    return f(min(told, key=lambda one: one.value or 0.0).point)


def seconds(name: Literal["optuna", "bayes"], told: int, rounds: int = 3) -> float:
    """Median seconds of one `ask`, after `told` points."""
    known = [PointResult(draw(AXES, 1, i), "finished", bowl(draw(AXES, 1, i))) for i in range(told)]
    made, took = Sampler(AXES, SearchSpec(name=name), "min"), []
    made.ask(known[:12])  # imports
    for _ in range(rounds):
        begun = time.perf_counter()
        made.ask(known)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def main() -> None:
    """Runs, prints, and writes results/search.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--told", type=int, nargs="+", default=[10, 100, 300, 1000])
    options = parser.parse_args()
    worth: dict[str, Any] = {}
    for f in (bowl, bent):
        for points in BUDGETS:
            found = {
                name: statistics.median(reached(name, seed, points, f) for seed in range(options.seeds))
                for name in (None, "optuna", "bayes")
            }
            shares = {name: found[name] / found[None] for name in ("optuna", "bayes")}
            worth[f"{f.__name__}, {points} points"] = shares
            text = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
            print(f"{f.__name__}, {points} points: {text} of the random draws' distance")
    times: dict[str, dict[int, float]] = {"optuna": {}, "bayes": {}}
    for count in options.told:
        times["optuna"][count], times["bayes"][count] = seconds("optuna", count), seconds("bayes", count)
        print(f"after {count} points: optuna {times['optuna'][count]:.3f} s, bayes {times['bayes'][count]:.3f} s")
    print(
        write(
            "search", {"optuna": version("optuna"), "seeds": options.seeds, "share_of_draws": worth, "seconds": times}
        )
    )


if __name__ == "__main__":
    main()
