"""Depthwise convolutions of fp32: `depthwise.cu` specialised for a fusion group. Input and output
pass the memory once, sums are fp32's.

Serves groups of one input channel, where tensor cores have nothing to multiply; a group may have
several output channels.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.kernels.codegen.epilogue import CudaEpilogue, print_cuda_epilogue
from torch_cudal1.kernels.codegen.loop_nest import build_epilogue_nest
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.ops.convolutions import Convolution, find_convolution
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal

__all__ = ["is_depthwise", "lower_depthwise", "propose_depthwise"]

_ROWS = (8, 16, 4, 2, 1)
# Taps are unrolled, and the weights of a plane lie in registers.
_MAX_TAPS, _MAX_PRODUCTS = 64, 600
_REACH = 2**31 - 1


def is_depthwise(conv: Convolution) -> bool:
    """Whether these kernels serve the convolution."""
    plain = all(len(axis.classes) == 1 and axis.weight_step == 1 for axis in conv.axes)
    # With one input channel a group has nothing for a tensor core to multiply. A transposed
    # convolution of a stride has several classes of taps, which this kernel does not know.
    return (
        conv.channels == 1
        and conv.groups > 1
        and plain
        and conv.axes[1].taps * conv.axes[2].taps <= _MAX_TAPS
    )


def propose_depthwise(conv: Convolution, most: int) -> tuple[Proposal, ...]:
    """At most `most` proposals, with different numbers of outputs that a thread computes, one below
    the other.
    """
    _, y, x = conv.axes
    # Neighbouring threads have neighbouring columns: a warp along x where rows are long, several
    # rows a warp where they are short.
    width = min(32, max(4, 1 << (x.out - 1).bit_length()))
    # More rows than twice the output's height would compute nothing; taps and rows are unrolled
    # together.
    fitting = [
        rows
        for rows in _ROWS
        if rows * y.taps * x.taps <= _MAX_PRODUCTS and (rows == 1 or rows < 2 * y.out)
    ]
    return tuple(Proposal("conv", {"rows": rows, "width": width}) for rows in fitting[:most])


def lower_depthwise(traced: TracedProgram, proposal: Proposal) -> KernelSource:
    """The kernel of a proposal. Raises NotLowerableError when the fusion group has another form,
    ProgramError when the proposal is nonsense.
    """
    node, conv = find_convolution(tuple(o.node for o in traced.outputs))
    rows, width = proposal.number("rows", 0), proposal.number("width", 0)
    _, y, x = conv.axes
    # Threads of a warp read neighbouring columns: with another stride each would fetch its own
    # line.
    if not is_depthwise(conv) or conv.input_strides[4] != 1 or min(conv.input_strides) < 0:
        raise NotLowerableError(
            "no depthwise convolution of a tensor whose last axis is contiguous"
        )
    if width not in (4, 8, 16, 32) or rows < 1 or rows * y.taps * x.taps > _MAX_PRODUCTS:
        raise ProgramError(
            "proposal", f"{rows} rows and {width} columns for {y.taps} x {x.taps} taps"
        )
    epilogue = print_cuda_epilogue(build_epilogue_nest(traced.outputs, node))
    sizes = _define_sizes(conv, rows, width)
    grid = -(-sizes["UNITS"] * width // 256)
    # CUDA's first grid dimension has 31 bits.
    if grid > _REACH:
        raise NotLowerableError(f"{grid} blocks")
    text, name = _print_text(epilogue, sizes)
    values = (conv.input, conv.weight, epilogue.written, *epilogue.reads)
    cuda = CudaOptions(tuple(sorted(sizes.items())))
    return KernelSource(
        f"depthwise_{name}", text, tuple((value, "*") for value in values), grid, 8, cuda=cuda
    )


def _define_sizes(conv: Convolution, rows: int, width: int) -> dict[str, int]:
    z, y, x = conv.axes
    outputs = conv.groups * conv.outputs
    sizes = {
        "ROWS": rows,
        "LX": width,
        "OC": outputs,
        "EACH": conv.outputs,
        "UNITS": conv.images * outputs * z.out * -(-y.out // rows) * -(-x.out // width),
        "WS_OC": conv.weight_strides[1],
    }
    for name, axis, step in zip("ZYX", conv.axes, conv.weight_strides[3:], strict=True):
        sizes |= {
            f"I{name}": axis.size,
            f"O{name}": axis.out,
            f"S_{name}": axis.stride,
            f"LOW_{name}": axis.low,
            f"STEP_{name}": axis.step,
            f"K{name}": axis.taps,
            f"WS_{name}": step,
        }
    return sizes | {f"XS_{n}": s for n, s in zip("NCZY", conv.input_strides, strict=False)}


def _print_text(epilogue: CudaEpilogue, sizes: dict[str, int]) -> tuple[str, str]:
    head, _, body = (
        (files("torch_cudal1.kernels.templates") / "depthwise.cu")
        .read_text()
        .partition("typedef unsigned int u32")
    )
    body = "typedef unsigned int u32" + body
    words = {
        "TAIL_DEFINITION": epilogue.text,
        "TAIL_PARAMETERS": epilogue.parameters,
        "TAIL_ARGUMENTS": epilogue.arguments,
        "INDEX": "i64" if "i64 row" in epilogue.text else "int",
    }
    # The comment at the head of the file, which names these words, was split off before.
    for word, meant in words.items():
        body = body.replace(word, meant)
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256((body + repr(sorted(sizes.items()))).encode()).hexdigest()[:16]
    return head + body.replace(" DEPTHWISE(", f" depthwise_{digest}("), digest
