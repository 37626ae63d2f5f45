"""The collectives in a rank's trace: their kind and size, and a key that identifies the same collective on other ranks.

Runs in: the user's shell. Plain python.

gloo: kineto records the work of its threads as `gloo:all_reduce`, with the input shapes. A collective that
raydist/worker/comm/gloo_p2p.py sends in several operations counts as one, from the start of the first to the end of the last.
NCCL: its kernels, from start to end on the device; torch adds elements, dtype, group and sequence number.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raydist.report import text
from raydist.report.overlap import Interval, at

BINDING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds that no rank leaves before all ranks have entered."""
EVERYONES = "sums of the step"
"""Name of the collective of all ranks, whatever other process groups there are (raydist/worker/step.py)."""
_KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "reduce": "reduce",
    "gather": "gather", "scatter": "scatter",
}  # fmt: skip
"""Word in a name -> kind of collective; the longest matching word counts."""
_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2,
    "long int": 8, "short int": 2, "signed char": 1, "unsigned char": 1, "bfloat16": 2,
    "short": 2, "char": 1, "byte": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_FSDP = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.*)\))?")
_ONE = re.compile(r"raydist::(reduce_scatter|all_gather|all_to_all)")
"""All operations launched within such a range are one collective (raydist/worker/comm/gloo_p2p.py)."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one rank. `event`: its index among the part's events. Times are in seconds by that rank's clock.

    `others`: the events after the first, if it was sent in several operations. `key`: the same on all ranks that take part;
    `binds`: no rank leaves it before all have entered.
    """

    event: int
    kind: str
    label: str
    begin: float
    end: float
    key: Hashable
    binds: bool
    others: tuple[int, ...] = ()


def of_gpu(event: Event) -> bool:
    """Whether a kernel communicates, by its name, as in Holistic Trace Analysis. RCCL uses NCCL's names."""
    return str(event["name"]).startswith("nccl")


def collectives(events: Sequence[Event], steps: list[Interval], about: dict[str, Any]) -> list[Collective]:
    """The collectives in the steps, ordered by begin. `about`: the part's metadata from raydist/worker/metrics/trace.py."""
    gpu = any(e.get("cat") == "kernel" for e in events)
    found = [
        (index, event)
        for index, event in enumerate(events)
        if event.get("ph") == "X" and (of_gpu(event) and event.get("cat") == "kernel" if gpu else _of_gloo(event))
    ]
    found.sort(key=lambda f: f[1]["ts"])
    launched = _launches(events, by_kind=gpu)
    known: dict[tuple[str, int], list[str]] = defaultdict(list)
    for kind, elements, name in about.get("messages", ()):
        known[kind, elements].append(name)
    made: list[Collective] = []
    counts = Counter[Hashable]()
    together: dict[int, int] = {}
    """Number of a collective that was sent in several operations -> its index in `made`."""
    for index, event in found:
        begin, end = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0.0)) / 1e6
        kind, elements, size = _what(event)
        launch = next(launched[(kind, elements) if gpu else elements], None)
        if launch is not None:
            kind = launch.kind  # gloo implements reduce-scatter by reducing the whole array
        if (step := at(steps, begin)) is None:
            continue
        one = launch.one if launch is not None else None
        if one is not None and (place := together.setdefault(one, len(made))) < len(made):
            first = made[place]
            made[place] = replace(first, end=max(first.end, end), others=(*first.others, index))
            continue
        counts[step, kind, elements] += 1
        same = known.get((kind, elements))
        name = same[(counts[step, kind, elements] - 1) % len(same)] if same else launch.module if launch else ""
        args = event.get("args", {})
        key: Hashable
        if "Seq" in args and "Process Group Name" in args:
            key, whole = (args["Process Group Name"], args["Seq"], kind), True
        else:  # by count, which is the same on all ranks if they are in one group
            key, whole = (step, kind, elements, counts[step, kind, elements]), bool(about.get("one_group"))
            whole = whole or name == EVERYONES
        label = " ".join(filter(None, [kind, name, f"({text.size(size)})" if size else ""]))
        made.append(Collective(index, kind, label, begin, end, key, whole and kind in BINDING))
    return made


def _of_gloo(event: Event) -> bool:
    return str(event["name"]).startswith("gloo:")


def _kind(name: str) -> str:
    plain = name.lower().replace("_", "")
    return max((word for word in _KINDS if word in plain), key=len, default="")


def _what(event: Event) -> tuple[str, int, int]:
    """(kind, number of this rank's input elements, their bytes or 0 if unknown)."""
    args = event.get("args", {})
    kind = _KINDS.get(_kind(str(args.get("Collective name", event["name"]))), "other")
    if "In msg nelems" in args:
        elements, dtype = int(args["In msg nelems"]), str(args.get("dtype", ""))
    else:
        elements = sum(math.prod(shape) for shape in _shapes([args.get("Input Dims", [])]))
        dtype = next(iter(args.get("Input type", [])), "")
    return kind, elements, elements * _BYTES.get(_plain_type(dtype), 0)


def _plain_type(dtype: str) -> str:
    return dtype.lower().removeprefix("c10::")


def _shapes(arguments: Sequence[Any]) -> Iterator[list[int]]:
    """The shapes of an operator's tensors, also of those in lists. [] alone is not a tensor; in a list it is a scalar."""
    for argument in arguments:
        if isinstance(argument, list) and argument:
            yield from [argument] if isinstance(argument[0], int) else argument


class _Launch(NamedTuple):
    """An operator that launches a collective: its kind, FSDP2's module, and the number of the collective that it is a part of."""

    kind: str
    module: str
    one: int | None


def _launches(events: Sequence[Event], by_kind: bool) -> dict[Hashable, Iterator[_Launch]]:
    """Elements, or (kind, elements) -> the operators that launch such collectives, in order.

    FSDP2 launches its collectives within ranges named after the module. Collectives with equal keys run in launch order.
    """
    modules = _Ranges(events, _FSDP)
    ones = _Ranges(events, _ONE)
    found: dict[Hashable, list[_Launch]] = defaultdict(list)
    launched = (e for e in events if e.get("ph") == "X" and e["name"].startswith("c10d::"))
    ends: dict[Any, float] = {}
    for event in sorted(launched, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
        if event["ts"] < ends.get(event["tid"], 0.0):
            continue  # the same call, passed on by a wrapper of the backend (raydist/worker/metrics/collective_counters.py)
        ends[event["tid"]] = event["ts"] + event.get("dur", 0.0)
        kind = _KINDS.get(_kind(event["name"]), "other")
        sizes = [math.prod(shape) for shape in _shapes(event.get("args", {}).get("Input Dims", []))]
        # Besides the input, the operator of an all-gather has the whole array, of a reduce-scatter the output, and of an
        # all-to-all both.
        elements = {"all_gather": min, "reduce_scatter": max, "all_to_all": max}.get(kind, sum)(sizes) if sizes else 0
        module, one = modules.around(event), ones.around(event)
        found[(kind, elements) if by_kind else elements].append(
            _Launch(
                kind if one is None else ones.names[one],
                "" if module is None else modules.names[module],
                one,
            )
        )
    return defaultdict(lambda: iter(()), {key: iter(those) for key, those in found.items()})


class _Ranges:
    """Ranges of code with matching names. Those of one thread do not overlap."""

    def __init__(self, events: Sequence[Event], pattern: re.Pattern[str]) -> None:
        found = sorted(
            (e["ts"], e["ts"] + e.get("dur", 0.0), match[1] or "root", e.get("tid"))
            for e in events
            if e.get("ph") == "X" and e.get("cat") == "user_annotation" and (match := pattern.fullmatch(e["name"]))
        )
        self.names = [name for _, _, name, _ in found]
        self._of_thread: dict[Any, tuple[list[Interval], list[int]]] = defaultdict(lambda: ([], []))
        for number, (begin, end, _, thread) in enumerate(found):
            spans, numbers = self._of_thread[thread]
            spans.append((begin, end))
            numbers.append(number)

    def around(self, event: Event) -> int | None:
        """The number, in `names`, of its thread's range in which an event begins. Other threads send meanwhile, too."""
        spans, numbers = self._of_thread[event.get("tid")]
        place = at(spans, event["ts"])
        return None if place is None else numbers[place]
