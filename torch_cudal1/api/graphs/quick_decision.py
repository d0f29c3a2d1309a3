"""The quick tier for a graph of torch.compile: which of PyTorch's own ways runs, measured now, and
the record that spares the next process the measurement.

    blocks repeat    Inductor block by block in a CUDA graph, eager, or what is decided for the blocks
    large results    Inductor in a CUDA graph that does not copy them (`runtime.split_last_kernel`), or eager
    else             Inductor, the same in a CUDA graph, or eager

Nothing is searched for. A training step runs Inductor, which the user of torch.compile asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_cudal1.api.graphs.open_decisions import OpenCount
from torch_cudal1.api.graphs.traced_graph import FilledGraph, TracedGraph
from torch_cudal1.api.quick_tier import (
    DECIDED_BLOCKS,
    GraphCallDecision,
    choose_decided_blocks,
    choose_graph_call,
    choose_graph_operators,
    describe_failure,
    make_quick_choices,
    store_quick_choices,
)
from torch_cudal1.api.ranks.consensus import Broadcast, has_ranks
from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.module_call import shares_written_memory
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import QUICK
from torch_cudal1.ir.schedule import EAGER, INDUCTOR_GRAPH, REGIONAL, Schedule
from torch_cudal1.runtime.split_last_kernel import split_last_step
from torch_cudal1.search.quick import list_quick_schedules
from torch_cudal1.search.tune import Choice

if TYPE_CHECKING:
    from torch_cudal1.api.graphs.graph_decision import GraphRequest
    from torch_cudal1.api.signatures.recalled_capture import CaptureRecord
    from torch_cudal1.graph.capture import TracedModule
    from torch_cudal1.graph.lower import LoweredRegion

__all__ = ["DecidedGraph", "QuickDecision"]

# A callable of this type takes the graph's inputs one by one.
_GraphCall: TypeAlias = Callable[..., Any]
_BY_BLOCKS = Schedule(REGIONAL.base, cuda_graph=True)


@dataclass(frozen=True)
class DecidedGraph:
    """What runs, its callable (None: plain Inductor), and the choices that have entries."""

    runs: str
    call: _GraphCall | None
    choices: Sequence[Choice] = ()

    def make_broadcast(self) -> Broadcast:
        """The same for other ranks."""
        entries = tuple(choice.entry for choice in self.choices if choice.entry is not None)
        return Broadcast(self.runs, entries=entries if self.runs == "swaps" else ())


@dataclass(frozen=True)
class QuickDecision:
    """The decision about one traced graph for which the cache has no entry."""

    request: GraphRequest
    traced: TracedModule
    graphs: Sequence[LoweredRegion]
    record: CaptureRecord

    def decide(self) -> DecidedGraph:
        """Measure, store, and say what runs."""
        schedule = self._find_program_schedule()
        decided = None if schedule is None else self._decide_program(schedule)
        return decided or self._decide_whole()

    def _find_program_schedule(self) -> Schedule | None:
        """The schedule under which the traced Program is better off than Dynamo's graph, where a CUDA
        graph may replay it; None where it is not.
        """
        request, traced = self.request, self.traced
        # The user's own options may say how Inductor compiles the whole.
        if request.options or not traced.direct or not traced.is_pure:
            return None
        regions = [item.region for item in self.graphs]
        program = regions[0].program
        if not request.can_be_graphed() or is_random_program(program):
            return None
        schedules = list_quick_schedules(regions, request.context)
        if REGIONAL in schedules:
            return _BY_BLOCKS
        has_large_results = split_last_step(program, is_fused=True) is not None
        return INDUCTOR_GRAPH if INDUCTOR_GRAPH in schedules and has_large_results else None

    def _decide_program(self, schedule: Schedule) -> DecidedGraph | None:
        """None where the Program cannot be compiled or replayed."""
        request, regions = self.request, [item.region for item in self.graphs]
        operators = choose_graph_operators(regions, request.context, writes=False)
        choices_of_name = {
            str(schedule): make_quick_choices(regions, schedule, operators),
            str(EAGER): make_quick_choices(regions, EAGER),
        }
        composed = choose_decided_blocks(regions, request.context, writes=False)
        if composed is not None:
            choices_of_name[DECIDED_BLOCKS] = composed
        contenders: dict[str, Callable[[], _GraphCall]] = {
            name: TracedGraph(request, self.traced, self.graphs, choices).fill_checked
            for name, choices in choices_of_name.items()
        }
        contenders[str(EAGER)] = lambda: request.gm.forward
        try:
            decision = self._choose(contenders)
        except FAILURES as error:
            if is_sticky(error):
                raise
            failed = describe_failure(error)
            telemetry.record(
                "judge", "quick", regions[0].key, contender=str(schedule), failed=failed
            )
            return None
        is_kept = self._is_kept(decision)
        choices = store_quick_choices(
            choices_of_name[decision.runs],
            request.context,
            decision.medians_us,
            {},
            is_kept=is_kept,
        )
        self.record.remember(self.traced, self.graphs)
        runs, call = decision.runs, decision.call
        # Only while it is measured does a call need to say whether it failed.
        if isinstance(call, FilledGraph):
            call.refill()
            runs, call = "swaps", call.call
        if is_kept:
            self._remember(runs, candidates=[choice.candidate.digest for choice in choices])
        return DecidedGraph(runs, call, choices)

    def _decide_whole(self) -> DecidedGraph:
        request, written = self.request, self.traced.replay_writes
        # A replay of `GraphedLater` would draw the same numbers again.
        draws = any(is_random_program(item.region.program) for item in self.graphs)
        contenders: dict[str, Callable[[], _GraphCall]] = {}
        # A measurement must be able to put back what calls write. Inductor's own CUDA graphs would
        # record the addresses of such calls.
        if (
            written is not None
            and not draws
            and not shares_written_memory(request.inputs, written)
            and not request.options.get("triton.cudagraphs")
        ):
            inductor = cache(request.compile_inductor)
            # Other ranks are not told which inputs a graph writes to.
            is_followed = bool(written) and has_ranks(request.context.settings)
            may_graph = request.can_be_graphed() and not is_followed
            graphed = ["inductor+graph"] if may_graph else []
            contenders = {
                name: partial(self._build_contender, name, inductor, written)
                for name in ("inductor", *graphed, "eager")
            }
        decision = self._choose(contenders, written or frozenset())
        if self._is_kept(decision):
            self._remember(decision.runs, written=written or frozenset())
        return DecidedGraph(decision.runs, decision.call)

    def _build_contender(
        self, runs: str, inductor: Callable[[], _GraphCall], written: frozenset[int]
    ) -> _GraphCall:
        return self.request.build_untraced(runs, inductor, written) or inductor()

    def _choose(
        self,
        contenders: dict[str, Callable[[], _GraphCall]],
        written: frozenset[int] = frozenset(),
    ) -> GraphCallDecision:
        request, key = self.request, self.graphs[0].region.key
        return choose_graph_call(contenders, request.inputs, written, request.context, key)

    def _is_kept(self, decision: GraphCallDecision) -> bool:
        """Whether later processes do the same; where not, that is remembered."""
        if not decision.is_open or not self.request.name:
            return True
        open_count = OpenCount.read(self.request.name, self.request.context)
        if not open_count.may_grow:
            return True
        open_count.grow()
        return False

    def _remember(
        self, runs: str, candidates: Sequence[str] = (), written: frozenset[int] = frozenset()
    ) -> None:
        """Keep for later processes what runs."""
        request, context = self.request, self.request.context
        if not request.name:
            return
        record = {
            "runs": runs,
            "regions": [item.region.key for item in self.graphs],
            "candidates": list(candidates),
            "tier": QUICK,
            "written": sorted(written),
        }
        context.cache.put_decision_record(request.name, record, context.target, context.contract)
