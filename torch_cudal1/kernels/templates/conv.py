"""Convolutions of fp32 on Hopper's tensor cores, in TF32 or at fp32's accuracy: `conv.cu`
specialised for a fusion group.

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
from dataclasses import dataclass
from importlib.resources import files

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.epilogue import CudaEpilogue, print_cuda_epilogue
from torch_cudal1.kernels.codegen.loop_nest import build_epilogue_nest
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.expr.nodes import Conv
from torch_cudal1.kernels.ops.convolutions import HANDLERS, Convolution, find_convolution
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProblemModel,
    ProposalRequest,
    Template,
    TemplateInput,
    keep_lowerable,
    target_names,
)
from torch_cudal1.kernels.templates.conv_tiles import (
    BlockLayout,
    ConvSchedule,
    choose_schedules,
    estimate_s,
    lay_out,
    read_schedule,
)
from torch_cudal1.kernels.templates.depthwise import (
    is_depthwise,
    lower_depthwise,
    propose_depthwise,
)

__all__ = ["TEMPLATE"]

_WARPGROUPS = 2
_REACH = 2**31 - 1
# of k: fp32 sums of so few are so exact that the tensor core's truncation shows after every second
# step
# Partial sums leave the tensor core after every step up to this depth, after every second beyond.
_MAX_SHALLOW_DEPTH = 256


@dataclass(frozen=True)
class _TiledConv:
    """A convolution, its schedule, the layout that follows from it, and the epilogue."""

    conv: Convolution
    schedule: ConvSchedule
    layout: BlockLayout
    epilogue: CudaEpilogue


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    conv = _read_convolution(workload.trace)
    if is_depthwise(conv):
        proposals = propose_depthwise(conv, request.limit)
    elif request.sm != 90:
        # wgmma is sm_90's own: neither older nor newer GPUs run this kernel.
        return ()
    else:
        # Without the right a candidate is held to the error of eager's fp32, which takes three
        # products.
        products = 1 if "conv" in request.tf32_ops else 3
        schedules = choose_schedules(conv, products, request.limit)
        proposals = tuple(schedule.proposal() for schedule in schedules)
    return keep_lowerable(_lower, workload, proposals)


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    # Only a depthwise proposal has rows.
    if "rows" in proposal.config:
        return LoweredKernels((lower_depthwise(workload.trace, proposal),), workload.output_specs)
    kernels, scratch = _lower_tiled(workload.trace, proposal, workload.program.value_count)
    return LoweredKernels(kernels, workload.output_specs | scratch)


def _read_convolution(traced: TracedProgram) -> Convolution:
    return find_convolution(tuple(output.node for output in traced.outputs))[1]


def _lower_tiled(
    traced: TracedProgram, proposal: Proposal, first: int
) -> tuple[tuple[KernelSource, ...], dict[int, TensorSpec]]:
    """The kernels, and their scratch value `first` if any. Raises NotLowerableError when the fusion group
    has another form.
    """
    node, conv = find_convolution(tuple(o.node for o in traced.outputs))
    _check_memory(conv)
    schedule = read_schedule(proposal)
    block_layout = lay_out(conv, schedule)
    epilogue = print_cuda_epilogue(build_epilogue_nest(traced.outputs, node))
    cut = _TiledConv(conv, schedule, block_layout, epilogue)
    sizes = _define_sizes(cut, _has_aligned_pairs(node, traced, block_layout)) | {
        "SKIPS": int(node.transposed)
    }
    floats = (
        conv.groups
        * sizes["OCB"]
        * sizes["SLOTS"]
        * block_layout.steps
        * sizes["BN"]
        * 8
        * schedule.products
    )
    # The weights as the tensor core reads them: a launch of its own writes them before the
    # convolution.
    scratch = {first: TensorSpec("float32", (floats,), (1,), "cuda")}
    text, name = _print_text(cut, sizes)
    defines = tuple(sorted(sizes.items()))
    tiles = math.prod(
        -(-a.places // t)
        for a, t in zip(conv.axes, (schedule.z, schedule.y, schedule.x), strict=True)
    )
    # Every class of taps that does not share a block with others has blocks of its own.
    grid = conv.images * conv.groups * tiles * sizes["CLASSES"] * sizes["OCB"]
    if max(floats, grid) > _REACH or floats == 0:
        raise NotLowerableError(f"{floats} numbers of weights, {grid} blocks")
    # A transposed convolution sums again what is NaN, over the taps that exist: zeros beside the
    # input times a weight that is NaN would spread it. For that it takes the weights as they are.
    weights, raw_weights = (conv.weight, first), (conv.weight,) if node.transposed else ()
    results = (conv.input, first, *raw_weights, epilogue.written, *epilogue.reads)
    pack = KernelSource(
        f"pack_{name}",
        text,
        tuple((v, "*") for v in weights),
        -(-floats // 256),
        8,
        cuda=CudaOptions(defines, 0),
    )
    work = CudaOptions(defines, block_layout.shared_bytes)
    main = KernelSource(
        f"convolve_{name}", text, tuple((v, "*") for v in results), grid, 4 * _WARPGROUPS, cuda=work
    )
    return (pack, main), scratch


def _check_memory(conv: Convolution) -> None:
    image = sum(
        s * (n - 1)
        for s, n in zip(conv.input_strides[1:], _compute_input_extents(conv), strict=True)
    )
    # Copies move neighbours along x, and offsets within an image are 32-bit in the kernel.
    if conv.input_strides[4] != 1 or image > _REACH or min(conv.input_strides) < 0:
        raise NotLowerableError(
            "the input's last axis is not contiguous, or an image is beyond 2^31 elements"
        )


def _compute_input_extents(conv: Convolution) -> tuple[int, ...]:
    return (conv.groups * conv.channels, *(a.size for a in conv.axes))


def _has_aligned_pairs(node: Conv, traced: TracedProgram, block_layout: BlockLayout) -> bool:
    """Whether two neighbours along x are one aligned float2 of the output."""
    spec = traced.outputs[0].spec
    steps = [
        stride for stride, size in zip(spec.strides[:-1], spec.shape[:-1], strict=True) if size > 1
    ]
    same = spec.shape == node.shape and spec.strides[-1] == 1
    return (
        block_layout.together == 2
        and same
        and spec.shape[-1] % 2 == 0
        and all(step % 2 == 0 for step in steps)
    )


def _define_sizes(cut: _TiledConv, pairs: bool) -> dict[str, int]:
    """The C++ text's macros."""
    return {
        **_define_convolution(cut.conv),
        **_define_axes(cut),
        **_define_schedule(cut),
        **_define_layout(cut),
        "PAIRS": int(pairs),
    }


def _define_convolution(conv: Convolution) -> dict[str, int]:
    """Extents and strides of input and weights; those of the axes are in `_define_axes`."""
    sizes = {"N": conv.images, "GROUPS": conv.groups, "C": conv.channels, "OC": conv.outputs}
    sizes |= {f"XS_{n}": s for n, s in zip("NCZY", conv.input_strides, strict=False)}
    return sizes | {
        f"WS_{n}": s
        for n, s in zip(("G", "OC", "C", "Z", "Y", "X"), conv.weight_strides, strict=True)
    }


def _define_axes(cut: _TiledConv) -> dict[str, int]:
    """Extents of each axis of space, and how a tile lies on it."""
    sizes: dict[str, int] = {}
    for name, axis, tile, low, box in zip(
        "ZYX",
        cut.conv.axes,
        (cut.schedule.z, cut.schedule.y, cut.schedule.x),
        cut.layout.low,
        cut.layout.box,
        strict=True,
    ):
        sizes |= {
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
    return sizes


def _define_schedule(cut: _TiledConv) -> dict[str, int]:
    """Channels, columns and stages of a block."""
    conv, schedule = cut.conv, cut.schedule
    columns = cut.layout.together * schedule.columns
    return {
        "CB": schedule.channels,
        "CR": min(schedule.channels, conv.channels),
        "CHUNKS": -(-conv.channels // schedule.channels),
        "BO": schedule.columns,
        "BN": columns,
        "OCB": -(-conv.outputs // schedule.columns),
        "MW": schedule.wide,
        "GROUPS_OF_4": _WARPGROUPS,
        "BLOCKS": schedule.blocks,
        "ZG": schedule.taps,
        "STAGES": schedule.stages,
        "ACC": schedule.wide * columns // 2,
        "PRODUCTS": schedule.products,
        # The accumulator truncates: it is emptied every step where the reference's sum is that
        # exact.
        "PROMOTE": 1 if conv.depth <= _MAX_SHALLOW_DEPTH else 2,
    }


def _define_layout(cut: _TiledConv) -> dict[str, int]:
    """Classes of taps, slots of weights, and what lies where in shared memory."""
    block_layout = cut.layout
    z, y, x = cut.conv.axes
    classes_x = 1 if block_layout.together > 1 else len(x.classes)
    return {
        "NX": block_layout.together,
        "PLANE": block_layout.plane,
        "VEC": block_layout.vector,
        "X_SHIFT": block_layout.shift,
        "KX": block_layout.taps,
        "KS": block_layout.steps,
        "BOXES": block_layout.boxes,
        "ZERO": block_layout.zeros,
        "TAPS_ZY": block_layout.table // block_layout.steps // 4 * cut.schedule.taps,
        "CLASSES": len(z.classes) * len(y.classes) * classes_x,
        "CLASS_Y": len(y.classes),
        "CLASS_X": classes_x,
        "SLOTS": sum(_count_slots(cut)),
        "STAGED": block_layout.staged,
    }


def _count_slots(cut: _TiledConv) -> list[int]:
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


def _print_text(cut: _TiledConv, sizes: dict[str, int]) -> tuple[str, str]:
    """The C++ text, and the name its kernels share."""
    text = (files("torch_cudal1.kernels.templates") / "conv.cu").read_text()
    steps, widths = _print_steps(cut, sizes)
    words = {
        "MULTIPLY_DEFINITION": _print_multiply(widths),
        "CLASS_FUNCTIONS": _print_class_functions(cut),
        "STEP_DEFINITION": steps,
        "TAIL_DEFINITION": cut.epilogue.text,
        "TAIL_PARAMETERS": cut.epilogue.parameters,
        "TAIL_ARGUMENTS": cut.epilogue.arguments,
        "INDEX": "i64" if "i64 row" in cut.epilogue.text else "int",
    }
    # The comment at the head of the file names the words that are replaced: it must keep them.
    head, _, body = text.partition("typedef unsigned int u32")
    body = "typedef unsigned int u32" + body
    for word, meant in words.items():
        body = body.replace(word, meant)
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256((body + repr(sorted(sizes.items()))).encode()).hexdigest()[:16]
    return head + body.replace(" PACK(", f" pack_{digest}(").replace(
        " CONVOLVE(", f" convolve_{digest}("
    ), digest


def _print_class_functions(cut: _TiledConv) -> str:
    """Facts of the classes as functions: a table would be module memory."""
    z, y, x = cut.conv.axes
    lines = []
    for name, axis in (("z", z), ("y", y), ("x", x)):
        lines.append(_print_function(f"{name}_count", [c.count for c in axis.classes]))
        lines.append(
            _print_function(
                f"{name}_low", [c.low - axis.low if c.count else 0 for c in axis.classes]
            )
        )
        lines.append(_print_function(f"{name}_index", [c.index for c in axis.classes]))
    lines.append(
        _print_function("x_first", [(c.low - x.low) // x.step if c.count else 0 for c in x.classes])
    )
    before = [0]
    for count in _count_slots(cut):
        before.append(before[-1] + count)
    lines.append(_print_function("slots_before", before))
    return "\n".join(lines)


def _print_function(name: str, values: list[int]) -> str:
    # Selects instead of a table: a table would be module memory, with which a cubin is refused.
    text = str(values[-1])
    for i in range(len(values) - 2, -1, -1):
        if str(values[i]) != text or "?" in text:
            text = f"i == {i} ? {values[i]} : {text}"
    return f"__device__ __forceinline__ int {name}(int i) {{ return {text}; }}"


def _print_steps(cut: _TiledConv, sizes: dict[str, int]) -> tuple[str, set[int]]:
    """The products of each step of a slot, and the widths they have: classes along x that do not
    meet a tap are left out.

    Each class has an instruction of its own. Where instructions share some of their accumulators,
    ptxas waits for every product (its warning C7511).
    """
    block_layout, schedule = cut.layout, cut.schedule
    lines, widths = [], set()
    for step in range(block_layout.steps):
        tap = step * 8 // schedule.channels % block_layout.taps
        for kind in _find_classes_at(cut, tap) if block_layout.together > 1 else [0]:
            columns, start = schedule.columns, kind * schedule.columns
            widths.add(columns)
            test = f"if constexpr (S == {step}) " if block_layout.together > 1 else ""
            body = " ".join(
                f"MULTIPLY<{columns}, {row * (sizes['BN'] // 2) + start // 2}>(sum, a[{row}], weights + {start // 8 * 16});"
                for row in range(schedule.wide)
            )
            lines.append(f"  {test}{{ {body} }}")
    # Without classes side by side all steps are the same line: a template serves them all.
    if block_layout.together == 1:
        lines = lines[:1]
    head = "template <int S>\n__device__ __forceinline__ void step(float (&sum)[ACC], u32 (&a)[MW][4], u64 weights) {"
    return "\n".join([head, *lines, "}"]), widths


def _find_classes_at(cut: _TiledConv, tap: int) -> list[int]:
    """The classes that meet a tap of the common grid."""
    x = cut.conv.axes[2]
    firsts = [(c.low - x.low) // x.step for c in x.classes]
    return [
        i
        for i, (c, at) in enumerate(zip(x.classes, firsts, strict=True))
        if c.count and 0 <= tap - at < c.count
    ]


def _print_multiply(widths: set[int]) -> str:
    """`MULTIPLY<WIDTH, FIRST>(d, a, b)`: one instruction of 64 x WIDTH x 8; its accumulators must
    be named one by one.
    """
    bodies = "\n".join(
        f"  if constexpr (WIDTH == {width}) {{\n{_print_wgmma(width)}\n  }}"
        for width in sorted(widths)
    )
    head = "template <int WIDTH, int FIRST>\n__device__ __forceinline__ void MULTIPLY(float (&d)[ACC], const u32 (&a)[4], u64 b) {"
    return f"{head}\n{bodies}\n}}"


def _print_wgmma(columns: int) -> str:
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[FIRST + {i}])' for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(4))
    return f"""    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k8.f32.tf32.tf32 {{{registers}}}, {{{inputs}}}, %{count + 4}, p, 1, 1;\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));"""


def _describe(conv: Convolution) -> dict[str, int]:
    sizes = {name: getattr(conv, name) for name in ("images", "groups", "channels", "outputs")}
    for name, axis in zip("zyx", conv.axes, strict=True):
        sizes |= {
            f"places_{name}": axis.places,
            f"taps_{name}": axis.taps,
            f"stride_{name}": axis.stride,
        }
    return sizes


def _bound_s(conv: Convolution, proposal: Proposal) -> float | None:
    """None for a depthwise tile, which has rows."""
    return None if "rows" in proposal.config else estimate_s(conv, read_schedule(proposal))


TEMPLATE = Template(
    family="conv",
    summary="Convolutions over one to three dimensions, transposed, grouped and depthwise ones "
    "included, with the element-wise steps after them.",
    architectures="sm_90; depthwise ones sm_80 and newer",
    dtypes="fp32",
    propose=_propose,
    lower=_lower,
    # a stride may leave input elements out
    fusion=FusionRules("product", target_names(HANDLERS), partial_reads=target_names(HANDLERS)),
    handlers=HANDLERS,
    problem=ProblemModel(_read_convolution, _describe, _bound_s),
    is_shortlisted=True,
)
