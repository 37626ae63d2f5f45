"""The telemetry of a run's ranks over its whole length, in bounded memory, for shares, heat maps and tables.

Runs anywhere. Must not import torch or ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raydist.run.telemetry_schema import OPS, PHASES

MEMORY = ("gpu_process_bytes", "reserved_bytes", "rss_bytes")
"""Columns of a rank's memory; the first that the run has is used."""
COMM = ("count", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_PHASES = tuple(f"{phase}_seconds" for phase in PHASES)
_COMM = tuple(f"{op}_{name}" for op in OPS for name in COMM)
_VALUES = ("at", "step", *_PHASES, *MEMORY, *_COMM)
COLUMNS = ("kind", "host", "rank", "attempt", *_VALUES)
"""Columns of raydist.run.telemetry_schema that `gather` reads."""
KEPT = 300_000
"""Approximate maximum number of rows kept."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Track:
    """One rank in one attempt, N readings in order. `at`: Unix time; `step`: the newest step that has begun; `values`: columns of
    raydist.run.telemetry_schema, NaN where a reading has none.
    """

    attempt: int
    rank: int
    host: str
    at: Array
    step: Array
    values: Mapping[str, Array]

    def counter(self, name: str) -> Array:
        """One of compute, exposed, data, eval, save: seconds so far, [N]."""
        exposed = sum((self._known(f"{op}_exposed_seconds") for op in OPS), np.zeros(len(self.at)))
        computing = sum((self._known(f"{phase}_seconds") for phase in ("forward", "backward", "update")), 0 * exposed)
        if name == "exposed":
            return np.minimum(exposed, computing)
        return computing - np.minimum(exposed, computing) if name == "compute" else self._known(f"{name}_seconds")

    def by_step(self, name: str) -> tuple[Array, Array]:
        """(steps, seconds of `counter` at their end), each [M]. Before its first step a rank has spent nothing."""
        last = np.append(self.step[1:] != self.step[:-1], True)  # the latest of several readings in a step
        last &= self.step >= 1  # 0: no step has begun
        return self.step[last], self.counter(name)[last]

    def _known(self, name: str) -> Array:
        return np.nan_to_num(self.values[name])


class Readings:
    """All tracks of a run."""

    def __init__(self, tracks: Iterable[Track]) -> None:
        self.tracks = list(tracks)

    def of(self, attempt: int | None) -> list[Track]:
        """The tracks of an attempt, by rank."""
        return sorted((t for t in self.tracks if t.attempt == attempt), key=lambda track: track.rank)

    def grown(self, attempt: int, begun: int, first: int, last: int) -> dict[str, float] | None:
        """Seconds of compute, exposed, data, eval and save from step `first` to `until`, the last step up to `last` with a reading;
        means over ranks. None if there is no such step. `begun`: the first step of the attempt.
        """
        tracks = [track for track in self.of(attempt) if len(track.by_step("data")[0])]
        if not tracks:
            return None
        until = min(last, int(np.median([track.by_step("data")[0][-1] for track in tracks])))
        if until < first:
            return None
        found: dict[str, float] = {"until": until}
        for name in ("compute", "exposed", "data", "eval", "save"):
            grew = []
            for track in tracks:
                steps, seconds = track.by_step(name)  # from 0 before the attempt's first step
                spent = np.interp((first - 1, until), np.append(begun - 1, steps), np.append(0.0, seconds))
                grew.append(spent[1] - spent[0])
            found[name] = max(0.0, float(np.mean(grew)))
        return found

    def memory(self) -> str | None:
        """The column of MEMORY that the run has."""
        return next((name for name in MEMORY if any(np.isfinite(t.values[name]).any() for t in self.tracks)), None)


def gather(parts: Iterable[pa.Table], seconds: float, ranks: int) -> Readings:
    """Tracks from segments of telemetry (`telemetry_log.parts(run, COLUMNS)`). `seconds`: the approximate duration of the run.

    If there would be more than KEPT rows, keeps the last row of each interval of time: counters lose nothing, and for memory it has
    the maximum of the interval.
    """
    width = max(seconds * max(ranks, 1) / KEPT, 1e-3)
    kept: list[dict[str, NDArray[Any]]] = []
    hosts: dict[int, str] = {}
    for part in parts:
        rows = part.filter(pc.equal(part["kind"], "rank"))
        if not rows.num_rows:
            continue
        made: dict[str, NDArray[Any]] = {name: rows[name].to_numpy() for name in ("rank", "attempt")}
        for name in _VALUES:
            made[name] = rows[name].cast(pa.float64()).to_numpy()
        seen, newest = np.unique(made["rank"][::-1], return_index=True)
        hosts |= zip(seen.tolist(), rows["host"].take(rows.num_rows - 1 - newest).to_pylist(), strict=True)
        kept.append(_thin(made, width))
    if not kept:
        return Readings([])
    whole = _thin({name: np.concatenate([part[name] for part in kept]) for name in kept[0]}, width)
    key = np.stack([whole["attempt"], whole["rank"]])
    cuts = np.flatnonzero(np.any(key[:, 1:] != key[:, :-1], axis=0)) + 1
    tracks = []
    for start, stop in zip([0, *cuts], [*cuts, key.shape[1]], strict=True):
        own = {name: whole[name][start:stop] for name in _VALUES}
        attempt, rank = int(key[0, start]), int(key[1, start])
        tracks.append(Track(attempt, rank, hosts[rank], own.pop("at"), np.nan_to_num(own.pop("step")), own))
    return Readings(tracks)


def _thin(rows: dict[str, NDArray[Any]], width: float) -> dict[str, NDArray[Any]]:
    """Rows by attempt, rank and time: the last one of each `width` seconds, with the maximum of memory in them."""
    bucket = np.floor(rows["at"] / width)
    order = np.lexsort((rows["at"], rows["rank"], rows["attempt"]))
    rows = {name: column[order] for name, column in rows.items()}
    key = np.stack([rows["attempt"], rows["rank"], bucket[order]])
    starts = np.flatnonzero(np.append(True, np.any(key[:, 1:] != key[:, :-1], axis=0)))
    ends = np.append(starts[1:], key.shape[1]) - 1
    return {name: np.fmax.reduceat(column, starts) if name in MEMORY else column[ends] for name, column in rows.items()}
