"""Colours that are distinct with most kinds of colour blindness: for series and parts (Okabe and Ito 2008), and for scales.

Runs anywhere. Pure. Scales are interpolated in sRGB between the stops here; `viridis` has a few stops of the colour map of that
name (van der Walt and Smith 2015, CC0), whose lightness increases evenly.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

LEVELS = 25
"""Number of colours of a scale."""

_VIRIDIS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
_DIVERGING = {
    "light": ("#0b5fa5", "#6fa8d6", "#e4e6ea", "#eda15e", "#a63c06"),
    "dark": ("#59a9e8", "#3c6f99", "#34383f", "#b8682b", "#ff9b52"),
}
_PALETTE = {
    "light": ("#0072b2", "#d55e00", "#008f68", "#b0568c", "#3a93c9", "#8a7a00"),
    "dark": ("#5ab4ec", "#f08a3c", "#35c79b", "#dd92bd", "#9ad4f5", "#d8c84a"),
}

_THIN = {"light": _VIRIDIS[:5], "dark": _VIRIDIS[3:]}
"""The part of viridis for thin lines: contrast of at least 3:1 with the background (WCAG 1.4.11)."""

SERIES = len(_PALETTE["light"])
"""Number of colours for series; a chart with more series repeats them."""


def level(value: float, low: float, high: float) -> int:
    """The one of the LEVELS of a scale from `low` to `high`; values outside get the nearest."""
    share = (value - low) / (high - low) if high > low else 0.5
    return min(LEVELS - 1, max(0, round(share * (LEVELS - 1))))


def css(mode: str) -> str:
    """Custom properties for "light" or "dark": --s0 ... for series, --v0 ... for the even scale, --l0 ... for the scale of thin
    lines, --d0 ... for the scale with a middle.
    """
    series = [f"--s{i}:{colour}" for i, colour in enumerate(_PALETTE[mode])]
    even = [f"--v{i}:{_between(_VIRIDIS, i / (LEVELS - 1))}" for i in range(LEVELS)]
    thin = [f"--l{i}:{_between(_THIN[mode], i / (LEVELS - 1))}" for i in range(LEVELS)]
    middle = [f"--d{i}:{_between(_DIVERGING[mode], i / (LEVELS - 1))}" for i in range(LEVELS)]
    return ";".join([*series, *even, *thin, *middle])


def rules() -> str:
    """Classes that use them: stroke of `.s0` ..., fill of `.v0` ... and `.d0` ..."""
    lines = [f".s{i}{{--own:var(--s{i})}}" for i in range(SERIES)]
    cells = [f".{kind}{i}{{fill:var(--{kind}{i})}}" for kind in "vd" for i in range(LEVELS)]
    return "".join([*lines, *cells])


def _between(stops: Sequence[str], share: float) -> str:
    places = [i / (len(stops) - 1) for i in range(len(stops))]
    i = min(max(bisect.bisect_right(places, share) - 1, 0), len(stops) - 2)
    part = (share - places[i]) / (places[i + 1] - places[i])
    one, other = (_channels(stops[j]) for j in (i, i + 1))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(one, other, strict=True))


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
