"""Symptoms of a run, found before any rule asks for causes: which rank the others wait for, and why that costs time.

Runs anywhere: plain python and numpy. Pure. Causes of one symptom are rules with one file each; docs/explanation/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.diagnosis._window import RECENT, Array, Window, deviation, median
from raydist.records import Finding, Severity

LEAST_LOST = 0.1
"""Share of the time that a symptom must cost."""
RATIO = 1.25
"""A slow rank needs this many times as long as the median of its peers."""
SIGMAS = 5.0
"""And its excess must be this many times the run's own noise: the spread of such excesses in the parts before."""
STEADY = 0.5
"""In each of the parts but one, the excess must be at least this share of the least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cause of a symptom. `explains`: the share of the lost time that it explains, 0 to 1; `against`: what speaks against it."""

    finding: Finding
    explains: float
    against: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that its peers wait for. `lost`: share of the time; `times`: how many times as long as the median of its peers it
    takes; `noise`: the spread in this run. `row`: its row in the series; `peers`: theirs.
    """

    symptom: str
    rank: int
    row: int
    peers: tuple[int, ...]
    lost: float
    times: float
    noise: float

    def of_peers(self, values: Array) -> float:
        """The median of the peers of a series [R]; NaN if none is known."""
        known = values[list(self.peers)]
        known = known[~np.isnan(known)]
        return float(np.median(known)) if len(known) else float("nan")

    def excess(self, values: Array) -> float:
        """The rank's value less the median of its peers, 0 if not known; values [R]."""
        own, others = float(values[self.row]), self.of_peers(values)
        return 0.0 if np.isnan(own) else own - (0.0 if np.isnan(others) else others)

    def because(
        self,
        window: Window,
        rule: str,
        *,
        cause: str,
        explains: float,
        evidence: Sequence[dict[str, Any]],
        remedy: str,
        against: str,
        severity: Severity = "warning",
        culprit: dict[str, Any] | None = None,
    ) -> Candidate:
        """The candidate that names this cause."""
        who = window.culprit(self.rank) | (culprit or {})
        does = "waits for data" if self.symptom == "slow_data" else "computes"
        figures = {"lost": self.lost, "times": self.times, "explains": explains}
        finding = Finding(
            rule=rule,
            rank=self.rank,
            severity=severity,
            what=f"rank {self.rank} on {who['host']} {does} {self.times:.1f} times as long as the others, "
            f"which costs {self.lost:.0%} of the time: {cause}",
            figures=figures,
            remedy=remedy,
            symptom=self.symptom,
            cause=cause,
            culprit=who,
            evidence=[
                figure(f"share of time that others wait for rank {self.rank}", self.lost, _FROM[self.symptom]),
                *evidence,
            ],
            lost=self.lost,
        )
        return Candidate(finding, min(max(explains, 0.0), 1.0), against)


_FROM = {
    "slow_compute": "telemetry: forward, backward and update less exposed communication, against the median of the peers",
    "slow_data": "telemetry: data_seconds, against the median of the peers",
}


def figure(name: str, value: float, source: str) -> dict[str, Any]:
    """One piece of evidence."""
    return {"figure": name, "value": None if np.isnan(value) else float(f"{value:.4g}"), "from": source}


def slow_ranks(window: Window, symptom: str) -> list[Slow]:
    """Symptom slow_compute or slow_data: for each group of ranks that do equal work, those that the others wait for."""
    found = window.cache.get(symptom)
    if found is None:
        found = window.cache[symptom] = list(_slow_ranks(window, symptom))
    return list(found)


def _slow_ranks(window: Window, symptom: str) -> Iterator[Slow]:
    share = window.share("compute" if symptom == "slow_compute" else "data")
    ranks = window.keys("rank")
    if share.shape[1] < RECENT or window.long_steps:
        return
    stages: dict[int, list[int]] = {}
    for row, rank in enumerate(ranks):
        stages.setdefault(window.stage(rank, len(ranks)), []).append(row)
    for rows in stages.values():
        if len(rows) < 2:
            continue
        own = share[rows]
        middle = _lower_median(own)
        excess = own - middle
        noise = float(np.median(deviation(excess[:, :-RECENT]))) if excess.shape[1] > 2 * RECENT else 0.0
        last = excess[:, -RECENT:]
        enough = max(LEAST_LOST, SIGMAS * noise / np.sqrt(RECENT))
        for i, row in enumerate(rows):
            if np.isnan(last[i]).any():
                continue
            lost = float(last[i].mean())
            others = float(np.nanmean(middle[-RECENT:]))
            times = float(own[i, -RECENT:].mean()) / max(others, 0.01)
            steady = (last[i] >= STEADY * enough).sum() >= RECENT - 1
            if lost >= enough and times >= RATIO and steady:
                peers = tuple(r for r in rows if r != row)
                yield Slow(symptom, ranks[row], row, peers, lost, times, noise)


def _lower_median(values: Array) -> Array:
    """[R, N] -> [N] of an even number the lower one, so that of two ranks the slower one stands out."""
    known = np.sort(np.where(np.isnan(values), np.inf, values), axis=0)
    count = (~np.isnan(values)).sum(axis=0)
    middle = known[np.maximum((count - 1) // 2, 0), np.arange(values.shape[1])]
    return np.where(count > 1, middle, np.nan)


def all_wait(window: Window, name: str) -> float:
    """The lowest share of time, over the ranks, of exposed or data in the newest parts: what no rank's slowness explains."""
    share = window.share(name)
    if share.shape[1] < RECENT or not len(share) or np.isnan(share[:, -RECENT:]).any():
        return 0.0
    return float(share[:, -RECENT:].mean(axis=1).min())


def history(values: Array) -> float:
    """The median over subjects of what they had in the parts before the newest; NaN if unknown."""
    known = median(values[:, :-RECENT], RECENT)
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) else float("nan")
