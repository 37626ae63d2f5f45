"""The decision tree in words, from the rules' own texts: what is asked, in which order, and what each answer means.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raydist.diagnosis._engine import DiagnosticRule
from raydist.diagnosis._symptoms import COMMON, SYMPTOMS


def tree(rules: Iterable[DiagnosticRule]) -> str:
    """Symptoms with several causes first, then the rules that are alone."""
    return "\n".join(_lines(list(rules)))


def _lines(rules: list[DiagnosticRule]) -> Iterator[str]:
    for symptom, (question, limits) in SYMPTOMS.items():
        causes = [rule for rule in rules if rule.symptom == symptom]
        yield f"Is this so: {question}? ({symptom})"
        yield f"    it is, if {limits}"
        yield "    Which of its causes explains most of it? The best explanation is reported; the others are listed with the"
        yield "    evidence against them:"
        for rule in causes:
            yield from _rule(rule, "    ")
    yield "And, each alone:"
    for rule in rules:
        if rule.symptom not in SYMPTOMS:
            yield from _rule(rule, "")
    yield "- gpu_errors: the GPU driver reports an XID or an uncorrectable memory error"
    yield "    looks at: gpu_xid, gpu_xid_count and gpu_ecc_errors; each error is reported when it occurs"


def _rule(rule: DiagnosticRule, indent: str) -> Iterator[str]:
    yield f"{indent}- {rule.name}: {rule.cause}"
    yield f"{indent}    looks at: {rule.looks}"
    for name, (value, _) in rule.thresholds.items():
        yield f"{indent}    {name}: {value}"


def thresholds(rules: Iterable[DiagnosticRule]) -> list[tuple[str, str, str, str]]:
    """(rule, limit, value, source) of every threshold, for docs/reference/thresholds.md."""
    common = [("all of slow_compute, slow_data", name, value, source) for name, (value, source) in COMMON.items()]
    own = [(rule.name, name, value, source) for rule in rules for name, (value, source) in rule.thresholds.items()]
    return [*common, *own]
