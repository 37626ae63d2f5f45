"""A sweep's space: the number of points, whether a point is in it, and the points that are checked before the start."""

from __future__ import annotations

from raydist.spec.sweep import Axis
from raydist.spec.sweep.extent import extremes, holds, ordered, size

RATE = Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-1)
LAYERS = Axis("layers", "model.layers", "int_uniform", low=2, high=5)
BATCH = Axis("batch", "train.global_batch", "values", (64, 8, 32))
WORKERS = Axis("workers", "cluster.workers", "values", (2, 1, 4))
CPUS = Axis("cpus", "cluster.cpus_per_worker", "values", (1, 2))
NAMES = Axis("optimizer", "optim.name", "values", ("adamw", "sgd", "muon"))


def test_how_many_points() -> None:
    """Lists and integer ranges have a finite number of points; a space with any other range has None."""
    assert size([LAYERS, BATCH]) == 12
    assert size([RATE, BATCH]) is None


def test_a_point_is_in_a_space() -> None:
    """A point has a value on each axis, and no other."""
    axes = [RATE, BATCH]
    assert holds(axes, {"optim.lr": 1e-4, "train.global_batch": 8})
    assert not holds(axes, {"optim.lr": 1e-4})
    assert not holds(axes, {"optim.lr": 0.2, "train.global_batch": 8})
    assert not holds(axes, {"optim.lr": 1e-4, "train.global_batch": 16})
    assert not holds(axes, {"optim.lr": 1e-4, "train.global_batch": 8, "optim.clip": 1})


def test_numbers_have_an_order() -> None:
    """Numbers of a list are sorted; names and booleans have no order."""
    assert ordered(BATCH) == [8, 32, 64]
    assert ordered(NAMES) is None
    assert ordered(Axis("x", "x", "values", (True, False))) is None


def test_the_ends_of_a_space() -> None:
    """Points to check: all axes at their lowest and at their highest, each end and each name once, and all combinations of the
    cluster's axes."""
    found = extremes([RATE, LAYERS, BATCH, NAMES])
    assert found[0] == {"optim.lr": 1e-4, "model.layers": 2, "train.global_batch": 8, "optim.name": "adamw"}
    assert found[1] == {"optim.lr": 1e-1, "model.layers": 5, "train.global_batch": 64, "optim.name": "muon"}
    assert {**found[0], "optim.name": "sgd"} in found
    assert {**found[0], "train.global_batch": 64} in found
    assert len(found) == 7
    placed = extremes([WORKERS, CPUS])
    assert {(p["cluster.workers"], p["cluster.cpus_per_worker"]) for p in placed} == {
        (w, c) for w in (1, 2, 4) for c in (1, 2)
    }
