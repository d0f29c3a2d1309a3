"""What can be said of a proposal's time before it is measured: the numbers of its island, and a
bound.

Sizes and counts only, from shapes: nothing of a tensor's content, no names. It orders nothing
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.cost import ROOFLINES, estimate
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.expr.from_program import Trace, trace
from torch_cudal1.kernels.ops.convolutions import Convolution, convolution_of
from torch_cudal1.kernels.ops.matmul import Product
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates import conv_tiles, gemm_tiles
from torch_cudal1.kernels.templates.gemm import parts_of

__all__ = ["Island", "island_of"]


@dataclass(frozen=True)
class Island:
    """An island's family, its `sizes` by name, and `floor_us`: the same rough bound for every
    proposal.
    """

    family: str
    sizes: Mapping[str, int]
    floor_us: float
    subject: Product | Convolution | None = None

    def bound_us(self, proposal: Proposal) -> float:
        """A bound on its time: the one that orders its family where there is one, else the
        island's; infinite for nonsense.
        """
        try:
            if isinstance(self.subject, Product):
                return 1e6 * gemm_tiles.bound_s(self.subject, gemm_tiles.read(proposal))
            if (
                isinstance(self.subject, Convolution) and "rows" not in proposal.config
            ):  # which a depthwise tile has
                return 1e6 * conv_tiles.bound_s(self.subject, conv_tiles.read(proposal))
        except (NotLowerableError, ProgramError):
            return math.inf
        return self.floor_us


def island_of(program: Program) -> Island | None:
    """The numbers of an island's reference Program; None where the kernels do not cover it."""
    try:
        traced = trace(program)
        subject = _subject(traced)
    except NotLowerableError:
        return None
    cost = estimate(program)
    line = ROOFLINES["cuda"]
    floor_s = max(cost.flops / line.flops_per_s, cost.least_bytes / line.bytes_per_s) + line.step_s
    sizes = {
        "steps": cost.steps,
        "bytes": cost.least_bytes,
        "element_bytes": traced.outputs[0].spec.torch_dtype.itemsize,
    }
    return Island(traced.family, sizes | _sizes(traced, subject), 1e6 * floor_s, subject)


def _subject(traced: Trace) -> Product | Convolution | None:
    if traced.family == "gemm":
        return parts_of(traced).product
    return (
        convolution_of(tuple(o.node for o in traced.outputs))[1]
        if traced.family == "conv"
        else None
    )


def _sizes(traced: Trace, subject: Product | Convolution | None) -> dict[str, int]:
    if isinstance(subject, Product):
        layout = {
            "left_along_k": int(subject.left.depth == 1),
            "right_along_k": int(subject.right.depth == 1),
        }
        return {name: getattr(subject, name) for name in ("batch", "m", "n", "k")} | layout
    if isinstance(subject, Convolution):
        sizes = {
            name: getattr(subject, name) for name in ("images", "groups", "channels", "outputs")
        }
        for name, axis in zip("zyx", subject.axes, strict=True):
            sizes |= {
                f"places_{name}": axis.places,
                f"taps_{name}": axis.taps,
                f"stride_{name}": axis.stride,
            }
        return sizes
    largest = max(traced.leaves.values(), key=lambda spec: spec.numel)
    return {
        "rows": math.prod(largest.shape[:-1]),
        "columns": largest.shape[-1] if largest.shape else 1,
    }
