"""The collectives in a rank's trace: which they are, what they carry, and which of another rank's is the same one.

Runs in: the user's shell. Plain python.

gloo: kineto records what its threads do as `gloo:all_reduce`, with the shapes that go in; what
raydist/worker/parallel/_gloo_p2p.py sends as several of them is one, from the first one's start to the last one's end. NCCL: its
kernels, from their start on the device to their end, to which torch adds elements, type, group and number.
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
"""Those that no rank leaves before all have entered."""
EVERYONES = "sums of the step"
"""What all ranks send together, whatever groups there are beside (raydist/worker/step.py)."""
_KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send_recv", "recv": "send_recv", "barrier": "barrier", "reduce": "reduce",
    "gather": "gather", "scatter": "scatter",
}  # fmt: skip
"""The longest of these words that a name holds says what it is."""
_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2,
    "long int": 8, "short int": 2, "signed char": 1, "unsigned char": 1, "bfloat16": 2,
    "short": 2, "char": 1, "byte": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_FSDP = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.*)\))?")
_ONE = re.compile(r"raydist::(reduce_scatter|all_gather)")
"""What is launched within is one collective (raydist/worker/parallel/_gloo_p2p.py)."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collective:
    """One of one rank. `event` is its index among the part's events; times in seconds by that rank's clock.

    `others`: of one that was sent as several, the events after the first. `key` is the same for all ranks that take part in it;
    `binds`: none of them leaves it before all have entered.
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
    """Whether a kernel communicates, as Holistic Trace Analysis has it: by its name. RCCL's have NCCL's."""
    return str(event["name"]).startswith("nccl")


def collectives(events: Sequence[Event], steps: list[Interval], about: dict[str, Any]) -> list[Collective]:
    """Those in the steps, in the order in which they began. `about`: what raydist/worker/metrics/trace.py says of the part."""
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
    """Number of what was sent as several -> its place in `made`."""
    for index, event in found:
        begin, end = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0.0)) / 1e6
        kind, elements, size = _what(event)
        launch = next(launched[(kind, elements) if gpu else elements], None)
        if launch is not None:
            kind = launch.kind  # gloo scatters a sum by reducing all of it
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
        else:  # counted: the same on all ranks where all are in one group
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
    """(kind, elements that this rank puts in, their bytes: 0 where that is not known)."""
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
    """The shapes of an operator's tensors, and of those in its lists; [] is no tensor, but in a list a scalar."""
    for argument in arguments:
        if isinstance(argument, list) and argument:
            yield from [argument] if isinstance(argument[0], int) else argument


class _Launch(NamedTuple):
    """An operator that launches a collective: its kind, FSDP2's module, and the number of the one that it is only a part of."""

    kind: str
    module: str
    one: int | None


def _launches(events: Sequence[Event], by_kind: bool) -> dict[Hashable, Iterator[_Launch]]:
    """Elements, or (kind, elements) -> the operators that launch such collectives, in order.

    FSDP2 launches its own within ranges that have their module's name. Those with as many elements run in the order of launch.
    """
    modules = _Ranges(events, _FSDP)
    ones = _Ranges(events, _ONE)
    found: dict[Hashable, list[_Launch]] = defaultdict(list)
    launched = (e for e in events if e.get("ph") == "X" and e["name"].startswith("c10d::"))
    ends: dict[Any, float] = {}
    for event in sorted(launched, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
        if event["ts"] < ends.get(event["tid"], 0.0):
            continue  # the same call, handed on by who stands before the backend (raydist/worker/metrics/collective_counters.py)
        ends[event["tid"]] = event["ts"] + event.get("dur", 0.0)
        kind = _KINDS.get(_kind(event["name"]), "other")
        sizes = [math.prod(shape) for shape in _shapes(event.get("args", {}).get("Input Dims", []))]
        # An all-gather's operator has the whole array beside what goes in, a reduce-scatter's what comes out, an
        # all-to-all's both.
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
    """Ranges of code with such names, in the order of time. None overlaps another."""

    def __init__(self, events: Sequence[Event], pattern: re.Pattern[str]) -> None:
        found = sorted(
            (e["ts"], e["ts"] + e.get("dur", 0.0), match[1] or "root")
            for e in events
            if e.get("ph") == "X" and e.get("cat") == "user_annotation" and (match := pattern.fullmatch(e["name"]))
        )
        self._spans = [(begin, end) for begin, end, _ in found]
        self.names = [name for _, _, name in found]

    def around(self, event: Event) -> int | None:
        """The number of that in which an event begins."""
        return at(self._spans, event["ts"])
