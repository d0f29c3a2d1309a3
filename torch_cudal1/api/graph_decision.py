"""Decides what runs for one Dynamo graph: from the cache, from another rank, or by a search.

    "swaps"           the traced graphs, each with its choice as its callable
    "inductor"        plain Inductor, so nothing is built here
    "inductor+graph"  Inductor's result for the graph, replayed as a CUDA graph
    "eager"           the graph's own operators

A warm look-up of the last three needs no trace, no judge and no kernels: their modules are imported
where a graph is traced or measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from torch_cudal1.api.gradients.training_step import MIN_SPEEDUP_BEYOND_NOISE
from torch_cudal1.api.inductor import compile_with_inductor
from torch_cudal1.api.ranks.consensus import (
    Broadcast,
    NoConsensus,
    has_ranks,
    reach_consensus,
    read_broadcast_choices,
)
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.capture import is_dynamic
from torch_cudal1.graph.graph_digest import compute_graph_digest, compute_graph_outline
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import QUICK
from torch_cudal1.store.context import TuneContext, make_context

if TYPE_CHECKING:
    from torch_cudal1.graph.capture import TracedModule
    from torch_cudal1.graph.lower import LoweredRegion
    from torch_cudal1.search.tune import Choice

__all__ = ["ChoicesCallback", "decide_graph"]

ChoicesCallback: TypeAlias = "Callable[[Sequence[Any]], None]"
# A callable of this type takes the graph's inputs one by one.
_GraphCall: TypeAlias = Callable[..., Any]
# What runs in this process (None: plain Inductor), and the decision for other ranks.
_Decision: TypeAlias = "tuple[_GraphCall | None, Broadcast | NoConsensus]"
_UNTRACED = ("inductor", "eager", "inductor+graph")


def decide_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    options: dict[str, Any],
    on_choices: ChoicesCallback | None,
) -> _GraphCall | None:
    """What beats Inductor for this graph; None where nothing does or nothing is known. `gm` itself
    is only read. `options` are Inductor's; `on_choices` gets the choices of the graph.
    """
    # A decision is for one shape: a region's key holds its shapes.
    if is_dynamic(inputs):
        reason = "dynamic shapes: Inductor compiles the graph"
        telemetry.record("capture", "left_out", reason=reason)
        return None
    context = make_context(find_device(list(inputs)), settings)
    # The target and Inductor's options are part of the name: the same graph may be decided
    # otherwise on another GPU or under other options.
    digest = compute_graph_digest(
        gm, inputs, extra=[repr(context.target), repr(sorted(options.items(), key=str))]
    )
    name = None if isinstance(digest, Refusal) else digest
    request = _GraphRequest(gm, inputs, context, options, name, on_choices)
    result = reach_consensus(
        # Ranks compare graphs by this text. A graph without a stable name still needs one that is
        # equal on all ranks.
        [name or compute_graph_outline(gm)],
        context,
        decide=request.decide,
        follow=request.follow,
    )
    if isinstance(result, NoConsensus) and settings.on_miss == "error":
        raise CacheMissError(name or "unnamed", f"a graph of torch.compile: {result.reason}")
    return None if isinstance(result, NoConsensus) else result


@dataclass(frozen=True)
class _GraphRequest:
    """One graph to be decided; `name` is that of its decision record (None: it has none)."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    context: TuneContext
    options: dict[str, Any]
    name: str | None
    on_choices: ChoicesCallback | None

    def decide(self) -> _Decision:
        """What the cache remembers of the graph, else what is decided now."""
        record = self.context.find_decision_record(self.name) if self.name else None
        if isinstance(record, dict) and self._is_superseded(record):
            record = None
        # The warm way: no trace, no judge and no kernels are loaded.
        if isinstance(record, dict) and record.get("runs") in _UNTRACED:
            telemetry.count("graphs_remembered")
            runs = str(record["runs"])
            written = frozenset(map(int, record.get("written", ())))
            return self._build_untraced(runs, self.compile_inductor, written), Broadcast(runs)
        # Only a search needs the judge's processes, and a graph with a record was searched already.
        if self.context.settings.on_miss != "tune" or isinstance(record, dict):
            return self._decide_traced()
        from torch_cudal1.judge import pool_scope, prestart_fork_server

        with pool_scope():
            # The fork server imports torch while this process traces.
            prestart_fork_server(self.context.settings, self.context.device)
            return self._decide_traced()

    def follow(self, broadcast: Broadcast) -> _GraphCall | None:
        """What another rank decided for this graph."""
        from torch_cudal1.graph.capture import trace

        if broadcast.runs != "swaps":
            return self._build_untraced(broadcast.runs, self.compile_inductor)
        # This rank needs the graph itself; the entries name regions of it by key.
        traced = trace(self.gm, self.inputs)
        graphs = _lower_graphs(traced)
        choices = read_broadcast_choices(broadcast, [item.region for item in graphs], self.context)
        return _TracedGraph(self, traced, graphs, choices).build()

    def _is_superseded(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the quick tier says less than is known: here a search is allowed, or one
        has left an entry for a graph of it, in this door or the other.
        """
        if record.get("tier") != QUICK:
            return False
        context, regions = self.context, record.get("regions")
        if context.settings.on_miss == "tune" or not isinstance(regions, list):
            return True
        hits = [context.cache.get(str(key), context.target, context.contract) for key in regions]
        return any(not isinstance(hit, Refusal) and not hit.entry.is_quick for hit in hits)

    def compile_inductor(self) -> _GraphCall:
        """What Inductor makes of the user's graph."""
        return compile_with_inductor(
            self.gm,
            self.inputs,
            self.options,
            repeatable_backward=self.on_choices is not None,
        )

    def _decide_traced(self) -> _Decision:
        """Trace, choose for each graph, and remember what needs no trace next time."""
        from torch_cudal1.graph.capture import trace
        from torch_cudal1.search.tune import choose

        try:
            traced = trace(self.gm, self.inputs)
            graphs = _lower_graphs(traced)
        except NotLowerableError as problem:
            telemetry.record("capture", "left_out", reason=problem.reason)
            return None, Broadcast("inductor")
        # Each graph is chosen for on its own: forward and backward have separate entries.
        choices = [
            choose(item.region, self.context, examples=_select_example_tensors(item, self.inputs))
            for item in graphs
        ]
        if self.on_choices is not None:
            self.on_choices(choices)
        # A step whose backward has no entry is not swapped in halves.
        missing = next((choice.reason for choice in choices if choice.entry is None), "")
        # Ranks would wait for one another while each measures.
        quick = self.context.settings.on_miss == "quick" and not has_ranks(self.context.settings)
        if missing and quick:
            return self._decide_quickly(traced, graphs)
        if missing:
            return None, NoConsensus(missing)
        return _TracedGraph(self, traced, graphs, choices).decide()

    def _decide_quickly(self, traced: TracedModule, graphs: Sequence[LoweredRegion]) -> _Decision:
        """The fastest of PyTorch's own ways, measured now; in training it is Inductor, which the user
        of torch.compile asked for.
        """
        from torch_cudal1.api.quick_tier import choose_graph_call
        from torch_cudal1.graph.module_call import shares_written_memory

        regions = [item.region.key for item in graphs]
        # A replay of `GraphedLater` would draw the same numbers again.
        draws = any(is_random_program(item.region.program) for item in graphs)
        contenders: dict[str, Callable[[], _GraphCall]] = {}
        written = traced.replay_writes
        # A measurement must be able to put back what calls write. Inductor's own CUDA graphs would
        # record the addresses of such calls.
        if (
            written is not None
            and not draws
            and not shares_written_memory(self.inputs, written)
            and not self.options.get("triton.cudagraphs")
        ):
            inductor = cache(self.compile_inductor)
            names = ["inductor", *(["inductor+graph"] if self._can_be_graphed() else []), "eager"]
            contenders = {
                name: partial(self._build_contender, name, inductor, written) for name in names
            }
        runs, call = choose_graph_call(
            contenders, self.inputs, written or frozenset(), self.context, regions[0]
        )
        if self.name:
            record = {
                "runs": runs,
                "regions": regions,
                "candidates": [],
                "tier": QUICK,
                "written": sorted(written or ()),
            }
            self.context.cache.put_decision_record(
                self.name, record, self.context.target, self.context.contract
            )
        return call, Broadcast(runs)

    def _build_contender(
        self, runs: str, inductor: Callable[[], _GraphCall], written: frozenset[int]
    ) -> _GraphCall:
        return self._build_untraced(runs, inductor, written) or inductor()

    def _can_be_graphed(self) -> bool:
        """Whether CUDA graphs are allowed, and the graph has no tensor that is no input."""
        context = self.context
        is_allowed = context.device.type == "cuda" and "graphs" not in context.settings.without
        return is_allowed and all(node.op != "get_attr" for node in self.gm.graph.nodes)

    def _build_untraced(
        self,
        runs: str,
        inductor: Callable[[], _GraphCall],
        written: frozenset[int] = frozenset(),
    ) -> _GraphCall | None:
        """The callable of a decision that needs no trace; None for plain Inductor and for swaps.
        `written`: the inputs that the graph writes to.
        """
        if runs == "inductor+graph":
            # Parameters stay where they are, so a CUDA graph may read them in place; other inputs
            # are copied.
            from torch_cudal1.graph.capture import find_lifted_parameters
            from torch_cudal1.graph.swap import GraphedLater

            context = self.context
            return GraphedLater(
                inductor(),
                find_lifted_parameters(self.gm),
                context.device,
                context.settings.strictness,
                written,
            )
        return self.gm.forward if runs == "eager" else None


@dataclass(frozen=True)
class _TracedGraph:
    """The ATen graphs of a request, forward and backward, with the choice for each."""

    request: _GraphRequest
    traced: TracedModule
    graphs: Sequence[LoweredRegion]
    choices: Sequence[Choice]

    def decide(self) -> _Decision:
        """Decide by the evidence of the choices and, in a search, by a measurement here."""
        request, context = self.request, self.request.context
        runs = self._decide_by_evidence()

        def build(inductor: Callable[[], _GraphCall]) -> _GraphCall:
            return request._build_untraced(runs, inductor) or self.build()

        final, call = runs, None
        # Outside a search the user waits for an answer, so what was measured before counts.
        if context.settings.on_miss == "tune" and not self._has_won_before():
            final, call = self._measure(runs, build)
        # Swaps that won by evidence alone are not written down: the record would say that this
        # process measured them.
        if request.name and (runs != "swaps" or call is not None):
            record = {
                "runs": final,
                "regions": [item.region.key for item in self.graphs],
                "candidates": self._digests,
            }
            context.cache.put_decision_record(
                request.name, record, context.target, context.contract
            )
        # For "inductor" None is right: the caller then compiles as torch.compile does.
        if call is None and final != "inductor":
            call = build(request.compile_inductor)
        entries = tuple(choice.entry for choice in self.choices if choice.entry is not None)
        return call, Broadcast(final, entries=entries if final == "swaps" else ())

    def build(self) -> _GraphCall:
        """The traced graphs, each with its choice as its callable."""
        from torch_cudal1.api.shadow import check_composed, wrap_with_checks
        from torch_cudal1.graph.swap import reorder_inputs, swap

        context, traced = self.request.context, self.traced
        # A call that writes to its inputs cannot be checked by a second run.
        writes = any(graph.writes for graph in traced.graphs)
        for item, choice in zip(self.graphs, self.choices, strict=True):
            telemetry.record("swap", "runs", choice.region.key, what=choice.candidate.label)
            wrapper = wrap_with_checks(choice, context, writes=writes)
            swapped = swap(
                choice.region,
                choice.candidate,
                context.device,
                strictness=context.settings.strictness,
                options=self.request.options,
                around=None if isinstance(wrapper, Refusal) else wrapper,
            )
            if context.settings.on_miss == "tune":
                inputs = _select_example_tensors(item, self.request.inputs)
                # Of a composed whole that fails, the reference is measured against Inductor.
                if (refusal := check_composed(choice, swapped, inputs, context)) is not None:
                    swapped.quarantined = swapped.quarantined or refusal.reason
            traced.fill(item.region.kind, reorder_inputs(swapped, item.order))
        call: _GraphCall = traced.call
        return call

    @cached_property
    def _digests(self) -> list[str]:
        return [choice.candidate.digest for choice in self.choices]

    def _decide_by_evidence(self) -> str:
        runs = self._read_module_trial_winner() or _choose_by_evidence(
            self.choices, self.request.context.settings.margin
        )
        return "inductor+graph" if runs == "swaps" and self._is_graphed_inductor() else runs

    def _measure(
        self, runs: str, build: Callable[[Callable[[], _GraphCall]], _GraphCall]
    ) -> tuple[str, _GraphCall | None]:
        """What runs after the end-to-end check, and its callable (None: not built yet).

        A graph in which PyTorch itself records CUDA graphs is not called on copies: it would be
        recorded at their addresses.
        """
        from torch_cudal1.api.end_to_end import GraphUnderTest, end_to_end_check

        request = self.request
        trains = any(part.kind == "backward" for part in self.traced.graphs)
        # Inductor's own CUDA graphs (`triton.cudagraphs`) record the addresses of the first calls.
        # Recorded during a measurement, they would hold the addresses of its copies.
        can_copy = not request.options.get("triton.cudagraphs")
        graph = GraphUnderTest(
            request.inputs,
            request.context.device,
            # Compiled once, however many contenders ask for it.
            cache(request.compile_inductor),
            is_pure=self.traced.is_pure,
            has_benchmark=_has_inductor_in_every_benchmark(self.choices),
            written=self.traced.written if trains and can_copy else None,
        )
        return end_to_end_check(graph, runs, build, request.gm.forward)

    def _is_graphed_inductor(self) -> bool:
        """Whether what won is Inductor's own result for this graph, replayed: then Inductor's own
        caches serve the next process.
        """
        first = self.choices[0]
        # A rewritten Program under the same schedule is not Inductor's result for the user's graph.
        unchanged = (
            first.candidate.schedule == "inductor+graph"
            and first.candidate.program == first.region.program
        )
        # What `accelerate` swapped in for the same region writes to nothing.
        is_replayable = self.traced.is_pure and not is_random_program(first.region.program)
        return unchanged and is_replayable and self.request._can_be_graphed()

    def _read_module_trial_winner(self) -> str:
        """What won when `accelerate` measured this very training step as a whole; "" if it never
        did.
        """
        from torch_cudal1.search.tune import make_end_to_end_name

        # One region is an inference graph; the record that is asked for is of a training step.
        if len(self.choices) < 2:
            return ""
        record = self._read_record(make_end_to_end_name(self.choices))
        return {"eager": "eager", "torch.compile": "inductor", "cudal1": "swaps"}.get(
            str(record.get("winner")), ""
        )

    def _has_won_before(self) -> bool:
        """Whether an earlier process measured what these candidates make of this graph, and they
        did not lose.
        """
        # A graph that lost has a record too, one of "inductor", which never comes here.
        return bool(self.request.name and self._read_record(self.request.name))

    def _read_record(self, name: str) -> dict[str, Any]:
        """The decision record of these very candidates; empty where there is none."""
        record = self.request.context.find_decision_record(name, self._digests)
        # A record of other candidates says nothing of these: an entry may have been replaced since.
        if isinstance(record, dict) and record.get("candidates") == self._digests:
            return record
        return {}


def _lower_graphs(traced: TracedModule) -> list[LoweredRegion]:
    from torch_cudal1.graph.lower import lower

    return [
        lower(graph.module, static=graph.static, kind=graph.kind, name=graph.kind)
        for graph in traced.graphs
    ]


def _select_example_tensors(
    item: LoweredRegion, inputs: Sequence[Any]
) -> list[torch.Tensor] | None:
    """The user's tensors in the region's order, where Dynamo gave real ones; a backward graph has
    none.
    """
    # Fake tensors have no data, and a backward's inputs do not exist before its forward has run.
    if item.region.kind == "backward" or any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return None
    return [inputs[position].detach() for position in item.order]


def _choose_by_evidence(choices: Sequence[Choice], margin: float) -> str:
    """ "swaps", "inductor" or "eager": by the measured time of all graphs together, forward and
    backward, against Inductor's.

    A trace costs host time, so swaps must be faster by the margin; leaving Inductor for plain eager
    needs more than noise.
    """
    # Sums, because forward and backward run one after the other in a step.
    chosen_us = sum(_time_us(choice) for choice in choices)
    inductor_us = sum(_read_baseline_us(choice, "inductor") for choice in choices)
    schedules = {str(choice.candidate.schedule) for choice in choices}
    if not any(_read_all_baselines_us(choice) for choice in choices):
        # No baseline was benchmarked. The user asked for torch.compile, so that runs.
        return "inductor"
    if any(choice.swapped for choice in choices) or schedules - {"eager", "inductor"}:
        return "swaps" if chosen_us * margin <= inductor_us else "inductor"
    eager_pays = chosen_us * MIN_SPEEDUP_BEYOND_NOISE <= inductor_us
    return "eager" if schedules == {"eager"} and eager_pays else "inductor"


def _has_inductor_in_every_benchmark(choices: Sequence[Choice]) -> bool:
    """Whether Inductor ran in every baseline benchmark that there was."""
    return all(
        "inductor" in times for choice in choices if (times := _read_all_baselines_us(choice))
    )


def _time_us(choice: Choice) -> float:
    timing = _read_evidence(choice).get("timing") or {}
    return float(
        timing.get("candidate_us") or _read_baseline_us(choice, str(choice.candidate.schedule))
    )


def _read_baseline_us(choice: Choice, schedule: str) -> float:
    """Microseconds of a baseline; 0 for a graph without a benchmark, which Inductor keeps on either
    path.
    """
    times = _read_all_baselines_us(choice)
    return float(times.get(schedule, math.inf)) if times else 0.0


def _read_all_baselines_us(choice: Choice) -> dict[str, float]:
    times: dict[str, float] = _read_evidence(choice)["baselines_us"]
    return times


def _read_evidence(choice: Choice) -> Any:
    # `_GraphRequest` decides nothing for a graph with a missing entry.
    assert choice.entry is not None
    return choice.entry.evidence
