"""Reductions in one pass that textbooks take two for: mean with squared deviations (Welford), sum of exponentials (online).

Each lane of the tile keeps its own running values through the loop; afterwards lanes are put together. `started`, `stepped` and
`finished` print the Triton lines before, in and after that loop. A lane whose columns have ended keeps what it has.

Where programs share a row, each has a piece of it in registers: `of_piece` prints what it tells the others, `joined` what is made
of all their words, as of lanes.

Source: B. P. Welford, Note on a method for calculating corrected sums of squares (1962); Chan, Golub, LeVeque 1983 for putting
lanes together; Milakov, Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

from torch_cudal1.kernels.schedule import Statement

__all__ = ["KINDS", "WORDS", "finished", "joined", "of_piece", "started", "stepped"]

WORDS = {"mean": ("mean",), "m2": ("mean", "acc"), "expsum": ("top", "acc")}  # what a lane or a piece has of each kind
KINDS = frozenset(WORDS)
_LOW = 'float("-inf")'


def started(s: Statement, shape: str) -> list[str]:
    """Before the loop: nothing seen."""
    n, zeros = s.name, f"tl.zeros({shape}, tl.float32)"
    if s.text == "expsum":
        return [f"top_{n} = tl.full({shape}, {_LOW}, tl.float32)", f"acc_{n} = {zeros}"]
    return [f"mean_{n} = {zeros}"] + [f"acc_{n} = {zeros}"] * (s.text == "m2")


def stepped(s: Statement, columns: int, masked: bool) -> list[str]:
    """One tile further."""
    n, x = s.name, s.needs[0].name
    if s.text == "expsum":
        seen = f"tl.where(column_ok, {x}, {_LOW})" if masked else x
        return [
            f"x_{n} = {seen}",
            f"next_{n} = nan_max(top_{n}, x_{n})",
            f"safe_{n} = {_safe(f'next_{n}')}",
            f"acc_{n} = acc_{n} * libdevice.exp(top_{n} - safe_{n}) + libdevice.exp(x_{n} - safe_{n})",
            f"top_{n} = next_{n}",
        ]
    lines = [f"away_{n} = {x} - mean_{n}", f"next_{n} = mean_{n} + away_{n} * (1.0 / (start // {columns} + 1))"]
    if s.text == "m2":
        lines.append(f"acc_{n} = {_kept(f'acc_{n} + away_{n} * ({x} - next_{n})', f'acc_{n}', masked)}")
    return [*lines, f"mean_{n} = {_kept(f'next_{n}', f'mean_{n}', masked)}"]


def finished(s: Statement, count: int, columns: int) -> list[str]:
    """After the loop: the row's value, in `[rows, 1]`."""
    return joined(s, count, columns, f"({count + columns - 1} - tl.arange(0, {columns})[None, :]) // {columns}")


def joined(s: Statement, count: int, lanes: int, seen: str) -> list[str]:
    """The row's value, in `[rows, 1]`, of the words of `lanes` lanes, of which each has seen `seen` of `count` elements."""
    n = s.name
    if s.text == "expsum":
        return [
            f"row_{n} = tl.reduce(top_{n}, 1, nan_max, keep_dims=True)",
            f"{n} = tl.sum(acc_{n} * libdevice.exp(top_{n} - {_safe(f'row_{n}')}), axis=1, keep_dims=True)",
        ]
    lines = [
        f"seen_{n} = ({seen}).to(tl.float32)",
        # around a first guess: far from zero, what is summed must be small beside the mean
        f"guess_{n} = tl.sum(mean_{n}, axis=1, keep_dims=True) * {1.0 / lanes!r}",
        f"center_{n} = guess_{n} + tl.sum((mean_{n} - guess_{n}) * (seen_{n} * {1.0 / count!r}), axis=1, keep_dims=True)",
    ]
    if s.text == "mean":
        return [*lines, f"{n} = center_{n}"]
    lines.append(f"off_{n} = mean_{n} - center_{n}")
    return [*lines, f"{n} = tl.sum(acc_{n} + off_{n} * off_{n} * seen_{n}, axis=1, keep_dims=True)"]


def of_piece(s: Statement, masked: bool, size: str) -> list[str]:
    """The words of a piece of `size` elements in registers: those of textbooks, with the mean corrected (`norms.moments`)."""
    n, x = s.name, s.needs[0].name
    if s.text == "expsum":
        return [
            f"x_{n} = {_other(x, _LOW, masked)}",
            f"top_{n} = tl.reduce(x_{n}, 1, nan_max, keep_dims=True)",
            f"acc_{n} = tl.sum(libdevice.exp(x_{n} - {_safe(f'top_{n}')}), axis=1, keep_dims=True)",
        ]
    lines = [
        f"rough_{n} = tl.div_rn(tl.sum({_other(x, '0.0', masked)}, axis=1, keep_dims=True), {size})",
        f"away_{n} = {_other(f'{x} - rough_{n}', '0.0', masked)}",
        f"off_{n} = tl.div_rn(tl.sum(away_{n}, axis=1, keep_dims=True), {size})",
        f"mean_{n} = rough_{n} + off_{n}",
    ]
    if s.text == "m2":
        squares = f"tl.sum(away_{n} * away_{n}, axis=1, keep_dims=True)"
        lines.append(f"acc_{n} = nan_max({squares} - off_{n} * off_{n} * {size}, 0.0)")
    return lines


def _other(value: str, outside: str, masked: bool) -> str:
    return f"tl.where(column_ok, {value}, {outside})" if masked else value


def _kept(new: str, old: str, masked: bool) -> str:
    return f"tl.where(column_ok, {new}, {old})" if masked else new


def _safe(top: str) -> str:
    """The maximum, or 0 where nothing is above minus infinity: a difference of infinities would be NaN."""
    return f"tl.where({top} == {_LOW}, 0.0, {top})"
