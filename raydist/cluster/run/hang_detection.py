"""Which rank holds up the others, from what their agents saw of all of them.

Runs anywhere. Pure; tested as a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.ipc.heartbeat import UNLIMITED

_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended, and nobody has buried it",
    "D": "its process waits in the kernel, for a disk or a network file system",
}


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, as its agent saw it.

    `state`: the letter of /proc/PID/stat; `step`, `phase`, `seconds`: its probe; `where`: the innermost line of its main thread
    that is not raydist's or torch's, or ""; `answers`: whether its Python still runs other threads; `collectives`: what it
    has started, in order, [group, number, operation and sizes], newest last.
    """

    state: str
    step: int
    phase: str
    seconds: float
    where: str = ""
    answers: bool = True
    collectives: Sequence[Sequence[Any]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rank` holds up the others, because of `why`; None: nobody does, they wait for data or storage."""

    rank: int | None
    why: str


def judge(sights: Mapping[int, RankView]) -> Verdict:
    """Who is to blame when a rank is late. `sights` has every rank whose agent answered; at least one.

    In this order: a process that cannot run; one that is behind in steps, unless it waits for data; one that does not let its
    threads run; one that started fewer collectives, or another one than most; one that is not where the others wait; the one
    that is earliest in the step.
    """
    for rank, sight in sorted(sights.items()):
        if sight.state in "TtZ":
            return Verdict(rank, f"{_STATES[sight.state]}; {_doing(sight)}")
    newest = max(s.step for s in sights.values())
    behind = {r: s for r, s in sights.items() if s.step < newest or s.phase in UNLIMITED}
    if behind:
        rank = min(behind, key=lambda r: (behind[r].step, r))
        if behind[rank].phase in UNLIMITED:
            return Verdict(None, f"rank {rank} has been in phase {behind[rank].phase} for {behind[rank].seconds:.0f} s")
        return Verdict(rank, f"it is behind the others, who are in step {newest}; {_doing(behind[rank])}")
    silent = [r for r, s in sorted(sights.items()) if not s.answers]
    if silent and len(silent) < len(sights):
        return Verdict(
            silent[0], f"its Python runs no other thread: something holds the GIL; {_doing(sights[silent[0]])}"
        )
    odd = _odd_one(sights)
    if odd is not None:
        return odd
    usual, n = Counter(s.phase for s in sights.values()).most_common(1)[0]
    apart = [r for r, s in sorted(sights.items()) if s.phase != usual]
    if n > len(sights) / 2 and apart:
        return Verdict(apart[0], f"the others are in {usual}; {_doing(sights[apart[0]])}")
    # Two ranks, or no majority: who is earlier in the step holds the others up.
    first = min(sights, key=lambda r: (_PHASE_ORDER.get(sights[r].phase, 0), -sights[r].seconds, r))
    kernel = f"{_STATES['D']}; " if sights[first].state == "D" else ""
    return Verdict(first, kernel + _doing(sights[first]))


_PHASE_ORDER = {"forward": 1, "backward": 2, "update": 3, "eval": 4}


def _doing(sight: RankView) -> str:
    where = f", at {sight.where}" if sight.where else ""
    return f"in step {sight.step} for {sight.seconds:.0f} s in {sight.phase}{where}"


def _odd_one(sights: Mapping[int, RankView]) -> Verdict | None:
    """Who has started fewer collectives in a group than the others, or another one under the same number."""
    groups: dict[str, dict[int, dict[int, str]]] = {}
    for rank, sight in sights.items():
        for group, number, what in sight.collectives:
            groups.setdefault(str(group), {}).setdefault(rank, {})[int(number)] = str(what)
    for group, ranks in sorted(groups.items()):
        if len(ranks) < 2:
            continue
        for number in sorted(set.intersection(*(set(numbers) for numbers in ranks.values()))):
            said = {rank: numbers[number] for rank, numbers in ranks.items()}
            usual, n = Counter(said.values()).most_common(1)[0]
            odd = [rank for rank, what in sorted(said.items()) if what != usual]
            if odd and 2 * n > len(said):
                return Verdict(
                    odd[0],
                    f"its collective {number} of group {group} is {said[odd[0]]}, the others' {usual}; {_doing(sights[odd[0]])}",
                )
        last = {rank: max(numbers) for rank, numbers in ranks.items()}
        least = min(last.values())
        few = [rank for rank, number in sorted(last.items()) if number == least]
        if least < max(last.values()) and 2 * len(few) <= len(last):
            ahead = next(n[max(n)] for r, n in ranks.items() if last[r] == max(last.values()))
            why = f"it has started {least} collectives of group {group}, others {max(last.values())}, the last {ahead}"
            return Verdict(few[0], f"{why}; {_doing(sights[few[0]])}")
    return None
