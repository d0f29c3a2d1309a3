"""Turns a region into other Programs that compute the same: its rewritten form, and its fusion
groups replaced by kernels.

Every proposal is only that: the judge decides. Shapes, dtypes and strides of the outputs are kept
by construction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.fusion.fusible_ops import is_product
from torch_cudal1.graph.fusion.partition import FusionGroup, partition, rebase_on_inputs
from torch_cudal1.graph.lower import lower, raise_to_fx
from torch_cudal1.graph.rewrite import RULES, rewrite
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_cost
from torch_cudal1.ir.program import Aten, Program, Step
from torch_cudal1.ir.records import Region

__all__ = ["Variant", "find_minor_product_groups", "find_product_groups", "rewrite_region"]


_MIN_GAIN = 1.02  # estimated time before over after
# Share of the estimated time in products: a better product alone can halve what is left.
_MIN_PRODUCT_SHARE = 0.4
# different products or convolutions, each of which costs seconds: of more, what is cheaper to try
# comes first
_MAX_DISTINCT_GROUPS = 6


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
        return self.gain >= _MIN_GAIN


def rewrite_region(
    region: Region, *, assume_finite: bool, without: Collection[str] = ()
) -> Variant | None:
    """The region after all rules, or None when none applies. What pays nothing by itself is still
    what kernels are made for. `without`: names of rules to leave out.

    None too for a region that draws random numbers, whose order rules do not keep.
    """
    # Checked before the graph is raised, which would be work for nothing.
    if is_random_program(region.program):
        return None
    # Raised and lowered anew: a rule edits FX graphs, and the result has to be canonical again.
    rules = [rule for rule in RULES if rule.name not in without]
    result = rewrite(raise_to_fx(region.program), rules, assume_finite=assume_finite)
    if not result.techniques:
        return None
    try:
        lowered = lower(result.gm)
    except NotLowerableError:
        # A rule's result has no data form, so the region keeps its own Program.
        return None
    # A rule may leave an input unread. The candidate must still take all of the region's.
    program = rebase_on_inputs(lowered.region.program, lowered.order, region.program.inputs)
    rates = DEVICE_RATES[program.device]
    before, after = (
        rates.estimate_s(estimate_cost(candidate)) for candidate in (region.program, program)
    )
    return Variant(program, result.techniques, before / max(after, 1e-12))


def find_minor_product_groups(region: Region) -> tuple[FusionGroup, ...]:
    """The fusion groups around products, where few of them differ; else ()."""
    fusion_groups = _list_product_groups(region)
    return (
        fusion_groups
        # By key: equal groups share one kernel, which is searched for once.
        if len({fusion_group.region.key for fusion_group in fusion_groups}) <= _MAX_DISTINCT_GROUPS
        else ()
    )


def find_product_groups(region: Region) -> tuple[FusionGroup, ...]:
    """The fusion groups around matrix products, where these are most of the estimated time, and
    around a few convolutions; else ().
    """
    fusion_groups = _list_product_groups(region)
    if not fusion_groups:
        return ()
    if (
        any(map(_is_convolution, region.program.steps))
        and len({i.region.key for i in fusion_groups}) <= _MAX_DISTINCT_GROUPS
    ):
        # cuDNN copies most of them into another layout and back, of which the estimate knows
        # nothing
        return fusion_groups
    rates = DEVICE_RATES[region.program.device]
    in_products = (
        sum(estimate_cost(fusion_group.region.program).flops for fusion_group in fusion_groups)
        / rates.flops_per_s
    )
    return (
        fusion_groups
        if in_products >= _MIN_PRODUCT_SHARE * rates.estimate_s(estimate_cost(region.program))
        else ()
    )


def _list_product_groups(region: Region) -> tuple[FusionGroup, ...]:
    return tuple(
        i
        for i in partition(region, products=True).groups
        if any(map(is_product, i.region.program.steps))
    )


def _is_convolution(step: Step) -> bool:
    return isinstance(step, Aten) and step.target == "aten.convolution.default"
