"""What the rules see of a run: series of its ranks, nodes and GPUs, its newest steps and events, and its job.

Runs anywhere: plain python and numpy. The same in the run's monitor and in `raydist doctor`, which replays a run's folder.

    telemetry rows -> bins of 3 s, the last 3 minutes -> parts of 3 s, or of more than one step where steps are longer
                                                         | earlier parts: the run's own history | the newest RECENT |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydist.diagnosis._history import Lows
from raydist.diagnosis._loads import Loads
from raydist.records import Event, Finding
from raydist.run.log import FIELDS, SINGLE
from raydist.run.telemetry_schema import COLUMNS, OPS, PHASES, is_total
from raydist.spec.script import SESSION, in_its_place

BIN_S = 3.0
BINS = 60
RECENT = 4
"""Parts that a rule judges; the parts before are the run's own history."""
PER_PART = 1.25
"""Steps in a part, at least: a part without a whole step would show in which phase a reading was taken."""
STEPS = 4096
"""Newest steps that are kept."""
SMOOTH = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

Array = NDArray[np.float64]
Row = Mapping[str, Any]
Key = Any  # a rank; a node's address; (node, GPU)


class Store:
    """The newest BINS bins of all rows of one kind. A row costs a few microseconds; a bin keeps its latest row.

    Text columns count as 1 where they are not empty; `texts` has the newest text.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.totals = frozenset(filter(is_total, columns))
        self._texts = tuple(name for name in columns if str(COLUMNS[name][0]) == "string")
        self._numbers = tuple(name for name in columns if name not in self._texts)
        self.order = [*self._numbers, *self._texts]
        self.columns = {name: i for i, name in enumerate(self.order)}
        self.keys: dict[Key, int] = {}
        self.values = np.full((4, BINS, len(self.order)), np.nan)
        self.bins = np.full((4, BINS), -1)
        self.texts: dict[Key, dict[str, str]] = {}
        self.who: dict[Key, Row] = {}

    def add(self, key: Key, row: Row) -> int:
        """Returns the row's bin."""
        place = self.keys.get(key)
        if place is None:
            place = self.keys[key] = len(self.keys)
            self.texts[key] = {}
            if place == len(self.values):
                self.values = np.concatenate([self.values, np.full_like(self.values, np.nan)])
                self.bins = np.concatenate([self.bins, np.full_like(self.bins, -1)])
        number = int(row["at"] // BIN_S)
        slot = number % BINS
        get = row.get
        made = [np.nan if (value := get(name)) is None else value for name in self._numbers]
        texts = self.texts[key]
        for name in self._texts:
            value = get(name)
            made.append(np.nan if value is None else 1.0 if value else 0.0)
            if value:
                texts[name] = value
        self.values[place, slot] = made
        self.bins[place, slot] = number
        self.who[key] = row
        return number

    def places(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[S, len(ends)] the slot of the newest row up to each bin of `ends`, and whether there was one within BINS of the last."""
        count = len(self.keys)
        first = int(ends[-1]) - BINS + 1
        numbers = np.arange(first, int(ends[-1]) + 1)
        there = self.bins[:count, numbers % BINS] == numbers
        newest = np.maximum.accumulate(np.where(there, np.arange(BINS), -1), axis=1)[
            :, np.clip(ends - first, 0, BINS - 1)
        ]
        return (np.maximum(newest, 0) + first) % BINS, newest >= 0

    def cut(self, name: str, places: tuple[NDArray[np.int64], NDArray[np.bool_]]) -> Array:
        """[S, N] a column at these places, NaN where there is no row."""
        slots, known = places
        found = self.values[np.arange(len(slots))[:, None], slots, self.columns[name]]
        return np.asarray(np.where(known, found, np.nan))


class Steps:
    """The newest STEPS rows of the steps' table, one per step, as arrays by column; those that a restart voided are left out.

    `cache`: what rules derive from them; emptied by each new step. `first_loss`: the first one that was known, NaN before;
    `new`: how many rules have not seen yet. `loads`: the tokens of experts."""

    def __init__(self) -> None:
        self.first_loss, self.new = float("nan"), 0
        self.loads = Loads()
        self._columns = {name: i for i, name in enumerate(SINGLE) if str(FIELDS[name][0]) != "string"}
        self._values = np.full((2 * STEPS, len(SINGLE)), np.nan)
        self._hashes = np.full(2 * STEPS, b"", dtype="S16")  # xxh64, in hex
        self._count = 0
        self.cache: dict[str, Any] = {}

    def add(self, row: Row) -> None:
        """In the order of writing."""
        while self._count and self._values[self._count - 1, self._columns["step"]] >= row["step"]:
            self._count -= 1
        if self._count == 2 * STEPS:
            self._count = STEPS
            self._values[:STEPS], self._hashes[:STEPS] = self._values[STEPS:], self._hashes[STEPS:]
        for name, i in self._columns.items():
            self._values[self._count, i] = np.nan if (value := row.get(name)) is None else value
        self._hashes[self._count] = (row.get("samples_hash") or "").encode("ascii", "replace")
        if np.isnan(self.first_loss) and row.get("loss") is not None:
            self.first_loss = row["loss"]
        self._count += 1
        self.loads.step(row)
        self.new += 1
        self.cache.clear()

    def __len__(self) -> int:
        return min(self._count, STEPS)

    def __getitem__(self, column: str) -> Array:
        """[N], oldest first; NaN where unknown."""
        return self._values[max(self._count - STEPS, 0) : self._count, self._columns[column]]

    def row(self, index: int) -> Row:
        """Its step, loss and samples_hash; -1: the newest."""
        at = self._count + index if index < 0 else max(self._count - STEPS, 0) + index
        step, loss = self._values[at, [self._columns["step"], self._columns["loss"]]].tolist()
        return {"step": int(step), "loss": loss, "samples_hash": self._hashes[at].decode()}


class Window:
    """See the module. `spec`: the job as plain data, {} if it is not known. `lows`: the long history of memory, at the scales that
    have enough new bins (raydist.diagnosis._history). `events`: of the run so far, without findings; `fresh`: those since the last
    window. `reported`: the findings that are not over, by key.
    """

    def __init__(
        self,
        end: int = 0,
        *,
        stores: Mapping[str, Store] | None = None,
        steps: Steps | None = None,
        events: Sequence[Event] = (),
        fresh: Sequence[Event] = (),
        lows: Sequence[Lows] = (),
        spec: Mapping[str, Any] | None = None,
        warm_at: float = 0.0,
        reported: Mapping[Key, Finding] | None = None,
    ) -> None:
        self._end, self._warm_at = end, warm_at
        self._stores = stores or {}
        self.steps, self.events, self.fresh, self.lows = Steps() if steps is None else steps, events, fresh, lows
        self.spec, self.reported = spec or {}, reported or {}
        self._cuts: dict[tuple[str, str], Array] = {}
        self._places: dict[str, Any] = {}
        self._series: dict[tuple[str, str], Array] = {}
        self._recent: dict[tuple[str, str], Array] = {}
        self._shares: dict[str, Array] = {}
        self.cache: dict[str, Any] = {}

    # --- whom it has

    def keys(self, kind: str) -> list[Key]:
        """The ranks, nodes or GPUs, in the order of the series' rows."""
        store = self._stores.get(kind)
        return list(store.keys) if store else []

    def who(self, kind: str, key: Key) -> Row:
        """The newest row of a rank, node or GPU."""
        return self._stores[kind].who[key]

    def text(self, kind: str, key: Key, column: str) -> str:
        """The newest text of a column, "" if there was none."""
        return self._stores[kind].texts[key].get(column, "")

    def culprit(self, rank: int | None) -> dict[str, Any]:
        """Rank, and its host, node and GPU, as far as they are known; {} for None."""
        row = {"rank": rank, **(self._stores["rank"].who.get(rank, {}) if "rank" in self._stores else {})}
        return {name: row[name] for name in ("rank", "host", "node", "gpu") if row.get(name) is not None}

    def setting(self, name: str, default: Any = None) -> Any:
        """A field of the job by its dotted name."""
        found: Any = self.spec
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def of_script(self) -> bool:
        """Whether it is a script's own loop (raydist/own)."""
        return bool(self.setting("model.name") == SESSION)

    def named(self, field: str) -> str:
        """How remedies and culprits name a setting: a job's field, or what the user's own loop has in its place."""
        return in_its_place(field) if self.of_script else field

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.kind, []).append(event)
        return found

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds, those of each kind in order."""
        return [event for kind in kinds for event in self._by_kind.get(kind, [])]

    # --- series

    @cached_property
    def now(self) -> float:
        """Unix time of its end."""
        return (self._end + 1) * BIN_S

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, the median of the newest 20; 0 if unknown."""
        seconds = self.steps["seconds"][-20:]
        return float(np.median(seconds)) if len(seconds) else 0.0

    @cached_property
    def part_s(self) -> float:
        """Seconds of a part."""
        return BIN_S * self._bins_per_part

    @cached_property
    def _bins_per_part(self) -> int:
        most = BINS // (2 * RECENT)
        return int(np.clip(np.ceil(PER_PART * self.step_s / BIN_S), 1, most))

    @cached_property
    def long_steps(self) -> bool:
        """Whether steps are too long for parts of a whole step: then shares of time say little."""
        return PER_PART * self.step_s > self.part_s

    @cached_property
    def single_step(self) -> bool:
        """Whether one step took most of the newest RECENT parts: what holds in them may hold for its batch alone."""
        seconds = self.steps["seconds"][::-1]
        judged = RECENT * self.part_s
        newest = seconds[: int(np.searchsorted(np.cumsum(seconds), judged)) + 1]
        return len(newest) > 0 and float(newest.max()) > judged / 2

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        count = (BINS - 1) // self._bins_per_part
        return self._end - self._bins_per_part * np.arange(count, -1, -1)

    def _cut(self, kind: str, column: str) -> Array:
        found = self._cuts.get((kind, column))
        if found is None:
            store = self._stores[kind]
            if column not in store.columns:
                found = np.full((len(store.keys), len(self._ends)), np.nan)
            else:
                if kind not in self._places:
                    self._places[kind] = store.places(self._ends)
                found = store.cut(column, self._places[kind])
            self._cuts[kind, column] = found
        return found

    def series(self, kind: str, column: str) -> Array:
        """[S, N] by part, oldest first: a total's increase per second, else the latest value; NaN: no reading, or too early.

        The newest RECENT parts are those that a rule judges.
        """
        if (kind, column) not in self._series:
            self._series[kind, column] = self._of(kind, column)
        return self._series[kind, column]

    def _of(self, kind: str, column: str) -> Array:
        if kind not in self._stores:
            return np.empty((0, RECENT))
        at = self._cut(kind, "at")
        passed = np.diff(at)
        with np.errstate(divide="ignore", invalid="ignore"):
            early = at[:, :-1] < self._warm_at
            if column in self._stores[kind].totals:
                found = np.diff(self._cut(kind, column)) / passed
                found[found < 0] = np.nan  # its counter has restarted
            else:
                found = self._cut(kind, column)[:, 1:].copy()
            found[~(passed > 0) | early] = np.nan
        return found

    def recent(self, kind: str, column: str) -> Array:
        """[S] the mean of the newest RECENT parts; NaN where more than one is missing."""
        if (kind, column) not in self._recent:
            self._recent[kind, column] = newest(self.series(kind, column))
        return self._recent[kind, column]

    def before(self, kind: str, column: str) -> Array:
        """[S] the median of the parts before; NaN if there are fewer than RECENT."""
        return median(self.series(kind, column)[:, :-RECENT], RECENT)

    def gained(self, kind: str, column: str) -> Array:
        """[S] a total's increase per second over the newest RECENT bins, whatever the length of steps, and also while ranks warm
        up: for what needs no comparison. NaN if it is not known."""
        store = self._stores.get(kind)
        if store is None or column not in store.columns:
            return np.full(len(self.keys(kind)), np.nan)
        values = store.cut(column, store.places(np.arange(self._end - RECENT, self._end + 1)))
        first = values[np.arange(len(values)), np.argmax(~np.isnan(values), axis=1)]
        return np.asarray(np.maximum(values[:, -1] - first, 0.0) / (RECENT * BIN_S))

    def of_nodes(self, values: Array) -> Array:
        """[R] what a series [nodes] has for each rank; NaN where its node has no row."""
        rows = {node: row for row, node in enumerate(self.keys("node"))}
        places = [rows.get(self.who("rank", rank).get("node")) for rank in self.keys("rank")]
        return np.array([np.nan if row is None else values[row] for row in places])

    @cached_property
    def held(self) -> Array:
        """[R] share of the newest RECENT bins for which each rank's process was held from outside, less the steal of its node; NaN
        if it is not known."""
        taken = self.of_nodes(self.gained("node", "steal_seconds") / np.maximum(self.recent("node", "cpu_count"), 1.0))
        return np.asarray(np.maximum(self.gained("rank", "held_seconds") - np.nan_to_num(taken), 0.0))

    @cached_property
    def _exposed(self) -> Array:
        found = self._sum(f"{op}_exposed_seconds" for op in OPS)
        return np.minimum(found, self._sum(f"{phase}_seconds" for phase in ("forward", "backward", "update")))

    def _sum(self, columns: Iterable[str]) -> Array:
        return np.asarray(np.nansum([self.series("rank", column) for column in columns], axis=0))

    def share(self, name: str) -> Array:
        """[R, N] share of a rank's time by part: compute (without exposed communication), exposed, data, eval, save. NaN while the
        rank does not train.
        """
        if name not in self._shares:
            self._shares[name] = self._share(name)
        return self._shares[name]

    def _share(self, name: str) -> Array:
        known = ~np.isnan(self.series("rank", "forward_seconds"))
        if name == "exposed":
            found = self._exposed
        elif name == "compute":
            found = self._sum(f"{phase}_seconds" for phase in ("forward", "backward", "update")) - self._exposed
        else:
            found = self._sum([f"{name}_seconds"])
        trains = self._sum(f"{phase}_seconds" for phase in PHASES) > 0.5
        return np.where(known & trains, found, np.nan)

    def stage(self, rank: int, ranks: int) -> int:
        """The rank's stage in a pipeline: only ranks of one stage do equal work."""
        stages = int(self.setting("parallel.pipeline", 1) or 1)
        return rank * stages // max(ranks, 1)


def newest(values: Array) -> Array:
    """[S, N] -> [S]: the mean of the newest RECENT parts; NaN where more than one is missing."""
    last = values[:, -RECENT:]
    known = ~np.isnan(last)
    count = known.sum(axis=1)
    total = np.where(known, last, 0.0).sum(axis=1)
    return np.where(count >= RECENT - 1, total / np.maximum(count, 1), np.nan)


def median(values: Array, least: int = 1) -> Array:
    """[S, N] -> [S]: the median of each row without NaN; NaN where fewer than `least` are known."""
    if not values.size:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # NaN last
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum(count - 1, 0) // 2]
    high = ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count >= max(least, 1), (low + high) / 2, np.nan)


def median_of(values: Array) -> float:
    """[N] -> their median, NaN if there are none; a fifth of the time of np.median for a few."""
    ordered = np.sort(values)
    count = len(ordered)
    return float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2 if count else float("nan")


def deviation(values: Array) -> Array:
    """[S, N] -> [S]: the robust standard deviation of each row, SMOOTH times the median absolute deviation; 0 if unknown."""
    return np.nan_to_num(SMOOTH * median(np.abs(values - median(values)[:, None])))
