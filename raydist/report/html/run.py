"""The page of `raydist report` about a run.

Runs anywhere. Pure: `raydist.report.run_metrics` reads the run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from raydist.report import text
from raydist.report.html import bars, curves, ranks
from raydist.report.html.charts import clock
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import cards, folded, lines, missing, page, section, table
from raydist.report.run_metrics import Report

_STATUS = {
    "running": "good",
    "finished": "good",
    "stopped": "bad",
    "lost": "bad",
    "interrupted": "fair",
    "paused": "fair",
}
_PARTS = {
    "compute": ("compute", "forward, backward and update of steps that were trained for the first time; mean over ranks"),
    "exposed": (
        "exposed communication", "in these steps: communication not overlapped with computation, and waiting for slower ranks"
    ),
    "data": ("data wait", "in these steps: waiting for a batch"),
    "eval": ("evaluation", "on held-out data, between steps"),
    "checkpoint": ("checkpoint", "training was stopped for a checkpoint or a copy in memory"),
    "recovery": ("recovery", "from the last sign of training before a fault to the next new step, including steps trained again"),
    "startup": ("start-up", "from an attempt's start to its first new step, if there was no fault before it"),
    "other": ("other", "between steps and after the last one; not measured by the ranks"),
    "unknown": ("unknown", "in new steps, not divided into parts: there are no readings of the ranks"),
}  # fmt: skip


def render(report: Report) -> bytes:
    """The page, in UTF-8. Keys in URIs (`s3://KEY:SECRET@bucket`) are removed, because pages are shared."""
    facts = report.facts
    return page(
        f"{facts['run']}: {facts['status']}",
        *parts(report).values(),
        tag(
            "footer",
            f"Created {_date(facts['made_at'])} by raydist {facts['versions']['report']} from the run's folder. "
            "This file needs no network.",
        ),
    )


def parts(report: Report, view: curves.View | None = None) -> dict[str, Markup]:
    """The elements of the page by their ids, in order: the heading with the figures, then the sections."""
    facts = report.facts
    maps = (ranks.memory(report), ranks.slowness(report), *ranks.shares(report))
    heat = tag("div", [tag("div", part) for part in maps], class_="charts")
    sections = {
        "goodput": ("Where the time went", _goodput(report)),
        "training": ("Training", curves.charts(report, view)),
        "ranks": ("Ranks", heat),
        "communication": ("Communication", [_gradients(facts["gradients"]), _communication(facts)]),
        "incidents": ("Incidents", _incidents(facts)),
        "attempts": ("Attempts", _attempts(facts)),
        **({"spec": ("Spec", folded("the job, resolved", report.spec))} if report.spec else {}),
    }
    return {"head": _head(facts), **{name: section(title, body, id=name) for name, (title, body) in sections.items()}}


def status(name: str) -> Markup:
    """A run's status as a label in its colour."""
    return tag("span", name, class_=f"status {_STATUS.get(name, 'fair')}")


def _head(facts: dict[str, Any]) -> Markup:
    path = tag("p", f"{facts['path']}, as of {_date(facts['made_at'])}", class_="path quiet")
    return tag("header", tag("h1", facts["run"], status(facts["status"])), path, cards(_cards(facts)), id="head")


def overview(report: Report) -> bytes:
    """A short page, in UTF-8: the figures and the curves. Secrets are removed."""
    facts = report.facts
    return page(facts["run"], cards(_cards(facts)), curves.charts(report))


def _date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _samples(facts: dict[str, Any]) -> str:
    rate = facts["samples_per_second"]
    return f"; {rate:,.1f} samples/s" if rate is not None else ""


def _cards(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    total = facts["total_steps"]
    versions = {name: version for name, version in facts["versions"].items() if name != "report" and version}
    ran = text.span(facts["wall_seconds"]) if facts["wall_seconds"] else "-"
    found = [
        ("steps", f"{facts['steps']:,}", f"of {total:,}" if total else ""),
        ("loss", text.loss(facts["loss"]), "of the last step, nats"),
        ("eval loss", text.loss(facts["eval_loss"]), "the newest, nats"),
        ("tokens/s", text.rate(facts["tokens_per_second"]), f"all ranks, the last 50 steps{_samples(facts)}"),
        ("MFU", _percent(facts["mfu"]), "") if facts["mfu"] is not None else None,
        ("goodput", _percent(facts["goodput"]), "share of the time in new steps"),
        ("ranks", str(facts["world_size"] or "-"), "of the newest attempt"),
        ("time", ran, f"since {_date(facts['started_at'])}" if facts["started_at"] else ""),
        ("versions", versions.get("raydist", facts["versions"]["report"]),
         ", ".join(f"{name} {version}" for name, version in versions.items() if name != "raydist")),
    ]  # fmt: skip
    return [one for one in found if one]


def _goodput(report: Report) -> list[Markup | None]:
    facts = report.facts
    if not facts["wall_seconds"]:
        return [missing("No attempt of this run has begun: there is no time to divide.")]
    parts = [
        bars.Part(_PARTS[name][0], seconds, name, text.span(seconds) if seconds else "0 s", _PARTS[name][1])
        for name, seconds in facts["parts"].items()
    ]
    looks = {"trained": "compute"}
    pieces = [
        (
            span.seconds,
            looks.get(span.what, span.what),
            f"attempt {span.attempt}: {span.what}, {text.span(span.seconds)}",
        )
        for span in report.spans
    ]
    paused = facts["paused_seconds"]
    rested = f" The {text.span(paused)} in which it was paused are not counted." if paused else ""
    until = "until now" if facts["status"] == "running" else "to its end"
    words = (
        f"Shares of {text.span(facts['wall_seconds'])}, from the first attempt's start {until}.{rested} "
        f"Goodput is {_percent(facts['goodput'])}: compute, exposed communication, data wait and the unknown part of steps. "
        "The thin bar is a timeline: green where new steps were trained."
    )
    unread = missing(facts["not_read"]) if facts["not_read"] else None
    return [tag("p", words), bars.chart("shares of the run's time", parts, pieces), unread]


def _gradients(sent: dict[str, Any]) -> list[Markup]:
    """How gradients were sent, where that was not torch's way."""
    said = []
    if chosen := sent["chosen"]:
        said.append(f"Chosen by trial passes: {chosen['because']}.")
    if made := sent["compressed"]:
        error = (
            f"; half of the steps lost more than {made['error']:.1%} of what they sent"
            if made["error"] is not None
            else ""
        )
        plain = made["bytes"] + made["saved_bytes"]
        share = made["bytes"] / plain if plain else 1.0
        said.append(
            f"Compressed gradients: rank 0 sent {text.size(made['bytes'])}, {share:.1%} of a ring in fp32{error}."
        )
    if outer := sent["outer"]:
        said.append(
            f"Replicas trained apart: {outer['local_steps']:,} local steps, {outer['syncs']:,} outer steps that arrived; for these "
            f"rank 0 sent {text.size(outer['bytes'])} and waited {text.span(outer['waited_seconds'])}."
        )
    return [tag("p", line) for line in said]


def _communication(facts: dict[str, Any]) -> Markup | list[Markup]:
    rows = facts["communication"]
    if facts["not_read"]:
        return missing(facts["not_read"])
    if not rows:
        return missing(
            "The ranks sent each other nothing: there is one rank, or the run does not use torch.distributed."
        )
    columns = (
        "operation",
        "calls>",
        "per call>",
        "total>",
        "time>",
        "algbw>",
        "busbw>",
        "exposed>",
        "share of time>",
        "waited longest",
    )
    cells = [
        (
            row["op"].replace("_", "-"),
            f"{row['count']:,.0f}",
            text.size(row["bytes"] / row["count"]),
            text.size(row["bytes"]),
            text.span(row["seconds"]),
            text.speed(row["algbw"]),
            text.speed(row["busbw"]),
            text.span(row["exposed_seconds"]),
            _percent(row["exposed_share"]),
            f"rank {row['most_exposed']['rank']}, {text.span(row['most_exposed']['seconds'])}",
        )
        for row in rows
    ]
    words = (
        "Values per rank: means over ranks, totals of all attempts. Sizes and bandwidths as in nccl-tests; exposed: "
        "time not overlapped with computation, in which a rank waited. The rank that waits least is often the one that the others "
        "wait for."
    )
    return [tag("p", words), table(columns, cells)]


def _incidents(facts: dict[str, Any]) -> Markup:
    rows = facts["incidents"]
    if not rows:
        return tag("p", "No incidents were recorded.")
    start = facts["started_at"] or facts["made_at"]
    looks = {"critical": "bad", "warning": "fair"}
    cells = [
        (
            tag("span", clock(max(row["at"] - start, 0.0)), title=_date(row["at"])),
            tag("b", row["kind"], class_=looks.get(row["severity"])),
            "-" if row["attempt"] is None else row["attempt"],
            "-" if row["step"] is None else f"{row['step']:,}",
            "-" if row["rank"] is None else row["rank"],
            [row["cause"], folded("traceback", row["detail"]) if row["detail"] else None],
            lines(
                (row["then"] and f"then: {row['then']}", row["remedy"] and tag("span", row["remedy"], class_="quiet"))
            ),
        )
        for row in rows
    ]
    return table(("time>", "what", "attempt>", "step>", "rank>", "cause~", "reaction and remedy~"), cells)


def _attempts(facts: dict[str, Any]) -> Markup:
    if not facts["attempts"]:
        return missing("No attempt has begun yet.")
    names = ("number", "world_size", "first_step", "last_step")
    cells = [
        (
            *("-" if row[name] is None else f"{row[name]:,}" for name in names),
            text.span(row["startup"]["seconds"]) if row["startup"] else "-",
            text.added_up(row["startup"]["stages"])[1] if row["startup"] else "",
            f"{row['startup']['repeated_steps']:,}" if row["startup"] else "-",
            row["cause"] or ("" if facts["status"] == "running" else "its last step"),
        )
        for row in facts["attempts"]
    ]
    steps, start = ("attempt>", "ranks>", "first step>", "last step>"), ("startup>", "its stages~", "repeated steps>")
    return table((*steps, *start, "ended by~"), cells)
