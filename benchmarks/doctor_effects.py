"""What each fault of benchmarks/doctor_scenarios.py does to a simulated run.

A hook changes the step of rank r.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from doctor_run import Run


def _slower(run: Run, r: int, one: dict[str, float]) -> float:
    """Seconds by which the faulty rank's step is longer; 0 for others."""
    return run.size * run.step_s if run.on and r == run.rank else 0.0


def stolen(run: Run, r: int, one: dict[str, float]) -> None:
    """Another process has the processor."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["run_delay"] += more * 0.95


def throttled(run: Run, r: int, one: dict[str, float]) -> None:
    """A quota."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["throttled"] += more * 0.97
    one["run_delay"] += more * 0.9


def stopped(run: Run, r: int, one: dict[str, float]) -> None:
    """SIGSTOP in bursts: seen with the probability of being stopped."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["stopped"] = float(run.rng.poisson(more))
    one["held"] = 0.9 * more


def swapping(run: Run, r: int, one: dict[str, float]) -> None:
    """Pages from a disk."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["faults"] += more / 4e-4
    one["reads"] += more / 4e-4 * 4096


def collecting(run: Run, r: int, one: dict[str, float]) -> None:
    """Python's collector."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["gc"] += 0.95 * more
    one["cpu"] += more


def waiting(run: Run, r: int, one: dict[str, float]) -> None:
    """A sleep or a lock in the user's code."""
    one["compute"] += _slower(run, r, one)


def busier(run: Run, r: int, one: dict[str, float]) -> None:
    """More work."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["cpu"] += more


def loader(run: Run, r: int, one: dict[str, float]) -> None:
    """One rank's loader."""
    one["data"] += _slower(run, r, one)


def all_data(run: Run, r: int, one: dict[str, float]) -> None:
    """All loaders."""
    one["data"] += run.size * run.step_s * (1 + 0.05 * float(run.rng.standard_normal())) if run.on else 0.0


def link(run: Run, r: int, one: dict[str, float]) -> None:
    """A slow link of a node: all wait."""
    if run.on:
        one["comm"] += (0.6 + run.size) * run.step_s
        one["again"] += 20 if run.node(r) == run.node(run.rank) else 1


def all_links(run: Run, r: int, one: dict[str, float]) -> None:
    """All wait for the network, from the start."""
    one["comm"] = (0.8 + run.size) * run.step_s


def small(run: Run, r: int, one: dict[str, float]) -> None:
    """Many small messages, from the start."""
    one["comm"] = (1.5 + run.size) * run.step_s
    one["messages"], one["bytes"] = 4000, 80 << 20


def quiet(run: Run, r: int, one: dict[str, float]) -> None:
    """Nothing."""


def retries(run: Run, r: int, one: dict[str, float]) -> None:
    """The allocator retries."""
    if run.on and r == run.rank:
        one["retries"] = float(run.rng.poisson(0.6 * run.step_s))


def spike(run: Run, loss: float, norm: float) -> tuple[float, float]:
    """A batch whose loss and gradient are far from the others."""
    if "hit" not in run.text:
        run.text["hit"] = run.step
    since = run.step - run.text["hit"]
    jump = loss * (0.5 + 2 * run.size)
    return (
        (loss + jump, norm * (4 + 20 * run.size))
        if since == 0
        else (loss + 0.15 * jump * 0.5**since, norm * (1 + 0.5**since))
    )


def diverge(run: Run, loss: float, norm: float) -> tuple[float, float]:
    """The loss rises and stays."""
    since = run.step - run.text.setdefault("hit", run.step)
    rise = loss * (0.4 + run.size) * (1 - np.exp(-since / 15))
    return loss + float(rise) + 0.1 * float(run.rng.standard_normal()), norm * float(1 + 4 * (1 - np.exp(-since / 10)))


def in_blocks(run: Run, loss: float, norm: float) -> tuple[float, float]:
    """Data that is not shuffled: blocks of 20 steps, every other one harder."""
    return loss * (1.0 if run.step % 40 < 20 else 1.0 + 0.15 * run.size), norm


def overflow(run: Run, loss: float, norm: float) -> tuple[float, float]:
    """Norms that are not finite."""
    return loss, float("inf") if run.rng.random() < 0.4 + 0.5 * run.size else norm


def sizes(run: Run) -> dict[str, Any]:
    """Gradients of 40 parameters, and outputs of as many layers, with sizes of their own that drift; one of them vanishes or
    explodes. Half of the outputs begin next to zero, as those of weights that begin at zero. What a layer puts out its gradient
    follows."""
    own = run.text.setdefault("own", 10.0 ** run.rng.uniform(-5, -2, 40))
    out = run.text.setdefault("out", 10.0 ** run.rng.uniform(-1, 1, 40))
    run.text["drift"] = 0.9 * run.text.get("drift", 0.0) + 0.3 * run.rng.standard_normal(40)
    gradients = own * np.exp(run.text["drift"] - 0.002 * run.step)
    outputs = out * np.exp(0.3 * run.text["drift"])
    outputs[::2] *= min(1.0, 0.01 + run.step / 300)
    if run.on and (goes := run.text.get("goes") or run.text.get("puts_out")):
        since = run.step - run.text.setdefault("hit", run.step)
        times = np.exp(goes * min(0.15 * since, 7.5 + 3 * run.size))
        gradients[17] *= times
        if run.text.get("puts_out"):
            outputs[17] *= times
            outputs[18:25] *= times
    return {"gradients": {f"blocks.{i}.weight": float(size) for i, size in enumerate(gradients)},
            "activations": {f"blocks.{i}": float(size) for i, size in enumerate(outputs)}}  # fmt: skip


def overfit(run: Run) -> float:
    """The loss on held-out samples, which rises."""
    turn = int(run.text.setdefault("turn", run.step)) if run.on else run.step
    rise = (0.02 + 0.05 * run.size) * (run.step - turn) / run.every
    return 3.0 / (1 + turn / 300) + rise + 0.001 * float(run.rng.standard_normal())


def standstill(run: Run) -> float:
    """The loss on held-out samples, which no longer falls."""
    turn = int(run.text.setdefault("turn", run.step)) if run.on else run.step
    return 3.0 / (1 + turn / 300) + 0.0005 * abs(float(run.rng.standard_normal()))


def by_heart(run: Run, loss: float, norm: float) -> tuple[float, float]:
    """The training loss, which falls by a quarter in each pass of three evaluations."""
    return loss * float(0.75 ** ((run.step - run.text.setdefault("hit", run.step)) / (3 * run.every))), norm


def loads(run: Run) -> list[list[int]]:
    """Of one layer with 16 experts: two get nothing, or those of one rank get more."""
    loads = run.rng.multinomial(4096, run.rng.dirichlet(np.full(16, 20.0)))
    if run.on and run.text.get("kills"):
        loads[[3, 7]] = 0
    if run.on and run.text.get("prefers"):  # the experts of the second of four ranks
        loads[4:8] = loads[4:8] * (2 + 4 * run.size)
    return [loads.tolist()]


def nan(run: Run) -> tuple[str, dict[str, Any]]:
    """The event of a step with bad numbers."""
    return "non_finite", {"step": run.step, "action": "skip", "loss": None, "cause": f"step {run.step}: the loss is not finite",
                          "ranks": [{"rank": run.rank, "micro_batch": 0, "loss": None}], "samples_hash": "ab"}  # fmt: skip


def unsaved(run: Run) -> tuple[str, dict[str, Any]]:
    """The event of a failed save."""
    return "checkpoint_failed", {"step": run.step, "rank": run.rank, "cause": "OSError: [Errno 5] Input/output error"}


def hang(run: Run) -> tuple[str, dict[str, Any]]:
    """The event of a rank that left out a collective."""
    return "failure", {"attempt": 1, "rank": run.rank, "fault": "worker_hung", "traceback": "", "echoes": run.ranks - 1,
                       "cause": "it has started 41 collectives of group 0, others 42, the last all_reduce"}  # fmt: skip
