"""What `raydist doctor` prints: findings with evidence, remedy and the other causes; what was looked at, and what cannot be told.

Runs anywhere. Must not import torch or ray. docs/explanation/doctor.md has the keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from raydist.diagnosis import OF_RANKS, Examination
from raydist.records import Event, Finding
from raydist.report import text
from raydist.run.log import plain

_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def facts(made: Examination) -> dict[str, Any]:
    """`findings` (the fields of a finding, `since` and `until`), `looked` and `blind`: plain data for strict JSON."""
    found = [{**plain_finding(one.finding), "since": one.since, "until": one.until} for one in made.found]
    return {"findings": found, "looked": made.looked, "blind": made.blind}


def plain_finding(finding: Finding) -> dict[str, Any]:
    """Its fields, without those of an event."""
    return {name: value for name, value in plain(finding.to_dict()).items() if name not in ("v", "state")}


def slow_ranks(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Those that the run's monitor has named, in order: rank, rule, what, lost, at, until; None: it lasts."""
    found: list[dict[str, Any]] = []
    lasts: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.kind == "attempt_started":
            for one in lasts.values():
                one["until"] = event.at
            lasts.clear()
        elif event.kind == "finding" and (finding := Finding.from_dict(event.data)).symptom in OF_RANKS:
            if finding.state == "over":
                lasts.pop(finding.key, {})["until"] = event.at
                continue
            values = {name: getattr(finding, name) for name in ("rank", "rule", "what", "lost")}
            if finding.key in lasts:
                lasts[finding.key].update(values)
            else:
                lasts[finding.key] = {**values, "at": event.at, "until": None}
                found.append(lasts[finding.key])
    return found


def show(head: str, shown: Mapping[str, Any], out: Console | None = None) -> None:
    """Prints the facts under a headline."""
    out = out or Console(highlight=False)

    def line(words: str, style: str = "") -> None:
        out.print(Text(words, style=style), soft_wrap=True)

    line(head, "bold")
    findings: Sequence[Mapping[str, Any]] = shown["findings"]
    if not findings:
        line("nothing wrong was found")
    for number, one in enumerate(findings, start=1):
        line("")
        line(f"{number}. {one['severity']}: {one['what']}", _STYLES[one["severity"]])
        if one.get("since") is not None:
            until = one["until"]
            lasted = f", over after {text.span(until - one['since'])}" if until is not None else ""
            line(f"   found at {time.strftime('%H:%M:%S', time.localtime(one['since']))}{lasted}")
        for name, value in (("culprit", _named(one["culprit"])), ("cause", one["cause"])):
            if value:
                line(f"   {name}: {value}")
        for each in one["evidence"]:
            value = each["value"]
            number_ = "-" if value is None else f"{value:,.4g}" if isinstance(value, (int, float)) else str(value)
            line(f"   evidence: {each['figure']}: {number_} ({each['from']})")
        line(f"   do: {one['remedy']}")
        for other in one["others"]:
            if other["against"]:
                line(f"   not that {other['cause']}: {other['against']}", "dim")
        if one["confidence"] is not None:
            line(f"   confidence {one['confidence']:.0%}; rule {one['rule']}", "dim")
    line("")
    line("looked at: " + "; ".join(shown["looked"]), "dim")
    for words in shown["blind"]:
        line(f"cannot tell: {words}", "dim")


def _named(culprit: Mapping[str, Any]) -> str:
    words = []
    for name, value in culprit.items():
        shown = (
            " -> ".join(map(str, value))
            if name == "link"
            else ", ".join(map(str, value))
            if isinstance(value, list)
            else value
        )
        words.append(f"{name} {shown}")
    return ", ".join(words)
