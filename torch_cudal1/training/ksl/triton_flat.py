"""Renders Triton kernels for operations that go over elements one by one: fused chains, broadcast
rewrites, scans and pooling.

Sizes are arguments of the kernels and blocks are constants, so that tasks of one kind share what
Triton compiled. A launch by Triton takes 45 to 75 us of the host, where a pass over 32 MiB takes 25
us of the GPU (benchmarks/LOG.md); programs therefore keep the compiled kernel and launch it
directly. `mask=off` runs over whole blocks only and leaves the rest unwritten; `acc=f16` rounds
intermediate values to half precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.module_template import ShapeCase

__all__ = [
    "HEAD",
    "PROGRAMS",
    "RENDERERS",
    "render_block_count",
    "render_launch",
    "render_rounding",
]

# A module is for one shape, so sizes and constants are the same in every launch. Beside them Triton
# specialises on the device and on which addresses are multiples of 16: these are the key.
HEAD = '''import triton
import triton.language as tl
from triton.language.extra import libdevice

COMPILED = {}


def launch(kernel, grid, tensors, numbers, constants, **options):
    """What was compiled for these numbers and tensors that lie like these; Triton's own launch looks at them anew each time."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    place = (kernel, tensors[0].device, *(address % 16 for address in addresses))
    if place in COMPILED:
        COMPILED[place][grid](*addresses, *numbers, *constants.values())
        return
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if compiled is not None:
        COMPILED[place] = compiled
'''
# Programs of a persistent launch: four for each of the 132 multiprocessors of an H100 or H200.
PROGRAMS = 528
_ROUND = "v = v.to(tl.float16).to(tl.float32)"


def render_rounding(program: KslProgram, name: str = "v") -> list[str]:
    """The statement that rounds a value to half precision, if the program asks for it."""
    # Through half precision and back: the kernel goes on in float32, so only digits are lost and no
    # operator needs another type.
    return [_ROUND.replace("v", name, 2)] if program["acc"] == "f16" else []


def render_block_count(program: KslProgram, size: str, block: int) -> str:
    """The number of blocks of a size that are computed, as an expression."""
    # Without a mask the last, unfilled block is left out instead of being read beyond the end: the
    # result is wrong on ragged shapes, and the GPU's memory is not touched where it is not the
    # program's.
    return f"-(-{size} // {block})" if program["mask"] == "on" else f"{size} // {block}"


def render_launch(
    kernel: str,
    grid: str,
    tensors: Sequence[str],
    numbers: str,
    constants: Mapping[str, int | str],
    **options: str,
) -> str:
    """Render the statement that launches a kernel on a grid of three numbers. Arguments stand in
    the order of the kernel's parameters.
    """
    # The launch passes these by position to the compiled kernel.
    named = ", ".join(f'"{name}": {value}' for name, value in constants.items())
    option_text = "".join(f", {name}={value}" for name, value in options.items())
    return (
        f"launch({kernel}, {grid}, ({', '.join(tensors)}), ({numbers}), {{{named}}}{option_text})"
    )


def _render_mask(program: KslProgram, condition: str = "inside") -> str:
    return f", mask={condition}" if program["mask"] == "on" else ""


def _render_kernel(name: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"\n\n@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}\n"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _loop_over_blocks(program: KslProgram, lines: Sequence[str]) -> list[str]:
    """Wrap the lines for one block: the program's own block, or a loop over blocks in a persistent
    launch.
    """
    if program["persist"] == "off":
        return ["block = tl.program_id(0)", *lines]
    return ["for block in range(tl.program_id(0), blocks, tl.num_programs(0)):", *_indent(lines)]


def _render_grid(program: KslProgram, size: str, block: int) -> tuple[str, str]:
    """Render the statement that counts blocks, and the grid."""
    count = f"blocks = {render_block_count(program, size, block)}"
    # A persistent launch has no more programs than the GPU runs at once; each goes on to further
    # blocks.
    return count, f"(min(blocks, {PROGRAMS}), 1, 1)" if program[
        "persist"
    ] == "on" else "(blocks, 1, 1)"


def _uses(steps: Sequence[str], name: str) -> bool:
    # Whole words: the input `b` is also a letter of `libdevice`.
    return any(re.search(rf"\b{name}\b", step) for step in steps)


def _render_chain(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    steps, block, first = case.op.triton_steps, program.number("block"), case.op.names[0]
    # "split" goes through memory between its two passes, "swapped" applies the steps in the wrong
    # order.
    passes = {
        "full": [steps],
        "split": [steps[:1], steps[1:]],
        "swapped": [(*steps[1:], *steps[:1])],
    }[program["fuse"]]
    count, grid = _render_grid(program, str(case.sizes["R"] * case.sizes["C"]), block)
    head, calls = HEAD, [f"out = torch.empty_like({first})", count]
    for number, part in enumerate(passes):
        # A kernel gets the inputs that its steps name: a load without a use would cost the bytes
        # that fusing saves.
        used = [argument for argument in case.op.arguments[1:] if _uses(part, argument.name)]
        head += _render_chain_kernel(
            f"chain_{number}",
            program,
            part,
            [(argument.name, argument.sizes == ("C",)) for argument in used],
        )
        # The second pass reads and writes one tensor: each element is read by the program that
        # writes it.
        source = first if number == 0 else "out"
        names = [source, *(argument.name for argument in used), "out"]
        calls.append(
            render_launch(
                f"chain_{number}",
                grid,
                names,
                f"{case.sizes['R'] * case.sizes['C']}, {case.sizes['C']}, blocks",
                {"BLOCK": block},
                num_warps=program["warps"],
            )
        )
    return head, "\n".join([*calls, "return out"])


def _render_chain_kernel(
    name: str, program: KslProgram, steps: Sequence[str], used: Sequence[tuple[str, bool]]
) -> str:
    """Render one pass of a chain. `used`: names of the other inputs, and whether each is one row
    that is broadcast.
    """
    mask = _render_mask(program)
    loads = [
        # The remainder broadcasts one row over all: `at` counts elements of the whole tensor.
        f"{name} = tl.load({name}_ptr + at{' % columns' if row else ''}{mask}).to(tl.float32)"
        for name, row in used
    ]
    lines = ["at = block * BLOCK + tl.arange(0, BLOCK)", "inside = at < size"]
    lines += [f"v = tl.load(v_ptr + at{mask}).to(tl.float32)", *loads]
    for step in steps:
        lines += [step, *render_rounding(program)]
    lines += [f"tl.store(out_ptr + at, v{mask})"]
    pointers = ["v_ptr", *(f"{name}_ptr" for name, _ in used), "out_ptr"]
    return _render_kernel(
        name,
        [*pointers, "size", "columns", "blocks", "BLOCK: tl.constexpr"],
        _loop_over_blocks(program, lines),
    )


def _render_diag(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render a product with a diagonal by tiles. `axis=swapped` takes the factors along the wrong
    axis.
    """
    block_m, block_n = program.number("block_m"), program.number("block_n")
    mask, right = _render_mask(program), program["axis"] == "right"
    value = case.op.pieces["value"]
    lines = [
        "r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]",
        # Columns are the first axis of the grid, which may have 2^31 - 1 programs, rows the second
        # with 65,535.
        "c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
        "inside = (r < rows) & (c < columns)",
        f"x = tl.load(x_ptr + r * columns + c{mask}).to(tl.float32)",
    ]
    if "d" in case.op.names:
        lines.append(
            # Swapped factors are read modulo their length: wrong values, but no access beyond the
            # end.
            f"d = tl.load(d_ptr + {'r' if right else 'c % rows'}{_render_mask(program, 'r < rows' if right else 'c < columns')})"
        )
    if "e" in case.op.names:
        lines.append(
            f"e = tl.load(e_ptr + {'c' if right else 'r % columns'}{_render_mask(program, 'c < columns' if right else 'r < rows')})"
        )
    lines += [f"v = {value}", *render_rounding(program)]
    lines += ["v = tl.where(c <= r, v, 0.0)"] if "lower" in case.op.pieces else []
    lines += [f"tl.store(out_ptr + r * columns + c, v{mask})"]
    pointers = [f"{name}_ptr" for name in case.op.names]
    kernel = _render_kernel(
        "diagonal",
        [*pointers, "out_ptr", "rows", "columns", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"],
        lines,
    )
    grid = f"({render_block_count(program, 'columns', block_n)}, {render_block_count(program, 'rows', block_m)}, 1)"
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    call = render_launch(
        "diagonal",
        grid,
        [*case.op.names, "out"],
        "rows, columns",
        constants,
        num_warps=program["warps"],
    )
    body = f"rows, columns = x.shape\nout = torch.empty_like(x)\n{call}\nreturn out"
    return HEAD + kernel, body


def _scan_position(case: ShapeCase) -> str:
    """The index in its row of a scan's p-th element."""
    # A reversed scan reads and writes from the end, so that the rows need not be turned around in
    # memory.
    return "columns - 1 - p" if "reverse" in case.op.pieces else "p"


def _render_scan_one(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render a scan with whole rows in registers."""
    rows = program.number("rows")
    place, inside = _scan_position(case), "(r < rows) & (p < columns)"
    # 0 is neutral for a sum: what is read beyond the row's end changes no prefix.
    load = f", mask={inside}, other=0.0" if program["mask"] == "on" else ", mask=r < rows"
    lines = [
        "r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]",
        "p = tl.arange(0, BLOCK)[None, :]",
        f"x = tl.load(x_ptr + r * columns + {_wrap_position(case, program)}{load}).to(tl.float32)",
        f"v = {case.op.pieces['value']}",
        *render_rounding(program),
        "v = tl.cumsum(v, axis=1)",
        *render_rounding(program),
        f"tl.store(out_ptr + r * columns + {place}, v, mask={inside})",
    ]
    arguments = ["x_ptr", "out_ptr", "rows", "columns", "ROWS: tl.constexpr", "BLOCK: tl.constexpr"]
    # `tl.arange` takes powers of two only.
    constants = {"ROWS": rows, "BLOCK": _next_power_of_two(case.sizes["C"])}
    return HEAD + _render_kernel("scan", arguments, lines), _render_scan_call(
        program, render_block_count(program, "rows", rows), constants
    )


def _render_scan_call(program: KslProgram, blocks: str, constants: Mapping[str, int]) -> str:
    call = render_launch(
        "scan",
        f"({blocks}, 1, 1)",
        ["x", "out"],
        "rows, columns",
        constants,
        num_warps=program["warps"],
    )
    return f"rows, columns = x.shape\nout = torch.empty_like(x)\n{call}\nreturn out"


def _wrap_position(case: ShapeCase, program: KslProgram) -> str:
    """The index of a scan's p-th element. Without a mask, indices beyond the row's end wrap around
    to its beginning: the values are wrong, but all are of this row.
    """
    place = _scan_position(case)
    if program["mask"] == "on":
        return place
    return f"({place} + columns) % columns"


def _render_scan_carry(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render a scan by blocks of columns one after the other, with the sum so far carried along."""
    block, on = program.number("block"), program["mask"] == "on"
    lines = [
        "r = tl.program_id(0)",
        "carry = 0.0",
        f"for start in range(0, {'columns' if on else 'columns // BLOCK * BLOCK'}, BLOCK):",
        "    p = start + tl.arange(0, BLOCK)",
        f"    x = tl.load(x_ptr + r * columns + {_scan_position(case)}{', mask=p < columns, other=0.0' if on else ''}).to(tl.float32)",
        f"    v = {case.op.pieces['value']}",
        *_indent(render_rounding(program)),
        # The block's sum, taken before the carry is added, or the carry would count twice.
        "    total = tl.sum(v, axis=0)",
        "    v = tl.cumsum(v, axis=0) + carry",
        *_indent(render_rounding(program)),
        *(["    carry += total"] if program["carry"] == "on" else []),
        f"    tl.store(out_ptr + r * columns + {_scan_position(case)}, v{', mask=p < columns' if on else ''})",
    ]
    kernel = _render_kernel(
        "scan", ["x_ptr", "out_ptr", "rows", "columns", "BLOCK: tl.constexpr"], lines
    )
    return HEAD + kernel, _render_scan_call(program, "rows", {"BLOCK": block})


def _render_pool(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render pooling with one output for each element of a block; a window is read one place after
    the other.
    """
    size, step, block = (
        int(case.op.pieces["size"]),
        int(case.op.pieces["step"]),
        program.number("block"),
    )
    largest = case.op.name == "max_pool1d"
    # The neutral element of the combination.
    join, empty = ("tl.maximum(v, x)", "float('-inf')") if largest else ("v + x", "0.0")
    lines = [
        "at = block * BLOCK + tl.arange(0, BLOCK)",
        "inside = at < size",
        "base = at // length * columns + at % length * STEP",
        f"v = tl.full((BLOCK,), {empty}, tl.float32)",
        # static_range unrolls, so that the loads of a window can be in flight together.
        f"for k in {'tl.static_range(SIZE)' if program['unroll'] == 'on' else 'range(SIZE)'}:",
        f"    x = tl.load(x_ptr + base + k{_render_mask(program)}).to(tl.float32)",
        f"    v = {join}",
        *_indent(render_rounding(program)),
        # The sum is written as a mean times its size in the reference: here the two cancel.
        *([] if largest or case.op.name == "sum_pool1d" else ["v = v / SIZE"]),
        *(["v = tl.maximum(v, 0.0)"] if case.op.name == "avg_pool_relu" else []),
        f"tl.store(out_ptr + at, v{_render_mask(program)})",
    ]
    constants = [f"{name}: tl.constexpr" for name in ("STEP", "SIZE", "BLOCK")]
    kernel = _render_kernel(
        "pool",
        ["x_ptr", "out_ptr", "size", "length", "columns", "blocks", *constants],
        _loop_over_blocks(program, lines),
    )
    length = (case.sizes["L"] - size) // step + 1
    count, grid = _render_grid(program, "out.numel()", block)
    numbers = f"out.numel(), {length}, {case.sizes['L']}, blocks"
    call = render_launch(
        "pool",
        grid,
        ["x", "out"],
        numbers,
        {"STEP": step, "SIZE": size, "BLOCK": block},
        num_warps=program["warps"],
    )
    body = (
        f"out = torch.empty(({case.sizes['B']}, {case.sizes['C']}, {length}), dtype=x.dtype, device=x.device)\n"
        f"{count}\n{call}\nreturn out"
    )
    return HEAD + kernel, body


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


RENDERERS: Mapping[str, Callable[[ShapeCase, KslProgram], tuple[str, str]]] = {
    "chain.flat": _render_chain,
    "diag.tile": _render_diag,
    "scan.one": _render_scan_one,
    "scan.carry": _render_scan_carry,
    "pool.flat": _render_pool,
}
