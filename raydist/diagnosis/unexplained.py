"""A rank computes longer, and no recorded data shows the cause. Reported only if no other cause explains enough.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, slow_ranks
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "nothing that is recorded explains it"
LOOKS = "whether another cause explains at least this share of the lost time"
THRESHOLDS = {"explains": ("0.3", "below that more than two thirds of the lost time have another cause")}
EXPLAINS = 0.3


def check(window: Window) -> Iterator[Candidate]:
    """EXPLAINS of the lost time: causes with less evidence are not reported."""
    for slow in slow_ranks(window, SYMPTOM):
        yield slow.because(
            window,
            "unexplained",
            cause="no figure of its host explains it",
            explains=EXPLAINS,
            evidence=[],
            remedy=f"`raydist trace RUN` shows what rank {slow.rank} does; compare its host with others: `raydist bench comm`",
            against="another cause explains more",
        )
