"""Scales, round ticks, and number formats of axes.

Runs anywhere. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUND = (1.0, 2.0, 5.0, 10.0)
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True)
class Scale:
    """From [low, high] of the data to [start, stop] of the drawing. `log`: both ends are above 0."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """The positions of the values in the drawing."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        data = np.log(values) if self.log else np.asarray(values, dtype=np.float64)
        return self.start + (data - low) / ((high - low) or 1.0) * (self.stop - self.start)


def spread(values: Sequence[NDArray[np.float64]], log: bool) -> tuple[float, float]:
    """Minimum and maximum of all finite values (for `log`: above 0), with a small margin; (0, 1) or (1, 10) if there are none."""
    known = [v[np.isfinite(v) & (v > 0)] if log else v[np.isfinite(v)] for v in values]
    known = [v for v in known if len(v)]
    if not known:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(min(v.min() for v in known)), float(max(v.max() for v in known))
    if log:
        return (low / 1.1, high * 1.1) if high > low else (low / 2, high * 2)
    if low >= 0 and low < 0.4 * high:
        return 0.0, high * 1.04  # from 0, if that takes little space
    room = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    return low - room, high + room


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between the two."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(n for n in _ROUND if n * power >= raw * 0.999) * power
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """`ticks` that are whole numbers."""
    return [tick for tick in ticks(low, high, count) if tick == int(tick)]


def time_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers of seconds, minutes, hours or days."""
    raw = (high - low) / count
    if raw > _TIMES[-1]:
        return [tick * 86_400 for tick in ticks(low / 86_400, high / 86_400, count)]
    if raw < 1:
        return ticks(low, high, count)
    step = next(n for n in _TIMES if n >= raw)
    return [float(i * step) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, thinned if there are many; if there are few, also 2 and 5 times them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    powers = [10.0**p for p in range(first, last + 1, every)]
    inside = [p for p in powers if low <= p <= high]
    if len(inside) < 3:
        inside = [n * 10.0**p for p in range(first, last + 1) for n in (1, 2, 5) if low <= n * 10.0**p <= high]
    return inside or [low, high]


def short(value: float) -> str:
    """`0`, `12`, `1.5k`, `3M`, `0.25`, `2e-05`."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if name == 'k' else limit):.4g}{name}"
    if size < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.4g}"


def whole(value: float) -> str:
    """`1,200,000`."""
    return f"{value:,.0f}"


def clock(seconds: float) -> str:
    """`45 s`, `3:20`, `2:05:00`, `3d 4:00`: a duration."""
    total = round(seconds)
    if total < 60:
        return f"{seconds:.3g} s" if total else "0"
    days, rest = divmod(total, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours}:{minutes:02d}" if hours or minutes else f"{days}d"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


Form = Callable[[float], str]
