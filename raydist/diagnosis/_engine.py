"""Applies all rules to a run as it goes, lets the causes of one symptom compete, and tells each finding when it changes.

Runs anywhere: plain python and numpy. Pure: its time is that of the rows and events.

    rows, steps, events -> Window -> rules -> findings                                     reported once, again when they change,
                                          -> candidates, by symptom and rank -> the best   and once more when they are over
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any

from raydist import registry
from raydist.diagnosis import _sizes
from raydist.diagnosis._gpu import GpuErrors
from raydist.diagnosis._history import BIN_S as LOW_BIN_S
from raydist.diagnosis._history import WARMUP_S, History
from raydist.diagnosis._symptoms import OF_RANKS, Candidate, slow_ranks
from raydist.diagnosis._window import BIN_S, BINS, Row, Steps, Store, Window
from raydist.records import Event, Finding
from raydist.run.telemetry_schema import GPU, NODE, OPS, PHASES, RANK

HOLD_S = 15.0
"""A finding is over when it has not been found again for this long."""
SETTLE_S = 3.0
"""After the first step of an attempt its ranks still fill caches: readings of this time are not judged."""
AGAIN_S = 60.0
"""Least time between two changes of a finding that are reported."""
EVENTS = 1000
SEVERITIES = ("info", "warning", "critical")
_SHARES = tuple(f"{phase}_seconds" for phase in PHASES) + tuple(f"{op}_exposed_seconds" for op in OPS)


@dataclass(frozen=True, slots=True)
class DiagnosticRule:
    """A rule's file: see raydist.diagnosis."""

    name: str
    symptom: str
    cause: str
    looks: str
    thresholds: Mapping[str, tuple[str, str]]
    columns: tuple[str, ...]
    long: tuple[str, ...]
    once: bool
    check: Any


def rules() -> list[DiagnosticRule]:
    """All rules, by name."""
    found = []
    for name in registry.names("diagnosis"):
        module = import_module(f"raydist.diagnosis.{name}")
        found.append(
            DiagnosticRule(
                name=name,
                symptom=getattr(module, "SYMPTOM", name),
                cause=module.CAUSE,
                looks=module.LOOKS,
                thresholds=getattr(module, "THRESHOLDS", {}),
                columns=tuple(getattr(module, "COLUMNS", ())),
                long=tuple(getattr(module, "LONG", ())),
                once=getattr(module, "ONCE", False),
                check=registry.load("diagnosis", name),
            )
        )
    return found


@dataclass(slots=True)
class _Reported:
    """A reported finding: its newest form, and when it was reported and last found. `next_rule`: another cause, found once."""

    finding: Finding
    reported_at: float
    seen_at: float
    once: bool
    next_rule: str = ""


class Diagnosis:
    """`observe` takes the newest rows, steps and events; not thread-safe. `bin_s` and `warmup_s`: of the long history (History).

    `spec`: the job as plain data. `steps` and `events` may be left out: an aggregator has only rows.
    """

    def __init__(
        self, bin_s: float = LOW_BIN_S, warmup_s: float = WARMUP_S, spec: Mapping[str, Any] | None = None
    ) -> None:
        self.rules = rules()
        self._once = {rule.name: rule.once for rule in self.rules}
        self._causes = {rule.name: rule.cause for rule in self.rules}
        asked = set(chain.from_iterable(rule.columns for rule in self.rules))
        self._stores = {
            "rank": Store(["at", "step", *_SHARES, *sorted((asked & set(RANK)) - set(_SHARES))]),
            "node": Store(["at", *sorted(asked & set(NODE))]),
            "gpu": Store(["at", *sorted(asked & set(GPU))]),
        }
        self._history = History(list(chain.from_iterable(r.long for r in self.rules)), bin_s, warmup_s)
        self._gpus = GpuErrors()
        self._spec = dict(spec or {})
        self._steps, self._events = Steps(), list[Event]()
        self._fresh: list[Event] = []
        self._attempt, self._first_step, self._warm_at = -1, 0, float("inf")
        self._newest = self._checked = -1
        self._reported: dict[Any, _Reported] = {}
        self.problems: dict[str, str] = {}
        """Rules that failed, with the error: they are not called again."""

    def observe(
        self, rows: Iterable[Row], steps: Iterable[Row] = (), events: Iterable[Event] = ()
    ) -> Iterator[Finding]:
        """The findings that are new, have changed, or are over."""
        rows = list(rows)
        yield from self._gpus.observe(rows)
        newest_attempt = max([self._attempt, *(row["attempt"] for row in rows if row["kind"] == "rank")])
        if newest_attempt > self._attempt:
            yield from self._new_attempt(newest_attempt)
            # Its nodes have rows from then on; earlier ones may be of a node that it does not use.
            begun = min(row["at"] for row in rows if row["kind"] == "rank" and row["attempt"] == newest_attempt)
            rows = [row for row in rows if row["kind"] == "rank" or row["at"] >= begun]
        if (
            max((row["at"] // BIN_S for row in rows if row["kind"] == "rank"), default=self._newest)
            < self._newest - BINS
        ):
            self._set_back(max(row["at"] for row in rows))
        for row in rows:
            self._take(row)
        self._history.add(rows)
        for step in steps:
            self._steps.add(step)
        for event in events:
            if event.kind != "finding":
                self._fresh.append(event)
                self._steps.loads.event(event)
                self._keep(event)
        lows = list(self._history.windows())
        telemetry = self._newest >= 0
        if self._newest - 1 > self._checked or lows or self._fresh or not telemetry:
            yield from self._check(lows)

    def _keep(self, event: Event) -> None:
        self._events.append(event)
        del self._events[:-EVENTS]
        if event.kind == _sizes.KIND:  # large
            for old in [one for one in self._events if one.kind == event.kind][: -_sizes.KEPT]:
                self._events = [one for one in self._events if one is not old]

    @property
    def active(self) -> list[Finding]:
        """The findings that are not over."""
        return [reported.finding for reported in self._reported.values()]

    # --- private

    def _new_attempt(self, number: int) -> Iterator[Finding]:
        self._attempt, self._first_step, self._warm_at = number, 0, float("inf")
        # Also those of nodes and GPUs: it may run on others, and one that has left would count as one that is idle.
        self._stores = {kind: Store(store.order) for kind, store in self._stores.items()}
        over, self._reported = self._reported, {}
        for reported in over.values():
            if not reported.once:
                yield replace(reported.finding, state="over")

    def _set_back(self, now: float) -> None:
        """The clock by which rows are timed was set back: what came before is of a time that is yet to come."""
        self._stores = {kind: Store(store.order) for kind, store in self._stores.items()}
        self._newest = self._checked = -1
        self._warm_at = min(self._warm_at, now)
        for reported in self._reported.values():
            reported.reported_at, reported.seen_at = min(reported.reported_at, now), min(reported.seen_at, now)

    def _take(self, row: Row) -> None:
        kind = row["kind"]
        if kind == "rank":
            if row["attempt"] < self._attempt:
                return
            step = row.get("step") or 0
            self._first_step = self._first_step or step
            if self._warm_at == float("inf") and step > self._first_step:
                self._warm_at = row["at"] + SETTLE_S
        key = row["rank"] if kind == "rank" else row["node"] if kind == "node" else (row["node"], row["gpu"])
        number = self._stores[kind].add(key, row)
        if kind == "rank":
            self._newest = max(self._newest, number)

    def _check(self, lows: Sequence[Any]) -> Iterator[Finding]:
        self._checked = max(self._newest - 1, self._checked)
        window = Window(
            self._checked,
            stores=self._stores,
            steps=self._steps,
            events=self._events,
            fresh=self._fresh,
            lows=lows,
            spec=self._spec,
            warm_at=self._warm_at,
            reported={key: one.finding for key, one in self._reported.items()},
        )
        now = max(window.now, self._fresh[-1].at if self._fresh else 0.0)
        found: list[Finding] = []
        rivals: dict[Any, list[Candidate]] = {}
        for rule in self.rules:
            if rule.name in self.problems or (rule.symptom in OF_RANKS and not slow_ranks(window, rule.symptom)):
                continue
            try:
                for one in rule.check(window):
                    if isinstance(one, Candidate):
                        rivals.setdefault(one.finding.key, []).append(one)
                    else:
                        found.append(one if one.symptom else replace(one, symptom=rule.symptom))
            except Exception as error:  # a rule that fails must not end the others
                self.problems[rule.name] = f"{type(error).__name__}: {error}"
        self._fresh, self._steps.new = [], 0
        found += [self._best(those) for those in rivals.values()]
        for finding in found:
            yield from self._tell(finding, now)
        for key, reported in list(self._reported.items()):
            if not reported.once and now - reported.seen_at >= HOLD_S:
                del self._reported[key]
                yield replace(reported.finding, state="over")

    def _best(self, those: list[Candidate]) -> Finding:
        """The candidate that explains most, with the others and the evidence against them."""
        ranked = sorted(those, key=lambda one: -one.explains)
        best, rest = ranked[0], ranked[1:]
        second = rest[0].explains if rest else 0.0
        others = [{"cause": self._causes[one.finding.rule], "against": one.against} for one in rest]
        confidence = best.explains * (1 - second / (2 * best.explains)) if best.explains else 0.0
        return replace(best.finding, others=others, confidence=round(confidence, 2))

    def _tell(self, finding: Finding, now: float) -> Iterator[Finding]:
        reported = self._reported.get(finding.key)
        if reported is None:
            self._reported[finding.key] = _Reported(finding, now, now, self._once[finding.rule])
            yield finding
            return
        reported.seen_at = now
        if reported.once:
            return
        before = reported.finding
        other = finding.rule != before.rule
        steady = finding.rule == reported.next_rule
        reported.next_rule = finding.rule if other else ""
        worse = SEVERITIES.index(finding.severity) > SEVERITIES.index(before.severity)
        a, b = before.lost or 0.0, finding.lost or 0.0
        moved = abs(a - b) > 0.1 and max(a, b) > 2 * min(a, b)
        if (other and steady) or (not other and (worse or moved) and now - reported.reported_at >= AGAIN_S):
            reported.finding, reported.reported_at, reported.next_rule = replace(finding, state="changed"), now, ""
            yield reported.finding
