"""What `raydist report` says of a run, as a page.

Runs anywhere. Pure: `raydist.report.run_metrics` reads the run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from raydist.redact import redact
from raydist.report import text
from raydist.report.html import axes, bars, curves, ranks
from raydist.report.html.page import cards, folded, lines, missing, page, section, table
from raydist.report.html.svg import Markup, tag
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
    "exposed": ("exposed communication", "waiting in them for collectives that no computing hides, slower ranks included"),
    "data": ("data wait", "waiting in them for a batch"),
    "eval": ("evaluation", "on held-out data, between steps"),
    "checkpoint": ("checkpoint", "training stood still for a checkpoint or a copy in memory"),
    "recovery": ("recovery", "from the last sign of training before a fault to the next new step, steps trained again included"),
    "startup": ("start-up", "from an attempt's begin to its first new step, where no fault came before"),
    "other": ("other", "between steps and after the last one: what no clock of a rank has"),
    "unknown": ("unknown", "in new steps, and not divided: the ranks were not read then"),
}  # fmt: skip


def render(report: Report) -> bytes:
    """The page, in UTF-8. Keys that stand in URIs (`s3://KEY:SECRET@bucket`) are not in it: a page is passed on."""
    told = report.told
    made = _date(told["made_at"])
    heading = tag(
        "h1", told["run"], tag("span", told["status"], class_=f"status {_STATUS.get(told['status'], 'fair')}")
    )
    made_of = page(
        f"{told['run']}: {told['status']}",
        heading,
        tag("p", f"{told['path']}, as it was on {made}", class_="path quiet"),
        cards(_cards(told)),
        section("Where the time went", _goodput(report), id="goodput"),
        section("Training", curves.charts(report), id="training"),
        section(
            "Ranks",
            tag("div", [tag("div", part) for part in (ranks.memory(report), ranks.slowness(report))], class_="charts"),
            id="ranks",
        ),
        section("Communication", _communication(told), id="communication"),
        section("Incidents", _incidents(told), id="incidents"),
        section("Attempts", _attempts(told), id="attempts"),
        section("Spec", folded("the job, resolved", report.spec), id="spec") if report.spec else None,
        tag(
            "footer",
            f"Made {made} by raydist {told['versions']['report']} from the run's folder. This file needs no network.",
        ),
    )
    return redact(made_of.decode()).encode()


def _date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _cards(told: dict[str, Any]) -> list[tuple[str, str, str]]:
    total = told["total_steps"]
    versions = {name: version for name, version in told["versions"].items() if name != "report"}
    ran = text.span(told["wall_seconds"]) if told["wall_seconds"] else "-"
    found = [
        ("steps", f"{told['steps']:,}", f"of {total:,}" if total else ""),
        ("loss", text.loss(told["loss"]), "of the last step, nats"),
        ("eval loss", text.loss(told["eval_loss"]), "the newest, nats"),
        ("tokens/s", text.rate(told["tokens_per_second"]), "all ranks, the last 50 steps"),
        ("MFU", _percent(told["mfu"]), "") if told["mfu"] is not None else None,
        ("goodput", _percent(told["goodput"]), "share of the time in new steps"),
        ("ranks", str(told["world_size"] or "-"), "of the newest attempt"),
        ("time", ran, f"since {_date(told['started_at'])}" if told["started_at"] else ""),
        ("versions", versions.get("raydist", told["versions"]["report"]),
         ", ".join(f"{name} {version}" for name, version in versions.items() if name != "raydist")),
    ]  # fmt: skip
    return [one for one in found if one]


def _goodput(report: Report) -> list[Markup | None]:
    told = report.told
    if not told["wall_seconds"]:
        return [missing("No attempt of this run has begun, by its events: there is no time to divide.")]
    parts = [
        bars.Part(_PARTS[name][0], seconds, name, text.span(seconds) if seconds else "0 s", _PARTS[name][1])
        for name, seconds in told["parts"].items()
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
    paused = told["paused_seconds"]
    rested = f" {text.span(paused)} in which it was paused are not counted." if paused else ""
    until = "until now" if told["status"] == "running" else "to its end"
    words = (
        f"Shares of {text.span(told['wall_seconds'])}, from the first attempt's start {until}.{rested} "
        f"Goodput is {_percent(told['goodput'])}: compute, exposed communication, data wait and what of the steps is unknown. "
        "The thin bar shows when: green where new steps were trained."
    )
    unread = missing(told["not_read"]) if told["not_read"] else None
    return [tag("p", words), bars.chart("shares of the run's time", parts, pieces), unread]


def _communication(told: dict[str, Any]) -> Markup | list[Markup]:
    rows = told["communication"]
    if told["not_read"]:
        return missing(told["not_read"])
    if not rows:
        return missing(
            "The ranks sent each other nothing: there is one rank, or torch.distributed is not what it uses."
        )
    columns = (
        "operation",
        "calls>",
        "a call>",
        "in all>",
        "time>",
        "algbw>",
        "busbw>",
        "exposed>",
        "of all time>",
        "waited longest",
    )
    cells = [
        (
            row["op"].replace("_", "-"),
            axes.whole(row["count"]),
            text.size(row["bytes"] / row["count"]),
            text.size(row["bytes"]),
            text.span(row["seconds"]),
            _speed(row["algbw"]),
            _speed(row["busbw"]),
            text.span(row["exposed_seconds"]),
            _percent(row["exposed_share"]),
            f"rank {row['most_exposed']['rank']}, {text.span(row['most_exposed']['seconds'])}",
        )
        for row in rows
    ]
    words = (
        "Of a rank: means over ranks, all attempts together. Sizes and bandwidths by the conventions of nccl-tests; exposed: "
        "what a rank waited for. The rank that waits least is often the one that the others wait for."
    )
    return [tag("p", words), table(columns, cells)]


def _speed(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{text.size(bytes_per_second)}/s"


def _incidents(told: dict[str, Any]) -> Markup:
    rows = told["incidents"]
    if not rows:
        return tag("p", "Nothing went wrong that the run knows of.")
    start = told["started_at"] or told["made_at"]
    looks = {"critical": "bad", "warning": "fair"}
    cells = [
        (
            tag("span", axes.clock(max(row["at"] - start, 0.0)), title=_date(row["at"])),
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
    return table(("time>", "what", "attempt>", "step>", "rank>", "cause~", "what was done, and the remedy~"), cells)


def _attempts(told: dict[str, Any]) -> Markup:
    if not told["attempts"]:
        return missing("None has begun yet.")
    names = ("number", "world_size", "first_step", "last_step")
    cells = [
        (
            *("-" if row[name] is None else f"{row[name]:,}" for name in names),
            text.span(row["startup"]["seconds"]) if row["startup"] else "-",
            f"{row['startup']['repeated_steps']:,}" if row["startup"] else "-",
            row["cause"] or ("" if told["status"] == "running" else "its last step"),
        )
        for row in told["attempts"]
    ]
    return table(("attempt>", "ranks>", "first step>", "last step>", "up in>", "steps again>", "ended by~"), cells)
