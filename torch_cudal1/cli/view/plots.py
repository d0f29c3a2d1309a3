"""The plots of the HTML page, as SVG text that follows the page's colours; `available` says whether
and why not.

Only figures as objects are used, never pyplot: no global state, no window, no back end chosen for
the user's process.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_cudal1.core.report import Interval

try:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter
except ImportError:
    # matplotlib comes with the optional extra "report".
    _MATPLOTLIB = False
else:
    _MATPLOTLIB = True

__all__ = [
    "Curve",
    "ErrorPair",
    "SpeedupPair",
    "available",
    "plot_curves",
    "plot_errors",
    "plot_speedups",
]

# Stand-ins that matplotlib can draw and that become the page's CSS variables afterwards, so that
# one SVG serves light and dark.
_COLOURS = {
    "#010203": "--ink",
    "#040506": "--muted",
    "#070809": "--grid",
    "#0a0b0c": "--first",
    "#0d0e0f": "--second",
}
_INK, _MUTED, _GRID, _FIRST, _SECOND = _COLOURS
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 10,
    "markerfacecolor": "none",
    "markeredgecolor": _FIRST,
    "markeredgewidth": 2,
}
# The diamond fits inside the ring, so both are seen where the errors are equal.
_DIAMOND: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "color": _SECOND,
}


@dataclass(frozen=True)
class SpeedupPair:
    """One line of the speed-up plot."""

    name: str
    vs_eager: Interval | None
    vs_inductor: Interval | None


@dataclass(frozen=True)
class ErrorPair:
    """One line of the error plot: largest scaled errors against float64, of the user's eager model
    and of the accelerated one.
    """

    name: str
    eager: float | None
    accelerated: float | None


@dataclass(frozen=True)
class Curve:
    """One line of a plot of curves: y over x, and where known the range around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def available() -> tuple[bool, str]:
    """Whether plots can be made, and why not."""
    return (
        _MATPLOTLIB,
        "" if _MATPLOTLIB else "matplotlib is not installed (pip install 'torch-cudal1[report]')",
    )


def plot_speedups(rows: Sequence[SpeedupPair], *, label: str) -> str:
    """Bars from 1x (no change) to the measured speed-up with its 95 % interval, on a logarithmic
    axis. Needs matplotlib.
    """
    figure, axes = _make_axes([row.name for row in rows])
    for shift, colour, values in (
        (-0.19, _FIRST, [row.vs_eager for row in rows]),
        (0.19, _SECOND, [row.vs_inductor for row in rows]),
    ):
        for y, interval in enumerate(values):
            if interval is None:
                continue
            axes.barh(y + shift, interval.value - 1, left=1, height=0.34, color=colour)
            axes.plot(
                [interval.low, interval.high],
                [y + shift] * 2,
                color=_INK,
                linewidth=1.2,
                marker="|",
                markersize=5,
            )
    intervals = [i for row in rows for i in (row.vs_eager, row.vs_inductor) if i is not None]
    low, high = (
        min((i.low for i in intervals), default=1.0),
        max((i.high for i in intervals), default=1.0),
    )
    # 1x is always inside, so that faster and slower can be seen as sides.
    low, high = min(low * 0.9, 0.8), max(high * 1.15, 1.5)
    # Logarithmic: 2x and 0.5x lie equally far from 1x.
    axes.set_xscale("log", base=2)
    axes.axvline(1, color=_INK, linewidth=1)
    _finish(axes, _choose_ticks(low, high), lambda v, _: f"{v:g}x")
    axes.set_xlim(low, high)
    axes.set_xlabel("speed-up (right of 1x is faster)", color=_MUTED)
    return _render_svg(figure, label, "speed")


def plot_errors(rows: Sequence[ErrorPair], *, label: str) -> str:
    """Dots on a logarithmic axis: errors of eager and of the accelerated module against float64; an error of 0 is not
    drawn. Needs matplotlib.
    """
    figure, axes = _make_axes([row.name for row in rows])
    # An error of 0 has no place on a logarithmic axis.
    values = [e for row in rows for e in (row.eager, row.accelerated) if e]
    axes.set_xscale("log")
    low, high = min(values, default=1e-8) / 2, max(values, default=1e-6) * 2
    # Whole decades, so that the axis has two ticks or more.
    axes.set_xlim(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)))
    for y, row in enumerate(rows):
        if row.eager and row.accelerated:
            axes.plot([row.eager, row.accelerated], [y, y], color=_GRID, linewidth=2, zorder=1)
        for value, style in ((row.eager, _RING), (row.accelerated, _DIAMOND)):
            if value:
                axes.plot([value], [y], zorder=2, **style)
    _finish(axes, None, lambda v, _: f"{v:.0e}")
    axes.set_xlabel(
        "largest error against float64, scaled by the output (left is better)", color=_MUTED
    )
    return _render_svg(figure, label, "error")


def plot_curves(lines: Sequence[Curve], *, label: str, x: str, y: str, salt: str) -> str:
    """Lines over a common axis; each has its own colour and dashes, and its name in the legend.
    Needs matplotlib.

    `salt`: a word that no other plot of the page has.
    """
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    # A canvas of its own instead of pyplot, which keeps figures and a back end in global state.
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for i, line in enumerate(lines):
        colour = (_FIRST, _SECOND, _INK, _MUTED)[i % 4]
        # Dashes as well as colours: a page may be printed in grey, and some readers do not see the
        # colours.
        dashes = ("-", "--", ":")[i // 4 % 3]
        axes.plot(line.x, line.y, color=colour, linestyle=dashes, linewidth=1.6, label=line.name)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.tick_params(axis="both", which="both", color=_GRID, labelcolor=_MUTED)
    axes.grid(color=_GRID, linewidth=0.6)
    # The page's own background shows through, light or dark.
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(x, color=_MUTED)
    axes.set_ylabel(y, color=_MUTED)
    legend = axes.legend(frameon=False, labelcolor=_INK, fontsize=9, ncols=1 + len(lines) // 5)
    for text in legend.get_texts():
        # matplotlib reads text between two "$" as mathematics, and raises for what is none.
        text.set_parse_math(False)
    return _render_svg(figure, label, salt)


def _make_axes(names: Sequence[str]) -> tuple[Figure, matplotlib.axes.Axes]:
    figure = Figure(figsize=(8.0, 0.9 + 0.42 * max(1, len(names))), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_yticks(
        range(len(names)), [name if len(name) <= 40 else name[:37] + "..." for name in names]
    )
    for text in axes.get_yticklabels():
        # A "$" in a name is a dollar. matplotlib would read the text between two as mathematics.
        text.set_parse_math(False)
        text.set_color(_INK)
    # Upside down: the first row of the table is the first bar.
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes


def _finish(
    axes: matplotlib.axes.Axes, ticks: Sequence[float] | None, label_of: Callable[..., str]
) -> None:
    if ticks is not None:
        axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(label_of))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="both", color=_GRID, labelcolor=_MUTED)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)


def _choose_ticks(low: float, high: float) -> list[float]:
    """Round speed-ups between `low` and `high`, at most about ten, 1x always among them."""
    if high / low < 6:
        return [t for t in (0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5) if low <= t <= high]
    step = max(1, round(math.log2(high / low) / 8))
    powers = range(-10 * step, 20 * step + 1, step)
    return [2.0**p for p in powers if low <= 2.0**p <= high]


def _render_svg(figure: Figure, label: str, salt: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context(
        # Text stays text, for screen readers and for copying. A fixed salt makes equal pages equal
        # bytes.
        {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif", "font.size": 10}
    ):
        figure.savefig(
            buffer,
            format="svg",
            # Without a date two pages of the same numbers are the same file.
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    content = buffer.getvalue()
    # An XML declaration is not allowed inside HTML.
    content = content[content.index("<svg") :]
    # matplotlib's style sheet would hold for the whole page.
    content = re.sub(r'<style type="text/css">.*?</style>', "", content, flags=re.DOTALL)
    # Only inside tags: a module's name may contain the text of a colour.
    content = re.sub(r"<[^>]*>", lambda tag: _retag(tag.group(), salt), content)
    # A screen reader announces one image with a label instead of every tick.
    return content.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def _retag(tag: str, salt: str) -> str:
    for stand_in, variable in _COLOURS.items():
        tag = tag.replace(stand_in, f"var({variable})")
    tag = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", tag)
    # Two plots on a page must not share an id: a reference would lead into the first one.
    for reference in (' id="', 'href="#', "url(#"):
        tag = tag.replace(reference, f"{reference}{salt}-")
    return tag
