"""One rank's experts get far more tokens than the others': all ranks of the exchange wait for it in each layer.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.diagnosis.dead_experts import EVENTS, TOKENS
from raydist.records import Finding

CAUSE = "the router sends too many tokens to the experts of one rank"
LOOKS = "the loads of the newest expert_loads events, summed over the experts of each rank (parallel.expert)"
THRESHOLDS = {
    "imbalance": (
        "1.5 times the mean of the ranks, in 5 events in a row",
        "the others then idle for a third of the time in experts",
    ),
    "before": (
        "1.25 times the median of the fullest rank before, or 1.5 times the mean in 30 more events",
        "routers of a new model are uneven until their balance loss or bias has had time",
    ),
    "tokens": (f"{TOKENS} for each expert on average", "fewer are uneven by chance"),
}
IMBALANCE, RISE, PATIENCE = 1.5, 1.25, 30


def check(window: Window) -> Iterator[Finding]:
    """The layer and the rank with the most tokens."""
    ranks = int(window.setting("parallel.expert", 1) or 1)
    events = window.of("expert_loads")[-(EVENTS + PATIENCE) :]
    if ranks < 2 or len(events) < 2 * EVENTS:
        return
    worst: tuple[float, str, int, int] | None = None
    for name in events[-1].data["layers"]:
        loads = [np.asarray(e.data["layers"].get(name, {}).get("loads", [])) for e in events]
        count = len(loads[-1])
        if count % ranks or len({len(one) for one in loads}) != 1 or not count:
            continue
        if min(one.mean() for one in loads[-EVENTS:]) < TOKENS:
            continue
        of_ranks = np.stack(loads).reshape(len(events), ranks, -1).sum(axis=2)
        times = of_ranks / np.maximum(of_ranks.mean(axis=1, keepdims=True), 1.0)
        before, now = times[:-EVENTS].max(axis=1), times[-EVENTS:]
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
            figure("tokens over those of the mean rank, the least of 5 events", times_mean, "events: expert_loads")
        ],
        confidence=0.9,
    )
