"""The curves of a run over its steps: loss, throughput, gradient norm, learning rate, gradient noise scale; and loads of experts.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydist.report.html import charts as draw
from raydist.report.html.charts import Across, Mark, Series
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import missing
from raydist.report.run_metrics import Report

POINTS = 150
"""Approximate number of points of a curve of means."""
_MARKS = 200
"""Maximum number of incidents in a chart: the critical ones, and the newest of the others."""
_SPREAD = 2.0
"""Ends of the scale of loads: a quarter and four times the mean, as powers of two."""
_HELP = (
    "Drag over a curve to zoom into all of them, double-click for all steps; a click on a name hides its line. Keys: arrows, + and "
    "-, page up and down, Esc, and 1 to 9 for the lines."
)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """What of the curves is shown, and how: steps `first` to `last` (None: to the end), means over `smooth` steps, the scale of y
    (auto: logarithmic if values span powers of ten), and the steps of other runs by their names.
    """

    first: int = 1
    last: int | None = None
    smooth: int = 1
    scale: Literal["auto", "log", "linear"] = "auto"
    beside: Mapping[str, pa.Table] = field(default_factory=dict)

    def log(self, values: Array) -> bool:
        """Whether the y axis of these values is logarithmic."""
        return draw.wants_log(values) if self.scale == "auto" else self.scale == "log"

    def columns(self, steps: pa.Table) -> dict[str, Array]:
        """The columns that are drawn, of the steps in view."""
        names = ("step", "loss", "lr", "grad_norm", "tokens", "samples", "seconds", "grad_noise_scale", "expert_imbalance",
                 "exchanged_bytes")  # fmt: skip
        number = steps["step"].to_numpy()
        low = int(np.searchsorted(number, self.first))
        high = len(number) if self.last is None else int(np.searchsorted(number, self.last, side="right"))
        cut = steps.slice(low, max(high - low, 0))
        return {name: cut[name].cast("float64").to_numpy().astype(np.float64) for name in names}


def charts(report: Report, view: View | None = None) -> Markup | list[Markup]:
    """All charts; the gradient noise scale only if it is known."""
    view = view or View()
    if not report.steps.num_rows:
        return missing("No step is on storage yet: records are written every 2 seconds.")
    at = view.columns(report.steps)
    x, marks = at["step"], _marks(report)
    if not len(x):
        return missing(f"No step from {view.first:,} on is in view: the run is at step {report.facts['steps']:,}.")
    others = {name: view.columns(steps) for name, steps in view.beside.items()}
    name = report.facts["run"] if others else ""
    held_out = {step: loss for step, loss in sorted(report.evals.items()) if x[0] <= step <= x[-1]}
    evals = Series("eval", np.array([*held_out], dtype=float), np.array([*held_out.values()]), "dots")
    over = "over steps; a vertical line where an attempt begins, and at each incident and finding"

    every = [at, *others.values()]
    ends = (
        min(one["step"][0] for one in every if len(one["step"])),
        max(one["step"][-1] for one in every if len(one["step"])),
    )

    def curve(title: str, series: list[Series], unit: str = "", log: bool = False) -> Markup:
        about = f"{title.lower()} {over}"
        return draw.lines(title, series, Across("step", ends=ends), unit=unit, about=about, log=log, marks=marks)

    def beside(column: str) -> list[Series]:
        return [Series(other, own["step"], _smoothed(own[column], view.smooth)) for other, own in others.items()]

    def rate(amounts: str) -> list[Series]:
        return [
            *_rates(at, amounts, name, view),
            *(_pace(own, amounts, other) for other, own in others.items() if np.isfinite(own[amounts]).any()),
        ]

    drawn = [
        curve("Loss", [*_losses(at, name, view), *([evals] if held_out else []), *beside("loss")], "nats per token",
              view.log(at["loss"])),
        curve("Throughput", rate("tokens"), "tokens/s, all ranks", view.scale == "log"),
        *([curve("Throughput in samples", rate("samples"), "samples/s, all ranks", view.scale == "log")]
          if np.isfinite(at["samples"]).any() else []),
        curve("Gradient norm", [*_norms(at, name, view), *beside("grad_norm")], "before clipping", view.log(at["grad_norm"])),
        curve("Learning rate", [Series(name, x, at["lr"]), *beside("lr")], log=view.scale == "log"),
    ]  # fmt: skip
    noise = at["grad_noise_scale"]
    if (known := np.isfinite(noise)).any():
        batch = report.facts["global_batch"]
        constant = [Series("global batch", x[[0, -1]], np.full(2, float(batch)), "faint")] if batch else []
        scale = Series("noise scale", x[known], noise[known])
        drawn.append(curve("Gradient noise scale", [scale, *constant], "sequences", view.log(noise[known])))
    imbalance = at["expert_imbalance"]
    if (known := np.isfinite(imbalance)).any():
        about = "fullest expert over the mean, worst layer"
        drawn.append(curve("Imbalance of experts", [Series("", x[known], imbalance[known])], about))
    exchanged = at["exchanged_bytes"] / (1 << 20)
    if (known := exchanged > 0).any():
        drawn.append(curve("Exchange of experts", [Series("", x[known], exchanged[known])], "MiB a step, all ranks"))
    if report.facts["experts"]:
        drawn.append(_loads(**report.facts["experts"]))
    thinned = len(x) > 4 * draw.COLUMNS
    words = (
        "For steps that were trained twice, the last time counts. "
        + (
            f"Each line goes through the minimum and the maximum of {draw.COLUMNS:,} parts of these steps. "
            if thinned
            else ""
        )
        + ("A gap in a line is a step whose value is not finite. " if np.isnan(at["loss"]).any() else "")
        + ("Vertical lines: attempts, incidents and findings; red: an attempt failed. " if marks else "")
    )
    return [tag("p", words + _HELP), tag("div", drawn, class_="charts")]


def _loads(step: int, layers: Mapping[str, Sequence[int]]) -> Markup:
    """The tokens of each expert over the mean of its layer; no colour: none."""
    values = np.full((len(layers), max(map(len, layers.values()))), np.nan)
    for row, loads in zip(values, layers.values(), strict=True):
        with np.errstate(divide="ignore"):
            row[: len(loads)] = np.log2(np.array(loads) / max(float(np.mean(loads)), 1.0))
    names, ends = [f"expert {n}" for n in range(values.shape[1])], (0.0, float(values.shape[1]))
    unit = f"layer by expert: tokens over the mean of the layer, step {step:,}"
    grid = draw.Grid(values, [*layers], names, (-_SPREAD, _SPREAD), "power", "middle")
    return draw.heat("Loads of experts", grid, Across("expert", ends=ends), unit=unit, y_name="layer", about=unit)


def _losses(at: Mapping[str, Array], name: str, view: View) -> list[Series]:
    if view.smooth == 1:
        return [Series(name or "training", at["step"], at["loss"])]
    each = Series("each step", at["step"], at["loss"], "faint")
    mean = f"{name or 'training'}, mean of {view.smooth:,} steps"
    return [each, Series(mean, at["step"], _smoothed(at["loss"], view.smooth))]


def _rates(at: Mapping[str, Array], amounts: str, name: str, view: View) -> list[Series]:
    """Of the column `amounts`, a second."""
    x, each = at["step"], _divided(at[amounts], at["seconds"])
    if len(x) <= POINTS and view.smooth == 1:
        return [Series(name, x, each)]
    mean = f"{name}, mean" if name else "mean"
    return [Series("each step", x, each, "faint"), _pace(at, amounts, mean, view.smooth)]


def _pace(at: Mapping[str, Array], amounts: str, name: str, smooth: int = 1) -> Series:
    known = np.isfinite(at[amounts])  # records of earlier versions have no samples
    x, made, spent = (at[column][known] for column in ("step", amounts, "seconds"))
    return Series(name, *_mean(x, made, spent, smooth))


def _norms(at: Mapping[str, Array], name: str, view: View) -> list[Series]:
    x, norm = at["step"], at["grad_norm"]
    if len(x) <= 4 * POINTS and view.smooth == 1:
        return [Series(name, x, norm)]
    finite = np.isfinite(norm)
    mean = f"{name}, mean" if name else "mean"
    means = _mean(x, np.where(finite, norm, 0.0), finite.astype(np.float64), view.smooth)
    return [Series("each step", x, norm, "faint"), Series(mean, *means)]


def _smoothed(values: Array, over: int) -> Array:
    """The mean of the finite values among the last `over`; NaN where the value itself is not finite."""
    if over == 1:
        return values
    finite = np.isfinite(values)
    sums, counts = (np.cumsum(np.append(0.0, part)) for part in (np.where(finite, values, 0.0), finite))
    start = np.maximum(np.arange(1, len(values) + 1) - over, 0)
    count = counts[1:] - counts[start]
    return np.where(finite, _divided(sums[1:] - sums[start], count), np.nan)


def _marks(report: Report) -> list[Mark]:
    attempts = report.facts["attempts"]
    found = [
        Mark(row["first_step"] - 0.5, f"attempt {row['number']}")
        for row in attempts[1:]
        if row["first_step"] is not None
    ]
    kept = sorted(report.moments, key=lambda one: (one[2], one[0]))[-_MARKS:]
    return found + [Mark(step, kind, "bad" if critical else "plain") for step, kind, critical in kept]


def _mean(x: Array, amounts: Array, weights: Array, smooth: int = 1) -> tuple[Array, Array]:
    """Amounts divided by weights, over groups of at least `smooth` steps, at the middle step of each group."""
    starts = np.arange(0, len(x), max(-(-len(x) // POINTS), smooth))
    ends = np.append(starts[1:], len(x))
    spent = np.add.reduceat(weights, starts)
    made = np.add.reduceat(amounts, starts)
    return x[(starts + ends - 1) // 2], _divided(made, spent)


def _divided(amounts: Array, by: Array) -> Array:
    """The quotients; NaN where it is not above 0."""
    made: Array = np.divide(amounts, by, out=np.full(len(amounts), np.nan), where=by > 0)
    return made
