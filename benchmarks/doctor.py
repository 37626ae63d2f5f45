"""Scores the rules of raydist.diagnosis on simulated runs with injected faults, and on healthy ones. No timing of this machine.

    python benchmarks/doctor.py [--each 10] [--held-back]
    python benchmarks/doctor.py --cost

Each scenario is a run of 2 to 8 ranks that is simulated second by second: steps that wait for the slowest rank, with noise that
lasts (autoregressive, as other users of a host make it), uneven documents, evaluations and checkpoints; its rows, steps and events
go to the engine every 2 seconds, as in the run's monitor. A fault begins at a random second on a random rank. All follows from the
seed, and no two scenarios have the same noise. Seeds of `--held-back` are others, and its severities are from wider ranges.

culprit: the first finding after the fault names its rank, node or setting; cause: it is of the right rule; false: any finding of a
healthy run, or before a fault. `seconds`: from the fault to the finding. The confusion matrix counts the rule that was told first.

`--cost`: instead, the share of a core that all rules take for 8 ranks with 8 GPUs and 4 steps a second, in healthy scenarios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import write
from doctor_run import Run, simulate
from doctor_scenarios import HEALTHY, SCENARIOS, Scenario

from raydist.diagnosis import Diagnosis
from raydist.records import Finding

SPEC = {
    "optim": {"lr": 1e-3, "schedule": {"warmup": 0.1}},
    "train": {"global_batch": 64, "steps": 10**6},
    "parallel": {"pipeline": 1, "expert": 4},
    "observe": {"grad_noise": 10},
    "comm": {"compress": "none"},
    "data": {"prefetch": 2},
}
WARM_S = 60
"""Seconds of a run that `--cost` leaves out: the window fills."""


@dataclass
class Score:
    """One scenario's result. `told`: the rule that was told first, "" if none."""

    name: str
    told: str
    culprit: bool
    cause: bool
    false: list[str]
    seconds: float | None


def play(scenario: Scenario, seed: int, wide: bool) -> Score:
    """Simulates one scenario."""
    rng = np.random.default_rng([seed, 0xD0C, *scenario.name.encode()])
    nodes = scenario.nodes
    ranks = int(rng.choice(scenario.ranks or ([2, 3, 4, 8] if nodes == 1 else [2, 4, 8])))
    step_s = float(rng.uniform(*scenario.step_s))
    stretch = 1.25 if wide else 1.0
    run = Run(rng, ranks, nodes, scenario.gpus, scenario.seconds, step_s, scenario.crowd * float(rng.uniform(0.3, 1.2)),
              scenario.uneven * float(rng.uniform(0.5, 1.2)))  # fmt: skip
    run.every = max(20, int(rng.uniform(15, 40) / step_s))
    run.rank = int(rng.integers(ranks))
    run.size = float(rng.uniform(scenario.least / stretch, scenario.most * stretch))
    healthy = not scenario.rules
    if not healthy:
        # Ranks can be compared from the first seconds of a run on; the others need a history of losses or evaluations.
        run.fault_at = 0 if scenario.begins else int(rng.uniform(4 if scenario.culprit == "rank" else 40, 80))
    elif scenario.loss is not None:
        run.fault_at = 0  # what is odd about its losses is there from the start
    run.text = scenario.text(run)
    run.loss_hook = scenario.loss
    diagnosis = Diagnosis(spec=SPEC)
    false: list[str] = []
    first: tuple[float, Finding] | None = None
    for rows, steps, events in simulate(run, scenario.hook):
        for finding in diagnosis.observe(rows, steps, events):
            if finding.state == "over":
                continue
            if healthy or not run.on:
                false.append(f"{scenario.name} {seed}: {finding.what}")
            elif first is None:
                first = run.now, finding
        if first is not None and run.now - first[0] > 30:
            break
    assert not diagnosis.problems, diagnosis.problems
    if first is None:
        return Score(scenario.name, "", False, False, false, None)
    at, finding = first
    named = {"rank": finding.rank == run.rank, "node": finding.culprit.get("node") == f"10.0.0.{run.node(run.rank) + 1}",
             "step": "step" in finding.culprit, 
             "parameter": finding.culprit.get("parameter", "").startswith(("blocks.17", "blocks.1.moe"))}  # fmt: skip
    right = named.get(scenario.culprit, finding.culprit.get("setting") == scenario.culprit)
    return Score(scenario.name, finding.rule, right, finding.rule in scenario.rules, false, at - run.fault_at)


def cost() -> dict[str, float]:
    """{healthy scenario: share of a core}."""
    found: dict[str, float] = {}
    for scenario in HEALTHY[:3]:
        run = Run(np.random.default_rng(0), 8, 1, True, 300, 0.25, scenario.crowd, scenario.uneven)
        run.every, run.text, run.loss_hook = 100, scenario.text(run), scenario.loss
        diagnosis, spent, counted = Diagnosis(spec=SPEC), 0.0, 0
        for second, told in enumerate(simulate(run, scenario.hook)):
            begun = time.thread_time()
            list(diagnosis.observe(*told))
            if second * 2 > WARM_S:
                spent, counted = spent + time.thread_time() - begun, counted + 2
        found[scenario.name] = spent / counted
    return found


def main() -> None:
    """Runs, prints, and writes results/doctor.json or results/doctor_held_back.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=10, help="runs of each scenario")
    parser.add_argument(
        "--held-back", action="store_true", help="other seeds, wider ranges: once, after all rules are written"
    )
    parser.add_argument("--only", default="", help="scenarios whose name contains this; writes nothing")
    parser.add_argument("--cost", action="store_true", help="the share of a core that the rules take")
    options = parser.parse_args()
    if options.cost:
        shares = cost()
        print({name: f"{share:.3%}" for name, share in shares.items()})
        write("doctor_cost", {"ranks": 8, "core_share": shares})
        return
    first_seed = 80_000 if options.held_back else 0
    chosen = [s for s in [*SCENARIOS, *HEALTHY] if options.only in s.name]
    matrix: dict[str, Counter[str]] = {}
    scores: list[Score] = []
    for scenario in chosen:
        own = [play(scenario, first_seed + i, options.held_back) for i in range(options.each)]
        scores += own
        matrix[scenario.name] = Counter(score.told or "nothing" for score in own)
        seconds = sorted(s.seconds for s in own if s.seconds is not None)
        middle = f"{seconds[len(seconds) // 2]:6.0f} s" if seconds else ""
        culprits, causes = sum(s.culprit for s in own), sum(s.cause for s in own)
        print(
            f"{scenario.name:28} culprit {culprits:3} cause {causes:3} of {len(own)} {middle}  {dict(matrix[scenario.name])}",
            flush=True,
        )
    faulty = [s for s in scores if s.name not in {h.name for h in HEALTHY}]
    healthy = [s for s in scores if s.name in {h.name for h in HEALTHY}]
    false = [text for score in scores for text in score.false]
    slow = {"host leak", "slow storage", "overfitting", "evaluation takes long", "tokens are repeated too often"}
    times = sorted(s.seconds for s in faulty if s.seconds is not None and s.name not in slow)
    result = {
        "scenarios": len(scores),
        "culprit": sum(s.culprit for s in faulty) / max(len(faulty), 1),
        "cause": sum(s.cause for s in faulty) / max(len(faulty), 1),
        "healthy": len(healthy),
        "false": len(false),
        "median_seconds": times[len(times) // 2] if times else None,
        "worst_seconds": times[-1] if times else None,
        "matrix": {name: dict(counts) for name, counts in matrix.items()},
    }
    for text in false:
        print("FALSE", text)
    print({name: value for name, value in result.items() if name != "matrix"})
    if not options.only:
        write("doctor_held_back" if options.held_back else "doctor", result)


if __name__ == "__main__":
    main()
