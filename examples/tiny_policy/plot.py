"""Draws the curves that `train_tiny_policy.py --save FILE` collected, as an SVG without a library.

    cd examples; python -m tiny_policy.plot FILE.jsonl PLOT.svg

A run with kills is a thin dark line; one without is a wide pale line below it. Vertical lines mark
the kills.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 44, 44
_COLOURS = ("#1f6fb4", "#c8551b", "#3a8a3a", "#8a4fa3", "#7a6a00")
_STYLE = "font-family='sans-serif' font-size='12' fill='#444'"


def draw(curves: Sequence[dict[str, Any]]) -> str:
    """Return an SVG with the mean reward of each step, for all curves."""
    steps = max(len(curve["rewards"]) for curve in curves)
    seeds = sorted({curve["seed"] for curve in curves})
    colour = {seed: _COLOURS[at % len(_COLOURS)] for at, seed in enumerate(seeds)}
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}'>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>",
        *_axes(steps),
        *_kills(curves, steps),
    ]
    # Curves with kills last, so that they lie on top.
    for curve in sorted(curves, key=lambda curve: bool(curve["kills"])):
        points = " ".join(
            f"{_x(at, steps):.1f},{_y(r):.1f}" for at, r in enumerate(curve["rewards"])
        )
        look = "stroke-width='1.6'" if curve["kills"] else "stroke-width='7' stroke-opacity='0.25'"
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour[curve['seed']]}' {look} "
            "stroke-linejoin='round'/>"
        )
    for at, seed in enumerate(seeds):
        x = _LEFT + 90 * at
        parts.append(f"<rect x='{x}' y='14' width='14' height='4' fill='{colour[seed]}'/>")
        parts.append(f"<text x='{x + 20}' y='20' {_STYLE}>seed {seed}</text>")
    parts.append(
        f"<text x='{_WIDTH - _RIGHT}' y='20' text-anchor='end' {_STYLE}>"
        "thin: with kills; wide: without</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _axes(steps: int) -> Iterable[str]:
    for tenth in range(0, 10, 2):
        y = _y(tenth / 10)
        yield f"<path d='M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}' stroke='#ddd'/>"
        yield f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>0.{tenth}</text>"
    for step in range(0, steps, 4):
        x = _x(step, steps)
        yield f"<text x='{x:.1f}' y='{_HEIGHT - 24}' text-anchor='middle' {_STYLE}>{step}</text>"
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f"<text x='{middle}' y='{_HEIGHT - 6}' text-anchor='middle' {_STYLE}>trainer step</text>"
    yield (
        f"<text transform='translate(14 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)' "
        f"text-anchor='middle' {_STYLE}>mean reward of the step</text>"
    )


def _kills(curves: Sequence[dict[str, Any]], steps: int) -> Iterable[str]:
    for process, step in sorted(
        {(kill["process"], kill["step"]) for c in curves for kill in c["kills"]}
    ):
        x = _x(step, steps)
        yield f"<path d='M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}' stroke='#999' stroke-dasharray='3'/>"
        yield f"<text x='{x + 4:.1f}' y='{_TOP + 10}' {_STYLE}>kill -9 {process}</text>"


def _x(step: int, steps: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, steps - 1)


def _y(reward: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * reward


def main() -> None:
    """Draw the plot."""
    parser = argparse.ArgumentParser(description="Draw saved curves.")
    parser.add_argument("curves", type=Path)
    parser.add_argument("plot", type=Path)
    options = parser.parse_args()
    curves = [json.loads(line) for line in options.curves.read_text().splitlines()]
    options.plot.write_text(draw(curves))


if __name__ == "__main__":
    main()
