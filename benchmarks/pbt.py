"""Population based training compared with random search of the same budget, on real small networks.

    python benchmarks/pbt.py [--seeds 20]

A small network learns the noisy outputs of another one with plain SGD. Each seed has eight trials with random learning rates, and
all trials have the same samples. Three methods:

    random   each trial keeps its rate: random search
    pbt      `raydist.cluster.sweep.schedulers.pbt.Population`, as in a sweep with `scheduler: pbt`
    cosine   random search with a cosine schedule for each trial's rate, the default of a raydist job

The result of a method is the noise-free held-out loss of the trial with the best noisy held-out loss at the end. Rates, samples
and initial weights of a seed are the same for all three, so the ratios are paired. The result depends on how much the rate must
fall, and that on the noise, so there are three noise levels. Writes results/pbt.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from statistics import mean, median
from typing import Any

import torch
from common import write
from torch import nn
from torch.nn import functional

from raydist.cluster.sweep.schedulers import Copy, make, score
from raydist.spec.sweep import Axis, SweepSpec
from raydist.spec.sweep.space import draw

LOW, HIGH = 1e-3, 1.0
RATE = Axis("lr", "optim.lr", "log_uniform", low=LOW, high=HIGH)
CELLS, INTERVALS, STEPS, BATCH = 8, 20, 50, 16
TOTAL = INTERVALS * STEPS * BATCH
"""Samples of a trial; they are counted here instead of tokens."""
INPUTS, WIDTH, HELD_OUT = 8, 32, 512
NOISES = (0.3, 1.0, 2.0)
"""Standard deviations of the noise; of the outputs: 1. With more noise, the rate must fall further by the end."""
WAYS = ("random", "pbt", "cosine")


class Problem:
    """The data of one seed: the samples of each step, and held-out ones."""

    def __init__(self, seed: int, noise: float) -> None:
        chance = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        teacher = network()
        with torch.no_grad():
            self.x = torch.randn(TOTAL, INPUTS, generator=chance)
            clean = teacher(self.x)
            self.scale = clean.std()
            self.y = clean / self.scale + noise * torch.randn(clean.shape, generator=chance)
            self.held_x = torch.randn(HELD_OUT, INPUTS, generator=chance)
            self.clean_y = teacher(self.held_x) / self.scale
            self.held_y = self.clean_y + noise * torch.randn(self.clean_y.shape, generator=chance)
        self.start = network()


def network() -> nn.Sequential:
    """A network with two hidden layers."""
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Cell:
    """One network in training. Its state is the weights and a cursor."""

    def __init__(self, problem: Problem, rate: float) -> None:
        self.problem, self.rate, self.step = problem, rate, 0
        self.net = copy.deepcopy(problem.start)

    def train(self, cosine: bool) -> None:
        """Trains to the end of the next interval."""
        for _ in range(STEPS):
            part = slice(self.step * BATCH, (self.step + 1) * BATCH)
            loss = functional.mse_loss(self.net(self.problem.x[part]), self.problem.y[part])
            grads = torch.autograd.grad(loss, list(self.net.parameters()))
            falling = (1 + math.cos(math.pi * self.step / (INTERVALS * STEPS))) / 2 if cosine else 1.0
            with torch.no_grad():
                for weight, grad in zip(self.net.parameters(), grads, strict=True):
                    weight -= self.rate * falling * grad
            self.step += 1

    def go_on_from(self, other: Cell, rate: float) -> None:
        """Copies the state of `other`, as from its checkpoint."""
        self.net, self.step, self.rate = copy.deepcopy(other.net), other.step, rate

    @torch.no_grad()
    def held_out(self) -> tuple[float, float]:
        """Held-out loss, with noise in the targets and without."""
        told = self.net(self.problem.held_x)
        noisy, clean = (functional.mse_loss(told, y).item() for y in (self.problem.held_y, self.problem.clean_y))
        return noisy, clean


def sweep(seed: int, noise: float, way: str) -> tuple[float, int]:
    """The loss of the best trial, and the number of copies."""
    asked: dict[str, Any] = {
        "base": "none",
        "array": {"type": "random", "samples": CELLS, "parameters": [{"lr": {"log_uniform": [LOW, HIGH]}}]},
        "search": {"seed": seed},
        "scheduler": {"name": "pbt", "every": STEPS * BATCH},
    }
    problem, copies, order = Problem(seed, noise), 0, random.Random(seed)
    own = {f"cell-{n}": draw([RATE], seed, n) for n in range(CELLS)}
    rule = make(SweepSpec.model_validate(asked), [RATE], TOTAL, own.__getitem__)
    assert rule is not None
    cells = {name: Cell(problem, values["optim.lr"]) for name, values in own.items()}
    for _ in range(INTERVALS):
        for cell in cells.values():
            cell.train(way == "cosine")
        for name in order.sample(list(cells), CELLS):  # as they happen to report
            cell = cells[name]
            told = rule.report(name, cell.step * BATCH, score(cell.held_out()[0], "min"))
            if way == "pbt" and isinstance(told, Copy) and cell.step < INTERVALS * STEPS:
                cell.go_on_from(cells[told.source], told.changes["optim.lr"][1])
                rule.copied(name, cell.step * BATCH, told.changes)
                copies += 1
    losses = [cell.held_out() for cell in cells.values()]
    return min((noisy, clean) for noisy, clean in losses if math.isfinite(noisy))[1], copies


def compared(losses: dict[str, list[float]], way: str) -> dict[str, Any]:
    """pbt's losses divided by those of another method, seed by seed."""
    ratios = [pbt / other for pbt, other in zip(losses["pbt"], losses[way], strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    return {
        "ratio_geometric_mean": round(math.exp(mean(logs)), 3),
        "ratio_median": round(median(ratios), 3),
        "ratio_least_and_most": [round(min(ratios), 3), round(max(ratios), 3)],
        "seeds_in_which_pbt_is_better": sum(ratio < 1 for ratio in ratios),
    }


def main() -> None:
    """Prints and writes results/pbt.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for noise in NOISES:
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        copies = 0
        for seed in range(asked.seeds):
            for way in WAYS:
                loss, made = sweep(seed, noise, way)
                losses[way].append(loss)
                copies += made
        found.append(
            {
                "noise": noise,
                "loss_mean": {way: round(mean(each), 5) for way, each in losses.items()},
                "pbt_over_random": compared(losses, "random"),
                "pbt_over_cosine": compared(losses, "cosine"),
                "copies_of_a_sweep": round(copies / asked.seeds, 1),
                "losses": {way: [round(loss, 5) for loss in each] for way, each in losses.items()},
            }
        )
    result = {
        "problem": f"network of {INPUTS}-{WIDTH}-{WIDTH}-1 learns another's answers, with noise, by SGD in batches of {BATCH}",
        "cells": CELLS,
        "samples_of_a_cell": TOTAL,
        "seeds": asked.seeds,
        "by_noise": found,
    }
    write("pbt", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
