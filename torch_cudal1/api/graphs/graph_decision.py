"""Decides what runs for one Dynamo graph: from the cache, from another rank, or by a search.

    "swaps"           the traced graphs, each with its choice as its callable
    "inductor"        plain Inductor, so nothing is built here
    "inductor+graph"  Inductor's result for the graph, replayed as a CUDA graph
    "eager"           the graph's own operators

A warm look-up of the last three needs no trace, no judge and no kernels: their modules are imported
where a graph is traced or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.fx as fx

from torch_cudal1.api.graphs.traced_graph import (
    TracedGraph,
    select_example_tensors,
)
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
from torch_cudal1.core.inductor_start import start_compile_workers
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.capture import is_dynamic
from torch_cudal1.graph.graph_digest import compute_graph_digest, compute_graph_outline
from torch_cudal1.ir.records import QUICK
from torch_cudal1.store.context import TuneContext, make_context

if TYPE_CHECKING:
    from torch_cudal1.api.signatures.recalled_capture import CaptureRecord
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
    request = GraphRequest(gm, inputs, context, options, name, on_choices)
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
class GraphRequest:
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
            return self.build_untraced(runs, self.compile_inductor, written), Broadcast(runs)
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
            return self.build_untraced(broadcast.runs, self.compile_inductor)
        # This rank needs the graph itself; the entries name regions of it by key.
        traced = trace(self.gm, self.inputs)
        graphs = _lower_graphs(traced)
        choices = read_broadcast_choices(broadcast, [item.region for item in graphs], self.context)
        return TracedGraph(self, traced, graphs, choices).build()

    def _is_superseded(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the quick tier says less than is known: here a search is allowed, or
        one has left an entry for a graph of it, in this door or the other.
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
        from torch_cudal1.api.signatures.recalled_capture import CaptureRecord
        from torch_cudal1.graph.capture import trace
        from torch_cudal1.search.tune import choose

        record = CaptureRecord(self.gm, self.inputs, self.context)
        recalled = self._decide_recalled(record)
        if recalled is not None:
            return recalled
        start_compile_workers(self.context.device)
        try:
            traced = trace(self.gm, self.inputs)
            graphs = _lower_graphs(traced)
        except NotLowerableError as problem:
            telemetry.record("capture", "left_out", reason=problem.reason)
            return None, Broadcast("inductor")
        # Each graph is chosen for on its own: forward and backward have separate entries.
        choices = [
            choose(item.region, self.context, examples=select_example_tensors(item, self.inputs))
            for item in graphs
        ]
        # A step whose backward has no entry is not swapped in halves.
        missing = next((choice.reason for choice in choices if choice.entry is None), "")
        if missing and self.context.settings.on_miss == "quick":
            from torch_cudal1.api.graphs.quick_decision import QuickDecision

            decision = QuickDecision(self, traced, graphs, record).decide()
            self._report(decision.choices or choices)
            return decision.call, decision.make_broadcast()
        self._report(choices)
        if missing:
            return None, NoConsensus(missing)
        return TracedGraph(self, traced, graphs, choices).decide()

    def _decide_recalled(self, record: CaptureRecord) -> _Decision | None:
        """The decision without a trace, where an earlier process left a record of one and what runs
        computes what the graph's own operators compute; else None.
        """
        from torch_cudal1.api.shadow import check_recalled
        from torch_cudal1.search.tune import choose

        context = self.context
        # A search looks at the graph as if nothing were known; ranks agree on it by their traces.
        if context.settings.on_miss == "tune" or has_ranks(context.settings):
            return None
        recalled = record.recall("inference")
        if isinstance(recalled, Refusal):
            return None
        item = recalled.region
        choice = choose(item.region, context, examples=select_example_tensors(item, self.inputs))
        if choice.entry is None:
            return None
        call, broadcast = TracedGraph(self, recalled, [item], [choice]).decide()
        if isinstance(broadcast, Broadcast) and broadcast.runs == "swaps":
            own_call = self.gm.forward
            if check_recalled(choice, recalled.call, own_call, self.inputs, context) is not None:
                return None
        self._report([choice])
        return call, broadcast

    def _report(self, choices: Sequence[Choice]) -> None:
        if self.on_choices is not None:
            self.on_choices(choices)

    def can_be_graphed(self) -> bool:
        """Whether CUDA graphs are allowed, and the graph has no tensor that is no input."""
        context = self.context
        is_allowed = context.device.type == "cuda" and "graphs" not in context.settings.without
        return is_allowed and all(node.op != "get_attr" for node in self.gm.graph.nodes)

    def build_untraced(
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


def _lower_graphs(traced: TracedModule) -> list[LoweredRegion]:
    from torch_cudal1.graph.lower import lower

    return [
        lower(graph.module, static=graph.static, kind=graph.kind, name=graph.kind)
        for graph in traced.graphs
    ]
