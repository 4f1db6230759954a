"""Line charts as SVG text, written by hand: no plotting library is needed to run the bench.

Used by the bench commands. Must not: know what is plotted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 150, 44, 56
# Okabe and Ito's colours, which people with colour blindness tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name and its points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over a logarithmic x axis, ticked where there are points; y begins at zero."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]

    def svg(self) -> str:
        """The chart as a complete SVG document."""
        xs = sorted({x for series in self.series for x, _ in series.points})
        if not xs or xs[0] <= 0:
            raise ValueError(f"{self.title}: a chart needs points, with x above 0")
        ticks = y_ticks(max(y for series in self.series for _, y in series.points))
        frame = _Frame(xs[0], xs[-1], ticks[-1])
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            _text(_LEFT, 24, self.title, size=15),
            *self._axes(frame, xs, ticks),
        ]
        for number, series in enumerate(self.series):
            parts += _line(series, frame, _COLOURS[number % len(_COLOURS)], number)
        return "\n".join([*parts, "</svg>", ""])

    def _axes(self, frame: _Frame, xs: Sequence[float], ticks: Sequence[float]) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts: list[str] = []
        for tick in ticks:
            y = frame.y(tick)
            parts.append(
                f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>'
                + _text(_LEFT - 8, y + 4, short(tick), anchor="end")
            )
        for x in xs:
            at = frame.x(x)
            parts.append(
                f'<path d="M{at:.1f} {bottom}v5" stroke="#444"/>'
                + _text(at, bottom + 20, short(x), anchor="middle")
            )
        middle = (_LEFT + right) / 2
        parts.append(_text(middle, _HEIGHT - 14, self.x_label, anchor="middle"))
        turned = f'transform="rotate(-90 18 {(_TOP + bottom) / 2:.1f})"'
        parts.append(_text(18, (_TOP + bottom) / 2, self.y_label, anchor="middle", extra=turned))
        return parts


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places on the page."""

    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        span = math.log(self.x_high / self.x_low) or 1.0
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / self.x_low) / span

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.y_high


def y_ticks(highest: float) -> list[float]:
    """Four to ten round steps from zero to at or above the highest value."""
    if highest <= 0:
        return [0.0, 1.0]
    magnitude = 10 ** math.floor(math.log10(highest))
    share = highest / magnitude
    step = magnitude * (0.2 if share <= 1 else 0.5 if share <= 4 else 1)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number as an axis shows it: 500, 10k, 1M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"


def _line(series: Series, frame: _Frame, colour: str, number: int) -> list[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    y = _TOP + 8 + 20 * number
    right = _WIDTH - _RIGHT + 16
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places),
        f'<path d="M{right} {y}h18" stroke="{colour}" stroke-width="2"/>'
        + _text(right + 24, y + 4, series.name),
    ]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, extra: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="#222" {extra}>{escape(text)}</text>'
    )
