"""Turns a region into other Programs that compute the same: its rewritten form, and its islands
replaced by kernels.

Every proposal is only that: the judge decides. Shapes, dtypes and strides of the outputs are kept
by construction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.fusion.partition import Island, is_product, partition, with_inputs
from torch_cudal1.graph.lower import lower, raise_to_fx
from torch_cudal1.graph.rewrite import RULES, rewrite
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.cost import ROOFLINES, estimate
from torch_cudal1.ir.program import Aten, Program, Step
from torch_cudal1.ir.records import Region

__all__ = ["Variant", "few_product_islands", "product_islands", "rewritten"]


_WORTH_JUDGING = 1.02  # estimated time before over after
_MOSTLY = 0.4  # of the estimated time is in products: a better product alone can halve what is left
# different products or convolutions, each of which costs seconds: of more, what is cheaper to try
# comes first
_FEW = 6


@dataclass(frozen=True)
class Variant:
    """A Program with the same inputs and outputs as a region, and the techniques that made it, in
    order.

    `gain`: the region's estimated time over the Program's.
    """

    program: Program
    techniques: tuple[str, ...]
    gain: float

    @property
    def pays(self) -> bool:
        """Worth judging by itself. Tidying views and copies is what Inductor does anyway: a
        judgement spent, nothing gained.
        """
        return self.gain >= _WORTH_JUDGING


def rewritten(
    region: Region, *, assume_finite: bool, without: Collection[str] = ()
) -> Variant | None:
    """The region after all rules, or None when none applies. What pays nothing by itself is still
    what kernels are made for. `without`: names of rules to leave out.

    None too for a region that draws random numbers, whose order rules do not keep.
    """
    if is_random_program(region.program):
        return None
    rules = [rule for rule in RULES if rule.name not in without]
    result = rewrite(raise_to_fx(region.program), rules, assume_finite=assume_finite)
    if not result.techniques:
        return None
    try:
        lowered = lower(result.gm)
    except NotLowerableError:
        return (
            None  # a rule produced something without a data form; the region keeps its own Program
        )
    program = with_inputs(lowered.region.program, lowered.order, region.program.inputs)
    roofline = ROOFLINES[program.device]
    before, after = (roofline.seconds(estimate(one)) for one in (region.program, program))
    return Variant(program, result.techniques, before / max(after, 1e-12))


def few_product_islands(whole: Region) -> tuple[Island, ...]:
    """The islands around products, where few of them differ; else ()."""
    islands = _around_products(whole)
    return islands if len({island.region.key for island in islands}) <= _FEW else ()


def product_islands(whole: Region) -> tuple[Island, ...]:
    """The islands around matrix products, where these are most of the estimated time, and around a
    few convolutions; else ().
    """
    islands = _around_products(whole)
    if not islands:
        return ()
    if (
        any(map(_is_convolution, whole.program.steps))
        and len({i.region.key for i in islands}) <= _FEW
    ):
        # cuDNN copies most of them into another layout and back, of which the estimate knows
        # nothing
        return islands
    roofline = ROOFLINES[whole.program.device]
    in_products = (
        sum(estimate(island.region.program).flops for island in islands) / roofline.flops_per_s
    )
    return islands if in_products >= _MOSTLY * roofline.seconds(estimate(whole.program)) else ()


def _around_products(whole: Region) -> tuple[Island, ...]:
    return tuple(
        i
        for i in partition(whole, products=True).islands
        if any(map(is_product, i.region.program.steps))
    )


def _is_convolution(step: Step) -> bool:
    return isinstance(step, Aten) and step.target == "aten.convolution.default"
