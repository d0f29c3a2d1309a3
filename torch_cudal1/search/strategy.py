"""What is tried for a region, the most promising first: rewrites, kernels in its islands, each
under the best schedules.

Kernels for the products that are most of a region's work are compiled in the background from the
moment a search begins, while the baselines are raced. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_cudal1 import judge
from torch_cudal1.graph.fusion.partition import Island, partition, splice, starts_island
from torch_cudal1.graph.propose import Variant, few_product_islands, product_islands, rewritten
from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.cost import ROOFLINES, launches_us
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import SCHEDULES, Candidate, Region, Rejected, Schedule
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.judge.checks.profiles import SURPRISE
from torch_cudal1.search.compose import SCHEDULES_PER_VARIANT, compose
from torch_cudal1.search.group_kernels import IslandKernels, Remember, techniques_of
from torch_cudal1.store.context import Place

__all__ = ["Search", "Standing", "fastest_first", "islands_of", "search"]

_IN_PANELS = frozenset(
    {"triangular_matmul"}
)  # rules that cut a product in pieces: a kernel for the whole saves more than they do
_FEW_LEFT = 8  # operators beside kernels: of more Inductor makes fewer, and eager is hopeless
# for the order of candidates: on a busy machine the race of slow baselines is off by that much
_TIE = 1.25
# of a call's time: so much launching, and a CUDA graph may win by it; so much saved, and it is
# tried first
_MUCH = 0.05


@dataclass
class Standing:
    """How a search stands: microseconds of the best candidate that was accepted so far, and which
    it is, None before there is one; and the largest speed-up that was measured of any, accepted or
    not.
    """

    best_us: float | None = None
    gain: float = 0.0
    best: Candidate | None = None


@dataclass(frozen=True)
class Search:
    """What may be tried: the rewritten form, `dense` islands around products that dominate, kernels
    (None: none serves here).

    `few`: islands around products that do not dominate. `whole`: the form whose islands these are,
    with products in one piece.
    """

    region: Region
    variant: Variant | None
    whole: Variant | None = None
    dense: tuple[Island, ...] = ()
    few: tuple[Island, ...] = ()
    kernels: IslandKernels | None = None

    @property
    def pays(self) -> bool:
        """Whether the rewritten form is worth judging by itself."""
        return self.variant is not None and self.variant.pays

    @property
    def is_empty(self) -> bool:
        """Whether no candidate is worth a race of its own: no rewrite that pays, no products that
        are most of the work.
        """
        return not (self.pays or self.dense)

    @property
    def surprises(self) -> bool:
        """Whether a rewrite should gain so much that its time will be measured again, in a process
        that has run nothing.
        """
        return self.variant is not None and self.variant.gain > SURPRISE

    @property
    def least(self) -> Program:
        """The form of the region that does least."""
        return _form(self.region, self.variant).program

    def candidates(
        self, ranking: judge.Ranking, deadline: float, standing: Standing
    ) -> Iterator[Candidate | Rejected]:
        """Kernels for products where these are most of the time, or alone save a noticeable part of
        it; then rewritten forms, which cost nothing to build, then the same with kernels in all
        islands, unless those for products have lost, and without these, unless they have won; at
        last the best of all with the little that its kernels leave run the other way. No kernel is
        looked for after `deadline`, on the clock of `judge.working_s`.
        """
        schedules = fastest_first(ranking, self.region)
        rewrites = (
            [(self.variant.program, self.variant.techniques)]
            if self.variant is not None and self.pays
            else []
        )
        if self.kernels is None:
            yield from compose(rewrites, schedules)
            return
        self.kernels.deadline = deadline
        first = self.dense
        if self.few:
            yield from self.kernels.found(self.few)[1]
            first = (
                self.few
                if self.kernels.saving_us(self.few)
                > _MUCH * min(ranking.medians_us.values(), default=0.0)
                else ()
            )
        if first:
            yield from self._spliced(self.whole, first, self.kernels, schedules)
        yield from compose(rewrites, schedules)
        whole = partition(_form(self.region, self.variant), products=True).islands
        with_products = any(
            starts_island(step) for island in whole for step in island.region.program.steps
        )
        lost = first and standing.best_us is None and standing.gain < 1
        if with_products and not lost and set(whole) != set(first):
            yield from self._spliced(self.variant, whole, self.kernels, schedules)
        if not (first and standing.best_us is not None):
            fused = partition(_form(self.region, self.variant)).islands
            yield from self._spliced(self.variant, fused, self.kernels, schedules)
        yield from _other_way(standing.best, schedules)

    def _spliced(
        self,
        form: Variant | None,
        islands: Sequence[Island],
        kernels: IslandKernels,
        schedules: Sequence[Schedule],
    ) -> Iterator[Candidate | Rejected]:
        """The rewritten form, or the region itself, with a kernel in each of `islands` that has
        one.
        """
        replaced, refused = kernels.found(islands)
        yield from refused
        if replaced:
            whole = _form(self.region, form).program
            program = splice(whole, {island: callee for island, (callee, _) in replaced.items()})
            before = form.techniques if form else ()
            yield from compose(
                [(program, before + techniques_of(replaced))], _suited(program, schedules)
            )


def search(region: Region, place: Place, job: judge.Job, remember: Remember) -> Search:
    """Begin a search of `region`: see which rewrites and islands there are, and start compiling."""
    whole = region.granularity == "whole"
    finite, rewriting = (
        place.contract.assume_finite,
        whole and "rewrites" not in place.settings.without,
    )
    variant = rewritten(region, assume_finite=finite) if rewriting else None
    served = place.device.type == "cuda" and "kernels" not in place.settings.without
    # the judge compares values: of what draws random numbers nothing but baselines can be trusted
    if not served or not whole or is_random_program(region.program):
        return Search(region, variant)
    form = _in_one_piece(region, variant, finite=finite)
    dense = product_islands(_form(region, form))
    few = () if dense else few_product_islands(_form(region, form))
    if region.kind != "inference" and not dense:
        return Search(
            region, variant
        )  # what else a training step is made of, Inductor fuses as well
    kernels = IslandKernels(place, job, remember)
    kernels.begin(dense or few)
    return Search(region, variant, form, dense, few, kernels)


def islands_of(region: Region, *, finite: bool = False) -> list[Island]:
    """Every island that a search of a whole graph may ask kernels for, those asked first first;
    `finite`: rules for such values.
    """
    variant = rewritten(region, assume_finite=finite)
    form = _form(region, variant)
    whole = _form(region, _in_one_piece(region, variant, finite=finite))
    first = product_islands(whole) or few_product_islands(whole)
    return [*first, *partition(form, products=True).islands, *partition(form).islands]


def _in_one_piece(region: Region, variant: Variant | None, *, finite: bool) -> Variant | None:
    """The rewritten form without the rules that cut products."""
    if variant is None or _IN_PANELS.isdisjoint(variant.techniques):
        return variant
    return rewritten(region, assume_finite=finite, without=_IN_PANELS)


def _form(region: Region, variant: Variant | None) -> Region:
    """What kernels are made for: a rewrite that pays nothing by itself still makes better islands."""
    return (
        Region(variant.program, region.roles, region.kind, region.granularity, region.name)
        if variant
        else region
    )


def fastest_first(ranking: judge.Ranking, region: Region) -> list[Schedule]:
    """Schedules for candidates. Of those as fast as the fastest, compiled ones come first: a
    rewrite leaves element-wise chains.

    A CUDA graph comes before the same without one where it may save a noticeable part of the
    region's time, launches less copies of inputs and results: a candidate that gains less than that
    loses to a baseline in a graph, and the budget may not last for more.
    """
    ran = [name for name in SCHEDULES if name in ranking.medians_us]
    fastest_us = min(ranking.medians_us.values(), default=0.0)
    graphs = launches_us(region.program) - _copies_us(region) > _MUCH * fastest_us

    def order(name: Schedule) -> tuple[float, bool, bool]:
        return (
            max(fastest_us * _TIE, ranking.medians_us[name]),
            name.startswith("eager"),
            graphs != name.endswith("+graph"),
        )

    return sorted(ran, key=order)


def _copies_us(region: Region) -> float:
    """About what a CUDA graph takes to copy what the region is given, but for weights, and what it
    yields.
    """
    given = [
        spec
        for spec, role in zip(region.program.inputs, region.roles, strict=True)
        if role == "input"
    ]
    moved = sum(spec.size_bytes for spec in (*given, *filter(None, output_specs(region.program))))
    return 2e6 * moved / ROOFLINES["cuda"].bytes_per_s


def _other_way(best: Candidate | None, schedules: Sequence[Schedule]) -> Iterator[Candidate]:
    """`best` with the few operators that its kernels leave run by eager instead of Inductor, or the
    other way round, unless it was tried: the order of schedules is that of the whole region, most
    of which is kernels now.
    """
    if best is None or not best.program.launches or not 1 <= _count_left(best.program) <= _FEW_LEFT:
        return
    tried = _suited(best.program, schedules)[:SCHEDULES_PER_VARIANT]
    ways = {name.partition("+")[0] for name in (best.schedule, *tried)}
    other = next((name for name in schedules if name.partition("+")[0] not in ways), None)
    if other is not None:
        yield replace(best, schedule=other)


def _count_left(program: Program) -> int:
    return sum(isinstance(step, Aten) and not is_view(step) for step in program.steps)


def _suited(program: Program, schedules: Sequence[Schedule]) -> list[Schedule]:
    """The schedules in their order; where nothing is left for Inductor to compile, those without it
    first.
    """
    return (
        list(schedules)
        if _count_left(program)
        else sorted(schedules, key=lambda name: not name.startswith("eager"))
    )
