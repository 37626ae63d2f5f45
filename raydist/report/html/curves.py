"""The curves of a run over its steps: loss, learning rate, gradient norm, throughput, gradient noise scale.

Runs anywhere. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raydist.report.html import lines
from raydist.report.html.lines import Mark, Series
from raydist.report.html.page import missing
from raydist.report.html.svg import Markup, tag
from raydist.report.run_metrics import Report

POINTS = 150
"""Approximate number of points of a curve of means."""


def charts(report: Report) -> Markup | list[Markup]:
    """All charts; the gradient noise scale only if it is known."""
    steps = report.steps
    if not steps.num_rows:
        return missing("No step is on storage yet: records are written every 2 seconds.")
    at = {
        name: steps[name].to_numpy().astype(np.float64)
        for name in ("step", "loss", "lr", "grad_norm", "tokens", "seconds")
    }
    x, marks = at["step"], _marks(report)
    evals = Series(
        "eval",
        np.array(sorted(report.evals), dtype=float),
        np.array([report.evals[s] for s in sorted(report.evals)]),
        "dots",
    )
    each = np.divide(at["tokens"], at["seconds"], out=np.full(len(x), np.nan), where=at["seconds"] > 0)
    loss = [Series("training", x, at["loss"]), *([evals] if report.evals else [])]
    norms, read = (
        np.nan_to_num(at["grad_norm"], posinf=0.0, neginf=0.0),
        np.isfinite(at["grad_norm"]).astype(np.float64),
    )
    norm = [Series("", x, at["grad_norm"])]
    if len(x) > lines.COLUMNS:
        norm = [Series("each step", x, at["grad_norm"], "faint"), Series("mean", *_mean(x, norms, read))]
    throughput = (
        [Series("each step", x, each, "faint"), Series("mean", *_mean(x, at["tokens"], at["seconds"]))]
        if len(x) > POINTS
        else [Series("", x, each)]
    )
    over = "over steps; a vertical line where an attempt begins or fails"

    def curve(title: str, series: list[Series], unit: str = "", log: bool = False) -> Markup:
        about = f"{title.lower()} {over}"
        return lines.chart(title, series, unit=unit, about=about, log=log, marks=marks, x_name="step")

    drawn = [
        curve("Loss", loss, "nats per token", lines.wants_log(at["loss"])),
        curve("Throughput", throughput, "tokens/s, all ranks"),
        curve("Gradient norm", norm, "before clipping", lines.wants_log(at["grad_norm"])),
        curve("Learning rate", [Series("", x, at["lr"])]),
    ]
    noise = steps["grad_noise_scale"].cast("float64").to_numpy()
    if (known := np.isfinite(noise)).any():
        batch = report.facts["global_batch"]
        beside = [Series("global batch", x[[0, -1]], np.full(2, float(batch)), "faint")] if batch else []
        scale = Series("noise scale", x[known], noise[known])
        drawn.append(curve("Gradient noise scale", [scale, *beside], "sequences", lines.wants_log(noise[known])))
    imbalance = steps["expert_imbalance"].cast("float64").to_numpy()
    if (known := np.isfinite(imbalance)).any():
        about = "fullest expert over the mean, worst layer"
        drawn.append(curve("Imbalance of experts", [Series("", x[known], imbalance[known])], about))
    thinned = len(x) > lines.COLUMNS
    words = (
        "For steps that were trained twice, the last time counts. "
        + ("If steps share a pixel, the line goes through their minimum and maximum. " if thinned else "")
        + ("A gap in a line is a step whose value is not finite. " if np.isnan(at["loss"]).any() else "")
        + ("Red lines: an attempt failed there. " if any(mark.kind == "bad" for mark in marks) else "")
    )
    return [tag("p", words), tag("div", drawn, class_="charts")]


def _marks(report: Report) -> list[Mark]:
    attempts = report.facts["attempts"]
    found = [
        Mark(row["first_step"] - 0.5, f"attempt {row['number']}")
        for row in attempts[1:]
        if row["first_step"] is not None
    ]
    failed = {one["attempt"]: one["step"] for one in report.facts["incidents"] if one["severity"] == "critical"}
    return found + [Mark(step + 0.5, "", "bad") for step in failed.values() if step is not None]


def _mean(
    x: NDArray[np.float64], amounts: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Amounts divided by weights, over groups of steps, at the middle step of each group."""
    starts = np.arange(0, len(x), -(-len(x) // POINTS))
    ends = np.append(starts[1:], len(x))
    spent = np.add.reduceat(weights, starts)
    made = np.add.reduceat(amounts, starts)
    return x[(starts + ends - 1) // 2], np.divide(made, spent, out=np.full(len(starts), np.nan), where=spent > 0)
