"""Finds the rank that makes the others wait, from what the agents saw of all ranks. The coordinator calls it.

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
    "Z": "its process is a zombie (exited, not reaped)",
    "D": "its process waits in the kernel (state D), for a disk or a network file system",
}


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, as its agent saw it.

    `state`: the letter in /proc/PID/stat. `step`, `phase`, `seconds`: its heartbeat, with the seconds in that phase. `where`: the
    innermost line of its main thread that is neither raydist's nor torch's, or "". `waits`: whether it waits for a collective or
    a transfer, as far as its stack shows (a wait in torch's C++ looks like a computation). `answers`: whether its Python still runs
    other threads. `collectives`: those that it has started, in order, [group, number, operation and sizes], the newest last.
    """

    state: str
    step: int
    phase: str
    seconds: float
    where: str = ""
    waits: bool = False
    answers: bool = True
    collectives: Sequence[Sequence[Any]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rank` makes the others wait, because of `why`. None: no rank does; they wait for data or storage.

    `sides`: that rank and one that waits for it, as plain data: `rank`, `where`, and of a collective of each `group`, `number` and
    `collective`, None where none is known.
    """

    rank: int | None
    why: str
    sides: Sequence[dict[str, Any]] = ()


def judge(views: Mapping[int, RankView]) -> Verdict:
    """The rank to blame when a rank is late, with one that waits for it. `views`: every rank whose agent answered; at least one."""
    verdict = _blame(views)
    if verdict.rank is None or len(views) < 2:
        return verdict
    sides = _sides(views, verdict.rank)
    waits = sides[1]
    what = (
        f" in collective {waits['number']} of group {waits['group']}, {waits['collective']}" if waits["group"] else ""
    )
    at = f", at {waits['where']}" if waits["where"] else ""
    return Verdict(verdict.rank, f"{verdict.why}; rank {waits['rank']} waits{what}{at}", sides)


def _sides(views: Mapping[int, RankView], rank: int) -> list[dict[str, Any]]:
    """`rank`, and one that waits for it: if possible with the first collective of a group in which `rank` differs or which it has
    not started, and what `rank` has started in its place, else with the newest of each."""
    own = _by_group(views[rank])
    others = sorted((r for r in views if r != rank), key=lambda r: (not views[r].waits, r))
    for other in others:
        for group, theirs in _by_group(views[other]).items():
            mine = own.get(group)
            if mine is None:
                continue
            newest = max(mine)
            apart = [number for number, what in theirs.items() if number > newest or mine.get(number, what) != what]
            if apart:
                number = min(apart)
                differs = [(group, number, mine[number])] if number in mine else views[rank].collectives[-1:]
                return [_side(views, rank, *differs), _side(views, other, (group, number, theirs[number]))]
    return [_side(views, one, *views[one].collectives[-1:]) for one in (rank, others[0])]


def _by_group(view: RankView) -> dict[str, dict[int, str]]:
    groups: dict[str, dict[int, str]] = {}
    for group, number, what in view.collectives:
        groups.setdefault(str(group), {})[int(number)] = str(what)
    return groups


def _side(views: Mapping[int, RankView], rank: int, found: Sequence[Any] = (None, None, None)) -> dict[str, Any]:
    group, number, what = found
    return {"rank": rank, "where": views[rank].where, "group": group, "number": number, "collective": what}


def _blame(views: Mapping[int, RankView]) -> Verdict:
    """In this order: a process that cannot run; a rank that is steps behind, unless it waits for data; one whose Python runs no
    other thread; then, of those that do not wait if there are any, one that has started fewer collectives than the others, or a
    different one; one that is in another phase than most; the one that is earliest in the step.
    """
    for rank, view in sorted(views.items()):
        if view.state in "TtZ":
            return Verdict(rank, f"{_STATES[view.state]}; {_doing(view)}")
    newest = max(s.step for s in views.values())
    behind = {r: s for r, s in views.items() if s.step < newest or s.phase in UNLIMITED}
    if behind:
        rank = min(behind, key=lambda r: (behind[r].step, r))
        if behind[rank].phase in UNLIMITED:
            return Verdict(None, f"rank {rank} has been in phase {behind[rank].phase} for {behind[rank].seconds:.0f} s")
        return Verdict(rank, f"it is behind the other ranks, which are in step {newest}; {_doing(behind[rank])}")
    silent = [r for r, s in sorted(views.items()) if not s.answers]
    if silent and len(silent) < len(views):
        return Verdict(
            silent[0], f"its Python runs no other thread: something holds the GIL; {_doing(views[silent[0]])}"
        )
    # In a pipeline a rank that waits for another stage has started fewer collectives than its replicas, and is not the cause.
    suspects = {r: s for r, s in views.items() if not s.waits} or views
    for among in (views, suspects):
        odd = _odd_one(among)
        if odd is not None and odd.rank in suspects:
            return odd
    views = suspects
    usual, n = Counter(s.phase for s in views.values()).most_common(1)[0]
    apart = [r for r, s in sorted(views.items()) if s.phase != usual]
    if n > len(views) / 2 and apart:
        return Verdict(apart[0], f"the others are in {usual}; {_doing(views[apart[0]])}")
    # Two ranks, or no majority: the one that is earlier in the step makes the others wait.
    first = min(views, key=lambda r: (_PHASE_ORDER.get(views[r].phase, 0), -views[r].seconds, r))
    kernel = f"{_STATES['D']}; " if views[first].state == "D" else ""
    return Verdict(first, kernel + _doing(views[first]))


_PHASE_ORDER = {"forward": 1, "backward": 2, "update": 3, "eval": 4}


def _doing(view: RankView) -> str:
    where = f", at {view.where}" if view.where else ""
    return f"in step {view.step} for {view.seconds:.0f} s in {view.phase}{where}"


def _odd_one(views: Mapping[int, RankView]) -> Verdict | None:
    """A rank that has started fewer collectives of a group than the others, or a different one under the same number."""
    groups: dict[str, dict[int, dict[int, str]]] = {}
    for rank, view in views.items():
        for group, numbers in _by_group(view).items():
            groups.setdefault(group, {})[rank] = numbers
    for group, ranks in sorted(groups.items()):
        if len(ranks) < 2:
            continue
        for number in sorted(set.intersection(*(set(numbers) for numbers in ranks.values()))):
            started = {rank: numbers[number] for rank, numbers in ranks.items()}
            usual, n = Counter(started.values()).most_common(1)[0]
            odd = [rank for rank, what in sorted(started.items()) if what != usual]
            if odd and 2 * n > len(started):
                return Verdict(
                    odd[0],
                    f"its collective {number} of group {group} is {started[odd[0]]}, the others' {usual}; {_doing(views[odd[0]])}",
                )
        last = {rank: max(numbers) for rank, numbers in ranks.items()}
        least = min(last.values())
        few = [rank for rank, number in sorted(last.items()) if number == least]
        if least < max(last.values()) and 2 * len(few) <= len(last):
            ahead = next(n[max(n)] for r, n in ranks.items() if last[r] == max(last.values()))
            why = f"it has started {least} collectives of group {group}, others {max(last.values())}, the last {ahead}"
            return Verdict(few[0], f"{why}; {_doing(views[few[0]])}")
    return None
