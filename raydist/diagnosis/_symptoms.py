"""Symptoms of a run, found before any rule asks for causes: which rank the others wait for, and why that costs time.

Runs anywhere: plain python and numpy. Pure. Causes of one symptom are rules with one file each; docs/explanation/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.diagnosis._window import RECENT, Array, Window, deviation, median, median_of, newest
from raydist.records import Finding, Severity

LEAST_LOST = 0.15
"""Share of the time that a symptom must cost."""
CROWDED = 0.5
"""And so much of the time that the peers themselves are ready to run and have no processor: on a crowded host who is late changes
by chance. On two cores with five other users, two healthy ranks lacked a processor for 0.35 to 0.57 of the time, and one was behind
by up to 0.2 for 12 s."""
BUSY, PATIENCE = 0.1, 2
"""If its peers lack a processor for BUSY of the time, a rank must be late for PATIENCE times RECENT parts, and FEW differences must
be known: what other users of a host take from one rank comes and goes."""
RATIO = 1.25
"""A slow rank needs this many times as long as the median of its peers."""
SIGMAS = 4.0
"""And the mean of its excess over RECENT parts must be this many times the run's own noise, the spread of the excess of a single
part: 8 times the spread of such a mean, if parts are independent."""
FEW = 12
"""Differences of parts that the noise takes. With fewer, down to the two between three judged parts, both limits rise in
proportion: a rank that costs 0.9 of the time is named after 9 s, one that costs 0.6 after 12 s, before the run has a history."""
SURE, MANY = 0.6, 4
"""A rank that costs this much in all of RECENT parts but one, the newest ones, is named whatever the noise before: on a crowded
host that is above 0.25, and four times that cannot be reached. Only where a part has MANY steps: of fewer, long documents last."""
LEFT_OUT = 1.5
"""Spread of normal noise over that without the largest of 3 values; 1.3 of 7."""
COMMON = {
    "lost": (
        f"{LEAST_LOST:g} of the time; {FEW} times that over n, if n < {FEW} differences of parts are known",
        "three times what a change of the host's load costs for 12 s (docs/explanation/doctor.md)",
    ),
    "crowded": (
        f"and {CROWDED:g} of the time that its peers have no processor; if that is {BUSY:g} or more, for {PATIENCE} times as long, "
        f"and not before {FEW} differences are known",
        "two healthy ranks on a crowded host: up to 0.35; benchmarks/doctor.py --held-back: 1 of 72 healthy runs without it",
    ),
    "times": (
        f"{RATIO:g} times the median of its peers",
        "below it a rank of uneven work; a fault that is worth a change is slower",
    ),
    "noise": (
        f"{SIGMAS:g} times the run's own spread of one part, or {SURE:g} of the time in {RECENT - 1} parts of {MANY} steps",
        "8 standard deviations of a mean of 4; a healthy rank of a crowded host has lost 0.7 in one part, not in three",
    ),
}
"""Limits of slow_compute and slow_data -> (value, source)."""
_HELD = (
    f", or its process was held from outside, or held back by a CPU quota, Python's collector or hooks, for {LEAST_LOST:.0%} of "
    "the time"
)
_SLOW = f"it costs {LEAST_LOST:.0%} of the time, is {RATIO:g} times the median of its peers, steady, and above the run's own noise"
OF_RANKS = ("slow_compute", "slow_data")
SYMPTOMS = {
    "slow_compute": ("a rank computes longer than the ranks with equal work, which wait for it", _SLOW + _HELD),
    "slow_data": ("a rank waits for data longer than the others, which wait for it", _SLOW),
    "loss": (
        "the loss jumps, rises, or is not finite",
        "a step is far above the median of the steps before, or 20 steps stay above the lowest median, or a check reports it",
    ),
}
"""Symptoms with several causes: question, and when the answer is yes."""
STEADY = 0.5
"""In each of the parts but one, the excess must be at least this share of the least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cause of a symptom. `explains`: the share of the lost time that it explains, 0 to 1; `against`: the evidence against it."""

    finding: Finding
    explains: float
    against: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that its peers wait for. `lost`: share of the time; `times`: how many times as long as the median of its peers it
    takes, NaN if that is not known; `noise`: the spread in this run. `row`: its row in the series; `peers`: theirs.
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
        return median_of(known[~np.isnan(known)])

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
        slow = self.times >= RATIO
        figures = {"lost": self.lost, "explains": explains} | ({"times": self.times} if slow else {})
        what = (
            f"{does} {self.times:.1f} times as long as the others, which costs"
            if slow
            else "is kept from computing for"
        )
        finding = Finding(
            rule=rule,
            rank=self.rank,
            severity=severity,
            what=f"rank {self.rank} on {who['host']} {what} {self.lost:.0%} of the time: {cause}",
            figures=figures,
            remedy=remedy,
            symptom=self.symptom,
            cause=cause,
            culprit=who,
            evidence=[
                figure(f"share of time that rank {self.rank} costs the others", self.lost, _FROM[self.symptom]),
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
    found = list(_compared(window, symptom))
    yield from found
    if symptom == "slow_compute":
        known = {slow.rank for slow in found}
        yield from (slow for slow in _kept(window) if slow.rank not in known)


def _kept(window: Window) -> Iterator[Slow]:
    """Ranks that are named without any noise: those that were held from outside for LEAST_LOST of the time, and those that a CPU
    quota, the garbage collector or the job's hooks kept back for that long while they computed longer than their peers."""
    ranks, held = window.keys("rank"), np.nan_to_num(window.held)
    kept = [found for column, parts in _KEPT.items() if (found := _share_of(window, column, parts)) is not None]
    if not kept and held.max(initial=0.0) < LEAST_LOST:
        return
    for rows in _stages(window):
        own = np.nan_to_num(newest(window.share("compute")[rows]))
        for i, row in enumerate(rows):
            peers = np.delete(np.arange(len(rows)), i)
            usual = median_of(own[peers]) if len(peers) else 0.0
            more = own[i] - usual if len(peers) and not window.long_steps else 0.0
            capped = max((one[row] - median_of(one[rows][peers]) for one in kept if len(peers)), default=0.0)
            lost = max(float(held[row]), min(float(capped), float(more)))
            if lost >= LEAST_LOST:
                times = float(own[i] / max(usual, 0.05)) if own[i] > 0 else float("nan")
                yield Slow("slow_compute", ranks[row], row, tuple(rows[j] for j in peers), lost, times, 0.0)


_KEPT = {"throttled_seconds": 1, "gc_seconds": RECENT - 1, "hooks_seconds": RECENT - 1}
"""Column -> in how many of the newest parts there must be some of it: one long collection is no symptom, one quota is."""


def _share_of(window: Window, column: str, parts: int) -> Array | None:
    """[R] the share of time in it, 0 where it is in fewer parts; None if no rank has LEAST_LOST."""
    values = window.series("rank", column)[:, -RECENT:]
    known = np.nan_to_num(newest(values))
    if known.max(initial=0.0) < LEAST_LOST:
        return None
    return np.where((values >= STEADY * LEAST_LOST).sum(axis=1) >= parts, known, 0.0)


def _stages(window: Window) -> list[list[int]]:
    """The rows of the ranks of each pipeline stage, which do equal work."""
    ranks = window.keys("rank")
    stages: dict[int, list[int]] = {}
    for row, rank in enumerate(ranks):
        stages.setdefault(window.stage(rank, len(ranks)), []).append(row)
    return list(stages.values())


def _compared(window: Window, symptom: str) -> Iterator[Slow]:
    share = window.share("compute" if symptom == "slow_compute" else "data")
    ranks = window.keys("rank")
    if share.shape[1] < RECENT or window.long_steps or (symptom == "slow_compute" and window.single_step):
        return
    delays = window.series("rank", "run_delay_seconds") - np.nan_to_num(window.series("rank", "throttled_seconds"))
    delays = np.clip(delays, 0.0, None)
    for rows in _stages(window):
        if len(rows) < 2:
            continue
        delay = np.nan_to_num(newest(delays[rows]))
        for i, found in _excess(share[rows], CROWDED * delay, MANY * window.step_s <= window.part_s).items():
            yield Slow(symptom, ranks[rows[i]], rows[i], tuple(r for r in rows if r != rows[i]), *found)


def _excess(own: Array, crowded: Array, many: bool) -> dict[int, tuple[float, float, float]]:
    """[R, N] shares of time -> those ranks that take clearly longer than their peers: lost, times, noise. `crowded`: [R], by what
    the limit of a rank rises if its peers have it. `many`: whether a part has MANY steps."""
    middle = _lower_median(own)
    apart = own - middle
    noise, others = _noise(own), float(newest(middle[None])[0])
    known = int((~np.isnan(np.diff(apart, axis=1))).sum(axis=1).min())
    few = max(FEW / known, 1.0) if known >= RECENT - 2 else float("inf")
    late, takes = newest(apart), newest(own)
    found = {}
    for i in range(len(own)):
        lost = float(late[i])
        if not lost >= few * LEAST_LOST:  # NaN is not, either
            continue
        crowd = median_of(np.delete(crowded, i))
        busy = crowd >= CROWDED * BUSY
        if busy and few > 1:
            continue
        parts = RECENT * (PATIENCE if busy else 1)
        last = apart[i, -parts:]
        sure = many and (apart[i, 1 - RECENT :] >= SURE).all()
        enough = max(few * LEAST_LOST + crowd, min(few * SIGMAS * noise, SURE if sure else np.inf))
        steady = len(last) == parts and (last >= STEADY * enough).sum() >= parts * (RECENT - 1) / RECENT
        times = float(takes[i]) / max(others, 0.05)
        if steady and min(lost, float(np.nanmean(last))) >= enough and times >= RATIO:
            found[i] = lost, times, noise
    return found


def _noise(own: Array) -> float:
    """[R, N] shares -> the spread of a rank's excess over its peers from one part to the next.
    From differences of neighbours, so that a fault that lasts does not count as noise. The larger of a robust one and the root mean
    square before the newest parts: uneven batches have rare large differences, which a robust spread leaves out. Of fewer than FEW
    the root mean square alone, with the newest parts, without the largest difference of each rank, where a fault may begin."""
    usual = own[:1] if len(own) == 2 else median(own.T)[None]
    apart = (own[1:] if len(own) == 2 else own) - usual
    steps = np.diff(apart, axis=1)
    few = (~np.isnan(steps)).sum(axis=1).min(initial=FEW) < FEW
    past = steps[:, :-RECENT]
    if few:
        past = steps.copy()
        past[np.arange(len(past)), np.nan_to_num(np.abs(past)).argmax(axis=1)] = np.nan
    square = [float(np.nanmean(row**2)) if (~np.isnan(row)).any() else 0.0 for row in past]
    square_root = float(np.sqrt(median_of(np.array(square)) / 2))
    return LEFT_OUT * square_root if few else max(median_of(deviation(steps)) / 2**0.5, square_root)


def _lower_median(values: Array) -> Array:
    """[R, N] -> [N]: of an even number the lower one, so that of two ranks the slower one stands out."""
    known = np.sort(np.where(np.isnan(values), np.inf, values), axis=0)
    count = (~np.isnan(values)).sum(axis=0)
    middle = known[np.maximum((count - 1) // 2, 0), np.arange(values.shape[1])]
    return np.where(count > 1, middle, np.nan)


def measured(
    window: Window,
    rule: str,
    column: str,
    cause: str,
    evidence: tuple[str, str],
    remedy: str,
    against: str,
    each: float = 1.0,
) -> Iterator[Candidate]:
    """A cause of slow_compute whose time is recorded: the rank's `column` less its peers', a unit being `each` seconds, as a share
    of the lost time. `cause` and `against` are formatted with {more}; `evidence`: the figure's name and source."""
    values = window.recent("rank", column)
    for slow in slow_ranks(window, "slow_compute"):
        more = max(slow.excess(values), 0.0)
        yield slow.because(
            window,
            rule,
            cause=cause.format(more=more if each != 1.0 else min(more, 1.0)),  # a group's time is a sum over processors
            explains=each * more / slow.lost,
            evidence=[figure(evidence[0], float(values[slow.row]), evidence[1])],
            remedy=remedy,
            against=against.format(more=more),
        )


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
