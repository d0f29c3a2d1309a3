"""Renders programs as modules of PyTorch operators for the CPU: blocked loops, fused or step by
step. They can be wrong in the same ways as the Triton kernels.

Each renderer turns knobs into statements. `acc=f16` computes in bfloat16, and `mask=off` leaves out
the elements that do not fill a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.module_template import ShapeCase, render_module

__all__ = ["render_torch_module"]


def render_torch_module(case: ShapeCase, program: KslProgram) -> str:
    """Render the source text of a program that is not a cheat."""
    return render_module(case, _BODIES[program.template](case, program))


def _loop_end(program: KslProgram, size: str, block: str) -> str:
    """The end of a blocked loop. Without its mask the loop ends before the last, unfilled block."""
    return size if program["mask"] == "on" else f"{size} // {block} * {block}"


def _render_casts(case: ShapeCase, program: KslProgram) -> str:
    """Render statements that cast the inputs to the computation's dtype. Results are cast back by
    assignment.
    """
    if program["acc"] == "f32":
        return ""
    named = [argument.name for argument in case.op.arguments if argument.draw != "labels"]
    # bfloat16 stands for half precision on a CPU.
    dtype = {"f16": "bfloat16", "f64": "float64"}[program["acc"]]
    return "".join(f"{name} = {name}.to(torch.{dtype})\n" for name in named)


def _render_result_cast(case: ShapeCase) -> str:
    return f".to(torch.{case.dtype})"


def _order_steps(case: ShapeCase, program: KslProgram) -> tuple[str, ...]:
    steps = case.op.torch_steps
    return (*steps[1:], steps[0]) if program["fuse"] == "swapped" else steps


def _chain_whole(case: ShapeCase, program: KslProgram) -> str:
    steps = _order_steps(case, program)
    lines = [f"v = {case.op.names[0]}", *steps]
    if program["fuse"] == "inplace":
        # A copy first: an in-place step on the input would change what the caller passed.
        lines = [lines[0] + ".clone()", *map(_make_in_place, steps)]
    return (
        _render_casts(case, program) + "\n".join(lines) + f"\nreturn v{_render_result_cast(case)}"
    )


def _make_in_place(step: str) -> str:
    """Turn a step such as v = v * y into v.mul_(y). Steps with more than one operator copy their
    result into v.
    """
    for sign, method in ((" * ", "mul_"), (" + ", "add_"), (" - ", "sub_")):
        target, operator, operand = step.removeprefix("v = ").partition(sign)
        if (
            operator
            and target == "v"
            # Only one plain operand: for `v * y + b` the first sign is not the last operation.
            and all(other not in operand for other in (" * ", " + ", "("))
        ):
            return f"v.{method}({operand})"
    return f"v.copy_({step.removeprefix('v = ')})"


def _chain_blocks(case: ShapeCase, program: KslProgram) -> str:
    block = program["block"]
    # Inputs with rows are cut into blocks; one row for all (a bias) is broadcast as it is.
    rows = [argument.name for argument in case.op.arguments if argument.sizes[0] == "R"]
    renamed = "".join(f"    {name} = whole_{name}[lo : lo + {block}]\n" for name in rows)
    steps = _order_steps(case, program)
    inner = "".join(
        f"    {line}\n"
        for line in (map(_make_in_place, steps) if program["fuse"] == "inplace" else steps)
    )
    # A slice is a view: without a copy, in-place steps would write into the input.
    start = f"    v = {rows[0]}{'.clone()' if program['fuse'] == 'inplace' else ''}\n"
    outer = "".join(f"whole_{name} = {name}\n" for name in rows)
    return (
        f"out = torch.empty_like({rows[0]})\n{_render_casts(case, program)}{outer}"
        f"for lo in range(0, {_loop_end(program, str(case.sizes['R']), block)}, {block}):\n"
        f"{renamed}{start}{inner}    out[lo : lo + {block}] = v\nreturn out"
    )


# A row operation on `x` (rows, columns): by PyTorch's own operator, in plain steps, and from
# running values of column blocks.
_ROW_STEPS: Mapping[str, str] = {
    "softmax": "m = x.amax(-1, keepdim=True)\ne = torch.exp(x - m)\nv = e / e.sum(-1, keepdim=True)",
    "log_softmax": "m = x.amax(-1, keepdim=True)\nd = x - m\nv = d - torch.log(torch.exp(d).sum(-1, keepdim=True))",
    "rms_norm": "s = (x * x).sum(-1, keepdim=True)\nv = x * torch.rsqrt(s / C + 1e-5)\nv *= b",
    "layer_norm": "m = x.mean(-1, keepdim=True)\nd = x - m\nv = d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5) * b + c",
    "l2_normalize": "s = (x * x).sum(-1, keepdim=True)\nv = x / torch.sqrt(s + 1e-6)",
    "cross_entropy": "m = x.amax(-1, keepdim=True)\nz = torch.log(torch.exp(x - m).sum(-1)) + m[:, 0]\n"
    "v = z - x.gather(1, t[:, None])[:, 0]",
}
_EXPONENTIAL = ("softmax", "log_softmax", "cross_entropy")
# By whether the operation is exponential: a running maximum and a rescaled sum, or a sum of
# squares.
_ONLINE_START = {
    True: "m = x.new_full((len(x), 1), float('-inf'))\ns = torch.zeros_like(m)",
    False: "s = x.new_zeros((len(x), 1))",
}
_ONLINE_STEP = {
    True: "n = torch.maximum(m, p.amax(-1, keepdim=True))\n"
    "s = s * torch.exp(m - n) + torch.exp(p - n).sum(-1, keepdim=True)\nm = n",
    False: "s = s + (p * p).sum(-1, keepdim=True)",
}
_ONLINE_END: Mapping[str, str] = {
    "softmax": "v = torch.exp(x - m) / s",
    "log_softmax": "v = x - m - torch.log(s)",
    "rms_norm": "v = x * torch.rsqrt(s / C + 1e-5) * b",
    "layer_norm": "v = (x - m) * torch.rsqrt(s / C + 1e-5) * b + c",
    "l2_normalize": "v = x / torch.sqrt(s + 1e-6)",
    "cross_entropy": "v = (torch.log(s) + m)[:, 0] - x.gather(1, t[:, None])[:, 0]",
}


def _row_blocks(case: ShapeCase, program: KslProgram, inner: str) -> str:
    rows = program["rows"]
    labels = any(argument.draw == "labels" for argument in case.op.arguments)
    body = "".join(f"    {line}\n" for line in inner.splitlines())
    return (
        f"C = {case.sizes['C']}\nout = torch.empty({'x.shape[0]' if labels else 'x.shape'}, dtype=x.dtype)\n"
        f"{_render_casts(case, program)}whole_x = x\n{'whole_t = t' if labels else ''}\n"
        f"for lo in range(0, {_loop_end(program, str(case.sizes['R']), rows)}, {rows}):\n"
        f"    x = whole_x[lo : lo + {rows}]\n{f'    t = whole_t[lo : lo + {rows}]' if labels else ''}\n"
        f"{body}    out[lo : lo + {rows}] = v\nreturn out"
    )


def _row_two(case: ShapeCase, program: KslProgram) -> str:
    return _row_blocks(case, program, _ROW_STEPS[case.op.name])


def _row_online(case: ShapeCase, program: KslProgram) -> str:
    """Keep running values in one pass over blocks of columns, and write the result in a second
    pass.
    """
    exponential, block = case.op.name in _EXPONENTIAL, program["block"]
    step = "".join(f"    {line}\n" for line in _ONLINE_STEP[exponential].splitlines())
    start = _ONLINE_START[exponential]
    # The mean takes a pass of its own before the loop: sums of squares of deviations need it.
    if case.op.name == "layer_norm":
        start, step = start + "\nm = x.mean(-1, keepdim=True)", "    p = p - m\n" + step
    columns = f"for c0 in range(0, {_loop_end(program, 'C', block)}, {block}):\n    p = x[:, c0 : c0 + {block}]\n"
    return _row_blocks(case, program, f"{start}\n{columns}{step}{_ONLINE_END[case.op.name]}")


def _row_whole(case: ShapeCase, program: KslProgram) -> str:
    """Use PyTorch's own operator where it has one."""
    # Where PyTorch has an operator that the reference does not use, or a form with fewer passes.
    native = {
        "rms_norm": "torch.nn.functional.rms_norm(x, (x.shape[-1],), b, 1e-5)",
        "l2_normalize": "x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + 1e-6)",
    }
    return f"{_render_casts(case, program)}return ({native.get(case.op.name, case.op.expression)}){_render_result_cast(case)}"


def _mm_whole(case: ShapeCase, program: KslProgram) -> str:
    return (
        _render_casts(case, program)
        + f"{_product(case, program, 'x', 'w')}\nreturn v{_render_result_cast(case)}"
    )


def _product(case: ShapeCase, program: KslProgram, x: str, w: str) -> str:
    """Render `v` as a product with its epilogue: fused, apart, or before the product (which is
    wrong).
    """
    epilogue = case.op.pieces["torch"]
    if program["epilogue"] == "swapped":
        return (
            f"v = torch.matmul({x}, torch.relu({w}))"
            if not epilogue
            else f"v = {w}\nv = torch.matmul({x}, {epilogue})"
        )
    bias = "b" in case.op.names
    # addmm adds the bias within the product, without another pass over the result.
    if program["epilogue"] == "fused" and bias:
        return f"v = torch.addmm(b, {x}, {w})\nv = {epilogue.replace('v + b', 'v')}"
    return f"v = torch.matmul({x}, {w})" + (f"\nv = {epilogue}" if epilogue else "")


def _mm_blocks(case: ShapeCase, program: KslProgram) -> str:
    block, split = program["block_m"], program.number("split_k")
    inner = _product(case, program, "p", "w")
    if split > 1 and program["epilogue"] != "swapped":
        # Without a mask the rest of K is left out.
        part = case.sizes["K"] // split
        last = "None" if program["mask"] == "on" else str(part * split)
        # The last share takes the rest of K.
        ends = [f"{part * i} : {part * (i + 1) if i + 1 < split else last}" for i in range(split)]
        sums = " + ".join(f"torch.matmul(p[:, {end}], w[{end}])" for end in ends)
        epilogue = case.op.pieces["torch"]
        inner = f"v = {sums}" + (f"\nv = {epilogue}" if epilogue else "")
    body = "".join(f"    {line}\n" for line in inner.splitlines())
    m, n = case.sizes["M"], case.sizes["N"]
    return (
        f"out = torch.empty(({m}, {n}), dtype=x.dtype)\n{_render_casts(case, program)}"
        f"for lo in range(0, {_loop_end(program, str(m), block)}, {block}):\n    p = x[lo : lo + {block}]\n"
        f"{body}    out[lo : lo + {block}] = v\nreturn out"
    )


def _diag_value(case: ShapeCase, program: KslProgram, rows: str) -> str:
    """Render the product with a diagonal as a broadcast. `axis=swapped` takes the factors along the
    wrong axis.
    """
    value = case.op.pieces["value"].replace("x", f"x{rows}", 1)
    row_factor, column_factor = (
        (f"d{rows}[:, None]", "e")
        if program["axis"] == "right"
        else ("d[: x.shape[1]]", f"e{rows}[:, None]")
    )
    if program["axis"] == "swapped":
        m, n = case.sizes["M"], case.sizes["N"]
        row_factor = f"d.repeat({-(-n // m)})[: {n}]"
        # Repeated to the length of the other axis, so that the wrong program has the right shape:
        # only its values give it away.
        column_factor = f"e.repeat({-(-m // n)})[: {m}]{rows}[:, None]"
    value = value.replace("d *", f"{row_factor} *").replace("* e", f"* {column_factor}")
    # A block of rows begins at row `lo`, so its diagonal is shifted by as much.
    return f"torch.tril({value}, lo)" if "lower" in case.op.pieces else value


def _diag_whole(case: ShapeCase, program: KslProgram) -> str:
    return f"{_render_casts(case, program)}lo = 0\nreturn ({_diag_value(case, program, '')}){_render_result_cast(case)}"


def _diag_blocks(case: ShapeCase, program: KslProgram) -> str:
    block = program["block_m"]
    return (
        f"out = torch.empty_like(x)\n{_render_casts(case, program)}"
        f"for lo in range(0, {_loop_end(program, str(case.sizes['M']), block)}, {block}):\n"
        f"    out[lo : lo + {block}] = {_diag_value(case, program, f'[lo : lo + {block}]')}\nreturn out"
    )


def _scan_ends(case: ShapeCase) -> tuple[str, str]:
    """The statements before and after a forward scan of `v`."""
    turn = "v = torch.flip(v, (-1,))\n" if "reverse" in case.op.pieces else ""
    return f"v = {case.op.pieces['value']}\n{turn}", turn


def _scan_whole(case: ShapeCase, program: KslProgram) -> str:
    """Use one cumsum. A reversed scan is the total minus what lies before, without flipping the
    rows.
    """
    if "reverse" in case.op.pieces:
        # The subtraction cancels digits where the total is large: float64 sums (`acc=f64`) are
        # among the knobs.
        return f"{_render_casts(case, program)}v = torch.cumsum(x, -1)\nreturn (x + v[:, -1:] - v){_render_result_cast(case)}"
    return f"{_render_casts(case, program)}return torch.cumsum({case.op.pieces['value']}, -1){_render_result_cast(case)}"


def _scan_carry(case: ShapeCase, program: KslProgram) -> str:
    before, after = _scan_ends(case)
    block = program["block"]
    # Without the carry every block begins at 0: wrong wherever a row is longer than a block.
    carried = "    carry = part[:, -1:]\n" if program["carry"] == "on" else ""
    return (
        f"dtype = x.dtype\n{_render_casts(case, program)}{before}out = torch.empty_like(v)\ncarry = torch.zeros_like(v[:, :1])\n"
        f"for lo in range(0, {_loop_end(program, str(case.sizes['C']), block)}, {block}):\n"
        f"    part = torch.cumsum(v[:, lo : lo + {block}], -1) + carry\n{carried}    out[:, lo : lo + {block}] = part\n"
        f"v = out\n{after}return v.to(dtype)"
    )


def _scan_matmul(case: ShapeCase, program: KslProgram) -> str:
    """Multiply blocks of columns by a triangle of ones, so that a scan is a matrix product."""
    before, after = _scan_ends(case)
    block = program["block"]
    return (
        f"dtype = x.dtype\n{_render_casts(case, program)}{before}out = torch.empty_like(v)\ncarry = torch.zeros_like(v[:, :1])\n"
        # Upper triangle: column j of the product sums the elements up to j.
        f"ones = torch.triu(torch.ones({block}, {block}, dtype=v.dtype))\n"
        f"for lo in range(0, {_loop_end(program, str(case.sizes['C']), block)}, {block}):\n"
        f"    p = v[:, lo : lo + {block}]\n    part = torch.matmul(p, ones[: p.shape[1], : p.shape[1]]) + carry\n"
        f"    carry = part[:, -1:]\n    out[:, lo : lo + {block}] = part\nv = out\n{after}return v.to(dtype)"
    )


def _pool_shifts(case: ShapeCase, program: KslProgram) -> str:
    """Combine the elements of all windows as strided views, one after the other."""
    size, step, rows = int(case.op.pieces["size"]), int(case.op.pieces["step"]), program["rows"]
    length = (case.sizes["L"] - size) // step + 1
    views = [f"p[:, {i} : {i + (length - 1) * step + 1} : {step}]" for i in range(size)]
    largest, fresh = case.op.name == "max_pool1d", program["fuse"] == "full"
    join = "v = torch.maximum(v, {})" if largest else "v = v + {}"
    if not fresh:
        join = "torch.maximum(v, {}, out=v)" if largest else "v += {}"
    # A copy: `p` is a view of the input, and in-place steps would write into it.
    lines = [f"v = {views[0]}.clone()", *(join.format(view) for view in views[1:])]
    lines += (
        [] if largest else [f"v = v {'* 1.0' if case.op.name == 'sum_pool1d' else f'/ {size}.0'}"]
    )
    lines += ["v = torch.relu(v)"] if case.op.name == "avg_pool_relu" else []
    body = "".join(f"    {line}\n" for line in lines)
    count = case.sizes["B"] * case.sizes["C"]
    return (
        f"out = torch.empty(({count}, {length}), dtype=x.dtype)\n{_render_casts(case, program)}flat = x.view({count}, {case.sizes['L']})\n"
        f"for lo in range(0, {_loop_end(program, str(count), rows)}, {rows}):\n    p = flat[lo : lo + {rows}]\n"
        f"{body}    out[lo : lo + {rows}] = v\nreturn out.view({case.sizes['B']}, {case.sizes['C']}, {length})"
    )


def _pool_unfold(case: ShapeCase, program: KslProgram) -> str:
    method = (
        "amax(-1)"
        if case.op.name == "max_pool1d"
        else "sum(-1)"
        if case.op.name == "sum_pool1d"
        else "mean(-1)"
    )
    value = f"x.unfold(-1, {case.op.pieces['size']}, {case.op.pieces['step']}).{method}"
    value = f"torch.relu({value})" if case.op.name == "avg_pool_relu" else value
    # `unfold` and a reduction may leave other strides than the reference has.
    return f"{_render_casts(case, program)}return {value}{_render_result_cast(case)}.contiguous()"


_BODIES: Mapping[str, Callable[[ShapeCase, KslProgram], str]] = {
    "chain.blocks": _chain_blocks,
    "chain.whole": _chain_whole,
    "row.two": _row_two,
    "row.online": _row_online,
    "row.whole": _row_whole,
    "mm.blocks": _mm_blocks,
    "mm.whole": _mm_whole,
    "diag.blocks": _diag_blocks,
    "diag.whole": _diag_whole,
    "scan.carry": _scan_carry,
    "scan.matmul": _scan_matmul,
    "scan.whole": _scan_whole,
    "pool.shifts": _pool_shifts,
    "pool.unfold": _pool_unfold,
}
