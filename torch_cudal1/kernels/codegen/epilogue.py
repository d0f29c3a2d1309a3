"""Prints epilogues, the steps that follow a matrix product, for its tile: bias, activation,
residual, scale, and the stores; as Triton or as CUDA C++.

`row` counts the rows of all matrices of the batch, `column` the columns. The templates of the
element-wise steps are those of `ops.pointwise`. The C++ is translated from the same templates;
steps without a translation (chains through other types) are refused with NotLowerableError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen.loop_nest import Nest, Statement
from torch_cudal1.kernels.codegen.triton_text import Tile, TritonPrinter
from torch_cudal1.kernels.expr.affine import AffineExpr, Atom

__all__ = ["CudaEpilogue", "list_values", "print_cuda_epilogue", "print_triton_epilogue"]

_C_TYPES = {"tl.float32": "float", "tl.int64": "i64", "tl.int32": "int", "tl.int1": "bool"}
# A bool is a byte in memory; it is compared with 0 where it is read.
_C_LOADS = {
    "torch.float32": "float",
    "torch.int64": "i64",
    "torch.int32": "int",
    "torch.bool": "unsigned char",
}
# What a kernel text declares as `u16`, and reads by its own `from_half`.
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_C_HALF = "u16"
# columns: a store of 16 bytes of a half type, and of 8 bytes of fp32
_RUNS = (8, 2)
# The functions of the C++ text round and propagate NaN as Triton's do.
_C_NAMES = {
    "tl.where": "where",
    "tl.abs": "absolute",
    "tl.maximum": "nan_max",
    "tl.minimum": "nan_min",
    "tl.sqrt_rn": "__fsqrt_rn",
    "tl.div_rn": "__fdiv_rn",
    "tl.floor": "floorf",
    "tl.ceil": "ceilf",
}
_INFINITY = {
    'float("inf")': "__int_as_float(0x7f800000)",
    'float("-inf")': "__int_as_float(0xff800000)",
}
# A literal without `f` would be a double, and with it the whole expression.
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?![\w.])")
# Activations whose result is rounded to a half type have functions of their own, hopper/half_functions.cu.
_HALF_FUNCTIONS = (
    (
        re.compile(r"\((\w+) \* 0\.5f \* \(1\.0f \+ erff\(\1 \* 0\.7071067811865476f\)\)\)"),
        r"gelu(\1)",
    ),
    (
        re.compile(r"\(0\.5f \* (\w+) \* \(1\.0f \+ tanhf\((.+)\)\)\)"),
        r"(\1 * tanh_gate(\2))",
    ),
    (re.compile(r"__fdiv_rn\(1\.0f, 1\.0f \+ expf\(-(\w+)\)\)"), r"sigmoid(\1)"),
    (re.compile(r"__fdiv_rn\((\w+), 1\.0f \+ expf\(-\1\)\)"), r"(\1 * sigmoid(\1))"),
)
_FULL = re.compile(r"tl\.full\(\[\], (.+), (tl\.\w+)\)")
_CONVERSION = re.compile(r"\((\w+)\)\.to\((tl\.\w+)\)")


class _EpiloguePrinter(TritonPrinter):
    """Prints statements where `row`, `column` and the product (`acc`) exist already."""

    def __init__(self, nest: Nest, tile: Tile, masks: tuple[bool, bool]) -> None:
        super().__init__(nest, tile)
        self.row_mask, self.column_mask = masks
        # A product's tile may begin at any column, so that no variable is one number all over it.
        self.uniform = frozenset()

    def lines(self) -> list[str]:
        lines = [*self.index_lines("row", False), *self.index_lines("column", True)]
        for s in self.nest.statements:
            lines += [f"{s.name} = acc"] if s.kind == "product" else self.line(s)
        return lines


@dataclass(frozen=True)
class CudaEpilogue:
    """C++ text of `tail(x, row, column, ...)` and `place(row, column)`; the values it reads, the
    one it writes.

    `run`: so many columns, from a multiple of it on, are neighbours in memory, aligned to as many
    elements: 8, 2 or 1. For a kernel of a half type runs of 8 come with `tail_run(x, read, row,
    column, ...)`, the tail of eight columns, whose operands are read ahead by `tail_read`, with the
    kernel's own `read_run`, where they are neighbours too. `dtype`: of what is written; tails yield fp32, which the kernel rounds.
    """

    text: str
    parameters: str
    arguments: str
    reads: tuple[int, ...]
    written: int
    run: int
    dtype: torch.dtype

    @property
    def pairs(self) -> bool:
        """Whether two columns are one store."""
        return self.run > 1


def list_values(nest: Nest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Program values that are read and that are written, each once."""
    groups = [
        dict.fromkeys(s.value for s in nest.statements if s.kind == kind)
        for kind in ("load", "store")
    ]
    return tuple(sorted(groups[0])), tuple(sorted(groups[1]))


def print_triton_epilogue(
    nest: Nest, rows: int, columns: int, masks: tuple[bool, bool]
) -> list[str]:
    """Lines over `acc`, `row`, `column` and, where `masks` says so, `row_ok` and `column_ok`."""
    return _EpiloguePrinter(nest, Tile(rows, columns), masks).lines()


def print_cuda_epilogue(
    nest: Nest, half: torch.dtype | None = None, second: int | None = None
) -> CudaEpilogue:
    """The epilogue as C++ functions. `second`: the value that stands for the result of a second
    product, of the same shape; then tails take its sums behind the first ones, and read no memory
    for it.

    Raises NotLowerableError for several outputs, a dtype that is neither fp32 nor `half`, a template
    without a translation, or a second product that is needed at another place than the first.
    """
    stores = [s for s in nest.statements if s.kind == "store"]
    dtypes = (torch.float32, half)
    if len(stores) != 1 or (dtype := stores[0].tensor_dtype) not in dtypes or dtype is None:
        raise NotLowerableError(f"this product writes one tensor, of {dtypes}")
    printer, store = TritonPrinter(nest, Tile(1, 1)), stores[0]
    # Offsets that exceed 31 bits need 64, here as in Triton's text.
    number = "i64" if printer.needs_int64 else "int"
    digits = [
        _declare_in_c(line, number)
        for line in (*printer.index_lines("row", False), *printer.index_lines("column", True))
    ]
    sums = [s for s in nest.statements if s.kind == "load" and s.value == second]
    if any(not _is_own_element(nest, s.access) for s in sums):
        raise NotLowerableError("an element of C that needs another one of the second product")
    body = [
        f"const float {s.name} = second;" if s in sums else _print_c_statement(printer, s, dtype)
        for s in nest.statements
        if s.kind != "store"
    ]
    reads = tuple(value for value in list_values(nest)[0] if value != second)
    loads = {
        s.value: _find_c_load_type(s, half)
        for s in nest.statements
        if s.kind == "load" and s not in sums
    }
    parameters = "".join(f", const {loads[value]}* p{value}" for value in reads)
    result = store.operands[0].name
    of_second = "" if second is None else ", float second"
    lines = [
        f"__device__ __forceinline__ float tail(float acc{of_second}, {number} row, {number} column{parameters}) {{",
        *(f"  {line}" for line in (*digits, *body, f"return {result};")),
        "}",
        f"__device__ __forceinline__ i64 place({number} row, {number} column) {{",
        *(f"  {line}" for line in (*digits, f"return {printer.offset(store.access) or 0};")),
        "}",
    ]
    arguments = "".join(f", p{value}" for value in reads)
    run = next((run for run in _RUNS if _has_aligned_runs(nest, store.access, run)), 1)
    if half is not None and run == _RUNS[0]:
        lines += _print_run_tail(printer, digits, number, parameters, arguments, second)
    return CudaEpilogue("\n".join(lines), parameters, arguments, reads, store.value, run, dtype)


def _print_run_tail(
    printer: TritonPrinter,
    digits: Sequence[str],
    number: str,
    parameters: str,
    arguments: str,
    second: int | None,
) -> list[str]:
    """Lines of `tail_run`, of the tail of one column of it, of `tail_read`, which reads what
    `tail_run` works on, and of `tail_ahead`, which has the kernel's own `fetch_ahead` bring that.
    """
    nest, length = printer.nest, _RUNS[0]
    stores = [s for s in nest.statements if s.kind == "store"]
    loads = {
        s.name: "HalfRun" if s.node.dtype in _HALF_DTYPES else "FloatRun"
        for s in nest.statements
        if s.kind == "load"
        and s.value != second
        and s.node.dtype in (torch.float32, *_HALF_DTYPES)
        and _has_aligned_runs(nest, s.access, length)
    }
    body, reads, fetches = _print_run_operands(printer, loads, second)
    elements = "".join(f", float x_{name}" for name in loads)
    columns = "".join(f", element(read.x_{name}, i)" for name in loads)
    of_one, of_run, of_column = (
        (", float second", f", const float (&second)[{length}]", ", second[i]")
        if second is not None
        else ("", "", "")
    )
    at = f"{number} row, {number} column"
    return [
        f"__device__ __forceinline__ float tail_in_run(float acc{of_one}, {at}{parameters}{elements}) {{",
        *(f"  {line}" for line in (*digits, *body, f"return {stores[0].operands[0].name};")),
        "}",
        "struct TailRead {",
        *(f"  {kind} x_{name};" for name, kind in loads.items()),
        "};",
        f"__device__ __forceinline__ TailRead tail_read({at}{parameters}) {{",
        *(f"  {line}" for line in (*digits, "TailRead read;", *reads, "return read;")),
        "}",
        f"__device__ __forceinline__ void tail_run(float (&acc)[{length}]{of_run}, const TailRead& read, {at}{parameters}) {{",
        "#pragma unroll",
        f"  for (int i = 0; i < {length}; ++i) acc[i] = tail_in_run(acc[i]{of_column}, row, column + i{arguments}{columns});",
        "}",
        f"__device__ __forceinline__ void tail_ahead({at}{parameters}) {{",
        *(f"  {line}" for line in (*digits, *fetches)),
        "}",
    ]


def _print_run_operands(
    printer: TritonPrinter, loads: Mapping[str, str], second: int | None
) -> tuple[list[str], list[str], list[str]]:
    """Lines that compute one column, that read the operands `loads` of eight, and that fetch those."""
    body, reads, fetches = [], [], []
    (stored,) = (s for s in printer.nest.statements if s.kind == "store")
    for s in printer.nest.statements:
        if s.kind == "load" and s.value == second:
            body.append(f"const float {s.name} = second;")
        elif s.name in loads:
            body.append(f"const float {s.name} = x_{s.name};")
            address = f"p{s.value} + {printer.offset(s.access) or 0}"
            reads.append(f"read.x_{s.name} = read_run({address});")
            fetches.append(f"fetch_ahead({address});")
        elif s.kind != "store":
            body.append(_print_c_statement(printer, s, stored.tensor_dtype))
    return body, reads, fetches


def _is_own_element(nest: Nest, place: AffineExpr) -> bool:
    """Whether a row-major matrix of the product's shape is read at the product's own row and
    column.
    """
    rows, columns = (
        [a for a in nest.atoms if a.column is of_column] for of_column in (False, True)
    )
    step = 1
    for atom in reversed([*rows, *columns]):
        if atom.extent > 1 and place.coefficient(atom) != step:
            return False
        step *= atom.extent
    return not place.offset


def _has_aligned_runs(nest: Nest, place: AffineExpr, run: int) -> bool:
    """Whether `run` columns of any row, from a multiple of `run` on, are neighbours in memory, and
    begin at a multiple of `run` elements.
    """
    columns: list[Atom] = [a for a in nest.atoms if a.column and a.extent > 1]
    last = columns[-1] if columns else None
    rest = [step for atom, step in place.terms if atom is not last] + [place.offset]
    return (
        # Then their results are one store.
        last is not None
        and last.extent % run == 0
        and place.coefficient(last) == 1
        and all(step % run == 0 for step in rest)
    )


def _find_c_load_type(s: Statement, half: torch.dtype | None) -> str:
    kind = _C_HALF if s.node.dtype == half else _C_LOADS.get(str(s.node.dtype))
    if kind is None:
        raise NotLowerableError(f"an epilogue that reads {s.node.dtype} has no C++ form")
    return kind


def _print_c_statement(
    printer: TritonPrinter, statement: Statement, written: torch.dtype | None
) -> str:
    """A statement of a tail whose result is `written`."""
    kind = _C_TYPES[statement.node.compute]
    if statement.kind == "product":
        return f"const float {statement.name} = acc;"
    if statement.kind == "load":
        # Nothing writes an operand while the kernel runs: it may come through the read-only cache.
        text = f"__ldg(p{statement.value} + {printer.offset(statement.access) or 0})"
        if statement.node.dtype in _HALF_DTYPES:
            text = f"from_half({text})"
        return f"const {kind} {statement.name} = {text}{' != 0' if kind == 'bool' else ''};"
    if statement.kind == "position":
        return f"const i64 {statement.name} = {printer.offset(statement.access) or 0};"
    text = (
        statement.text.format(*(n.name for n in statement.operands))
        if statement.kind == "map"
        else statement.text
    )
    text = _translate_to_c(text)
    for pattern, function in _HALF_FUNCTIONS if written in _HALF_DTYPES else ():
        text = pattern.sub(function, text)
    return f"const {kind} {statement.name} = {text};"


def _translate_to_c(text: str) -> str:
    # The C++ functions that stand for maximum and minimum always propagate NaN.
    text = text.replace(", propagate_nan=tl.PropagateNan.ALL", "")
    for old, new in _INFINITY.items():
        text = text.replace(old, new)
    text = _FULL.sub(lambda m: f"({_C_TYPES[m[2]]})({m[1]})", text)
    text = _CONVERSION.sub(
        lambda m: f"({_C_TYPES[m[2]]})({m[1]})" if m[2] in _C_TYPES else m[0], text
    )
    text = re.sub(r"libdevice\.(\w+)\(", r"\1f(", text)
    text = re.sub(r"tl\.\w+(?=\()", lambda m: _C_NAMES.get(m[0], m[0]), text)
    text = _NUMBER.sub(r"\1f", text.replace("True", "true").replace("False", "false"))
    if (
        "tl." in text
        or ".to(" in text
        or "float(" in text.replace("(float)(", "").replace("__int_as_float(", "")
    ):
        raise NotLowerableError(f"no C++ form of {text!r}")
    return text


def _declare_in_c(line: str, number: str) -> str:
    # Both divisions round towards zero for what is never negative.
    return f"const {number} {line.replace('//', '/')};"
