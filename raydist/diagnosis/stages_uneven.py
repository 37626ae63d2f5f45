"""One stage of a pipeline computes longer than the others, which wait for it in every micro-batch.

Runs anywhere: plain python and numpy. Of one pipeline alone it cannot tell a rank that is slow from a stage that has more to do:
figures of the rank's host say that, as for ranks with equal work.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import LEAST_LOST, RATIO, figure, slow_ranks
from raydist.diagnosis._window import RECENT, Window, median, newest
from raydist.records import Finding

CAUSE = "the stages of the pipeline are uneven"
LOOKS = "the share of time that the ranks of each stage compute, against the mean of the stages, over the whole window"
COLUMNS = ("run_delay_seconds", "throttled_seconds")
THRESHOLDS = {
    "lost": (f"{LEAST_LOST:g} of the time, in half of the window", "as for a slow rank"),
    "times": (
        f"{RATIO:g} times the mean of the stages",
        "the first and the last stage always have a little more to do",
    ),
}


def check(window: Window) -> Iterator[Finding]:
    """The slowest stage, while no rank is slower than those of its stage."""
    stages, ranks = int(window.setting("parallel.pipeline", 1) or 1), window.keys("rank")
    if stages < 2 or len(ranks) < stages or window.long_steps or slow_ranks(window, "slow_compute"):
        return
    computes = window.share("compute")
    of_rank = np.array([window.stage(rank, len(ranks)) for rank in ranks])
    if len(set(of_rank.tolist())) < stages or computes.shape[1] < 2 * RECENT:
        return
    parts = np.array([median(computes[of_rank == stage].T) for stage in range(stages)])  # [stages, N]
    known = parts[:, ~np.isnan(parts).any(axis=0)]
    if known.shape[1] < 2 * RECENT:
        return
    slow = int(known.mean(axis=1).argmax())
    apart = known[slow] - known.mean(axis=0)
    lost, times = float(np.median(apart)), float(np.median(known[slow] / np.maximum(known.mean(axis=0), 0.05)))
    if lost < LEAST_LOST or times < RATIO or float(newest(apart[None])[0]) < LEAST_LOST:
        return
    own = of_rank == slow
    delay = float(np.nan_to_num(window.recent("rank", "run_delay_seconds"))[own].min())
    yield Finding(
        rule="stages_uneven",
        rank=int(np.array(ranks)[own][0]) if own.sum() == 1 else None,
        severity="info",
        what=f"stage {slow} of the pipeline computes {times:.1f} times as long as the mean one, which costs {lost:.0%} of the time",
        figures={"kind": f"stage {slow}", "times": times, "lost": lost},
        remedy="its host is busy: give its ranks processors of their own (cluster.cpus_per_worker)"
        if delay >= lost / 2
        else "give that stage less: more parallel.chunks, which deal the blocks out in smaller parts, or a number of blocks "
        "(model.layers) that the stages divide; the embedding, head and loss belong to the first and last stage",
        cause="its ranks wait for a processor"
        if delay >= lost / 2
        else "it has more to compute: blocks, or the head and the loss",
        culprit={"setting": "parallel.pipeline", "ranks": [int(r) for r in np.array(ranks)[own]]},
        evidence=[
            figure(
                f"share of time that stage {stage} computes",
                float(np.median(known[stage])),
                "telemetry: median of the window",
            )
            for stage in range(stages)
        ],
        others=[{"cause": "a rank is slow", "against": "no rank of a stage is slower than the others of that stage"}],
        confidence=0.7,
        lost=lost,
    )
