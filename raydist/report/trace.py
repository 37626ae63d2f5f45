"""Merges the ranks' traces: one process per rank, aligned clocks, named collectives; and computes the shares of each rank's time.

Runs in: the user's shell. Plain python. Reads what raydist/worker/metrics/trace.py writes: Chrome's trace format, as kineto
writes it. Perfetto and chrome://tracing open the result.

Only one rank's events are in memory at a time: each part is read twice, first for the facts that the merge needs of all parts.
"""

from __future__ import annotations

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raydist.errors import StorageError
from raydist.parsing import parse_json, unzip
from raydist.printable import printable
from raydist.report import clock_sync
from raydist.report.collectives import Collective, collectives, of_gpu
from raydist.report.overlap import Interval, Shares, innermost, shares
from raydist.run.directory import RunDir

STEP = "ProfilerStep#"
PHASES = ("data wait", "forward", "backward", "optimizer", "checkpoint", "checkpoint copy", "eval")
"""The ranges that raydist itself records, besides steps."""
_NO_COMPUTING = ("c10d", "_c10d_functional", "autograd", "torch")
"""Namespaces of operators that launch collectives, wait for them, or only contain others (`torch::autograd::AccumulateGrad`)."""
_KEPT = frozenset("XBEsft")
"""Kinds of events that go into the merged file: ranges and flows. Names of lanes are written anew."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The facts about one rank's part, without its events. Times in seconds after `base_ns`, by that rank's clock."""

    about: dict[str, Any]
    base_ns: int
    steps: list[Interval]
    collectives: list[Collective]
    shares: Shares
    phases: dict[str, float]

    @property
    def rank(self) -> int:
        """The rank of this part."""
        return int(self.about["rank"])


def merge(run: RunDir, names: Sequence[str]) -> tuple[bytes, dict[str, Any]]:
    """(the merged trace, compressed; the object that `raydist trace --json` prints). `names`: one part per rank, ascending.

    Raises StorageError for a part that cannot be read.
    """
    facts = [describe(load(run, name), name) for name in names]
    first = facts[0]
    leads = _leads(facts)
    summary = _summary(facts, leads)
    begin = min(part.steps[0][0] + _shift(part, first, leads) for part in facts)
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", compresslevel=6, mtime=0) as out:
        out.write(b'{"displayTimeUnit":"ms","raydist":' + json.dumps(summary).encode() + b',"traceEvents":[\n')
        before = b""
        for part, name in zip(facts, names, strict=True):
            for event in rewrite(part, load(run, name)["traceEvents"], (_shift(part, first, leads) - begin) * 1e6):
                out.write(before + json.dumps(event, separators=(",", ":")).encode())
                before = b",\n"
        out.write(b"\n]}\n")
    return made.getvalue(), summary


def load(run: RunDir, name: str) -> dict[str, Any]:
    """One rank's part. Raises StorageError."""
    try:
        return dict(parse_json(unzip(run.storage.read(name))))
    except (FileNotFoundError, OSError, TypeError, ValueError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{run.uri}/{name} cannot be read: {error}", "trace the run again") from error


def describe(trace: dict[str, Any], name: str) -> Part:
    """The facts about a part. Raises StorageError if it has no step."""
    about, events = printable(trace.get("raydist", {})), trace["traceEvents"]
    training = (about.get("pid"), about.get("thread"))
    mine = [e for e in events if e.get("ph") == "X" and _key(e) == training]
    steps = sorted(_interval(e) for e in mine if e["name"].startswith(STEP))
    if not steps:
        raise StorageError(f"{name}: contains no step", "trace the run again")
    window = (steps[0][0], steps[-1][1])
    kernels = [e for e in events if e.get("cat") == "kernel" and e.get("ph") == "X"]
    computing = [_interval(e) for e in kernels if not of_gpu(e)] if kernels else _computing(mine)
    found = collectives(events, steps, about)
    phases: dict[str, float] = defaultdict(float)
    for event in mine:
        if event["name"] in PHASES and event.get("cat") == "user_annotation":
            begin, end = _interval(event)
            phases[event["name"]] += (end - begin) / (window[1] - window[0])
    return Part(
        about=about,
        base_ns=int(trace.get("baseTimeNanoseconds", 0)),
        steps=steps,
        collectives=found,
        shares=shares(window, computing, [(c.begin, c.end) for c in found]),
        phases=dict(phases),
    )


def rewrite(part: Part, events: list[Event], shift_us: float) -> Iterator[Event]:
    """A part's events as events of process `part.rank`, ordered by time, `shift_us` later; the names of its lanes come first."""
    sent = {c.event: c for c in part.collectives}
    parts = {other for c in part.collectives for other in c.others}
    lanes = _lanes(part, events)
    extra = _ExtraLanes(len(lanes))
    about, rank = part.about, part.rank
    training = (about.get("pid"), about.get("thread"))
    yield _meta(rank, 0, "process_name", name=f"rank {rank} ({about['host']}, {about['device']})")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for lane, name in lanes.values():
        yield _meta(rank, lane, "thread_name", name=name)
        yield _meta(rank, lane, "thread_sort_index", sort_index=lane)
    ranges = [e for e in enumerate(events) if e[1].get("ph") in _KEPT and _key(e[1]) in lanes]
    for index, event in sorted(ranges, key=lambda e: (e[1]["ts"], -e[1].get("dur", 0.0))):
        made = {**event, "pid": rank, "tid": lanes[_key(event)][0], "ts": round(event["ts"] + shift_us, 3)}
        if event["ph"] in "sft":
            made["id"] = rank << 32 | int(event["id"])  # flows stay within one rank
        elif event["name"].startswith(STEP):
            made["name"] = f"step {event['name'].removeprefix(STEP)}"
        elif index in parts:
            continue
        elif (one := sent.get(index)) is not None:
            made |= {"name": one.label, "cat": "collective"}
            made["args"] = {**event.get("args", {}), "kineto name": event["name"]}
            if _key(event) == training:  # gloo's sends and receives, which have no thread of their own
                made |= {"dur": round((one.end - one.begin) * 1e6, 3), "tid": extra.lane(one)}
        yield made
    for lane in extra.lanes:
        yield _meta(rank, lane, "thread_name", name="collectives")
        yield _meta(rank, lane, "thread_sort_index", sort_index=lane)


class _ExtraLanes:
    """Lanes for collectives that were sent in several operations, as many as overlap. `after`: the number of other lanes."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._free: list[float] = []

    @property
    def lanes(self) -> range:
        return range(self._after + 1, self._after + 1 + len(self._free))

    def lane(self, one: Collective) -> int:
        """The lane of the next collective; call it ordered by begin."""
        place = next((i for i, free in enumerate(self._free) if free <= one.begin), len(self._free))
        self._free[place : place + 1] = [one.end]
        return self._after + 1 + place


def _leads(facts: Sequence[Part]) -> dict[str, clock_sync.Offset]:
    by_clock: dict[str, list[clock_sync.Collectives]] = defaultdict(list)
    for part in facts:
        between = (part.base_ns - facts[0].base_ns) / 1e9
        common = {c.key: (c.begin + between, c.end + between) for c in part.collectives if c.binds}
        by_clock[part.about["clock"]].append(common)
    return clock_sync.offsets(by_clock)


def _shift(part: Part, first: Part, leads: dict[str, clock_sync.Offset]) -> float:
    """Add this to a part's seconds to get seconds after the first part's base, by the first part's clock."""
    return (part.base_ns - first.base_ns) / 1e9 - leads[part.about["clock"]].seconds


def _summary(facts: Sequence[Part], leads: dict[str, clock_sync.Offset]) -> dict[str, Any]:
    ranks = []
    for part in facts:
        lead = leads[part.about["clock"]]
        clock = {"clock_offset_seconds": lead.seconds, "clock_error_seconds": lead.error}
        other = {"data_wait": part.phases.get("data wait", 0.0), "checkpoint": part.phases.get("checkpoint", 0.0)}
        names = {key: part.about[key] for key in ("rank", "host", "device")}
        ranks.append({**names, **asdict(part.shares), **other, **clock})
    about = facts[0].about
    names = {key: about[key] for key in ("run", "trace", "attempt", "first_step", "last_step", "world_size")}
    return {**names, "ranks": ranks}


def _computing(mine: list[Event]) -> list[Interval]:
    """Compute intervals on a CPU: operators of the training thread, and autograd ranges that contain no other range."""
    ops = {_interval(e): e["name"] for e in mine if e.get("cat") == "cpu_op"}
    alone = set(innermost(ops))
    return [i for i, name in ops.items() if _computes(name, i in alone)]


def _computes(name: str, alone: bool) -> bool:
    space, mark, _ = name.partition("::")
    if space in ("c10d", "_c10d_functional") or name.startswith(("gloo:", "record_param_comms")):
        return False
    return alone or (bool(mark) and space not in _NO_COMPUTING)


def _lanes(part: Part, events: list[Event]) -> dict[tuple[Any, Any], tuple[int, str]]:
    """kineto's (pid, tid) -> (number, name) of the lane, in the order: training thread, collectives, other threads, streams."""
    names = {_key(e): str(e["args"].get("name", "")) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    sending = {_key(events[c.event]) for c in part.collectives}
    training = (part.about["pid"], part.about["thread"])
    kinds: dict[tuple[Any, Any], tuple[int, str]] = {}
    for event in events:
        key = _key(event)
        if event["ph"] not in _KEPT or not isinstance(key[0], int) or key in kinds:
            continue
        stream = event.get("args", {}).get("stream")
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation") or stream is not None:
            kinds[key] = (3, f"stream {key[1]}" + (" (collectives)" if key in sending else ""))
        elif key == training:
            kinds[key] = (0, "training")
        elif key in sending:
            kinds[key] = (1, "collectives")
        else:
            kinds[key] = (2, names.get(key) or f"thread {key[1]}")
    ordered = sorted(kinds, key=lambda k: (kinds[k][0], k))
    return {key: (lane, kinds[key][1]) for lane, key in enumerate(ordered, start=1)}


def _key(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _meta(rank: int, lane: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _interval(event: Event) -> Interval:
    return event["ts"] / 1e6, (event["ts"] + event.get("dur", 0.0)) / 1e6
