"""Rules that find out what is wrong with a run: which rank, which cause, what to do. One rule per file, found by its name.

Runs anywhere: plain python and numpy, never torch or ray. docs/explanation/doctor.md explains the engine, docs/extending.md how to
add a rule. A rule's file has

    CAUSE: str                                  # what it finds, as the end of a sentence
    LOOKS: str                                  # what it compares, in words: for `raydist doctor --tree`
    def check(window: Window) -> Iterator[Finding | Candidate]

and where it needs them

    THRESHOLDS: dict[str, tuple[str, str]]      # each limit -> (its value, its source): for docs/reference/thresholds.md
    COLUMNS: tuple[str, ...]                    # of raydist.run.telemetry_schema: for window.series
    LONG: tuple[str, ...]                       # columns of ranks whose minima of up to 11 days are in window.lows
    SYMPTOM: str                                # causes of the same symptom compete; default: the rule's name
    ONCE = True                                 # reported once in an attempt, and never over

`check` is called about every 3 seconds. It yields a Finding while what it describes lasts; or, for a symptom that has several
causes, a Candidate with the share of the lost time that its cause explains: the engine tells the best and lists the others. A rule
is pure: it uses the window only. A false finding is worse than a late one.
"""

from __future__ import annotations

from raydist.diagnosis._before import Facts, Former, check_job
from raydist.diagnosis._engine import Diagnosis, DiagnosticRule, rules
from raydist.diagnosis._history import BINS, History, Lows
from raydist.diagnosis._replay import Examination, examine
from raydist.diagnosis._sizes import sizes
from raydist.diagnosis._symptoms import OF_RANKS, Candidate, figure, slow_ranks
from raydist.diagnosis._tree import thresholds
from raydist.diagnosis._tree import tree as words_of_tree
from raydist.diagnosis._window import Window

__all__ = [
    "BINS",
    "OF_RANKS",
    "Candidate",
    "Diagnosis",
    "DiagnosticRule",
    "Examination",
    "Facts",
    "Former",
    "History",
    "Lows",
    "Window",
    "check_job",
    "examine",
    "figure",
    "rules",
    "sizes",
    "slow_ranks",
    "thresholds",
    "words_of_tree",
]
