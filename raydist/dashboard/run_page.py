"""The live page of a run: the parts of its report, and what matters while it trains: findings, its ranks now, their output.

Runs anywhere. Reads the run's folder; must not import torch or ray.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raydist.checkpoint import manifest
from raydist.dashboard import actions
from raydist.dashboard.document import Parts, parts, wrong
from raydist.dashboard.views import RunView, form
from raydist.diagnosis import examine
from raydist.printable import printable
from raydist.report import doctor, run_metrics, text, watch
from raydist.report.html import run as pages
from raydist.report.html.curves import View
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import folded, lines, missing, section, table
from raydist.report.run_metrics import Report
from raydist.run.directory import RunDir
from raydist.run.log import last_attempt
from raydist.run.rank_logs import tail

_RANKS = 64
"""Number of ranks in the table of the present: with more, those that wait least."""
_LOOKS = {"critical": "bad", "warning": "fair", "info": "good"}


@dataclass(frozen=True)
class Seen:
    """A run, read once for all who look at it. `now`: of `raydist watch`."""

    report: Report
    now: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    attempt: int


@dataclass(frozen=True)
class Other:
    """A run beside it: its steps, and its resolved job."""

    steps: pa.Table
    spec: str


def read(run: RunDir) -> Seen:
    """Reads the run. Raises StorageError."""
    return Seen(
        run_metrics.report(run),
        watch.view(run),
        manifest.summary(run),
        last_attempt(run),
    )


def examined(run: RunDir) -> dict[str, Any]:
    """What `raydist doctor` says about it: for a long run with many ranks this takes many seconds. Raises StorageError."""
    return doctor.facts(examine(run))


def page(
    run: RunDir,
    seen: Seen,
    found: Mapping[str, Any] | None,
    view: RunView,
    others: Mapping[str, Other],
    acts: bool = False,
) -> Parts:
    """The parts of the page. `found`: of `examined`, None if it is not known (yet). `others`: the runs beside it, by name. `acts`:
    with the buttons of actions, while it trains. Raises StorageError."""
    curves = View(view.first, view.last, view.smooth, view.y, {name: other.steps for name, other in others.items()})
    made = pages.parts(seen.report, curves)
    head, facts = made.pop("head"), seen.report.facts
    running = facts["status"] == "running"
    shown = {
        "head": head,
        **({"actions": actions.buttons()} if running and acts else {}),
        "doctor": section("Findings", _present(seen.now) if running else _doctor(found), id="doctor"),
        **({"now": section("Now", _now(seen.now), id="now")} if running else {}),
        **({"nodes": section("Nodes and GPUs", _nodes(seen.now), id="nodes")} if seen.now["nodes"] else {}),
        "view": form(view),
        "training": made.pop("training"),
        "goodput": made.pop("goodput"),
        **{name: made.pop(name) for name in ("ranks", "communication", "incidents", "attempts")},
        "checkpoints": section("Checkpoints", _checkpoints(seen.checkpoints), id="checkpoints"),
        "logs": section("Output", _output(run, seen.attempt, view), id="logs"),
        **({"change": section("Difference of the jobs", _change(seen, others), id="change")} if others else {}),
        **made,
        "files": section("Data", _files(), id="files"),
    }
    return parts(f"{facts['run']}: {facts['status']}", shown, ended=not running and found is not None)


def broken(name: str, words: str, view: RunView) -> Parts:
    """In place of a view that cannot be made: why, with the controls."""
    return parts(name, {"head": tag("header", tag("h1", name), id="head"), "problem": wrong(words), "view": form(view)})


def _present(now: Mapping[str, Any]) -> Markup:
    """What the rules find while it trains."""
    if not now["findings"]:
        return tag("p", "Nothing wrong is found now. What was over before is among the incidents.")
    return tag("ul", [_finding(one) for one in now["findings"]], class_="findings")


def _doctor(found: Mapping[str, Any] | None) -> list[Markup] | Markup:
    """What the rules find in all that was recorded."""
    if found is None:
        return tag("p", "The run is being examined; the findings appear here.")
    looked = [
        folded("what was looked at", "\n".join([*found["looked"], *map("cannot tell: {}".format, found["blind"])]))
    ]
    if not found["findings"]:
        return [tag("p", "Nothing wrong was found."), *looked]
    return [tag("ul", [_finding(one) for one in found["findings"]], class_="findings"), *looked]


def _finding(one: Mapping[str, Any]) -> Markup:
    words = (one.get("cause") and f"cause: {one['cause']}", tag("span", f"do: {one['remedy']}", class_="quiet"))
    over = " (it was over before the end)" if one.get("until") is not None else ""
    return tag(
        "li", tag("b", one["severity"], class_=_LOOKS.get(one["severity"])), f": {one['what']}{over}", lines(words)
    )


def _now(now: Mapping[str, Any]) -> list[Markup] | Markup:
    rows = now["ranks"]
    if not rows:
        return missing("There is no reading of a rank yet: the first one comes about a second after the first step.")
    nodes = {node["node"]: node for node in now["nodes"]}
    few = sorted(rows, key=lambda row: (row["exposed"] if row["exposed"] is not None else 2.0, row["rank"]))[:_RANKS]
    cells = [
        (
            row["rank"],
            [row["host"], tag("b", " the others wait for it", class_="fair") if row["slow"] else None],
            "-" if row["step"] is None else f"{row['step']:,}",
            text.size(row["memory_bytes"]),
            *(text.percent(row[name]) for name in ("memory_used", "compute", "exposed", "data", "gpu_util")),
            *(text.speed(nodes.get(row["node"], {}).get(f"nic_{way}_bytes_per_second")) for way in ("in", "out")),
        )
        for row in sorted(few, key=lambda row: row["rank"])
    ]
    columns = (
        "rank>",
        "host",
        "step>",
        "memory>",
        "of it>",
        "compute>",
        "exposed>",
        "data>",
        "GPU>",
        "net in>",
        "net out>",
    )
    least = f" The {_RANKS} of {len(rows):,} ranks that wait least for others." if len(rows) > _RANKS else ""
    words = f"Means over the last {watch.WINDOW_S:g} seconds.{least}"
    return [tag("p", words), table(columns, cells)]


def _nodes(now: Mapping[str, Any]) -> list[Markup]:
    """The hardware by its newest readings, in the order of addresses."""
    nodes = [
        (
            f"{row['host']} {row['node']}",
            text.percent(row["cpu_util"]),
            _used(row["memory_used_bytes"], row["memory_total_bytes"]),
            row["nic"] or "-",
            *(text.speed(row[f"nic_{way}_bytes_per_second"]) for way in ("in", "out")),
        )
        for row in now["nodes"][:_RANKS]
    ]
    gpus = [
        (
            f"{row['host']} {row['gpu']}",
            row["gpu_name"] or "-",
            text.percent(row["gpu_util"]),
            _used(row["gpu_memory_used_bytes"], row["gpu_memory_total_bytes"]),
            "-" if row["gpu_power_watts"] is None else f"{row['gpu_power_watts']:.0f} W",
            "-" if row["gpu_temperature_celsius"] is None else f"{row['gpu_temperature_celsius']:.0f} °C",
            tag("b", row["gpu_throttle"], class_="fair") if row["gpu_throttle"] else "-",
        )
        for row in now["gpus"][:_RANKS]
    ]
    made = [table(("node", "CPU>", "memory>", "network", "in>", "out>"), nodes)]
    if gpus:
        made.append(table(("GPU", "model", "busy>", "memory>", "power>", "temperature>", "clocks reduced by"), gpus))
    more = [
        f"{len(now[what]):,} {words}"
        for what, words in (("nodes", "nodes"), ("gpus", "GPUs"))
        if len(now[what]) > _RANKS
    ]
    if more:
        made.insert(0, tag("p", f"The first {_RANKS} of {' and of '.join(more)}."))
    return made


def _used(part: int | None, whole: int | None) -> str:
    if part is None:
        return "-"
    return text.size(part) if whole is None else f"{text.size(part)} of {text.size(whole)}"


def _checkpoints(rows: list[dict[str, Any]]) -> Markup:
    if not rows:
        return missing("No checkpoint is committed yet.")
    cells = [
        (
            f"{row['step']:,}",
            text.size(row["bytes"]),
            text.loss(row["eval_loss"]),
            "-" if row["world_size"] is None else row["world_size"],
            [tag("b", "best", class_="good") if row["best"] else None, row["problem"] or ""],
        )
        for row in rows[::-1]
    ]
    return table(("step>", "size>", "eval loss>", "ranks>", "remark~"), cells)


def _output(run: RunDir, newest: int, view: RunView) -> list[Markup] | Markup:
    rank, attempt = view.rank, view.attempt or newest
    if attempt > newest:
        return missing(f"There is no attempt {attempt}: the newest is {newest}.")
    found = printable(tail(run, attempt, rank))
    if not found:
        return missing(f"Rank {rank} has printed nothing in attempt {attempt}; the fields above choose another.")
    return [
        tag("p", f"The end of what rank {rank} printed in attempt {attempt}."),
        tag("pre", found, class_="log", tabindex="0"),
    ]


def _change(seen: Seen, others: Mapping[str, Other]) -> list[Markup]:
    """The lines of the resolved jobs that differ: `-` in the other run, `+` in this one."""
    made = []
    for name, other in others.items():
        old, new = (text.splitlines() for text in (other.spec, seen.report.spec))
        lines_of = [*difflib.unified_diff(old, new, name, seen.report.facts["run"], n=1, lineterm="")]
        words = "\n".join(lines_of) or "The same job."
        made.append(tag("details", tag("summary", f"from {name}"), tag("pre", words, tabindex="0"), open=True))
    return made


def _files() -> Markup:
    return tag("p", tag("a", "steps.csv", href="?download=steps.csv"), ": one row per step, with all columns.")
