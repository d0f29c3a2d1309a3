"""Renders Triton kernels of operations over rows: a row in registers, or in blocks of columns, with
or without running values.

The conventions are those of `triton_flat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.module_template import ShapeCase
from torch_cudal1.training.ksl.triton_flat import (
    HEAD,
    PROGRAMS,
    render_block_count,
    render_launch,
    render_rounding,
)

__all__ = ["RENDERERS"]

_EXPONENTIAL = ("softmax", "log_softmax", "cross_entropy")
# Finite: in a block of nothing but padding the difference of two infinities would be NaN.
_LOWEST = "-1e30"

# A tile `x` of whole rows; `inside` marks its columns. Reductions keep their dimension.
_WHOLE: Mapping[str, tuple[str, ...]] = {
    "softmax": (
        # The maximum is subtracted before `exp`, which overflows float32 from 88.7 on.
        "m = tl.max(x, axis=1, keep_dims=True)",
        "e = libdevice.exp(x - m)",
        "v = e / tl.sum(e, axis=1, keep_dims=True)",
    ),
    "log_softmax": (
        "m = tl.max(x, axis=1, keep_dims=True)",
        "d = x - m",
        "v = d - libdevice.log(tl.sum(libdevice.exp(d), axis=1, keep_dims=True))",
    ),
    "rms_norm": (
        "s = tl.sum(x * x, axis=1, keep_dims=True)",
        "v = x * libdevice.rsqrt(s / columns + 1e-5) * b",
    ),
    "layer_norm": (
        "m = tl.sum(x, axis=1, keep_dims=True) / columns",
        # Columns beyond the row are 0 in `x` and would be -m here: they are masked once more before
        # the squares are summed.
        "d = PADDED(x - m)",
        "s = tl.sum(d * d, axis=1, keep_dims=True)",
        "v = d * libdevice.rsqrt(s / columns + 1e-5) * b + shift",
    ),
    # sqrt_rn rounds as PyTorch's square root does; `tl.sqrt` is an approximation.
    "l2_normalize": ("s = tl.sum(x * x, axis=1, keep_dims=True)", "v = x / tl.sqrt_rn(s + 1e-6)"),
    "cross_entropy": (
        "m = tl.max(x, axis=1, keep_dims=True)",
        "v = libdevice.log(tl.sum(libdevice.exp(x - m), axis=1, keep_dims=True)) + m - picked",
    ),
}
# What comes out at the end, from the statistics m and s of the row.
_END: Mapping[str, str] = {
    "softmax": "v = libdevice.exp(x - m) / s",
    "log_softmax": "v = x - m - libdevice.log(s)",
    "rms_norm": "v = x * libdevice.rsqrt(s / columns + 1e-5) * b",
    "layer_norm": "v = (x - m) * libdevice.rsqrt(s / columns + 1e-5) * b + shift",
    "l2_normalize": "v = x / tl.sqrt_rn(s + 1e-6)",
    "cross_entropy": "v = libdevice.log(s) + m - picked",
}


def _get_other_arguments(case: ShapeCase) -> list[str]:
    return list(case.op.names[1:])


def _render_kernel(case: ShapeCase, constants: Sequence[str], lines: Sequence[str]) -> str:
    pointers = ["x_ptr", *(f"{name}_ptr" for name in _get_other_arguments(case)), "out_ptr"]
    arguments = ", ".join(
        [*pointers, "rows", "columns", *(f"{name}: tl.constexpr" for name in constants)]
    )
    body = "\n".join(f"    {line}" for line in lines)
    return f"{HEAD}\n\n@triton.jit\ndef rows_of({arguments}):\n{body}\n"


def _render_call(case: ShapeCase, grid: str, constants: Mapping[str, int], warps: str) -> str:
    call = render_launch(
        "rows_of",
        f"({grid}, 1, 1)",
        [*case.op.names, "out"],
        "rows, columns",
        constants,
        num_warps=warps,
    )
    shape = "rows" if case.op.name == "cross_entropy" else "(rows, columns)"
    return f"rows, columns = x.shape\nout = torch.empty({shape}, dtype=x.dtype, device=x.device)\n{call}\nreturn out"


def _render_row_one(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render a kernel with whole rows in registers. Without its mask, reads beyond the end of a row
    whose length is no power of two wrap around to its beginning.
    """
    on, rows = program["mask"] == "on", program.number("rows")
    exponential = case.op.name in _EXPONENTIAL
    # Neutral for the reduction: exp(-1e30 - m) is 0.
    other = _LOWEST if exponential else "0.0"
    inside = "(r < rows) & (c < columns)"
    place, mask = (
        ("c", f", mask={inside}, other={other}")
        # Without a mask the place wraps around to the row's beginning: wrong values, but of this
        # row.
        if on
        else ("c % columns", ", mask=r < rows, other=0.0")
    )
    lines = [
        "r = first + tl.arange(0, ROWS)[:, None]",
        "c = tl.arange(0, BLOCK)[None, :]",
        f"x = tl.load(x_ptr + r * columns + {place}{mask}).to(tl.float32)",
        *render_rounding(program, "x"),
        *_load_parameters(case, "c % columns" if not on else "c", "c < columns" if on else ""),
        *(_load_labels("r", "r < rows") if case.op.name == "cross_entropy" else []),
        *(
            line.replace("PADDED(x - m)", "tl.where(c < columns, x - m, 0.0)" if on else "x - m")
            for line in _WHOLE[case.op.name]
        ),
        *render_rounding(program),
    ]
    if case.op.name == "cross_entropy":
        lines.append("tl.store(out_ptr + r, v, mask=r < rows)")
    else:
        lines.append(f"tl.store(out_ptr + r * columns + c, v, mask={inside})")
    row_count = "rows" if on else "(rows // ROWS) * ROWS"
    if program["persist"] == "on":
        lines = [
            f"for first in range(tl.program_id(0) * ROWS, {row_count}, tl.num_programs(0) * ROWS):",
            *(f"    {line}" for line in lines),
        ]
    else:
        lines = ["first = tl.program_id(0) * ROWS", *lines]
    grid = render_block_count(program, "rows", rows)
    grid = f"min({grid}, {PROGRAMS})" if program["persist"] == "on" else grid
    # `tl.arange` takes powers of two only.
    block = 1 << (case.sizes["C"] - 1).bit_length()
    return _render_kernel(case, ["ROWS", "BLOCK"], lines), _render_call(
        case, grid, {"ROWS": rows, "BLOCK": block}, program["warps"]
    )


def _load_parameters(case: ShapeCase, place: str, condition: str) -> list[str]:
    """Load the inputs that are one row for all rows."""
    mask = f", mask={condition}" if condition else ""
    names = [argument.name for argument in case.op.arguments if argument.sizes == ("C",)]
    # `c` is the columns in these kernels.
    renamed = {"c": "shift"}
    return [
        f"{renamed.get(name, name)} = tl.load({name}_ptr + {place}{mask}).to(tl.float32)"
        for name in names
    ]


def _load_labels(row: str, condition: str = "") -> list[str]:
    mask = f", mask={condition}, other=0" if condition else ""
    picked = f", mask={condition}, other=0.0" if condition else ""
    return [
        f"t = tl.load(t_ptr + {row}{mask})",
        # One element of the row by its label, read again instead of being searched for among the
        # columns.
        f"picked = tl.load(x_ptr + {row} * columns + t{picked}).to(tl.float32)",
    ]


def _loop_over_columns(program: KslProgram, inner: Sequence[str], other: str) -> list[str]:
    """Render a loop over blocks of columns of row `r`, which loads `x` in each."""
    on = program["mask"] == "on"
    return [
        # Without a mask the columns end at the last whole block.
        f"for start in tl.range(0, {'columns' if on else 'columns // BLOCK * BLOCK'}, BLOCK, num_stages=STAGES):",
        "    c = start + tl.arange(0, BLOCK)",
        f"    x = tl.load(x_ptr + r * columns + c{f', mask=c < columns, other={other}' if on else ''}).to(tl.float32)",
        *(f"    {line}" for line in render_rounding(program, "x")),
        *(f"    {line}" for line in inner),
    ]


def _render_blocked(
    case: ShapeCase, program: KslProgram, statistics: Sequence[str]
) -> tuple[str, str]:
    """Render a kernel that computes the statistics of a row, then its result block by block."""
    on = program["mask"] == "on"
    name = case.op.name
    lines = ["r = tl.program_id(0)", *statistics]
    if name == "cross_entropy":
        lines += [*_load_labels("r"), _END[name], *render_rounding(program)]
        # `v` is a scalar and the pointer a block of one element: both must have one shape.
        lines += ["tl.store(out_ptr + r + tl.arange(0, 1), v + tl.zeros((1,), tl.float32))"]
    else:
        mask = ", mask=c < columns" if on else ""
        store = f"tl.store(out_ptr + r * columns + c, v{mask})"
        inner = [
            *_load_parameters(case, "c", "c < columns" if on else ""),
            _END[name],
            *render_rounding(program),
            store,
        ]
        lines += _loop_over_columns(program, inner, "0.0")
    constants = {"BLOCK": program.number("block"), "STAGES": program.number("stages")}
    return _render_kernel(case, list(constants), lines), _render_call(
        case, "rows", constants, program["warps"]
    )


def _render_row_two(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render one pass over the row for each statistic."""
    if case.op.name in _EXPONENTIAL:
        statistics = [
            f"high = tl.full((BLOCK,), {_LOWEST}, tl.float32)",
            *_loop_over_columns(program, ["high = tl.maximum(high, x)"], _LOWEST),
            "m = tl.max(high, axis=0)",
            "total = tl.zeros((BLOCK,), tl.float32)",
            *_loop_over_columns(program, ["total += libdevice.exp(x - m)"], _LOWEST),
            "s = tl.sum(total, axis=0)",
        ]
    # The mean first, then squares of deviations from it: the difference of two large sums would
    # lose the digits of a small variance.
    elif case.op.name == "layer_norm":
        statistics = [
            *_accumulate(program, "x"),
            "m = s / columns",
            *_accumulate(
                program,
                "tl.where(c < columns, (x - m) * (x - m), 0.0)"
                if program["mask"] == "on"
                else "(x - m) * (x - m)",
            ),
        ]
    else:
        statistics = _accumulate(program, "x * x")
    return _render_blocked(case, program, statistics)


def _accumulate(program: KslProgram, value: str) -> list[str]:
    return [
        "total = tl.zeros((BLOCK,), tl.float32)",
        *_loop_over_columns(program, [f"total += {value}"], "0.0"),
        "s = tl.sum(total, axis=0)",
    ]


def _render_row_online(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render one pass for all statistics: a running maximum and sum, or sums of deviations from the
    row's first element.
    """
    if case.op.name in _EXPONENTIAL:
        step = [
            "n = tl.maximum(high, x)",
            # What was summed under the old maximum is rescaled to the new one, for each lane of the
            # block by itself; lanes are joined after the loop.
            "total = total * libdevice.exp(high - n) + libdevice.exp(x - n)",
            "high = n",
        ]
        statistics = [
            f"high = tl.full((BLOCK,), {_LOWEST}, tl.float32)",
            "total = tl.zeros((BLOCK,), tl.float32)",
            *_loop_over_columns(program, step, _LOWEST),
            "m = tl.max(high, axis=0)",
            "s = tl.sum(total * libdevice.exp(high - m), axis=0)",
        ]
    elif case.op.name == "layer_norm":
        deviation = "tl.where(c < columns, x - k, 0.0)" if program["mask"] == "on" else "x - k"
        statistics = [
            # Deviations from the row's first element: in one pass the mean is not known, and sums
            # of squares of `x` itself lose digits where the mean is large.
            "k = tl.load(x_ptr + r * columns).to(tl.float32)",
            "first = tl.zeros((BLOCK,), tl.float32)",
            "total = tl.zeros((BLOCK,), tl.float32)",
            *_loop_over_columns(
                program, [f"d = {deviation}", "first += d", "total += d * d"], "0.0"
            ),
            "shifted = tl.sum(first, axis=0)",
            "m = k + shifted / columns",
            "s = tl.sum(total, axis=0) - shifted * shifted / columns",
        ]
    else:
        statistics = [
            "total = 0.0",
            *_loop_over_columns(program, ["total += tl.sum(x * x, axis=0)"], "0.0"),
            "s = total",
        ]
    return _render_blocked(case, program, statistics)


RENDERERS: Mapping[str, Callable[[ShapeCase, KslProgram], tuple[str, str]]] = {
    "row.one": _render_row_one,
    "row.two": _render_row_two,
    "row.online": _render_row_online,
}
