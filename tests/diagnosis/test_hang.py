"""Which rank holds up the others: the verdict on the state of all ranks, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raydist.diagnosis._hang import RankView, judge

WAITS = RankView(state="S", step=7, phase="backward", seconds=12.0)
"""A rank that waits for its peers."""


def collectives(*ops: str) -> list[list[object]]:
    """A flight recorder's entries for one group."""
    return [["0", i + 1, op] for i, op in enumerate(ops)]


A, B, C = "all_reduce of [[4]]", "all_reduce of [[8]]", "broadcast of [[4]]"


TWO = replace(WAITS, collectives=collectives(A, B))

TABLE = [
    ([WAITS, replace(WAITS, state="T", phase="forward")], 1, "process is stopped (SIGSTOP); in step 7 for 12 s in forward"),
    ([replace(WAITS, state="t"), WAITS], 0, "stopped by a debugger"),
    ([WAITS, WAITS, replace(WAITS, step=6)], 2, "behind the other ranks, which are in step 7; in step 6 for 12 s in backward"),
    ([WAITS, replace(WAITS, phase="data", seconds=30)], None, "rank 1 has been in phase data for 30 s"),
    ([WAITS, replace(WAITS, step=6, phase="save")], None, "rank 1 has been in phase save"),
    ([WAITS, replace(WAITS, answers=False, where="a.py:3 in spin")], 1, "something holds the GIL; in step 7 for 12 s in"),
    ([WAITS, WAITS, replace(WAITS, phase="forward", where="m.py:9 in f")], 2, "the others are in backward; in step 7 for"),
    ([WAITS, replace(WAITS, phase="forward", where="m.py:9 in f")], 1, "in step 7 for 12 s in forward, at m.py:9 in f"),
    ([replace(WAITS, state="D", phase="forward"), WAITS], 0, "waits in the kernel"),
    ([TWO, TWO, replace(WAITS, collectives=collectives(A))], 2, "has started 1 collectives of group 0, others 2, the last all_red"),
    ([replace(WAITS, waits=True, phase="forward"), WAITS], 1, "in step 7 for 12 s in backward"),
    ([replace(WAITS, waits=True, collectives=collectives(A)), TWO, replace(WAITS, phase="forward"), TWO], 2, "the others are"),
    ([replace(TWO, waits=True)] * 2 + [replace(WAITS, waits=True, collectives=collectives(A))], 2, "has started 1 collectives"),
    ([replace(WAITS, phase="forward"), replace(WAITS, phase="forward", seconds=13, waits=True)], 0, "in step 7 for 12 s in"),
    ([replace(WAITS, waits=True, phase="forward"), replace(WAITS, waits=True)], 0, "in step 7 for 12 s in forward"),
    ([replace(WAITS, collectives=collectives(A, C)), TWO, TWO], 0, "2 of group 0 is broadcast of [[4]], the others' all_red"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sights", "rank", "words"),
    TABLE,
    ids=[
        "stopped",
        "debugger",
        "behind",
        "data",
        "storage",
        "GIL",
        "elsewhere",
        "earlier",
        "kernel",
        "fewer",
        "a stage that waits",
        "fewer, for it waits",
        "fewer, and all wait",
        "waits for weights",
        "all stages wait",
        "another",
    ],
)
def test_the_one_to_blame(sights: list[RankView], rank: int | None, words: str) -> None:
    """Ranks are positions in the list."""
    verdict = judge(dict(enumerate(sights)))
    assert verdict.rank == rank
    assert words in verdict.why


def test_a_thousand_ranks() -> None:
    """One rank that started fewer collectives is found among 1,000, each with a full record."""
    full = replace(WAITS, collectives=collectives(*[A, B] * 250))
    sights = dict.fromkeys(range(1000), full) | {617: replace(WAITS, collectives=collectives(*[A, B] * 249, A))}
    assert judge(sights).rank == 617
