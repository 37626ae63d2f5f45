"""The page of `raydist plan --scaling -o page.html`.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raydist.report import text
from raydist.report.html.charts import Across, Series, lines
from raydist.report.html.elements import tag
from raydist.report.html.page import cards, page, section, table

LOST = ("communication", "pipeline", "offload", "stragglers", "checkpoints", "failures")


def render(found: Mapping[str, Any]) -> bytes:
    """The page, in UTF-8."""
    points, assumed = found["points"], found["assumed"]
    run = f", run {found['measured']['run']}" if found["measured"] else ""
    x = np.array([float(point["gpus"]) for point in points])
    speeds = np.array([point["tokens_per_second"] for point in points])
    linear = speeds[0] * x / x[0]
    shares = {name: np.array([100 * point["shares"][name] for point in points]) for name in ("useful", *LOST)}

    def chart(title: str, series: list[Series], unit: str, log: bool = False) -> Any:
        across = Across("GPUs", kind="log", base=2, ticks=list(x))
        return lines(title, series, across, unit=unit, about=f"{title.lower()} over the number of GPUs", log=log)

    drawn = [
        chart(
            "Throughput", [Series("forecast", x, speeds), Series("linear", x, linear, "faint")], "tokens/s", log=True
        ),
        chart("Efficiency", [Series("", x, np.array([100 * point["efficiency"] for point in points]))], "% of linear"),
        chart(
            "Where the time goes",
            [Series(name, x, y) for name, y in shares.items() if name != "useful" and y.any()],
            "%",
        ),
    ]
    name = f"{found['spec']}: {found['strategy']} on {found['speed']['device']}"
    return page(
        f"{name}, 8 to 1,024 GPUs",
        tag("h1", "Forecast"),
        tag("p", name, class_="path quiet"),
        cards(
            [
                (
                    "batch",
                    "grows with the GPUs" if found["weak"] else "stays",
                    f"{points[0]['global_batch']:,} sequences",
                ),
                ("jitter", f"{assumed['jitter']:.1%}", f"of a rank's step{run}"),
                ("MTBF of a GPU", f"{assumed['mtbf_h']:,.0f} h", f"restart: {assumed['restart_s']:g} s"),
            ]
        ),
        section("Charts", tag("div", drawn, class_="charts"), id="charts"),
        section("Points", table([name + ">" if i else name for i, name in enumerate(HEADS)], rows(found)), id="points"),
        tag("footer", "Created by raydist plan --scaling. This file needs no network."),
    )


HEADS = ("GPUs", "tokens/s", "of linear", "useful", *LOST, "checkpoint every", "failure every")


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """The points as text, in the order of HEADS."""
    return [
        [
            f"{point['gpus']:,}",
            f"{point['tokens_per_second']:,.0f}",
            f"{point['efficiency']:.0%}",
            *(f"{point['shares'][name]:.1%}" for name in ("useful", *LOST)),
            text.span(point["interval_s"]),
            text.span(point["mtbf_s"]),
        ]
        for point in found["points"]
    ]
