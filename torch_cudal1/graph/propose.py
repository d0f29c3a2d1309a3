"""Turns a region into other Programs that compute the same: its rewritten form, and its islands replaced by kernels.

Every proposal is only that: the judge decides. Shapes, dtypes and strides of the outputs are kept by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_cudal1.errors import NotLowerableError
from torch_cudal1.graph.lower import lower, raise_to_fx
from torch_cudal1.graph.partition import with_inputs
from torch_cudal1.graph.rewrite import RULES, rewrite
from torch_cudal1.program.check import is_random_program
from torch_cudal1.program.cost import ROOFLINES, estimate
from torch_cudal1.program.model import Program
from torch_cudal1.records import Region

__all__ = ["Variant", "rewritten"]


_WORTH_JUDGING = 1.02  # estimated time before over after


@dataclass(frozen=True)
class Variant:
    """A Program with the same inputs and outputs as a region, and the techniques that made it, in order."""

    program: Program
    techniques: tuple[str, ...]


def rewritten(region: Region, *, assume_finite: bool) -> Variant | None:
    """The region after all rules, or None when that saves nothing worth judging.

    None too for a region that draws random numbers, whose order rules do not keep.
    """
    if is_random_program(region.program):
        return None
    result = rewrite(raise_to_fx(region.program), RULES, assume_finite=assume_finite)
    if not result.techniques:
        return None
    try:
        lowered = lower(result.gm)
    except NotLowerableError:
        return None  # a rule produced something without a data form; the region keeps its own Program
    program = with_inputs(lowered.region.program, lowered.order, region.program.inputs)
    roofline = ROOFLINES[program.device]
    before, after = (roofline.seconds(estimate(one)) for one in (region.program, program))
    # Tidying views and duplicates is what Inductor does anyway: it costs a judgement and gains nothing.
    return Variant(program, result.techniques) if before >= _WORTH_JUDGING * after else None
