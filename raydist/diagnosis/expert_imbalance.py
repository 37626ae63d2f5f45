"""One rank's experts get far more tokens than the others': all ranks of the exchange wait for it in each layer.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.dead_experts import RECORDS, TOKENS
from raydist.records import Finding

CAUSE = "the router sends too many tokens to the experts of one rank"
LOOKS = "the loads of the newest steps, ten apart, summed over the experts of each rank (parallel.expert)"
THRESHOLDS = {
    "imbalance": (
        "1.5 times the mean of the ranks, in 5 records in a row, of steps that are 10 or more apart",
        "the others then idle for a third of the time in experts",
    ),
    "before": (
        "1.25 times the median of the fullest rank before, or 1.5 times the mean in 30 more records",
        "routers of a new model are uneven until their balance loss or bias has had time",
    ),
    "tokens": (f"{TOKENS} for each expert on average", "fewer are uneven by chance"),
}
IMBALANCE, RISE, PATIENCE = 1.5, 1.25, 30


def check(window: Window) -> Iterator[Finding]:
    """The layer and the rank with the most tokens."""
    ranks = int(window.setting("parallel.expert", 1) or 1)
    if ranks < 2:
        return
    worst: tuple[float, str, int, int] | None = None
    for name, loads in window.steps.loads.newest(RECORDS + PATIENCE).items():
        count = loads.shape[1]
        if len(loads) < 2 * RECORDS or count % ranks or loads[-RECORDS:].mean(axis=1).min() < TOKENS:
            continue
        of_ranks = loads.reshape(len(loads), ranks, -1).sum(axis=2)
        times = of_ranks / np.maximum(of_ranks.mean(axis=1, keepdims=True), 1.0)
        before, now = times[:-RECORDS].max(axis=1), times[-RECORDS:]
        rank = int(now.min(axis=0).argmax())
        least = float(now[:, rank].min())
        rises = least >= RISE * float(np.median(before))
        stays = len(before) == PATIENCE and float(before.min()) >= IMBALANCE
        if least >= IMBALANCE and (rises or stays) and (worst is None or least > worst[0]):
            worst = least, name, rank, count // ranks
    if worst is None:
        return
    times_mean, name, rank, each = worst
    first = rank * each
    yield Finding(
        rule="expert_imbalance",
        rank=None,
        severity="warning",
        what=f"experts {first} to {first + each - 1} of {name}, which are on one rank, get {times_mean:.1f} times the tokens of "
        "the mean rank: the others wait for it",
        figures={"times": times_mean, "first_expert": first, "experts": each},
        remedy="raise model.options.balance_loss or model.options.bias_rate, or lower parallel.expert",
        cause="the router prefers these experts",
        culprit={"parameter": name, "expert_rank": rank},
        evidence=[
            figure("tokens over those of the mean rank, the least of 5 records", times_mean, "steps: expert_loads")
        ],
        confidence=0.9,
    )
