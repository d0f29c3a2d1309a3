"""Prints online reductions, which take one pass where the plain ones take two: mean with squared
deviations (Welford), sum of exponentials.

Each lane of the tile keeps its own running values through the loop; afterwards lanes are combined.
`print_init`, `print_step` and `print_finish` print the Triton lines before, in and after that loop.
A lane whose columns have ended keeps what it has. A mean beside the squared deviations of the same
values (`pair_means`) has no lines of its own but those of `print_mean`.

Where CTAs share a row, each has a tile of it in registers: `print_tile_partials` prints the
partials of a tile, `print_combine` their combination, as of lanes.

Source: B. P. Welford, Note on a method for calculating corrected sums of squares (1962); Chan,
Golub, LeVeque 1983 for putting lanes together; Milakov, Gimelshein, Online normalizer calculation
for softmax (2018).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.kernels.codegen.loop_nest import Statement

__all__ = [
    "KINDS",
    "PARTIALS",
    "pair_means",
    "print_combine",
    "print_finish",
    "print_init",
    "print_mean",
    "print_share",
    "print_step",
    "print_tile_partials",
]

# What a lane or a tile keeps of each kind of reduction.
PARTIALS = {
    "mean": ("mean",),
    "m2": ("mean", "acc"),
    "expsum": ("top", "acc"),
}
KINDS = frozenset(PARTIALS)
_MINUS_INFINITY = 'float("-inf")'


def pair_means(statements: Sequence[Statement]) -> dict[Statement, Statement]:
    """Each mean, and the squared deviations from it where the same level of reductions has them."""
    squares = {
        (s.operands, s.level): s for s in statements if s.kind == "reduce" and s.text == "m2"
    }
    means = [s for s in statements if s.kind == "reduce" and s.text == "mean"]
    return {s: squares[s.operands, s.level] for s in means if (s.operands, s.level) in squares}


def print_mean(mean: Statement, squares: Statement) -> list[str]:
    """The row's mean, after the lines of `print_finish` or `print_combine` for its twin."""
    return [f"{mean.name} = center_{squares.name}"]


def print_init(s: Statement, shape: str) -> list[str]:
    """The lines before the loop: partials of lanes that have seen no element."""
    n, zeros = s.name, f"tl.zeros({shape}, tl.float32)"
    if s.text == "expsum":
        return [f"top_{n} = tl.full({shape}, {_MINUS_INFINITY}, tl.float32)", f"acc_{n} = {zeros}"]
    return [f"mean_{n} = {zeros}"] + [f"acc_{n} = {zeros}"] * (s.text == "m2")


def print_step(s: Statement, columns: int, masked: bool) -> list[str]:
    """The lines in the loop: the partials after one more tile."""
    n, x = s.name, s.operands[0].name
    if s.text == "expsum":
        # Minus infinity adds nothing to the sum and raises no maximum.
        masked_text = f"tl.where(column_ok, {x}, {_MINUS_INFINITY})" if masked else x
        return [
            f"x_{n} = {masked_text}",
            f"next_{n} = nan_max(top_{n}, x_{n})",
            f"safe_{n} = {_format_finite_maximum(f'next_{n}')}",
            f"acc_{n} = acc_{n} * libdevice.exp(top_{n} - safe_{n}) + libdevice.exp(x_{n} - safe_{n})",
            f"top_{n} = next_{n}",
        ]
    # The count of a lane is that of the loop's steps: all lanes see a full tile but in the last
    # step, where the mask keeps what they have.
    lines = [
        f"away_{n} = {x} - mean_{n}",
        f"next_{n} = mean_{n} + away_{n} * (1.0 / (start // {columns} + 1))",
    ]
    if s.text == "m2":
        lines.append(
            f"acc_{n} = {_keep_outside(f'acc_{n} + away_{n} * ({x} - next_{n})', f'acc_{n}', masked)}"
        )
    return [*lines, f"mean_{n} = {_keep_outside(f'next_{n}', f'mean_{n}', masked)}"]


def print_finish(s: Statement, count: int, columns: int) -> list[str]:
    """After the loop: the row's value, in `[rows, 1]`."""
    return print_combine(
        s,
        count,
        columns,
        # How many elements a lane has seen: the first lanes one more where the last tile is ragged.
        f"({count + columns - 1} - tl.arange(0, {columns})[None, :]) // {columns}",
    )


def print_combine(s: Statement, count: int, lanes: int, counts: str, axis: int = 1) -> list[str]:
    """The lines that combine the partials of `lanes` lanes to the row's value, of shape `[rows, 1]`.
    `counts` is the text of how many of the `count` elements each lane has seen.

    `axis` 0: the partials are those of a single row, with one dimension, and the value is a number.
    """
    n, along = s.name, f"axis={axis}" + ", keep_dims=True" * axis
    if s.text == "expsum":
        return [
            f"row_{n} = {_format_maximum(f'top_{n}', axis)}",
            f"{n} = tl.sum(acc_{n} * libdevice.exp(top_{n} - {_format_finite_maximum(f'row_{n}')}), {along})",
        ]
    lines = [
        f"seen_{n} = ({counts}).to(tl.float32)",
        # around a first guess: far from zero, what is summed must be small beside the mean
        f"guess_{n} = tl.sum(mean_{n}, {along}) * {1.0 / lanes!r}",
        f"center_{n} = guess_{n} + tl.sum((mean_{n} - guess_{n}) * (seen_{n} * {1.0 / count!r}), {along})",
    ]
    if s.text == "mean":
        return [*lines, f"{n} = center_{n}"]
    lines.append(f"off_{n} = mean_{n} - center_{n}")
    return [*lines, f"{n} = tl.sum(acc_{n} + off_{n} * off_{n} * seen_{n}, {along})"]


def print_tile_partials(s: Statement, masked: bool, size: str) -> list[str]:
    """The partials of a tile of `size` elements that is in registers, in two passes over it."""
    n, x = s.name, s.operands[0].name
    if s.text == "expsum":
        return [
            f"x_{n} = {_fill_outside(x, _MINUS_INFINITY, masked)}",
            f"top_{n} = {_format_maximum(f'x_{n}')}",
            f"exp_{n} = libdevice.exp(x_{n} - {_format_finite_maximum(f'top_{n}')})",
            f"acc_{n} = tl.sum(exp_{n}, axis=1, keep_dims=True)",
        ]
    lines = [
        # The tile stays in registers, so that two passes cost no memory: the mean first, then the
        # deviations from it.
        f"mean_{n} = tl.div_rn(tl.sum({_fill_outside(x, '0.0', masked)}, axis=1, keep_dims=True), {size})"
    ]
    if s.text == "m2":
        lines.append(f"away_{n} = {_fill_outside(f'{x} - mean_{n}', '0.0', masked)}")
        lines.append(f"acc_{n} = tl.sum(away_{n} * away_{n}, axis=1, keep_dims=True)")
    return lines


def print_share(s: Statement, top: str) -> str:
    """The factor that turns a tile's exponentials, which are relative to the tile's maximum `top`,
    into shares of the row's sum.
    """
    return f"tl.div_rn(libdevice.exp({top} - {_format_finite_maximum(f'row_{s.name}')}), {s.name})"


def _format_maximum(text: str, axis: int = 1) -> str:
    """Text of the maximum along `axis`; NaN where any element is."""
    return f"tl.reduce({text}, {axis}, nan_max{', keep_dims=True' * axis})"


def _fill_outside(value: str, outside: str, masked: bool) -> str:
    return f"tl.where(column_ok, {value}, {outside})" if masked else value


def _keep_outside(new: str, old: str, masked: bool) -> str:
    return f"tl.where(column_ok, {new}, {old})" if masked else new


def _format_finite_maximum(top: str) -> str:
    """The maximum, or 0 where nothing is above minus infinity: a difference of infinities would be
    NaN.
    """
    return f"tl.where({top} == {_MINUS_INFINITY}, 0.0, {top})"
