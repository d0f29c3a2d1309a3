"""Convolutions of fp32 on Hopper's tensor cores, in TF32 or at fp32's accuracy: `conv.cu`
specialised for an island.

Two launches: weights are rounded to TF32 and laid out for the tensor core, then the convolution
with what follows it. Input and output keep the layout they have, so that neither is copied into
another one first; both pass the memory once.

    products 1    one TF32 product, as cuDNN's own where the user's flags allow it: only with that right
    products 3    two TF32 pieces of each operand hold 22 bits; partial sums leave the tensor core every 8 or 16 of k: always
                  allowed
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.epilogue import CudaTail, cuda_tail
from torch_cudal1.kernels.codegen.loop_nest import schedule_tail
from torch_cudal1.kernels.expr.from_program import Trace
from torch_cudal1.kernels.expr.nodes import Conv
from torch_cudal1.kernels.ops.convolutions import Convolution, convolution_of
from torch_cudal1.kernels.proposal import Cuda, Kernel, Proposal
from torch_cudal1.kernels.templates.conv_tiles import Layout, Schedule, layout, read, schedules
from torch_cudal1.kernels.templates.depthwise import depthwise, depthwise_proposals, is_depthwise

__all__ = ["convolved", "proposals"]

_WARPGROUPS = 2
_REACH = 2**31 - 1
# of k: fp32 sums of so few are so exact that the tensor core's truncation shows after every second
# step
_SHALLOW = 256


@dataclass(frozen=True)
class _Cut:
    """A convolution, how it is cut, and what follows from that."""

    conv: Convolution
    schedule: Schedule
    layout: Layout
    tail: CudaTail


def proposals(traced: Trace, sm: int, rights: Collection[str], most: int) -> tuple[Proposal, ...]:
    """At most `most` ways to compute an island around a convolution on `sm_{sm}`; () where these
    kernels do not run.
    """
    _, conv = convolution_of(tuple(o.node for o in traced.outputs))
    if is_depthwise(conv):
        return depthwise_proposals(conv, most)
    if sm != 90:
        return ()  # wgmma is sm_90's own
    return tuple(one.proposal() for one in schedules(conv, 1 if "conv" in rights else 3, most))


def convolved(
    traced: Trace, proposal: Proposal, first: int
) -> tuple[tuple[Kernel, ...], dict[int, TensorSpec]]:
    """The kernels, and their scratch value `first` if any. Raises NotLowerableError when the island
    has another form.
    """
    if "rows" in proposal.config:
        return (depthwise(traced, proposal),), {}
    node, conv = convolution_of(tuple(o.node for o in traced.outputs))
    _check_memory(conv)
    schedule = read(proposal)
    made = layout(conv, schedule)
    tail = cuda_tail(schedule_tail(traced.outputs, node))
    cut = _Cut(conv, schedule, made, tail)
    sizes = _sizes(cut, _aligned_pairs(node, traced, made)) | {"SKIPS": int(node.transposed)}
    floats = (
        conv.groups
        * sizes["OCB"]
        * sizes["SLOTS"]
        * made.steps
        * sizes["BN"]
        * 8
        * schedule.products
    )
    scratch = {first: TensorSpec("float32", (floats,), (1,), "cuda")}
    text, name = _text(cut, sizes)
    defines = tuple(sorted(sizes.items()))
    tiles = math.prod(
        -(-a.places // t)
        for a, t in zip(conv.axes, (schedule.z, schedule.y, schedule.x), strict=True)
    )
    grid = conv.images * conv.groups * tiles * sizes["CLASSES"] * sizes["OCB"]
    if max(floats, grid) > _REACH or floats == 0:
        raise NotLowerableError(f"{floats} numbers of weights, {grid} blocks")
    weights, also = (conv.weight, first), (conv.weight,) if node.transposed else ()
    results = (conv.input, first, *also, tail.written, *tail.reads)
    pack = Kernel(
        f"pack_{name}",
        text,
        tuple((v, "*") for v in weights),
        -(-floats // 256),
        8,
        cuda=Cuda(defines, 0),
    )
    work = Cuda(defines, made.shared_bytes)
    main = Kernel(
        f"convolve_{name}", text, tuple((v, "*") for v in results), grid, 4 * _WARPGROUPS, cuda=work
    )
    return (pack, main), scratch


def _check_memory(conv: Convolution) -> None:
    image = sum(s * (n - 1) for s, n in zip(conv.input_strides[1:], _extents(conv), strict=True))
    if conv.input_strides[4] != 1 or image > _REACH or min(conv.input_strides) < 0:
        raise NotLowerableError(
            "the input's last axis is not contiguous, or an image is beyond 2^31 elements"
        )


def _extents(conv: Convolution) -> tuple[int, ...]:
    return (conv.groups * conv.channels, *(a.size for a in conv.axes))


def _aligned_pairs(node: Conv, traced: Trace, made: Layout) -> bool:
    """Whether two neighbours along x are one aligned float2 of the output."""
    spec = traced.outputs[0].spec
    steps = [
        stride for stride, size in zip(spec.strides[:-1], spec.shape[:-1], strict=True) if size > 1
    ]
    same = spec.shape == node.shape and spec.strides[-1] == 1
    return (
        made.together == 2
        and same
        and spec.shape[-1] % 2 == 0
        and all(step % 2 == 0 for step in steps)
    )


def _sizes(cut: _Cut, pairs: bool) -> dict[str, int]:
    conv, one, made = cut.conv, cut.schedule, cut.layout
    z, y, x = conv.axes
    columns = made.together * one.columns
    found = {
        "N": conv.images,
        "GROUPS": conv.groups,
        "C": conv.channels,
        "OC": conv.outputs,
        "CB": one.channels,
        "CR": min(one.channels, conv.channels),
        "CHUNKS": -(-conv.channels // one.channels),
        "BO": one.columns,
        "NX": made.together,
        "BN": columns,
        "OCB": -(-conv.outputs // one.columns),
        "MW": one.wide,
        "GROUPS_OF_4": _WARPGROUPS,
        "BLOCKS": one.blocks,
        "PLANE": made.plane,
        "VEC": made.vector,
        "X_SHIFT": made.shift,
        "KX": made.taps,
        "ZG": one.taps,
        "KS": made.steps,
        "STAGES": one.stages,
        "BOXES": made.boxes,
        "ZERO": made.zeros,
        "TAPS_ZY": made.table // made.steps // 4 * one.taps,
        "CLASSES": len(z.classes) * len(y.classes) * (1 if made.together > 1 else len(x.classes)),
        "CLASS_Y": len(y.classes),
        "CLASS_X": 1 if made.together > 1 else len(x.classes),
        "SLOTS": sum(_slots(cut)),
        "ACC": one.wide * columns // 2,
        "PAIRS": int(pairs),
        "STAGED": made.staged,
        "PRODUCTS": one.products,
        "PROMOTE": 1 if conv.depth <= _SHALLOW else 2,
    }
    for name, axis, tile, low, box in zip(
        "ZYX", conv.axes, (one.z, one.y, one.x), made.low, made.box, strict=True
    ):
        found |= {
            f"I{name}": axis.size,
            f"O{name}": axis.out,
            f"Q{name}": axis.places,
            f"S_{name}": axis.stride,
            f"P_{name}": len(axis.classes),
            f"T{name}": tile,
            f"LOW_{name}": low,
            f"B{name}": box,
            f"STEP_{name}": axis.step,
            f"WK_{name}": axis.weight_step,
        }
    found |= {f"XS_{n}": s for n, s in zip("NCZY", conv.input_strides, strict=False)}
    return found | {
        f"WS_{n}": s
        for n, s in zip(("G", "OC", "C", "Z", "Y", "X"), conv.weight_strides, strict=True)
    }


def _slots(cut: _Cut) -> list[int]:
    """Slots of each class."""
    z, y, x = cut.conv.axes
    alone = 1 if cut.layout.together > 1 else len(x.classes)
    chunks = -(-cut.conv.channels // cut.schedule.channels)
    return [
        chunks * a.count * b.count // cut.schedule.taps
        for a in z.classes
        for b in y.classes
        for _ in range(alone)
    ]


def _text(cut: _Cut, sizes: dict[str, int]) -> tuple[str, str]:
    """The C++ text, and the name its kernels share."""
    text = (files("torch_cudal1.kernels.templates") / "conv.cu").read_text()
    steps, widths = _steps(cut, sizes)
    words = {
        "MULTIPLY_DEFINITION": _multiply(widths),
        "CLASS_FUNCTIONS": _functions(cut),
        "STEP_DEFINITION": steps,
        "TAIL_DEFINITION": cut.tail.text,
        "TAIL_PARAMETERS": cut.tail.parameters,
        "TAIL_ARGUMENTS": cut.tail.arguments,
        "INDEX": "i64" if "i64 row" in cut.tail.text else "int",
    }
    head, _, body = text.partition("typedef unsigned int u32")
    body = "typedef unsigned int u32" + body
    for word, meant in words.items():
        body = body.replace(word, meant)
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256((body + repr(sorted(sizes.items()))).encode()).hexdigest()[:16]
    return head + body.replace(" PACK(", f" pack_{digest}(").replace(
        " CONVOLVE(", f" convolve_{digest}("
    ), digest


def _functions(cut: _Cut) -> str:
    """Facts of the classes as functions: a table would be module memory."""
    z, y, x = cut.conv.axes
    lines = []
    for name, axis in (("z", z), ("y", y), ("x", x)):
        lines.append(_function(f"{name}_count", [c.count for c in axis.classes]))
        lines.append(
            _function(f"{name}_low", [c.low - axis.low if c.count else 0 for c in axis.classes])
        )
        lines.append(_function(f"{name}_index", [c.index for c in axis.classes]))
    lines.append(
        _function("x_first", [(c.low - x.low) // x.step if c.count else 0 for c in x.classes])
    )
    before = [0]
    for count in _slots(cut):
        before.append(before[-1] + count)
    lines.append(_function("slots_before", before))
    return "\n".join(lines)


def _function(name: str, values: list[int]) -> str:
    text = str(values[-1])
    for i in range(len(values) - 2, -1, -1):
        if str(values[i]) != text or "?" in text:
            text = f"i == {i} ? {values[i]} : {text}"
    return f"__device__ __forceinline__ int {name}(int i) {{ return {text}; }}"


def _steps(cut: _Cut, sizes: dict[str, int]) -> tuple[str, set[int]]:
    """The products of each step of a slot, and the widths they have: classes along x that do not
    meet a tap are left out.

    Each class has an instruction of its own: accumulators that are now one part, now another of an
    instruction's make ptxas wait for every product (C7511).
    """
    made, one = cut.layout, cut.schedule
    lines, widths = [], set()
    for step in range(made.steps):
        tap = step * 8 // one.channels % made.taps
        for kind in _meeting(cut, tap) if made.together > 1 else [0]:
            columns, start = one.columns, kind * one.columns
            widths.add(columns)
            test = f"if constexpr (S == {step}) " if made.together > 1 else ""
            body = " ".join(
                f"MULTIPLY<{columns}, {row * (sizes['BN'] // 2) + start // 2}>(sum, a[{row}], weights + {start // 8 * 16});"
                for row in range(one.wide)
            )
            lines.append(f"  {test}{{ {body} }}")
    if made.together == 1:
        lines = lines[:1]
    head = "template <int S>\n__device__ __forceinline__ void step(float (&sum)[ACC], u32 (&a)[MW][4], u64 weights) {"
    return "\n".join([head, *lines, "}"]), widths


def _meeting(cut: _Cut, tap: int) -> list[int]:
    """The classes that meet a tap of the common grid."""
    x = cut.conv.axes[2]
    firsts = [(c.low - x.low) // x.step for c in x.classes]
    return [
        i
        for i, (c, at) in enumerate(zip(x.classes, firsts, strict=True))
        if c.count and 0 <= tap - at < c.count
    ]


def _multiply(widths: set[int]) -> str:
    """`MULTIPLY<WIDTH, FIRST>(d, a, b)`: one instruction of 64 x WIDTH x 8; its accumulators must
    be named one by one.
    """
    bodies = "\n".join(
        f"  if constexpr (WIDTH == {width}) {{\n{_wgmma(width)}\n  }}" for width in sorted(widths)
    )
    head = "template <int WIDTH, int FIRST>\n__device__ __forceinline__ void MULTIPLY(float (&d)[ACC], const u32 (&a)[4], u64 b) {"
    return f"{head}\n{bodies}\n}}"


def _wgmma(columns: int) -> str:
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[FIRST + {i}])' for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(4))
    return f"""    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k8.f32.tf32.tf32 {{{registers}}}, {{{inputs}}}, %{count + 4}, p, 1, 1;\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));"""
