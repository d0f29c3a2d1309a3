"""Plots of the page as SVG written by hand: no library, no script, colours of the page's style
sheet.

Speed-ups of a level's tasks in ascending order, fast_p curves of the levels, speed-up against
tuning time. Axes are logarithmic where they hold speed-ups. It computes nothing but places.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Dot", "draw_curves", "draw_dots"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760, 260, 52, 34, 12, 12
_TICKS = (0.1, 0.25, 0.5, 0.8, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_DASHES = ("", "7 4", "2 4", "10 3 2 3")


@dataclass(frozen=True)
class Dot:
    """One task: its speed-up with the interval, a name to show, and whether something was swapped
    in.
    """

    name: str
    speedup: float
    low: float
    high: float
    filled: bool


@dataclass(frozen=True)
class Curve:
    """A line through points."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_dots(points: Sequence[Dot], label: str) -> str:
    """Tasks side by side, slowest first; filled where something was swapped in, with 95 %
    intervals.
    """
    ordered = sorted(points, key=lambda dot: dot.speedup)
    low = min([0.8, *(dot.low for dot in ordered)])
    high = max([1.5, *(dot.high for dot in ordered)])
    y = _make_log_scale(low, high)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(ordered))
    marks = []
    for place, dot in enumerate(ordered):
        x = _LEFT + (place + 0.5) * step
        colour = "var(--first)" if dot.filled else "none"
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(dot.low):.1f}" y2="{y(dot.high):.1f}" stroke="var(--muted)"/>'
        )
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y(dot.speedup):.1f}" r="3" fill="{colour}" stroke="var(--first)">'
            f"<title>{html.escape(dot.name)}: {dot.speedup:.3f}x</title></circle>"
        )
    return _wrap_svg([*_draw_grid(low, high), *marks, _draw_caption("tasks, slowest first")], label)


def draw_curves(lines: Sequence[Curve], label: str, axis: str, *, logarithmic_y: bool) -> str:
    """Lines over a logarithmic horizontal axis; the vertical one is a speed-up or a share."""
    xs = [x for curve in lines for x, _ in curve.points if x > 0]
    ys = [y for curve in lines for _, y in curve.points]
    if not xs:
        return ""
    low_x, high_x = min(xs), max(max(xs), min(xs) * 1.01)
    low, high = (min([0.9, *ys]), max([1.1, *ys])) if logarithmic_y else (0.0, 1.0)
    y = (
        _make_log_scale(low, high)
        if logarithmic_y
        else (lambda share: _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP))
    )
    span = math.log(high_x / low_x)
    parts = _draw_grid(low, high) if logarithmic_y else _draw_share_grid()
    for number, curve in enumerate(lines):
        places = [
            (_LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(max(px, low_x) / low_x) / span, y(py))
            for px, py in curve.points
        ]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dash = f' stroke-dasharray="{_DASHES[number % 4]}"' if _DASHES[number % 4] else ""
        colour = "var(--first)" if number % 2 == 0 else "var(--second)"
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        if len(lines) > 1:
            parts.append(_draw_legend_line(number, curve.name, colour, dash))
    for tick in _list_ticks(low_x, high_x):
        px = _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(tick / low_x) / span
        parts.append(
            f'<text x="{px:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle" fill="var(--muted)">{tick:g}</text>'
        )
    return _wrap_svg([*parts, _draw_caption(axis)], label)


def _draw_legend_line(number: int, name: str, colour: str, dash: str) -> str:
    """A line of the legend, at the top right, where curves seldom are."""
    right, y = _WIDTH - _RIGHT, _TOP + 14 * (number + 1)
    text = f'<text x="{right - 40}" y="{y}" text-anchor="end" fill="var(--ink)">{html.escape(name)}</text>'
    return (
        text
        + f'<line x1="{right - 34}" x2="{right}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
    )


def _make_log_scale(low: float, high: float) -> Callable[[float], float]:
    span = math.log(high / low)
    return lambda value: _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - math.log(value / low) / span)


def _list_ticks(low: float, high: float) -> list[float]:
    ticks = [tick for tick in (*_TICKS, 200.0, 500.0, 1_000.0) if low <= tick <= high]
    return ticks if len(ticks) <= 10 else ticks[:: math.ceil(len(ticks) / 10)]


def _draw_grid(low: float, high: float) -> list[str]:
    y = _make_log_scale(low, high)
    parts = []
    for tick in _list_ticks(low, high):
        weight = "2" if tick == 1.0 else "1"
        colour = "var(--muted)" if tick == 1.0 else "var(--grid)"
        parts.append(_draw_rule(y(tick), colour, weight) + _draw_tick(y(tick), f"{tick:g}x"))
    return parts


def _draw_share_grid() -> list[str]:
    height = _HEIGHT - _BOTTOM - _TOP
    places = [(share, _HEIGHT - _BOTTOM - share * height) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return [
        _draw_rule(y, "var(--grid)", "1") + _draw_tick(y, f"{100 * share:.0f} %")
        for share, y in places
    ]


def _draw_rule(y: float, colour: str, weight: str) -> str:
    return f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="{weight}"/>'


def _draw_tick(y: float, text: str) -> str:
    return (
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="var(--muted)">{text}</text>'
    )


def _draw_caption(text: str) -> str:
    place = f'x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}"'
    return f'<text {place} text-anchor="middle" fill="var(--muted)">{html.escape(text)}</text>'


def _wrap_svg(parts: Sequence[str], label: str) -> str:
    head = f'<svg role="img" aria-label="{html.escape(label)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="11"'
    return (
        head
        + ' xmlns="http://www.w3.org/2000/svg" font-family="var(--font)">'
        + "".join(parts)
        + "</svg>"
    )
