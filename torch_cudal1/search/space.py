"""The search space of a region: its rewritten form, and the fusion groups that kernels may replace.

`build_search_space` starts compiling kernels for the products that are most of a region's work in
the background, while the baselines are still being ranked. Nothing is evaluated here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch_cudal1 import judge
from torch_cudal1.graph.fusion.partition import FusionGroup, partition
from torch_cudal1.graph.fusion.siblings import merge_siblings
from torch_cudal1.graph.propose import (
    Variant,
    find_minor_product_groups,
    find_product_groups,
    rewrite_region,
)
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.benchmark.timing_plan import REMEASURED_SPEEDUP
from torch_cudal1.search.group_kernels import GroupKernels, StoreKernel
from torch_cudal1.search.operator_timing import MIN_SPEEDUP, OperatorChoice
from torch_cudal1.store.context import TuneContext

__all__ = ["SearchSpace", "build_search_space", "list_fusion_groups", "make_variant_region"]

# rules that cut a product in pieces: one kernel for all of it saves more than they do
_SPLITTING_RULES = frozenset({"triangular_matmul"})


@dataclass(frozen=True)
class SearchSpace:
    """What may be tried for `region`.

    `variant`: its rewritten form. `unsplit_variant`: the form with products in one piece, whose
    groups `dominant_groups` (around products that are most of the work) and `minor_groups` (around
    other products) are. `kernels`: None where none serves here.
    """

    region: Region
    variant: Variant | None
    unsplit_variant: Variant | None = None
    dominant_groups: tuple[FusionGroup, ...] = ()
    minor_groups: tuple[FusionGroup, ...] = ()
    kernels: GroupKernels | None = None

    @property
    def has_paying_rewrite(self) -> bool:
        """Whether the rewritten form is worth evaluating by itself."""
        return self.variant is not None and self.variant.pays

    @property
    def is_empty(self) -> bool:
        """Whether no candidate is worth a benchmark of its own: no rewrite that pays, no products
        that are most of the work.
        """
        return not (self.has_paying_rewrite or self.dominant_groups)

    @property
    def will_be_remeasured(self) -> bool:
        """Whether a rewrite should gain so much that its time will be measured again, in a process
        that has run nothing.
        """
        return self.variant is not None and self.variant.gain > REMEASURED_SPEEDUP

    @property
    def cheapest_program(self) -> Program:
        """The form of the region that does the least work."""
        return make_variant_region(self.region, self.variant).program


def build_search_space(
    region: Region,
    place: TuneContext,
    job: judge.EvaluationConfig,
    store_kernel: StoreKernel,
    operators: OperatorChoice | None = None,
) -> SearchSpace:
    """Find the rewrites and fusion groups of `region`, and start compiling kernels for them.
    `operators`: its Program with operators that were measured to be faster.
    """
    # A fusion group is cut out of a region that was rewritten already.
    is_whole = region.granularity != "island"
    # Rules for finite values need the user's word.
    finite = place.contract.assume_finite
    rewrites = is_whole and "rewrites" not in place.settings.without
    operators = operators or OperatorChoice(region.program)
    variant = _rewrite(region, operators, finite=finite) if rewrites else None
    # Kernels are compiled for CUDA only.
    has_kernels = place.device.type == "cuda" and "kernels" not in place.settings.without
    # the judge compares values: of what draws random numbers nothing but baselines can be trusted
    if not has_kernels or not is_whole or is_random_program(region.program):
        return SearchSpace(region, variant)
    unsplit = _rewrite_unsplit(region, variant, operators, finite=finite)
    # Products in one piece: a kernel for all of one saves more than skipping its zeros.
    unsplit_region = make_variant_region(region, unsplit)
    dominant = find_product_groups(unsplit_region)
    # Either kind, not both: each kernel costs seconds of a compiler.
    minor = () if dominant else find_minor_product_groups(unsplit_region)
    if region.kind != "inference" and not dominant:
        # what else a training step is made of, Inductor fuses as well
        return SearchSpace(region, variant)
    # What lies between blocks takes kernels that were checked and stored.
    kernels = GroupKernels(place, job, store_kernel, checks_each=region.granularity == "block")
    # Now, so that compilers work while the baselines are timed.
    kernels.begin(merge_siblings(unsplit_region, dominant or minor))
    return SearchSpace(region, variant, unsplit, dominant, minor, kernels)


def list_fusion_groups(region: Region, *, finite: bool = False) -> list[FusionGroup]:
    """Every fusion group of a whole graph that a search may look for kernels for, in the order in
    which it does; `finite`: under rules for finite values.
    """
    variant = rewrite_region(region, assume_finite=finite)
    rewritten = make_variant_region(region, variant)
    operators = OperatorChoice(region.program)
    unsplit = make_variant_region(
        region, _rewrite_unsplit(region, variant, operators, finite=finite)
    )
    first = find_product_groups(unsplit) or find_minor_product_groups(unsplit)
    groups = partition(rewritten, products=True).groups
    return [
        *merge_siblings(unsplit, first),
        *first,
        *merge_siblings(rewritten, groups),
        *groups,
        *partition(rewritten).groups,
    ]


def _rewrite(
    region: Region,
    operators: OperatorChoice,
    *,
    finite: bool,
    without: Collection[str] = (),
) -> Variant | None:
    """The rewritten form of `region` with `operators`."""
    with_operators = replace(region, program=operators.program)
    variant = rewrite_region(with_operators, assume_finite=finite, without=without)
    if not operators.techniques:
        return variant
    if variant is None:
        return Variant(operators.program, operators.techniques, MIN_SPEEDUP)
    techniques = (*operators.techniques, *variant.techniques)
    # Operators are faster by measurement, whatever the rest is by estimate.
    return replace(variant, techniques=techniques, gain=max(variant.gain, MIN_SPEEDUP))


def _rewrite_unsplit(
    region: Region, variant: Variant | None, operators: OperatorChoice, *, finite: bool
) -> Variant | None:
    """The rewritten form without the rules that cut products."""
    # No rule split anything: the form is the same, and rewriting it again would cost time.
    if variant is None or _SPLITTING_RULES.isdisjoint(variant.techniques):
        return variant
    return _rewrite(region, operators, finite=finite, without=_SPLITTING_RULES)


def make_variant_region(region: Region, variant: Variant | None) -> Region:
    """The region that kernels are made for: a rewrite that pays nothing by itself still makes
    better fusion groups.
    """
    if variant is None:
        return region
    return Region(variant.program, region.roles, region.kind, region.granularity, region.name)
